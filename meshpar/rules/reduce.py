"""Reductions: over unsharded dims they are local; over sharded ones the parts are put together by one all-reduce.

Invariant: what comes out is never `Partial`: a reduced dim leaves the result replicated along its axis, the same
number on every rank. Means divide by the global count, so that uneven and empty shards weigh what they should. Where
no rank boundary is crossed the torch function itself runs on the pieces.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces, record
from meshpar.collectives import all_reduce
from meshpar.registry import functions, name_of, rule
from meshpar.rules.pointwise import write_into
from meshpar.rules.spatial import settle

Dims = int | Sequence[int] | None


@dataclass(frozen=True)
class Parts:
    """Hold what a reduction over sharded dims works with.

    Args:
        piece: this rank's piece.
        dims: dims to reduce, ascending and not negative.
        keepdim: whether they stay, with size 1.
        num: global number of elements that go into one result.
        mesh: mesh of the activation.
        axes: mesh axes, by position, that shard the dims.
        op: name of the op, for the record.
        dtype: dtype of the result, as torch has it.
        given: further arguments of the torch function, by name.
    """

    piece: Tensor
    dims: tuple[int, ...]
    keepdim: bool
    num: int
    mesh: DeviceMesh
    axes: tuple[int, ...]
    op: str
    dtype: torch.dtype
    given: Mapping[str, Any]

    def sum(self, part: Tensor) -> Tensor:
        """Add up local tensors over the axes; every rank must do the same with the result."""
        return pieces.psum(part, self.mesh, self.axes, self.op)

    def spread(self, x: Tensor) -> Tensor:
        """Let the ranks do different things with a tensor that is the same on all: its gradients are added up."""
        return _Spread.apply(x, self.mesh, self.axes, record.here(self.op))  # type: ignore[no-any-return]

    def squeezed(self, x: Tensor) -> Tensor:
        """Drop the reduced dims of a tensor that still has them, unless they are to stay."""
        return x if self.keepdim else x.squeeze(self.dims)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, axes, label):  # type: ignore[no-untyped-def]
        ctx.request = mesh, axes, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        mesh, axes, label = ctx.request
        return all_reduced(g, mesh, axes, label), None, None, None


def all_reduced(g: Tensor, mesh: DeviceMesh, axes: Sequence[int], label: str) -> Tensor:
    """Add up a tensor over mesh axes in the backward pass."""
    for group, name in pieces.groups_over(mesh, axes):
        g = all_reduce(g, group, name, label, backward=True)
    return g


def dims_of(dim: Dims, num_dims: int) -> tuple[int, ...]:
    """Give the dims to reduce, ascending and not negative; None and () mean all, as in torch.

    Raises:
        IndexError: a dim out of range.
        RuntimeError: a dim named twice.
    """
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(num_dims))
    found = [dim] if isinstance(dim, int) else [int(d) for d in dim]
    least = max(num_dims, 1)
    for d in found:
        if not -least <= d < least:
            text = f"Dimension out of range (expected to be in range of [{-least}, {least - 1}], but got {d})"
            raise IndexError(text)
    unique = sorted({d % num_dims for d in found}) if num_dims else []
    if num_dims and len(unique) != len(found):
        text = f"dim appears multiple times in the list of dims {tuple(found)}"
        raise RuntimeError(text)
    return tuple(unique)


def reduced(x: DTensor, dims: Sequence[int], keepdim: bool) -> tuple[list[Placement], tuple[int, ...], tuple[int, ...]]:  # noqa: FBT001
    """Give placements and global shape of a reduction's result, and the mesh axes of several ranks to reduce over."""
    shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)
    placements: list[Placement] = []
    axes: list[int] = []
    for axis, placement in enumerate(x.placements):
        if not isinstance(placement, Shard):
            placements.append(Replicate())
        elif placement.dim in dims:
            placements.append(Replicate())
            if x.device_mesh.size(axis) > 1:
                axes.append(axis)
        else:
            lost = 0 if keepdim else len([d for d in dims if d < placement.dim])
            placements.append(Shard(placement.dim - lost))
    return placements, shape, tuple(axes)


def settled(x: DTensor, op: str, *, single: Sequence[int] = ()) -> DTensor:
    """Keep all shards; dims in `single` along one axis at the most."""
    return settle(x, range(x.dim()), op, nested=[d for d in range(x.dim()) if d not in single])


@functools.lru_cache(maxsize=4096)
def _cached_forecast(
    func: Callable[..., Any], sizes: tuple[int, ...], dtype: torch.dtype, text: str, args: Any, kwargs: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the one number that is in there
        return func(torch.ones(sizes, dtype=dtype, device="cpu"), *args, **dict(kwargs))


def forecast(func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on a tensor of one element: what comes out has the right dtype, or torch's own error is raised.

    A meta tensor would not do: torch looks at many dtypes only where there is data.
    """

    def fixed(value: Any) -> Any:
        return tuple(value) if isinstance(value, list | torch.Size) else value

    plain_args = tuple(fixed(value) for value in args)
    plain_kwargs = tuple((key, fixed(value)) for key, value in kwargs.items())
    sizes = tuple(min(n, 1) for n in x.shape)
    # The text tells 1 from True and 1.0, which are equal and hash alike.
    return _cached_forecast(func, sizes, x.dtype, repr((plain_args, plain_kwargs)), plain_args, plain_kwargs)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which parts are added up: at least float32, and int64."""
    if dtype.is_complex:
        return torch.complex64 if dtype is torch.complex32 else dtype
    if dtype.is_floating_point:
        return dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return torch.int64


def reduction(
    names: str, sharded: Callable[[Parts], Any], *, empty_means_none: bool = False, positions: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a handler of a torch function that reduces.

    Args:
        names: names of the arguments after the input, in order.
        sharded: gives the local result, or several, where a sharded dim is reduced.
        empty_means_none: whether `dim=()` reduces nothing.
        positions: whether the place of an element matters, so that one axis at the most may shard a reduced dim.
    """
    order = names.split()

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        op = name_of(func)

        def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("out") is not None:
                out = kwargs.pop("out")
                return write_into(out, handler(input, *args, **kwargs), op)
            given = {**dict(zip(order, args, strict=False)), **kwargs}
            dim, keepdim = given.get("dim"), bool(given.get("keepdim", False))
            nothing = empty_means_none and dim is not None and not isinstance(dim, int) and len(dim) == 0
            dims = () if nothing else dims_of(dim, input.dim())
            x = settled(input, op, single=dims if positions else ())
            placements, shape, axes = reduced(x, dims, keepdim)
            if axes:
                expected = forecast(func, x, args, kwargs)
                dtype = (expected if isinstance(expected, Tensor) else expected[0]).dtype
                num = math.prod(x.shape[d] for d in dims)
                piece = pieces.local(x)
                result = sharded(Parts(piece, dims, keepdim, num, x.device_mesh, axes, op, dtype, given))
            else:
                result = func(pieces.local(x), *args, **kwargs)
            if isinstance(result, Tensor):
                return pieces.whole(result, x.device_mesh, placements, shape)
            parts = [pieces.whole(part, x.device_mesh, placements, shape) for part in result]
            return tuple(parts) if type(result) is tuple else type(result)(parts)

        return handler

    return make


def register(names: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give the functions of some names, in torch and of tensors, the handler that `make` makes."""
    for function in functions(*names.split()):
        rule(function)(make(function))


def _added(parts: Parts, local_sum: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
    return parts.sum(local_sum(parts.piece, dim=parts.dims, keepdim=parts.keepdim, dtype=wide(dtype)))


def _sum(parts: Parts) -> Tensor:
    """Sum over dims; one all-reduce forward, none backward."""
    return _added(parts, torch.sum, parts.dtype).to(parts.dtype)


def _nansum(parts: Parts) -> Tensor:
    """Sum over dims, with NaN as zero."""
    return _added(parts, torch.nansum if parts.piece.is_floating_point() else torch.sum, parts.dtype).to(parts.dtype)


def _mean(parts: Parts) -> Tensor:
    """Average: the global sum over the global count."""
    total = _added(parts, torch.sum, parts.dtype)
    return (total / parts.num).to(parts.dtype)


def _nanmean(parts: Parts) -> Tensor:
    """Average what is not NaN: sum and count in one all-reduce."""
    added = torch.nansum(parts.piece, dim=parts.dims, keepdim=parts.keepdim, dtype=wide(parts.dtype))
    count = (~parts.piece.isnan()).sum(dim=parts.dims, keepdim=parts.keepdim).to(added.dtype)
    total, num = parts.sum(torch.stack([added, count]))
    return (total / num).to(parts.dtype)  # type: ignore[no-any-return]


def _counted(parts: Parts, hits: Tensor) -> Tensor:
    return parts.sum(hits.sum(dim=parts.dims, keepdim=parts.keepdim, dtype=torch.int64))


def _any(parts: Parts) -> Tensor:
    return (_counted(parts, parts.piece.to(torch.bool)) > 0).to(parts.dtype)


def _all(parts: Parts) -> Tensor:
    return (_counted(parts, ~parts.piece.to(torch.bool)) == 0).to(parts.dtype)


def _count_nonzero(parts: Parts) -> Tensor:
    return _counted(parts, parts.piece != 0)


register("sum", reduction("dim keepdim", _sum))
register("nansum", reduction("dim keepdim", _nansum))
register("mean", reduction("dim keepdim", _mean))
register("nanmean", reduction("dim keepdim", _nanmean))
register("any", reduction("dim keepdim", _any, empty_means_none=True))
register("all", reduction("dim keepdim", _all, empty_means_none=True))
register("count_nonzero", reduction("dim", _count_nonzero))
