"""Joining and cutting: cat, stack and their kin; split, chunk and theirs.

Invariant: joined along a sharded dim, a tensor is again in canonical layout, and so is each part of one that was cut;
only rows that change their rank are sent. Operands that lie elsewhere are brought to where the largest sharded one
lies; plain ones are cut, not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Interval, Rows, chunks, concatenated, interval_rows
from meshpar.registry import functions, rule
from meshpar.rules.reshape import reshaped
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims

# joining


def _common(tensors: Sequence[Tensor], along: int = -1) -> tuple[DeviceMesh, list[Placement]]:
    """Choose where operands of equal numbers of dims meet: axis by axis as the largest one that the axis shards.

    Several axes may shard a dim that one operand has along them, but for the one `along` which they are joined.
    """
    activations = [x for x in tensors if isinstance(x, DTensor)]
    mesh = activations[0].device_mesh
    out: list[Placement] = []
    taken: set[int] = set()
    for axis in range(mesh.ndim):
        choices = [
            (x.numel(), placement.dim)  # type: ignore[attr-defined]
            for x in activations
            if pieces.is_plain_shard(placement := x.placements[axis])
            and (
                mesh.size(axis) == 1
                or placement.dim not in taken  # type: ignore[attr-defined]
                or (placement in x.placements[:axis] and placement.dim != along)  # type: ignore[attr-defined]
            )
        ]
        out.append(Shard(max(choices)[1]) if choices else Replicate())
        if choices and mesh.size(axis) > 1:
            taken.add(max(choices)[1])
    return mesh, out


def _placed(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], op: str) -> DTensor:
    return pieces.moved(x, placements, op) if isinstance(x, DTensor) else pieces.lift(x, mesh, placements)


def joined(tensors: Sequence[Tensor], dim: int, op: str) -> DTensor:
    """Concatenate along a dim."""
    # An empty 1-d tensor joins anything: torch keeps that for old programs.
    ghosts = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors]
    after = torch.cat(ghosts, dim)
    operands = [x for x in tensors if tuple(x.shape) != (0,)] if after.dim() != 1 else list(tensors)
    if not any(isinstance(x, DTensor) for x in operands):
        operands = list(tensors)
    shape, dim = tuple(after.shape), dim % max(after.dim(), 1)
    mesh, placements = _common(operands, dim)
    local = []
    axis = next((i for i, p in enumerate(placements) if p == Shard(dim) and mesh.size(i) > 1), None)
    sizes = [x.shape[dim] for x in operands]
    wants: list[list[Interval]] = [[] for _ in sizes]
    if axis is not None:
        for piece in chunks(shape[dim], mesh.size(axis)):
            for want, part in zip(wants, concatenated(sizes, piece), strict=True):
                want.append(part)
    for x, n, want in zip(operands, sizes, wants, strict=True):
        piece_of = pieces.local(_placed(x, mesh, placements, op))
        local.append(piece_of if axis is None else fetch_rows(piece_of, dim, n, want, mesh, axis, op))
    return pieces.whole(torch.cat(local, dim), mesh, placements, shape)


def _plain_target(func: Callable[..., Any], tensors: Any, dim: int, out: Any) -> Any:
    return gather_call(func, (list(tensors), dim), {"out": out}, why="it writes into out=")


@rule(*functions("cat", "concat", "concatenate"))
def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Any = None, axis: int | None = None) -> Any:
    """Join along a dim.

    Communication:
        Along a sharded dim, for each operand the rows that change their rank.
    """
    dim = dim if axis is None else axis
    if out is not None:
        return _plain_target(torch.cat, tensors, dim, out)
    return joined(list(tensors), dim, "cat")


@rule(*functions("stack"))
def stack(tensors: Sequence[Tensor], dim: int = 0, *, out: Any = None) -> Any:
    """Join along a new dim; no communication where the operands lie alike."""
    given = list(tensors)
    if out is not None:
        return _plain_target(torch.stack, tensors, dim, out)
    shape = torch.stack([torch.empty(x.shape, device="meta") for x in given], dim).shape
    dim %= len(shape)
    mesh, placements = _common(given)
    local = [pieces.local(_placed(x, mesh, placements, "stack")) for x in given]
    to = {d: d + (d >= dim) for d in range(len(shape) - 1)}
    return pieces.whole(torch.stack(local, dim), mesh, remapped(placements, to), shape)


def _at_least(x: Tensor, num_dims: int, op: str) -> Tensor:
    """Add dims as `torch.atleast_*d` does."""
    if x.dim() >= num_dims:
        return x
    shape = getattr(torch, f"atleast_{num_dims}d")(torch.empty(x.shape, device="meta")).shape
    return reshaped(x, tuple(shape), op) if isinstance(x, DTensor) else x.reshape(shape)


def _stacking(func: Callable[..., Any], num_dims: int, dim: int) -> Callable[..., Any]:
    def handler(tensors: Sequence[Tensor], *, out: Any = None) -> Any:
        if out is not None:
            return gather_call(func, (list(tensors),), {"out": out}, why="it writes into out=")
        op = func.__name__
        grown = [_at_least(x, num_dims, op) for x in tensors]
        return joined(grown, 0 if op == "hstack" and grown[0].dim() == 1 else dim, op)

    return handler


for _name, _num_dims, _dim in (("hstack", 1, 1), ("vstack", 2, 0), ("row_stack", 2, 0), ("dstack", 3, 2)):
    for _function in functions(_name):
        rule(_function)(_stacking(_function, _num_dims, _dim))


# cutting


def parts(x: DTensor, sizes: Sequence[int], dim: int, op: str) -> tuple[DTensor, ...]:
    """Cut a dim into parts of some sizes, which add up to it; all rows travel in one exchange."""
    dim %= x.dim()
    x = settle(x, range(x.dim()), op, nested=[d for d in range(x.dim()) if d != dim])
    mesh, piece = x.device_mesh, pieces.local(x)
    axis = sharded_dims(x).get(dim)
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in sizes]
    if axis is None:
        cut = piece.split_with_sizes(list(sizes), dim)
    else:
        p = mesh.size(axis)
        layouts = [chunks(n, p) for n in sizes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        want: list[Rows] = [
            tuple(
                run
                for start, layout in zip(starts, layouts, strict=True)
                for run in interval_rows((start + layout[r][0], start + layout[r][1]))
            )
            for r in range(p)
        ]
        rows = fetch_rows(piece, dim, x.shape[dim], want, mesh, axis, op)
        me = mesh.get_local_rank(axis)
        cut = rows.split_with_sizes([layout[me][1] - layout[me][0] for layout in layouts], dim)
    return tuple(pieces.whole(p, mesh, x.placements, s) for p, s in zip(cut, shapes, strict=True))


def _cutting(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make the handler of a function that cuts: torch itself says into which sizes, on a tensor without data."""
    op = func.__name__
    fixed: dict[str, Callable[[Tensor], int]] = {
        "hsplit": lambda x: 0 if x.dim() == 1 else 1,
        "vsplit": lambda x: 0,
        "dsplit": lambda x: 2,
    }

    def handler(x: DTensor | None = None, *args: Any, **named: Any) -> Any:
        for key in ("input", "tensor", "self"):
            x = named.pop(key, x)
        assert x is not None
        rest = tuple(v.tolist() if isinstance(v, Tensor) else v for v in args)
        named = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in named.items()}
        found = func(torch.empty(x.shape, device="meta"), *rest, **named)
        given = named.get("dim", rest[1] if len(rest) > 1 else 0)
        dim = fixed[op](x) if op in fixed else given % x.dim()
        sizes = [part.shape[dim] for part in found]
        if sum(sizes) != x.shape[dim]:  # tensor_split with indices that go back or overlap
            return gather_call(func, (x, *args), named, why="its parts overlap")
        return parts(x, sizes, dim, op)

    return handler


for _function in functions(
    "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_split", "unsafe_chunk"
):
    rule(_function)(_cutting(_function))
if torch.functional.split not in functions("split"):
    rule(torch.functional.split)(_cutting(torch.functional.split))
