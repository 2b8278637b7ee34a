"""Indexing: `x[...]`, narrow, select, unbind, index_select, roll and flip.

Invariant: a slice of a sharded dim is again in canonical layout, of the new size; only rows that change their rank are
sent. One row of a sharded dim goes to every rank. How lists and masks are read is told in `rules.pick`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Rows, flipped, rolled
from meshpar.registry import functions, rule
from meshpar.rules.pick import by_activation, fetched, indexed, sharded_index
from meshpar.rules.pointwise import write_into
from meshpar.rules.selection import Entry, read_index
from meshpar.rules.spatial import remapped, settle, sharded_dims, whole_along

# reading


@rule(torch.Tensor.__getitem__)
def getitem(x: Tensor, index: Any) -> Any:
    """Index a tensor.

    Communication:
        Along a sharded dim that is sliced, the rows that change their rank; along one that a number indexes, that
        row to all other ranks; along one that tensors index, the elements that are picked; see `rules.pick`.
    """
    op = "Tensor.__getitem__"
    if sharded_index(index):
        return by_activation(x, index, op)
    if not isinstance(x, DTensor):
        plain = index if isinstance(index, tuple) else (index,)
        mesh = next(i.device_mesh for i in plain if isinstance(i, DTensor))
        x = pieces.lift(x, mesh)
    entries = read_index(index, x.dim())
    if isinstance(entries, str):
        return gather_call(torch.Tensor.__getitem__, (x, index), {}, why=entries)
    return indexed(x, entries, index, op)


def _at(x: Tensor, dim: int, entry: Entry) -> list[Entry]:
    entries: list[Entry] = [slice(None)] * x.dim()
    entries[dim % max(x.dim(), 1)] = entry
    return entries


@rule(*functions("narrow"))
def narrow(input: DTensor, dim: int, start: Any, length: int) -> Any:
    """Give `length` rows from `start` on."""
    first, n = int(start), input.shape[dim]
    torch.empty(input.shape, device="meta").narrow(dim, first, length)  # torch's errors
    first += n if first < 0 else 0
    return indexed(input, _at(input, dim, slice(first, first + length)), None, "narrow")


@rule(*functions("select"))
def select(input: DTensor, dim: int, index: Any) -> Any:
    """Give one row, and drop the dim."""
    row = int(index)
    torch.empty(input.shape, device="meta").select(dim, row)  # torch's errors
    return indexed(input, _at(input, dim, row), None, "select")


@rule(*functions("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor, *, out: Any = None) -> Any:
    """Give a list of rows."""
    if out is not None:
        return write_into(out, index_select(input, dim, index), "index_select", cast=False)
    if input.dim() == 0 or index.dim() != 1:
        return gather_call(torch.index_select, (input, dim, index), {}, why="it has no list of rows")
    stand_ins = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (input, index)]
    stand_ins[0].index_select(dim, stand_ins[1])  # torch's errors
    at = (*[slice(None)] * (dim % input.dim()), index)
    if not sharded_index(index) and index.numel() and bool((_whole(index) < 0).any()):
        msg = "index out of range in self"  # torch counts from the end in x[...] alone
        raise IndexError(msg)
    return getitem(input, at)


def _whole(x: Tensor) -> Tensor:
    return pieces.local(x) if isinstance(x, DTensor) else x


@rule(*functions("unbind"))
def unbind(input: DTensor, dim: int = 0) -> Any:
    """Give all rows one by one; iteration comes here too. Rows of a sharded dim go to every rank, which is a gather."""
    torch.empty(input.shape, device="meta").unbind(dim)  # torch's errors
    dim %= input.dim()
    x = settle(input, range(input.dim()), "unbind", nested=[d for d in range(input.dim()) if d != dim])
    if dim in (spread := sharded_dims(x)):
        x = whole_along(x, [spread[dim]], "unbind", "every rank needs each row of a sharded dim")
    to = {d: d - (d > dim) for d in range(x.dim()) if d != dim}
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    placements = remapped(x.placements, to)
    return tuple(pieces.whole(p, x.device_mesh, placements, shape) for p in pieces.local(x).unbind(dim))


# moving rows around


def _rearranged(x: DTensor, rows: dict[int, Rows], op: str) -> tuple[DTensor, Tensor]:
    """Fetch other rows along sharded dims; the sizes stay."""
    piece = pieces.local(x)
    for dim, order in rows.items():
        piece = fetched(piece, x, dim, order, x.shape[dim], op)
    return x, piece


@rule(*functions("roll"))
def roll(input: DTensor, shifts: Any, dims: Any = ()) -> Any:
    """Move rows along dims, around the end."""
    by = tuple(shifts) if isinstance(shifts, list | tuple) else (shifts,)
    along = () if dims is None else tuple(dims) if isinstance(dims, list | tuple) else (dims,)
    torch.empty(input.shape, device="meta").roll(by, along)  # torch's errors
    still = [d for d in range(input.dim()) if along and d not in [dim % input.dim() for dim in along]]
    x = settle(input, range(input.dim()), "roll", nested=still)
    spread = sharded_dims(x)
    if not along:
        if spread:
            return gather_call(torch.roll, (x, by), {}, why="all dims are rolled as one")
        return pieces.whole(pieces.local(x).roll(by), x.device_mesh, x.placements, x.shape)
    total = {d: 0 for d in range(x.dim())}
    for shift, dim in zip(by, along, strict=True):
        total[dim % x.dim()] += int(shift)
    x, piece = _rearranged(x, {d: rolled(x.shape[d], total[d]) for d in spread if total[d]}, "roll")
    rest = [d for d in total if d not in spread and total[d]]
    piece = piece.roll([total[d] for d in rest], rest) if rest else piece.clone()
    return pieces.whole(piece, x.device_mesh, x.placements, x.shape)


@rule(*functions("repeat_interleave"))
def repeat_interleave(input: Tensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    """Repeat each row of a dim a number of times."""
    if not isinstance(input, DTensor) or not isinstance(repeats, int) or dim is None:
        args = (input, repeats, dim)
        return gather_call(torch.repeat_interleave, args, {"output_size": output_size}, why="other than rows of a dim")
    shape = torch.empty(input.shape, device="meta").repeat_interleave(repeats, dim).shape
    dim %= input.dim()
    others = [d for d in range(input.dim()) if d != dim]
    x = settle(input, range(input.dim()), "repeat_interleave", nested=others)
    if dim in sharded_dims(x):
        rows = tuple((i, repeats, 0) for i in range(x.shape[dim]))
        piece = fetched(pieces.local(x), x, dim, rows, shape[dim], "repeat_interleave")
    else:
        piece = pieces.local(x).repeat_interleave(repeats, dim)
    return pieces.whole(piece, x.device_mesh, x.placements, shape)


@rule(*functions("flip"))
def flip(input: DTensor, *dims: Any, **named: Any) -> Any:
    """Read dims from last to first."""
    given = dims or tuple(named.values())
    along = tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    torch.empty(input.shape, device="meta").flip(along)  # torch's errors
    turned = {d % input.dim() for d in along}
    x = settle(input, range(input.dim()), "flip", nested=[d for d in range(input.dim()) if d not in turned])
    x, piece = _rearranged(x, {d: flipped(x.shape[d]) for d in sharded_dims(x) if d in turned}, "flip")
    rest = sorted(turned - set(sharded_dims(x)))
    return pieces.whole(piece.flip(rest), x.device_mesh, x.placements, x.shape)


@rule(*functions("flipud"))
def flipud(input: DTensor) -> Any:
    """Flip dim 0."""
    return flip(input, 0)


@rule(*functions("fliplr"))
def fliplr(input: DTensor) -> Any:
    """Flip dim 1."""
    return flip(input, 1)
