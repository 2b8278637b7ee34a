"""Reshape and its kin: dims merged and split, with their shards.

Invariant: sizes are global, -1 too, and every output is in canonical layout. A dim that comes out as it went in keeps
its shards, and the view is local. Within a group of dims that are merged or split, what each rank holds before and
after are blocks of the same flat positions, and one fetch over the axes that shard the group brings those that change
their rank. A merged dim may lie along several axes (batch and rows): nested shards, the axes in mesh order. Results
may share memory with the input where torch's do, but not where rows have moved.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces, private
from meshpar.blocks import block_intervals, numbered, scaled_down
from meshpar.exchange import fetch
from meshpar.intervals import Interval, Rows, chunks
from meshpar.registry import functions, rule
from meshpar.rules.spatial import settle, whole_along

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Dims before and dims after that hold the same elements in the same order."""

_BALANCED = 0.5
"""The least share of all ranks' room that a dim may fill to be sharded; the best dim is, where none comes that far."""


def numbers(args: Sequence[Any]) -> tuple[Any, ...]:
    """Unpack sizes or dims that were given as one sequence, and read out those that are tensors."""
    items = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | torch.Size) else args
    return tuple(int(v) if isinstance(v, Tensor) else v for v in items)


@private.asked_once
def _shape_after(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Resolve -1, with torch's errors."""
    return tuple(torch.empty(shape, device="meta").reshape(sizes).shape)


@functools.lru_cache(maxsize=4096)
def groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...]:
    """Split two shapes of one number of elements, not 0, into the smallest groups of dims with equal products.

    Example:
        >>> groups((2, 12, 5), (2, 3, 4, 5))
        (((0,), (0,)), ((1,), (1, 2)), ((2,), (3,)))
    """
    out: list[Group] = []
    i = j = 0
    while i < len(before) or j < len(after):
        n = before[i] if i < len(before) else 0
        m = after[j] if j < len(after) else 0
        if n == m:
            take_before, take_after = 1, 1
        elif n == 1:
            take_before, take_after = 1, 0
        elif m == 1:
            take_before, take_after = 0, 1
        else:
            take_before = take_after = 1
            while n != m:
                if n < m:
                    n *= before[i + take_before]
                    take_before += 1
                else:
                    m *= after[j + take_after]
                    take_after += 1
        out.append((tuple(range(i, i + take_before)), tuple(range(j, j + take_after))))
        i, j = i + take_before, j + take_after
    return tuple(out)


@dataclass(frozen=True)
class Move:
    """Hold what one group of dims exchanges.

    Args:
        before: dims of the group in the input.
        axes: mesh axes (by position) whose ranks exchange; () where the blocks are the same before and after.
        unit: elements that move together.
        have: for each rank of the axes, in row-major order of their coordinates, the units that it holds.
        want: for each rank the units that it wants.
    """

    before: tuple[int, ...]
    axes: tuple[int, ...]
    unit: int
    have: tuple[Interval, ...] = ()
    want: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class Reshaping:
    """Hold a reshape of a sharded shape: for each axis the dim that it shards afterwards, or -1, and the moves.

    Args:
        after: dims by axis.
        moves: one for each group of dims that does not stay as it is.
        vanish: axes that shard a dim of size 1 which is gone afterwards.
    """

    after: tuple[int, ...]
    moves: tuple[Move, ...]
    vanish: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def plan_reshape(
    before: tuple[int, ...],
    after: tuple[int, ...],
    dims: tuple[int, ...],
    sizes: tuple[int, ...],
    spans: tuple[tuple[int, ...], ...],
    where: tuple[int, ...],
) -> Reshaping:
    """Plan a reshape without communication; pure integers.

    Args:
        before: global shape, without empty dims.
        after: global shape of the result.
        dims: for each mesh axis the dim that it shards, or -1.
        sizes: for each mesh axis its ranks.
        spans: sets of axes that have a group in common.
        where: coordinates of this rank: other ranks of axes that do not exchange hold other blocks.
    """
    targets = list(dims)
    moves: list[Move] = []
    vanish: list[int] = []
    for group in groups(before, after):
        axes = tuple(axis for axis, dim in enumerate(dims) if dim in group[0] and sizes[axis] > 1)
        for axis, dim in enumerate(dims):
            if dim in group[0] and axis not in axes:
                targets[axis] = next((d for d in group[1] if after[d] > 1), group[1][0] if group[1] else -1)
        if len(group[0]) == len(group[1]) == 1:
            for axis in axes:
                targets[axis] = group[1][0]
            continue
        if not axes:
            continue
        if not any(after[d] > 1 for d in group[1]):
            vanish += axes
            for axis in axes:
                targets[axis] = -1
            continue
        for axis, dim in zip(axes, _targets(group[1], after, [sizes[axis] for axis in axes]), strict=True):
            targets[axis] = dim
        # The other groups' axes may stand for dims of any number here: they are left out.
        own = [dim if axis in axes else -1 for axis, dim in enumerate(targets)]
        sides = _side(group[0], before, dims, sizes), _side(group[1], after, own, sizes)
        moves.append(_move(group[0], sides, sizes, spans, where))
    return Reshaping(tuple(targets), tuple(moves), tuple(vanish))


def _targets(dims: Sequence[int], shape: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Choose the dims that axes shard after a split: in their order, each the first that fills most ranks."""
    left = [d for d in dims if shape[d] > 1]
    chosen: list[int] = []
    for p in ranks:
        room = left or chosen[-1:]
        filled = {d: shape[d] / (p * -(-shape[d] // p)) for d in room}
        dim = next((d for d in room if filled[d] >= _BALANCED), max(room, key=lambda d: filled[d]))
        chosen.append(dim)
        left = [d for d in left if d > dim]
    return chosen


@dataclass(frozen=True)
class _Side:
    """Hold how a group of dims lies before or after: its sizes, and the place in the group that each axis shards."""

    sizes: tuple[int, ...]
    places: tuple[tuple[int, int], ...]  # (axis, place), axes of more than one rank, in mesh order: so they nest

    def without(self, axes: Sequence[int]) -> _Side:
        """Give what the ranks that differ along some axes alone hold together; these must nest innermost."""
        return _Side(self.sizes, tuple((axis, place) for axis, place in self.places if axis not in axes))

    def unit(self) -> int:
        """Count the elements behind the last sharded dim, which move together."""
        return math.prod(self.sizes[max(place for _, place in self.places) + 1 :])

    def block(self, ranks: Sequence[int], at: Sequence[int]) -> tuple[Interval, ...]:
        """Give the flat positions that the rank at some coordinates holds."""
        spans = [(0, n) for n in self.sizes]
        for axis, place in self.places:
            a, b = spans[place]
            first, last = chunks(b - a, ranks[axis])[at[axis]]
            spans[place] = (a + first, a + last)
        return block_intervals(self.sizes, spans)


def _side(dims: Sequence[int], shape: Sequence[int], by_axis: Sequence[int], ranks: Sequence[int]) -> _Side:
    places = [(axis, dims.index(dim)) for axis, dim in enumerate(by_axis) if dim in dims and ranks[axis] > 1]
    return _Side(tuple(shape[d] for d in dims), tuple(places))


def _lines(axes: Sequence[int], ranks: Sequence[int], where: Sequence[int]) -> Iterator[list[int]]:
    """Give the coordinates of the ranks that differ from this one along some axes alone, in row-major order."""
    for line in itertools.product(*(range(ranks[axis]) for axis in axes)):
        at = list(where)
        for axis, i in zip(axes, line, strict=True):
            at[axis] = i
        yield at


def _move(
    dims: tuple[int, ...],
    sides: tuple[_Side, _Side],
    ranks: tuple[int, ...],
    spans: tuple[tuple[int, ...], ...],
    where: tuple[int, ...],
) -> Move:
    unit = math.gcd(*(side.unit() for side in sides))
    axes = [axis for axis, _ in sides[0].places]

    def blocks(side: _Side, inside: Sequence[int]) -> list[tuple[Interval, ...]]:
        return [scaled_down(side.block(ranks, at), unit) for at in _lines(inside, ranks, where)]

    if blocks(sides[0], axes) == blocks(sides[1], axes):
        return Move(dims, (), unit)
    # The fewest axes within which all that is wanted is held: outer ones often need no exchange.
    for first in range(len(axes) - 1, -1, -1):
        inside, outside = axes[first:], axes[:first]
        if (len(inside) == 1 or tuple(inside) in spans) and _closed(sides, ranks, inside, outside, where):
            have, want = (blocks(side, inside) for side in sides)
            return Move(dims, tuple(inside), unit, *numbered(have, want))
    return Move(dims, (-1,), unit)


def _closed(
    sides: tuple[_Side, _Side],
    ranks: Sequence[int],
    inside: Sequence[int],
    outside: Sequence[int],
    where: Sequence[int],
) -> bool:
    """Tell whether ranks that differ along `inside` alone hold together what they want, wherever they are outside."""
    one, two = (side.without(inside) for side in sides)
    return all(one.block(ranks, at) == two.block(ranks, at) for at in _lines(outside, ranks, where))


def reshaped(x: DTensor, sizes: Sequence[int], op: str) -> DTensor:
    """Reshape an activation; see the head of the file for what is sent."""
    shape = _shape_after(tuple(x.shape), tuple(sizes))
    x = settle(x, range(x.dim()), op, nested=range(x.dim()))
    mesh = x.device_mesh
    if 0 in shape:
        spread = sorted({axis for d in range(x.dim()) for axis in pieces.shard_axes(x, d)})
        x = whole_along(x, spread, op, "there are no elements" if spread else "")
        return pieces.whole(pieces.local(x).reshape(shape), mesh, pieces.replicated(mesh), shape)
    plan = _plan(x, shape)
    if plan.vanish:  # a dim of size 1 vanishes: one rank has had it all
        x = whole_along(x, list(plan.vanish), op)
        plan = _plan(x, shape)
    for move in plan.moves:
        if move.axes == (-1,):
            inside = [axis for d in move.before for axis in pieces.shard_axes(x, d)]
            x = whole_along(x, inside, op, "the axes that shard a merged dim have no group in common")
            return reshaped(x, shape, op)
    piece = pieces.local(x)
    placements: list[Placement] = [Shard(dim) if dim >= 0 else Replicate() for dim in plan.after]
    target = pieces.local_shape(shape, mesh, placements)
    # Groups that move are laid flat one by one; the dims around them are as before or as after, the same there.
    for move in plan.moves:
        if not move.axes:
            continue
        head = list(piece.shape[: move.before[0]])
        tail = list(piece.shape[move.before[-1] + 1 :])
        group, name = _group(x, move.axes)
        a, b = move.have[group.rank()]
        flat = piece.reshape(*head, b - a, move.unit, *tail)
        flat = fetch(flat, len(head), move.have, move.want, group, axis=name, op=op)
        # Keep the number of dims of the group, so that the next group is found where it was.
        piece = flat.reshape(*head, *[1] * (len(move.before) - 1), flat.shape[len(head)] * move.unit, *tail)
    return pieces.whole(piece.reshape(target), mesh, placements, shape)


def _plan(x: DTensor, shape: tuple[int, ...]) -> Reshaping:
    mesh = x.device_mesh
    dims = tuple(p.dim if isinstance(p, Shard) else -1 for p in x.placements)
    where = tuple(mesh.get_coordinate() or ())
    return plan_reshape(tuple(x.shape), shape, dims, tuple(mesh.shape), pieces.spans_of(mesh), where)


def _group(x: DTensor, axes: Sequence[int]) -> tuple[dist.ProcessGroup, str]:
    found = pieces.groups_over(x.device_mesh, axes)
    assert len(found) == 1, "an exchange within one group"
    return found[0]


@rule(*functions("reshape"))
def reshape(input: DTensor, *shape: Any, **named: Any) -> Any:
    """Give the elements, in row-major order, another shape."""
    return reshaped(input, numbers(shape or (named["shape"],)), "reshape")


@rule(torch.Tensor.view)
def view(x: DTensor, *size: Any, **named: Any) -> Any:
    """Reshape, or read the memory as another dtype.

    Strides that torch would refuse are accepted: how a piece lies in memory may differ between ranks.
    """
    size = size or tuple(named.values())
    if isinstance(size[0], torch.dtype):
        return _as_dtype(x, size[0])
    return reshaped(x, numbers(size), "view")


def _as_dtype(x: DTensor, dtype: torch.dtype) -> Any:
    old, new = x.element_size(), torch.empty((), dtype=dtype, device="meta").element_size()
    # Of another size, the elements of the last dim are packed together.
    keep = range(x.dim() - (old != new))
    x = settle(x, keep, "view", nested=keep)
    shape = tuple(torch.empty(x.shape, dtype=x.dtype, device="meta").view(dtype).shape)
    return pieces.whole(pieces.local(x).view(dtype), x.device_mesh, x.placements, shape)


@rule(*functions("view_as", "reshape_as"))
def view_as(x: DTensor, other: Tensor) -> Any:
    """Reshape to the shape of another tensor."""
    return reshaped(x, tuple(other.shape), "view_as") if isinstance(x, DTensor) else x.reshape(other.shape)


@rule(*functions("flatten"))
def flatten(input: DTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge neighbouring dims; `nn.Flatten` comes here too."""
    shape = torch.empty(input.shape, device="meta").flatten(start_dim, end_dim).shape
    return reshaped(input, tuple(shape), "flatten")


@rule(*functions("unflatten"))
def unflatten(input: DTensor, dim: int, sizes: Any) -> Any:
    """Split a dim; `nn.Unflatten` comes here too."""
    shape = torch.empty(input.shape, device="meta").unflatten(dim, numbers((sizes,))).shape
    return reshaped(input, tuple(shape), "unflatten")


@rule(*functions("ravel"))
def ravel(input: DTensor) -> Any:
    """Merge all dims."""
    return reshaped(input, (-1,), "ravel")
