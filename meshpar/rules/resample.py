"""`F.interpolate`: the dims that this rank holds whole by torch, sharded dims by weighted selection of rows.

Invariant: interpolation is separable, and every output row's taps (input rows and weights) follow from global sizes as
torch's CPU kernels have them. Along a sharded dim a rank fetches the hull of the taps of its own output rows, nothing
else, and `F.interpolate` then runs with that dim kept as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.intervals import Interval, chunks, hull
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.spmd import call, gather_call, rule

_OP = "F.interpolate"
_AREA = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
_REACH = {"bilinear": 2, "bicubic": 4, "lanczos": 6}


@dataclass(frozen=True)
class Taps:
    """Hold, for each output row along one dim, the input rows that it is made of.

    Args:
        rows: shape (taps, out), int64.
        weights: shape (taps, out); None where every output row is one input row as it is.
    """

    rows: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class _Dim:
    """Hold how one dim is resampled: sizes before and after, and torch's scale factor where it uses one."""

    n: int
    out: int
    scale: float | None


@rule(F.interpolate)
def interpolate(
    input: Tensor,  # noqa: A002
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
    x = settle(input, range(input.dim()), _OP)
    factors = None if sizes is not None or recompute_scale_factor else factors
    dims = _dims(x.shape, shape, factors)
    spread = {dim: axis for dim, axis in sharded_dims(x).items() if dim >= 2}
    mesh, piece = x.device_mesh, pieces.local(x)
    steps: dict[int, tuple[Taps, Interval, Interval]] = {}
    for dim, axis in spread.items():
        request = (dims[dim - 2], mode, bool(align_corners), bool(antialias), _wide(x.dtype), x.dim() - 2)
        made, want = _request(*request, mesh.size(axis))
        piece = fetch_rows(piece, dim, x.shape[dim], want, mesh, axis, _OP)
        mine = pieces.my_chunk(mesh, axis, shape[dim])
        steps[dim] = (made, want[mesh.get_local_rank(axis)], mine)
    target = pieces.local_shape(shape, mesh, x.placements)
    if 0 in target:
        # torch refuses empty images; no rows were fetched either, so that the shape alone is to be changed.
        return pieces.whole(piece.reshape(target), mesh, x.placements, shape)
    if not mode.startswith("nearest"):
        piece = piece.to(_wide(x.dtype))
    for dim, (made, held, mine) in steps.items():
        piece = select(piece, dim, made, held, mine)
    rest = [d if i + 2 not in spread else None for i, d in enumerate(dims)]
    if any(d is not None for d in rest):
        kept = {k: v for k, v in options.items() if k in ("mode", "align_corners", "antialias")}
        piece = F.interpolate(piece, **kept, **_rest_sizes(piece, rest, scaled=factors is not None))
    return pieces.whole(piece.to(x.dtype), mesh, x.placements, shape)


def _rest_sizes(piece: Tensor, rest: Sequence[_Dim | None], *, scaled: bool) -> dict[str, list[Any]]:
    """Give the sizes or factors of the dims that are left; a dim that is done keeps its rows exactly."""
    if scaled:
        return {"scale_factor": [1.0 if d is None else d.scale for d in rest]}
    return {"size": [piece.shape[i + 2] if d is None else d.out for i, d in enumerate(rest)]}


def select(piece: Tensor, dim: int, taps: Taps, held: Interval, mine: Interval) -> Tensor:
    """Make output rows `mine` of a piece that holds the input rows `held`."""
    rows = (taps.rows[:, mine[0] : mine[1]] - held[0]).to(piece.device)
    if taps.weights is None:
        start, num = int(rows[0, 0]), rows.shape[1]
        if torch.equal(rows[0], torch.arange(start, start + num, device=rows.device)):
            return piece.narrow(dim, start, num)
        return piece.index_select(dim, rows[0])
    weights = taps.weights[:, mine[0] : mine[1]].to(device=piece.device, dtype=piece.dtype)
    along = [-1 if d == dim else 1 for d in range(piece.dim())]
    parts = [piece.index_select(dim, r) * w.view(along) for r, w in zip(rows, weights, strict=True)]
    return functools.reduce(torch.add, parts)


def _plain(value: Any) -> Any:
    """Make sizes or factors hashable: a number or a tuple of numbers."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(v.item() if isinstance(v, Tensor) else v for v in value)
    return value


@functools.lru_cache(maxsize=4096)
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
    image = torch.empty(shape, device="meta")
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
    num_dims: int,
    p: int,
) -> tuple[Taps, tuple[Interval, ...]]:
    """Give the taps along a dim, and for each of p ranks the rows that its outputs need."""
    made = taps(dim.n, dim.out, dim.scale, mode, align, antialias, real, num_dims)
    want = []
    for a, b in chunks(dim.out, p):
        rows = made.rows[:, a:b]
        want.append(hull([int(rows.min()), int(rows.max())]) if b > a else (0, 0))
    return made, tuple(want)


def taps(
    n: int,
    out: int,
    scale: float | None,
    mode: str,
    align: bool,  # noqa: FBT001
    antialias: bool,  # noqa: FBT001
    real: torch.dtype,
    num_dims: int,
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
        num_dims: number of spatial dims.
    """
    if mode.startswith("nearest"):
        return Taps(_nearest(n, out, scale, mode, real, num_dims), None)
    if align:
        step = (n - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1.0 / scale if scale else n / out
    if antialias:
        return _smooth(n, out, step, mode, real)
    i = torch.arange(out, dtype=real)
    factor = torch.tensor(step, dtype=real)
    if mode == "bicubic":
        return _cubic(n, factor * i if align else factor * (i + 0.5) - 0.5)
    if n == out:  # torch copies then, whatever the scale
        return Taps(torch.arange(n)[None], None)
    at = factor * i if align else (factor * (i + 0.5) - 0.5).clamp(min=0)
    first = at.long().clamp(max=n - 1)
    second = (first + 1).clamp(max=n - 1)
    part = (at - first).clamp(0, 1)
    return Taps(torch.stack([first, second]), torch.stack([1 - part, part]))


def _nearest(
    n: int, out: int, scale: float | None, mode: str, real: torch.dtype, num_dims: int
) -> Tensor:
    """Ask torch itself: the ramp 0, 1, ... comes out as the rows that were taken.

    torch rounds coordinates in its own ways, which differ between modes and types; a rule of three would be one row
    off now and then.
    """
    ones = [1] * (num_dims - 1)
    ramp = torch.arange(n, dtype=real).view(1, 1, n, *ones)
    sizes: dict[str, Any] = {"size": [out, *ones]} if scale is None else {"scale_factor": [scale, *map(float, ones)]}
    return F.interpolate(ramp, mode=mode, **sizes).view(1, out).long()


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
