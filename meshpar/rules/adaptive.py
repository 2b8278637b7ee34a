"""Adaptive pools: m outputs over n rows, whatever n and m are.

Along a sharded dim the choice is between two ways, by global sizes alone:

- as many outputs as the axis has ranks, or more: every rank fetches the rows under its outputs; the result stays
  sharded, in canonical layout;
- fewer outputs than ranks (global pooling above all): no rows move. Each rank pools its own rows under every output
  and the parts are put together over the axis; the result is replicated along that axis (`Replicate`), so that
  flatten and Linear can follow.

Invariant: every window is torch's, [i * n // m, ceil((i + 1) * n / m)), and so are ties and NaN of the maxima.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn import functional as F

from meshpar import pieces, record
from meshpar.intervals import Interval, adaptive_rows, adaptive_window, chunks, intersect, interval_rows
from meshpar.peers import naming
from meshpar.registry import rule
from meshpar.rules.pool import lowest
from meshpar.rules.spatial import settle, sharded_dims
from meshpar.rules.windows import (
    Segment,
    checked_shape,
    fetch_or_cut,
    global_index,
    run_segments,
)

OutputSize = int | None | Sequence[int | None]
Plan = list[tuple[int, tuple[Segment, ...]]]

_MEAN: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
_MAX: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}
_MAX_INDICES: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}


@functools.lru_cache(maxsize=16384)
def segments(outputs: Interval, n: int, m: int) -> tuple[Segment, ...]:
    """Split the outputs of a rank into as few calls as possible, for a piece that holds the rows under them.

    Windows repeat after m / gcd(n, m) outputs; whole periods are one call, what is left over goes one by one.

    Example:
        >>> [(s.outputs, s.row, s.rows) for s in segments((1, 5), 9, 6)]
        [(1, 1, 2), (2, 3, 3), (1, 6, 2)]
    """
    a, b = outputs
    if b <= a:
        return (Segment(0, 0, 0, 0, 1, extra=1),)
    first = adaptive_rows(outputs, n, m)[0]
    period = m // math.gcd(n, m)
    start = min(-(-a // period) * period, b)
    stop = max(b // period * period, start)

    def block(i: int, j: int) -> Segment:
        rows = adaptive_rows((i, j), n, m)
        return Segment(j - i, rows[0] - first, rows[1] - rows[0], rows[0], j - i)

    whole = [block(start, stop)] if stop > start else []
    return (
        *(block(i, i + 1) for i in range(a, start)),
        *whole,
        *(block(i, i + 1) for i in range(stop, b)),
    )


@functools.lru_cache(maxsize=16384)
def partial_segments(own: Interval, n: int, m: int) -> tuple[Segment, ...]:
    """Give the part of a rank in each of all m outputs: its own rows under it, and their share of the window.

    Example:
        >>> [(s.start, s.rows, s.row, round(s.scale, 2)) for s in partial_segments((3, 6), 9, 2)]
        [(0, 2, 3, 0.4), (1, 2, 4, 0.4)]
    """
    out = []
    for i in range(m):
        start, stop = adaptive_window(i, n, m)
        a, b = intersect((start, stop), own)
        if b > a:
            out.append(Segment(1, a - own[0], b - a, a, 1, scale=(b - a) / (stop - start)))
        else:  # one row of padding, numbered past the last row, so that no tie goes to it
            out.append(Segment(1, 0, 0, n, 1, extra=1, scale=0.0))
    return tuple(out)


def _unscaled(parts: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return tuple(Segment(s.outputs, s.start, s.rows, s.row, s.size, s.extra) for s in parts)


def _prepared(
    x: DTensor, shape: tuple[int, ...], num_dims: int, op: str, *, mean: bool
) -> tuple[Tensor, Plan, list[int], list[Placement]]:
    """Fetch rows, and give the piece, its segments, the axes to reduce over, and the placements of the output."""
    mesh = x.device_mesh
    piece = pieces.local(x)
    plan: Plan = []
    reduced: list[int] = []
    placements: list[Placement] = list(x.placements)
    for dim, axis in sharded_dims(x).items():
        if dim < x.dim() - num_dims:
            continue
        n, m, p, me = x.shape[dim], shape[dim], mesh.size(axis), mesh.get_local_rank(axis)
        have = pieces.axis_chunks(mesh, axis, n)
        if m < p:
            parts = partial_segments(have[me], n, m)
            plan.append((dim, parts if mean else _unscaled(parts)))
            reduced.append(axis)
            placements[axis] = Replicate()
            continue
        want = tuple(interval_rows(adaptive_rows(outputs, n, m)) for outputs in chunks(m, p))
        piece = fetch_or_cut(piece, dim, n, want, mesh, axis, op, have, me)
        plan.append((dim, segments(chunks(m, p)[me], n, m)))
    return piece, plan, reduced, placements


def _empty(x: DTensor, shape: tuple[int, ...]) -> DTensor | None:
    """Give the output where it has no elements at all (`output_size=0`): torch allows that."""
    if 0 not in shape[1:]:
        return None
    piece = pieces.local(x)
    room = piece.sum().to(x.dtype) * piece.new_zeros(pieces.local_shape(shape, x.device_mesh, x.placements))
    return pieces.whole(room, x.device_mesh, x.placements, shape)


def adaptive_mean(x: DTensor, num_dims: int, output_size: OutputSize) -> DTensor:
    """Give the means under windows that tile the grid.

    Args:
        x: global shape (B, C, *spatial) or (C, *spatial).
        num_dims: number of spatial dims.
        output_size: as in torch; None keeps the size of a dim.

    Returns:
        Global shape (B, C, *output_size); along a sharded dim as the module says: sharded where there is an output
        for every rank, else replicated.

    Communication:
        Sharded: an exchange of the rows under this rank's outputs that other ranks own. Replicated: one all-reduce
        of the outputs, at least in float32, over the axes concerned; none backward.
    """
    op = f"F.adaptive_avg_pool{num_dims}d"
    shape = checked_shape(_MEAN[num_dims], x, num_dims, output_size)
    x = settle(x, range(x.dim()), op, nested=range(x.dim() - num_dims))
    if (nothing := _empty(x, shape)) is not None:
        return nothing
    piece, plan, reduced, placements = _prepared(x, shape, num_dims, op, mean=True)

    def run(part: Tensor, sizes: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
        result = _MEAN[num_dims](part, sizes)
        if reduced and result.dtype in (torch.float16, torch.bfloat16):
            result = result.float()  # partial sums in 16 bits would be rounded once a rank
        return (result,)

    (result,) = run_segments(piece, plan, run, shape[-num_dims:], fill=0.0)
    result = pieces.psum(result, x.device_mesh, reduced, op).to(x.dtype)
    return pieces.whole(result, x.device_mesh, placements, shape)


def adaptive_max(x: DTensor, num_dims: int, output_size: OutputSize, *, indices: bool = False) -> tuple[DTensor, ...]:
    """Give the maxima under windows that tile the grid and, if asked for, their flat positions in the global plane.

    Arguments and result as in `adaptive_mean`. The gradient goes to the position of the maximum alone: the first of
    equals, the last NaN, as in torch.

    Communication:
        Sharded: an exchange of the rows under this rank's outputs that other ranks own. Replicated: an all-gather of
        every rank's maxima and their positions over the axis; none backward.
    """
    op = f"F.adaptive_max_pool{num_dims}d"
    shape = checked_shape(_MAX_INDICES[num_dims], x, num_dims, output_size)
    x = settle(x, range(x.dim()), op, nested=range(x.dim() - num_dims))
    if (nothing := _empty(x, shape)) is not None:
        return (nothing, _like_index(nothing)) if indices else (nothing,)
    piece, plan, reduced, placements = _prepared(x, shape, num_dims, op, mean=False)
    plane = tuple(x.shape[-num_dims:])

    def run(part: Tensor, sizes: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
        if not (indices or reduced):
            return (_MAX[num_dims](part, sizes),)
        values, where = _MAX_INDICES[num_dims](part, sizes)
        return values, global_index(where, part.shape[-num_dims:], rows, plane)

    results = run_segments(piece, plan, run, shape[-num_dims:], fill=lowest(x.dtype))
    for axis in reduced:
        results = best_over(results[0], results[1], x.device_mesh, axis, op)
    wanted = results if indices else results[:1]
    return tuple(pieces.whole(result, x.device_mesh, placements, shape) for result in wanted)


def _like_index(x: DTensor) -> DTensor:
    piece = pieces.local(x).detach().to(torch.int64)
    return pieces.whole(piece, x.device_mesh, x.placements, x.shape)


class _Best(torch.autograd.Function):
    """Choose among the ranks; the gradient goes to the rank that was chosen."""

    @staticmethod
    def forward(ctx, values, where, mesh, axis, label):  # type: ignore[no-untyped-def]
        all_values, all_where = (_all_gathered(t, mesh, axis, label) for t in (values, where))
        nan = torch.isnan(all_values)
        equal = (all_values == all_values.amax(0)) & ~nan
        largest = torch.iinfo(torch.int64).max
        first = torch.where(equal, all_where, largest).amin(0)
        last_nan = torch.where(nan, all_where, -1).amax(0)
        chosen = torch.where(last_nan >= 0, last_nan, first)
        candidate = torch.where(last_nan >= 0, nan, equal) & (all_where == chosen)
        winner = candidate.to(torch.int8).argmax(0, keepdim=True)
        ctx.mine = winner[0] == mesh.get_local_rank(axis)
        ctx.mark_non_differentiable(chosen)
        return all_values.gather(0, winner)[0], chosen

    @staticmethod
    def backward(ctx, g, _):  # type: ignore[no-untyped-def]
        return torch.where(ctx.mine, g, torch.zeros_like(g)), *[None] * 4


def best_over(values: Tensor, where: Tensor, mesh: DeviceMesh, axis: int, op: str) -> tuple[Tensor, Tensor]:
    """Give the largest values of all ranks of an axis, and where they are: the first of equals, the last NaN.

    Args:
        values: a candidate of this rank for every output.
        where: int64, global position of each candidate; positions of different ranks differ.
        mesh: mesh of the computation.
        axis: position of the axis.
        op: name for the record.

    Communication:
        Two all-gathers, of values and positions; none backward.

    Source: the order of the loops in ATen's `AdaptiveMaxPoolKernel.cpp`: `val > max || isnan(val)`.
    """
    chosen: tuple[Tensor, Tensor] = _Best.apply(values, where, mesh, axis, record.here(op))
    return chosen


def _all_gathered(x: Tensor, mesh: DeviceMesh, axis: int, label: str) -> Tensor:
    p = mesh.size(axis)
    out = x.new_empty((p, *x.shape))
    name = pieces.axes_of(mesh)[axis]
    with naming(mesh.get_group(axis), name, label):
        dist.all_gather_into_tensor(out.view(-1), x.detach().contiguous().view(-1), group=mesh.get_group(axis))
    num_bytes = x.numel() * x.element_size() * (p - 1)
    record.note(label, "reduction", name, num_bytes)
    return out


def _mean_handler(num_dims: int) -> Callable[..., DTensor]:
    def handler(input: DTensor, output_size: OutputSize) -> DTensor:
        return adaptive_mean(input, num_dims, output_size)

    return handler


def _max_handler(num_dims: int, *, with_indices: bool) -> Callable[..., Any]:
    def handler(
        input: DTensor,
        output_size: OutputSize,
        return_indices: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        indices = with_indices or return_indices
        found = adaptive_max(input, num_dims, output_size, indices=indices)
        return found if indices else found[0]

    return handler


for _n in (1, 2, 3):
    rule(_MEAN[_n])(_mean_handler(_n))
    rule(_MAX[_n])(_max_handler(_n, with_indices=False))
    rule(_MAX_INDICES[_n])(_max_handler(_n, with_indices=True))
rule(torch.adaptive_max_pool1d)(_max_handler(1, with_indices=True))
