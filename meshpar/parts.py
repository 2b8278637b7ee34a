"""The parts of one batch: their shapes, and whether they make one.

Invariant: every rank of the mesh sees the shapes of all parts, so that a batch whose parts do not fit is refused
on all of them, before anything else is sent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from meshpar import pieces, private
from meshpar.agree import hear_all
from meshpar.errors import PeerError, SpecError, explain
from meshpar.intervals import chunks
from meshpar.mesh import axis_size, coordinate, ranks_of, summed_axes

_REFUSED = -1
"""In the place of the number of tensors: this rank has none that can be used."""

_ROOM = 30
"""The numbers of shapes that fit into the one message that is always sent."""


@dataclass(frozen=True)
class Part:
    """Hold a plain tensor on its way in: where it will lie, and along which axes this rank has a part already.

    Args:
        path: its name, for errors.
        x: what this rank holds.
        placements: where it will lie.
        given: for each axis whether x is a part along it already.
    """

    path: str
    x: Tensor
    placements: tuple[Placement, ...]
    given: tuple[bool, ...]


def global_shapes(parts: Sequence[Part], mesh: DeviceMesh, *, rows_are_local: bool) -> list[tuple[int, ...]]:
    """Give the global shapes of the tensors of which every rank holds a part.

    Communication:
        None for no tensors, or where all ranks hold the whole (one data rank, all rows); else an all-gather of 256
        bytes over all ranks, and a second one where the tensors have more than 30 dims in all.

    Raises:
        SpecError: other numbers of tensors, dtypes or layouts on some ranks, or parts that are not those of the
            canonical layout; on all ranks.
        PeerError: a rank refused its batch, or did not come; on all others.
    """
    if not parts or not _is_shared(mesh, rows_are_local=rows_are_local):
        return [tuple(part.x.shape) for part in parts]
    axes, sizes = pieces.axes_of(mesh), tuple(mesh.shape)
    found = _everyones_shapes(parts, mesh)
    shapes, wrong = [], []
    at = 0
    for part in parts:
        num = part.x.dim()
        rows = tuple(tuple(row[at : at + num]) for row in found)
        at += num
        cuts = tuple(_cut_dim(part, mesh, axis) for axis in axes)
        shape = _total(rows, cuts, sizes)
        shapes.append(shape)
        if rows != _expected(shape, cuts, sizes):
            wrong.append(_what_is_wrong(part, rows, cuts, mesh))
    if wrong:
        raise SpecError(
            explain(
                "shard_batch: the parts do not make one batch.",
                got=[line for lines, _ in wrong for line in lines][:5],
                needs=wrong[0][1],
                fix="let DataSampler share out the samples; or give every rank the same number, and drop the last "
                "batch where it is smaller (drop_last=True)",
            )
        )
    return shapes


def _is_shared(mesh: DeviceMesh, *, rows_are_local: bool) -> bool:
    """Tell whether ranks hold parts of one batch: the mesh alone says so, and every rank hears every other."""
    return any(axis_size(mesh, axis) > 1 for axis in (summed_axes(mesh) if rows_are_local else ("data",)))


def tell_refusal(mesh: DeviceMesh, *, rows_are_local: bool) -> None:
    """Tell the others, who wait for the shapes of this rank, that its batch was refused."""
    if _is_shared(mesh, rows_are_local=rows_are_local):
        with contextlib.suppress(PeerError):
            _hear([_REFUSED, *[0] * (_ROOM + 1)], mesh)


def _hear(row: list[int], mesh: DeviceMesh) -> list[list[int]]:
    def heard() -> list[list[int]]:
        return hear_all(torch.tensor(row, dtype=torch.int64), mesh, "shard_batch").tolist()

    return private.for_real(heard)  # type: ignore[no-any-return]


def _everyones_shapes(parts: Sequence[Part], mesh: DeviceMesh) -> list[list[int]]:
    told = repr([(str(part.x.dtype), part.x.dim(), part.placements, part.given) for part in parts])
    digest = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")
    numbers = [n for part in parts for n in part.x.shape]
    first = _hear([len(parts), digest, *numbers[:_ROOM], *[0] * (_ROOM - len(numbers))], mesh)
    ranks = ranks_of(mesh)
    refused = [rank for rank, row in zip(ranks, first, strict=True) if row[0] == _REFUSED]
    if refused:
        raise PeerError(
            explain(
                "shard_batch: not all ranks have a batch.",
                got=f"rank(s) {refused} refused what they were given",
                needs="a batch on every rank",
                fix="look at the error of the ranks named",
            )
        )
    odd = [rank for rank, row in enumerate(first) if row[:2] != first[0][:2]]
    if odd:
        raise SpecError(
            explain(
                "shard_batch: the ranks give different tensors.",
                got=[
                    f"{first[0][0]} tensors on rank {ranks[0]}; other ones on ranks {[ranks[i] for i in odd]}: "
                    f"{first[odd[0]][0]} on rank {ranks[odd[0]]}",
                    f"rank {dist.get_rank()} has {[(tuple(part.x.shape), str(part.x.dtype)) for part in parts][:5]}",
                ],
                needs="the same number of tensors on every rank, of the same dtypes, numbers of dims and layouts",
                fix="give all ranks batches of one structure",
            )
        )
    rest = _hear(numbers[_ROOM:], mesh) if len(numbers) > _ROOM else [[]] * len(first)
    return [[*row[2 : 2 + min(len(numbers), _ROOM)], *more] for row, more in zip(first, rest, strict=True)]


def _cut_dim(part: Part, mesh: DeviceMesh, axis: str) -> int | None:
    """Give the dim of which the ranks of an axis hold parts, None where each holds the whole."""
    index = pieces.axes_of(mesh).index(axis)
    placement = part.placements[index]
    return placement.dim if part.given[index] and isinstance(placement, Shard) else None


@functools.lru_cache(maxsize=4096)
def _places(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """List the coordinates of all ranks, in order."""
    return tuple(itertools.product(*map(range, sizes)))


def _total(rows: Sequence[Sequence[int]], cuts: Sequence[int | None], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Add up the sizes of the parts in the lines of ranks that begin at the first."""
    total = list(rows[0])
    for dim in {dim for dim in cuts if dim is not None}:
        along = [axis for axis, cut in enumerate(cuts) if cut == dim]
        total[dim] = sum(
            row[dim]
            for row, place in zip(rows, _places(sizes), strict=True)
            if all(c == 0 for axis, c in enumerate(place) if axis not in along)
        )
    return tuple(total)


@functools.lru_cache(maxsize=4096)
def _expected(
    shape: tuple[int, ...], cuts: tuple[int | None, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Give the shape of every rank's part in the canonical layout."""
    out = []
    for place in _places(sizes):
        local = list(shape)
        for dim, size, c in zip(cuts, sizes, place, strict=True):
            if dim is not None:
                a, b = chunks(local[dim], size)[c]
                local[dim] = b - a
        out.append(tuple(local))
    return tuple(out)


def _what_is_wrong(
    part: Part, rows: Sequence[tuple[int, ...]], cuts: Sequence[int | None], mesh: DeviceMesh
) -> tuple[list[str], str]:
    """Say which line of ranks has parts that do not fit, else that shapes differ."""
    axes, sizes = pieces.axes_of(mesh), tuple(mesh.shape)
    places = _places(sizes)
    for index, (axis, dim) in enumerate(zip(axes, cuts, strict=True)):
        lines: dict[tuple[int, ...], list[int]] = {}
        for row, place in zip(rows, places, strict=True):
            if dim is not None:
                lines.setdefault((*place[:index], *place[index + 1 :]), []).append(row[dim])
        for found in lines.values():
            fit = [b - a for a, b in chunks(sum(found), sizes[index])]
            if found != fit:
                told = f"{part.path}: sizes {found} over axis {axis}, {sum(found)} in all"
                return [f"{told}; this rank is {coordinate(mesh, axis)}"], f"the canonical layout, which is {fit}"
    ranks = ranks_of(mesh)
    seen: dict[tuple[int, ...], int] = {}
    for rank, row in zip(ranks, rows, strict=True):
        seen.setdefault(row, rank)
    shown = [f"{part.path}: shape {row} on rank {rank}" for row, rank in seen.items()]
    return shown, "sizes that agree along every dim that is not cut"
