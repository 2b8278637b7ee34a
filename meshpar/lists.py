"""Ops on lists of tensors, as optimizers call them, on pieces: parameters may lie on different meshes, or be plain.

torch refuses lists of DTensors beside plain tensors, has no fused SGD or Adagrad for DTensors, and looks only at the
first gradient of a list to decide over which ranks an overflow must be agreed (torch 2.13): where that one is whole on
every rank, the ranks would disagree, some would skip the step, and the parameters would drift apart.

Invariant: an op that works element by element on tensors that lie alike gives what it gives on their pieces; anything
else goes the way it went before. An overflow on one rank is one on all ranks that share any gradient of the list.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.peers import naming

ELEMENTWISE = (
    "abs add addcdiv addcmul clamp_max clamp_min clone copy div exp lerp log maximum minimum mul neg pow reciprocal "
    "rsqrt sign sqrt sub zero"
)
"""The list ops that work element by element, and that optimizers call; the fused steps of optimizers do so too."""


@functools.cache
def install() -> None:
    """Take the list ops over, once in a process."""
    for op in private.list_ops(ELEMENTWISE.split()):
        private.set_dtensor_handler(op, _on_pieces)
    private.set_dtensor_handler(private.UNSCALE, _unscale)


def _on_pieces(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [x for x in args if isinstance(x, list | tuple) and any(isinstance(item, Tensor) for item in x)]
    first = lists[0]
    if not all(_alike(items) for items in zip(*(x for x in lists if len(x) == len(first)), strict=True)):
        with private.without_dtensor_handler(op):
            return op(*args, **kwargs)
    out = op(*map(_piece, args), **{name: _piece(value) for name, value in kwargs.items()})
    if out is None or not isinstance(out, list | tuple):
        return out
    return [private.like(x, y) if isinstance(x, DTensor) else y for x, y in zip(first, out, strict=True)]


def _alike(items: tuple[Any, ...]) -> bool:
    """Tell whether the tensors at one place of all lists lie alike: scalars lie anywhere."""
    spread = [x for x in items if isinstance(x, DTensor)]
    return all(
        x.device_mesh == spread[0].device_mesh
        and x.placements == spread[0].placements
        and not any(p.is_partial() for p in x.placements)
        for x in spread
    ) and (not spread or all(isinstance(x, DTensor) or x.dim() == 0 for x in items if isinstance(x, Tensor)))


def _piece(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_piece(item) for item in x]
    return private.piece_of(x) if isinstance(x, DTensor) else x


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients in place; `found_inf` becomes one on every rank that shares a gradient with one that has it.

    Communication:
        An all-reduce of 4 bytes for each axis that shards any of the gradients.
    """
    grads, found_inf, scale = args
    op(_piece(grads), _piece(found_inf), _piece(scale), **kwargs)
    for group, axis in groups_of(grads).items():
        with naming(group, axis, "|unscale_"):
            dist.all_reduce(_piece(found_inf), op=dist.ReduceOp.MAX, group=group)


def groups_of(tensors: Any) -> dict[dist.ProcessGroup, str]:
    """Give the groups over which any of some tensors is spread, in the order of the tensors, and their axes."""
    found: dict[dist.ProcessGroup, str] = {}
    for x in tensors:
        found |= sharing_groups(x)
    return found


def sharing_groups(x: Tensor) -> dict[dist.ProcessGroup, str]:
    """Give the groups along which the ranks hold different pieces of a tensor, and the axis of each."""
    if not isinstance(x, DTensor):
        return {}
    mesh, names = x.device_mesh, x.device_mesh.mesh_dim_names or ()
    cut = [i for i, p in enumerate(x.placements) if not p.is_replicate() and mesh.size(i) > 1]
    return {mesh.get_group(i): names[i] if names else str(i) for i in cut}
