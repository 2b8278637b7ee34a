"""`F.linear`: features, the last dim, times a weight.

Invariant: rows and samples stay where they are. Whole features need nothing from other ranks; sharded ones, and
sharded weights, are a product as any other (see `contract`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from meshpar import pieces
from meshpar.gathering import gather_call, is_split
from meshpar.registry import rule
from meshpar.rules.channels import Share, added_up, brought, own_weight, read, share_of
from meshpar.rules.contract import contract
from meshpar.rules.products import plus, shape_after
from meshpar.rules.spatial import settle


@rule(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply the last dim by a weight.

    Args:
        input: global shape (..., in_features), sharded along any dims.
        weight: shape (out_features, in_features); plain, so that all ranks hold it whole, or an activation.
        bias: shape (out_features,), or None; plain or an activation.

    Returns:
        Global shape (..., out_features); placements of the input where its features are whole. The output of sharded
        features is sharded along another dim.

    Communication:
        None where the features and the weight are whole; else see `contract`.

    Raises:
        RuntimeError: features that do not fit, as torch does.
    """
    if not isinstance(input, DTensor) and not isinstance(weight, DTensor):
        return gather_call(F.linear, (input, weight, bias), {}, why="the bias alone is an activation")
    if torch.is_autocast_enabled(input.device.type) or not _fits(input, weight, bias):
        shape_after(F.linear, (input, weight, bias))  # torch's own error: an empty piece might not raise it
    if isinstance(input, DTensor) and weight.dim() == 2 and (share := _share(input, weight)) is not None:
        return _shared(input, weight, bias, share)
    if (
        isinstance(input, DTensor)
        and _is_usual(input, weight.dim())
        and not any(isinstance(w, DTensor) and is_split(w) for w in (weight, bias))
    ):
        mesh, placements = input.device_mesh, input.placements
        w = pieces.companion(weight, mesh, placements)
        b = None if bias is None else pieces.companion(bias, mesh, placements)
        out = F.linear(pieces.local(input), w, b)
        return pieces.whole(out, mesh, placements, (*input.shape[:-1], *weight.shape[:-1]))
    batch = tuple(str(i) for i in range(input.dim() - 1))
    features = ("o",) if weight.dim() == 2 else ()
    letters = ((*batch, "i"), (*features, "i"), (*batch, *features))
    product = contract(input, weight, letters, F.linear, (*input.shape[:-1], *weight.shape[:-1]), "F.linear")
    return product if bias is None else plus(product, bias)


def _share(x: DTensor, weight: Tensor) -> Share | None:
    """Find how features are shared out over `tensor` by the weight; sums that a plan chooses better are left to it."""
    share = share_of(x, weight, x.dim() - 1)
    return share if isinstance(weight, DTensor) else None


def _shared(x: DTensor, weight: Tensor, bias: Tensor | None, share: Share) -> Tensor:
    """Multiply by a weight that is split over `tensor`."""
    op = "F.linear"
    x = settle(brought(x, share, op), range(x.dim() if share.held else x.dim() - 1), op, nested=range(x.dim() - 1))
    piece = read(x, share)
    w = own_weight(weight, share, x.placements, op)
    placements = [share.placement if axis == share.axis else p for axis, p in enumerate(x.placements)]
    shape = (*x.shape[:-1], weight.shape[0])
    if share.kind == "in":
        out = added_up(F.linear(piece, w), bias, share, x.placements, op)
    else:
        out = F.linear(piece, w, None if bias is None else own_weight(bias, share, x.placements, op))
    return pieces.whole(out, x.device_mesh, placements, shape)


def _is_usual(x: DTensor, weight_dims: int) -> bool:
    """Tell whether features are whole; an axis of one rank may be said to shard them where the output has them too."""
    last = Shard(x.dim() - 1)
    alone = all(p != last or (weight_dims == 2 and x.device_mesh.size(i) == 1) for i, p in enumerate(x.placements))
    return alone and all(p.is_replicate() or pieces.is_plain_shard(p) for p in x.placements)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether features fit; torch is asked, which takes longer, only where something looks wrong."""
    return (
        0 < weight.dim() <= 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and x.dtype == weight.dtype
        and (bias is None or bias.dtype == x.dtype)
    )
