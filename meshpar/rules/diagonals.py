"""Triangles and diagonals of matrices whose rows or columns are sharded.

Invariant: rows and columns count over the whole; a piece that begins at row a and column c has its diagonal moved by
a - c. A diagonal is again in canonical layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.intervals import chunks
from meshpar.registry import functions, rule
from meshpar.rules.pointwise import write_into
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims, whole_along
from meshpar.rules.windows import Spec, output_shape
from meshpar.transpose import transposed


def _first(x: DTensor, dim: int) -> int:
    """Give the global row at which this rank's piece begins."""
    axis = sharded_dims(x).get(dim)
    return 0 if axis is None else pieces.my_chunk(x.device_mesh, axis, x.shape[dim])[0]


def _triangle(func: Any) -> None:
    name = func.__name__

    def handler(input: DTensor, diagonal: int = 0, *, out: Any = None) -> Any:
        output_shape(func, "meta", Spec(tuple(input.shape), input.dtype), diagonal)  # torch's errors
        if out is not None:
            return write_into(out, handler(input, diagonal), name, cast=False)
        x = settle(input, range(input.dim()), name)
        moved = diagonal + _first(x, x.dim() - 2) - _first(x, x.dim() - 1)
        return pieces.whole(func(pieces.local(x), moved), x.device_mesh, x.placements, x.shape)

    def in_place(input: DTensor, diagonal: int = 0) -> Any:
        return write_into(input, handler(input, diagonal), f"Tensor.{name}_")

    for function in functions(name):
        rule(function)(handler)
    for function in functions(f"{name}_"):
        rule(function)(in_place)


_triangle(torch.tril)
_triangle(torch.triu)


@rule(*functions("diagonal"))
def diagonal(input: DTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Take a diagonal of two dims, which becomes the last dim.

    Communication:
        The elements that change their rank; two sharded dims are gathered along the second.
    """
    shape = output_shape(torch.diagonal, "meta", Spec(tuple(input.shape), input.dtype), offset, dim1, dim2)
    x = settle(input, range(input.dim()), "diagonal")
    first, second = dim1 % x.dim(), dim2 % x.dim()
    if second in (spread := sharded_dims(x)):
        if first in spread:
            x = whole_along(x, [spread[second]], "diagonal", "both of its dims are sharded")
        else:
            first, second, offset = second, first, -offset
    kept = [d for d in range(x.dim()) if d not in (first, second)]
    to = {d: i for i, d in enumerate(kept)}
    to[first] = len(kept)
    piece, mesh, m, n = pieces.local(x), x.device_mesh, shape[-1], x.shape[first]
    axis = sharded_dims(x).get(first)
    if axis is None:
        part = torch.diagonal(piece, offset, first, second)
        placements = remapped(x.placements, {d: i for d, i in to.items() if d != first})
        return pieces.whole(part, mesh, placements, shape)
    start = max(0, -offset)  # row of the first element
    held = pieces.axis_chunks(mesh, axis, n)
    have = [(min(max(a - start, 0), m), min(max(b - start, 0), m)) for a, b in held]
    me = mesh.get_local_rank(axis)
    low, high = have[me]
    if high > low:
        rows = piece.narrow(first, low + start - held[me][0], high - low)
        part = torch.diagonal(rows, low + start + offset, first, second)
    else:
        part = torch.diagonal(piece.narrow(first, 0, 0), 0, first, second)
    part = fetch_rows(part, part.dim() - 1, m, chunks(m, mesh.size(axis)), mesh, axis, "diagonal", have=have)
    return pieces.whole(part, mesh, remapped(x.placements, to), shape)


@rule(*functions("diag_embed"))
def diag_embed(input: DTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Write the last dim as a diagonal of two new dims; where it is sharded, another dim takes its place."""
    shape = output_shape(torch.diag_embed, "meta", Spec(tuple(input.shape), input.dtype), offset, dim1, dim2)
    x = settle(input, range(input.dim()), "diag_embed")
    last = x.dim() - 1
    if last in (spread := sharded_dims(x)):
        free = [d for d in range(last) if d not in spread and x.shape[d] > 1]
        if free:
            x = transposed(x, spread[last], free[0], "diag_embed")
        else:
            x = whole_along(x, [spread[last]], "diag_embed", "its last dim is sharded")
    new = {dim1 % len(shape), dim2 % len(shape)}
    places = [d for d in range(len(shape)) if d not in new]
    part = torch.diag_embed(pieces.local(x), offset, dim1, dim2)
    return pieces.whole(part, x.device_mesh, remapped(x.placements, dict(enumerate(places))), shape)


@rule(*functions("diag"))
def diag(input: DTensor, diagonal: int = 0, *, out: Any = None) -> Any:
    """Take the diagonal of a matrix, or make a matrix of a vector."""
    torch.diag(torch.empty(input.shape, device="meta"), diagonal)  # torch's errors
    result: Tensor = diag_embed(input, diagonal) if input.dim() == 1 else _DIAGONAL(input, diagonal)
    return result if out is None else write_into(out, result, "diag", cast=False)


_DIAGONAL = diagonal
