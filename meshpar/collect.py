"""`collect`: all rows of a dim on every rank of an axis, from pieces in canonical layout, even or not.

Invariant: the messages are those of `scattering.all_rows`, but the gradient that comes back is that of the whole on
every rank, of which each keeps its own rows: no communication. It stands beside DTensor's own all-gather, which gives
wrong rows where two axes shard one dim unevenly (torch 2.13).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private
from meshpar.intervals import chunks
from meshpar.messages import room_for
from meshpar.scattering import rows_kernel

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
    return rows_kernel(x, dim, rows, group_name, axis, label, kind, backward=False)


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
