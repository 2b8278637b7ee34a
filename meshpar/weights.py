"""Weights that lie on another mesh than the activations: those of a tensor plan, and those an optimizer sees.

Invariant: what is made of a weight is an activation whose gradient obeys the convention of `pieces`, however the weight
was reached: by the attribute of its module, by `parameters()`, by a state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar import pieces
from meshpar.mesh import is_ours
from meshpar.private import pytree
from meshpar.registry import RULES


def is_split(w: object) -> bool:
    """Tell whether a tensor is a weight of a tensor plan, as modules hold it in a forward."""
    return isinstance(w, DTensor) and w.device_mesh.mesh_dim_names == ("tensor",)


def computes(func: Callable[..., Any]) -> bool:
    """Tell whether a function gives new numbers; others (attributes, `detach`) may have a weight as it is.

    `fully_shard` calls those of the weights that it puts in place.
    """
    if getattr(func, "__name__", "") in ("__get__", "__set__") or func in _KEEP:
        return False
    return func not in RULES or RULES[func].status != "plain"


_KEEP = (torch.Tensor.detach, torch.detach, torch.Tensor.requires_grad_)


def adopted(tree: Any, mesh: DeviceMesh) -> Any:
    """Bring the weights in a tree onto the mesh of the activations.

    Communication:
        None for those of a tensor plan; all others are gathered.
    """

    def bring(x: Any) -> Any:
        if not isinstance(x, DTensor) or is_ours(x.device_mesh):
            return x
        if is_split(x):
            return entered(x, mesh)
        full = x.full_tensor()
        return pieces.whole(full, mesh, pieces.replicated(mesh), full.shape)

    return pytree.tree_map(bring, tree)


def with_gradients_in_place(tree: Any) -> Any:
    """Let the gradients of parameters lie as these do, where DTensor computes with them (a penalty in a loss).

    Left to itself it gives some of them whole, and `fully_shard` adds its shards to what it finds, whatever the shape.
    """
    return pytree.tree_map(lambda x: _InPlace.apply(x) if _is_parameter(x) else x, tree)


def _is_parameter(x: object) -> bool:
    return isinstance(x, DTensor) and not is_ours(x.device_mesh) and x.is_leaf and x.requires_grad


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):  # type: ignore[no-untyped-def]
        ctx.lies = w.device_mesh, w.placements
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g.redistribute(*ctx.lies)


def entered(w: DTensor, mesh: DeviceMesh) -> DTensor:
    """Make an activation of a weight over `tensor`; its gradient obeys the convention of `pieces`.

    Communication:
        None forward; none backward, but where the gradient lies otherwise over `tensor`.
    """
    (placement,) = w.placements
    if not isinstance(placement, Shard):
        return pieces.lift(w.to_local(), mesh)
    return _Enter.apply(w, mesh, placement.dim)  # type: ignore[no-any-return]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, mesh, dim):  # type: ignore[no-untyped-def]
        ctx.request = w.device_mesh, dim, w.shape, w.stride()
        placements = [Shard(dim) if axis == "tensor" else Replicate() for axis in pieces.axes_of(mesh)]
        return pieces.whole(w.to_local(), mesh, placements, w.shape)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        over, dim, shape, stride = ctx.request
        part: Tensor = pieces.part_of_split_gradient(g, dim)
        return DTensor.from_local(part, over, [Shard(dim)], run_check=False, shape=shape, stride=stride), None, None
