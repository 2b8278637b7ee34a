"""A few small notes between ranks and the first of them, so that all of them come to the same end.

Invariant: a step returns on all ranks of the channel or raises on all of them. Every receive of a channel is posted
when it opens, with a number of its own, so whoever leaves early can tell the others without waiting for them, and no
later channel mistakes an old note for its own.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private
from meshpar.errors import MeshparError, PeerError, ShareError, SpecError, explain

ENTER, HAND, LEAVE = range(3)
"""The steps of a channel: what everyone has, where it is, how the block ended."""

Note = dict[str, Any]
"""What a rank tells: anything that JSON can hold."""

_FRAME_BYTES = 16384
_TEXT_CHARS = 1200  # of an error that is passed on; JSON writes up to 6 bytes for one
_PATIENCE = datetime.timedelta(days=1)  # once all have come: a rank that dies then is noticed at once
_KINDS: dict[str, type[MeshparError]] = {kind.__name__: kind for kind in (PeerError, ShareError, SpecError)}


@dataclass
class _Line:
    """Hold the gloo group of some ranks, the world it belongs to, and which of theirs it is, and its channels."""

    world: object
    ranks: tuple[int, ...]
    group: Any
    made: int
    count: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """How many channels each thread has open: calls of two threads could not be told apart by their numbers."""
    unfinished: list[Channel] = field(default_factory=list)
    """Channels that failed: a message that arrives for a buffer that is gone would stop all that come after it."""


_LINES: dict[tuple[int, ...], _Line] = {}


@dataclass
class Channel:
    """Hold the ranks that pass something on, the first of them first, and what they will send each other."""

    op: str
    ranks: tuple[int, ...]
    here: int
    timeout_s: float
    line: _Line | None = None
    number: int = 0
    inbox: dict[tuple[int, int], tuple[Tensor, Any]] = field(default_factory=dict)
    sent: list[tuple[Tensor, Any]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    has_failed: bool = False
    """Whether a step has raised, as it did on all ranks."""
    told: int = -1
    """The last step of which this rank has told the others."""
    pid: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether this is a fork of the process that opened the channel, which has no part in it."""
        return os.getpid() != self.pid

    @property
    def is_first(self) -> bool:
        """Tell whether this rank is the one that everything goes to."""
        return self.here == self.ranks[0]

    def peers(self) -> Iterable[int]:
        """Give the ranks that this one exchanges notes with."""
        return self.ranks[1:] if self.is_first else self.ranks[:1]

    def step(self, step: int, act: Callable[[], Note], combine: Callable[[list[Note]], Note] | None = None) -> Note:
        """Let every rank act, and give all of them what the first makes of their notes.

        Args:
            step: ENTER, HAND or LEAVE.
            act: gives the note of this rank.
            combine: gives the answer to all notes, in the order of the ranks; run by the first alone.

        Raises:
            SpecError, ShareError, PeerError: an act or the combining failed, or a rank was lost; on all ranks.
        """
        mine, error = _attempt(act)
        if self.is_first:
            notes = [mine, *(self._receive(step, rank) for rank in self.ranks[1:])]
            self.gone |= {rank for rank, note in zip(self.ranks, notes, strict=True) if note.get("gone")}
            answer, cause = self._verdict(notes), None
            if "failed" not in answer and combine is not None:
                answer, cause = _attempt(lambda: combine(notes))
            error, self.told = error or cause, step
            posted = [self._post(step, rank, answer) for rank in self.ranks[1:]]
            for rank, work in zip(self.ranks[1:], posted, strict=True):
                if work is not None and rank not in self.gone:
                    with contextlib.suppress(RuntimeError):  # lost after it spoke: the next to wait for it will say so
                        work.wait(datetime.timedelta(seconds=self.timeout_s))
        else:
            self.told = step
            self._post(step, self.ranks[0], mine)
            answer = self._receive(step, self.ranks[0])
        if "failed" in answer:
            self.has_failed = True
            self._keep()
            raise _KINDS[answer["kind"]](answer["failed"]) from error
        return answer

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank raised, in its block or before, without waiting for them."""
        told = f"rank {self.here}: {type(error).__name__}: {error}"[:_TEXT_CHARS]
        text = explain(
            f"{self.op}: a rank raised {'inside the block' if self.told >= HAND else 'before the block'}.",
            got=told.splitlines()[:5],
            needs="every rank to come to the end of the block",
            fix="look at the error of that rank",
        )
        for rank in self.peers():
            for step in range(self.told + 1, LEAVE + 1):
                self._post(step, rank, {"failed": text, "kind": "ShareError", "gone": True})
        self.told = LEAVE
        self._keep()

    def close(self) -> None:
        """Let other threads open channels among these ranks."""
        if self.line is not None:
            self.line.held[self.thread] -= 1
            if not self.line.held[self.thread]:
                del self.line.held[self.thread]

    def _keep(self) -> None:
        if self.line is not None:
            self.line.unfinished.append(self)

    def _verdict(self, notes: list[Note]) -> Note:
        failures = {rank: note for rank, note in zip(self.ranks, notes, strict=True) if "failed" in note}
        if not failures:
            return {}
        told = dict.fromkeys(note["failed"] for note in failures.values())
        if len(told) == 1:
            note = next(iter(failures.values()))
            return {"failed": note["failed"], "kind": note["kind"]}
        got = [f"rank {rank}: {line}" for rank, note in failures.items() for line in note["failed"].splitlines()[:2]]
        kinds = {note["kind"] for note in failures.values()}
        text = explain(f"{self.op}: failed.", got=got[:8], needs="every rank to succeed", fix="look at the first one")
        return {"failed": text[: 2 * _TEXT_CHARS], "kind": kinds.pop() if len(kinds) == 1 else "ShareError"}

    def _post(self, step: int, rank: int, note: Note) -> Any:
        assert self.line is not None
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        data = json.dumps(note, ensure_ascii=False).encode(errors="surrogatepass")
        assert len(data) <= _FRAME_BYTES, "a note is too long"
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            work = self.line.group.send([frame], self.line.ranks.index(rank), self._tag(step))
        except RuntimeError:  # that rank is lost; whoever waits for it will say so
            return None
        self.sent.append((frame, work))
        return work

    def _receive(self, step: int, rank: int) -> Note:
        frame, work = self.inbox[step, rank]
        try:
            if isinstance(work, RuntimeError):
                raise work
            work.wait(datetime.timedelta(seconds=self.timeout_s) if step == ENTER else _PATIENCE)
        except RuntimeError as error:
            where = {ENTER: "before it had said what it has", HAND: "while it handed over", LEAVE: "in its block"}
            text = explain(
                f"{self.op}: lost rank {rank}.",
                got=[f"rank {self.here} waited for rank {rank}, {where[step]}", str(error).splitlines()[0]],
                needs=f"ranks {list(self.ranks)} to make the same call within {self.timeout_s:g} s of each other",
                fix=f"look for the first error among the ranks, rank {rank} first; start again",
            )
            return {"failed": text, "kind": "PeerError", "gone": True}
        note: Note = json.loads(bytes(frame.tolist()).rstrip(b"\0").decode(errors="surrogatepass"))
        return note

    def _tag(self, step: int) -> int:
        return (self.number * (LEAVE + 1) + step) % (1 << 30) + 1


def open_channel(op: str, ranks: tuple[int, ...], timeout_s: float) -> Channel:
    """Open a channel among ranks of which this is one.

    Communication:
        At the first call for these ranks: the making of a gloo group of them alone.
    """
    here = dist.get_rank() if dist.is_initialized() else 0
    if len(ranks) == 1:
        return Channel(op, ranks, here, timeout_s)
    key = tuple(sorted(ranks))
    line = _LINES.get(key)
    if line is None or line.world is not dist.group.WORLD:
        try:
            made = 0 if line is None else line.made + 1
            group = private.gloo_group(f"meshpar.share/{key}/{made}", key, datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = explain(
                f"{op}: not all ranks came.",
                got=[f"rank {here} waited for ranks {list(key)}", str(error).splitlines()[0]],
                needs=f"all of them to make the same call within {timeout_s:g} s of each other",
                fix="look for the first error among the ranks; give the same ranks everywhere",
            )
            raise PeerError(text) from error
        line = _LINES[key] = _Line(dist.group.WORLD, key, group, made)
    line.count += 1
    channel = Channel(op, ranks, here, timeout_s, line, line.count)
    crossed = any(thread != channel.thread for thread in line.held)
    line.held[channel.thread] = line.held.get(channel.thread, 0) + 1
    for rank in channel.peers():
        for step in (ENTER, HAND, LEAVE):
            frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
            try:
                work = line.group.recv([frame], key.index(rank), channel._tag(step))
            except RuntimeError as error:  # lost already; said where it is waited for
                channel.inbox[step, rank] = frame, error
                continue
            channel.inbox[step, rank] = frame, work
    if crossed:
        text = explain(
            f"{op}: another thread of this process is in such a call with the same ranks.",
            got=f"rank {here}, ranks {list(ranks)}",
            needs="calls in one order on all ranks: those of two threads could change places",
            fix="make the calls from one thread, or let each thread wait for the other",
        )
        refusal = SpecError(text)
        channel.give_up(refusal)
        channel.close()
        raise refusal
    return channel


def _attempt(act: Callable[[], Note]) -> tuple[Note, Exception | None]:
    try:
        return act(), None
    except (SpecError, ShareError) as error:
        return {"failed": str(error)[: 2 * _TEXT_CHARS], "kind": type(error).__name__}, error
    except Exception as error:
        text = explain(
            "a rank cannot pass on what it has.",
            got=f"{type(error).__name__}: {error}"[:_TEXT_CHARS],
            needs="every rank to succeed",
            fix="look at the error of that rank",
        )
        return {"failed": text, "kind": "ShareError"}, error
