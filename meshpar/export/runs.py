"""Which bytes of a tensor a rank holds: pure integers, whatever cut it.

Invariant: along each dim a part is ascending intervals of global indices, so that the bytes of a rank's piece, in the
order of the piece, lie in ascending order in the whole tensor. Parts of ranks that are no replicas of each other do not
overlap, and cover the tensor.

A *layout* is how a tensor lies over a mesh of some sizes, a *part* what one coordinate of that mesh has of it, and a
*run* bytes that lie side by side both in the tensor and in the piece. Strided shards have two readings where sizes do
not divide: *nested*, the cuts in the order in which `fully_shard` makes them over a tensor axis, and left to right, as
`distribute_tensor` takes them. The piece itself shows which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import private
from meshpar.errors import ShardingError, explain
from meshpar.intervals import Interval, chunks
from meshpar.shares import share_at

SPLIT_BYTES = 1 << 20
"""Replicas share out the bytes of a piece in multiples of this: small ones come from the first replica alone."""


class Run(NamedTuple):
    """Hold bytes that lie side by side: where in the tensor, where in the piece, and how many."""

    at: int
    begin: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Hold how a tensor lies over a mesh, without the ranks: the sizes of the mesh, and a placement for each dim of it.

    A plain tensor lies over a mesh of no dims.
    """

    sizes: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()

    @property
    def replicas(self) -> int:
        """Count the coordinates that hold one and the same part."""
        pairs = zip(self.sizes, self.placements, strict=True)
        return math.prod(size for size, placement in pairs if isinstance(placement, Replicate))

    def replica_at(self, where: Sequence[int]) -> int:
        """Number the coordinates that hold one and the same part."""
        number = 0
        for size, placement, index in zip(self.sizes, self.placements, where, strict=True):
            if isinstance(placement, Replicate):
                number = number * size + index
        return number


@dataclass(frozen=True)
class Part:
    """Hold what a rank has of a tensor of a global shape: along each dim, ascending intervals of indices.

    Example:
        >>> list(runs(Part((2, 4), (((0, 2),), ((1, 2), (3, 4)))), 1))
        [Run(at=1, begin=0, size=1), Run(at=3, begin=1, size=1), Run(at=5, begin=2, size=1), Run(at=7, begin=3, size=1)]
    """

    shape: tuple[int, ...]
    rows: tuple[tuple[Interval, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Give the shape of the piece."""
        return tuple(sum(b - a for a, b in rows) for rows in self.rows)


def layout_of(x: Tensor) -> Layout:
    """Give the layout of a tensor.

    Raises:
        ShardingError: a `Partial`, whose ranks hold summands and no part.
    """
    if not isinstance(x, DTensor):
        return Layout()
    for placement in x.placements:
        if not isinstance(placement, Replicate | Shard | private.StridedShard):
            raise ShardingError(
                explain(
                    "a tensor of which no rank holds a part.",
                    got=f"{tuple(x.shape)} in {x.placements}",
                    needs="Replicate or Shard along every mesh dim",
                    fix="x.redistribute(placements=...) sums it up, on all ranks of its mesh",
                )
            )
    return Layout(tuple(map(int, x.device_mesh.shape)), tuple(x.placements))


def part_at(shape: Sequence[int], layout: Layout, where: Sequence[int], *, nested: bool = True) -> Part | None:
    """Give the part at a coordinate of the mesh, in one of the two readings; None where it has no nested one.

    Example:
        >>> ss = private.StridedShard(0, split_factor=2)
        >>> part_at((9,), Layout((4, 2), (ss, Shard(0))), (3, 1), nested=True).rows, part_at(
        ...     (9,), Layout((4, 2), (ss, Shard(0))), (3, 1), nested=False
        ... ).rows
        ((((8, 9),),), (((9, 9),),))
    """
    shape = tuple(shape)
    if nested:
        try:
            share = share_at(shape, layout.sizes, layout.placements, where)
        except ShardingError:
            return None
        pairs = zip(share.offsets, share.sizes, strict=True)
        return Part(shape, tuple(((a, a + n),) for a, n in pairs))
    rows: list[tuple[Interval, ...]] = [((0, n),) for n in shape]
    for size, placement, index in zip(layout.sizes, layout.placements, where, strict=True):
        if isinstance(placement, Shard | private.StridedShard):
            factor = placement.split_factor if isinstance(placement, private.StridedShard) else 1
            rows[placement.dim] = _taken(rows[placement.dim], size, int(factor), index)
    return Part(shape, tuple(rows))


def _taken(rows: tuple[Interval, ...], parts: int, factor: int, index: int) -> tuple[Interval, ...]:
    """Take, of each of the `factor` chunks of some rows, the chunk of a number out of `parts`."""
    n = sum(b - a for a, b in rows)
    wanted = [(a + lo, a + hi) for a, b in chunks(n, factor) for lo, hi in [chunks(b - a, parts)[index]] if lo < hi]
    found: list[Interval] = []
    before = 0
    for a, b in rows:
        for lo, hi in wanted:
            lo, hi = max(lo - before, 0) + a, min(hi - before, b - a) + a
            if lo < hi and found and found[-1][1] == lo:
                found[-1] = (found[-1][0], hi)
            elif lo < hi:
                found.append((lo, hi))
        before += b - a
    return tuple(found) or ((rows[-1][1], rows[-1][1]),)


def has_two_readings(shape: Sequence[int], layout: Layout) -> bool:
    """Tell whether the readings of strided shards may differ: those of sizes that divide do not."""
    for dim, n in enumerate(shape):
        cuts = [(size, p) for size, p in zip(layout.sizes, layout.placements, strict=True) if _cuts(p, dim)]
        strided = any(isinstance(p, private.StridedShard) for _, p in cuts)
        if strided and (n % math.prod(size for size, _ in cuts) or not _stands_for_cuts(layout, dim)):
            return True
    return False


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | private.StridedShard) and placement.dim == dim


def _stands_for_cuts(layout: Layout, dim: int) -> bool:
    """Tell whether each strided shard has as many chunks as those on its right make."""
    right = 1
    for size, placement in reversed(list(zip(layout.sizes, layout.placements, strict=True))):
        if _cuts(placement, dim):
            if isinstance(placement, private.StridedShard) and placement.split_factor != right:
                return False
            right *= size
    return True


def readings_of(x: Tensor) -> str:
    """Tell which readings give a part as large as the piece of a tensor: of "n" (nested) and "l" (left to right)."""
    if not isinstance(x, DTensor):
        return "nl"
    held, where = tuple(private.piece_of(x).shape), x.device_mesh.get_coordinate()
    assert where is not None, "this process is not on the mesh of a tensor that it holds"
    layout = layout_of(x)
    parts = {"n": part_at(x.shape, layout, where), "l": part_at(x.shape, layout, where, nested=False)}
    # `fully_shard` gives ranks without rows an empty piece of any shape.
    none = 0 in held
    fits = {
        name: part is not None and (part.sizes == held or (none and 0 in part.sizes)) for name, part in parts.items()
    }
    return "".join(name for name, fit in fits.items() if fit)


def part_of(x: Tensor) -> Part:
    """Give the part of a tensor that this rank holds: all of a plain one.

    Where the piece fits both readings of strided shards it is taken for nested; only all ranks together could tell.

    Raises:
        ShardingError: a `Partial`, or a piece that is no part of its shape under its placements.
    """
    layout = layout_of(x)
    if not isinstance(x, DTensor):
        return Part(tuple(x.shape), tuple(((0, n),) for n in x.shape))
    readings = readings_of(x)
    if not readings:
        raise ShardingError(
            explain(
                "a piece that is no part of its tensor.",
                got=f"{tuple(private.piece_of(x).shape)} on rank {_rank(x)} for {tuple(x.shape)} in {x.placements}",
                needs="the chunk rule of DTensor",
                fix="DTensor.from_local(piece, mesh, placements, shape=..., stride=...) with pieces of torch.chunk",
            )
        )
    part = part_at(x.shape, layout, x.device_mesh.get_coordinate() or (), nested="n" in readings)
    assert part is not None
    return part


def _rank(x: DTensor) -> int:
    return x.device_mesh.get_rank()


def shared_out(num_bytes: int, replicas: int, number: int) -> Interval:
    """Give the bytes of a piece that one of its replicas answers for.

    Example:
        >>> shared_out(2_500_000, 4, 2), shared_out(2_500_000, 4, 3), shared_out(64, 2, 1)
        ((2097152, 2500000), (2500000, 2500000), (64, 64))
    """
    lo, hi = chunks(-(-num_bytes // SPLIT_BYTES), replicas)[number]
    return min(lo * SPLIT_BYTES, num_bytes), min(hi * SPLIT_BYTES, num_bytes)


def runs(part: Part, item_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[Run]:
    """List the runs of a part, ascending; adjacent ones are one.

    Args:
        part: the part.
        item_bytes: bytes of an element.
        start: first byte of the piece that counts.
        stop: the byte of the piece after the last one that counts; its end by default.
    """
    found = _raw_runs(part, item_bytes, start, stop)
    # One block of a row that is not all of it: no two are adjacent.
    cut = [rows for rows, size, n in zip(part.rows, part.sizes, part.shape, strict=True) if size != n]
    return found if cut and len(cut[-1]) == 1 else _merged(found)


def _merged(found: Iterator[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in found:
        if last is not None and last.at + last.size == run.at and last.begin + last.size == run.begin:
            last = Run(last.at, last.begin, last.size + run.size)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _raw_runs(part: Part, item_bytes: int, start: int, stop: int | None) -> Iterator[Run]:
    sizes, shape = part.sizes, part.shape
    num_bytes = math.prod(sizes) * item_bytes
    stop = num_bytes if stop is None else min(stop, num_bytes)
    if start >= stop:
        return
    cut = [dim for dim, n in enumerate(shape) if sizes[dim] != n]
    if not cut:
        yield Run(start, start, stop - start)
        return
    dim = cut[-1]
    inner = math.prod(shape[dim + 1 :]) * item_bytes
    blocks = [(a * inner, (b - a) * inner) for a, b in part.rows[dim]]
    held = sizes[dim] * inner
    # Dims further out than the cut ones are read as one: the many runs of columns need a product each, and no loop.
    outer = [
        range(*rows[0]) if len(rows) == 1 else [i for a, b in rows for i in range(a, b)] for rows in part.rows[:dim]
    ]
    strides = [math.prod(shape[d + 1 :]) * item_bytes for d in range(dim)]
    if len(cut) == 1:
        outer, strides = [range(math.prod(sizes[:dim]))], [shape[dim] * inner]
    for number in range(start // held, -(-stop // held)):
        rest, base, begin = number, 0, number * held
        for indices, stride in zip(reversed(outer), reversed(strides), strict=True):
            rest, i = divmod(rest, len(indices))
            base += indices[i] * stride
        for offset, size in blocks:
            lo, hi = max(begin, start), min(begin + size, stop)
            if lo < hi:
                yield Run(base + offset + lo - begin, lo, hi - lo)
            begin += size
