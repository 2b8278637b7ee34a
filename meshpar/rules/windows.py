"""What convolutions and pools share: arguments per dim, torch's own verdict on them, and the rows under windows.

Invariant: pure functions of global sizes, the same on every rank, but for `run_segments`, which runs an op on a local
piece. Arguments that torch refuses are refused with torch's own error on all ranks, before any communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from meshpar import private
from meshpar.intervals import FILL, Interval, Rows, Run, count, merged, part_inside
from meshpar.rules.spatial import fetch_rows


@dataclass(frozen=True)
class Spec:
    """Stand for a tensor of a global shape where only torch's checks are wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def spec(x: Tensor | None) -> Spec | None:
    """Give the `Spec` of a tensor; under autocast its dtype does not matter, since the op will cast."""
    if x is None:
        return None
    cast = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
    return Spec(tuple(x.shape), torch.float32 if cast else x.dtype)


def frozen(value: Any) -> Any:
    """Give an argument in a form that can be a key of a cache."""
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


@private.asked_once
def output_shape(func: Callable[..., Any], device: str, *args: Any) -> tuple[int, ...]:
    """Run a torch function on stand-ins for its tensors, and give the shape of its (first) output.

    Args:
        func: torch function.
        device: "meta", or "cpu" for functions whose checks meta tensors skip; then give shapes without elements.
        args: its arguments by position, `frozen`; a `Spec` stands for a tensor.

    Raises:
        Exception: whatever torch raises for these arguments.
    """

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Spec):
            return value
        return torch.empty((), dtype=value.dtype, device=device).expand(value.shape)

    result = func(*(stand_in(value) for value in args))
    return tuple((result if isinstance(result, Tensor) else result[0]).shape)


def checked_shape(func: Callable[..., Any], x: Tensor, num_dims: int, *args: Any) -> tuple[int, ...]:
    """Give the global shape of the (first) output for an activation, or raise what torch raises.

    Torch checks meta tensors less than others: it convolves them with any bias, and pools them with more padding. An
    op on no samples checks everything and computes nothing.

    Args:
        func: torch function that takes x first.
        x: activation, global shape (B, C, *spatial) or (C, *spatial).
        num_dims: number of spatial dims.
        args: other arguments by position; tensors as `Spec`.
    """
    shape = spec(x)
    assert shape is not None
    others = tuple(frozen(arg) for arg in args)
    lead = x.dim() - num_dims
    if lead not in (1, 2) or 0 in shape.shape[lead - 1 :]:
        return output_shape(func, "meta", shape, *others)
    nothing = Spec((0, *shape.shape[lead - 1 :]), shape.dtype)
    # the CPU allows a pool less padding than other devices do; for convolutions it stands for all
    strict = x.device.type == "cpu" or any(isinstance(arg, Spec) for arg in others)
    checked = output_shape(func, "cpu" if strict else "meta", nothing, *others)
    return (*shape.shape[: lead - 1], *checked[1:])


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """Give an argument that torch takes as one number or as one a dim for each spatial dim."""
    if isinstance(value, int):
        return (value,) * num_dims
    return tuple(value) * num_dims if len(value) == 1 else tuple(value)


def only_read(
    rows: Rows, first: int, outputs: Interval, own: Interval, *, kernel: int, stride: int, dilation: int
) -> Rows:
    """Put padding in the place of rows that no window reads, unless the rank owns them: they need not be sent.

    Args:
        rows: rows of one rank, from padded row `first` on.
        first: padded row at which `rows` begin, where output i reads i * stride + j * dilation for j < kernel.
        outputs: outputs of the rank.
        own: rows that the rank owns.
        kernel: rows under one window.
        stride: distance of windows.
        dilation: distance of the rows under a window.

    Example:
        >>> only_read(((0, 5, 1),), 0, (0, 1), (0, 2), kernel=2, stride=1, dilation=4)
        ((0, 2, 1), (-1, 2, 0), (4, 1, 1))
    """
    if dilation == 1 and stride <= kernel:
        return rows
    a, b = outputs
    read = {i * stride + j * dilation for i in range(a, b) for j in range(kernel)}
    out: list[Run] = []
    at = first
    for start, num, step in rows:
        mine = part_inside((start, num, step), own)
        for i in range(num):
            keep = start != FILL and (at + i in read or mine[0] <= i < mine[1])
            out.append((start + i * step, 1, 1) if keep else (FILL, 1, 0))
        at += num
    return merged(out)


def fetch_or_cut(
    piece: Tensor,
    dim: int,
    n: int,
    want: tuple[Rows, ...],
    mesh: DeviceMesh,
    axis: int,
    op: str,
    have: tuple[Interval, ...],
    me: int,
) -> Tensor:
    """Fetch the rows that each rank wants; where all ranks want rows of their own alone, cut without a copy."""
    if all(_inside(rows, own) for rows, own in zip(want, have, strict=True)):
        start = want[me][0][0] - have[me][0] if want[me] else 0
        return piece.narrow(dim, start, count(want[me]))
    return fetch_rows(piece, dim, n, want, mesh, axis, op)


def _inside(rows: Rows, own: Interval) -> bool:
    if not rows:
        return True
    start, num, step = rows[0]
    return len(rows) == 1 and (step == 1 or num == 1) and own[0] <= start and start + num <= own[1]


@dataclass(frozen=True)
class Segment:
    """Hold some consecutive outputs of one dim that one call of a torch op computes from a local piece.

    Args:
        outputs: how many; 0 for a rank without any, which computes one from padding and cuts it off.
        start: first row of the piece.
        rows: rows of the piece.
        row: global number of the first of them.
        size: kernel along the dim, or output size for adaptive pools.
        extra: rows of padding put after them.
        scale: number to multiply the outputs with.
    """

    outputs: int
    start: int
    rows: int
    row: int
    size: int
    extra: int = 0
    scale: float = 1.0


Run1 = Callable[[Tensor, tuple[int, ...], tuple[int, ...]], tuple[Tensor, ...]]


def run_segments(
    piece: Tensor,
    plan: Sequence[tuple[int, tuple[Segment, ...]]],
    run: Run1,
    sizes: tuple[int, ...],
    *,
    fill: float,
) -> tuple[Tensor, ...]:
    """Run an op on the segments of every planned dim and join the outputs.

    Args:
        piece: local tensor.
        plan: dim (not negative) and segments, for each dim that is sharded.
        run: gives the outputs for (piece, sizes, first global row of each spatial dim).
        sizes: kernel, or output size, for each spatial dim (the last dims of the piece).
        fill: value of padding rows.
    """
    return _run(piece, list(plan), run, sizes, (0,) * len(sizes), fill)


def _run(
    piece: Tensor,
    plan: list[tuple[int, tuple[Segment, ...]]],
    run: Run1,
    sizes: tuple[int, ...],
    rows: tuple[int, ...],
    fill: float,
) -> tuple[Tensor, ...]:
    if not plan:
        return _run_one(piece, run, sizes, rows)
    (dim, segments), rest = plan[0], plan[1:]
    at = dim - piece.dim() + len(sizes)
    parts = []
    for segment in segments:
        part = piece
        if (segment.start, segment.rows) != (0, piece.shape[dim]):
            part = piece.narrow(dim, segment.start, segment.rows)
        if segment.extra:
            part = F.pad(part, [0, 0] * (piece.dim() - 1 - dim) + [0, segment.extra], value=fill)
        outputs = _run(part, rest, run, _with(sizes, at, segment.size), _with(rows, at, segment.row), fill)
        if segment.outputs == 0:
            outputs = tuple(x.narrow(dim, 0, 0) for x in outputs)
        if segment.scale != 1:
            outputs = tuple(x * segment.scale for x in outputs)
        parts.append(outputs)
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column, dim) for column in zip(*parts, strict=True))


def _run_one(piece: Tensor, run: Run1, sizes: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    lead, spatial = piece.shape[: -len(sizes)], piece.shape[-len(sizes) :]
    if 0 not in lead:
        return run(piece, sizes, rows)
    # torch takes an empty batch, but no sample without channels, which a rank may well have
    results = run(piece.reshape(0, 1, *spatial), sizes, rows)
    return tuple(x.reshape(*lead, *x.shape[2:]) for x in results)


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def global_index(index: Tensor, local: Sequence[int], rows: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Turn flat indices into a local plane into flat indices into the global one.

    Args:
        index: int64, positions in a plane of sizes `local`.
        local: sizes of the spatial dims of the piece.
        rows: global row at which the piece begins, for each of them.
        shape: global sizes.
    """
    if tuple(local) == tuple(shape) and not any(rows):
        return index
    out = torch.zeros_like(index)
    step = 1
    for size, row, n in reversed(list(zip(local, rows, shape, strict=True))):
        out += (index % size + row) * step
        index = index // size
        step *= n
    return out
