"""`collect`: all rows of a dim on every rank of an axis, from pieces in canonical layout, even or not.

Invariant: every piece goes to every other rank once. The gradient that comes back is that of the whole on every rank,
of which each keeps its own rows: no communication. It stands beside DTensor's own all-gather, which gives wrong rows
where two axes shard one dim unevenly (torch 2.13).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private
from meshpar.intervals import chunks
from meshpar.messages import exchange, room_for

torch.library.define(
    "meshpar::collect", "(Tensor x, int dim, int rows, str group_name, str axis, str label, str kind) -> Tensor"
)


def collect(x: Tensor, dim: int, rows: int, group: dist.ProcessGroup, axis: str, label: str, kind: str) -> Tensor:
    """Give this rank all rows of a dim.

    Args:
        x: local tensor, along `dim` the rows of this rank.
        dim: dim of the rows, not negative.
        rows: how many there are in all.
        group: process group of the axis.
        axis: name of the axis, for errors and the record.
        label: what `record.here` gave, for errors and the record.
        kind: kind of the communication, for the record.

    Returns:
        Local tensor with all rows. Its gradient must be the same on all ranks of the axis.

    Communication:
        Its piece to every other rank; none backward.
    """
    result: Tensor = torch.ops.meshpar.collect.default(x, dim, rows, group.group_name, axis, label, kind)
    return result


@torch.library.impl("meshpar::collect", "default")
def _kernel(x: Tensor, dim: int, rows: int, group_name: str, axis: str, label: str, kind: str) -> Tensor:
    group = private.group_by_name(group_name)
    layout = chunks(rows, group.size())
    out = room_for(x, dim, rows)
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    mine = x.contiguous().resolve_conj().resolve_neg()
    buffers = [(peer, room_for(x, dim, layout[peer][1] - layout[peer][0])) for peer in peers]

    def place(peer: int, piece: Tensor) -> None:
        a, b = layout[peer]
        out.narrow(dim, a, b - a).copy_(piece)

    exchange(
        [(peer, mine) for peer in peers],
        buffers,
        group,
        axis,
        label,
        kind=kind,
        backward=False,
        meanwhile=lambda: place(group.rank(), x),
    )
    for peer, piece in buffers:
        place(peer, piece)
    return out


def _fake(x: Tensor, dim: int, rows: int, group_name: str, axis: str, label: str, kind: str) -> Tensor:
    return room_for(x, dim, rows)


def _context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, dim, rows, group_name, *_ = inputs
    ctx.request = dim, rows, group_name


def _backward(ctx, g):  # type: ignore[no-untyped-def]
    dim, rows, group_name = ctx.request
    group = private.group_by_name(group_name)
    a, b = chunks(rows, group.size())[group.rank()]
    return (g.narrow(dim, a, b - a), *[None] * 6)


torch.library.register_fake("meshpar::collect", _fake)
torch.library.register_autograd("meshpar::collect", _backward, setup_context=_context)
