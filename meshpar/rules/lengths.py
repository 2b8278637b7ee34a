"""Lengths, angles and distances along a dim, put together from reductions.

Invariant: nothing is sent but what the reductions send: one number for each length, whatever is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.registry import functions, rule
from meshpar.rules.pointwise import map_pieces, write_into
from meshpar.spmd import call


@rule(F.normalize)
def normalize(input: DTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divide by the p-norm along a dim, sharded or not."""
    length = call(Tensor.norm, (input, p, dim), {"keepdim": True})
    result = call(Tensor.div, (input, call(Tensor.clamp_min, (length, eps), {})), {})
    return result if out is None else write_into(out, result, "F.normalize")


def renormed(input: DTensor, p: float, dim: int, maxnorm: float) -> Any:
    """Scale down each slice of a dim whose p-norm is above a bound."""
    torch.empty(input.shape, device="meta").renorm(p, dim, maxnorm)  # torch's errors
    others = [d for d in range(input.dim()) if d != dim % input.dim()]
    length = call(torch.linalg.vector_norm, (input, p, others), {"keepdim": True})
    return map_pieces(_bounded, (input, length), {"maxnorm": maxnorm})


def _bounded(x: Tensor, length: Tensor, *, maxnorm: float) -> Tensor:
    # torch's own formula, constant and all.
    return x * torch.where(length > maxnorm, maxnorm / (length + 1e-7), torch.ones_like(length))


@rule(*functions("renorm"))
def renorm(input: DTensor, p: float, dim: int, maxnorm: float, *, out: Any = None) -> Any:
    """Give `torch.renorm`: slices of a dim whose p-norm is above a bound are scaled down to it."""
    result = renormed(input, p, dim, maxnorm)
    return result if out is None else write_into(out, result, "renorm")


@rule(Tensor.renorm_)
def renorm_(x: DTensor, p: float, dim: int, maxnorm: float) -> Any:
    """Write what `renorm` gives."""
    return write_into(x, renormed(call(torch.clone, (x,), {}), p, dim, maxnorm), "Tensor.renorm_")


@rule(F.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """Give the cosine of the angle between vectors along a dim; short ones count as having length eps."""
    ghosts = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (x1, x2)]
    F.cosine_similarity(ghosts[0], ghosts[1], dim)  # torch's errors
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    wide = torch.promote_types(x1.dtype, x2.dtype)
    mesh = next(x for x in (x1, x2) if isinstance(x, DTensor)).device_mesh
    units = []
    for given in (x1, x2):
        x = given if isinstance(given, DTensor) else pieces.lift(given, mesh)
        x = call(Tensor.expand, (call(Tensor.to, (x, wide), {}), shape), {})
        length = call(torch.linalg.vector_norm, (x, 2, dim), {"keepdim": True})
        units.append(call(torch.div, (x, _at_least(length, eps)), {}))
    return call(torch.sum, (call(torch.mul, tuple(units), {}), dim), {})


def _at_least(length: Any, eps: float) -> Any:
    """Raise lengths to eps as torch does: the gradient passes as if they had not been."""
    return map_pieces(_raised, (length,), {"eps": eps})


def _raised(length: Tensor, *, eps: float) -> Tensor:
    short = (length < eps).detach()
    return torch.where(short, length - length.detach() + eps, length)


@rule(F.pairwise_distance)
def pairwise_distance(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Give the p-norm of the difference of vectors along the last dim."""
    apart = call(torch.add, (call(torch.sub, (x1, x2), {}), eps), {})
    return call(torch.linalg.vector_norm, (apart, p, -1), {"keepdim": keepdim})
