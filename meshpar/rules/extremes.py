"""Largest and smallest values, and where they are: amax, amin, max, min, aminmax, argmax, argmin.

Invariant: NaN wins, the first of equal values is the one that is named, and a gradient is shared among equal values
or goes to the first, all as torch has it on one process, whichever ranks hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar import pieces, record
from meshpar.registry import name_of
from meshpar.rules.pointwise import write_into
from meshpar.rules.reduce import Parts, all_reduced, dims_of, forecast, reduced, reduction, register, settled
from meshpar.spmd import call


def _least(dtype: torch.dtype, *, maximum: bool) -> float | int:
    """Give the value that never wins: what a rank without rows puts in."""
    if dtype is torch.bool:
        return 0 if maximum else 1
    if dtype.is_floating_point:
        return -math.inf if maximum else math.inf
    return torch.iinfo(dtype).min if maximum else torch.iinfo(dtype).max


def _local_extreme(piece: Tensor, dims: Sequence[int], *, maximum: bool) -> Tensor:
    """Reduce a piece, dims kept; an empty one gives what never wins."""
    if any(piece.shape[d] == 0 for d in dims):
        room = [1 if d in dims else n for d, n in enumerate(piece.shape)]
        return piece.new_full(room, _least(piece.dtype, maximum=maximum))
    return (torch.amax if maximum else torch.amin)(piece, dim=tuple(dims), keepdim=True)


def extreme_over(
    piece: Tensor, dims: Sequence[int], mesh: DeviceMesh, axes: Sequence[int], op: str, *, maximum: bool
) -> Tensor:
    """Give the extreme over dims and ranks, dims kept; not differentiable.

    The parts are gathered and reduced by torch, not by the backend, whose max need not carry NaN.
    """
    best = _local_extreme(piece.detach(), dims, maximum=maximum)
    for axis in axes:
        best = (torch.amax if maximum else torch.amin)(pieces.all_gather_parts(best, mesh, axis, op), dim=0)
    return best


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, parts, maximum, to_nan):  # type: ignore[no-untyped-def]
        best = extreme_over(piece, parts.dims, parts.mesh, parts.axes, parts.op, maximum=maximum)
        same = piece == best
        if to_nan:
            same = torch.where(best.isnan(), piece.isnan(), same)
        ctx.save_for_backward(same)
        ctx.request = parts.dims, parts.mesh, parts.axes, record.here(parts.op)
        return best

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (same,) = ctx.saved_tensors
        dims, mesh, axes, label = ctx.request
        ties = all_reduced(same.sum(dim=dims, keepdim=True, dtype=torch.int64), mesh, axes, label)
        return (g * same) / ties.to(g.dtype), None, None, None


def shared_extreme(parts: Parts, *, maximum: bool, to_nan: bool = False) -> Tensor:
    """Give the extreme; its gradient is shared among equal values (`to_nan`: among NaN where those won)."""
    to_nan = to_nan and parts.piece.is_floating_point()
    return parts.squeezed(_Extreme.apply(parts.piece, parts, maximum, to_nan))


register("amax", reduction("dim keepdim", lambda parts: shared_extreme(parts, maximum=True)))
register("amin", reduction("dim keepdim", lambda parts: shared_extreme(parts, maximum=False)))


def _aminmax(parts: Parts) -> Any:
    both = [shared_extreme(parts, maximum=maximum) for maximum in (False, True)]
    return torch.return_types.aminmax((both[0], both[1]))


register("aminmax", reduction("", _aminmax))


class _Chosen(torch.autograd.Function):
    """Put the value that won in place of this rank's own; its gradient goes to the rank that had it."""

    @staticmethod
    def forward(ctx, own, value, mine):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(mine)
        return value

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return torch.where(ctx.saved_tensors[0], g, torch.zeros_like(g)), None, None


def _choose(parts: Parts, *, maximum: bool) -> tuple[Tensor, Tensor]:
    """Give the extreme along the one dim of `parts`, and its global index, the first where several are equal.

    Communication:
        Two all-gathers of the result's piece over the axis that shards the dim.
    """
    ((dim,), (axis,), piece) = parts.dims, parts.axes, parts.piece
    func = torch.max if maximum else torch.min
    if piece.shape[dim]:
        values, indices = func(piece, dim, keepdim=True)
    else:
        room = [1 if d == dim else n for d, n in enumerate(piece.shape)]
        # A sum over nothing keeps the piece in the autograd graph.
        values = piece.sum(dim, keepdim=True, dtype=piece.dtype) + piece.new_full(
            room, _least(piece.dtype, maximum=maximum)
        )
        indices = torch.zeros(room, dtype=torch.int64, device=piece.device)
    start = pieces.my_chunk(parts.mesh, axis, parts.num)[0]
    all_values = pieces.all_gather_parts(values, parts.mesh, axis, parts.op)
    all_indices = pieces.all_gather_parts(indices + start, parts.mesh, axis, parts.op)
    best, winner = func(all_values, 0)  # the first of equal ones; ranks without rows come last
    index = all_indices.gather(0, winner.unsqueeze(0)).squeeze(0)
    value = _Chosen.apply(values, best, winner == parts.mesh.get_local_rank(axis))
    return parts.squeezed(value), parts.squeezed(index)


def _along(func: Callable[..., Any], *, maximum: bool) -> Callable[..., Any]:
    kind = torch.return_types.max if maximum else torch.return_types.min
    return reduction("dim keepdim", lambda parts: kind(_choose(parts, maximum=maximum)), positions=True)(func)


def _whole(func: Callable[..., Any], *, maximum: bool) -> Callable[..., Any]:
    return reduction("", lambda parts: shared_extreme(parts, maximum=maximum, to_nan=True))(func)


def _max_rule(pairwise: Callable[..., Any], *, maximum: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the handler of the three forms of `max` and `min`: of all, along a dim, of two tensors."""

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        along, whole, op = _along(func, maximum=maximum), _whole(func, maximum=maximum), name_of(func)

        def handler(input: Any, *args: Any, **kwargs: Any) -> Any:
            other = args[0] if args else kwargs.get("other")
            if isinstance(other, Tensor):
                named = {key: value for key, value in kwargs.items() if key != "other"}
                return call(pairwise, (input, other), named)
            out = kwargs.pop("out", None)
            result = along(input, *args, **kwargs) if args or "dim" in kwargs else whole(input, **kwargs)
            return result if out is None else write_into(out, result, op)

        return handler

    return make


register("max", _max_rule(torch.maximum, maximum=True))
register("min", _max_rule(torch.minimum, maximum=False))


def _where_rule(*, maximum: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the handler of `argmax` and `argmin`."""

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        op = name_of(func)

        def handler(
            input: DTensor,
            dim: int | None = None,
            keepdim: bool = False,  # noqa: FBT001, FBT002
            *,
            out: Any = None,
        ) -> Any:
            x = settled(input, op, single=dims_of(dim, input.dim()))
            placements, shape, axes = reduced(x, dims_of(dim, x.dim()), keepdim)
            if not axes:
                found = func(pieces.local(x), dim, keepdim)
            else:
                forecast(func, x, (dim, keepdim), {})
                found = _position(x, dims_of(dim, x.dim()), axes, op, maximum=maximum)
                found = found.reshape(pieces.local_shape(shape, x.device_mesh, placements))
            result = pieces.whole(found, x.device_mesh, placements, shape)
            return result if out is None else write_into(out, result, op)

        return handler

    return make


def _position(x: DTensor, dims: Sequence[int], axes: Sequence[int], op: str, *, maximum: bool) -> Tensor:
    """Give the place of the extreme in the flattened dims: over all of them, or along one.

    The order of a piece's elements is that of their global places, so that the first of a piece is its least.
    """
    mesh, piece = x.device_mesh, pieces.local(x).detach()
    whole = extreme_over(piece, dims, mesh, axes, op, maximum=maximum)
    hit = torch.where(whole.isnan(), piece.isnan(), piece == whole) if piece.is_floating_point() else piece == whole
    place = torch.zeros((), dtype=torch.int64, device=piece.device)
    starts = {x.placements[axis].dim: pieces.my_chunk(mesh, axis, x.shape[x.placements[axis].dim])[0] for axis in axes}  # type: ignore[attr-defined]
    for d in dims:
        rows = torch.arange(piece.shape[d], device=piece.device) + starts.get(d, 0)
        place = place * x.shape[d] + rows.view([-1 if e == d else 1 for e in range(piece.dim())])
    nowhere = torch.iinfo(torch.int64).max
    places = torch.where(hit, place, torch.full_like(place, nowhere))
    empty = any(piece.shape[d] == 0 for d in dims)
    first = places.new_full(whole.shape, nowhere) if empty else places.amin(dim=tuple(dims), keepdim=True)
    for axis in axes:
        first = pieces.all_gather_parts(first, mesh, axis, op).amin(dim=0)
    return first


register("argmax", _where_rule(maximum=True))
register("argmin", _where_rule(maximum=False))
