"""Which processes of a job are still there, asked once a communication has failed: no torch.

Invariant: while all is well nothing is sent and no thread runs. A process holds a listening socket for as long as it
lives, and never looks at it: the kernel answers for a process that computes, waits or is stopped, and refuses as soon
as it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshpar.addresses import reachable_address

Place = tuple[str, int]
"""Address and port of a line."""

RECORD_BYTES = 64
"""The room that the text of a line needs."""

_AT_ONCE = 128  # sockets that are open at a time: a process may have few


@dataclass
class _Lines:
    """Hold the socket of this process, and the lines of all ranks of a world."""

    own: socket.socket | None = None
    world: object = None
    places: dict[int, Place] = field(default_factory=dict)

    def leave(self) -> None:
        """Forget everything: a child of this process is no rank, and must not answer for one."""
        if self.own is not None:
            self.own.close()
        self.own, self.world, self.places = None, None, {}


_LINES = _Lines()
os.register_at_fork(after_in_child=_LINES.leave)


def own_line() -> str:
    """Give the line of this process as text, "address port"; empty where it can have none."""
    if _LINES.own is None:
        address = reachable_address()
        try:
            _LINES.own = socket.create_server((address, 0), family=_family(address), backlog=4096)
        except OSError:
            return ""
    address, port = _LINES.own.getsockname()[:2]
    return f"{address} {port}"


def learn(world: object, lines: Sequence[str]) -> None:
    """Keep the lines of all ranks of a world, as `own_line` gave them, in rank order."""
    parts = [line.split() for line in lines]
    places = {rank: (p[0], int(p[1])) for rank, p in enumerate(parts) if len(p) == 2 and p[1].isdecimal()}
    _LINES.world, _LINES.places = world, places


def is_known(world: object) -> bool:
    """Tell whether the lines of a world have been learnt."""
    return world is not None and _LINES.world is world


def roll_call(world: object, ranks: Iterable[int], *, wait_s: float = 2.0) -> dict[str, list[int]]:
    """Say which ranks of a world are "here", "gone", or "silent": their host does not answer.

    Ranks whose lines are not known are left out, and those that this process has no sockets left to ask: the question
    never hides the error that it is asked for.

    Args:
        world: what the lines were learnt for; those of another one count for nothing.
        ranks: whom to ask.
        wait_s: how long to wait for hosts that do not answer.

    Communication:
        A connection to each of them, which no process needs to accept.
    """
    places = {rank: _LINES.places[rank] for rank in ranks if is_known(world) and rank in _LINES.places}
    return asked(places, wait_s=wait_s)


def asked(places: Mapping[int, Place], *, wait_s: float) -> dict[str, list[int]]:
    """Connect to lines, and sort their ranks by what came of it."""
    found: dict[str, list[int]] = {"here": [], "gone": [], "silent": []}
    ranks, end = list(places), time.monotonic() + wait_s
    for at in range(0, len(ranks), _AT_ONCE):
        few = {rank: places[rank] for rank in ranks[at : at + _AT_ONCE]}
        with contextlib.suppress(OSError):  # a process may open no more sockets
            for rank, answer in _answers(few, max(end, time.monotonic() + 0.1)).items():
                found[answer].append(rank)
    return {answer: sorted(these) for answer, these in found.items()}


def _answers(places: Mapping[int, Place], end: float) -> dict[int, str]:
    answers = dict.fromkeys(places, "silent")
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for rank, (address, port) in places.items():
            line = stack.enter_context(socket.socket(_family(address), socket.SOCK_STREAM))
            line.settimeout(0.0)
            code = line.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                waiting.register(line, selectors.EVENT_WRITE, rank)
            else:
                answers[rank] = _meaning(line, code)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                line = key.fileobj  # type: ignore[assignment]
                waiting.unregister(line)
                answers[key.data] = _meaning(line, line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    return answers


def _meaning(line: socket.socket, code: int) -> str:
    if code in (errno.ECONNREFUSED, errno.ECONNRESET):  # reset: it goes while it is asked
        return "gone"
    if code:
        return "silent"
    try:
        # The kernel may pick the port that nobody holds any more for this end, too, and connect it with itself.
        return "gone" if line.getsockname() == line.getpeername() else "here"
    except OSError:  # it answered, and went before this question
        return "gone"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
