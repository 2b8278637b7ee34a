"""Moments of sharded tensors: made locally, merged over ranks, and the normalisation that follows from them.

Invariant: one collective forward and one backward (for each group, where the axes have no common one). Moments are
exchanged as (mean, variance) of what each rank holds, in float32 or wider, and merged around a common centre in rank
order, so that mean >> std does no harm and every rank has the same bits. Counts follow from the global sizes and are
never sent; a rank that holds nothing takes part with a share of zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshpar import pieces, private
from meshpar.collectives import all_gather, all_reduce
from meshpar.mesh import axes_in

TINY = 1e-20
"""Added to the variance in the fused kernel, and taken off again, so that a constant input has a finite rstd."""

_LEAST_EPS = 1e-12
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SHORT = 32
_LONG = 4096


@dataclass(frozen=True)
class Statistics:
    """Say over what the moments are taken, and how they are used.

    Args:
        mesh: mesh of the activation.
        sizes: for each mesh axis to merge over, the sizes along it of the ranks' pieces.
        num_groups: groups of channels of the local piece; each has moments of its own.
        over_batch: whether all samples share their moments.
        count: values that one pair of moments is taken of, on all ranks together.
        eps: added to the variance.
        label: of the op, for the record.
        dtype: of the result.
    """

    mesh: DeviceMesh
    sizes: Mapping[int, tuple[int, ...]]
    num_groups: int
    over_batch: bool
    count: int
    eps: float
    label: str
    dtype: torch.dtype
    axes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        axes = tuple(axis for axis in sorted(self.sizes) if self.mesh.size(axis) > 1)
        object.__setattr__(self, "axes", axes)


def widened(x: Tensor) -> Tensor:
    """Give x in float32 where it is narrower."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _readable(x: Tensor) -> Tensor:
    """Give x in a memory format that the fast kernels read: rows that were cut out of more are copied once."""
    x = widened(x)
    if x.is_contiguous() or _by_samples(x):
        return x
    form = _CHANNELS_LAST.get(x.dim()) if x.stride(1) == 1 and x.shape[1] > 1 else None
    return x.contiguous(memory_format=form or torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def shares(sizes: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Give the share of all values that each rank of a group holds, from the sizes along each of the group's axes.

    Example:
        >>> shares(((2, 2), (3, 1)))
        (0.375, 0.125, 0.375, 0.125)
    """
    counts = [math.prod(line) for line in itertools.product(*sizes)]
    total = sum(counts) or 1
    return tuple(num / total for num in counts)


def merged(mean: Tensor, var: Tensor, plan: Statistics) -> tuple[Tensor, Tensor]:
    """Merge the means and biased variances of all ranks; float64, the same bits on every rank.

    Communication:
        One all-gather of 2 values for each pair of moments.

    Source:
        T. Chan, G. Golub, R. LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    for group, name in pieces.groups_over(plan.mesh, plan.axes):
        spanned = axes_in(plan.mesh, name)
        axes = [axis for axis in plan.axes if pieces.axes_of(plan.mesh)[axis] in spanned]
        mine = torch.stack([mean, var]).to(_sent(plan))
        found = all_gather(mine, group, name, plan.label, kind="statistics")
        parts = shares(tuple(plan.sizes[axis] for axis in axes))
        mean, var = combined(found[:, 0].double(), found[:, 1].double(), parts)
    return mean.double(), var.double()


def _sent(plan: Statistics) -> torch.dtype:
    return torch.float64 if plan.dtype == torch.float64 else torch.float32


def combined(means: Tensor, variances: Tensor, parts: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Merge moments that lie along dim 0, each of a given share of the values."""
    share = torch.tensor(parts, dtype=means.dtype, device=means.device).view(-1, *[1] * (means.dim() - 1))
    mean = means[0] + (share * (means - means[0])).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0)


def equally_combined(means: Tensor, variances: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Merge moments along a dim, all of the same number of values; the dim is kept with size 1."""
    first = means.narrow(dim, 0, 1)
    mean = first + (means - first).mean(dim, keepdim=True)
    return mean, (variances + (means - mean).square()).mean(dim, keepdim=True)


def _by_samples(x: Tensor) -> bool:
    """Tell whether x is channels_last, for which there are kernels that take one sample at a time."""
    form = _CHANNELS_LAST.get(x.dim())
    return form is not None and x.device.type == "cpu" and x.is_contiguous(memory_format=form)


def local_moments(x: Tensor, plan: Statistics) -> tuple[Tensor, Tensor, Tensor | None]:
    """Give mean and biased variance of what this rank holds, (B or 1, groups), and room for an output like x, or None.

    The room is what the kernel normalised on the way: none gives moments alone as fast (`var_mean`: 8 times as long).
    """
    num_samples, num_channels = x.shape[:2]
    groups = plan.num_groups
    if x.numel() == 0:
        zeros = x.new_zeros((1 if plan.over_batch else num_samples, groups))
        return zeros, zeros, None
    num_each = x.numel() // (num_samples * num_channels)
    rest = tuple(range(2, x.dim()))
    if plan.over_batch and num_each < _SHORT:
        var, mean = torch.var_mean(x, (0, *rest), correction=0)
        return mean[None], var[None], None
    room = None
    if x.is_contiguous() and plan.eps >= _LEAST_EPS:
        room, mean, rstd = torch.native_group_norm(x, None, None, num_samples, num_channels, num_each, groups, TINY)
        mean, var = mean.double(), (rstd.double().pow(-2) - TINY).clamp_min(0)
    elif _by_samples(x) and num_each > 1:
        each = [torch.batch_norm_update_stats(one, None, None, 0.0) for one in x.split(1)]
        mean, var = (torch.stack(part).double() for part in zip(*each, strict=True))
        mean, var = equally_combined(mean.unflatten(1, (groups, -1)), var.unflatten(1, (groups, -1)), 2)
        mean, var = mean.squeeze(2), var.squeeze(2)
    else:
        var, mean = torch.var_mean(x.reshape(num_samples, groups, -1), 2, correction=0)
    return mean, var, room


def local_sums(g: Tensor, x: Tensor, mean: Tensor, plan: Statistics) -> tuple[Tensor, Tensor]:
    """Give the sums of g and of g * (x - mean) over each channel of this rank's piece, (B or 1, C), float64.

    Args:
        g: gradient.
        x: input, in the memory format of g.
        mean: float64, (B or 1, C).
        plan: what the moments are taken over.
    """
    num_samples, num_channels = x.shape[:2]
    rest = tuple(range(2, x.dim()))
    if x.numel() == 0:
        zeros = x.new_zeros((1 if plan.over_batch else num_samples, num_channels), dtype=torch.float64)
        return zeros, zeros
    num_each = x.numel() // (num_samples * num_channels)
    centre = mean.to(x.dtype)
    if x.is_contiguous() and num_each >= _SHORT:
        row = (1, num_samples * num_channels, num_each)
        total, product = _channel_sums(g.view(row), x.view(row), centre.expand(num_samples, -1).reshape(-1))
        total, product = total.view(num_samples, -1), product.view(num_samples, -1)
    elif _by_samples(x):
        rows = centre.expand(num_samples, -1)
        each = [_channel_sums(*one) for one in zip(g.split(1), x.split(1), rows, strict=True)]
        total, product = (torch.stack(part) for part in zip(*each, strict=True))
    else:
        dims = (0, *rest) if plan.over_batch else rest
        view = centre.view(*centre.shape, *[1] * len(rest))
        total, product = _summed(g, dims, num_channels), _summed(g * (x - view), dims, num_channels)
    # The mean was rounded to the width of x: what that took off is put back.
    total = total.double()
    return total, product.double() + (centre.double() - mean) * total


def _summed(x: Tensor, dims: tuple[int, ...], num_channels: int) -> Tensor:
    return (x.sum(dims) if dims else x).reshape(-1, num_channels)


def _channel_sums(g: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Read g and x once: the fused kernel behind batch_norm's backward, asked for its sums alone."""
    ones = torch.ones_like(mean)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        g, x, ones, None, None, mean, ones, train=True, eps=0.0, output_mask=[False, True, True]
    )
    return total, product


def all_reduced(x: Tensor, plan: Statistics, *, backward: bool) -> Tensor:
    """Add up a small tensor over the axes of the plan."""
    for group, name in pieces.groups_over(plan.mesh, plan.axes):
        x = all_reduce(x, group, name, plan.label, kind="statistics", backward=backward)
    return x


class _Total(torch.autograd.Function):
    """Add up over ranks of which each uses the total for rows of its own: the gradient is added up too."""

    @staticmethod
    def forward(ctx, x, plan, backward):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        return all_reduced(x, plan, backward=backward) if plan.axes else x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return _Total.apply(g, ctx.plan, True), None, None  # noqa: FBT003


def total(x: Tensor, plan: Statistics) -> Tensor:
    """Add up over the axes of the plan; differentiable any number of times.

    Communication:
        One all-reduce forward and one backward.
    """
    return _Total.apply(x, plan, False)  # type: ignore[no-any-return]  # noqa: FBT003


def composed(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Statistics) -> Tensor:
    """Normalise by plain differentiable steps: the slow and obvious form, and the one to differentiate twice."""
    groups = plan.num_groups
    each = x.shape[1] // max(groups, 1)
    wide = widened(x).reshape(x.shape[0], groups, each, math.prod(x.shape[2:]))
    dims = (0, 2, 3) if plan.over_batch else (2, 3)
    centred = wide - total(wide.sum(dims, keepdim=True), plan) / plan.count
    var = total(centred.square().sum(dims, keepdim=True), plan) / plan.count
    out = centred * torch.rsqrt(var + plan.eps)
    if weight is not None:
        out = out * weight.view(1, groups, each, 1)
    if bias is not None:
        out = out + bias.view(1, groups, each, 1)
    return out.reshape(x.shape).to(plan.dtype)


class _Normalise(torch.autograd.Function):
    """Normalise channels (B, C, ...) and scale them; also gives mean and biased variance, in float64."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan):  # type: ignore[no-untyped-def]
        wide = _readable(x)
        mean, var, room = local_moments(wide, plan)
        if plan.over_batch and mean.shape[0] > 1:
            mean, var = equally_combined(mean, var, 0)
        mean, var = merged(mean, var, plan)
        rstd = torch.rsqrt(var + plan.eps)
        scale = _channels(rstd, x)
        if weight is not None:
            scale = scale * weight
        shift = -_channels(mean, x) * scale
        if bias is not None:
            shift = shift + bias
        out = _affine(wide, scale, shift, room)
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(mean, var)
        return out.to(plan.dtype), mean, var

    @staticmethod
    def backward(ctx, g, *_):  # type: ignore[no-untyped-def]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return (*_differentiable(g, (x, weight, bias), needs, plan), None)
        wide = _readable(x)
        g = widened(g)
        if g.stride() != wide.stride():
            g = torch.empty_like(wide).copy_(g)
        rows = _channels(rstd, x)
        sums, products = local_sums(g, wide, _channels(mean, x), plan)
        xhat_sums = products * rows
        grad = None
        if needs[0]:
            grad = _input_gradient(g, wide, weight, mean, rstd, sums, xhat_sums, plan)
        grad_weight = xhat_sums.sum(0).to(weight.dtype) if weight is not None and needs[1] else None
        grad_bias = sums.sum(0).to(bias.dtype) if bias is not None and needs[2] else None
        return None if grad is None else grad.to(x.dtype), grad_weight, grad_bias, None


def _channels(stat: Tensor, x: Tensor) -> Tensor:
    """Repeat what each group has for each of its channels."""
    num = x.shape[1] // stat.shape[1] if stat.shape[1] else 1
    return stat if num == 1 else stat.repeat_interleave(num, 1)


def _shaped(row: Tensor, x: Tensor) -> Tensor:
    """Give a row (B or 1, C) the dims and the dtype of x."""
    return row.to(x.dtype).view(*row.shape, *[1] * (x.dim() - 2))


def _affine(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """Scale and shift channels: x * scale + shift, with rows (B or 1, C)."""
    if not x.is_contiguous() or not x.numel():
        return torch.addcmul(_shaped(shift, x), x, _shaped(scale, x))
    # The kernel of batch_norm in eval mode: half the time of `addcmul`, which broadcasts without vector instructions.
    num = x.shape[0] * x.shape[1]
    scale, shift = (row.to(x.dtype).expand(x.shape[0], -1).reshape(-1) for row in (scale, shift))
    given = (x.view(1, num, -1), scale, shift, x.new_zeros(num), x.new_ones(num), False, 0.0, 0.0)
    if out is None:
        return torch.native_batch_norm(*given)[0].view(x.shape)
    torch.native_batch_norm(*given, out=(out.view(1, num, -1), x.new_empty(0), x.new_empty(0)))
    return out


def _input_gradient(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sums: Tensor,
    xhat_sums: Tensor,
    plan: Statistics,
) -> Tensor:
    """Give rstd * (g * w - mean(g * w) - xhat * mean(g * w * xhat)), as one linear form of g and x."""
    pair = torch.stack([sums, xhat_sums])
    if weight is not None:
        pair = pair * weight
    pair = pair.unflatten(2, (plan.num_groups, -1)).sum(3) if plan.num_groups else pair
    if plan.over_batch:
        pair = pair.sum(1, keepdim=True)
    pair = all_reduced(pair.to(_sent(plan)).contiguous(), plan, backward=True).double() / plan.count
    slope = -rstd.square() * pair[1]
    level = -rstd * pair[0] - mean * slope
    direct = _channels(rstd, x) * weight if weight is not None else _channels(rstd, x)
    out = _affine(x, _channels(slope, x), _channels(level, x))
    long = out.is_contiguous() and g.is_contiguous() and x.numel() >= _LONG * x.shape[0] * x.shape[1]
    if not long or x.device.type != "cpu" or private.is_fake(x):
        return out.addcmul_(g, _shaped(direct, x))
    # `tolist` needs numbers at hand, so that is for the CPU. A number at a time takes vector instructions, which
    # broadcasting does not; and no room for g * direct.
    lines = zip(out.flatten(0, 1), g.flatten(0, 1), direct.expand(x.shape[0], -1).flatten().tolist(), strict=True)
    for line, of_g, factor in lines:
        line.add_(of_g, alpha=factor)
    return out


def _differentiable(
    g: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor | None], needs: Sequence[bool], plan: Statistics
) -> list[Tensor | None]:
    """Give the gradients as a graph of their own, for `create_graph=True`."""
    with torch.enable_grad():
        # Hooks of the tensors themselves are for the outer backward.
        x, weight, bias = (None if one is None else one.view_as(one) for one in inputs)
        assert x is not None
        wanted = [one for one, need in zip((x, weight, bias), needs, strict=False) if one is not None and need]
        found = iter(torch.autograd.grad(composed(x, weight, bias, plan), wanted, g, create_graph=True))
    return [next(found) if x is not None and need else None for x, need in zip(inputs, needs, strict=False)]


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, plan: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the channels of this rank's piece by moments of all ranks' pieces.

    Args:
        x: local piece (B, C, ...).
        weight: (C,) of the local channels.
        bias: (C,) of the local channels.
        plan: what the moments are taken over.

    Returns:
        The normalised piece; mean and biased variance, (B or 1, groups) in float64, without a gradient.

    Communication:
        One all-gather forward (2 values for each pair of moments), one all-reduce backward (as many).
    """
    return _Normalise.apply(x, weight, bias, plan)  # type: ignore[no-any-return]
