"""Indexing: `x[...]`, narrow, select, unbind, index_select, roll and flip.

Invariant: a slice of a sharded dim is again in canonical layout, of the new size; only rows that change their rank are
sent. One row of a sharded dim goes to every rank. An index made of tensors works on dims that every rank holds whole,
and as a list of rows on one sharded dim; masks and other mixtures on sharded dims are gathered.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.intervals import Rows, chunks, flipped, merged, rolled, sliced, take
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.rules.view import remapped, whole_along
from meshpar.spmd import functions, gather_call, rule

Entry = int | slice | Tensor | None
"""One part of an index: a row, a slice, a new dim (None), or a plain tensor of integers or booleans."""


class _OwnerGrad(torch.autograd.Function):
    """Let only the owner of a row send its gradient home: all ranks hold the same one."""

    @staticmethod
    def forward(ctx, x, owner):  # type: ignore[no-untyped-def]
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return (g if ctx.owner else torch.zeros_like(g)), None


def _fetched(piece: Tensor, x: DTensor, dim: int, rows: Rows, m: int, op: str) -> Tensor:
    """Fetch along a sharded dim the rows of an output of m rows in canonical layout."""
    axis = sharded_dims(x)[dim]
    want = [take(rows, a, b) for a, b in chunks(m, x.device_mesh.size(axis))]
    return fetch_rows(piece, dim, x.shape[dim], want, x.device_mesh, axis, op)


def _row(piece: Tensor, x: DTensor, dim: int, i: int, op: str) -> Tensor:
    """Bring one row of a sharded dim to every rank of its axis; the dim stays, with size 1."""
    mesh, axis = x.device_mesh, sharded_dims(x)[dim]
    a, b = pieces.my_chunk(mesh, axis, x.shape[dim])
    row = fetch_rows(piece, dim, x.shape[dim], [(i, i + 1)] * mesh.size(axis), mesh, axis, op)
    return _OwnerGrad.apply(row, a <= i < b)  # type: ignore[no-any-return]


# reading an index


def _entry(item: Any) -> Entry | EllipsisType | str:
    """Read one part of an index; a string says why it is not understood."""
    if item is None or item is Ellipsis:
        return item
    if isinstance(item, bool):
        return "a boolean as an index"
    if isinstance(item, slice):
        ends = (None if v is None else operator.index(v) for v in (item.start, item.stop, item.step))
        return slice(*ends)
    if isinstance(item, DTensor):
        if any(not p.is_replicate() for p in item.placements):
            return "the index itself is sharded"
        item = pieces.local(item)
    if not isinstance(item, Tensor):
        try:
            return operator.index(item)
        except TypeError:
            if not hasattr(item, "__len__"):
                msg = f"only integers, slices, ellipsis, None and tensors are valid indices, got {type(item).__name__}"
                raise IndexError(msg) from None
            item = torch.as_tensor(item if len(item) else torch.empty(0, dtype=torch.int64))
    if item.is_floating_point() or item.is_complex():
        msg = "tensors used as indices must be long, int, byte or bool tensors"
        raise IndexError(msg)
    if item.dtype == torch.uint8:
        item = item.bool()
    if item.dim() == 0:
        return "a boolean as an index" if item.dtype == torch.bool else int(item)
    index: Tensor = item
    return index


def read_index(index: Any, num_dims: int) -> list[Entry] | str:
    """Write out an index, one entry a dim and None for each new one; a string says why that cannot be."""
    entries: list[Any] = [_entry(item) for item in (index if isinstance(index, tuple) else (index,))]
    for entry in entries:
        if isinstance(entry, str):
            return entry
    used = sum(_consumes(entry) for entry in entries)
    if used > num_dims:
        msg = f"too many indices for tensor of dimension {num_dims}"
        raise IndexError(msg)
    where = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(where) > 1:
        return "two ellipses"
    at = where[0] if where else len(entries)
    rest: list[Any] = [slice(None)] * (num_dims - used)
    return [*entries[:at], *rest, *entries[at + 1 :]]


def _consumes(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


@dataclass(frozen=True)
class Selection:
    """Hold what an index does to a global shape.

    Args:
        shape: global shape after it.
        to: for each dim that survives as a dim, its place in `shape`.
        by_dim: entry of each dim of the input; a mask over several dims is None from its second on.
        entries: the entries, new dims included.
    """

    shape: tuple[int, ...]
    to: dict[int, int]
    by_dim: list[Entry]
    entries: list[Entry]


def selection(shape: Sequence[int], entries: list[Entry]) -> Selection:
    """Work out shapes and dims, with torch's errors for rows and slices that cannot be."""
    by_dim: list[Entry] = []
    for entry in entries:
        if entry is not None:
            by_dim += [entry, *[None] * (_consumes(entry) - 1)]
    _check(shape, by_dim)
    tensors = [i for i, entry in enumerate(entries) if isinstance(entry, Tensor)]
    # torch takes single rows first, then lets tensors index what is left: they stand where the first of them stood
    # if they are neighbours by then, else before all other dims.
    left = [i for i, entry in enumerate(entries) if not isinstance(entry, int)]
    places = [left.index(i) for i in tensors]
    together = all(b == a + 1 for a, b in itertools.pairwise(places))
    common = torch.broadcast_shapes(*(_index_shape(entries[i]) for i in tensors)) if tensors else ()
    out: list[int] = [] if together else list(common)
    to: dict[int, int] = {}
    dim = 0
    for i, entry in enumerate(entries):
        if entry is None:
            out.append(1)
        elif isinstance(entry, slice):
            to[dim] = len(out)
            out.append(len(range(*entry.indices(shape[dim]))))
        elif isinstance(entry, Tensor) and i == tensors[0] and together:
            if len(tensors) == 1 and len(common) == 1:
                to[dim] = len(out)
            out += common
        dim += _consumes(entry)
    return Selection(tuple(out), to, by_dim, entries)


def _index_shape(entry: Any) -> tuple[int, ...]:
    return (int(entry.sum()),) if entry.dtype == torch.bool else tuple(entry.shape)


def _check(shape: Sequence[int], by_dim: Sequence[Entry]) -> None:
    """Let torch refuse rows and slices on a tensor without data; check lists of rows by hand."""
    basic = tuple(slice(None) if e is None or isinstance(e, Tensor) else e for e in by_dim)
    torch.empty(tuple(shape), device="meta")[basic]
    for dim, entry in enumerate(by_dim):
        if not isinstance(entry, Tensor) or entry.numel() == 0:
            continue
        if entry.dtype == torch.bool:
            if tuple(entry.shape) != tuple(shape[dim : dim + entry.dim()]):
                msg = f"The shape of the mask {list(entry.shape)} does not match the tensor's at dim {dim}"
                raise IndexError(msg)
            continue
        low, high = int(entry.min()), int(entry.max())
        if low < -shape[dim] or high >= shape[dim]:
            bad = high if high >= shape[dim] else low
            msg = f"index {bad} is out of bounds for dimension {dim} with size {shape[dim]}"
            raise IndexError(msg)


def list_rows(index: Tensor, n: int) -> Rows:
    """Give the rows that a list of indices reads."""
    return merged((i + n if i < 0 else i, 1, 1) for i in index.tolist())


# reading


@rule(torch.Tensor.__getitem__)
def getitem(x: Tensor, index: Any) -> Any:
    """Index a tensor.

    Communication:
        Along a sharded dim that is sliced, the rows that change their rank; along one that a number indexes, that
        row to all other ranks.
    """
    if not isinstance(x, DTensor):
        return gather_call(torch.Tensor.__getitem__, (x, index), {}, why="the index is an activation")
    entries = read_index(index, x.dim())
    if isinstance(entries, str):
        return gather_call(torch.Tensor.__getitem__, (x, index), {}, why=entries)
    return _indexed(x, entries, index, "Tensor.__getitem__")


def _indexed(x: DTensor, entries: list[Entry], index: Any, op: str) -> Any:
    plan = selection(x.shape, entries)
    spread = sharded_dims(settle(x, range(x.dim()), op))
    if why := _gather_reason(plan, spread):
        return gather_call(torch.Tensor.__getitem__, (x, index), {}, why=why)
    x = settle(x, range(x.dim()), op)
    piece = pieces.local(x)
    local_index: list[Entry] = []
    dim = 0
    for entry in entries:
        if dim in spread and entry is not None:
            piece, entry = _along(piece, x, dim, entry, plan, op)
        local_index.append(entry)
        dim += _consumes(entry)
    piece = piece[tuple(local_index)]
    return pieces.whole(piece, x.device_mesh, remapped(x.placements, plan.to), plan.shape)


def _along(piece: Tensor, x: DTensor, dim: int, entry: Entry, plan: Selection, op: str) -> tuple[Tensor, Entry]:
    """Fetch what an entry reads of a sharded dim, and give the entry that is left to do."""
    n = x.shape[dim]
    if isinstance(entry, int):
        return _row(piece, x, dim, entry % n, op), 0
    if isinstance(entry, slice):
        rows = sliced(n, entry.start, entry.stop, entry.step)
    else:
        assert isinstance(entry, Tensor)
        rows = list_rows(entry, n)
    return _fetched(piece, x, dim, rows, plan.shape[plan.to[dim]], op), slice(None)


def _gather_reason(plan: Selection, spread: dict[int, int]) -> str:
    tensors = [e for e in plan.entries if isinstance(e, Tensor)]
    touched = [d for d, e in enumerate(plan.by_dim) if d in spread and (e is None or isinstance(e, Tensor))]
    if not touched:
        return ""
    plain_list = len(tensors) == 1 and tensors[0].dim() == 1 and tensors[0].dtype != torch.bool
    return "" if plain_list else f"dim {touched[0]} is sharded and indexed by a mask or by several tensors"


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
    return _indexed(input, _at(input, dim, slice(first, first + length)), None, "narrow")


@rule(*functions("select"))
def select(input: DTensor, dim: int, index: Any) -> Any:
    """Give one row, and drop the dim."""
    row = int(index)
    torch.empty(input.shape, device="meta").select(dim, row)  # torch's errors
    return _indexed(input, _at(input, dim, row), None, "select")


@rule(*functions("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor, *, out: Any = None) -> Any:
    """Give a list of rows."""
    sharded = isinstance(index, DTensor) and any(not p.is_replicate() for p in index.placements)
    if sharded or out is not None or not isinstance(input, DTensor) or input.dim() == 0:
        kwargs = {} if out is None else {"out": out}
        return gather_call(torch.index_select, (input, dim, index), kwargs, why="its index or output is an activation")
    torch.empty(input.shape, device="meta").index_select(
        dim, torch.empty(index.shape, dtype=index.dtype, device="meta")
    )
    plain = pieces.local(index) if isinstance(index, DTensor) else index
    return _indexed(input, _at(input, dim, plain.reshape(-1)), None, "index_select")


@rule(*functions("unbind"))
def unbind(input: DTensor, dim: int = 0) -> Any:
    """Give all rows one by one; iteration comes here too. Rows of a sharded dim go to every rank, which is a gather."""
    torch.empty(input.shape, device="meta").unbind(dim)  # torch's errors
    dim %= input.dim()
    x = settle(input, range(input.dim()), "unbind")
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
        piece = _fetched(piece, x, dim, order, x.shape[dim], op)
    return x, piece


@rule(*functions("roll"))
def roll(input: DTensor, shifts: Any, dims: Any = ()) -> Any:
    """Move rows along dims, around the end."""
    by = tuple(shifts) if isinstance(shifts, list | tuple) else (shifts,)
    along = () if dims is None else tuple(dims) if isinstance(dims, list | tuple) else (dims,)
    torch.empty(input.shape, device="meta").roll(by, along)  # torch's errors
    x = settle(input, range(input.dim()), "roll")
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
    x = settle(input, range(input.dim()), "repeat_interleave")
    dim %= x.dim()
    if dim in sharded_dims(x):
        rows = tuple((i, repeats, 0) for i in range(x.shape[dim]))
        piece = _fetched(pieces.local(x), x, dim, rows, shape[dim], "repeat_interleave")
    else:
        piece = pieces.local(x).repeat_interleave(repeats, dim)
    return pieces.whole(piece, x.device_mesh, x.placements, shape)


@rule(*functions("flip"))
def flip(input: DTensor, *dims: Any, **named: Any) -> Any:
    """Read dims from last to first."""
    given = dims or tuple(named.values())
    along = tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    torch.empty(input.shape, device="meta").flip(along)  # torch's errors
    x = settle(input, range(input.dim()), "flip")
    turned = {d % x.dim() for d in along}
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
