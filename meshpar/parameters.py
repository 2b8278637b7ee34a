"""Sharded parameters as the plain tensors that a forward computes with, and plain values as the shards that it holds.

Invariant: the gradient of what stands for a parameter is a part; the parts of all ranks are added up here wherever
`fully_shard` does not do it: in graphs, for parameters that it was told to leave, for those that are read while their
unit does not run, under `torch.func.functional_call`.

A parameter lies over the ranks of data x domain, which add up its gradient, and over `tensor`, where its pieces are
parameters of their own: what is whole over data x domain is a DTensor over `tensor` then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshpar import pieces, private, record, runtime, weights
from meshpar.accumulation import whole_or_waiting
from meshpar.collectives import all_reduce, sum_scatter
from meshpar.intervals import chunks
from meshpar.mesh import is_ours
from meshpar.precision import rounded
from meshpar.shares import cut_as, rows_of_all
from meshpar.spmd import is_on
from meshpar.traced import PLAIN, as_node, direct, is_tracing

SHARDS = "_meshpar_shards"
"""Name of the attribute in which a module whose parameters are sharded keeps what it shares with the others."""

TENSOR = "tensor"
"""The axis over which the pieces of a parameter are no parts of a sum."""


@dataclass
class Shards:
    """Hold what the units of one model share.

    Args:
        mesh: the ranks over which parameters lie.
        summed: the same ranks along one axis.
        away: the unit in whose forward the hooks of `fully_shard` stay away, if any.
        replaced: what stands in the place of parameters in that forward.
        hooked: whether a hook of `fully_shard` runs, which must see parameters as they are.
    """

    mesh: DeviceMesh
    summed: DeviceMesh
    away: nn.Module | None = None
    replaced: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    hooked: bool = False

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Let parameters be seen as they are inside the block."""
        self.hooked = True
        try:
            yield
        finally:
            self.hooked = False


@dataclass(frozen=True)
class Reading:
    """Say in which dtypes the parameters of a module are read.

    Args:
        params: what they are rounded to; None for their own.
        reduce: in which their gradients are added up; None for the dtype of the parts.
        as_they_are: those that are not rounded.
    """

    params: torch.dtype | None = None
    reduce: torch.dtype | None = None
    as_they_are: frozenset[str] = frozenset()


def summed_grad(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Let a plain value stand for a parameter: it is the whole, and the parts of its gradient are added up."""
    return _SummedGrad.apply(value, mesh)  # type: ignore[no-any-return]


class _SummedGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, mesh):  # type: ignore[no-untyped-def]
        ctx.mesh = mesh
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (name,) = pieces.axes_of(ctx.mesh)
        return all_reduce(g, ctx.mesh.get_group(), name, "|functional_call", kind="parameters", backward=True), None


def kept(output: Any, unit: nn.Module) -> Any:
    """Copy what a unit returns of its parameters themselves, or views of them: their memory is freed now."""
    with torch.no_grad():
        freed = {_memory(p) for p in unit.parameters() if not isinstance(p, DTensor) or weights.is_split(p)} - {0}
    return private.map_output(lambda x: x.clone() if isinstance(x, Tensor) and _is_in(x, freed) else x, output)


@torch.no_grad()
def _is_in(x: Tensor, memory: set[int]) -> bool:
    return _memory(x) in memory


def _memory(x: Tensor) -> int:
    """Give the address of the memory that a tensor, or this rank's piece of it, is a view of; without gradients."""
    piece = x.to_local() if isinstance(x, DTensor) else x
    return private.memory_of(piece) if piece.layout is torch.strided and not piece.is_meta else 0


@functools.lru_cache(maxsize=4096)
def reading_plain(cls: type[nn.Module], reading: Reading) -> type[nn.Module]:
    """Make the class of a module whose parameters are plain tensors for a forward: all of them in a graph.

    Outside of graphs `fully_shard` puts plain parameters in place, but for those that it was told to leave, and those
    that somebody else reads than the forward of the unit (`F.linear(x, self.child.weight)`).
    """
    if cls.__dict__.get("_meshpar_plain"):
        return cls

    def __getattr__(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if not (isinstance(value, Tensor) and private.holds_parameter(self, name)):
            return value
        params = None if name in reading.as_they_are else reading.params
        if params is None and not isinstance(value, DTensor):
            return value
        if torch.compiler.is_compiling():
            if is_tracing() and isinstance(value, DTensor):
                return as_node(whole_parameter, PLAIN, value, params, reading.reduce)
            return value
        shards: Shards = self.__dict__[SHARDS]
        if shards.hooked or not (record.is_inside() and is_on()):
            return value
        if lies_over_data(value):
            return whole_or_waiting(value, functools.partial(whole_parameter, params=params, reduce=reading.reduce))
        return rounded(value, params)

    names = {"_meshpar_plain": True, "__module__": cls.__module__, "__doc__": cls.__doc__, "__getattr__": __getattr__}
    return type(cls.__name__, (cls,), names)


def lies_over_data(w: Tensor) -> TypeGuard[DTensor]:
    """Tell whether a parameter is laid over data x domain; an activation, and one over `tensor` alone, is not."""
    if not isinstance(w, DTensor) or is_ours(w.device_mesh):
        return False
    return any(axis != TENSOR for axis in pieces.axes_of(w.device_mesh))


@direct
def whole_parameter(w: DTensor, params: torch.dtype | None = None, reduce: torch.dtype | None = None) -> Tensor:
    """Give a parameter as it is whole over data x domain; the parts of its gradient are added up.

    Args:
        w: a parameter over data x domain, and over tensor where it is split.
        params: dtype of the result where it is a floating-point one; that of the parameter by default.
        reduce: dtype in which parts are added up; that of the parts by default.

    Returns:
        A plain tensor; of a parameter that is split over `tensor` a DTensor there.

    Communication:
        Forward an all-gather of a sharded parameter, backward a reduce-scatter; for replicas an all-reduce.
    """
    return _Whole.apply(w, params, reduce)  # type: ignore[no-any-return]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, params, reduce):  # type: ignore[no-untyped-def]
        mesh, axes = w.device_mesh, pieces.axes_of(w.device_mesh)
        ctx.mesh, ctx.placements, ctx.shape, ctx.stride = mesh, w.placements, w.shape, w.stride()
        local = w.to_local()
        ctx.dtype, ctx.device, ctx.reduce = local.dtype, local.device, reduce
        ctx.local_shape = _shape_over_tensor(w)
        whole = local.detach().to(_device_of(mesh, local))
        if params is not None and whole.is_floating_point():
            whole = whole.to(params)
        for axis, name in enumerate(axes):
            placement, p = w.placements[axis], mesh.size(axis)
            if name == TENSOR or placement.is_replicate() or p == 1:
                continue
            dim = placement.dim
            whole = rows_of_all(whole, dim, ctx.local_shape[dim], mesh.get_group(axis), name, "|fully_shard")
        whole = whole.clone(memory_format=torch.contiguous_format)
        if TENSOR not in axes:
            return whole
        split = [w.placements[axes.index(TENSOR)]]
        return DTensor.from_local(whole, mesh[TENSOR], split, run_check=False, shape=w.shape, stride=w.stride())

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        mesh, axes = ctx.mesh, pieces.axes_of(ctx.mesh)
        if isinstance(g, DTensor):
            g = g.redistribute(placements=[ctx.placements[axes.index(TENSOR)]]).to_local()
        if ctx.reduce is not None and g.is_floating_point():
            g = g.to(ctx.reduce)
        label: dict[str, Any] = {"kind": "parameters", "backward": True}
        # Shards first: what is left for the replicas to add up is smaller then.
        for axis, name in sorted(enumerate(axes), key=lambda item: ctx.placements[item[0]].is_replicate()):
            placement, p = ctx.placements[axis], mesh.size(axis)
            if name == TENSOR or p == 1:
                continue
            if placement.is_replicate():
                g = all_reduce(g, mesh.get_group(axis), name, "|fully_shard", **label)
                continue
            dim = placement.dim
            n = ctx.local_shape[dim]
            rows = -(-n // p)
            parts = _padded(g, dim, rows * p).movedim(dim, 0).unflatten(0, (p, rows))
            a, b = chunks(n, p)[mesh.get_local_rank(axis)]
            g = sum_scatter(parts, mesh.get_group(axis), name, "|fully_shard", **label)
            g = g.narrow(0, 0, b - a).movedim(0, dim)
        g = g.to(device=ctx.device, dtype=ctx.dtype)
        whole = DTensor.from_local(g, mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride)
        return whole, None, None


def _shape_over_tensor(w: DTensor) -> tuple[int, ...]:
    """Give the shape of what this rank has of a parameter once it is whole over data x domain."""
    axes = pieces.axes_of(w.device_mesh)
    split = [p if axes[axis] == TENSOR else Replicate() for axis, p in enumerate(w.placements)]
    return pieces.local_shape(w.shape, w.device_mesh, split)


def _device_of(mesh: DeviceMesh, local: Tensor) -> torch.device:
    """Give where a parameter is used: not where it is kept, if it is offloaded."""
    return local.device if local.device.type == mesh.device_type else runtime.local_device(mesh.device_type)


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    """Add rows of zeros up to a number."""
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows - x.shape[dim]])


def shard_plain_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the plain values of a one-process state dict to the shards that the model holds."""
    for name, p in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(p, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            if value.shape != p.shape:
                continue  # torch names the key and both shapes
            state_dict[prefix + name] = cut_as(value, p)
