"""Reductions made of others: variances, norms, products, log-sum-exp, softmax over sharded dims.

Invariant: each is the composition that defines it, so its gradient is theirs; values are centred or scaled before
they are added up, as torch does on one process, and parts are added up in float32 or wider. Where a root has an
infinite slope the gradient is what torch gives, which is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.registry import functions, name_of, rule
from meshpar.rules.extremes import extreme_over, shared_extreme
from meshpar.rules.pointwise import write_into
from meshpar.rules.reduce import Parts, dims_of, forecast, reduction, register, settled, wide


def _root(x: Tensor, order: float = 2.0) -> Tensor:
    """Take a root whose slope at zero is zero."""
    zero = x == 0
    inner = torch.where(zero, torch.ones_like(x), x)
    return torch.where(zero, torch.full_like(x, 0.0 ** (1 / order) if order > 0 else math.inf), inner.pow(1 / order))


def _spread_and_centre(parts: Parts, correction: float) -> tuple[Tensor, Tensor]:
    """Give variance and mean, in two all-reduces: the mean, then the squares around it with the mean's own error."""
    x = parts.piece.to(wide(parts.piece.dtype))
    is_complex = x.is_complex()
    if is_complex:
        x = torch.view_as_real(x)
    centre = parts.sum(x.sum(dim=parts.dims, keepdim=True)) / parts.num
    off = x - parts.spread(centre)
    sums = torch.stack([off.square().sum(dim=parts.dims, keepdim=True), off.sum(dim=parts.dims, keepdim=True)])
    squares, rest = parts.sum(sums)
    # The corrected two-pass algorithm (Chan, Golub and LeVeque 1983): `rest` is zero but for rounding.
    spread = (squares - rest.square() / parts.num).clamp_min(0)
    mean = centre + rest / parts.num
    if is_complex:
        spread, mean = spread.sum(-1), torch.view_as_complex(mean)
    return parts.squeezed(spread / max(parts.num - correction, 0)), parts.squeezed(mean)


def _correction(given: dict[str, Any]) -> float:
    if given.get("correction") is not None:
        return float(given["correction"])
    return 0.0 if given.get("unbiased") is False else 1.0


def _variance(*, root: bool, mean: bool) -> Callable[[Parts], Any]:
    def sharded(parts: Parts) -> Any:
        spread, centre = _spread_and_centre(parts, _correction(dict(parts.given)))
        spread = (_root(spread) if root else spread).to(parts.dtype)
        return (spread, centre.to(parts.piece.dtype)) if mean else spread

    return sharded


def _two_signatures(sharded: Callable[[Parts], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Tell `var(x, unbiased)` from `var(x, dim, unbiased, keepdim)` and `var(x, dim, *, correction, keepdim)`."""

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        of_all = reduction("unbiased", sharded)(func)
        along = reduction("dim unbiased keepdim", sharded)(func)

        def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
            return (of_all if args and isinstance(args[0], bool) else along)(input, *args, **kwargs)

        return handler

    return make


for _name in ("var", "std", "var_mean", "std_mean"):
    register(_name, _two_signatures(_variance(root=_name.startswith("std"), mean=_name.endswith("_mean"))))


def norm_of(parts: Parts, order: float) -> Tensor:
    """Give the p-norm of the elements, in the dtype of `parts`."""
    if math.isinf(order):
        size = replace(parts, piece=parts.piece.abs())
        return shared_extreme(size, maximum=order > 0).to(parts.dtype)
    x = parts.piece.to(wide(parts.piece.dtype)).abs()
    zero = x == 0
    if order == 0:
        powers = torch.where(zero, x * 0, torch.ones_like(x))
    elif order == 2:
        powers = x.square()
    else:
        # At zero |x|^p has a kink or a pole for p <= 1; torch's gradient is zero there.
        at_zero = torch.full_like(x, 0.0 if order > 0 else math.inf)
        powers = torch.where(zero, at_zero, torch.where(zero, torch.ones_like(x), x).pow(order))
    total = parts.sum(powers.sum(dim=parts.dims, keepdim=parts.keepdim))
    return (total if order in (0, 1) else _root(total, order)).to(parts.dtype)


def _norm(default: float, name: str) -> Callable[[Parts], Tensor]:
    def sharded(parts: Parts) -> Tensor:
        order = parts.given.get(name, default)
        order = default if order in ("fro", None) else float(order)
        piece = parts.piece.to(parts.given.get("dtype") or parts.piece.dtype)
        return norm_of(replace(parts, piece=piece), order)

    return sharded


def _norm_rule(order: str, name: str, *, vector: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the handler of a norm that may be one of vectors or of matrices."""

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        as_vector = reduction(order, _norm(2.0, name))(func)

        def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(order.split(), args, strict=False)), **kwargs}
            kind, dim = given.get(name, "fro"), given.get("dim")
            one_dim = isinstance(dim, int) or (dim is None and input.dim() == 1) or (dim is not None and len(dim) == 1)
            is_number = isinstance(kind, int | float)
            if kind in ("fro", None) or (is_number and (vector or one_dim)):
                return as_vector(input, *args, **kwargs)
            return gather_call(func, (input, *args), kwargs, why="a norm of matrices")

        return handler

    return make


for _function in (torch.norm, torch.Tensor.norm):
    rule(_function)(_norm_rule("p dim keepdim out dtype", "p", vector=True)(_function))
rule(torch.linalg.norm)(_norm_rule("ord dim keepdim", "ord", vector=False)(torch.linalg.norm))


_vector_norm = reduction("ord dim keepdim", _norm(2.0, "ord"))(torch.linalg.vector_norm)


@rule(torch.linalg.vector_norm)
def vector_norm(x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Give `torch.linalg.vector_norm`, whose tensor is called x."""
    return _vector_norm(x, *args, **kwargs)


def _peak(x: Tensor, parts: Parts) -> Tensor:
    """Give the largest (real) value, finite, as a constant: what is taken off before exponentials."""
    found = extreme_over(x.real if x.is_complex() else x, parts.dims, parts.mesh, parts.axes, parts.op, maximum=True)
    return torch.where(found.isinf(), torch.zeros_like(found), found)


def _logsumexp(parts: Parts) -> Tensor:
    """Give the logarithm of the sum of exponentials."""
    x = parts.piece.to(wide(parts.dtype))
    peak = _peak(x, parts)
    total = parts.sum((x - peak).exp().sum(dim=parts.dims, keepdim=True))
    return parts.squeezed(total.log() + peak).to(parts.dtype)


register("logsumexp", reduction("dim keepdim", _logsumexp))


def softmax_over(parts: Parts, *, log: bool) -> Tensor:
    """Give the softmax, or its logarithm, over sharded dims."""
    x = parts.piece.to(wide(parts.dtype))
    shifted = x - _peak(x, parts)
    total = parts.spread(parts.sum(shifted.exp().sum(dim=parts.dims, keepdim=True)))
    return (shifted - total.log() if log else shifted.exp() / total).to(parts.dtype)


def _softmax_rule(names: str, *, log: bool, sign: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the handler of one form of softmax; in `F` the second argument after the input is a stack level."""

    def make(func: Callable[..., Any]) -> Callable[..., Any]:
        op = name_of(func)

        def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:
            out = kwargs.pop("out", None)
            if out is not None:
                return write_into(out, handler(input, *args, **kwargs), op)
            given = {**dict(zip(names.split(), args, strict=False)), **kwargs}
            x = settled(input, op)
            dim: Any = given.get("dim")
            if dim is None and "_stacklevel" in names:
                dim = 0 if x.dim() in (0, 1, 3) else 1
            axes = tuple(pieces.shard_axes(x, dim)) if x.dim() and dim in range(-x.dim(), x.dim()) else ()
            if not axes:
                result = func(pieces.local(x), *args, **kwargs)
            else:
                dims = dims_of(dim, x.dim())
                dtype = forecast(func, x, args, kwargs).dtype
                asked = given.get("dtype")
                piece = pieces.local(x) if asked is None else pieces.local(x).to(asked)
                n = x.shape[dims[0]]
                parts = Parts(
                    piece * sign,
                    dims,
                    keepdim=True,
                    num=n,
                    mesh=x.device_mesh,
                    axes=axes,
                    op=op,
                    dtype=dtype,
                    given=given,
                )
                result = softmax_over(parts, log=log)
            return pieces.whole(result, x.device_mesh, x.placements, x.shape)

        return handler

    return make


for _name, _log, _sign in (("softmax", False, 1), ("log_softmax", True, 1), ("softmin", False, -1)):
    for _function in functions(_name):
        _in_functional = _function is getattr(torch.nn.functional, _name)
        _names = "dim _stacklevel dtype" if _in_functional else "dim dtype"
        rule(_function)(_softmax_rule(_names, log=_log, sign=_sign)(_function))


class _Product(torch.autograd.Function):
    """Multiply over ranks; the gradient of a factor is the product of the others, also where one is zero."""

    @staticmethod
    def forward(ctx, part, parts):  # type: ignore[no-untyped-def]
        whole, others = part, torch.ones_like(part)
        for axis in parts.axes:
            factors = pieces.all_gather_parts(whole, parts.mesh, axis, parts.op)
            me = parts.mesh.get_local_rank(axis)
            others = others * torch.cat([factors[:me], factors[me + 1 :]]).prod(dim=0)
            whole = factors.prod(dim=0)
        ctx.save_for_backward(others)
        return whole

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.saved_tensors[0].conj(), None


def _prod(parts: Parts) -> Tensor:
    """Multiply over one dim, or over all."""
    part = parts.piece.to(wide(parts.dtype))
    for d in reversed(parts.dims):
        part = part.prod(dim=d, keepdim=parts.keepdim)
    return _Product.apply(part, parts).to(parts.dtype)  # type: ignore[no-any-return]


register("prod", reduction("dim keepdim", _prod))
