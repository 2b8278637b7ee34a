"""Differences between neighbouring rows, and the integrals that use them: one row of halo for each order.

Invariant: a rank fetches the rows under its own outputs and no more; rows at the ends of the whole dim are treated as
such, those at the ends of a piece never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.intervals import Interval, chunks
from meshpar.registry import functions, rule
from meshpar.rules.along import let_torch_refuse, wrapped
from meshpar.rules.cumulate import running
from meshpar.rules.join import cat
from meshpar.rules.pointwise import map_pieces, write_into
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.spmd import call


@rule(*functions("diff"))
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None, *, out: Any = None) -> Any:
    """Give the n-th differences along a dim, after rows were put before and behind.

    Communication:
        Along a sharded dim, the n rows after this rank's own; and what `cat` says.
    """
    parts = [x for x in (prepend, input, append) if x is not None]
    whole = cat(parts, dim) if len(parts) > 1 else input
    let_torch_refuse(torch.diff, whole, (n, dim), {})
    at = wrapped(dim, whole)
    x = settle(whole, range(whole.dim()), "diff", nested=[d for d in range(whole.dim()) if d != at])
    mesh, spread = x.device_mesh, sharded_dims(x)
    num = max(x.shape[at] - n, 0)
    piece = pieces.local(x)
    if at in spread and n > 0:
        p = mesh.size(spread[at])
        want = [(a, b + n) if b > a else (0, 0) for a, b in chunks(num, p)]
        piece = fetch_rows(piece, at, x.shape[at], want, mesh, spread[at], "diff")
    shape = [num if d == at else m for d, m in enumerate(x.shape)]
    # torch gives a plain view of its input where there is nothing to do.
    found = torch.diff(piece, n, at) if n else piece.clone()
    result = pieces.whole(found, mesh, x.placements, shape)
    return result if out is None else write_into(out, result, "diff")


# integrals


def _pairs(y: Any, dim: int) -> tuple[Any, Any]:
    """Give all rows but the last, and all but the first."""
    n = y.shape[dim]
    return _narrow(y, dim, 0, max(n - 1, 0)), _narrow(y, dim, min(1, n), max(n - 1, 0))


def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return call(torch.narrow, (x, dim, start, length), {}) if isinstance(x, DTensor) else x.narrow(dim, start, length)


def _mean_height(a: Tensor, b: Tensor, width: Any) -> Any:
    return (a + b) * width / 2.0


def _areas(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Give the area of each trapezoid between neighbouring rows."""
    first, second = _pairs(y, dim)
    if x is None:
        return map_pieces(_mean_height, (first, second, dx), {})
    if x.dim() < y.dim() and x.dim() == 1:
        sizes = [1] * y.dim()
        sizes[dim] = x.shape[0]
        x = call(Tensor.reshape, (x, sizes), {}) if isinstance(x, DTensor) else x.reshape(sizes)
    left, right = _pairs(x, dim - y.dim())
    width = call(torch.sub, (right, left), {}) if isinstance(x, DTensor) else right - left
    if not any(isinstance(t, DTensor) for t in (first, second)):
        return call(torch.div, (call(torch.mul, (first + second, width), {}), 2.0), {})
    return map_pieces(_mean_height, (first, second, width), {})


def _integral(func: Callable[..., Any], *, running_sum: bool) -> Callable[..., Any]:
    name = "cumulative_trapezoid" if running_sum else "trapezoid"

    def handler(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
        ghosts = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (y, x) if t is not None]
        func(*ghosts, dim=dim)  # torch's errors
        at = dim % y.dim()
        if isinstance(y, Tensor) and not y.dtype.is_floating_point and not y.dtype.is_complex:
            y = call(Tensor.to, (y, torch.get_default_dtype()), {}) if isinstance(y, DTensor) else y.float()
        areas = _areas(y, x, dx, at)
        return running(areas, at, None, name, product=False) if running_sum else call(torch.sum, (areas, at), {})

    return handler


for _name in ("trapezoid", "trapz", "cumulative_trapezoid"):
    for _function in functions(_name):
        rule(_function)(_integral(_function, running_sum=_name == "cumulative_trapezoid"))


# the gradient of a field


def _window(own: Interval, n: int, edge_order: int) -> Interval:
    """Give the rows under the central differences of own rows, and under the one-sided ones at the two ends."""
    a, b = own
    if b <= a:
        return (0, 0)
    start, stop = max(a - 1, 0), min(b + 1, n)
    if start == 0:
        stop = max(stop, edge_order + 1)
    if stop == n:
        start = min(start, n - edge_order - 1)
    return (start, stop)


def _derivative(x: DTensor, dim: int, spacing: Any, edge_order: int) -> DTensor:
    """Estimate the derivative along one dim; spacing is a number or the coordinates of all rows."""
    mesh, spread = x.device_mesh, sharded_dims(x)
    piece = pieces.local(x)

    def local(rows: Tensor, space: Any) -> Tensor:
        found: Tensor = torch.gradient(rows, spacing=(space,), dim=(dim,), edge_order=edge_order)[0]
        return found

    if dim not in spread:
        return pieces.whole(local(piece, spacing), mesh, x.placements, x.shape)
    axis, n = spread[dim], x.shape[dim]
    owned = chunks(n, mesh.size(axis))
    want = [_window(own, n, edge_order) for own in owned]
    me = mesh.get_local_rank(axis)
    (a, b), (start, stop) = owned[me], want[me]
    rows = fetch_rows(piece, dim, n, want, mesh, axis, "gradient")
    if b == a:
        # A derivative of nothing is nothing; a sum keeps the piece in the autograd graph.
        found = rows * 1.0
    else:
        space = spacing[start:stop] if isinstance(spacing, Tensor) else spacing
        found = local(rows, space).narrow(dim, a - start, b - a)
    return pieces.whole(found, mesh, x.placements, x.shape)


@rule(torch.gradient)
def gradient(input: DTensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Estimate derivatives by central differences, one-sided at the two ends of a dim.

    Communication:
        Along a sharded dim, a row from each neighbour.
    """
    plain = _whole_coordinates(spacing)
    ghost = torch.empty(input.shape, dtype=input.dtype, device="meta")
    torch.gradient(ghost, spacing=_ghosts(plain), dim=dim, edge_order=edge_order)  # torch's errors
    dims = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = [d % input.dim() for d in dims]
    x = settle(input, range(input.dim()), "gradient", nested=[d for d in range(input.dim()) if d not in dims])
    spaces = list(plain) if isinstance(plain, list | tuple) else [plain] * len(dims)
    return tuple(_derivative(x, d, space, edge_order) for d, space in zip(dims, spaces, strict=True))


def _whole_coordinates(spacing: Any) -> Any:
    """Bring coordinates that are activations to every rank: a list of one dim."""
    if isinstance(spacing, list | tuple):
        return [_whole_coordinates(s) for s in spacing]
    if isinstance(spacing, DTensor):
        return pieces.local(pieces.moved(spacing, pieces.replicated(spacing.device_mesh), "gradient"))
    return spacing


def _ghosts(spacing: Any) -> Any:
    if isinstance(spacing, Sequence):
        return [_ghosts(s) for s in spacing]
    return spacing.to("meta") if isinstance(spacing, Tensor) else spacing
