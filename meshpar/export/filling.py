"""The bytes of files into the pieces of this rank: its own runs, and as few calls as they need.

Invariant: beside the pieces, a rank holds a gap and a window. Runs go from the file to where they belong; what lies in
short gaps between them is read into a place that nobody looks at, so that many short runs are one call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshpar.export.headers import Stored
from meshpar.export.memory import memory_of
from meshpar.export.runs import Part, Run, runs

WINDOW_BYTES = 4 << 20
"""The most that is read before it is converted, or copied to a device or to memory with strides."""

GAP_BYTES = 8 << 10
"""A gap that is shorter costs less to read than another call would."""

_CALL_BYTES = 1 << 30  # Linux reads a little less than 2 GiB in a call
_CALL_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16


@dataclass(frozen=True)
class Filling:
    """Hold a piece, which part of a tensor it is, and where the tensor lies.

    Args:
        piece: what this rank holds, detached.
        part: which part that is.
        stored: the tensor, of the same number of elements in the same order.
    """

    piece: Tensor
    part: Part
    stored: Stored


def fill(fillings: Iterable[Filling]) -> int:
    """Read pieces, file by file, in the order of their bytes; give the number of bytes read into them.

    Raises:
        OSError: a file cannot be read, or ends before its time.
    """
    total = 0
    by_file: dict[str, list[Filling]] = {}
    for f in fillings:
        by_file.setdefault(f.stored.file, []).append(f)
    for path, wanted in sorted(by_file.items()):
        with _Source(path) as source:
            for f in sorted(wanted, key=lambda f: f.stored.begin):
                total += _fill(source, f)
    return total


def differ(first: Filling, second: Filling) -> bool:
    """Tell whether two tensors, of one dtype, differ in what belongs to a piece."""
    item_bytes = first.stored.dtype.itemsize
    num_bytes = first.piece.numel() * item_bytes
    room = [bytearray(min(WINDOW_BYTES, num_bytes)) for _ in range(2)]
    with _Source(first.stored.file) as one, _Source(second.stored.file) as other:
        for a in range(0, num_bytes, WINDOW_BYTES):
            b = min(a + WINDOW_BYTES, num_bytes)
            for source, f, data in zip((one, other), (first, second), room, strict=True):
                source.read(f.stored.begin, _moved(runs(f.part, item_bytes, a, b), a), memoryview(data)[: b - a])
            if memoryview(room[0])[: b - a] != memoryview(room[1])[: b - a]:
                return True
    return False


def _fill(source: _Source, f: Filling) -> int:
    piece, item_bytes = f.piece, f.stored.dtype.itemsize
    if piece.numel() == 0:
        return 0
    if piece.dtype == f.stored.dtype and piece.device.type == "cpu" and piece.is_contiguous():
        source.read(f.stored.begin, runs(f.part, item_bytes), memory_of(piece))
    else:
        window = torch.empty(min(max(WINDOW_BYTES // item_bytes, 1), piece.numel()), dtype=f.stored.dtype)
        with torch.inference_mode(mode=piece.is_inference()):
            for first, block in _blocks(piece, window.numel()):
                a, num_bytes = first * item_bytes, block.numel() * item_bytes
                source.read(
                    f.stored.begin,
                    _moved(runs(f.part, item_bytes, a, a + num_bytes), a),
                    memory_of(window)[:num_bytes],
                )
                block.copy_(window[: block.numel()].view(block.shape))
    if not piece.is_inference():
        torch.autograd.graph.increment_version(piece)
    return piece.numel() * item_bytes


def _moved(found: Iterable[Run], start: int) -> Iterator[Run]:
    """Count the places of runs in a piece from the begin of a window."""
    return (Run(run.at, run.begin - start, run.size) for run in found)


def _blocks(x: Tensor, most: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor into parts of its elements in order, each with the number of its first one."""
    if x.numel() <= most:
        yield first, x
        return
    row = x.numel() // x.shape[0]
    if row > most:
        for i in range(x.shape[0]):
            yield from _blocks(x[i], most, first + i * row)
        return
    step = most // row
    for i in range(0, x.shape[0], step):
        yield first + i * row, x[i : i + step]


class _Source:
    """Read from a file: a context that opens and closes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.gap = memoryview(bytearray(GAP_BYTES))

    def __enter__(self) -> _Source:
        self.handle = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def read(self, begin: int, wanted: Iterable[Run], memory: memoryview) -> None:
        """Read runs of the tensor that begins at a byte of the file into their places in memory."""
        buffers: list[memoryview] = []
        at = end = begin  # the bytes of the file that the buffers stand for
        for run in wanted:
            place, gap = begin + run.at, begin + run.at - end
            if buffers and (gap > GAP_BYTES or len(buffers) + 2 > _CALL_BUFFERS):
                self._read(at, end - at, buffers)
                buffers = []
            if not buffers:
                at = end = place
            elif gap:
                buffers.append(self.gap[:gap])
            buffers.append(memory[run.begin : run.begin + run.size])
            end = place + run.size
        if buffers:
            self._read(at, end - at, buffers)

    def _read(self, at: int, num_bytes: int, buffers: Sequence[memoryview]) -> None:
        if num_bytes <= _CALL_BYTES:
            done = os.preadv(self.handle, buffers, at)
            if done == num_bytes:
                return
        # A call may give less than was asked for: go on, buffer by buffer.
        for buffer in buffers:
            while buffer:
                done = os.preadv(self.handle, [buffer[:_CALL_BYTES]], at)
                if not done:
                    text = f"{self.path} ends at byte {at}"
                    raise OSError(text)
                buffer, at = buffer[done:], at + done
