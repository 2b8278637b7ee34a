"""Shards step aside: a dim that must be whole on every rank is cleared by an all-to-all, and its shards come back.

Invariant: what can step aside does, with 1/p of the tensor on every rank before, between and after; only where no other
dim could take the shards is the tensor gathered, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from meshpar import pieces
from meshpar.rules.spatial import settle, sharded_dims, whole_along
from meshpar.transpose import transposed

Move = tuple[int, int, int]
"""A mesh axis, by position, the dim that it shards, and the dim that it shards meanwhile."""


def moves_aside(x: DTensor, busy: Collection[int]) -> list[Move] | None:
    """Choose where the shards of busy dims go: to the dim that splits most evenly, the longest of those.

    Args:
        x: activation after `settle`.
        busy: dims (not negative) that must be whole.

    Returns:
        One move for each sharded busy dim; None where there are not dims enough of more than one row.
    """
    spread = sharded_dims(x)
    taken = set(spread) | set(busy)
    moves: list[Move] = []
    for dim, axis in spread.items():
        if dim not in busy:
            continue
        p = x.device_mesh.size(axis)
        free = [(n / (-(-n // p) * p), n, -d) for d, n in enumerate(x.shape) if n > 1 and d not in taken]
        if not free:
            return None
        best = -max(free)[2]
        taken.add(best)
        moves.append((axis, dim, best))
    return moves


def stepped_aside(x: DTensor, moves: Sequence[Move], op: str) -> DTensor:
    """Move shards out of the way."""
    for axis, _, to in moves:
        x = transposed(x, axis, to, op)
    return x


def stepped_back(x: DTensor, moves: Sequence[Move], op: str) -> DTensor:
    """Move shards back to the dims where they were."""
    for axis, dim, _ in reversed(moves):
        x = transposed(x, axis, dim, op)
    return x


def compute(x: DTensor, func: Callable[[Tensor], Any], busy: Collection[int], *, lead: int = 0) -> Any:
    """Run a function of whole dims on the local pieces.

    Args:
        x: activation, no busy dim of which is sharded.
        func: gives a tensor or a tuple of them, of the same dims; sizes may differ in the busy ones alone.
        busy: dims (not negative) along which it works.
        lead: how many new dims its outputs have before the others.

    Returns:
        DTensors in the placements of x, of the tuple type that `func` gave.
    """
    piece = pieces.local(x)
    nowhere = [d for d, n in enumerate(piece.shape) if n == 0 and x.shape[d] > 0 and d not in busy]
    if nowhere:  # many functions refuse to work on nothing, and this rank must stay in the autograd graph
        piece = F.pad(piece, [int(d in nowhere and at == 1) for d in reversed(range(piece.dim())) for at in (0, 1)])
    found = func(piece)
    placements = [Shard(p.dim + lead) if isinstance(p, Shard) else p for p in x.placements]

    def leave(part: Tensor) -> DTensor:
        for d in nowhere:
            part = part.narrow(d + lead, 0, 0)
        sizes = [part.shape[d + lead] if d in busy else n for d, n in enumerate(x.shape)]
        return pieces.whole(part, x.device_mesh, placements, [*part.shape[:lead], *sizes])

    if isinstance(found, Tensor):
        return leave(found)
    parts = [leave(part) for part in found]
    return tuple(parts) if type(found) in (tuple, list) else type(found)(parts)


def along(
    x: DTensor, func: Callable[[Tensor], Any], busy: Collection[int], op: str, *, drop: bool = False, lead: int = 0
) -> Any:
    """Run a function that works along whole dims, sharded or not.

    Args:
        x: activation.
        func: gives a tensor or a tuple of them; see `compute`.
        busy: dims (not negative) along which it works.
        op: name of the op, for the record.
        drop: whether the busy dims have one row afterwards, which is to be on every rank.
        lead: how many new dims the outputs have before the others.

    Returns:
        DTensors sharded along the same dims as x, in canonical layout of the new sizes; see `drop`.

    Communication:
        None where the busy dims are whole. Else an all-to-all there and one back for each sharded busy dim (an
        all-gather back with `drop`), and as much in the backward; an all-gather where no other dim is free.
    """
    x = settle(x, range(x.dim()), op, nested=[d for d in range(x.dim()) if d not in busy])
    moves = moves_aside(x, busy)
    if moves is not None:
        found = compute(stepped_aside(x, moves, op), func, busy, lead=lead)
        if drop:
            return _each(found, lambda y: _cleared(y, [axis for axis, _, _ in moves], op))
        shifted = [(axis, dim + lead, to + lead) for axis, dim, to in moves]
        return _each(found, lambda y: stepped_back(y, shifted, op))
    axes = [axis for dim, axis in sharded_dims(x).items() if dim in busy]
    found = compute(
        whole_along(x, axes, op, "it works along a sharded dim, and no other dim can be"), func, busy, lead=lead
    )
    target = [Replicate() if drop and axis in axes else p for axis, p in enumerate(x.placements)]
    shards = [Shard(p.dim + lead) if isinstance(p, Shard) else p for p in target]
    return _each(found, lambda y: pieces.moved(y, shards, op))


def _cleared(x: DTensor, axes: Sequence[int], op: str) -> DTensor:
    """Bring a result to every rank of some axes."""
    target = [Replicate() if axis in axes else p for axis, p in enumerate(x.placements)]
    return pieces.moved(x, target, op)


def _each(found: Any, change: Callable[[DTensor], DTensor]) -> Any:
    if isinstance(found, DTensor):
        return change(found)
    parts = [change(part) for part in found]
    return tuple(parts) if type(found) is tuple else type(found)(parts)
