"""Losses over classes: cross entropy and negative log likelihood, with targets that lack the class dim.

Invariant: as in `rules.loss`; the denominator, which depends on the targets that are ignored and on the weights of
classes, travels with the sum in its one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.registry import rule
from meshpar.rules.loss import reduced, reduction_of, sum_dtype
from meshpar.rules.norm import check
from meshpar.rules.pointwise import align
from meshpar.rules.spatial import settle


def _hollow_classes(x, target, weight, func, reduction, given):  # type: ignore[no-untyped-def]
    return func(x, target, weight, reduction=reduction, **dict(given))


@rule(F.cross_entropy)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Give the cross entropy of class logits along dim 1; targets are classes or probabilities."""
    mode = reduction_of(reduction, size_average, reduce)
    given = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _class_loss(F.cross_entropy, input, target, weight, mode, given)


@rule(F.nll_loss)
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
) -> Tensor:
    """Give the negative log likelihood of class log-probabilities along dim 1."""
    mode = reduction_of(reduction, size_average, reduce)
    return _class_loss(F.nll_loss, input, target, weight, mode, {"ignore_index": ignore_index})


def _class_loss(
    func: Callable[..., Tensor],
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    given: dict[str, Any],
) -> Tensor:
    """Evaluate a loss over classes: the target has the dims of the prediction without the class dim.

    Communication:
        One all-reduce of the sum, the weight of the elements that are not ignored, and a flag.
    """
    out_shape = check(_hollow_classes, (x, target, weight), func, "none", tuple(given.items()))
    check(_hollow_classes, (x, target, weight), func, reduction, tuple(given.items()))
    op = f"F.{func.__name__}"
    classes = 0 if x.dim() == 1 else 1
    if tuple(target.shape) not in (tuple(x.shape), (*x.shape[:classes], *x.shape[classes + 1 :])):
        # Meta tensors let this pass; one process does not.
        func(torch.zeros(x.shape, dtype=x.dtype), torch.zeros(target.shape, dtype=target.dtype))
    if isinstance(x, DTensor):
        others = [dim for dim in range(x.dim()) if dim != classes]
        x = settle(x, others, op, nested=others)
    probabilities = target.shape == x.shape and target.is_floating_point()
    mesh, placements = _shared_placements(x, target, classes, probabilities=probabilities)
    without = [_minus_dim(placement, classes) for placement in placements]
    local_x = align(x, mesh, placements, x.shape, op)
    local_target = align(target, mesh, placements if probabilities else without, target.shape, op)
    w = None if weight is None else pieces.companion(weight, mesh, placements)

    def values() -> Tensor:
        return func(local_x, local_target, w, reduction="none", **given)

    if reduction == "none":
        return pieces.whole(values(), mesh, without, out_shape)

    def counted() -> Tensor:
        valid: Tensor = local_target != given["ignore_index"]
        if w is None:
            return torch.sum(valid)
        return torch.sum(w.detach()[torch.where(valid, local_target, 0)] * valid)  # ignored ones may not exist

    denominator: float | Callable[[], Tensor] = 1.0
    if reduction == "mean":
        denominator = float(math.prod(out_shape)) if probabilities else counted
    return reduced(values, denominator, mesh, without, op, dtype=sum_dtype(local_x), refuses=IndexError)


def _minus_dim(placement: Placement, dim: int) -> Placement:
    if isinstance(placement, Shard):
        return Shard(placement.dim - (placement.dim > dim))
    return placement


def _shared_placements(
    x: Tensor, target: Tensor, classes: int, *, probabilities: bool
) -> tuple[DeviceMesh, list[Placement]]:
    """Choose where the loss is computed: as the prediction lies, and where that is replicated as the target lies."""
    found: list[Placement | None] = [None] * (mesh := _mesh_of(x, target)).ndim
    if isinstance(x, DTensor):
        found = [p if pieces.is_plain_shard(p) else None for p in x.placements]
    if isinstance(target, DTensor):
        for axis, placement in enumerate(target.placements):
            if found[axis] is not None or not pieces.is_plain_shard(placement):
                continue
            dim = placement.dim  # type: ignore[attr-defined]
            shard = Shard(dim if probabilities else dim + (dim >= classes))
            if shard.dim != classes and shard not in found:
                found[axis] = shard
    return mesh, [p or Replicate() for p in found]


def _mesh_of(*tensors: Tensor) -> DeviceMesh:
    return next(x.device_mesh for x in tensors if isinstance(x, DTensor))
