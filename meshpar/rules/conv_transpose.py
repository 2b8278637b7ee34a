"""Transposed convolutions: every rank fetches the input rows that reach its outputs, convolves them, and cuts.

Invariant: one exchange for each sharded spatial dim, of just the rows that reach an output of this rank and that it
lacks. Along a sharded dim the local op neither pads nor crops: its outputs are numbered from those of the first
fetched row, and the rank's own are cut out of them. Outputs that no input row reaches hold the bias alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshpar import pieces
from meshpar.errors import explain
from meshpar.gathering import gather_call
from meshpar.intervals import FILL, Interval, Rows, chunks, merged, transposed_window
from meshpar.registry import rule
from meshpar.rules.channels import convolution
from meshpar.rules.spatial import sharded_dims
from meshpar.rules.windows import checked_shape, fetch_or_cut, per_dim, spec

_CONVS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}

Size = int | Sequence[int]


@functools.lru_cache(maxsize=16384)
def _reaching_rows(
    n: int, p: int, out: int, kernel: int, stride: int, dilation: int, pad: int
) -> tuple[tuple[Interval, Rows], ...]:
    """Give, rank by rank, the interval of input rows that reach its outputs, and those rows with padding for others.

    Rows in between that reach no output of the rank (dilation) and that it does not own need not be sent.
    """
    found = []
    for (a, b), own in zip(chunks(out, p), chunks(n, p), strict=True):
        hull = transposed_window((a, b), n, kernel, stride, dilation, pad)
        rows: Rows = ()
        for i in range(*hull):
            first = a - (i * stride - pad)  # the taps j of row i reach the outputs i * stride - pad + j * dilation
            tap = max(-(-first // dilation), 0)
            reaches = tap < kernel and i * stride - pad + tap * dilation < b
            keep = reaches or own[0] <= i < own[1]
            rows = (*rows, (i, 1, 1) if keep else (FILL, 1, 0))
        found.append((hull, merged(rows)))
    return tuple(found)


def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    num_dims: int,
) -> Tensor:
    """Convolve an activation as `torch.nn.functional.conv_transpose1d`, `2d` and `3d` do.

    Args:
        x: global shape (B, C, *spatial) or (C, *spatial).
        weight: plain, equal on all ranks, or split over `tensor` (see `rules.channels`).
        bias: likewise, or None.
        stride: as in torch.
        padding: as in torch.
        output_padding: as in torch.
        groups: as in torch.
        dilation: as in torch.
        num_dims: number of spatial dims.

    Returns:
        Global shape (B, out channels, *outputs), sharded as `x`, in canonical layout.

    Communication:
        One exchange for each sharded spatial dim: the rows that reach this rank's outputs and that other ranks own.
        The backward sends their gradients home. Channels over `tensor`: see `rules.channels`; sharded otherwise, they
        are gathered.

    Raises:
        RuntimeError: what torch refuses on one process; on all ranks, before any communication.
    """
    function, op = _CONVS[num_dims], f"F.conv_transpose{num_dims}d"
    options = (stride, padding, output_padding, groups, dilation)
    if not isinstance(x, DTensor):
        why = "its weight is an activation, its input is not"
        return gather_call(function, (x, weight, bias, *options), {}, why=why)  # type: ignore[no-any-return]
    shape = checked_shape(function, x, num_dims, spec(weight), spec(bias), *options)
    _check_output_padding(op, *(per_dim(v, num_dims) for v in (output_padding, stride, dilation)))
    first = x.dim() - num_dims
    own = convolution(x, weight, bias, groups, num_dims, op, weight_dims=(1, 0))
    x, piece, own_weight, own_bias, mesh = own.x, own.piece, own.weight, own.bias, own.x.device_mesh
    strides, dilations = per_dim(stride, num_dims), per_dim(dilation, num_dims)
    pads, extra = list(per_dim(padding, num_dims)), list(per_dim(output_padding, num_dims))
    cuts: list[tuple[int, int, int]] = []
    for dim, axis in sharded_dims(x).items():
        if dim < first:
            continue
        i = dim - first
        n, p, me = x.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)
        args = (weight.shape[2 + i], strides[i], dilations[i], pads[i])
        needs = _reaching_rows(n, p, shape[dim], *args)
        want = tuple(rows for _, rows in needs)
        piece = fetch_or_cut(piece, dim, n, want, mesh, axis, op, pieces.axis_chunks(mesh, axis, n), me)
        (a, b), start = chunks(shape[dim], p)[me], needs[me][0][0]
        cuts.append((dim, a + pads[i] - start * strides[i], b - a))
        pads[i], extra[i] = 0, 0
    for dim, _, _ in cuts:  # torch refuses a piece without rows, whose outputs are zero before the bias
        if piece.shape[dim] == 0:
            piece = F.pad(piece, [0, 0] * (x.dim() - 1 - dim) + [0, 1])
    sizes = [(piece.shape[dim] - 1) * s + (k - 1) * d + 1 for dim, s, k, d in _along(first, strides, weight, dilations)]
    inside = all(start >= 0 and start + num <= sizes[dim - first] for dim, start, num in cuts)
    result = function(piece, own_weight, own_bias if inside else None, strides, pads, extra, own.groups, dilations)
    for dim, start, num in cuts:
        result = _window(result, dim, start, num)
    if own_bias is not None and not inside:
        result = result + own_bias.view(-1, *[1] * num_dims)
    return own.finished(result, shape, op)


def _check_output_padding(
    op: str, extra: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> None:
    """Refuse what torch refuses in its kernels alone, which `checked_shape` does not run."""
    per_axis = zip(extra, strides, dilations, strict=True)
    if all(d > 0 and e < max(s, d) for e, s, d in per_axis):
        return
    text = explain(
        f"{op}: these arguments make no transposed convolution.",
        got=f"output_padding={extra}, stride={strides}, dilation={dilations}",
        needs="in every dim a positive dilation, and output_padding smaller than either stride or dilation",
        fix="less output_padding",
    )
    raise RuntimeError(text)  # the type that torch raises


def _along(
    first: int, strides: tuple[int, ...], weight: Tensor, dilations: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """List dim, stride, kernel and dilation of the spatial dims."""
    sizes = zip(strides, weight.shape[2:], dilations, strict=True)
    return [(first + i, s, k, d) for i, (s, k, d) in enumerate(sizes)]


def _window(x: Tensor, dim: int, start: int, num: int) -> Tensor:
    """Give rows [start, start + num), with zeros for those that x does not have."""
    n = x.shape[dim]
    if num == 0:
        return x.narrow(dim, 0, 0)
    lo, hi = min(max(start, 0), n), min(max(start + num, 0), n)
    before = min(max(-start, 0), num)
    part = x.narrow(dim, lo, max(hi - lo, 0))
    after = num - before - part.shape[dim]
    return F.pad(part, [0, 0] * (x.dim() - 1 - dim) + [before, after]) if before or after else part


def _handler(num_dims: int) -> Callable[..., Tensor]:
    def handler(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Tensor:
        options = (stride, padding, output_padding, groups, dilation)
        return convolve_transposed(input, weight, bias, *options, num_dims=num_dims)

    return handler


for _n, _function in _CONVS.items():
    rule(_function)(_handler(_n))
