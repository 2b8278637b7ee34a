"""Who holds what of each tensor, and which rank answers for which of its bytes.

Invariant: of what all ranks tell, every rank concludes the same, and each byte of each tensor has one rank that answers
for it. Ranks tell digests; a list of tensors travels once for each digest that differs, so that ranks which hold other
tensors (pipeline and expert parallel) cost their lists, and ranks that hold alike cost nothing.

A tensor may lie over a part of the ranks, like that of a tensor axis alone. The meshes on which it lies in the same way
are *siblings*: replicas of each other, as are coordinates along an axis that replicates, and plain tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import private
from meshpar.errors import SpecError, explain
from meshpar.export.plan import Entry, dtype_name
from meshpar.export.runs import Layout, Part, has_two_readings, layout_of, part_at, part_of, readings_of, shared_out

PLAIN = -1
"""The number of the layout of a plain tensor."""

_SHOWN = 5
_PackedRanks = tuple[int, ...] | tuple[tuple[int, ...]]


@dataclass(frozen=True)
class Listing:
    """Hold what a rank has: its tensors in order, the number of the layout of each, and the layouts."""

    entries: tuple[Entry, ...]
    lies: tuple[int, ...]
    layouts: tuple[Layout, ...]

    def to_text(self) -> str:
        """Give a text that is the same for equal listings."""
        entries = [[e.name, e.dtype, e.shape, n] for e, n in zip(self.entries, self.lies, strict=True)]
        layouts = [[layout.sizes, [_code(p) for p in layout.placements]] for layout in self.layouts]
        return json.dumps([entries, layouts])

    @staticmethod
    def from_text(text: str) -> Listing:
        """Read what `to_text` gave."""
        entries, layouts = json.loads(text)
        return Listing(
            tuple(Entry(name, dtype, tuple(shape)) for name, dtype, shape, _ in entries),
            tuple(n for *_, n in entries),
            tuple(Layout(tuple(sizes), tuple(_placement(*code) for code in codes)) for sizes, codes in layouts),
        )


@dataclass(frozen=True)
class Told:
    """Hold what a rank tells of its listing.

    Args:
        digest: of the listing.
        ranks: for each layout, the ranks of the mesh, packed.
        readings: for each tensor whose strided shards have two readings, those that its piece fits.
    """

    digest: str
    ranks: tuple[_PackedRanks, ...]
    readings: tuple[str, ...]


def _code(placement: Placement) -> list[int]:
    if isinstance(placement, private.StridedShard):
        return [placement.dim, int(placement.split_factor)]
    return [placement.dim] if isinstance(placement, Shard) else []


def _placement(dim: int = -1, factor: int = 0) -> Placement:
    if dim < 0:
        return Replicate()
    return private.StridedShard(dim, split_factor=factor) if factor else Shard(dim)


def listing_of(state: Mapping[str, Tensor]) -> tuple[Listing, Told]:
    """List what this rank has of a state dict.

    Raises:
        SpecError: what no file can hold.
    """
    wrong: list[str] = []
    entries: list[Entry] = []
    lies: list[int] = []
    meshes: dict[tuple[Layout, _PackedRanks], int] = {}
    readings: list[str] = []
    for name, x in state.items():
        problem = _problem(name, x)
        if problem:
            wrong.append(f"{name}: {problem}")
            continue
        if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is None:
            continue  # others have it
        layout = layout_of(x)
        entry = Entry(name, dtype_name(x.dtype) or "", tuple(x.shape))
        entries.append(entry)
        if isinstance(x, DTensor):
            key = layout, packed(x.device_mesh.mesh.flatten().tolist(), layout.sizes)
            lies.append(meshes.setdefault(key, len(meshes)))
            if has_two_readings(entry.shape, layout):
                readings.append(readings_of(x))
        else:
            lies.append(PLAIN)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        needs = "tensors of a dtype of the format with memory of their own, each rank with its part or all of them"
        fix = "redistribute partial sums, materialize(model), dequantize or densify, before the export"
        raise SpecError(
            explain("export: values that no file can hold.", got=wrong[:_SHOWN] + more, needs=needs, fix=fix)
        )
    listing = Listing(tuple(entries), tuple(lies), tuple(layout for layout, _ in meshes))
    digest = hashlib.blake2b(listing.to_text().encode(), digest_size=16).hexdigest()
    return listing, Told(digest, tuple(ranks for _, ranks in meshes), tuple(readings))


def _problem(name: object, x: object) -> str:
    """Say why a value cannot be written; "" where it can."""
    if not isinstance(name, str) or not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if dtype_name(x.dtype) is None:
        return f"dtype {x.dtype}"
    if x.layout is not torch.strided:
        return f"layout {x.layout}"
    held = private.piece_of(x) if isinstance(x, DTensor) else x
    if held.is_meta:
        return "on the meta device"
    if held.numel() and not held.data_ptr():
        return f"a {type(held).__name__} without memory of its own"
    if dtype_name(x.dtype) == "F4" and not x.dim():
        return "two numbers in a tensor of no dims"
    if isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None:
        try:
            part_of(x)
        except ValueError as error:
            return ", ".join(line.strip() for line in str(error).splitlines()[:2])
    return ""


def packed(ranks: Sequence[int], sizes: Sequence[int]) -> _PackedRanks:
    """Give the ranks of a mesh as the first one and a step along each dim; as they are where there are no such steps.

    Example:
        >>> packed([1, 3, 5, 7], (2, 2)), packed([3, 0, 1, 2], (2, 2))
        ((1, 4, 2), ((3, 0, 1, 2),))
    """
    steps = []
    for dim, size in enumerate(sizes):
        inner = math.prod(sizes[dim + 1 :])
        steps.append(ranks[inner] - ranks[0] if size > 1 else 0)
    found = (ranks[0], *steps)
    return found if unpacked(found, tuple(sizes)) == tuple(ranks) else (tuple(ranks),)


@functools.lru_cache(maxsize=4096)
def unpacked(found: _PackedRanks, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Give the ranks that `packed` was given."""
    if isinstance(found[0], tuple):
        return found[0]
    first, *steps = found
    ranks: list[int] = [first]
    for size, step in zip(sizes, steps, strict=True):
        assert isinstance(step, int)
        ranks = [rank + i * step for rank in ranks for i in range(size)]
    return tuple(ranks)


@dataclass(frozen=True)
class _Holders:
    """Hold which ranks have a tensor: how it lies, and for each rank the number of its sibling and its coordinate."""

    layout: Layout
    num_siblings: int
    where: Mapping[int, tuple[int, tuple[int, ...]]]


class Owners:
    """Know which rank answers for which bytes of each tensor.

    Args:
        listings: by digest.
        told: what each rank told, in rank order.

    Raises:
        SpecError: ranks hold different tensors under one name, or some ranks of a mesh do not have its tensors.
    """

    def __init__(self, listings: Mapping[str, Listing], told: Sequence[Told]) -> None:
        self._told = told
        self._ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            self._ranks.setdefault(one.digest, []).append(rank)
        self._listings = {digest: listings[digest] for digest in self._ranks}  # in the order of their first ranks
        self._found: dict[Any, _Holders] = {}
        self.entries: dict[str, Entry] = {}
        self._holders: dict[str, _Holders] = {}
        self._nested: dict[str, bool] = {}
        self._decide()

    def _decide(self) -> None:
        has: dict[str, list[tuple[str, int]]] = {}
        readings: dict[str, dict[str, int]] = {}  # for each listing, where the readings of a tensor are
        wrong: list[str] = []
        for digest, listing in self._listings.items():
            ambiguous = readings[digest] = {}
            for entry, n in zip(listing.entries, listing.lies, strict=True):
                first = self.entries.setdefault(entry.name, entry)
                if entry != first:
                    told = [f"{tuple(e.shape)} of {e.dtype}" for e in (first, entry)]
                    ranks = [self._ranks[d][0] for d in (has[entry.name][0][0], digest)]
                    wrong.append(f"{entry.name}: {told[0]} on rank {ranks[0]}, {told[1]} on rank {ranks[1]}")
                has.setdefault(entry.name, []).append((digest, n))
                if n != PLAIN and has_two_readings(entry.shape, listing.layouts[n]):
                    ambiguous[entry.name] = len(ambiguous)
        for name, found in has.items():
            key = tuple(found)
            if key not in self._found:
                self._found[key] = self._make(name, found, wrong)
            self._holders[name] = self._found[key]
            fits = {
                self._told[rank].readings[readings[digest][name]]
                for digest, _ in found
                if name in readings[digest]
                for rank in self._ranks[digest]
                if rank in self._found[key].where
            }
            if fits >= {"n", "l"}:
                wrong.append(f"{name}: the pieces of different ranks come from different cuts")
            self._nested[name] = "l" not in fits
        if wrong:
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            needs = "one dtype and shape under a name, on all ranks that have it, and all ranks of its mesh to have it"
            fix = "look at what model.state_dict() gives on these ranks"
            raise SpecError(explain("export: the ranks differ.", got=wrong[:_SHOWN] + more, needs=needs, fix=fix))

    def _make(self, name: str, found: Sequence[tuple[str, int]], wrong: list[str]) -> _Holders:
        """Find the siblings of a tensor: the layout of its first rank decides, and what lies otherwise is not asked."""
        layouts = [Layout() if n == PLAIN else self._listings[digest].layouts[n] for digest, n in found]
        first = layouts[0]
        siblings: dict[tuple[int, ...], int] = {}
        of: dict[int, tuple[int, ...]] = {}
        ranks_with = sorted(
            (rank, n)
            for (digest, n), layout in zip(found, layouts, strict=True)
            if layout == first
            for rank in self._ranks[digest]
        )
        for rank, n in ranks_with:
            of[rank] = (rank,) if n == PLAIN else unpacked(self._told[rank].ranks[n], first.sizes)
            siblings.setdefault(of[rank], len(siblings))
        where: dict[int, tuple[int, tuple[int, ...]]] = {}
        for mesh, number in siblings.items():
            missing = [rank for rank in mesh if of.get(rank) != mesh]
            if missing:
                wrong.append(
                    f"{name}: rank {mesh[0]} has a part of it on ranks {list(mesh)}, rank {missing[0]} has none"
                )
            for i, rank in enumerate(mesh):
                where[rank] = number, _coordinate(i, first.sizes)
        return _Holders(first, len(siblings), where)

    def ranks_of(self, name: str) -> Sequence[int]:
        """Name the ranks that answer for bytes of a tensor, or could."""
        return list(self._holders[name].where)

    def share_of(self, name: str, rank: int) -> tuple[Part, int, int] | None:
        """Give a rank's part of a tensor, and the bytes of its piece that it answers for; None where there are none."""
        holders, entry = self._holders[name], self.entries[name]
        if rank not in holders.where:
            return None
        sibling, where = holders.where[rank]
        part = part_at(entry.shape, holders.layout, where, nested=self._nested[name])
        assert part is not None, f"{name}: {holders.layout} has no such reading"
        per_sibling = holders.layout.replicas
        number = sibling * per_sibling + holders.layout.replica_at(where)
        num_bytes = math.prod(part.sizes) * entry.item_bytes
        start, stop = shared_out(num_bytes, per_sibling * holders.num_siblings, number)
        return (part, start, stop) if start < stop else None


def _coordinate(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        number, index = divmod(number, size)
        found.append(index)
    return tuple(reversed(found))
