"""Losses: the mean over the global batch and grid, with its gradient.

Invariant: every rank evaluates the loss of its own elements; for "mean" and "sum" one all-reduce adds up the sums,
and the denominator with them where it depends on the data, so that uneven and empty shards count as what they are.
The result is a scalar that every rank holds, and each piece's gradient is that of the one global number.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.registry import ALWAYS, rule
from meshpar.rules.norm import check
from meshpar.rules.pointwise import align, broadcast_placements

_REDUCTIONS = ("none", "mean", "sum")

Elements = Callable[..., Tensor]
"""A loss of aligned local pieces that reduces nothing."""


def reduction_of(reduction: str, size_average: bool | None, reduce: bool | None) -> str:  # noqa: FBT001
    """Read the two arguments that torch had before `reduction`, and warn as torch does."""
    if size_average is None and reduce is None:
        return reduction
    found = "none" if reduce is False else "sum" if size_average is False else "mean"
    text = f"size_average and reduce args will be deprecated, please use reduction='{found}' instead."
    warnings.warn(text, UserWarning, stacklevel=2)
    return found


def _warn_of_sizes(input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        text = (
            f"Using a target size ({target.size()}) that is different to the input size ({input.size()}). "
            "This will likely lead to incorrect results due to broadcasting. "
            "Please ensure they have the same size."
        )
        warnings.warn(text, UserWarning, stacklevel=2)


def elementwise(
    elements: Elements,
    operands: Sequence[Tensor],
    reduction: str,
    op: str,
    *,
    over: Tensor | None = None,
    divisor: float | None = None,
    refuses: type[Exception] | None = None,
) -> Tensor:
    """Evaluate a loss that works element by element on broadcast operands.

    Args:
        elements: loss of the aligned pieces.
        operands: activations and plain tensors of global shape.
        reduction: "none", "mean" or "sum".
        op: name of the op.
        over: tensor of the broadcast shape whose sum is the denominator of the mean.
        divisor: denominator of the mean; by default the number of elements.
        refuses: what torch raises for values that it refuses.

    Communication:
        One all-reduce of the sum (and of the denominator, and a flag where values may be refused); none for "none".
    """
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    mesh, placements = broadcast_placements(operands, shape)
    local = torch.broadcast_tensors(*(align(x, mesh, placements, shape, op) for x in operands))
    if reduction == "none":
        return pieces.whole(elements(*local), mesh, placements, shape)
    denominator: float | Callable[[], Tensor] = 1.0
    if reduction == "mean" and over is not None:
        share = align(over, mesh, placements, shape, op)
        denominator = share.sum
    elif reduction == "mean":
        denominator = float(math.prod(shape)) if divisor is None else divisor
    wide = sum_dtype(*local)
    return reduced(lambda: elements(*local), denominator, mesh, placements, op, dtype=wide, refuses=refuses)


def sum_dtype(*operands: Tensor) -> torch.dtype:
    """Choose the dtype of the sums: that of the operands, float32 at least; the same on every rank."""
    found = torch.float32
    for x in operands:
        if x.dtype.is_floating_point:
            found = torch.promote_types(found, x.dtype)
    return found


def reduced(
    values: Callable[[], Tensor],
    denominator: float | Callable[[], Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    op: str,
    *,
    dtype: torch.dtype,
    refuses: type[Exception] | None = None,
) -> DTensor:
    """Add up the values of all ranks and divide: a scalar that every rank holds.

    Values that torch refuses on one rank only (a class that does not exist, say) are an error on all ranks: a flag
    travels with the sum. On an accelerator torch itself finds them too late for that.
    """
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    flagged = refuses is not None and mesh.device_type == "cpu"
    error: Exception | None = None
    parts: list[Tensor] = []
    try:
        each = values()
        parts.append(each.sum(dtype=dtype))
        if callable(denominator):
            parts.append(denominator().to(dtype))
    except (IndexError, RuntimeError, ValueError) as caught:
        if not flagged:
            raise
        error = caught
        parts = [torch.zeros((), dtype=dtype)] * (2 if callable(denominator) else 1)
    if flagged:
        parts.append(parts[0].new_full((), float(error is not None)))
    sums = pieces.psum(torch.stack(parts) if len(parts) > 1 else parts[0].view(1), mesh, axes, op)
    if error is not None:
        raise error
    if refuses is not None and flagged and float(sums[-1].detach()) != 0:
        msg = f"{op}: refused on another rank for the values that it holds"
        raise refuses(msg)
    value = sums[0] / (sums[1] if callable(denominator) else denominator)
    return pieces.whole(value.to(each.dtype), mesh, pieces.replicated(mesh), ())


def _weighted(elements: Elements) -> Elements:
    return lambda x, t, w: elements(x, t) * w


def _with_weight(
    func: Callable[..., Tensor],
    elements: Elements,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    reduction: str,
    *,
    by_weight: bool,
) -> Tensor:
    """Evaluate mse, l1 or huber, where a weight has the size of the input."""
    x, target, weight = tensors
    op = f"F.{func.__name__}"
    _warn_of_sizes(x, target)
    if weight is None:
        return elementwise(elements, (x, target), reduction, op)
    if by_weight and weight.shape != torch.broadcast_shapes(x.shape, target.shape):
        given = {"reduction": reduction, "weight": weight}
        return gather_call(func, (x, target), given, why="a weight smaller than the loss")  # type: ignore[no-any-return]
    over = weight if by_weight else None
    return elementwise(_weighted(elements), (x, target, weight), reduction, op, over=over)


def _hollow_weighted(x, target, weight, func, reduction, given):  # type: ignore[no-untyped-def]
    return func(x, target, reduction=reduction, weight=weight, **dict(given))


@rule(F.mse_loss)
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Give the squared error, or its mean weighted by `weight`."""
    reduction = reduction_of(reduction, size_average, reduce)
    check(_hollow_weighted, (input, target, weight), F.mse_loss, reduction, ())
    elements = _quiet(F.mse_loss)
    return _with_weight(F.mse_loss, elements, (input, target, weight), reduction, by_weight=True)


ALWAYS.add(F.l1_loss)


@rule(F.l1_loss)
def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Give the absolute error, or its mean weighted by `weight`."""
    reduction = reduction_of(reduction, size_average, reduce)
    weight = _dropped_weight() if weight is None else weight
    if not any(isinstance(x, DTensor) for x in (input, target, weight)):
        return F.l1_loss(input, target, reduction=reduction, weight=weight)  # type: ignore[call-arg]
    check(_hollow_weighted, (input, target, weight), F.l1_loss, reduction, ())
    elements = _quiet(F.l1_loss)
    return _with_weight(F.l1_loss, elements, (input, target, weight), reduction, by_weight=True)


def _dropped_weight() -> Tensor | None:
    """Find the weight given to `F.l1_loss`, which torch 2.13 does not hand on to modes: in the frame of that call."""
    if torch.compiler.is_compiling():
        return None
    frame: FrameType | None = inspect.currentframe()
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight")
        frame = frame.f_back
    return None


@rule(F.huber_loss)
def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Give the Huber loss; with a weight, torch takes the plain mean of the weighted values."""
    check(_hollow_weighted, (input, target, weight), F.huber_loss, reduction, (("delta", delta),))
    elements = _quiet(F.huber_loss, delta=delta)
    return _with_weight(F.huber_loss, elements, (input, target, weight), reduction, by_weight=False)


def _quiet(func: Callable[..., Tensor], **given: Any) -> Elements:
    return lambda *pieces_in: func(*pieces_in, reduction="none", **given)


def _hollow_pair(x, target, func, reduction, given):  # type: ignore[no-untyped-def]
    return func(x, target, reduction=reduction, **dict(given))


@rule(F.smooth_l1_loss)
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """Give the squared error below beta, the absolute one above."""
    reduction = reduction_of(reduction, size_average, reduce)
    check(_hollow_pair, (input, target), F.smooth_l1_loss, reduction, (("beta", beta),))
    _warn_of_sizes(input, target)
    return elementwise(_quiet(F.smooth_l1_loss, beta=beta), (input, target), reduction, "F.smooth_l1_loss")


@rule(F.kl_div)
def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    log_target: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Give the Kullback-Leibler divergence; "batchmean" divides by the global batch."""
    legacy = size_average is not None or reduce is not None
    mode = reduction_of(reduction, size_average, reduce)
    check(_hollow_pair, (input, target), F.kl_div, mode, (("log_target", log_target),))
    if mode == "mean" and not legacy:
        text = (
            "reduction: 'mean' divides the total loss by both the batch size and the support size."
            "'batchmean' divides only by the batch size, and aligns with the KL div math definition."
            "'mean' will be changed to behave the same as 'batchmean' in the next major release."
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    divisor = None
    if mode == "batchmean":
        mode, divisor = "mean", float(input.shape[0]) if input.dim() else 1.0
    elements = _quiet(F.kl_div, log_target=log_target)
    return elementwise(elements, (input, target), mode, "F.kl_div", divisor=divisor)


@rule(F.poisson_nll_loss)
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,  # noqa: FBT001, FBT002
    full: bool = False,  # noqa: FBT001, FBT002
    size_average: bool | None = None,  # noqa: FBT001
    eps: float = 1e-8,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
) -> Tensor:
    """Give the negative log likelihood of Poisson counts."""
    reduction = reduction_of(reduction, size_average, reduce)
    given = (("log_input", log_input), ("full", full), ("eps", eps))
    check(_hollow_pair, (input, target), F.poisson_nll_loss, reduction, given)
    return elementwise(_quiet(F.poisson_nll_loss, **dict(given)), (input, target), reduction, "F.poisson_nll_loss")


def _hollow_gaussian(x, target, var, reduction):  # type: ignore[no-untyped-def]
    if var.dim() == x.dim() - 1 and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != x.shape and (
        var.dim() != x.dim() or sum(b for a, b in zip(x.shape, var.shape, strict=True) if a != b) != 1
    ):
        msg = "var is of incorrect size"
        raise ValueError(msg)
    if reduction not in _REDUCTIONS:
        msg = f"{reduction} is not valid"
        raise ValueError(msg)
    return (x - target) / var


@rule(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,  # noqa: FBT001, FBT002
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Give the negative log likelihood of values under a Gaussian with a variance for each, or for each row."""
    if isinstance(var, float):
        if var < 0:
            msg = "var has negative entry/entries"
            raise ValueError(msg)
        var = torch.full((), var, dtype=input.dtype, device=input.device).expand(input.shape)
    check(_hollow_gaussian, (input, target, var), reduction)
    if var.dim() == input.dim() - 1:
        var = _with_last_dim(var)

    def elements(x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        if bool((v < 0).any()):
            msg = "var has negative entry/entries"
            raise ValueError(msg)
        v = v.clone()
        with torch.no_grad():
            v.clamp_(min=eps)
        loss = 0.5 * (torch.log(v) + (x - t) ** 2 / v)
        return loss + 0.5 * math.log(2 * math.pi) if full else loss

    return elementwise(elements, (input, target, var), reduction, "F.gaussian_nll_loss", refuses=ValueError)


def _with_last_dim(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.unsqueeze(-1)
    return pieces.whole(pieces.local(x).unsqueeze(-1), x.device_mesh, x.placements, (*x.shape, 1))


def _hollow_bce(x, target, weight, func, reduction):  # type: ignore[no-untyped-def]
    return func(x, target, weight=weight, reduction=reduction)


@rule(F.binary_cross_entropy)
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
) -> Tensor:
    """Give the cross entropy of probabilities; a weight multiplies the values, the mean stays that of all."""
    reduction = reduction_of(reduction, size_average, reduce)
    check(_hollow_bce, (input, target, weight), F.binary_cross_entropy, reduction)
    operands = (input, target) if weight is None else (input, target, weight)

    def elements(x: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
        return F.binary_cross_entropy(x, t, w, reduction="none")

    return elementwise(elements, operands, reduction, "F.binary_cross_entropy", refuses=RuntimeError)


def _hollow_logits(x, target, weight, pos_weight, reduction):  # type: ignore[no-untyped-def]
    return F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight, reduction=reduction)


@rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Give the cross entropy of logits; weights broadcast to the global shape, and follow the shards."""
    reduction = reduction_of(reduction, size_average, reduce)
    check(_hollow_logits, (input, target, weight, pos_weight), reduction)
    extra = [w for w in (weight, pos_weight) if w is not None]

    def elements(x: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
        w = rest[0] if weight is not None else None
        pos = rest[-1] if pos_weight is not None else None
        return F.binary_cross_entropy_with_logits(x, t, w, pos_weight=pos, reduction="none")

    return elementwise(elements, (input, target, *extra), reduction, "F.binary_cross_entropy_with_logits")
