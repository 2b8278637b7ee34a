"""The two-phase writer: one rank writes each file from its first byte to its last, out of what the others send it.

Invariant: the bytes are those of the direct writer. A rank holds three buffers of a fixed size beside its pieces,
whatever the sizes of files and tensors. In each round all ranks tell whether they are well before any data moves, so
that none waits for one that has failed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.checkpoint.together import Team, everyone
from meshpar.export.folder import new_file, start_writing
from meshpar.export.memory import memory_of
from meshpar.export.plan import File, Placed
from meshpar.export.runs import runs
from meshpar.export.writers import FIX, WHAT, Job

BUFFER_BYTES = 16 << 20
"""The size of each of the three buffers."""

NUM_WRITERS = 8
"""How many files are written at a time."""

_Stretch = tuple[int, int, memoryview | None]
"""Where in the file, how many bytes, and the bytes themselves where they are this rank's."""


def write_two_phase(job: Job) -> None:
    """Let one rank write each file.

    Communication:
        In each round two all-to-alls: 16 bytes for each pair of ranks, and the data. For every few files an exchange of
        whether it went well.
    """
    files = job.plan.files
    at_once = min(len(files), job.team.size, NUM_WRITERS)
    for number in range(0, len(files), at_once):
        ranks = [job.order[i % job.team.size] for i in range(number, number + at_once)]
        rounds = _Rounds(job, dict(zip(ranks, files[number : number + at_once], strict=False)))
        everyone(job.team, WHAT, rounds.run, fix=FIX)


class _Walk:
    """Go through a file window by window, over the stretches of it that one rank answers for."""

    def __init__(self, file: File, open_tensor: Callable[[Placed], Iterator[_Stretch]]) -> None:
        self._coming = list(reversed(file.tensors))
        self._open_tensor = open_tensor
        self._found: Iterator[_Stretch] = iter(())
        self._rest: _Stretch | None = None

    def until(self, stop: int) -> Iterator[_Stretch]:
        """Give what lies before a byte of the file, and has not been given."""
        while True:
            if self._rest is None:
                self._rest = next(self._found, None)
            if self._rest is None:
                if not self._coming or self._coming[-1].offset >= stop:
                    return
                self._found = self._open_tensor(self._coming.pop())
                continue
            at, size, data = self._rest
            if at >= stop:
                return
            now = min(size, stop - at)
            left = None if data is None else data[now:]
            self._rest = (at + now, size - now, left) if now < size else None
            yield at, now, None if data is None else data[:now]


class _Rounds:
    """Write some files at once, each by a rank of its own; all ranks take part in every round.

    Args:
        job: the job.
        files: the file of each rank that writes one.
    """

    def __init__(self, job: Job, files: Mapping[int, File]) -> None:
        self.job, self.files = job, files
        self.step = BUFFER_BYTES // len(files)
        self.file = files.get(job.team.rank)
        self.failed: Exception | None = None
        self.to: dict[int, _Walk] = {}
        self.of: list[_Walk] = []

    def run(self) -> None:
        """Go through the files.

        Raises:
            Exception: what has failed on this rank, once all ranks know that something has.
        """
        self.to = {rank: _Walk(file, self._mine) for rank, file in sorted(self.files.items())}
        if self.file:
            self.of = [_Walk(self.file, self._places_of(rank)) for rank in range(self.job.team.size)]
        buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in range(3)]
        longest = max(file.num_bytes - len(file.header) for file in self.files.values())
        with contextlib.ExitStack() as stack:
            handle = self._attempt(lambda: self._open(stack))
            for begin in range(0, longest, self.step):
                if not self._round(begin, handle, *buffers):
                    break
            if self.failed is not None:
                raise self.failed

    def _attempt(self, act: Callable[[], int]) -> int:
        """Act unless something has failed here, and remember what fails: the others must hear of it first."""
        if self.failed is None:
            try:
                return act()
            except Exception as error:
                self.failed = error
        return 0

    def _open(self, stack: contextlib.ExitStack) -> int:
        if self.file is None:
            return -1
        handle = stack.enter_context(new_file(self.job.folder / self.file.name))
        _append(handle, memoryview(self.file.header), 0)
        return handle

    def _mine(self, placed: Placed) -> Iterator[_Stretch]:
        return ((at, len(data), data) for at, data in self.job.my_stretches(placed))

    def _places_of(self, rank: int) -> Callable[[Placed], Iterator[_Stretch]]:
        def places(placed: Placed) -> Iterator[_Stretch]:
            share = self.job.owners.share_of(placed.entry.name, rank)
            if share is not None:
                part, start, stop = share
                for run in runs(part, placed.entry.item_bytes, start, stop):
                    yield placed.offset + run.at, run.size, None

        return places

    def _round(self, begin: int, handle: int, send: Tensor, receive: Tensor, window: Tensor) -> bool:
        """Bring a window of each file to its writer, and write it; False where a rank has failed."""
        us = self.job.team
        given = [0] * us.size
        self._attempt(lambda: self._fill(begin, send, given))
        told = torch.tensor([[self.failed is not None, num_bytes] for num_bytes in given], dtype=torch.int64)
        heard = _swapped(told.flatten(), torch.empty_like(told).flatten(), None, None, us).view(-1, 2)
        if heard[:, 0].any():
            return False
        got = heard[:, 1].tolist()
        data = _swapped(send[: sum(given)], receive[: sum(got)], given, got, us)
        if self.file:
            self._attempt(lambda: self._write(begin, handle, memory_of(data), memory_of(window), got))
        return True

    def _fill(self, begin: int, send: Tensor, given: list[int]) -> int:
        """Put this rank's bytes for each writer into a buffer, one after the other."""
        memory, filled = memory_of(send), 0
        for rank, walk in self.to.items():
            before = filled
            for _, size, data in walk.until(len(self.files[rank].header) + begin + self.step):
                memory[filled : filled + size] = data or b""
                filled += size
            given[rank] = filled - before
        self.job.progress(filled)
        return filled

    def _write(self, begin: int, handle: int, data: memoryview, window: memoryview, got: list[int]) -> int:
        """Put what the ranks have sent in the order of the file, and append it."""
        assert self.file is not None
        first = len(self.file.header) + begin
        num_bytes = max(min(self.step, self.file.num_bytes - first), 0)
        taken = 0
        for rank, walk in enumerate(self.of):
            end = taken + got[rank]
            for at, size, _ in walk.until(first + self.step):
                window[at - first : at - first + size] = data[taken : taken + size]
                taken += size
            assert taken == end, f"rank {rank} has sent {got[rank]} bytes, {end - taken} more than the plan says"
        assert taken == num_bytes, f"{taken} bytes have come for {num_bytes} of {self.file.name}"
        _append(handle, window[:num_bytes], first)
        return num_bytes


def _swapped(given: Tensor, room: Tensor, given_sizes: list[int] | None, sizes: list[int] | None, us: Team) -> Tensor:
    """Exchange parts of a tensor between all ranks."""
    if us.size == 1:
        return given
    dist.all_to_all_single(room, given, sizes, given_sizes, group=us.group)
    return room


def _append(handle: int, data: memoryview, at: int) -> None:
    """Write bytes at the end of a file, which is at `at`."""
    while data:
        done = os.write(handle, data)
        start_writing(handle, at, done)
        data, at = data[done:], at + done
