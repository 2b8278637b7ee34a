"""Convolutions: every rank fetches the rows under its outputs, padding included, and convolves them.

Invariant: one exchange for each sharded spatial dim, of just the rows that windows read and that the rank lacks.
Padding along a sharded dim lies in the fetched rows, so the local convolution does not pad there; along the other
dims it pads as on one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Rows, chunks, window, window_rows
from meshpar.registry import rule
from meshpar.rules import overlap as overlapping
from meshpar.rules.channels import convolution
from meshpar.rules.compact import halo_of, kept_once, shares_memory
from meshpar.rules.spatial import sharded_dims
from meshpar.rules.windows import checked_shape, fetch_or_cut, frozen, only_read, per_dim, spec
from meshpar.traced import direct

_CONVS: dict[str, Callable[..., Tensor]] = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}

Size = int | Sequence[int]


@direct
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    op: str = "conv2d",
) -> Tensor:
    """Convolve an activation as `torch.nn.Conv1d`, `Conv2d` or `Conv3d` do.

    Args:
        x: global shape (B, C, *spatial) or (C, *spatial); a plain tensor is convolved by plain torch.
        weight: plain, equal on all ranks, or split over `tensor` (see `rules.channels`).
        bias: likewise, or None.
        stride: as in torch.
        padding: as in torch: numbers, "same" or "valid".
        dilation: as in torch.
        groups: as in torch.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        op: "conv1d", "conv2d" or "conv3d".

    Returns:
        Global shape (B, out channels, *outputs), sharded as `x`, in canonical layout.

    Communication:
        One exchange for each sharded spatial dim: the rows under this rank's outputs that other ranks own; none where
        each rank owns all that it reads. The backward sends their gradients home. Channels over `tensor`: see
        `rules.channels`; sharded otherwise, they are gathered.

    Raises:
        RuntimeError: what torch refuses on one process; on all ranks, before any communication.
    """
    options = (stride, padding, dilation, groups, padding_mode, op)
    if not isinstance(x, DTensor):
        if isinstance(weight, DTensor) or isinstance(bias, DTensor):
            why = "its weight is an activation, its input is not"
            return gather_call(_plain, (x, weight, bias, *options), {}, why=why)  # type: ignore[no-any-return]
        return _plain(x, weight, bias, *options)
    key = _key(x, weight, bias, options)
    ready = _READY.get(key)
    if ready is not None and overlapping.can_overlap(piece := pieces.local(x)):
        own_bias = None if bias is None else pieces.scale_grad(bias, ready.factor)
        result = _overlapped(piece, pieces.scale_grad(weight, ready.factor), own_bias, ready.conv)
        return pieces.whole(result, ready.mesh, x.placements, ready.shape)
    given = x
    num_dims = int(op[-2])
    shape = checked_shape(_plain, x, num_dims, spec(weight), spec(bias), *options)
    first = x.dim() - num_dims
    own = convolution(x, weight, bias, groups, num_dims, f"F.{op}")
    x, piece, own_weight, own_bias, groups = own.x, own.piece, own.weight, own.bias, own.groups
    mesh = x.device_mesh
    sharded = {dim: axis for dim, axis in sharded_dims(x).items() if dim >= first}
    if not sharded:
        options = (stride, padding, dilation, groups, padding_mode, op)
        return own.finished(_plain(piece, own_weight, own_bias, *options), shape, f"F.{op}")
    kernels = tuple(weight.shape[2:])
    strides, dilations = per_dim(stride, num_dims), per_dim(dilation, num_dims)
    pads = _pads(padding, kernels, dilations)
    if len(sharded) == 1 and first == 2 and padding_mode == "zeros" and overlapping.can_overlap(piece):
        conv = _overlapping(x, shape, kernels, strides, pads, dilations, groups, f"F.{op}", dict(sharded))
        if conv is not None:
            if key and x is given and own.share is None:
                if len(_READY) >= _MOST:
                    _READY.clear()
                _READY[key] = _Ready(mesh, shape, pieces.part_factor(mesh, x.placements), conv)
            return own.finished(_overlapped(piece, own_weight, own_bias, conv), shape, f"F.{op}")
    empty, kept, halos, once = [], piece, [], True
    for dim, axis in sharded.items():
        i = dim - first
        n, p, out = x.shape[dim], mesh.size(axis), shape[dim]
        mode = "constant" if padding_mode == "zeros" else padding_mode
        want = wanted_rows(n, p, out, kernels[i], strides[i], dilations[i], *pads[i], mode)
        me, held = mesh.get_local_rank(axis), pieces.axis_chunks(mesh, axis, n)
        before = piece
        piece = fetch_or_cut(piece, dim, n, want, mesh, axis, f"F.{op}", held, me)
        if not shares_memory(piece, before):
            halos.append(halo_of(piece, dim, want[me], held[me]))
        elif halos:
            once = once and piece is before
        else:
            kept = piece
        if piece.shape[dim] == 0:
            empty.append((dim, (kernels[i] - 1) * dilations[i] + 1))
    for dim, rows in empty:  # torch refuses a piece without rows: compute one output of zeros and cut it off
        piece = F.pad(piece, [0, 0] * (x.dim() - 1 - dim) + [0, rows])
    inner = tuple((0, 0) if first + i in sharded else pad for i, pad in enumerate(pads))
    with kept_once(piece, kept, halos if once and not empty else []):
        result = _padded_conv(piece, own_weight, own_bias, strides, inner, dilations, groups, padding_mode, op)
    for dim, _ in empty:
        result = result.narrow(dim, 0, 0)
    return own.finished(result, shape, f"F.{op}")


def _overlapping(
    x: DTensor,
    shape: Sequence[int],
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    dilations: tuple[int, ...],
    groups: int,
    op: str,
    sharded: Mapping[int, int],
) -> overlapping.Conv | None:
    """Say how a convolution overlaps with its halo's way, if it can."""
    ((dim, axis),) = sharded.items()
    i, n, mesh = dim - 2, x.shape[dim], x.device_mesh
    if any(lo != hi for j, (lo, hi) in enumerate(pads) if j != i):
        return None
    sizes = (shape[dim], kernels[i], strides[i], dilations[i])
    how = _overlap(n, mesh.size(axis), *sizes, *pads[i], mesh.get_local_rank(axis))
    if how is None:
        return None
    name, group = pieces.axes_of(mesh)[axis], mesh.get_group(axis)
    inner = tuple(lo for lo, _ in pads)
    return overlapping.Conv(dim, how, strides, inner, dilations, groups, group, name, op)


@functools.lru_cache(maxsize=16384)
def _overlap(
    n: int, p: int, out: int, kernel: int, stride: int, dilation: int, lo: int, hi: int, me: int
) -> overlapping.Overlap | None:
    want = wanted_rows(n, p, out, kernel, stride, dilation, lo, hi, "constant")
    return overlapping.overlap(want, n, out, kernel, stride, dilation, me)


def _overlapped(piece: Tensor, weight: Tensor, bias: Tensor | None, conv: overlapping.Conv) -> Tensor:
    """Convolve a rank's piece; under autocast in the dtype that it gives a convolution, and so does the halo travel."""
    device = piece.device.type
    if not torch.is_autocast_enabled(device):
        return overlapping.convolved(piece, weight, bias, conv)
    dtype = torch.get_autocast_dtype(device)
    piece, weight, *rest = (
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (piece, weight, bias)
        if x is not None
    )
    return overlapping.convolved(piece, weight, rest[0] if rest else None, conv)


@dataclass(frozen=True)
class _Ready:
    """Hold what follows from sizes alone of a convolution that overlaps, with weights that all ranks hold whole.

    Args:
        mesh: mesh of the activation; held, so that its id stays its own.
        shape: global shape of the output.
        factor: what the gradients of the weights are multiplied with (see `pieces.part_factor`).
        conv: what to do.
    """

    mesh: DeviceMesh
    shape: tuple[int, ...]
    factor: float
    conv: overlapping.Conv


_READY: dict[tuple[object, ...], _Ready] = {}
_MOST = 16384


def _key(x: DTensor, weight: Tensor, bias: Tensor | None, options: tuple[object, ...]) -> tuple[object, ...]:
    """Name all that `_Ready` follows from; nothing where it has to be worked out anew."""
    if torch.compiler.is_compiling() or isinstance(weight, DTensor) or isinstance(bias, DTensor):
        return ()
    mesh = x.device_mesh
    if mesh.size(pieces.axes_of(mesh).index("tensor")) > 1:
        return ()  # channels may be shared out
    own = () if bias is None else (bias.shape, bias.dtype)
    cast = torch.is_autocast_enabled(x.device.type)
    return (id(mesh), x.placements, x.shape, x.dtype, weight.shape, weight.dtype, own, cast, *map(frozen, options))


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: str | Size,
    dilation: Size,
    groups: int,
    padding_mode: str,
    op: str,
) -> Tensor:
    """Convolve plain tensors as the layers of torch.nn do."""
    if padding_mode == "zeros":
        return _CONVS[op](x, weight, bias, stride, padding, dilation, groups)
    num_dims = int(op[-2])
    pads = _pads(padding, tuple(weight.shape[2:]), per_dim(dilation, num_dims))
    return _padded_conv(x, weight, bias, stride, pads, dilation, groups, padding_mode, op)


def _padded_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    pads: tuple[tuple[int, int], ...],
    dilation: Size,
    groups: int,
    padding_mode: str,
    op: str,
) -> Tensor:
    """Convolve plain tensors with padding that is given for both sides of each spatial dim."""
    inner = tuple(min(pad) if padding_mode == "zeros" else 0 for pad in pads)
    outer = [side for pad, num in zip(pads, inner, strict=True) for side in reversed([p - num for p in pad])]
    if any(outer):
        x = F.pad(x, outer[::-1], mode="constant" if padding_mode == "zeros" else padding_mode)
    return _CONVS[op](x, weight, bias, stride, inner, dilation, groups)


def _pads(padding: str | Size, kernels: tuple[int, ...], dilations: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Give the padding of both sides of each dim; an odd row of "same" goes to the high side.

    Source: the constructor of the convolution layers in `torch.nn.modules.conv`.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernels)
    if isinstance(padding, str):
        totals = [d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in per_dim(padding, len(kernels)))


@functools.lru_cache(maxsize=16384)
def wanted_rows(
    n: int, p: int, out: int, kernel: int, stride: int, dilation: int, lo: int, hi: int, mode: str
) -> tuple[Rows, ...]:
    """Give the rows that each rank needs for its outputs; see `intervals.window_rows`."""
    all_rows = window_rows(n, p, out=out, kernel=kernel, stride=stride, dilation=dilation, lo=lo, hi=hi, mode=mode)
    return tuple(
        only_read(
            rows,
            window(outputs, kernel, stride, dilation)[0],
            outputs,
            own,
            kernel=kernel,
            stride=stride,
            dilation=dilation,
        )
        for rows, outputs, own in zip(all_rows, chunks(out, p), chunks(n, p), strict=True)
    )


def _handler(op: str) -> Callable[..., Tensor]:
    def handler(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Tensor:
        return convolve(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups, op=op)

    return handler


for _op, _function in _CONVS.items():
    rule(_function)(_handler(_op))
assert torch.conv2d is F.conv2d  # one registration serves both names
