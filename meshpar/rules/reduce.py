"""Reductions: over unsharded dims they are local; over sharded ones the parts are put together by one all-reduce.

Invariant: what comes out is never `Partial`: a reduced dim leaves the result replicated along its axis, the same
number on every rank. Means divide by the global count, so that uneven and empty shards weigh what they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.rules.spatial import settle
from meshpar.spmd import functions, gather_call, name_of, rule

Dims = int | Sequence[int] | None


def dims_of(dim: Dims, num_dims: int) -> tuple[int, ...]:
    """Give the dims to reduce, ascending and not negative; None and () mean all, as in torch.

    Raises:
        IndexError: a dim out of range.
        RuntimeError: a dim named twice.
    """
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(num_dims))
    found = [dim] if isinstance(dim, int) else [int(d) for d in dim]
    for d in found:
        if not -max(num_dims, 1) <= d < max(num_dims, 1):
            text = f"Dimension out of range (expected to be in range of [{-max(num_dims, 1)}, {max(num_dims, 1) - 1}], but got {d})"
            raise IndexError(text)
    unique = sorted({d % num_dims for d in found}) if num_dims else []
    if num_dims and len(unique) != len(found):
        text = f"dim appears multiple times in the list of dims {tuple(found)}"
        raise RuntimeError(text)
    return tuple(unique)


def reduced(x: DTensor, dims: Sequence[int], keepdim: bool) -> tuple[list[Placement], tuple[int, ...], list[int]]:  # noqa: FBT001
    """Give placements and global shape of a reduction's result, and the mesh axes to reduce over."""
    shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)
    placements: list[Placement] = []
    axes: list[int] = []
    for axis, placement in enumerate(x.placements):
        if not isinstance(placement, Shard):
            placements.append(Replicate())
        elif placement.dim in dims:
            placements.append(Replicate())
            axes.append(axis)
        else:
            lost = 0 if keepdim else sum(d < placement.dim for d in dims)
            placements.append(Shard(placement.dim - lost))
    return placements, shape, axes


def _settled(x: DTensor, op: str) -> DTensor:
    return settle(x, range(x.dim()), op)


def _into(out: Any, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def total(
    x: DTensor,
    dims: Sequence[int],
    op: str,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    local_sum: Callable[..., Tensor] = torch.sum,
) -> DTensor:
    """Sum over dims, with one all-reduce over the axes that shard them.

    Communication:
        One all-reduce of the result's piece forward, none backward.
    """
    x = _settled(x, op)
    placements, shape, axes = reduced(x, dims, keepdim)
    part = local_sum(pieces.local(x), dim=tuple(dims), keepdim=keepdim, dtype=dtype) if x.dim() else pieces.local(x)
    return pieces.whole(pieces.psum(part, x.device_mesh, axes, op), x.device_mesh, placements, shape)


def _wide(x: Tensor) -> torch.dtype:
    """Give the dtype in which parts of a mean are added up: at least float32."""
    return {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(x.dtype, x.dtype)


@rule(*functions("sum"))
def sum(  # noqa: A001 (torch's name)
    input: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None  # noqa: A002, FBT001, FBT002
) -> Tensor:
    """Sum over dims; see `total`."""
    if not input.dim():
        return _scalar(torch.sum, input, dtype=dtype)
    dtype = dtype or (torch.int64 if not (input.is_floating_point() or input.is_complex()) else None)
    if dtype is None and input.dtype in (torch.float16, torch.bfloat16):
        wide = total(input, dims_of(dim, input.dim()), "torch.sum", keepdim=keepdim, dtype=torch.float32)
        return _into(out, wide.to(input.dtype))
    return _into(out, total(input, dims_of(dim, input.dim()), "torch.sum", keepdim=keepdim, dtype=dtype))


@rule(*functions("nansum"))
def nansum(
    input: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None  # noqa: A002, FBT001, FBT002
) -> Tensor:
    """Sum over dims, with NaN as zero; see `total`."""
    if not input.dim():
        return _scalar(torch.nansum, input, dtype=dtype)
    dims = dims_of(dim, input.dim())
    return _into(out, total(input, dims, "torch.nansum", keepdim=keepdim, dtype=dtype, local_sum=torch.nansum))


@rule(*functions("mean"))
def mean(
    input: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None  # noqa: A002, FBT001, FBT002
) -> Tensor:
    """Average over dims: the global sum over the global count."""
    if not input.dim() or not ((dtype or input.dtype).is_floating_point or (dtype or input.dtype).is_complex):
        return _scalar(torch.mean, input, dtype=dtype)
    dims = dims_of(dim, input.dim())
    result_dtype = dtype or input.dtype
    num = math.prod(input.shape[d] for d in dims)
    added = total(input, dims, "torch.mean", keepdim=keepdim, dtype=_wide(torch.empty(0, dtype=result_dtype)))
    return _into(out, (added / num).to(result_dtype))


@rule(*functions("nanmean"))
def nanmean(
    input: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None  # noqa: A002, FBT001, FBT002
) -> Tensor:
    """Average over dims what is not NaN."""
    if not input.dim():
        return _scalar(torch.nanmean, input, dtype=dtype)
    dims = dims_of(dim, input.dim())
    num = total(_map(lambda t: (~torch.isnan(t)).to(t.dtype), input), dims, "torch.nanmean", keepdim=keepdim)
    added = total(input, dims, "torch.nanmean", keepdim=keepdim, dtype=dtype, local_sum=torch.nansum)
    return _into(out, added / num)


def _map(func: Callable[[Tensor], Tensor], x: DTensor) -> DTensor:
    return pieces.whole(func(pieces.local(x)), x.device_mesh, x.placements, x.shape)


def _scalar(func: Callable[..., Tensor], x: DTensor, **kwargs: Any) -> DTensor:
    """Run on a tensor without dims, or raise as torch does for one that it refuses."""
    x = _settled(x, name_of(func))
    out = func(pieces.local(x), **kwargs)
    return pieces.whole(out, x.device_mesh, pieces.replicated(x.device_mesh), out.shape)


class _Extreme(torch.autograd.Function):
    """Reduce by max or min over ranks; a gradient goes to the ranks that hold the value, shared among ties.

    The local reduction has shared it among its own ties already, so here each rank is weighed by its number of ties.
    The parts are gathered and reduced by torch, not by the backend, whose max need not carry NaN.
    """

    @staticmethod
    def forward(ctx, piece, ties, mesh, axes, op, maximum):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205, PLR0913
        best = piece
        for axis in axes:
            best = (torch.amax if maximum else torch.amin)(pieces.all_gather_parts(best, mesh, axis, op), dim=0)
        ctx.save_for_backward(torch.where(piece == best, ties, torch.zeros_like(ties)))
        ctx.place = mesh, axes, op
        return best

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        (mine,) = ctx.saved_tensors
        mesh, axes, op = ctx.place
        everyone = pieces.psum(mine, mesh, axes, op)
        return g * (mine / everyone).to(g.dtype), *[None] * 5


def _extreme(x: DTensor, dims: Sequence[int], keepdim: bool, *, maximum: bool) -> DTensor:  # noqa: FBT001
    op = "torch.amax" if maximum else "torch.amin"
    x = _settled(x, op)
    placements, shape, axes = reduced(x, dims, keepdim)
    piece, mesh = pieces.local(x), x.device_mesh
    func = torch.amax if maximum else torch.amin
    if all(mesh.size(axis) == 1 for axis in axes):
        return pieces.whole(func(piece, dim=tuple(dims), keepdim=keepdim), mesh, placements, shape)
    empty = any(piece.shape[d] == 0 for d in dims)
    if empty:
        value = _lowest(piece.dtype) if maximum else _highest(piece.dtype)
        room = [1 if d in dims else n for d, n in enumerate(piece.shape)]
        # Sum over nothing keeps the piece in the autograd graph, with a gradient of the right shape.
        local_best = piece.sum(dim=tuple(dims), keepdim=True, dtype=piece.dtype) + piece.new_full(room, value)
        ties = torch.zeros(room, dtype=torch.float64, device=piece.device)
    else:
        local_best = func(piece, dim=tuple(dims), keepdim=True)
        same = piece.detach() == local_best.detach()
        ties = same.sum(dim=tuple(dims), keepdim=True).to(torch.float64)
    if not keepdim:
        local_best, ties = local_best.reshape(_without(local_best, dims)), ties.reshape(_without(ties, dims))
    best = _Extreme.apply(local_best, ties, mesh, tuple(axes), op, maximum)
    return pieces.whole(best, mesh, placements, shape)


def _without(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [n for d, n in enumerate(x.shape) if d not in dims]


def _lowest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extreme_rule(*, maximum: bool) -> Callable[..., Any]:
    func = torch.amax if maximum else torch.amin

    def handler(input: DTensor, dim: Dims = (), keepdim: bool = False, *, out: Any = None) -> Tensor:  # noqa: A002, FBT001, FBT002
        dims = dims_of(dim, input.dim())
        if any(input.shape[d] == 0 for d in dims) or not input.dim():
            return gather_call(func, (input, dim, keepdim), {}, why="nothing to reduce")  # type: ignore[no-any-return]
        return _into(out, _extreme(input, dims, keepdim, maximum=maximum))

    return handler


for _function in functions("amax"):
    rule(_function)(_extreme_rule(maximum=True))
for _function in functions("amin"):
    rule(_function)(_extreme_rule(maximum=False))


def _max_rule(func: Callable[..., Any], pairwise: Callable[..., Any], *, maximum: bool) -> Callable[..., Any]:
    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            from meshpar.spmd import call

            return call(pairwise, (input, other), {k: v for k, v in kwargs.items() if k != "other"})
        if (args or kwargs) or not input.dim() or input.numel() == 0:
            return _max_along(func, input, args, kwargs)
        return _extreme(input, range(input.dim()), False, maximum=maximum)

    return handler


def _max_along(func: Callable[..., Any], x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give values and indices along one dim: local where the dim is not sharded."""
    dim = args[0] if args else kwargs.get("dim")
    if isinstance(dim, int) and x.dim() and not pieces.shard_axes(x, dim) and kwargs.get("out") is None:
        x = _settled(x, name_of(func))
        keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        placements, shape, _ = reduced(x, dims_of(dim, x.dim()), keepdim)
        found = func(pieces.local(x), *args, **kwargs)
        parts = [pieces.whole(part, x.device_mesh, placements, shape) for part in found]
        return type(found)(parts)
    return gather_call(func, (x, *args), kwargs, why="values and indices along a sharded dim")


for _function in functions("max"):
    rule(_function)(_max_rule(_function, torch.maximum, maximum=True))
for _function in functions("min"):
    rule(_function)(_max_rule(_function, torch.minimum, maximum=False))


def _logical(name: str) -> Callable[..., Any]:
    func = getattr(torch, name)

    def handler(input: DTensor, dim: Dims = None, keepdim: bool = False, *, out: Any = None) -> Tensor:  # noqa: A002, FBT001, FBT002
        if not input.dim():
            return _scalar(func, input)
        dims = dims_of(dim, input.dim())
        hits = _map(lambda t: (t if name == "any" else t == 0).to(torch.bool), input)
        num = total(hits, dims, f"torch.{name}", keepdim=keepdim, dtype=torch.int64)
        result = _map(lambda t: t > 0 if name == "any" else t == 0, num)
        return _into(out, result.to(torch.uint8) if input.dtype == torch.uint8 else result)

    return handler


for _name in ("any", "all"):
    for _function in functions(_name):
        rule(_function)(_logical(_name))


@rule(*functions("count_nonzero"))
def count_nonzero(input: DTensor, dim: Dims = None) -> Tensor:  # noqa: A002
    """Count what is not zero."""
    if not input.dim():
        return _scalar(torch.count_nonzero, input)
    hits = _map(lambda t: t != 0, input)
    return total(hits, dims_of(dim, input.dim()), "torch.count_nonzero", dtype=torch.int64)
