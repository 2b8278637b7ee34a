"""The error of a communication that a rank did not come to: it names the op, the axis, its ranks, and who is gone.

Invariant: an error that speaks of no peer, while all of them are there, stays as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from meshpar import lifelines
from meshpar.errors import MeshparError, PeerError, explain

_WORDS = ("closed", "reset", "timeout", "timed out", "refused", "broken pipe", "unreachable", "aborted", "remote")
_LATE = ("timeout", "timed out")
_PATIENCE_S = 2.0  # a process that is dying closes its connections one after the other

NEEDS = "every rank of the axis to be alive and to run the same ops in the same order"
FIX = "look at the log of the ranks named; the first to fail says why. Restart the job from its last checkpoint"


@contextlib.contextmanager
def naming(groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None, axis: str, label: str) -> Iterator[None]:
    """Run a collective; one that fails for a peer is a `PeerError` that names it.

    Args:
        groups: of the collective, or of several of which one may fail; None is all ranks.
        axis: its name.
        label: what `record.here` gave: "path of the module|op".

    Communication:
        None but after a failure: who is still there, see `lifelines`.

    Raises:
        PeerError: a rank died, or did not come within the timeout of the group.
    """
    try:
        yield
    except MeshparError:
        raise
    except RuntimeError as error:
        ranks = ranks_of(groups)
        said = who_is_gone(error)
        if not is_about_peers(error) and not any("gone" in line for line in said):
            raise
        waited = f"rank {dist.get_rank()} waited for global rank(s) {[r for r in ranks if r != dist.get_rank()]}"
        raise PeerError(peer_text(label, axis, [waited, *said], error)) from error


def ranks_of(groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None) -> list[int]:
    """Give the global ranks of one or several groups, None being all, in order."""
    several = groups if isinstance(groups, Sequence) else [groups]
    return sorted({rank for group in several for rank in dist.get_process_group_ranks(group)})


def peer_text(label: str, axis: str, got: Sequence[str], error: Exception) -> str:
    """Lay out the error of a communication that failed for a peer."""
    where, _, op = label.rpartition("|")
    told = str(error).splitlines()
    last = told[0][:300] if told else type(error).__name__
    return explain(f"{where or 'root'}: {op} lost a peer on axis {axis}.", got=[*got, last], needs=NEEDS, fix=FIX)


def is_about_peers(error: Exception) -> bool:
    """Tell whether an error of a backend is about a connection or a time limit."""
    return any(word in str(error).lower() for word in _WORDS)


def who_is_gone(error: Exception) -> list[str]:
    """Say which ranks are gone, in lines for the text of an error; none where nothing can be known.

    All ranks of the job are asked: those of a group fail one after the other, once one has given up on a rank that is
    not in it.
    """
    world, me = dist.group.WORLD, dist.get_rank()
    others = [rank for rank in range(dist.get_world_size()) if rank != me]
    late = any(word in str(error).lower() for word in _LATE)
    end = time.monotonic() + _PATIENCE_S
    while True:
        found = lifelines.roll_call(world, others)
        if found["gone"] or late or not any(found.values()) or time.monotonic() > end:
            break
        time.sleep(0.05)
    if not (found["gone"] or found["here"]):  # a firewall, or lines that were never exchanged
        return []
    lines = [f"gone: global rank(s) {found['gone']}"] if found["gone"] else []
    lines += [f"no answer from the host(s) of global rank(s) {found['silent']}"] if found["silent"] else []
    if not lines:
        lines = ["all ranks are alive: one is late, runs another op, or has given up after an error"]
    return lines
