"""What is written and by whom; and the direct writer: every rank writes its own bytes in place.

Invariant: each byte is written once, and none is read. No rank holds more of a tensor than its own piece, and a window
of that where it does not lie side by side. Every step ends by all ranks hearing whether it failed on one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.checkpoint.together import Team, everyone
from meshpar.export.folder import is_large, new_file, write_all
from meshpar.export.holders import Owners
from meshpar.export.memory import stretches
from meshpar.export.plan import File, Placed, Plan
from meshpar.export.runs import Part, runs

WHAT = "export: the files cannot be written."
FIX = "check the space and the rights on the disk, and that all ranks see the same folder; what was there is as it was"

VISIBLE_S = 30.0
"""How long a rank waits for a file to show that another has made: some file systems take their time."""

Progress = Callable[[int], None]
"""Is told of bytes of this rank that were written."""


@dataclass(frozen=True)
class Job:
    """Hold what is written, where, and by whom.

    Args:
        team: the ranks.
        folder: where the files come.
        plan: the files.
        owners: who answers for which bytes.
        state: what this rank has.
        order: ranks in the order in which they take files.
        progress: is told of bytes of this rank that were written.
    """

    team: Team
    folder: Path
    plan: Plan
    owners: Owners
    state: Mapping[str, Tensor]
    order: Sequence[int]
    progress: Progress

    def my_share(self, placed: Placed) -> tuple[Part, int, int] | None:
        """Give what this rank answers for of a tensor."""
        return self.owners.share_of(placed.entry.name, self.team.rank)

    def my_stretches(self, placed: Placed) -> Iterator[tuple[int, memoryview]]:
        """Give the bytes that this rank answers for of a tensor, each with its place in the file."""
        share = self.my_share(placed)
        if share is not None:
            part, start, stop = share
            piece = _piece(self.state[placed.entry.name])
            for at, data in stretches(piece, runs(part, placed.entry.item_bytes, start, stop)):
                yield placed.offset + at, data


def _piece(x: Tensor) -> Tensor:
    return private.piece_of(x) if isinstance(x, DTensor) else x


def write_direct(job: Job) -> None:
    """Let every rank write its bytes in place.

    Communication:
        Two exchanges of whether it went well.
    """
    rank, size, files = job.team.rank, job.team.size, job.plan.files
    everyone(job.team, WHAT, lambda: _make(job, files[job.order.index(rank) :: size]), fix=FIX)
    begin = rank * len(files) // size  # ranks begin with different files
    everyone(job.team, WHAT, lambda: _fill(job, (*files[begin:], *files[:begin])), fix=FIX)


def _make(job: Job, files: Sequence[File]) -> None:
    """Make files of their full size, with their headers."""
    for file in files:
        with new_file(job.folder / file.name) as handle:
            os.ftruncate(handle, file.num_bytes)
            write_all(handle, file.header, 0)


def _fill(job: Job, files: Sequence[File]) -> None:
    """Write this rank's bytes into files that are there."""
    for file in files:
        _fill_one(job, file)


def _fill_one(job: Job, file: File) -> None:
    mine = [placed for placed in file.tensors if job.my_share(placed)]
    if not mine:
        return
    handle = open_shown(job.folder / file.name)
    # Columns come last: their many small writes take the processor while the disk has the large ones to write.
    mine.sort(key=lambda placed: is_large(len(next(job.my_stretches(placed), (0, b""))[1])), reverse=True)
    try:
        done = 0
        for at, data in (stretch for placed in mine for stretch in job.my_stretches(placed)):
            write_all(handle, data, at)
            done += len(data)
            if is_large(done):
                job.progress(done)
                done = 0
        job.progress(done)
        os.fsync(handle)
    finally:
        os.close(handle)


def open_shown(path: Path, flags: int = os.O_WRONLY, *, folder_shows: bool = True) -> int:
    """Open a file that another rank has made, once it shows.

    Args:
        path: the file.
        flags: how it is opened.
        folder_shows: whether its folder has been seen; if that is gone, there is nothing to wait for.
    """
    begun, wait = time.monotonic(), 0.01
    while True:
        try:
            return os.open(path, flags)
        except OSError as error:
            late = time.monotonic() - begun > VISIBLE_S
            if error.errno not in (errno.ENOENT, errno.ESTALE) or late:
                raise
        try:
            os.listdir(path.parent)  # some clients look again then
        except OSError:
            if folder_shows:
                raise
        time.sleep(wait)
        wait = min(2 * wait, 1.0)
