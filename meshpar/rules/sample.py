"""Sampling at points: `F.grid_sample` and the grids of `F.affine_grid`.

Invariant: an output stays where its grid point lies. Which input rows a rank needs depends on the data, so each rank
finds the window of rows that its points touch, the windows are told to all, and `fetch` brings just those rows. What
lies beyond the global border is decided in global coordinates, before they are turned into local ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import FILL, Rows, merged
from meshpar.registry import rule
from meshpar.rules.spatial import fetch_rows, settle
from meshpar.spec import DOMAIN

_OP = "F.grid_sample"
_FAR = 1 << 40

TAPS = {"nearest": (0, 1), "bilinear": (0, 2), "bicubic": (-1, 3)}
"""The rows that a point at row i (rounded for nearest, else the one before it) reads: i + first up to i + last."""


@rule(F.grid_sample)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Sample an input at the points of a grid.

    Args:
        input: global shape (B, C, *spatial), 2 or 3 spatial dims; an activation, or plain and equal on all ranks.
        grid: global shape (B, *outputs, 2 or 3), likewise.
        mode: "bilinear", "nearest" or "bicubic".
        padding_mode: "zeros", "border" or "reflection".
        align_corners: as in torch.

    Returns:
        Global shape (B, C, *outputs), sharded as the grid is; along the dims of the input where the grid is whole.

    Communication:
        Where spatial dims of the input are sharded: the windows (16 bytes a dim and rank), then the rows of this
        rank's window that others own. The backward sends the gradients of those rows home.

    Raises:
        RuntimeError, ValueError: what torch refuses on one process; on all ranks, before any communication.
    """
    shape, dtype = _checked(input, grid, mode, padding_mode, align_corners)
    align = bool(align_corners)
    num_dims = len(shape) - 2
    x = settle(input, range(num_dims + 2), _OP, nested=(0, 1)) if isinstance(input, DTensor) else input
    points = settle(grid, range(num_dims + 1), _OP, nested=(0,)) if isinstance(grid, DTensor) else grid
    layout = _layout(x, points, num_dims)
    piece, where = layout.enter(x, layout.input), layout.enter(points, layout.grid)
    if piece.dtype in (torch.float16, torch.bfloat16):  # coordinates need more digits than these have
        piece, where = piece.float(), where.float()
    if layout.spans:
        piece, where = _localised(piece, where, tuple(x.shape), layout, mode, padding_mode, align=align)
    out = F.grid_sample(piece, where, mode=mode, padding_mode=padding_mode, align_corners=align)
    return pieces.whole(out.to(dtype), layout.mesh, layout.output, shape)


@rule(torch.grid_sampler)
def grid_sampler(
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,  # noqa: FBT001
) -> Tensor:
    """Sample with the modes given as torch numbers them."""
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return grid_sample(input, grid, modes[interpolation_mode], paddings[padding_mode], align_corners)


def _checked(
    x: Tensor,
    grid: Tensor,
    mode: str,
    padding_mode: str,
    align_corners: bool | None,  # noqa: FBT001
) -> tuple[tuple[int, ...], torch.dtype]:
    """Give the global shape and the dtype of the output, or raise what torch raises: on no samples, it checks all."""
    fits = x.dim() > 1 and grid.dim() > 1 and x.shape[0] == grid.shape[0]
    shapes = [(0, *t.shape[1:]) if fits else tuple(t.shape) for t in (x, grid)]
    ghosts = [torch.empty(s, dtype=t.dtype, device=t.device) for s, t in zip(shapes, (x, grid), strict=True)]
    with torch.no_grad():
        out = F.grid_sample(ghosts[0], ghosts[1], mode, padding_mode, align_corners)
    return (x.shape[0], x.shape[1], *grid.shape[1:-1]), out.dtype


# where everything lies


@dataclass(frozen=True)
class Layout:
    """Hold where input, grid and output of a call lie.

    Args:
        mesh: mesh of the activations.
        output: placements of the output.
        input: placements that the input is brought to.
        grid: placements that the grid is brought to.
        spans: dim and mesh axis of each spatial dim of the input that is sharded.
    """

    mesh: DeviceMesh
    output: list[Placement]
    input: list[Placement]
    grid: list[Placement]
    spans: list[tuple[int, int]]

    def enter(self, x: Tensor, placements: Sequence[Placement]) -> Tensor:
        """Give the local piece of an operand that is brought to some placements."""
        if not isinstance(x, DTensor):
            return pieces.cut(pieces.as_part(x, self.mesh, self.output), self.mesh, placements)
        grad = [
            Partial() if own.is_replicate() and not out.is_replicate() else own
            for own, out in zip(placements, self.output, strict=True)
        ]
        return pieces.local(pieces.moved(x, placements, _OP), grad)


def _layout(x: Tensor, grid: Tensor, num_dims: int) -> Layout:
    mesh = next(t.device_mesh for t in (x, grid) if isinstance(t, DTensor))
    layout = Layout(mesh, [], [], [], [])
    used: set[int] = set()
    for axis in range(mesh.ndim):
        alone = mesh.size(axis) == 1
        own = _shard_dim(x, axis)
        dim = next(
            (d for d in _choices(own, _shard_dim(grid, axis), num_dims) if alone or d < 2 or d not in used), None
        )
        if not alone and dim is not None:
            used.add(dim)
        layout.output.append(Replicate() if dim is None else Shard(dim))
        if dim is not None and dim >= 2:
            layout.input.append(Replicate() if own is None or own < 2 else Shard(own))
            if own is not None and own >= 2 and not alone:
                layout.spans.append((own, axis))
        else:
            layout.input.append(layout.output[-1])
        layout.grid.append(Replicate() if dim in (None, 1) else Shard(max(dim - 1, 0)))
    return layout


def _shard_dim(x: Tensor, axis: int) -> int | None:
    placement = x.placements[axis] if isinstance(x, DTensor) else Replicate()
    return placement.dim if isinstance(placement, Shard) else None


def _choices(own: int | None, grid: int | None, num_dims: int) -> list[int]:
    """List the dims of the output that a mesh axis may shard, the best first.

    Args:
        own: dim of the input that the axis shards, if any.
        grid: dim of the grid that it shards, if any.
        num_dims: number of spatial dims.
    """
    if own is not None and own < 2:
        return [own]
    if own is None and grid == 0:
        return [0]
    choices = [] if grid is None or grid == 0 else [grid + 1]
    return choices if own is None else [*choices, own, *range(2, num_dims + 2)]


# from global to local coordinates


class _Replaced(torch.autograd.Function):
    """Give a value that was computed from x apart from autograd, of which the derivative is known."""

    @staticmethod
    def forward(ctx, x, value, slope):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.saved_tensors[0], None, None


@dataclass(frozen=True)
class Points:
    """Hold where points lie along one dim, in rows of the global input.

    Args:
        row: integral row that the taps are counted from.
        rest: how far the point lies beyond it, 0 to 1; NaN for a point that is nowhere.
        slope: derivative of the place by the coordinate in the grid.
        seen: whether the point touches any row; one that does not is all padding of zeros.
    """

    row: Tensor
    rest: Tensor
    slope: Tensor
    seen: Tensor


def _localised(
    piece: Tensor,
    grid: Tensor,
    shape: tuple[int, ...],
    layout: Layout,
    mode: str,
    padding_mode: str,
    *,
    align: bool,
) -> tuple[Tensor, Tensor]:
    """Fetch the rows under this rank's points, and give the grid in coordinates of what was fetched."""
    num_dims, mesh = len(shape) - 2, layout.mesh
    columns = list(grid.unbind(-1))
    found: list[Points] = []
    with torch.no_grad():
        for dim, _ in layout.spans:
            found.append(_points(columns[num_dims + 1 - dim].detach(), shape[dim], mode, padding_mode, num_dims, align))
    windows = _windows(found, layout, mode)
    for (dim, axis), points, window in zip(layout.spans, found, windows, strict=True):
        n = shape[dim]
        # A row of nothing on both sides: torch's own border lies there, which no point that is seen touches.
        frame: Rows = ((FILL, 1, 0),)
        want = [frame + _rows(lo, hi, n, padding_mode, align=align) + frame for lo, hi in window]
        piece = fetch_rows(piece, dim, n, want, mesh, axis, _OP)
        first = window[mesh.get_local_rank(axis)][0] - 1
        i = num_dims + 1 - dim
        columns[i] = _coordinates(
            columns[i], points, first, piece.shape[dim], mode, padding_mode, num_dims, align=align
        )
    return piece, torch.stack(columns, -1)


def _place(g: Tensor, n: int, num_dims: int, *, align: bool) -> Tensor:
    """Turn a coordinate from -1 to 1 into a row of n, with the very bits of torch's kernels.

    A point may lie within rounding of a row, where the gradient jumps. Kernels for vectors and for GPUs multiply and
    add in one, as `addcmul` does; that of 3-d inputs on the CPU does not.

    Source: `grid_sampler_unnormalize` in ATen/native/GridSamplerUtils.h, and ATen/native/cpu/GridSamplerKernel.cpp.
    """
    if align:
        return (g + 1) * ((n - 1) / 2)
    if num_dims == 3 and g.device.type == "cpu":
        return ((g + 1) * n - 1) / 2
    return torch.addcmul(torch.full_like(g, -0.5), g + 1, torch.full_like(g, n / 2))


def _points(g: Tensor, n: int, mode: str, padding_mode: str, num_dims: int, align: bool) -> Points:  # noqa: FBT001
    y = _place(g, n, num_dims, align=align)
    slope = torch.full_like(y, (n - 1) / 2 if align else n / 2)
    first, last = TAPS[mode]
    if padding_mode == "reflection":
        y, sign = _reflected(y, n, align=align)
        slope = slope * sign
    if mode == "bicubic":
        if padding_mode == "border":  # further out all taps read the last row
            y = y.clamp(-2, n + 1)
    elif padding_mode != "zeros":
        inside = (y > 0) & (y < n - 1)
        slope = torch.where(inside, slope, 0.0)
        y = torch.where(inside, y, torch.nan_to_num(y.clamp(0, n - 1), nan=0.0 if num_dims == 2 else n - 1.0))
    row = torch.round(y) if mode == "nearest" else torch.floor(y)
    rest = torch.where(torch.isfinite(row), torch.zeros_like(y) if mode == "nearest" else y - row, torch.nan)
    seen = torch.isfinite(row)
    if padding_mode == "zeros":
        seen = seen & (row + last > 0) & (row + first < n)
    return Points(row, rest, slope, seen)


def _reflected(y: Tensor, n: int, *, align: bool) -> tuple[Tensor, Tensor]:
    """Fold rows at the first and the last one (their outer edges without `align`), and give the sign of the slope."""
    low, turn = (0.0, 2.0 * (n - 1)) if align else (-0.5, 2.0 * n)
    if turn == 0:
        return torch.zeros_like(y), torch.zeros_like(y)
    far = (y - low).abs()
    extra = far - torch.trunc(far / turn) * turn
    sign = torch.where(y < low, -1.0, 1.0) * torch.where(extra > turn - extra, -1.0, 1.0)
    return torch.minimum(extra, turn - extra) + low, sign.to(y.dtype)


def _windows(found: Sequence[Points], layout: Layout, mode: str) -> list[list[tuple[int, int]]]:
    """Tell each other which rows the points touch; for each span, the interval that each rank of its axis fetches.

    Dims are fetched one after the other, so the rows of one are brought for all ranks that will ask for them later.
    """
    first, last = TAPS[mode]
    ends = []
    for points in found:
        rows = points.row[points.seen]
        low = rows.min() if rows.numel() else torch.full((), float(_FAR), device=rows.device)
        high = rows.max() if rows.numel() else torch.full((), -float(_FAR), device=rows.device)
        ends += [(low + first).to(torch.int64), (high + last).to(torch.int64)]
    table = torch.stack(ends)
    mesh = layout.mesh
    for _, axis in reversed(layout.spans):
        table = pieces.all_gather_parts(table, mesh, axis, _OP, kind="redistribute")
    windows = []
    for i, (_, axis) in enumerate(layout.spans):
        column = table.reshape(mesh.size(axis), -1, 2 * len(found))
        pairs = zip(column[..., 2 * i].amin(1).tolist(), column[..., 2 * i + 1].amax(1).tolist(), strict=True)
        windows.append([(lo, hi) if hi > lo else (0, 0) for lo, hi in pairs])
        table = table[mesh.get_local_rank(axis)]
    return windows


def _rows(lo: int, hi: int, n: int, padding_mode: str, *, align: bool) -> Rows:
    """Give rows [lo, hi), those of the padding, which only bicubic windows reach, by its mode."""

    def beyond(start: int, stop: int) -> Rows:
        if padding_mode == "reflection":
            turn = 2 * (n - 1) if align else 2 * n
            spots = [j % turn if turn else 0 for j in range(start, stop)]
            return tuple((min(j, turn - (0 if align else 1) - j) if turn else 0, 1, 1) for j in spots)
        return tuple((FILL if padding_mode == "zeros" else min(max(j, 0), n - 1), 1, 1) for j in range(start, stop))

    a, b = min(max(lo, 0), n), min(max(hi, 0), n)
    middle: Rows = ((a, b - a, 1),) if b > a else ()
    runs = (*beyond(lo, min(hi, 0)), *middle, *beyond(max(lo, n), hi))
    return merged((start, num, 0 if start == FILL else step) for start, num, step in runs)


def _coordinates(
    g: Tensor, points: Points, first: int, size: int, mode: str, padding_mode: str, num_dims: int, *, align: bool
) -> Tensor:
    """Give coordinates from -1 to 1 in a piece of `size` rows that begins at global row `first`."""
    with torch.no_grad():
        row = torch.where(points.seen, points.row - first, -3.0)  # -3: out of sight
        scale = 2 / (size - 1) if align else 2 / size
        value = (row + points.rest + (0 if align else 0.5)) * scale - 1
        if mode == "bilinear":
            # Rounding may have moved a point to the other side of a row, where it would have another gradient.
            found = _place(value, size, num_dims, align=align)
            if padding_mode == "reflection":
                found, _ = _reflected(found, size, align=align)
            wrong = torch.sign(row - torch.floor(found))
            back = (torch.minimum(torch.maximum(found, row), row + 1) - found) * scale
            value = value + back + wrong * (2 * torch.finfo(g.dtype).eps)
        value = torch.where(torch.isnan(points.rest), torch.nan, value)
        slope = points.slope * scale
    return _Replaced.apply(g, value, slope)  # type: ignore[no-any-return]


# grids


_AXIS_DIMS = {axis: dim - 1 for axis, dim in DOMAIN.items()}
"""The dim of a grid (B, *outputs, 2 or 3) that follows each spatial axis of the mesh: counted from the end, one on."""


@rule(F.affine_grid)
def affine_grid(
    theta: Tensor,
    size: Sequence[int],
    align_corners: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Make the grid of an affine map, each rank its own rows.

    Args:
        theta: global shape (B, 2, 3) or (B, 3, 4).
        size: global shape of the output to sample, (B, C, *outputs).
        align_corners: as in torch.

    Returns:
        Global shape (B, *outputs, 2 or 3); samples lie as those of `theta`, rows along the spatial axes as those of an
        image in the default layout.

    Communication:
        None forward; the gradient of `theta` is a sum over the spatial axes.

    Raises:
        RuntimeError, ValueError, NotImplementedError: what torch refuses on one process.
    """
    if not isinstance(theta, DTensor):
        why = "its size is made of activations"
        return gather_call(F.affine_grid, (theta, size, align_corners), {}, why=why)  # type: ignore[no-any-return]
    given = tuple(int(n) for n in size)
    shape = tuple(
        F.affine_grid(torch.empty(theta.shape, dtype=theta.dtype, device="meta"), list(given), align_corners).shape
    )
    x = settle(theta, (0,), "F.affine_grid", nested=(0,))
    mesh = x.device_mesh
    placements: list[Placement] = []
    for name, placement in zip(pieces.axes_of(mesh), x.placements, strict=True):
        dim = len(shape) + _AXIS_DIMS.get(name, 0)
        fits = placement.is_replicate() and name in _AXIS_DIMS and 0 < dim < len(shape) - 1
        placements.append(Shard(dim) if fits else placement)
    grad = [p if p == q else Partial() for p, q in zip(x.placements, placements, strict=True)]
    matrix = pieces.local(x, grad)
    steps = []
    for dim in range(1, len(shape) - 1):
        line = _line(shape[dim], matrix, align=bool(align_corners))
        for axis, placement in enumerate(placements):
            if placement == Shard(dim):
                a, b = pieces.my_chunk(mesh, axis, shape[dim])
                line = line[a:b]
        steps.append(line)
    spread = torch.meshgrid(*steps, indexing="ij")
    base = torch.stack([*reversed(spread), torch.ones_like(spread[0])], -1)
    local = base.reshape(1, -1, len(steps) + 1).expand(matrix.shape[0], -1, -1).bmm(matrix.mT)
    return pieces.whole(local.reshape(matrix.shape[0], *base.shape[:-1], len(steps)), mesh, placements, shape)


def _line(n: int, like: Tensor, *, align: bool) -> Tensor:
    """Give the coordinates of n rows. Source: `linspace_from_neg_one` in ATen/native/AffineGridGenerator.cpp."""
    if n <= 1:
        return torch.zeros(n, dtype=like.dtype, device=like.device)
    line = torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device)
    return line if align else line * ((n - 1) / n)
