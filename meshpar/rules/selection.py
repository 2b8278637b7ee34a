"""How an index is read: entries, the shape after it, and where each dim goes.

Invariant: pure functions of global shapes and of plain index tensors, which all ranks hold; errors are torch's, on all
ranks, before any communication. A mask counts as the lists of places where it is true, as in torch.
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
from meshpar.intervals import Rows, merged

Entry = int | slice | Tensor | None
"""One part of an index: a row, a slice, a new dim (None), or a plain tensor of integers or booleans."""


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
        by_dim: entry of each dim of the input.
        entries: the entries, new dims included; lists of places instead of masks.
        common: shape that the index tensors have in common.
        at: first of these dims in `shape`.
    """

    shape: tuple[int, ...]
    to: dict[int, int]
    by_dim: list[Entry]
    entries: list[Entry]
    common: tuple[int, ...] = ()
    at: int = 0


def selection(shape: Sequence[int], entries: list[Entry]) -> Selection:
    """Work out shapes and dims, with torch's errors for rows and slices that cannot be."""
    entries = _without_masks(shape, entries)
    by_dim: list[Entry] = [entry for entry in entries if entry is not None]
    _check(shape, by_dim)
    tensors = [i for i, entry in enumerate(entries) if isinstance(entry, Tensor)]
    # torch takes single rows first, then lets tensors index what is left: they stand where the first of them stood
    # if they are neighbours by then, else before all other dims.
    left = [i for i, entry in enumerate(entries) if not isinstance(entry, int)]
    places = [left.index(i) for i in tensors]
    together = all(b == a + 1 for a, b in itertools.pairwise(places))
    common = tuple(torch.broadcast_shapes(*(e.shape for e in entries if isinstance(e, Tensor)))) if tensors else ()
    out: list[int] = [] if together else list(common)
    to: dict[int, int] = {}
    dim = at = 0
    for i, entry in enumerate(entries):
        if entry is None:
            out.append(1)
        elif isinstance(entry, slice):
            to[dim] = len(out)
            out.append(len(range(*entry.indices(shape[dim]))))
        elif isinstance(entry, Tensor) and i == tensors[0] and together:
            if len(tensors) == 1 and len(common) == 1:
                to[dim] = len(out)
            at = len(out)
            out += common
        dim += entry is not None
    return Selection(tuple(out), to, by_dim, entries, common, at)


def _without_masks(shape: Sequence[int], entries: list[Entry]) -> list[Entry]:
    """Put the lists of places where a mask is true in its stead, one for each of its dims."""
    out: list[Entry] = []
    dim = 0
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dtype == torch.bool:
            if tuple(entry.shape) != tuple(shape[dim : dim + entry.dim()]):
                msg = f"The shape of the mask {list(entry.shape)} does not match the tensor's at dim {dim}"
                raise IndexError(msg)
            out += entry.nonzero(as_tuple=True)
        else:
            out.append(entry)
        dim += _consumes(entry)
    return out


def _check(shape: Sequence[int], by_dim: Sequence[Entry]) -> None:
    """Let torch refuse rows and slices on a tensor without data; check lists of rows by hand."""
    basic = tuple(slice(None) if isinstance(e, Tensor) else e for e in by_dim)
    torch.empty(tuple(shape), device="meta")[basic]
    for dim, entry in enumerate(by_dim):
        if not isinstance(entry, Tensor) or entry.numel() == 0 or entry.is_meta:
            continue
        low, high = int(entry.min()), int(entry.max())
        if low < -shape[dim] or high >= shape[dim]:
            bad = high if high >= shape[dim] else low
            msg = f"index {bad} is out of bounds for dimension {dim} with size {shape[dim]}"
            raise IndexError(msg)


def list_rows(index: Tensor, n: int) -> Rows:
    """Give the rows that a list of indices reads."""
    return merged((i + n if i < 0 else i, 1, 1) for i in index.tolist())
