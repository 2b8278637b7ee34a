"""Patches: windows laid out as columns and put back (`F.unfold`, `F.fold`), `Tensor.unfold`, and shuffles of pixels.

Invariant: every rank computes the windows of its own outputs from fetched rows; what comes out is in canonical layout.
`F.fold` is the transpose: rows that a rank computes for others are sent home and added there. Columns (the last dim)
that are sharded change places with the rows first, by an all-to-all, since windows are numbered row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.exchange import send_home
from meshpar.gathering import gather_call
from meshpar.intervals import Rows, count, window_size
from meshpar.registry import functions, rule
from meshpar.rules.conv import wanted_rows
from meshpar.rules.reshape import reshaped
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims, whole_along
from meshpar.rules.windows import fetch_or_cut, frozen, output_shape, per_dim, spec
from meshpar.transpose import transposed

Size = int | Sequence[int]


def _moved_off(x: DTensor, dim: int, choices: Sequence[int], op: str) -> DTensor:
    """Let another dim be sharded in the place of one that must be whole: the first choice that is longer than 1."""
    spread = sharded_dims(x)
    if dim not in spread:
        return x
    free = [d for d in choices if d not in spread and x.shape[d] > 1]
    if free:
        return transposed(x, spread[dim], free[0], op)
    # A single row lies on one rank: the others are told it, which is no gather of pieces.
    why = f"dim {dim} is sharded, and no other dim can be" if x.shape[dim] > 1 else ""
    return whole_along(x, [spread[dim]], op, why)


def _rows_of(
    n: int, p: int, out: int, i: int, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pad: int
) -> tuple[Rows, ...]:
    return wanted_rows(n, p, out, kernel[i], strides[i], dilations[i], pad, pad, "constant")


def _grown(piece: Tensor, dim: int, rows: int) -> Tensor:
    """Put rows of zeros into a piece without rows: torch refuses windows over none."""
    return F.pad(piece, [0, 0] * (piece.dim() - 1 - dim) + [0, rows])


@rule(F.unfold)
def unfold(input: DTensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Any:
    """Lay out the windows of an image as columns (im2col); `nn.Unfold` comes here too.

    Args:
        input: global shape (B, C, H, W) or (C, H, W).
        kernel_size: as in torch.
        dilation: as in torch.
        padding: as in torch.
        stride: as in torch.

    Returns:
        Global shape (B, C * kernel rows * kernel columns, L), with L sharded where H or W was.

    Communication:
        One exchange of the rows under this rank's windows, and one that makes the numbers of windows even. Where W is
        sharded, an all-to-all of the input before.
    """
    op = "F.unfold"
    options = tuple(frozen(v) for v in (kernel_size, dilation, padding, stride))
    shape = output_shape(F.unfold, "meta", spec(input), *options)
    kernels, dilations, pads, strides = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = settle(input, range(input.dim()), op)
    height, width = x.dim() - 2, x.dim() - 1
    x = _moved_off(x, width, [height, *reversed(range(height))], op)
    sizes = zip(x.shape[-2:], kernels, strides, dilations, pads, strict=True)
    outs = [window_size(n, k, s, d, pad, pad) for n, k, s, d, pad in sizes]
    piece, mesh = pieces.local(x), x.device_mesh
    pad_rows, empty = pads[0], False
    if height in (spread := sharded_dims(x)):
        axis, n = spread[height], x.shape[height]
        want = _rows_of(n, mesh.size(axis), outs[0], 0, kernels, strides, dilations, pads[0])
        held, me = pieces.axis_chunks(mesh, axis, n), mesh.get_local_rank(axis)
        piece = fetch_or_cut(piece, height, n, want, mesh, axis, op, held, me)
        pad_rows, empty = 0, piece.shape[height] == 0
    if empty:
        piece = _grown(piece, height, (kernels[0] - 1) * dilations[0] + 1)
    lead = piece.shape[:-2]
    flat = piece.reshape(math.prod(lead), 1, *piece.shape[-2:])
    columns = F.unfold(flat, kernels, dilations, (pad_rows, pads[1]), strides)
    rows = columns.shape[-1] // outs[1]
    columns = columns.reshape(*lead, math.prod(kernels), rows, outs[1])
    if empty:
        columns = columns.narrow(-2, 0, 0)
    to = {d: d if d < height else d + 1 for d in range(x.dim())}
    blocks = (*x.shape[:-2], math.prod(kernels), *outs)
    y = pieces.whole(columns, mesh, remapped(x.placements, to), blocks)
    if outs[0] == 1:  # one rank has the only row of windows: share it out
        y = _moved_off(y, height + 1, [width + 1], op) if outs[1] > 1 else y
    return reshaped(y, shape, op)


@rule(F.fold)
def fold(
    input: DTensor, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1
) -> Any:
    """Add up columns of windows into an image (col2im); `nn.Fold` comes here too.

    Args:
        input: global shape (B, C * kernel rows * kernel columns, L), or without B.
        output_size: as in torch.
        kernel_size: as in torch.
        dilation: as in torch.
        padding: as in torch.
        stride: as in torch.

    Returns:
        Global shape (B, C, H, W), with H sharded where L was.

    Communication:
        One exchange that brings the windows of one row of windows together, and one of the rows that were computed for
        other ranks.
    """
    op = "F.fold"
    options = tuple(frozen(v) for v in (output_size, kernel_size, dilation, padding, stride))
    shape = output_shape(F.fold, "meta", spec(input), *options)
    kernels, dilations, pads, strides = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    sizes = zip(shape[-2:], kernels, strides, dilations, pads, strict=True)
    outs = [window_size(n, k, s, d, pad, pad) for n, k, s, d, pad in sizes]
    x = settle(input, range(input.dim()), op)
    y = reshaped(x, (*shape[:-2], math.prod(kernels), *outs), op)
    height, width, taps = y.dim() - 2, y.dim() - 1, y.dim() - 3
    # A single channel leaves its shards to the taps, a single row of windows to the columns.
    y = _moved_off(y, taps, [height, *range(taps)], op)
    y = _off_columns(y, height, width, op)
    mesh, piece = y.device_mesh, pieces.local(y)
    n, axis = shape[-2], sharded_dims(y).get(height)
    lead, rows = piece.shape[:-3], piece.shape[-2]
    if rows == 0:
        piece = _grown(piece, height, 1)
    tall = (max(rows, 1) - 1) * strides[0] + (kernels[0] - 1) * dilations[0] + 1
    flat = piece.reshape(math.prod(lead), math.prod(kernels), max(rows, 1) * outs[1])
    if axis is None:
        image = F.fold(flat, shape[-2:], kernels, dilations, pads, strides)
    else:
        image = F.fold(flat, (tall, shape[-1]), kernels, dilations, (0, pads[1]), strides)
    image = image.reshape(*lead, *image.shape[-2:])
    if axis is not None:
        want = _rows_of(n, mesh.size(axis), outs[0], 0, kernels, strides, dilations, pads[0])
        me = mesh.get_local_rank(axis)
        image = image.narrow(-2, 0, count(want[me]))
        have, group, name = pieces.axis_chunks(mesh, axis, n), mesh.get_group(axis), pieces.axes_of(mesh)[axis]
        image = send_home(image, image.dim() - 2, have, want, group, axis=name, op=op)
    to = {d: d if d < taps else d - 1 for d in range(y.dim()) if d != taps}
    return pieces.whole(image, mesh, remapped(y.placements, to), shape)


def _off_columns(y: DTensor, height: int, width: int, op: str) -> DTensor:
    spread = sharded_dims(y)
    if width in spread and height not in spread:
        return transposed(y, spread[width], height, op)
    return _moved_off(y, width, range(height - 1), op)


@rule(torch.Tensor.unfold)
def windows(x: DTensor, dimension: int, size: int, step: int) -> Any:
    """Give all slices of `size` rows, `step` apart, in a new last dim."""
    shape = torch.empty(x.shape, device="meta").unfold(dimension, size, step).shape
    if x.dim() == 0 or size == 0:
        return gather_call(torch.Tensor.unfold, (x, dimension, size, step), {}, why="its windows are empty")
    dim, op = dimension % x.dim(), "Tensor.unfold"
    x = settle(x, range(x.dim()), op)
    mesh, piece = x.device_mesh, pieces.local(x)
    if dim in (spread := sharded_dims(x)):
        axis, n = spread[dim], x.shape[dim]
        want = wanted_rows(n, mesh.size(axis), shape[dim], size, step, 1, 0, 0, "constant")
        held, me = pieces.axis_chunks(mesh, axis, n), mesh.get_local_rank(axis)
        piece = fetch_or_cut(piece, dim, n, want, mesh, axis, op, held, me)
    if piece.shape[dim] == 0:
        part = _grown(piece, dim, size).unfold(dim, size, step).narrow(dim, 0, 0)
    else:
        part = piece.unfold(dim, size, step)
    return pieces.whole(part, mesh, x.placements, shape)


# pixels and channels


def _regrouped(piece: Tensor, x: DTensor, dim: int, n: int, r: int, op: str, *, split: bool) -> Tensor:
    """Fetch n * r rows of a sharded dim in multiples of r, which will become one row; or back, when they were."""
    axis = sharded_dims(x).get(dim)
    if axis is None or r == 1:
        return piece
    canonical = pieces.axis_chunks(x.device_mesh, axis, n * r)
    multiples = tuple((a * r, b * r) for a, b in pieces.axis_chunks(x.device_mesh, axis, n))
    have, want = (canonical, multiples) if split else (multiples, canonical)
    return fetch_rows(piece, dim, n * r, want, x.device_mesh, axis, op, have=have)


@rule(*functions("pixel_shuffle"))
def pixel_shuffle(input: DTensor, upscale_factor: int) -> Any:
    """Turn channels into pixels: (*, C * r * r, H, W) to (*, C, H * r, W * r).

    Communication:
        The rows that change their rank where the pieces are uneven.
    """
    op, r = "F.pixel_shuffle", upscale_factor
    shape = output_shape(torch.pixel_shuffle, "meta", spec(input), r)
    x = settle(input, range(input.dim()), op)
    k = x.dim() - 3
    piece = _regrouped(pieces.local(x), x, k, shape[k], r * r, op, split=True)
    *lead, channels, height, width = piece.shape
    apart = piece.reshape(*lead, channels // (r * r), r, r, height, width)
    mixed = apart.permute(*range(k + 1), k + 3, k + 1, k + 4, k + 2)
    piece = mixed.reshape(*lead, channels // (r * r), height * r, width * r)
    for dim in (k + 1, k + 2):
        piece = _regrouped(piece, x, dim, x.shape[dim], r, op, split=False)
    return pieces.whole(piece, x.device_mesh, x.placements, shape)


@rule(*functions("pixel_unshuffle"))
def pixel_unshuffle(input: DTensor, downscale_factor: int) -> Any:
    """Turn pixels into channels: (*, C, H * r, W * r) to (*, C * r * r, H, W).

    Communication:
        The rows that change their rank where the pieces are no multiples of r.
    """
    op, r = "F.pixel_unshuffle", downscale_factor
    shape = output_shape(torch.pixel_unshuffle, "meta", spec(input), r)
    x = settle(input, range(input.dim()), op)
    k, piece = x.dim() - 3, pieces.local(x)
    for dim in (k + 1, k + 2):
        piece = _regrouped(piece, x, dim, shape[dim], r, op, split=True)
    *lead, channels, height, width = piece.shape
    apart = piece.reshape(*lead, channels, height // r, r, width // r, r)
    mixed = apart.permute(*range(k + 1), k + 2, k + 4, k + 1, k + 3)
    piece = mixed.reshape(*lead, channels * r * r, height // r, width // r)
    piece = _regrouped(piece, x, k, x.shape[k], r * r, op, split=False)
    return pieces.whole(piece, x.device_mesh, x.placements, shape)


@rule(*functions("channel_shuffle", "native_channel_shuffle"))
def channel_shuffle(input: DTensor, groups: int) -> Any:
    """Deal out the channels of groups in turn; sharded channels are fetched in their new order."""
    op = "F.channel_shuffle"
    shape = output_shape(torch.channel_shuffle, "meta", spec(input), groups)
    x = settle(input, range(input.dim()), op)
    mesh, piece, n = x.device_mesh, pieces.local(x), x.shape[1]
    order = [(j % groups) * (n // groups) + j // groups for j in range(n)]
    if 1 in (spread := sharded_dims(x)):
        axis = spread[1]
        want = [tuple((c, 1, 1) for c in order[a:b]) for a, b in pieces.axis_chunks(mesh, axis, n)]
        piece = fetch_rows(piece, 1, n, want, mesh, axis, op)
    else:
        piece = piece.index_select(1, torch.tensor(order, device=piece.device))
    return pieces.whole(piece, mesh, x.placements, shape)
