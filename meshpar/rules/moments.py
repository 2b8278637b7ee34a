"""Reductions made of others: variances, norms, products, log-sum-exp, softmax over sharded dims.

Invariant: each is the composition that defines it, so its gradient is theirs; values are centred or scaled before
they are added up, as torch does on one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.rules import reduce
from meshpar.rules.pointwise import map_pieces
from meshpar.rules.reduce import Dims, dims_of, total
from meshpar.spmd import functions, gather_call, rule


def _each(func: Callable[..., Tensor], *args: Any) -> DTensor:
    return map_pieces(func, args, {})  # type: ignore[no-any-return]


def _reduces_sharded(x: DTensor, dims: tuple[int, ...]) -> bool:
    return any(pieces.shard_axes(x, d) for d in dims)


def _variance(
    x: DTensor, dims: tuple[int, ...], correction: float, *, keepdim: bool, op: str
) -> tuple[DTensor, DTensor]:
    """Give variance and mean: squares of centred values, so that mean >> std does not matter."""
    num = math.prod(x.shape[d] for d in dims)
    wide = _each(lambda t: t.to(reduce._wide(t)), x)
    centre = total(wide, dims, op, keepdim=True) / num
    squares = _each(lambda t, m: (t - m).abs().square(), wide, centre)
    spread = total(squares, dims, op, keepdim=keepdim) / max(num - correction, 0)
    average = centre if keepdim else pieces.whole(
        pieces.local(centre).squeeze(dims), x.device_mesh, *_squeezed(centre, dims)
    )
    real = spread.dtype if not x.dtype.is_floating_point else x.dtype
    return _each(lambda t: t.to(real), spread), _each(lambda t: t.to(x.dtype), average)


def _squeezed(x: DTensor, dims: tuple[int, ...]) -> tuple[Any, Any]:
    placements, shape, _ = reduce.reduced(x, dims, False)
    return placements, shape


def _variance_rule(name: str) -> Callable[..., Any]:
    func = getattr(torch, name)

    def handler(input: DTensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        given = _variance_arguments(input, args, kwargs)
        if given is None or not input.dim() or kwargs.get("out") is not None:
            return gather_call(func, (input, *args), kwargs, why="arguments without a rule")
        dims, correction, keepdim = given
        spread, average = _variance(input, dims, correction, keepdim=keepdim, op=f"torch.{name}")
        if name.startswith("std"):
            spread = _each(torch.sqrt, spread)
        return (spread, average) if name.endswith("_mean") else spread

    return handler


def _variance_arguments(
    x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], float, bool] | None:
    """Read the two signatures of torch.var: (dim, unbiased, keepdim) and (dim, *, correction, keepdim)."""
    rest = list(args)
    given = dict(kwargs)
    if rest and isinstance(rest[0], bool):
        given["unbiased"] = rest.pop(0)
    for name in ("dim", "unbiased", "keepdim")[: len(rest)]:
        given[name] = rest.pop(0)
    if rest or set(given) - {"dim", "unbiased", "keepdim", "correction"}:
        return None
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    return dims_of(given.get("dim"), x.dim()), float(correction), bool(given.get("keepdim", False))


for _name in ("var", "std", "var_mean", "std_mean"):
    for _function in functions(_name):
        rule(_function)(_variance_rule(_name))


def vector_norm(x: DTensor, order: float, dims: tuple[int, ...], *, keepdim: bool, op: str) -> DTensor:
    """Give the p-norm over dims."""
    if order in (math.inf, -math.inf):
        return reduce._extreme(_each(torch.abs, x), dims, keepdim, maximum=order > 0)
    if order == 0:
        return total(_each(lambda t: (t != 0).to(t.dtype), x), dims, op, keepdim=keepdim)
    powers = total(_each(lambda t: t.abs().pow(order), x), dims, op, keepdim=keepdim)
    if order == 1:
        return powers
    # At zero the root has an infinite slope; torch's gradient of a norm is zero there.
    return _each(lambda t: torch.where(t == 0, t, torch.where(t == 0, torch.ones_like(t), t).pow(1.0 / order)), powers)


@rule(*functions("norm"))
def norm(
    input: DTensor,  # noqa: A002
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Give `torch.norm`: the Frobenius norm or a p-norm."""
    order = 2.0 if p in ("fro", None) else p
    if isinstance(order, str) or out is not None or not input.dim():
        return gather_call(torch.norm, (input, p, dim, keepdim), {"dtype": dtype}, why="arguments without a rule")  # type: ignore[no-any-return]
    x = input if dtype is None else _each(lambda t: t.to(dtype), input)
    return vector_norm(x, float(order), dims_of(dim, x.dim()), keepdim=keepdim, op="torch.norm")


@rule(torch.linalg.vector_norm)
def linalg_vector_norm(
    x: DTensor,
    ord: float = 2,  # noqa: A002
    dim: Dims = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002
    *,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Tensor:
    """Give `torch.linalg.vector_norm`."""
    if out is not None or not x.dim():
        args = (x, ord, dim, keepdim)
        return gather_call(torch.linalg.vector_norm, args, {"dtype": dtype, "out": out}, why="arguments without a rule")  # type: ignore[no-any-return]
    wide = x if dtype is None else _each(lambda t: t.to(dtype), x)
    return vector_norm(wide, float(ord), dims_of(dim, x.dim()), keepdim=keepdim, op="torch.linalg.vector_norm")


def _peak(x: DTensor, dims: tuple[int, ...]) -> DTensor:
    """Give the largest value, finite, as a constant: what is taken off before exponentials."""
    found = reduce._extreme(x.detach(), dims, True, maximum=True)
    return _each(lambda t: torch.where(t.isinf(), torch.zeros_like(t), t), found)


@rule(*functions("logsumexp"))
def logsumexp(input: DTensor, dim: Dims, keepdim: bool = False, *, out: Any = None) -> Tensor:  # noqa: A002, FBT001, FBT002
    """Give the logarithm of the sum of exponentials."""
    if out is not None or not input.dim() or not input.is_floating_point():
        return gather_call(torch.logsumexp, (input, dim, keepdim), {}, why="arguments without a rule")  # type: ignore[no-any-return]
    dims = dims_of(dim, input.dim())
    peak = _peak(input, dims)
    powers = _each(lambda t, m: (t - m).exp(), input, peak)
    added = _each(lambda t, m: t.log() + m, total(powers, dims, "torch.logsumexp", keepdim=True), peak)
    if keepdim:
        return added
    return pieces.whole(pieces.local(added).squeeze(dims), added.device_mesh, *_squeezed(added, dims))


def _softmax_rule(func: Callable[..., Any], *, log: bool) -> Callable[..., Any]:
    op = "log_softmax" if log else "softmax"

    def handler(
        input: DTensor,  # noqa: A002
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> Any:
        if isinstance(_stacklevel, torch.dtype):  # torch.softmax(x, dim, dtype)
            dtype = _stacklevel
        if dim is None or not input.dim() or others:
            return gather_call(func, (input,), {"dim": dim, "dtype": dtype, **others}, why="no dim is named")
        (d,) = dims_of(dim, input.dim())
        x = input if dtype is None else _each(lambda t: t.to(dtype), input)
        plain = torch.log_softmax if log else torch.softmax
        if not pieces.shard_axes(x, d):
            return _each(lambda t: plain(t, d), x)
        shifted = _each(lambda t, m: t - m, x, _peak(x, (d,)))
        added = total(_each(torch.exp, shifted), (d,), op, keepdim=True)
        if log:
            return _each(lambda t, s: t - s.log(), shifted, added)
        return _each(lambda t, s: t.exp() / s, shifted, added)

    return handler


for _function in functions("softmax"):
    rule(_function)(_softmax_rule(_function, log=False))
for _function in functions("log_softmax"):
    rule(_function)(_softmax_rule(_function, log=True))


class _Prod(torch.autograd.Function):
    """Multiply over ranks; the gradient of a factor is the product of the others, also where one is zero."""

    @staticmethod
    def forward(ctx, piece, mesh, axes, op):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        whole, others = piece, torch.ones_like(piece)
        for axis in axes:
            parts = pieces.all_gather_parts(whole, mesh, axis, op)
            me = mesh.get_local_rank(axis)
            others = others * torch.cat([parts[:me], parts[me + 1 :]]).prod(dim=0)
            whole = parts.prod(dim=0)
        ctx.save_for_backward(others)
        return whole

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        return g * ctx.saved_tensors[0], None, None, None


@rule(*functions("prod"))
def prod(
    input: DTensor,  # noqa: A002
    dim: int | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002
    *,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Tensor:
    """Multiply over one dim, or over all."""
    if not input.dim() or out is not None:
        return gather_call(torch.prod, (input,), {"dtype": dtype}, why="arguments without a rule")  # type: ignore[no-any-return]
    dims = dims_of(dim, input.dim())
    x = input if dtype is None else _each(lambda t: t.to(dtype), input)
    x = reduce._settled(x, "torch.prod")
    placements, shape, axes = reduce.reduced(x, dims, keepdim)
    piece = pieces.local(x)
    for d in reversed(dims):
        piece = piece.prod(dim=d, keepdim=keepdim)
    if axes:
        piece = _Prod.apply(piece, x.device_mesh, tuple(axes), "torch.prod")
    return pieces.whole(piece, x.device_mesh, placements, shape)
