"""Pools over windows: every rank fetches the rows under its outputs that exist, and pools them.

Invariant: no row of padding is ever made for a maximum, and for a mean only as many as torch counts. An output whose
window reaches over the end of the grid is pooled by itself, with a kernel as long as what is left of its window, so
that ties, NaN, -inf and divisors are torch's own; all other outputs are pooled in one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.intervals import Interval, Rows, chunks, take, window
from meshpar.registry import rule
from meshpar.rules.spatial import settle, sharded_dims
from meshpar.rules.windows import (
    Run1,
    Segment,
    checked_shape,
    fetch_or_cut,
    global_index,
    only_read,
    per_dim,
    run_segments,
)

Size = int | Sequence[int]

_MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MAX_INDICES: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_MEAN: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_POWER: dict[int, Callable[..., Tensor]] = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}


def _read_interval(outputs: Interval, n: int, kernel: int, stride: int, dilation: int, pad: int) -> Interval:
    """Give the rows of the grid from the first to the last under the windows of some outputs, as padded rows."""
    start, stop = window(outputs, kernel, stride, dilation)
    start, stop = max(start, pad), min(stop, pad + n)
    return (start, stop) if stop > start else (pad, pad)


@functools.lru_cache(maxsize=16384)
def _wanted_rows(n: int, p: int, out: int, kernel: int, stride: int, dilation: int, pad: int) -> tuple[Rows, ...]:
    wanted = []
    for outputs, own in zip(chunks(out, p), chunks(n, p), strict=True):
        start, stop = _read_interval(outputs, n, kernel, stride, dilation, pad)
        rows = take(((0, n, 1),), start - pad, stop - pad)
        wanted.append(only_read(rows, start, outputs, own, kernel=kernel, stride=stride, dilation=dilation))
    return tuple(wanted)


@functools.lru_cache(maxsize=16384)
def segments(
    outputs: Interval, n: int, kernel: int, stride: int, dilation: int, pad: int, *, counted: bool
) -> tuple[Segment, ...]:
    """Split the outputs of a rank into those with a whole window, which go together, and the others.

    Args:
        outputs: outputs of the rank.
        n: rows of the grid.
        kernel: rows under one window.
        stride: distance of windows.
        dilation: distance of the rows under a window.
        pad: rows of padding before the first row, and after the last.
        counted: whether padding counts as rows of zeros (a mean with `count_include_pad`).

    Example:
        >>> [(s.outputs, s.row, s.rows, s.size) for s in segments((0, 3), 9, 3, 1, 1, 1, counted=False)]
        [(1, 0, 2, 2), (2, 0, 4, 3)]
    """
    a, b = outputs
    span = (kernel - 1) * dilation + 1
    if b <= a:
        return (Segment(0, 0, 0, 0, kernel, extra=span),)
    first = _read_interval(outputs, n, kernel, stride, dilation, pad)[0] - pad
    inside_from = min(max(-(-pad // stride), a), b)
    inside_to = max(min((n - span + pad) // stride + 1, b), inside_from)

    def single(i: int) -> Segment:
        start = i * stride - pad
        skipped = max(-(start // dilation), 0)  # taps before row 0
        taps = min(kernel, -((start - n) // dilation)) - skipped
        row = start + skipped * dilation
        if taps <= 0:  # a dilated window may straddle a grid of few rows: torch gives -inf
            return Segment(1, 0, 0, row, kernel, extra=span)
        rows = (taps - 1) * dilation + 1
        size = min(start + kernel, n + pad) - start if counted else taps
        return Segment(1, row - first, rows, row, size, extra=size - taps if counted else 0)

    out = [single(i) for i in range(a, inside_from)]
    if inside_to > inside_from:
        row = inside_from * stride - pad
        rows = (inside_to - inside_from - 1) * stride + span
        out.append(Segment(inside_to - inside_from, row - first, rows, row, kernel))
    return (*out, *(single(i) for i in range(inside_to, b)))


def lowest(dtype: torch.dtype) -> float:
    """Give the number that no other is below."""
    return float("-inf") if dtype.is_floating_point else float(torch.iinfo(dtype).min)


def _pooled(
    x: DTensor,
    shape: tuple[int, ...],
    op: str,
    run: Callable[[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]], tuple[Tensor, ...]],
    windows: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    *,
    counted: bool = False,
    fill: float = 0.0,
) -> tuple[DTensor, ...]:
    """Fetch, pool and make activations of the outputs, which are sharded as x.

    Args:
        x: activation.
        shape: global shape of the output.
        op: name for the record.
        run: gives the outputs for (piece, kernels, padding, first global rows).
        windows: kernel, stride, dilation and padding of each spatial dim.
        counted: see `segments`.
        fill: value of padding rows.
    """
    kernels, strides, dilations, pads = windows
    first = x.dim() - len(kernels)
    x = settle(x, range(x.dim()), op, nested=range(first))
    mesh = x.device_mesh
    piece = pieces.local(x)
    plan = []
    for dim, axis in sharded_dims(x).items():
        i = dim - first
        if i < 0:
            continue
        n, p, me = x.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)
        want = _wanted_rows(n, p, shape[dim], kernels[i], strides[i], dilations[i], pads[i])
        piece = fetch_or_cut(piece, dim, n, want, mesh, axis, op, pieces.axis_chunks(mesh, axis, n), me)
        outputs = chunks(shape[dim], p)[me]
        parts = segments(outputs, n, kernels[i], strides[i], dilations[i], pads[i], counted=counted)
        plan.append((dim, parts))
    cut = {dim - first for dim, _ in plan}
    inner = tuple(0 if i in cut else pad for i, pad in enumerate(pads))
    local_run: Run1 = lambda part, sizes, rows: run(part, sizes, inner, rows)  # noqa: E731
    results = run_segments(piece, plan, local_run, kernels, fill=fill)
    return tuple(pieces.whole(result, mesh, x.placements, shape) for result in results)


def _windows(
    num_dims: int, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    kernels = per_dim(kernel_size, num_dims)
    strides = kernels if stride is None or stride in ((), []) else per_dim(stride, num_dims)
    return kernels, strides, per_dim(dilation, num_dims), per_dim(padding, num_dims)


def max_pool(
    x: DTensor,
    num_dims: int,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    ceil_mode: bool = False,
    indices: bool = False,
    op: str = "",
) -> tuple[DTensor, ...]:
    """Give the maxima under windows and, if asked for, their flat positions in the global plane.

    Args:
        x: global shape (B, C, *spatial) or (C, *spatial).
        num_dims: number of spatial dims.
        kernel_size: as in torch.
        stride: as in torch.
        padding: as in torch.
        dilation: as in torch.
        ceil_mode: as in torch.
        indices: whether to give the positions too.
        op: name for the record.

    Returns:
        Global shape (B, C, *outputs), sharded as `x`, in canonical layout.

    Communication:
        One exchange for each sharded spatial dim: the rows under this rank's outputs that other ranks own.
    """
    op = op or f"F.max_pool{num_dims}d"
    args = (kernel_size, stride, padding, dilation, ceil_mode)
    shape = checked_shape(_MAX_INDICES[num_dims], x, num_dims, *args)
    windows = _windows(num_dims, kernel_size, stride, padding, dilation)
    _, strides, dilations, _ = windows
    plane = tuple(x.shape[-num_dims:])

    def run(part: Tensor, sizes: tuple[int, ...], pads: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
        if not indices:
            return (_MAX[num_dims](part, sizes, strides, pads, dilations, ceil_mode),)
        values, where = _MAX_INDICES[num_dims](part, sizes, strides, pads, dilations, ceil_mode)
        return values, global_index(where, part.shape[-num_dims:], rows, plane)

    return _pooled(x, shape, op, run, windows, fill=lowest(x.dtype))


def mean_pool(
    x: DTensor,
    num_dims: int,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    op: str = "",
) -> DTensor:
    """Give the means under windows; arguments, result and communication as in `max_pool`."""
    op = op or f"F.avg_pool{num_dims}d"
    last = () if num_dims == 1 else (divisor_override,)
    args = (kernel_size, () if stride is None else stride, padding, ceil_mode, count_include_pad, *last)
    shape = checked_shape(_MEAN[num_dims], x, num_dims, *args)
    windows = _windows(num_dims, kernel_size, stride, padding, 1)
    _, strides, _, _ = windows

    def run(part: Tensor, sizes: tuple[int, ...], pads: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (_MEAN[num_dims](part, sizes, strides, pads, ceil_mode, count_include_pad, *last),)

    counted = count_include_pad and divisor_override is None
    return _pooled(x, shape, op, run, windows, counted=counted)[0]


def power_pool(
    x: DTensor,
    num_dims: int,
    norm_type: float,
    kernel_size: Size,
    stride: Size | None = None,
    *,
    ceil_mode: bool = False,
) -> DTensor:
    """Give the power means under windows, by torch's own formula; communication as in `max_pool`.

    Source: `torch.nn.functional.lp_pool2d`.
    """
    op = f"F.lp_pool{num_dims}d"
    checked_shape(_POWER[num_dims], x, num_dims, norm_type, kernel_size, stride, ceil_mode)
    x = settle(x, range(x.dim()), op, nested=range(x.dim() - num_dims))
    if abs(norm_type) == float("inf"):
        sign = 1 if norm_type > 0 else -1
        sizes = _mapped(lambda piece: piece.abs() if sign > 0 else -piece.abs(), x)
        (best,) = max_pool(sizes, num_dims, kernel_size, stride, ceil_mode=ceil_mode, op=op)
        return best if sign > 0 else _mapped(torch.neg, best)
    powers = _mapped(lambda piece: piece.pow(norm_type), x)
    means = mean_pool(powers, num_dims, kernel_size, stride, ceil_mode=ceil_mode, op=op)
    num_cells = torch.Size(per_dim(kernel_size, num_dims)).numel()

    def root(mean: Tensor) -> Tensor:
        return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(num_cells).pow(1.0 / norm_type)

    return _mapped(root, means)


def _mapped(function: Callable[[Tensor], Tensor], x: DTensor) -> DTensor:
    return pieces.whole(function(pieces.local(x)), x.device_mesh, x.placements, x.shape)


def _max_handler(num_dims: int, *, with_indices: bool) -> Callable[..., Any]:
    def handler(
        input: DTensor,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,  # noqa: FBT001, FBT002
        return_indices: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        indices = with_indices or return_indices
        found = max_pool(input, num_dims, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode, indices=indices)
        return found if indices else found[0]

    return handler


def _mean_handler(num_dims: int) -> Callable[..., DTensor]:
    def handler(
        input: DTensor,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,  # noqa: FBT001, FBT002
        count_include_pad: bool = True,  # noqa: FBT001, FBT002
        divisor_override: int | None = None,
    ) -> DTensor:
        return mean_pool(
            input,
            num_dims,
            kernel_size,
            stride,
            padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
        )

    return handler


def _power_handler(num_dims: int) -> Callable[..., DTensor]:
    def handler(
        input: DTensor,
        norm_type: float,
        kernel_size: Size,
        stride: Size | None = None,
        ceil_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> DTensor:
        return power_pool(input, num_dims, norm_type, kernel_size, stride, ceil_mode=ceil_mode)

    return handler


# The mode sees F.max_pool2d, or its form with indices, from F and from nn.MaxPool2d; torch.max_pool2d is another one.
for _n in (1, 2, 3):
    rule(_MAX[_n], getattr(torch, f"max_pool{_n}d"))(_max_handler(_n, with_indices=False))
    rule(_MAX_INDICES[_n])(_max_handler(_n, with_indices=True))
    rule(_MEAN[_n])(_mean_handler(_n))
    rule(_POWER[_n])(_power_handler(_n))
rule(torch.max_pool1d_with_indices)(_max_handler(1, with_indices=True))
