"""Writing into an index: `x[...] = value`.

Invariant: every rank writes the rows that it owns, in canonical layout as before. Only rows of the value that lie on
another rank are sent; a value that all ranks hold is cut. A value for all places of a mask is chosen by `where`. Rows
named by lists on one sharded dim are written by their owners; on several sharded dims they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Interval, Rows, merged, part_inside, sliced
from meshpar.registry import rule
from meshpar.rules.pick import flat_lists, owned, with_lists
from meshpar.rules.reshape import reshaped
from meshpar.rules.selection import Entry, Selection, read_index, selection
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims
from meshpar.rules.view import expanded
from meshpar.spmd import call

_OP = "Tensor.__setitem__"


@rule(torch.Tensor.__setitem__)
def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write a number or tensor, broadcast as torch does, into an index.

    Communication:
        Along a sharded dim that is sliced, or named by a list, the rows of a sharded value that change their rank.
    """
    if isinstance(x, DTensor) and (chosen := _chosen(x, index, value)) is not None:
        pieces.overwrite(x, chosen)
        return
    index = _known(index)
    entries = read_index(index, x.dim()) if isinstance(x, DTensor) else "an activation goes into a plain tensor"
    if not isinstance(x, DTensor) or isinstance(entries, str):
        gather_call(torch.Tensor.__setitem__, (x, index, value), {}, why=str(entries))
        return
    plan = selection(x.shape, entries)
    if why := _gather_reason(x, plan):
        gather_call(torch.Tensor.__setitem__, (x, index, value), {}, why=why)
        return
    if isinstance(value, Tensor):
        value = _fitted(value, plan.shape)
        if 0 in plan.shape:
            torch.empty(value.shape, device="meta").expand(plan.shape)  # torch's error
            return
    own = _own_rows(x, plan)
    new = pieces.local(x).clone()
    lists = _own_places(x, plan)
    local_index = _local_index(x, plan, own)
    piece = value
    if isinstance(value, Tensor):
        piece = _own_value(x, plan, own, value) if lists is None else _listed_value(x, plan, own, lists, value)
    if lists is not None:
        local_index = with_lists(local_index, _mine(x, plan, lists))
    new[local_index] = piece
    pieces.overwrite(x, pieces.whole(new, x.device_mesh, x.placements, x.shape))


def _chosen(x: DTensor, index: Any, value: Any) -> Any:
    """Give x with a value where a mask of its first dims is true; None for all other indices and values."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or index.dim() == 0:
        return None
    rest = x.dim() - index.dim()
    if rest < 0 or tuple(index.shape) != tuple(x.shape[: index.dim()]):
        return None
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=x.dtype) if isinstance(value, bool | int | float | complex) else None
    value = None if value is None else _fitted(value, x.shape[index.dim() :])
    if value is None or value.dim() > rest:
        return None  # one value for each place that is true: how many that are depends on the data
    sizes = (*index.shape, *[1] * rest)
    mask = reshaped(index, sizes, _OP) if isinstance(index, DTensor) else index.reshape(sizes)
    if value.dtype != x.dtype:
        value = call(torch.Tensor.to, (value, x.dtype), {}) if isinstance(value, DTensor) else value.to(x.dtype)
    return pieces.moved(call(torch.where, (mask, value, x), {}), x.placements, _OP)


def _known(index: Any) -> Any:
    """Let every rank know the numbers of an index that is an activation."""
    if isinstance(index, tuple):
        return tuple(_known(item) for item in index)
    if isinstance(index, DTensor) and index.dtype not in (torch.bool, torch.uint8) and not index.is_floating_point():
        return pieces.moved(index, pieces.replicated(index.device_mesh), _OP)
    return index


def _gather_reason(x: DTensor, plan: Selection) -> str:
    if settle(x, range(x.dim()), _OP) is not x:
        return "it lies in other than plain shards"
    spread = sharded_dims(x)
    tensors = [d for d, e in enumerate(plan.by_dim) if isinstance(e, Tensor)]
    if len([d for d in tensors if d in spread]) > 1:
        return "several sharded dims are written to by lists or masks"
    if tensors and any(isinstance(plan.by_dim[d], int) for d in spread):
        return "a row of a sharded dim is written to together with a list or mask"
    return ""


# lists of rows of a sharded dim


def _listed_dim(x: DTensor, plan: Selection) -> int | None:
    return next((d for d in sharded_dims(x) if isinstance(plan.by_dim[d], Tensor)), None)


def _own_places(x: DTensor, plan: Selection) -> list[Tensor] | None:
    """Give, for each rank, the positions in the lists whose rows it owns; None where lists name whole dims alone."""
    dim = _listed_dim(x, plan)
    if dim is None:
        return None
    return owned(flat_lists(x, plan)[dim], x.shape[dim], x.device_mesh, sharded_dims(x)[dim])


def _mine(x: DTensor, plan: Selection, lists: list[Tensor]) -> dict[int, Tensor]:
    """Give the parts of the lists that this rank writes, counted in its piece."""
    dim = _listed_dim(x, plan)
    assert dim is not None
    axis = sharded_dims(x)[dim]
    first = pieces.my_chunk(x.device_mesh, axis, x.shape[dim])[0]
    part = lists[x.device_mesh.get_local_rank(axis)]
    return {d: e[part] - (first if d == dim else 0) for d, e in flat_lists(x, plan).items()}


def _listed_value(
    x: DTensor, plan: Selection, own: dict[int, list[Interval]], lists: list[Tensor], value: Tensor
) -> Tensor:
    """Give the part of a value that this rank writes where lists name rows of a sharded dim."""
    dim, mesh = _listed_dim(x, plan), x.device_mesh
    assert dim is not None
    axis, at, after = sharded_dims(x)[dim], plan.at, plan.at + len(plan.common)
    flat = (*plan.shape[:at], math.prod(plan.common), *plan.shape[after:])
    to = {d: i - (len(plan.common) - 1 if i >= after else 0) for d, i in plan.to.items()}
    placements = remapped(x.placements, {**to, dim: at})
    if isinstance(value, DTensor):
        lying = pieces.moved(reshaped(expanded(value, plan.shape, _OP), flat, _OP), placements, _OP)
    else:
        lying = pieces.lift(value.expand(plan.shape).reshape(flat), mesh, placements)
    piece = pieces.local(lying)
    for d, i in sharded_dims(x).items():
        if d == dim:
            want: list[Rows] = [merged((k, 1, 1) for k in part.tolist()) for part in lists]
            piece = fetch_rows(piece, at, flat[at], want, mesh, axis, _OP)
        else:
            piece = fetch_rows(piece, to[d], flat[to[d]], own[d], mesh, i, _OP)
    return piece


# slices


def _rows(x: DTensor, dim: int, entry: Entry) -> tuple[int, int, int]:
    """Give the run of rows that an entry of a sharded dim names."""
    n = x.shape[dim]
    if isinstance(entry, int):
        return (entry % n, 1, 1)
    assert isinstance(entry, slice)
    rows = sliced(n, entry.start, entry.stop, entry.step)
    return rows[0] if rows else (0, 0, 1)


def _own_rows(x: DTensor, plan: Selection) -> dict[int, list[Interval]]:
    """Give, for each sharded dim, the positions in the selection that each rank of its axis owns."""
    mesh = x.device_mesh
    return {
        dim: [
            part_inside(_rows(x, dim, plan.by_dim[dim]), held) for held in pieces.axis_chunks(mesh, axis, x.shape[dim])
        ]
        for dim, axis in sharded_dims(x).items()
        if not isinstance(plan.by_dim[dim], Tensor)
    }


def _local_index(x: DTensor, plan: Selection, own: dict[int, list[Interval]]) -> tuple[Entry, ...]:
    """Give the index into this rank's piece; a row of a sharded dim is written as a slice of one row or none."""
    out: list[Entry] = []
    dim = 0
    for entry in plan.entries:
        if entry is None:
            out.append(None)
            continue
        if dim in own:
            axis = sharded_dims(x)[dim]
            a, b = own[dim][x.device_mesh.get_local_rank(axis)]
            first, _, step = _rows(x, dim, entry)
            first -= pieces.my_chunk(x.device_mesh, axis, x.shape[dim])[0]
            entry = slice(first + a * step, first + (b - 1) * step + 1, step) if b > a else slice(0, 0)
        out.append(entry)
        dim += 1
    return tuple(out)


def _fitted(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Drop leading dims of size 1 that are more than the places have."""
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = reshaped(value, value.shape[1:], _OP) if isinstance(value, DTensor) else value[0]
    return value


def _own_value(x: DTensor, plan: Selection, own: dict[int, list[Interval]], value: Tensor) -> Tensor:
    """Give the rows of the value that this rank writes."""
    mesh, shape = x.device_mesh, plan.shape
    placements = remapped(x.placements, plan.to)
    if isinstance(value, DTensor):
        lying = pieces.moved(expanded(value, shape, _OP), placements, _OP)
    else:
        lying = pieces.lift(value.expand(shape), mesh, placements)
    # Where one row of a sharded dim is written, its owner alone uses the value that all hold.
    grad: list[Placement] = [
        Partial() if isinstance(p, Replicate) and axis in sharded_dims(x).values() else p
        for axis, p in enumerate(placements)
    ]
    piece = pieces.local(lying, grad)
    for dim, axis in sharded_dims(x).items():
        if isinstance(plan.by_dim[dim], slice):
            at = plan.to[dim]
            piece = fetch_rows(piece, at, shape[at], own[dim], mesh, axis, _OP)
    at = dim = 0
    for entry in plan.entries:
        if isinstance(entry, int) and dim in own:
            a, b = own[dim][mesh.get_local_rank(sharded_dims(x)[dim])]
            piece = piece.unsqueeze(at).narrow(at, 0, b - a)
            at += 1
        at += not isinstance(entry, int)
        dim += entry is not None
    return piece
