"""The bytes of a piece, as memory that can be written from, without a copy of the piece.

Invariant: the bytes come in the order of the piece. A piece that lies side by side in host memory is read where it
is; of any other (strided, on a device, conjugated) one window at a time is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

from torch import Tensor

from meshpar.export.runs import Run

WINDOW_BYTES = 4 << 20
"""How many bytes of a piece are copied at a time."""


def memory_of(x: Tensor) -> memoryview:
    """Give the memory of a contiguous tensor in host memory; it is good as long as the tensor is."""
    num_bytes = x.numel() * x.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(x.data_ptr())).cast("B")


def stretches(piece: Tensor, runs: Iterable[Run]) -> Iterator[tuple[int, memoryview]]:
    """Give the bytes of runs of a piece, each with its place in the whole tensor; a long run may come in several.

    Args:
        piece: this rank's piece of a tensor.
        runs: ascending runs of it.
    """
    piece = piece.detach()
    wanted = iter(runs)
    run = next(wanted, None)
    for begin, window in _windows(piece, 0):
        if run is None:
            return
        end = begin + window.numel() * window.element_size()
        if run.begin >= end:
            continue
        data = window if window is piece else window.resolve_conj().resolve_neg().to("cpu").contiguous()
        memory = memory_of(data)
        while run is not None and run.begin < end:
            stop = min(run.begin + run.size, end)
            yield run.at, memory[run.begin - begin : stop - begin]
            left = run.begin + run.size - stop
            run = Run(run.at + run.size - left, stop, left) if left else next(wanted, None)


def _windows(x: Tensor, begin: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a piece into windows: itself where its memory can be read as it is."""
    num_bytes = x.numel() * x.element_size()
    if not num_bytes:
        return
    readable = x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()
    if begin == 0 and readable:
        yield 0, x
        return
    yield from _cut(x, begin)


def _cut(x: Tensor, begin: int) -> Iterator[tuple[int, Tensor]]:
    num_bytes = x.numel() * x.element_size()
    if num_bytes <= WINDOW_BYTES:
        yield begin, x[...]
        return
    row_bytes = num_bytes // x.shape[0]
    if row_bytes > WINDOW_BYTES:
        for i in range(x.shape[0]):
            yield from _cut(x[i], begin + i * row_bytes)
        return
    step = WINDOW_BYTES // row_bytes
    for i in range(0, x.shape[0], step):
        yield begin + i * row_bytes, x[i : i + step]
