"""Writing into an index: `x[...] = value`.

Invariant: every rank writes the rows that it owns, in canonical layout as before. Only rows of the value that lie on
another rank are sent; a value that all ranks hold is cut. Masks of the tensor's own shape are `masked_fill_`; lists of
rows on a sharded dim are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshpar import pieces
from meshpar.intervals import Interval, part_inside, sliced
from meshpar.rules.index import Entry, Selection, read_index, selection
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.rules.view import expanded, remapped, reshaped
from meshpar.spmd import call, gather_call, rule

_OP = "Tensor.__setitem__"


@rule(torch.Tensor.__setitem__)
def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write a number or tensor, broadcast as torch does, into an index.

    Communication:
        Along a sharded dim that is sliced, the rows of a sharded value that change their rank.
    """
    if isinstance(x, DTensor) and _is_own_mask(x, index, value):
        call(torch.Tensor.masked_fill_, (x, index, value), {})
        return
    entries = read_index(index, x.dim()) if isinstance(x, DTensor) else "an activation goes into a plain tensor"
    if not isinstance(x, DTensor) or isinstance(entries, str):
        gather_call(torch.Tensor.__setitem__, (x, index, value), {}, why=str(entries))
        return
    plan = selection(x.shape, entries)
    if why := _gather_reason(x, plan):
        gather_call(torch.Tensor.__setitem__, (x, index, value), {}, why=why)
        return
    own = _own_rows(x, plan)
    new = pieces.local(x).clone()
    new[_local_index(x, plan, own)] = _own_value(x, plan, own, value) if isinstance(value, Tensor) else value
    x.copy_(pieces.whole(new, x.device_mesh, x.placements, x.shape))


def _is_own_mask(x: DTensor, index: Any, value: Any) -> bool:
    number = value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float | bool)
    return number and isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == x.shape


def _gather_reason(x: DTensor, plan: Selection) -> str:
    if settle(x, range(x.dim()), _OP) is not x:
        return "it lies in other than plain shards"
    spread = sharded_dims(x)
    tensors = [d for d, e in enumerate(plan.by_dim) if e is None or isinstance(e, Tensor)]
    if any(d in spread for d in tensors):
        return "a sharded dim is written to by a list or mask"
    if tensors and any(isinstance(plan.by_dim[d], int) for d in spread):
        return "a row of a sharded dim is written to together with a list or mask"
    return ""


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
        dim += entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
    return tuple(out)


def _own_value(x: DTensor, plan: Selection, own: dict[int, list[Interval]], value: Tensor) -> Tensor:
    """Give the rows of the value that this rank writes."""
    mesh, shape = x.device_mesh, plan.shape
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = reshaped(value, value.shape[1:], _OP) if isinstance(value, DTensor) else value[0]
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
