"""Normalisation over the last dims, which may be sharded: layer norm and rms norm.

Invariant: as in `rules.norm`; weights that span a sharded dim are cut to the own rows, and their gradient is put back
at its place by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces, record
from meshpar.registry import rule
from meshpar.rules.norm import (
    check,
    clean_piece,
    cut_along,
    merged_sizes,
    not_an_activation,
    on_nothing,
    result_dtype,
)
from meshpar.rules.spatial import settle
from meshpar.rules.statistics import Statistics, normalise, total, widened


def _hollow_layer_norm(x, weight, bias, shape, eps):  # type: ignore[no-untyped-def]
    return F.layer_norm(x, shape, weight, bias, eps)


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    """Normalise over the last dims; weight and bias are cut to the own rows where those dims are sharded."""
    shape = _as_shape(normalized_shape)
    if not isinstance(input, DTensor):
        return not_an_activation(F.layer_norm, (input, shape, weight, bias, eps))  # type: ignore[no-any-return]
    check(_hollow_layer_norm, (input, weight, bias), shape, eps)
    first = input.dim() - len(shape)
    x = settle(input, range(input.dim()), "F.layer_norm", nested=range(first))
    w, b = _trailing_weight(weight, x, first), _trailing_weight(bias, x, first)
    piece = clean_piece(x)
    sizes = merged_sizes(x, range(first, x.dim()))
    if not sizes:
        empty = piece.numel() == 0
        out = on_nothing(piece, w, b) if empty else torch.layer_norm(piece, shape, w, b, eps)
        return pieces.whole(out, x.device_mesh, x.placements, x.shape)
    plan = Statistics(
        mesh=x.device_mesh,
        sizes=sizes,
        num_groups=1,
        over_batch=False,
        count=math.prod(shape),
        eps=eps,
        label=record.here("F.layer_norm"),
        dtype=widened(piece).dtype,
    )
    # One sample of one channel for each of the leading indices.
    rows = piece.reshape(math.prod(piece.shape[:first]), 1, math.prod(piece.shape[first:]))
    xhat = normalise(rows, None, None, plan)[0].reshape(piece.shape)
    out = _scaled(xhat, w, b).to(result_dtype(piece, lambda t: torch.layer_norm(t, (2,))))
    return pieces.whole(out, x.device_mesh, x.placements, x.shape)


def _as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def _trailing_weight(w: Tensor | None, x: DTensor, first: int) -> Tensor | None:
    if w is None:
        return None
    w = pieces.companion(w, x.device_mesh, x.placements)
    for dim in range(first, x.dim()):
        w = cut_along(w, dim - first, x.placements, x.device_mesh, dim)
    return w


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias.to(x.dtype), x, weight.to(x.dtype))
    out = x if weight is None else x * weight
    return out if bias is None else out + bias


def _hollow_rms_norm(x, weight, shape, eps):  # type: ignore[no-untyped-def]
    return F.rms_norm(x, shape, weight, eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root of the mean square over the last dims, which may be sharded.

    Communication:
        None where those dims are whole; else one all-reduce forward and one backward, of one value a row.
    """
    shape = _as_shape(normalized_shape)
    if not isinstance(input, DTensor):
        return not_an_activation(F.rms_norm, (input, shape, weight, eps))  # type: ignore[no-any-return]
    check(_hollow_rms_norm, (input, weight), shape, eps)
    first = input.dim() - len(shape)
    x = settle(input, range(input.dim()), "F.rms_norm", nested=range(first))
    w = _trailing_weight(weight, x, first)
    piece = clean_piece(x)
    sizes = merged_sizes(x, range(first, x.dim()))
    if not sizes:
        out = torch.rms_norm(piece, shape, w, eps) if piece.numel() else on_nothing(piece, w)
        return pieces.whole(out, x.device_mesh, x.placements, x.shape)
    wide = widened(piece)
    plan = Statistics(
        mesh=x.device_mesh,
        sizes=sizes,
        num_groups=1,
        over_batch=False,
        count=math.prod(shape),
        eps=torch.finfo(wide.dtype).eps if eps is None else eps,
        label=record.here("F.rms_norm"),
        dtype=wide.dtype,
    )
    power = total(wide.square().sum(tuple(range(first, x.dim())), keepdim=True), plan) / plan.count
    out = _scaled(wide * torch.rsqrt(power + plan.eps), w, None)
    out = out.to(result_dtype(piece, lambda t: torch.rms_norm(t, (2,))))
    return pieces.whole(out, x.device_mesh, x.placements, x.shape)
