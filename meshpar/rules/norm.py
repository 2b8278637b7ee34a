"""Normalisation of channels over sharded rows: group, instance and batch norm.

Invariant: where no sharded dim is normalised over, every rank runs torch's own fused kernel on its piece and nothing
is sent; else the moments are merged as `rules.statistics` has it. Running statistics are updated on every rank, with
the same bits. What is refused is refused by the global sizes, on all ranks, before any communication.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshpar import pieces, private, record
from meshpar.gathering import gather_call
from meshpar.registry import name_of, policy, rule
from meshpar.rules.spatial import settle, sharded_dims
from meshpar.rules.statistics import Statistics, normalise

Described = tuple[tuple[int, ...], torch.dtype] | None
Axes = Collection[int]


def check(func: Callable[..., Any], tensors: Sequence[Tensor | None], *args: Any) -> tuple[int, ...]:
    """Let torch judge a call by the global shapes, on the meta device: it raises what one process raises.

    Args:
        func: called with the tensors and then the other arguments, in order.
        tensors: activations and weights.
        *args: the other arguments; hashable.

    Returns:
        Global shape of the output.
    """
    described = tuple(None if t is None else (tuple(t.shape), t.dtype) for t in tensors)
    return _judged(func, described, args)


@private.asked_once
def _judged(func: Callable[..., Any], tensors: tuple[Described, ...], args: tuple[Any, ...]) -> tuple[int, ...]:
    hollow = [None if t is None else torch.empty(t[0], dtype=t[1], device="meta") for t in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said by the rule, at the place of the call
        return tuple(func(*hollow, *args).shape)


def cut_along(w: Tensor, dim: int, placements: Sequence[Placement], mesh: DeviceMesh, of: int) -> Tensor:
    """Cut dim `dim` of a whole weight to the rows that this rank has of dim `of` of the activation."""
    for axis, placement in enumerate(placements):
        if placement.is_shard() and placement.dim == of and mesh.size(axis) > 1:  # type: ignore[attr-defined]
            a, b = pieces.my_chunk(mesh, axis, w.shape[dim])
            w = w.narrow(dim, a, b - a)
    return w


def clean_piece(x: DTensor) -> Tensor:
    """Give this rank's piece, with clean strides where it is channels_last.

    A piece with a single row keeps the strides of what it was cut from; torch 2.13's batch_norm then returns wrong
    gradients (CPU, channels_last, a dim of size 1, a gradient that is contiguous).
    """
    piece = pieces.local(x)
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(piece.dim())
    if form is None or piece.is_contiguous() or not piece.is_contiguous(memory_format=form):
        return piece
    order = (0, *range(2, piece.dim()), 1)
    clean = all(piece.stride(d) == math.prod(piece.shape[e] for e in order[i + 1 :]) for i, d in enumerate(order))
    return piece if clean else piece.clone(memory_format=form)


def _channel_weight(w: Tensor | None, x: DTensor) -> Tensor | None:
    if w is None:
        return None
    return cut_along(pieces.companion(w, x.device_mesh, x.placements), 0, x.placements, x.device_mesh, 1)


def on_nothing(x: Tensor, *weights: Tensor | None) -> Tensor:
    """Give an empty piece as it is, connected to the weights so that they get a gradient of zero."""
    for w in weights:
        if w is not None:
            x = x + w.sum().to(x.dtype) * 0
    return x


def merged_sizes(x: DTensor, dims: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Give the sizes of the ranks' pieces along each mesh axis that shards one of the dims."""
    found: dict[int, tuple[int, ...]] = {}
    for dim, axis in sharded_dims(x).items():
        if dim in dims:
            found[axis] = tuple(b - a for a, b in pieces.axis_chunks(x.device_mesh, axis, x.shape[dim]))
    return found


def result_dtype(x: Tensor, probe: Callable[[Tensor], Tensor]) -> torch.dtype:
    """Give the dtype of a norm's result, which autocast may have changed: then torch is asked."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return probe(torch.zeros((2, 1, 2), dtype=x.dtype, device=x.device)).dtype


def not_an_activation(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Norm a plain tensor with weights that are DTensors: on whole tensors, alike on every rank."""
    return gather_call(func, args, {}, why="the input is a plain tensor, a weight is not")


@rule(F.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise groups of channels over all rows of the sample, wherever they lie."""
    return _group_norm(F.group_norm, input, num_groups, weight, bias, eps)


@rule(torch.group_norm)
def _torch_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    return _group_norm(torch.group_norm, input, num_groups, weight, bias, eps)


def _hollow_group_norm(x, weight, bias, func, num_groups, eps):  # type: ignore[no-untyped-def]
    return func(x, num_groups, weight, bias, eps)


def _group_norm(
    func: Callable[..., Tensor], x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if not isinstance(x, DTensor):
        return not_an_activation(func, (x, num_groups, weight, bias, eps))  # type: ignore[no-any-return]
    check(_hollow_group_norm, (x, weight, bias), func, num_groups, eps)
    op = name_of(func)
    each = x.shape[1] // num_groups
    x = settle(x, _keep(x, channels=_whole_groups(x, each)), op, nested=(0,))
    w, b = _channel_weight(weight, x), _channel_weight(bias, x)
    piece = clean_piece(x)
    sizes = merged_sizes(x, range(2, x.dim()))
    if not sizes:
        fused = piece.numel() > 0
        out = torch.group_norm(piece, piece.shape[1] // each, w, b, eps) if fused else on_nothing(piece, w, b)
    else:
        plan = Statistics(
            mesh=x.device_mesh,
            sizes=sizes,
            num_groups=piece.shape[1] // each,
            over_batch=False,
            count=each * math.prod(x.shape[2:]),
            eps=eps,
            label=record.here(op),
            dtype=result_dtype(piece, lambda t: torch.group_norm(t, 1)),
        )
        out = normalise(piece, w, b, plan)[0]
    return pieces.whole(out, x.device_mesh, x.placements, x.shape)


def _keep(x: DTensor, *, channels: bool) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1 or channels]


def _whole_groups(x: DTensor, each: int) -> bool:
    """Tell whether every rank has whole groups of channels."""
    return all(
        a % each == 0 and b % each == 0
        for axis in pieces.shard_axes(x, 1)
        for a, b in pieces.axis_chunks(x.device_mesh, axis, x.shape[1])
    )


@rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of each sample over all its rows; running statistics average over the whole batch."""
    buffers = (running_mean, running_var)
    return _channel_norm(F.instance_norm, input, buffers, weight, bias, use_input_stats, momentum, eps)


@rule(torch.instance_norm)
def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    buffers = (running_mean, running_var)
    return _channel_norm(torch.instance_norm, input, buffers, weight, bias, use_input_stats, momentum, eps)


@rule(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel over the global batch and grid, or by the running statistics when not training.

    Under the policy `batch_statistics="data-local"` each data rank has statistics, and running buffers, of its own.
    """
    return _channel_norm(F.batch_norm, input, (running_mean, running_var), weight, bias, training, momentum, eps)


@rule(torch.batch_norm)
def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    buffers = (running_mean, running_var)
    return _channel_norm(torch.batch_norm, input, buffers, weight, bias, training, momentum, eps)


def _arguments(
    func: Callable[..., Any],
    x: Tensor,
    buffers: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Put the arguments of a batch or instance norm in the order of the function."""
    if func in (F.batch_norm, F.instance_norm):
        return (x, *buffers, *weights, training, momentum, eps)
    return (x, *weights, *buffers, training, momentum, eps, False)


def _hollow_channel_norm(x, mean, var, weight, bias, func, training, momentum, eps):  # type: ignore[no-untyped-def]
    return func(*_arguments(func, x, (mean, var), (weight, bias), training, momentum, eps))


def _channel_norm(
    func: Callable[..., Tensor],
    x: Tensor,
    buffers: tuple[Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
) -> Tensor:
    if not isinstance(x, DTensor):
        args = _arguments(func, x, buffers, (weight, bias), training, momentum, eps)
        return not_an_activation(func, args)  # type: ignore[no-any-return]
    check(_hollow_channel_norm, (x, *buffers, weight, bias), func, training, momentum, eps)
    op = name_of(func)
    over_batch = func in (F.batch_norm, torch.batch_norm)
    kernel = torch.batch_norm if over_batch else torch.instance_norm
    x = settle(x, range(x.dim()), op, nested=() if over_batch else (0,))
    w, b = _channel_weight(weight, x), _channel_weight(bias, x)
    piece = clean_piece(x)
    sizes = merged_sizes(x, [0, *range(2, x.dim())] if over_batch else range(2, x.dim()))
    if over_batch and policy().batch_statistics == "data-local":
        sizes = _within_data(x, sizes, training=training)
    kept = [None if t is None else pieces.local(t) if isinstance(t, DTensor) else t for t in buffers]
    tracked = training and kept[0] is not None
    if not training or not (sizes or (tracked and sharded_dims(x))):
        cut = [None if t is None else cut_along(t, 0, x.placements, x.device_mesh, 1) for t in kept]
        args = _arguments(kernel, piece, cut, (w, b), training, momentum, eps)
        out = kernel(*args) if piece.numel() else on_nothing(piece, w, b)
        return pieces.whole(out, x.device_mesh, x.placements, x.shape)
    plan = Statistics(
        mesh=x.device_mesh,
        sizes=sizes,
        num_groups=piece.shape[1],
        over_batch=over_batch,
        count=_count(x, piece, sizes, over_batch=over_batch),
        eps=eps,
        label=record.here(op),
        dtype=result_dtype(
            piece, lambda t: kernel(*_arguments(kernel, t, (None, None), (None, None), training, momentum, eps))
        ),
    )
    out, mean, var = normalise(piece, w, b, plan)
    if tracked and plan.count:
        _update(kept, mean, var, momentum, x, plan)
    return pieces.whole(out, x.device_mesh, x.placements, x.shape)


def _within_data(x: DTensor, sizes: dict[int, tuple[int, ...]], *, training: bool) -> dict[int, tuple[int, ...]]:
    """Take the data axis out of those to merge over, and refuse a data rank that has a single value per channel."""
    data = pieces.axes_of(x.device_mesh).index("data")
    held = sizes.get(data, ())
    rest = math.prod(x.shape) // max(x.shape[0] * x.shape[1], 1)
    if training and rest * min((n for n in held if n), default=2) == 1:
        size = [1, *x.shape[1:]]
        msg = f"Expected more than 1 value per channel when training, got input size {size} on a data rank"
        raise ValueError(msg)
    return {axis: lengths for axis, lengths in sizes.items() if axis != data}


def _count(x: DTensor, piece: Tensor, sizes: dict[int, tuple[int, ...]], *, over_batch: bool) -> int:
    """Count the values behind one pair of moments: the whole dim where its axis is merged over, else what is here."""
    count = 1
    for dim in ([0] if over_batch else []) + list(range(2, x.dim())):
        axis = sharded_dims(x).get(dim)
        count *= x.shape[dim] if axis is None or axis in sizes else piece.shape[dim]
    return count


def _update(
    kept: Sequence[Tensor | None], mean: Tensor, var: Tensor, momentum: float, x: DTensor, plan: Statistics
) -> None:
    """Move running statistics towards those of this batch, alike on every rank that shares the statistics.

    Communication:
        None where batch statistics are global and channels are whole. Instance norm averages over the samples of all
        ranks, and channels that are sharded are put together: one all-reduce of 2 values a channel.
    """
    mesh, num_channels = x.device_mesh, x.shape[1]
    unbiased = var * (plan.count / (plan.count - 1) if plan.count > 1 else math.nan)
    pair = torch.stack([mean, unbiased])
    pair = pair[:, 0] if plan.over_batch else pair.sum(1) / x.shape[0]
    where = sharded_dims(x)
    axes = [where[dim] for dim in ((1,) if plan.over_batch else (0, 1)) if dim in where]
    if axes:
        a, b = pieces.my_chunk(mesh, where[1], num_channels) if 1 in where else (0, num_channels)
        whole = pair.new_zeros((2, num_channels))
        whole[:, a:b] = pair
        pair = pieces.psum(whole, mesh, axes, plan.label.rpartition("|")[2], kind="statistics")
    with torch.no_grad():
        for buffer, now in zip(kept, pair, strict=True):
            if buffer is not None:
                buffer.mul_(1 - momentum).add_(now.to(buffer.dtype), alpha=momentum)
