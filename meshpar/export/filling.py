"""The bytes of files into the pieces of this rank: its own runs, and as few calls as they need.

Invariant: beside the pieces, a rank holds a window and a gap. Long runs go from the file to where they belong. Short
runs that lie close to each other are read with all that is between them, a window at a time, and picked out of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshpar.export.headers import Stored
from meshpar.export.memory import memory_of
from meshpar.export.runs import Part, Run, runs

WINDOW_BYTES = 4 << 20
"""The most that is read before it is picked from, converted, or copied to a device or to memory with strides."""

GAP_BYTES = 16 << 10
"""A gap that is shorter costs less to read than another call would."""

SHORT_BYTES = 64 << 10
"""A run that is shorter is not worth a place of its own in a call."""

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
    room = _Room()
    for path, wanted in sorted(by_file.items()):
        with _Source(path) as source:
            for f in sorted(wanted, key=lambda f: f.stored.begin):
                total += _fill(source, f, room)
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


def _fill(source: _Source, f: Filling, room: _Room) -> int:
    piece, item_bytes = f.piece, f.stored.dtype.itemsize
    if piece.numel() == 0:
        return 0
    if (dim := _dim_of_short_runs(f)) is not None:
        _pick(source, f, dim, room)
    elif piece.dtype == f.stored.dtype and piece.device.type == "cpu" and piece.is_contiguous():
        source.read(f.stored.begin, runs(f.part, item_bytes), memory_of(piece))
    else:
        window = room.of(min(max(WINDOW_BYTES // item_bytes, 1), piece.numel()), f.stored.dtype)
        with torch.inference_mode(mode=piece.is_inference()):
            for first, block in _blocks(piece, window.numel()):
                a, num_bytes = first * item_bytes, block.numel() * item_bytes
                source.read(
                    f.stored.begin,
                    _moved(runs(f.part, item_bytes, a, a + num_bytes), a),
                    memory_of(window)[:num_bytes],
                )
                block.copy_(window[: block.numel()].view(block.shape))
    return piece.numel() * item_bytes


def _dim_of_short_runs(f: Filling) -> int | None:
    """Give the dim along which a piece is short runs with short gaps; None where it is something else."""
    shape, sizes, item_bytes = f.part.shape, f.part.sizes, f.stored.dtype.itemsize
    cut = [dim for dim, n in enumerate(shape) if sizes[dim] != n]
    if not cut or not f.piece.is_contiguous():
        return None
    dim = cut[-1]
    inner = math.prod(shape[dim + 1 :]) * item_bytes
    num = len(f.part.rows[dim])
    run, gap = sizes[dim] * inner // num, (shape[dim] - sizes[dim]) * inner // num
    close = run <= SHORT_BYTES and gap <= GAP_BYTES and shape[dim] * inner <= WINDOW_BYTES
    return dim if close and num * math.prod(sizes[:dim]) > 1 else None


def _pick(source: _Source, f: Filling, dim: int, room: _Room) -> None:
    """Read all that a dim has, for some of the indices before it at a time, and pick what belongs to the piece."""
    shape, sizes, dtype = f.part.shape, f.part.sizes, f.stored.dtype
    lines, inner = math.prod(sizes[:dim]), math.prod(shape[dim + 1 :])
    line_bytes = shape[dim] * inner * dtype.itemsize
    wide = Part(shape, (*f.part.rows[:dim], *(((0, n),) for n in shape[dim:])))
    num = min(WINDOW_BYTES // line_bytes, lines)
    window = room.of(num * shape[dim] * inner, dtype).view(num, shape[dim], inner)
    memory, piece = memory_of(window), f.piece.view(lines, sizes[dim], inner)
    with torch.inference_mode(mode=piece.is_inference()):
        for first in range(0, lines, num):
            last = min(first + num, lines)
            a, b = first * line_bytes, last * line_bytes
            source.read(f.stored.begin, _moved(runs(wide, dtype.itemsize, a, b), a), memory[: b - a])
            at = 0
            for lo, hi in f.part.rows[dim]:
                piece[first:last, at : at + hi - lo].copy_(window[: last - first, lo:hi])
                at += hi - lo


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


class _Room:
    """Lend the memory of a window, the same again for each tensor."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)

    def of(self, num: int, dtype: torch.dtype) -> Tensor:
        """Give room for some elements."""
        num_bytes = num * dtype.itemsize
        if self.data.numel() < num_bytes:
            self.data = torch.empty(0, dtype=torch.uint8)  # before the next one is made
            self.data = torch.empty(num_bytes, dtype=torch.uint8)
        return self.data[:num_bytes].view(dtype)


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
