"""Sharded parameters as the plain tensors that a forward computes with, and plain values as the shards that it holds.

Invariant: the gradient of what stands for a parameter is a part; the parts of all ranks are added up here wherever
`fully_shard` does not do it: in graphs, for parameters that it was told to leave, under `torch.func.functional_call`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshpar import private
from meshpar.collectives import all_gather, all_reduce, sum_scatter
from meshpar.intervals import chunks
from meshpar.mesh import SUMMED
from meshpar.spmd import is_on
from meshpar.traced import PLAIN, as_node, direct, is_tracing

SHARDS = "_meshpar_shards"
"""Name of the attribute in which a module whose parameters are sharded keeps what it shares with the others."""


@dataclass
class Shards:
    """Hold what the units of one model share.

    Args:
        mesh: the ranks over which parameters are sharded.
        away: the unit in whose forward the hooks of `fully_shard` stay away, if any.
        replaced: what stands in the place of parameters in that forward.
    """

    mesh: DeviceMesh
    away: nn.Module | None = None
    replaced: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


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
        total = all_reduce(g, ctx.mesh.get_group(), SUMMED, "|functional_call", kind="parameters", backward=True)
        return total, None


@functools.lru_cache(maxsize=4096)
def reading_plain(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a module whose parameters are plain tensors for a forward: all of them in a graph.

    Outside of graphs `fully_shard` puts plain parameters in place, but for those that it was told to leave.
    """
    if cls.__dict__.get("_meshpar_plain"):
        return cls

    def __getattr__(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, DTensor) and private.holds_parameter(self, name):
            if torch.compiler.is_compiling():
                return as_node(whole_parameter, PLAIN, value) if is_tracing() else value
            shards: Shards = self.__dict__[SHARDS]
            if is_on() and (shards.away is not None or all(p.is_replicate() for p in value.placements)):
                return whole_parameter(value)
        return value

    names = {"_meshpar_plain": True, "__module__": cls.__module__, "__doc__": cls.__doc__, "__getattr__": __getattr__}
    return type(cls.__name__, (cls,), names)


@direct
def whole_parameter(w: DTensor) -> Tensor:
    """Give a parameter as a plain tensor; the parts of its gradient are added up.

    Communication:
        Forward an all-gather of a sharded parameter, backward a reduce-scatter; an all-reduce of a replicated one.
    """
    return _Whole.apply(w)  # type: ignore[no-any-return]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):  # type: ignore[no-untyped-def]
        (placement,), mesh = w.placements, w.device_mesh
        ctx.request = placement, mesh, w.shape, w.stride()
        piece = w.to_local()
        if not isinstance(placement, Shard):
            return piece.detach().clone()
        dim, n, p = placement.dim, w.shape[placement.dim], mesh.size()
        rows = -(-n // p)
        piece = _padded(piece, dim, rows).movedim(dim, 0)
        whole = all_gather(piece, mesh.get_group(), SUMMED, "|fully_shard", kind="parameters")
        return whole.flatten(0, 1).narrow(0, 0, n).movedim(0, dim).clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        placement, mesh, shape, stride = ctx.request
        group, p = mesh.get_group(), mesh.size()
        if isinstance(placement, Shard):
            dim, n = placement.dim, shape[placement.dim]
            rows = -(-n // p)
            parts = _padded(g, dim, rows * p).movedim(dim, 0).unflatten(0, (p, rows))
            a, b = chunks(n, p)[mesh.get_local_rank()]
            total = sum_scatter(parts, group, SUMMED, "|fully_shard", kind="parameters", backward=True)
            total = total.narrow(0, 0, b - a).movedim(0, dim)
        else:
            total = all_reduce(g, group, SUMMED, "|fully_shard", kind="parameters", backward=True)
        return DTensor.from_local(total, mesh, [placement], run_check=False, shape=shape, stride=stride)


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
            state_dict[prefix + name] = distribute_tensor(
                value.to(p.device), p.device_mesh, p.placements, src_data_rank=None
            )
