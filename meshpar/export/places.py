"""Where ranks run and where a folder lies, to choose a writer.

Invariant: ranks tell what they see, and the choice follows from what all have told: it is the same on every rank.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshpar.errors import SpecError, explain

WRITERS = ("auto", "direct", "two-phase")

COHERENT = ("lustre", "gpfs", "beegfs", "ceph", "gfs2", "ocfs2", "pvfs2", "orangefs")
"""File systems of many hosts that keep what they write in parts of one file, as one host does."""

ONE_HOST = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "zfs", "f2fs", "overlay", "nfs", "nfs4", "bcachefs", "jfs")
"""File systems that take writes anywhere in a file from several processes of one host."""


@dataclass(frozen=True)
class Seen:
    """Hold what a rank sees: its host, and the file system of the folder."""

    host: str
    file_system: str


def host_id() -> str:
    """Name this host, the same for all its processes, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode()}"


def file_system_of(path: str | os.PathLike[str]) -> str:
    """Name the type of the file system of a path; "" where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    where = os.path.realpath(path)
    found, longest = "", -1
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        if (where == point or where.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            found, longest = right.split()[0], len(point)
    return found


def check_writer(writer: object) -> None:
    """Check the name of a writer.

    Raises:
        SpecError: there is no such.
    """
    if writer not in WRITERS:
        needs = " or ".join(f'"{name}"' for name in WRITERS)
        raise SpecError(explain("export: unknown writer.", got=repr(writer), needs=needs, fix='writer="auto"'))


def chosen_writer(writer: str, seen: Sequence[Seen]) -> str:
    """Choose the writer.

    Example:
        >>> chosen_writer("auto", [Seen("a", "ext4"), Seen("a", "ext4")])
        'direct'
        >>> chosen_writer("auto", [Seen("a", "nfs4"), Seen("b", "nfs4")])
        'two-phase'
    """
    if writer != "auto":
        return writer
    hosts, kinds = {one.host for one in seen}, {one.file_system for one in seen}
    known = COHERENT if len(hosts) > 1 else ONE_HOST + COHERENT
    return "direct" if kinds <= set(known) else "two-phase"


def spread(seen: Sequence[Seen]) -> list[int]:
    """Order ranks so that those next to each other are on different hosts.

    Example:
        >>> spread([Seen("a", ""), Seen("a", ""), Seen("b", ""), Seen("b", "")])
        [0, 2, 1, 3]
    """
    before: dict[str, int] = {}
    turns = []
    for rank, one in enumerate(seen):
        turns.append((before.get(one.host, 0), rank))
        before[one.host] = before.get(one.host, 0) + 1
    return [rank for _, rank in sorted(turns)]
