"""Reading by an index: slices and rows of sharded dims, lists and masks, and indices that are activations.

Invariant: what comes out is in canonical layout. Slices fetch the rows that change their rank. Where tensors index a
sharded dim, the rank that owns an element picks it, and it travels once to each rank whose output holds it. An index
that is itself sharded finds its part where what it indexes is whole; else its numbers, not the rows, go to all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Interval, Rows, chunks, merged, sliced, take
from meshpar.rules.pointwise import align, broadcast_placements
from meshpar.rules.selection import Entry, Selection, list_rows, read_index, selection
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims


class _OwnerGrad(torch.autograd.Function):
    """Let only the owner of a row send its gradient home: all ranks hold the same one."""

    @staticmethod
    def forward(ctx, x, owner):  # type: ignore[no-untyped-def]
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return (g if ctx.owner else torch.zeros_like(g)), None


def fetched(piece: Tensor, x: DTensor, dim: int, rows: Rows, m: int, op: str) -> Tensor:
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


def indexed(x: DTensor, entries: list[Entry], index: Any, op: str) -> Any:
    """Index an activation; `index` is what the user wrote, for what must be gathered."""
    plan = selection(x.shape, entries)
    whole = [(0, n, 1) for n in x.shape]
    free = [d for d, e in enumerate(plan.by_dim) if isinstance(e, slice) and e.indices(x.shape[d]) == whole[d]]
    spread = sharded_dims(settle(x, range(x.dim()), op, nested=free))
    lists = [d for d, e in enumerate(plan.by_dim) if isinstance(e, Tensor)]
    touched = [d for d in lists if d in spread]
    beside = _beside(x, plan, touched, spread) if len(touched) > 1 else None
    if len(touched) > 1 and beside is None:
        why = f"dims {touched} are sharded, and several tensors index them"
        return gather_call(torch.Tensor.__getitem__, (x, index), {}, why=why)
    x = settle(x, range(x.dim()), op, nested=free)
    piece = pieces.local(x)
    local_index: list[Entry] = []
    dim = 0
    for entry in plan.entries:
        if dim in spread and dim not in free and isinstance(entry, int | slice):
            piece, entry = _along(piece, x, dim, entry, plan, op)
        local_index.append(entry)
        dim += entry is not None
    if touched:
        return _listed(piece, x, plan, local_index, touched, beside, op)
    return pieces.whole(piece[tuple(local_index)], x.device_mesh, remapped(x.placements, plan.to), plan.shape)


def _along(piece: Tensor, x: DTensor, dim: int, entry: int | slice, plan: Selection, op: str) -> tuple[Tensor, Entry]:
    """Fetch what a row or slice reads of a sharded dim, and give the entry that is left to do."""
    n = x.shape[dim]
    if isinstance(entry, int):
        return _row(piece, x, dim, entry % n, op), 0
    rows = sliced(n, entry.start, entry.stop, entry.step)
    return fetched(piece, x, dim, rows, plan.shape[plan.to[dim]], op), slice(None)


# tensors that index sharded dims


def flat_lists(x: DTensor, plan: Selection) -> dict[int, Tensor]:
    """Give the index of each dim that a tensor indexes, broadcast, laid flat and not negative."""
    flat = {d: e.expand(plan.common).reshape(-1) for d, e in enumerate(plan.by_dim) if isinstance(e, Tensor)}
    return {d: e if e.numel() == 0 else e % x.shape[d] for d, e in flat.items()}


def long_dims(common: Sequence[int]) -> list[int]:
    """List the common dims of index tensors that can be sharded, the first of all where none is longer than 1."""
    return [c for c, n in enumerate(common) if n > 1] or [0]


def owned(places: Tensor, n: int, mesh: DeviceMesh, axis: int) -> list[Tensor]:
    """Give, for each rank of an axis, the positions in a list of the rows that it owns."""
    return [((places >= a) & (places < b)).nonzero().reshape(-1) for a, b in pieces.axis_chunks(mesh, axis, n)]


def _beside(x: DTensor, plan: Selection, touched: list[int], spread: dict[int, int]) -> int | None:
    """Find the dim, of two that are sharded, whose index has each element's row lie where the output is to lie."""
    if len(touched) != 2 or not plan.common or 0 in plan.common:
        return None
    c = long_dims(plan.common)[0]
    inner = math.prod(plan.common[c + 1 :])
    for d, flat in flat_lists(x, plan).items():
        if d not in touched:
            continue
        layouts = (pieces.axis_chunks(x.device_mesh, spread[d], n) for n in (plan.common[c], x.shape[d]))
        spans = [(flat[a * inner : b * inner], held) for (a, b), held in zip(*layouts, strict=True)]
        if all(bool(((part >= a) & (part < b)).all()) for part, (a, b) in spans):
            return d
    return None


def _listed(
    piece: Tensor, x: DTensor, plan: Selection, index: list[Entry], touched: list[int], beside: int | None, op: str
) -> DTensor:
    """Pick the elements that tensors index, where one sharded dim is theirs, and another one that lies beside."""
    mesh, spread, flat = x.device_mesh, sharded_dims(x), flat_lists(x, plan)
    sizes, free = list(plan.common), long_dims(plan.common)
    to = {d: at for d, at in plan.to.items() if d not in flat}
    if beside is not None:
        c, axis = free.pop(0), spread[beside]
        a, b = pieces.my_chunk(mesh, axis, sizes[c])
        inner = math.prod(sizes[c + 1 :])
        sizes[c] = b - a
        flat = {d: e[a * inner : b * inner] for d, e in flat.items()}
        flat[beside] = flat[beside] - pieces.my_chunk(mesh, axis, x.shape[beside])[0]
        to[beside] = plan.at + c
    (dim,) = [d for d in touched if d != beside]
    axis, n = spread[dim], x.shape[dim]
    p, me = mesh.size(axis), mesh.get_local_rank(axis)
    grid = torch.arange(math.prod(sizes)).reshape(sizes)
    wanted = [grid.reshape(-1)] * p
    if free:  # else all ranks of the axis get all
        wanted = [grid.narrow(free[0], a, b - a).reshape(-1) for a, b in chunks(sizes[free[0]], p)]
        to[dim] = plan.at + free[0]
        a, b = chunks(sizes[free[0]], p)[me]
        sizes[free[0]] = b - a
    if len(flat) == 1:  # each row goes to a rank once, however often it is named
        want = [list_rows(flat[dim][part], n) for part in wanted]
        piece = fetch_rows(piece, dim, n, want, mesh, axis, op)
        flat = {}
        piece = piece[with_lists(index, {dim: slice(None)})]
    else:
        own = owned(flat[dim], n, mesh, axis)
        first = pieces.my_chunk(mesh, axis, n)[0]
        mine = {d: e[own[me]] - (first if d == dim else 0) for d, e in flat.items()}
        piece = piece[with_lists(index, mine)]
        if free:
            piece = _sent(piece, plan.at, own, wanted, mesh, axis, op)
        else:
            shape = list(piece.shape)
            shape[plan.at] = grid.numel()
            piece = pieces.psum(piece.new_zeros(shape).index_copy(plan.at, own[me], piece), mesh, [axis], op)
    piece = piece.reshape(*piece.shape[: plan.at], *sizes, *piece.shape[plan.at + 1 :])
    return pieces.whole(piece, mesh, remapped(x.placements, to), plan.shape)


def with_lists(index: Sequence[Entry], lists: dict[int, Any]) -> tuple[Any, ...]:
    """Put other entries in the place of the tensors of an index, by dim."""
    out: list[Any] = []
    dim = 0
    for entry in index:
        out.append(lists[dim] if isinstance(entry, Tensor) else entry)
        dim += entry is not None
    return tuple(out)


def _sent(
    piece: Tensor, at: int, own: list[Tensor], wanted: list[Tensor], mesh: DeviceMesh, axis: int, op: str
) -> Tensor:
    """Send picked elements from their owners to the ranks that want them; numbers in order of owners make it rows."""
    order = torch.cat(own)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    have: list[Interval] = []
    for part in own:
        start = have[-1][1] if have else 0
        have.append((start, start + part.numel()))
    want = [merged((k, 1, 1) for k in place[part].tolist()) for part in wanted]
    return fetch_rows(piece, at, order.numel(), want, mesh, axis, op, have=have)


# an index that is an activation


def by_activation(x: Tensor, index: Any, op: str) -> Any:
    """Index a tensor by activations of integers, of which some are sharded.

    Communication:
        None where the dims that they index are whole, and no axis shards both: the backward sums the gradient of x.
        Else the numbers of the index go to every rank.
    """
    items = index if isinstance(index, tuple) else (index,)
    lists = [item for item in items if isinstance(item, DTensor)]
    mesh = lists[0].device_mesh
    if all(not item.is_floating_point() and item.dtype not in (torch.bool, torch.uint8) for item in lists):
        result = _found(x, items, mesh, op)
        if result is not None:
            return result
        whole = pieces.replicated(mesh)
        items = tuple(pieces.moved(item, whole, op) if isinstance(item, DTensor) else item for item in items)
        given = x if isinstance(x, DTensor) else pieces.lift(x, mesh)
        entries = read_index(items, given.dim())
        if not isinstance(entries, str):
            return indexed(given, entries, items, op)
    return gather_call(torch.Tensor.__getitem__, (x, index), {}, why="the index is a sharded mask")


def _found(x: Tensor, items: Sequence[Any], mesh: DeviceMesh, op: str) -> DTensor | None:
    ghosts = [torch.empty(i.shape, dtype=i.dtype, device="meta") if isinstance(i, DTensor) else i for i in items]
    if any(isinstance(i, DTensor) and i.dim() == 0 for i in items):
        return None
    entries = read_index(tuple(ghosts), x.dim())
    if isinstance(entries, str) or any(isinstance(e, Tensor) and e.dtype == torch.bool for e in entries):
        return None
    plan = selection(x.shape, entries)
    real = iter([i for i in items if isinstance(i, DTensor)])
    lists = [next(real) if isinstance(e, Tensor) and e.is_meta else e for e in entries if isinstance(e, Tensor)]
    _, placements = broadcast_placements([e for e in lists if isinstance(e, DTensor)], plan.common)
    own = list(x.placements) if isinstance(x, DTensor) else [Replicate()] * mesh.ndim
    out: list[Placement] = []
    grad: list[Placement] = []
    for axis, (mine, theirs) in enumerate(zip(own, placements, strict=True)):
        alone = mesh.size(axis) == 1
        if isinstance(mine, Shard) and not alone:
            entry = plan.by_dim[mine.dim]
            if isinstance(theirs, Shard) or not isinstance(entry, slice) or entry != slice(None):
                return None
            out.append(Shard(plan.to[mine.dim]))
            grad.append(mine)
        elif isinstance(theirs, Shard):
            out.append(Shard(plan.at + theirs.dim))
            grad.append(Partial() if not alone else mine)
        else:
            out.append(Replicate())
            grad.append(mine)
    if isinstance(x, DTensor):
        if settle(x, range(x.dim()), op) is not x:
            return None
        source = pieces.local(x, grad)
    else:
        source = pieces.as_part(x, mesh, out)
    aligned = iter([align(e, mesh, placements, plan.common, op) for e in lists])
    local_index = tuple(next(aligned) if isinstance(e, Tensor) else e for e in plan.entries)
    return pieces.whole(source[local_index], mesh, out, plan.shape)


def sharded_index(index: Any) -> bool:
    """Tell whether an index holds activations that are cut."""
    items = pytree.tree_leaves(index)
    return any(isinstance(item, DTensor) and any(not p.is_replicate() for p in item.placements) for item in items)
