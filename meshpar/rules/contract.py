"""Products of two operands that sum over some dims, wherever these are sharded: the plan, and what carries it out.

An operand is described by one letter a dim, as in einsum. Along a mesh axis every rank takes one part of one letter:
the *split* letter of the axis. Who has that letter is cut there, who has it not is whole there. What comes out is
sharded by the letter, or, where the letter is summed, is a part of the sum, which is then added up: scattered over
another dim of the output where there is one, whole on all ranks where it is small.

Invariant: `make_plan` is pure and sees global shapes alone, so every rank plans the same; nothing is left `Partial`;
a letter is split by one axis at the most, unless an operand came so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.rules.spatial import settle
from meshpar.scattering import all_rows, scattered
from meshpar.transpose import transposed

Letters = tuple[str, ...]

SMALL = 8
"""A sum that is so many times smaller than what it was made of stays whole on all ranks."""


@dataclass(frozen=True)
class Operand:
    """Describe one operand: a letter and a size for each dim; for each mesh axis the dim that it shards."""

    letters: Letters
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    item_bytes: int


@dataclass(frozen=True)
class Plan:
    """Say how a product runs; each field has one entry a mesh axis.

    Args:
        operands: for both operands the dims that are sharded while the product is computed.
        split: whether the ranks of the axis compute different things.
        local: dim of the output that is sharded when the product is computed.
        sums: "" where that is the end of it; "whole" or "scatter" where the ranks hold parts of a sum.
        out: dim of the output that is sharded in the end.
    """

    operands: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    split: tuple[bool, ...]
    local: tuple[int | None, ...]
    sums: tuple[str, ...]
    out: tuple[int | None, ...]


@dataclass(frozen=True)
class _Way:
    """Hold one way to run an axis: what it sends, the split letter, and the letter that is sharded in the end."""

    num_bytes: float
    rank: int
    split: str
    end: str | None
    sums: str


class _Planner:
    """Choose the ways of the axes one after the other; what one has taken the next ones leave alone."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        whole_sums: tuple[bool, ...],
        a: Operand,
        b: Operand,
        out: Letters,
        *,
        linear: bool,
    ) -> None:
        self.sizes, self.whole_sums, self.operands, self.out, self.linear = sizes, whole_sums, (a, b), out, linear
        self.extent: dict[str, int] = {}
        for x in self.operands:
            for letter, n in zip(x.letters, x.shape, strict=True):
                if n != 1 or letter not in self.extent:
                    self.extent[letter] = n
        self.taken: set[str] = set()
        self.held = {letter for x in self.operands for letter in self._held(x).values()}

    def has(self, x: Operand, letter: str) -> bool:
        """Tell whether an operand has all rows of a letter: it may lack it, or be repeated along it."""
        return letter in x.letters and x.shape[x.letters.index(letter)] == self.extent[letter]

    def _held(self, x: Operand) -> dict[int, str]:
        """Give the letter that each axis of several ranks shards."""
        found = {}
        for axis, dim in enumerate(x.dims):
            if dim is not None and self.sizes[axis] > 1 and self.has(x, x.letters[dim]):
                found[axis] = x.letters[dim]
        return found

    def piece_bytes(self, x: Operand, axis: int) -> float:
        """Give the bytes of a piece, as if this axis did not shard the operand."""
        shards = [self.sizes[i] for i, d in enumerate(x.dims) if d is not None and i != axis]
        return math.prod(x.shape) * x.item_bytes / math.prod(shards)

    def out_bytes(self, axis: int) -> float:
        """Give the bytes of the output on a rank, where this axis does not shard it."""
        shards = 1
        for other, p in enumerate(self.sizes):
            letters = {self._held(x).get(other) for x in self.operands}
            if other != axis and letters & set(self.out):
                shards *= p
        numel = math.prod([self.extent.get(letter, 1) for letter in self.out])
        return numel * max(x.item_bytes for x in self.operands) / shards

    def free_letters(self, axis: int) -> list[str]:
        """List the letters of the output that no axis has, and that all ranks of this axis can share in."""
        p = self.sizes[axis]
        return [
            letter for letter in self.out if letter not in self.taken | self.held and self.extent.get(letter, 1) >= p
        ]

    def end_of_sum(self, axis: int, letter: str) -> str | None:
        """Choose the letter that a sum over another letter is scattered on: best the one that takes its place."""
        free = self.free_letters(axis)
        on = [i for i, x in enumerate(self.operands) if self._held(x).get(axis) == letter]
        weight, first = sorted([(-self.piece_bytes(self.operands[i], axis), i) for i in on])[0]
        main = self.operands[first]
        small = self.out_bytes(axis) * SMALL <= -weight
        if not free or small or self.whole_sums[axis]:
            return None
        at = main.letters.index(letter)
        ranked = []
        for candidate in free:
            where = self.out.index(candidate)
            same = at == where or at - len(main.letters) == where - len(self.out)
            ranked.append((self.has(main, candidate), not same, -self.extent[candidate], where))
        return self.out[sorted(ranked)[0][-1]]

    def ways(self, axis: int) -> list[_Way]:
        """List the ways of an axis along which an operand is sharded."""
        p = self.sizes[axis]
        held = [self._held(x).get(axis) for x in self.operands]
        found = []
        for rank, letter in enumerate(dict.fromkeys(h for h in held if h)):
            if not self.usable(axis, letter):
                continue
            if letter in self.out:
                found.append(_Way(self.moving(axis, letter), rank, letter, letter, ""))
            elif self.linear:
                end = self.end_of_sum(axis, letter)
                cost = self.out_bytes(axis) * (p - 1) / p * (1 if end else 2)
                found.append(
                    _Way(self.moving(axis, letter) + cost, 2 + rank, letter, end, "scatter" if end else "whole")
                )
        summed = [h for h in held if h and h not in self.out]
        if summed:
            found += self.detours(axis, summed[0], held)
        return found

    def detours(self, axis: int, summed: str, held: list[str | None]) -> list[_Way]:
        """List the ways that shard a third letter, so that nothing is summed over ranks, and transpose back."""
        p = self.sizes[axis]
        end = self.end_of_sum(axis, summed)
        if self.linear and end is None:
            return []
        found = []
        for letter in self.free_letters(axis):
            n = self.extent[letter]
            lacking = any(h and not self.has(x, letter) for x, h in zip(self.operands, held, strict=True))
            if lacking and self.linear:
                continue
            stop = end if self.linear else letter
            back = 0.0 if stop == letter else self.out_bytes(axis) / p * (p - 1) / p
            uneven = -(-n // p) * p / n
            found.append(_Way((self.moving(axis, letter) + back) * uneven, 1, letter, stop, ""))
        return found

    def usable(self, axis: int, letter: str) -> bool:
        """Tell whether an axis may split a letter: no other does, or an operand came with both axes on it."""
        others = [
            other
            for x in self.operands
            for other, h in self._held(x).items()
            if other != axis and h == letter and self._held(x).get(axis) == letter
        ]
        return letter not in self.taken or bool(others)

    def moving(self, axis: int, letter: str) -> float:
        """Count the bytes that a rank sends to bring the operands to a split letter."""
        p = self.sizes[axis]
        total = 0.0
        for x in self.operands:
            dim = x.dims[axis]
            if dim is None or (x.letters[dim] == letter and self.has(x, letter)):
                continue
            mine = self.piece_bytes(x, axis) / p
            total += mine * (p - 1) / p if self.has(x, letter) else mine * (p - 1)
        return total

    def dim_of(self, x: Operand, letter: str) -> int | None:
        """Give the dim of an operand that is sharded where a letter is split."""
        return x.letters.index(letter) if self.has(x, letter) else None

    def plan(self) -> Plan:
        """Choose the way of every axis."""
        columns = [self.column(axis) for axis in range(len(self.sizes))]
        a, b, split, local, sums, out = zip(*columns, strict=True)
        return Plan((a, b), split, local, sums, out)

    def column(self, axis: int) -> tuple[int | None, int | None, bool, int | None, str, int | None]:
        """Give the entries of one axis."""
        a, b = self.operands
        if self.sizes[axis] == 1:
            letters = [x.letters[dim] for x in self.operands for dim in x.dims[axis : axis + 1] if dim is not None]
            kept = [self.out.index(letter) for letter in letters if letter in self.out]
            at = kept[0] if kept else None
            return a.dims[axis], b.dims[axis], False, at, "", at
        ways = self.ways(axis)
        if not ways:
            return None, None, False, None, "", None
        # In a form that the compiler can follow: `min` with a key is not.
        way = ways[sorted([(w.num_bytes, w.rank, i) for i, w in enumerate(ways)])[0][-1]]
        self.taken |= {way.split, *([way.end] if way.end else [])}
        local = self.out.index(way.split) if way.split in self.out else None
        end = self.out.index(way.end) if way.end else None
        return self.dim_of(a, way.split), self.dim_of(b, way.split), True, local, way.sums, end


@functools.lru_cache(maxsize=4096)
def make_plan(
    sizes: tuple[int, ...],
    whole_sums: tuple[bool, ...],
    a: Operand,
    b: Operand,
    out: Letters,
    *,
    linear: bool = True,
) -> Plan:
    """Choose for every mesh axis the letter that it splits: the way that sends the fewest bytes.

    Args:
        sizes: ranks of each mesh axis.
        whole_sums: for each axis, whether sums over it end whole on all ranks.
        a: first operand.
        b: second operand.
        out: letters of the output.
        linear: whether parts of a summed letter may be computed apart and added.

    Example:
        >>> x = Operand(("b", "h"), (2, 8), (None, 1), 8)
        >>> weight = Operand(("h", "l"), (8, 8), (None, None), 8)
        >>> plan = make_plan((1, 4), (False, False), x, weight, ("b", "l"))
        >>> plan.sums, plan.out
        (('', 'scatter'), (None, 1))
    """
    return _Planner(sizes, whole_sums, a, b, out, linear=linear).plan()


def contract(
    a: Tensor,
    b: Tensor,
    letters: tuple[Letters, Letters, Letters],
    compute: Callable[..., Tensor],
    shape: Sequence[int],
    op: str,
    *,
    weights: Sequence[Tensor | None] = (),
    linear: bool = True,
) -> DTensor:
    """Multiply two operands, at least one of them an activation.

    Args:
        a: activation, or a plain tensor that all ranks hold whole.
        b: as a.
        letters: of a, of b, of the output; a letter of both has the same size in both, or 1.
        compute: the torch function, run as `compute(piece_of_a, piece_of_b, *weights)`.
        shape: global shape of the output.
        op: name of the op, for the record.
        weights: plain tensors that every rank needs whole.
        linear: whether parts of a summed letter may be computed apart and added.

    Communication:
        As planned, the fewest bytes: an operand moves where the operands lie differently; a sum over a sharded dim is
        reduced once. All of it is in the record.
    """
    a, b = _plain_shards(a, op), _plain_shards(b, op)
    mesh = next(x.device_mesh for x in (a, b) if isinstance(x, DTensor))
    sizes, names = tuple(mesh.shape), pieces.axes_of(mesh)
    # Channels lie whole between layers, so sums over the tensor axis end whole, as in any tensor-parallel layer.
    whole_sums = tuple(name == "tensor" for name in names)
    described = [_described(x, ls, len(sizes)) for x, ls in zip((a, b), letters, strict=False)]
    plan = make_plan(sizes, whole_sums, described[0], described[1], letters[2], linear=linear)
    split = [Shard(0) if s else Replicate() for s in plan.split]
    piece_a, piece_b = (_entered(x, mesh, dims, plan.split, op) for x, dims in zip((a, b), plan.operands, strict=True))
    companions = [None if w is None else pieces.companion(w, mesh, split) for w in weights]
    piece = compute(piece_a, piece_b, *companions)
    for axis, how in enumerate(plan.sums):
        if how == "scatter":
            dim = plan.out[axis]
            assert dim is not None
            piece = scattered(piece, mesh, axis, dim, op)
    whole_axes = [axis for axis, how in enumerate(plan.sums) if how == "whole"]
    if whole_axes:
        piece = pieces.psum(piece, mesh, whole_axes, op)
    ends = [end if how else at for how, at, end in zip(plan.sums, plan.local, plan.out, strict=True)]
    result = pieces.whole(piece, mesh, _placements(ends), shape)
    for axis, dim in enumerate(plan.out):
        if dim is not None and dim != ends[axis]:
            result = transposed(result, axis, dim, op)
    return result


def _placements(dims: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _described(x: Tensor, letters: Letters, num_axes: int) -> Operand:
    dims: tuple[int | None, ...] = (None,) * num_axes
    if isinstance(x, DTensor):
        dims = tuple(p.dim if isinstance(p, Shard) else None for p in x.placements)
    return Operand(letters, tuple(x.shape), dims, x.element_size())


def _plain_shards(x: Tensor, op: str) -> Tensor:
    if not isinstance(x, DTensor) or all(p.is_replicate() or pieces.is_plain_shard(p) for p in x.placements):
        return x
    return settle(x, range(x.dim()), op)


def _entered(x: Tensor, mesh: DeviceMesh, dims: Sequence[int | None], split: Sequence[bool], op: str) -> Tensor:
    """Give the piece of an operand, sharded along `dims`; its gradient obeys the convention."""
    target = _placements(dims)
    if not isinstance(x, DTensor):
        different = [Shard(0) if s else Replicate() for s in split]
        return pieces.cut(pieces.as_part(x, mesh, different), mesh, target)
    x, late = _moved(x, target, split, op)
    grad = [Partial() if s and p.is_replicate() else p for s, p in zip(split, x.placements, strict=True)]
    piece = pieces.local(x, grad)
    for axis, dim in late:
        piece = all_rows(piece, mesh, axis, dim, x.shape[dim], op)
    return piece


def _moved(
    x: DTensor, target: Sequence[Placement], split: Sequence[bool], op: str
) -> tuple[DTensor, list[tuple[int, int]]]:
    """Bring an operand to its placements, but for the dims that the pieces are gathered along: axis and dim of those.

    What ranks do with gathered rows differs, so that the gradients are added on their way home.
    """
    mesh = x.device_mesh
    open_axes = [i for i, p in enumerate(target) if p != x.placements[i] and mesh.size(i) > 1]
    late: list[tuple[int, int]] = []
    for axis in list(open_axes):
        before, after = x.placements[axis], target[axis]
        if not isinstance(before, Shard) or not after.is_replicate() or not split[axis]:
            continue
        if pieces.shard_axes(x, before.dim) == [axis]:
            late.append((axis, before.dim))
            open_axes.remove(axis)
    while open_axes:
        ready = [axis for axis in open_axes if _is_free(x, target[axis])]
        if not ready:
            # Axes that swap dims, dims sharded twice, and what the ranks gather to do the same with it.
            return pieces.moved(x, target, op), []
        cuts = [axis for axis in ready if x.placements[axis].is_replicate()]  # first: less to transpose
        axis = (cuts or ready)[0]
        before, after = x.placements[axis], target[axis]
        if isinstance(before, Shard) and isinstance(after, Shard) and pieces.shard_axes(x, before.dim) == [axis]:
            x = transposed(x, axis, after.dim, op)
        else:
            x = pieces.moved(x, [after if i == axis else p for i, p in enumerate(x.placements)], op)
        open_axes.remove(axis)
    return x, late


def _is_free(x: DTensor, placement: Placement) -> bool:
    return isinstance(placement, Shard) and not pieces.shard_axes(x, placement.dim)
