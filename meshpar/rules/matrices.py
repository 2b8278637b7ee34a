"""Linear algebra of matrices that every rank holds whole, with their batch wherever it lies; cross products too.

Invariant: the two last dims are whole where a function of matrices runs; where they are sharded, the shards step aside
to a dim of the batch, and come back where the result has the dim still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.private import pytree
from meshpar.registry import functions, name_of, rule
from meshpar.rules.aside import moves_aside, stepped_aside
from meshpar.rules.pointwise import align, broadcast_placements, write_into
from meshpar.rules.spatial import settle, sharded_dims, whole_along
from meshpar.spmd import call
from meshpar.transpose import transposed

ONE_MATRIX = """
    inv inv_ex inverse pinverse pinv det slogdet logdet svd svdvals eigh eigvalsh eig eigvals qr cholesky cholesky_ex
    cholesky_inverse matrix_exp matrix_power matrix_rank cond lu_factor lu_factor_ex lu ldl_factor
"""
"""Functions of one batch of matrices."""

TWO_MATRICES = "solve solve_triangular cholesky_solve"
"""Functions of two batches of matrices, whose result is like the one that is not square."""


def _one(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        (input, *rest) = args if args else (kwargs.pop("input" if "input" in kwargs else "A"),)
        others = [x for x in pytree.tree_leaves((rest, kwargs)) if isinstance(x, DTensor)]
        if not isinstance(input, DTensor) or input.dim() < 2 or others:
            named = kwargs if out is None else {**kwargs, "out": out}
            return gather_call(func, (input, *rest), named, why="other than one batch of matrices")
        x = settle(input, range(input.dim()), op, nested=range(input.dim() - 2))
        busy = [x.dim() - 2, x.dim() - 1]
        moves = moves_aside(x, busy)
        if moves is None:
            axes = [axis for dim, axis in sharded_dims(x).items() if dim in busy]
            away = whole_along(x, axes, op, "matrices are sharded")
        else:
            away = stepped_aside(x, moves, op)
        found = func(pieces.local(away), *rest, **kwargs)
        result = pytree.tree_map(lambda part: _leave(part, x, away, op), found)
        return result if out is None else write_into(out, result, op)

    return handler


def _leave(part: Any, x: DTensor, away: DTensor, op: str) -> Any:
    """Make an activation of a local result: batch dims as they lay, matrix dims whole."""
    if not isinstance(part, Tensor):
        return part
    num_batch = x.dim() - 2
    if part.dim() < num_batch or tuple(part.shape[:num_batch]) != tuple(pieces.local(away).shape[:num_batch]):
        return pieces.whole(part, x.device_mesh, pieces.replicated(x.device_mesh), part.shape)
    shape = [*x.shape[:num_batch], *part.shape[num_batch:]]
    placements = [p if isinstance(p, Shard) and p.dim < num_batch else Replicate() for p in away.placements]
    y = pieces.whole(part, x.device_mesh, placements, shape)
    for axis, (old, new) in enumerate(zip(x.placements, away.placements, strict=True)):
        if old == new or not isinstance(old, Shard):
            continue
        if old.dim < y.dim() and y.shape[old.dim] == x.shape[old.dim]:
            y = transposed(y, axis, old.dim, op) if isinstance(new, Shard) else _cut(y, axis, old, op)
    return y


def _cut(y: DTensor, axis: int, placement: Shard, op: str) -> DTensor:
    return pieces.moved(y, [placement if i == axis else p for i, p in enumerate(y.placements)], op)


for _name in ONE_MATRIX.split():
    for _function in functions(_name):
        rule(_function)(_one(_function))


def _two(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(first: Any, second: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        # torch takes a vector, or a batch of them, for a matrix of one column.
        one_column = "triangular" not in op and "cholesky" not in op and first.dim() >= 2
        one_column = one_column and (second.dim() == 1 or second.shape == first.shape[:-1])
        if one_column:
            second = call(torch.unsqueeze, (second, -1), {}) if isinstance(second, DTensor) else second.unsqueeze(-1)
        ghosts = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (first, second)]
        shape = func(*ghosts, *args, **kwargs).shape  # torch's errors
        spread = [d - x.dim() for x in (first, second) if isinstance(x, DTensor) for d in sharded_dims(x)]
        if any(d >= -2 for d in spread):
            found = gather_call(func, (first, second, *args), kwargs, why="matrices are sharded")
        else:
            mesh, placements = broadcast_placements((first, second), shape)
            pair = [align(x, mesh, placements, shape, op) for x in (first, second)]
            found = pieces.whole(func(*pair, *args, **kwargs), mesh, placements, shape)
        result = call(torch.squeeze, (found, -1), {}) if one_column else found
        return result if out is None else write_into(out, result, op)

    return handler


for _name in TWO_MATRICES.split():
    for _function in functions(_name):
        rule(_function)(_two(_function))


# cross products


def _cross(func: Callable[..., Any], default: int | None) -> Callable[..., Any]:
    op = name_of(func)

    def handler(input: Any, other: Any, dim: int | None = default, *, out: Any = None) -> Any:
        ghosts = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (input, other)]
        named = {} if dim is None else {"dim": dim}
        shape = func(*ghosts, **named).shape  # torch's errors
        at = next(d for d, n in enumerate(shape) if n == 3) if dim is None else dim % len(shape)
        pair = [_whole_dim(x, at - len(shape), op) for x in (input, other)]
        mesh, placements = broadcast_placements(pair, shape)
        a, b = (align(x, mesh, placements, shape, op) for x in pair)
        result = pieces.whole(torch.linalg.cross(a, b, dim=at), mesh, placements, shape)
        return result if out is None else write_into(out, result, op)

    return handler


def _whole_dim(x: Any, dim: int, op: str) -> Any:
    """Bring the three components of vectors to every rank, where they are sharded."""
    if not isinstance(x, DTensor) or -dim > x.dim():
        return x
    x = settle(x, range(x.dim()), op)
    moves = moves_aside(x, [dim % x.dim()])
    if moves is None:
        return whole_along(x, pieces.shard_axes(x, dim), op, "the three components are sharded")
    return stepped_aside(x, moves, op)


for _function in functions("cross"):
    rule(_function)(_cross(_function, -1 if _function is torch.linalg.cross else None))
