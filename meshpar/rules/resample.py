"""`F.interpolate`: the dims that this rank holds whole by torch, sharded dims by weighted selection of rows.

Invariant: interpolation is separable, and every output row's taps (input rows and weights) follow from global sizes as
torch's CPU kernels have them. Along a sharded dim a rank fetches the hull of the taps of its own output rows, nothing
else, and `F.interpolate` then runs with that dim kept as it is. Gradients are the transpose of the forward, which
torch's are too but for defects of its bicubic and antialiased kernels (see `_all_ours`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces, private
from meshpar.gathering import gather_call
from meshpar.intervals import Interval, chunks, hull
from meshpar.registry import rule
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.spmd import call

_OP = "F.interpolate"
_AREA = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
_REACH = {"bilinear": 2, "bicubic": 4, "lanczos": 6}


@dataclass(frozen=True)
class Taps:
    """Hold, for each output row along one dim, the input rows that it is made of.

    Args:
        rows: shape (taps, out), int64.
        weights: shape (taps, out); None where every output row is one input row as it is.
        back: shape (out,): the rows that torch's backward gives the gradients of a nearest mode to; None where they
            are those of the forward.
    """

    rows: Tensor
    weights: Tensor | None = None
    back: Tensor | None = None

    def reach(self, a: int, b: int) -> Interval:
        """Give the hull of the input rows of output rows [a, b)."""
        if b <= a:
            return (0, 0)
        rows = self.rows[:, a:b] if self.back is None else torch.stack([self.rows[0, a:b], self.back[a:b]])
        return hull([int(rows.min()), int(rows.max())])


@dataclass(frozen=True)
class _Dim:
    """Hold how one dim is resampled: sizes before and after, and torch's scale factor where it uses one."""

    n: int
    out: int
    scale: float | None


@rule(F.interpolate)
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,  # noqa: FBT001
    recompute_scale_factor: bool | None = None,  # noqa: FBT001
    antialias: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Resample the spatial dims of (B, C, ...).

    Communication:
        Along each sharded spatial dim the hull of the rows that this rank's output rows are made of.

    Source:
        aten/src/ATen/native/UpSample.h and cpu/UpSampleKernel.cpp: coordinates, lambdas, cubic coefficients.
    """
    options = {
        "size": size,
        "scale_factor": scale_factor,
        "mode": mode,
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
        "antialias": antialias,
    }
    if not isinstance(input, DTensor):
        return gather_call(F.interpolate, (input,), options, why="its sizes are activations")
    sizes, factors = _plain(size), _plain(scale_factor)
    shape = _out_shape(
        tuple(input.shape), sizes, factors, mode, align_corners, bool(recompute_scale_factor), bool(antialias)
    )
    if mode == "area":
        return call(_AREA[input.dim()], (input, shape[2:]), {})
    if not input.is_floating_point() and not mode.startswith("nearest"):
        # torch interpolates uint8 in fixed point, and other integers not at all.
        return gather_call(F.interpolate, (input,), options, why=f"{mode} of {input.dtype}")
    x = settle(input, range(input.dim()), _OP, nested=(0, 1))
    factors = None if sizes is not None or recompute_scale_factor else factors
    dims = _dims(x.shape, shape, factors)
    spread = {dim: axis for dim, axis in sharded_dims(x).items() if dim >= 2}
    mesh, piece = x.device_mesh, pieces.local(x)
    steps: dict[int, tuple[Taps, Interval, Interval]] = {}
    cuts: dict[int, tuple[int, int]] = {}
    outs = shape[2:]
    for dim in range(2, x.dim()) if _all_ours(mode, dims, antialias=antialias) else spread:
        axis = spread.get(dim)
        others = (*outs[: dim - 2], *outs[dim - 1 :])
        request = (dims[dim - 2], mode, bool(align_corners), bool(antialias), _wide(x.dtype), others)
        made, want = private.for_real(_request, *request, 1 if axis is None else mesh.size(axis))
        if axis is None:
            steps[dim] = (made, (0, x.shape[dim]), (0, shape[dim]))
            continue
        piece = fetch_rows(piece, dim, x.shape[dim], want, mesh, axis, _OP)
        mine, held = pieces.my_chunk(mesh, axis, shape[dim]), want[mesh.get_local_rank(axis)]
        if factor := _shift_invariant(dims[dim - 2], mode, align_corners=bool(align_corners), antialias=antialias):
            cuts[dim] = (mine[0] - held[0] * factor, mine[1] - mine[0])
        else:
            steps[dim] = (made, held, mine)
    target = pieces.local_shape(shape, mesh, x.placements)
    if 0 in target:
        # torch refuses empty images; no rows were fetched either, so that the shape alone is to be changed.
        return pieces.whole(piece.reshape(target), mesh, x.placements, shape)
    if not mode.startswith("nearest"):
        piece = piece.to(_wide(x.dtype))
    for dim, (made, held, mine) in steps.items():
        piece = select(piece, dim, made, held, mine)
    rest = [None if i + 2 in steps else _local(d, piece.shape[i + 2]) for i, d in enumerate(dims)]
    if any(d is not None for d in rest):
        kept: dict[str, Any] = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
        piece = F.interpolate(piece, **kept, **_rest_sizes(piece, rest, scaled=factors is not None))
    for dim, (start, num) in cuts.items():
        piece = piece.narrow(dim, start, num).clone()  # many kernels take long over rows with gaps between
    return pieces.whole(piece.to(x.dtype), mesh, x.placements, shape)


def _all_ours(mode: str, dims: Sequence[_Dim], *, antialias: bool) -> bool:
    """Tell whether the dims that this rank holds whole cannot be left to torch either.

    torch's kernels for nearest modes go by the size of the whole image. The backward of the others is not the transpose
    of their forward (2.13, CPU) where a scale factor keeps a size, nor is antialiasing right where one column comes
    out; which of these a piece meets depends on its rows.
    """
    kept = any(d.n == d.out and d.scale not in (None, 1.0) for d in dims)
    return mode.startswith("nearest") or antialias or (mode == "bicubic" and kept)


def _shift_invariant(d: _Dim, mode: str, *, align_corners: bool, antialias: bool) -> int:
    """Give the factor of a linear mode whose kernel may run on a piece as it is; 0 where it may not.

    A factor that is a power of two makes coordinates that no rounding touches: counted from the first row of a piece
    they are the same but for a shift. With other factors a piece would be off by the rounding of the whole.
    """
    factor = d.out // max(d.n, 1)
    exact = factor > 1 and factor & (factor - 1) == 0 and d.out == d.n * factor and d.scale in (None, float(factor))
    return factor if exact and mode.endswith("linear") and not align_corners and not antialias else 0


def _local(d: _Dim, rows: int) -> _Dim:
    """Give a dim as it is for a piece with some of its rows; all but those of `_shift_invariant` are whole."""
    return d if rows == d.n else _Dim(rows, rows * (d.out // d.n), d.scale)


def _rest_sizes(piece: Tensor, rest: Sequence[_Dim | None], *, scaled: bool) -> dict[str, Any]:
    """Give the sizes or factors of the dims that are left; a dim that is done keeps its rows exactly."""
    if scaled:
        return {"scale_factor": [1.0 if d is None else d.scale for d in rest]}
    return {"size": [piece.shape[i + 2] if d is None else d.out for i, d in enumerate(rest)]}


def select(piece: Tensor, dim: int, taps: Taps, held: Interval, mine: Interval) -> Tensor:
    """Make output rows `mine` of a piece that holds the input rows `held`."""
    rows, weights, back, start = private.for_real(_part, taps, held, mine)
    rows = private.constant(rows, piece.device)
    if back is not None:
        back = private.constant(back, piece.device)
        ghost = piece.index_select(dim, back)
        return piece.detach().index_select(dim, rows[0]) + (ghost - ghost.detach())
    if weights is None:
        if start is not None:
            return piece.narrow(dim, start, rows.shape[1]).clone()  # not the input itself: torch gives a new tensor
        return piece.index_select(dim, rows[0])
    weights = private.constant(weights, piece.device).to(piece.dtype)
    along = [-1 if d == dim else 1 for d in range(piece.dim())]
    out = piece.index_select(dim, rows[0]) * weights[0].view(along)
    for tap, weight in zip(rows[1:], weights[1:], strict=True):
        out = out + piece.index_select(dim, tap) * weight.view(along)
    return out


def _part(taps: Taps, held: Interval, mine: Interval) -> tuple[Tensor, Tensor | None, Tensor | None, int | None]:
    """Cut taps to output rows `mine`, counted from the first row held; and the first row, where all are consecutive."""
    a, b = mine
    rows = taps.rows[:, a:b] - held[0]
    start = int(rows[0, 0]) if b > a else 0
    straight = torch.equal(rows[0], torch.arange(start, start + rows.shape[1]))
    weights = None if taps.weights is None else taps.weights[:, a:b]
    back = None if taps.back is None else taps.back[a:b] - held[0]
    return rows, weights, back, start if straight else None


def _plain(value: Any) -> Any:
    """Make sizes or factors hashable: a number or a tuple of numbers."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(v.item() if isinstance(v, Tensor) else v for v in value)
    return value


@private.asked_once
def _out_shape(
    shape: tuple[int, ...],
    size: Any,
    factors: Any,
    mode: str,
    align: bool | None,  # noqa: FBT001
    recompute: bool,  # noqa: FBT001
    antialias: bool,  # noqa: FBT001
) -> tuple[int, ...]:
    """Ask torch for the output shape, and for its errors, without data."""
    # Without elements there is nothing to spare, and on meta torch fails.
    image = torch.empty(shape, device="meta" if math.prod(shape) else "cpu")
    recompute_or_none = recompute or None
    out = F.interpolate(image, size, factors, mode, align, recompute_or_none, antialias)
    return tuple(out.shape)


def _dims(shape: Sequence[int], out: Sequence[int], factors: Any) -> list[_Dim]:
    num = len(shape) - 2
    scales = factors if isinstance(factors, tuple) else (factors,) * num
    return [
        _Dim(int(n), int(m), None if s is None else float(s))
        for n, m, s in zip(shape[2:], out[2:], scales, strict=True)
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Give the type in which torch computes coordinates and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=512)
def _request(
    dim: _Dim,
    mode: str,
    align: bool,  # noqa: FBT001
    antialias: bool,  # noqa: FBT001
    real: torch.dtype,
    others: tuple[int, ...],
    p: int,
) -> tuple[Taps, tuple[Interval, ...]]:
    """Give the taps along a dim, and for each of p ranks the rows that its outputs need."""
    made = taps(dim.n, dim.out, dim.scale, mode, align, antialias, real, others)
    return made, tuple(made.reach(a, b) for a, b in chunks(dim.out, p))


def taps(
    n: int,
    out: int,
    scale: float | None,
    mode: str,
    align: bool,  # noqa: FBT001
    antialias: bool,  # noqa: FBT001
    real: torch.dtype,
    others: tuple[int, ...],
) -> Taps:
    """Give the taps of `out` rows made of n.

    Args:
        n: rows before.
        out: rows after.
        scale: the scale factor where torch takes coordinates from it, None where it takes them from the sizes.
        mode: as in `F.interpolate`.
        align: `align_corners`.
        antialias: as in `F.interpolate`.
        real: type of the coordinates, float32 or float64.
        others: output sizes of the other spatial dims: torch picks its kernel for a nearest mode by them.
    """
    if mode.startswith("nearest"):
        return _nearest(n, out, scale, mode, real, others)
    if n == out and (antialias or mode != "bicubic"):  # torch copies then, whatever the scale
        return Taps(torch.arange(n)[None])
    step = 1.0 / scale if scale else n / out
    if align:
        step = (n - 1) / (out - 1) if out > 1 else 0.0
    if antialias:
        return _smooth(n, out, step, mode, real)
    i = torch.arange(out, dtype=real)
    factor = torch.tensor(step, dtype=real)
    if mode == "bicubic":
        return _cubic(n, factor * i if align else factor * (i + 0.5) - 0.5)
    at = factor * i if align else (factor * (i + 0.5) - 0.5).clamp(min=0)
    first = at.long().clamp(max=n - 1)
    second = (first + 1).clamp(max=n - 1)
    part = (at - first).clamp(0, 1)
    return Taps(torch.stack([first, second]), torch.stack([1 - part, part]))


def _nearest(n: int, out: int, scale: float | None, mode: str, real: torch.dtype, others: tuple[int, ...]) -> Taps:
    """Ask torch itself: the ramp 0, 1, ... comes out as the rows that were taken, ones as counts in the backward.

    torch rounds coordinates in its own ways, which differ between kernels (chosen by the size of the image), types,
    forward and backward; a rule of three would be one row off now and then.
    """
    # Images of equal sums of sizes go to the same kernel: put the sum into one dim.
    rest = [sum(others) - len(others) + 1, *[1] * (len(others) - 1)] if others else []
    ramp = torch.arange(n, dtype=real).view(1, 1, n, *[1] * len(rest)).expand(1, 1, n, *rest).contiguous()
    sizes: dict[str, Any] = {"size": [out, *rest]} if scale is None else {"scale_factor": [scale, *[1.0] * len(rest)]}
    with torch.enable_grad():
        ramp.requires_grad_()
        image = F.interpolate(ramp, mode=mode, **sizes)
        (counts,) = torch.autograd.grad(image, ramp, torch.ones_like(image))
    rows = image.detach().reshape(out, -1)[:, 0].long()
    back = torch.arange(n).repeat_interleave(counts.reshape(n, -1)[:, 0].long())
    return Taps(rows[None], back=None if torch.equal(rows, back) else back)


def _cubic(n: int, at: Tensor) -> Taps:
    """Take four rows; those beyond an edge are the row at the edge."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    first = at.floor().long().clamp(max=n - 1)
    t = (at - first).clamp(0, 1)
    rows = torch.stack([(first + k).clamp(0, n - 1) for k in (-1, 0, 1, 2)])
    return Taps(rows, torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)]))


def _smooth(n: int, out: int, step: float, mode: str, real: torch.dtype) -> Taps:
    """Widen the filter by the step where rows are lost, and normalize its weights."""
    wide = max(step, 1.0)
    support = _REACH[mode] * 0.5 * wide
    lists = []
    for i in range(out):
        center = step * (i + 0.5)  # with align_corners too
        lo, hi = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), n)
        weights = [_filter(mode, (j - center + 0.5) / wide) for j in range(lo, hi)]
        total = sum(weights)
        lists.append([(j, w / total) for j, w in zip(range(lo, hi), weights, strict=True)])
    most = max(len(line) for line in lists)
    # Short lines repeat their last row with weight 0.
    full = [line + [(line[-1][0], 0.0)] * (most - len(line)) for line in lists]
    rows = torch.tensor([[j for j, _ in line] for line in full])
    weights_of = torch.tensor([[w for _, w in line] for line in full], dtype=real)
    return Taps(rows.T.contiguous(), weights_of.T.contiguous())


def _filter(mode: str, x: float) -> float:
    x = abs(x)
    if mode == "bilinear":
        return max(1.0 - x, 0.0)
    if mode == "lanczos":
        return _sinc(x) * _sinc(x / 3) if x < 3 else 0.0
    a = -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _sinc(x: float) -> float:
    return 1.0 if x == 0 else math.sin(math.pi * x) / (math.pi * x)
