"""`scattered`: partial sums are added up, each rank keeps its rows; and its transpose, the rows of all ranks.

Invariant: one message to each peer, of just the rows that it will own; parts are added in rank order, so that the sum
has the same bits at every run. Both directions are custom ops, opaque to the compiler and each other's derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshpar import private
from meshpar.intervals import chunks
from meshpar.messages import exchange, packed, room_for
from meshpar.record import here

_REQUEST = "str group_name, str axis, str label, str kind, bool backward"
torch.library.define("meshpar::reduce_scatter", f"(Tensor x, int dim, {_REQUEST}) -> Tensor")
torch.library.define("meshpar::all_rows", f"(Tensor x, int dim, int rows, {_REQUEST}) -> Tensor")


def scattered(x: Tensor, mesh: DeviceMesh, axis: int, dim: int, op: str, *, kind: str = "reduction") -> Tensor:
    """Add up what the ranks of an axis hold, and give this rank its rows of the sum.

    Args:
        x: local tensor, of one shape on all ranks of the axis; along `dim` it has all rows.
        mesh: mesh of the ranks.
        axis: position of the mesh axis.
        dim: dim (not negative) that is sharded afterwards, in canonical layout.
        op: name of the op that asks, for errors and the record.
        kind: kind of the communication, for the record.

    Communication:
        To every peer the rows that it will own. The backward sends this rank's rows to all.
    """
    if mesh.size(axis) == 1:
        return x
    group, name = mesh.get_group(axis), _name(mesh, axis)
    return torch.ops.meshpar.reduce_scatter.default(  # type: ignore[no-any-return]
        x, dim, group.group_name, name, here(op), kind, backward=False
    )


def all_rows(
    x: Tensor, mesh: DeviceMesh, axis: int, dim: int, rows: int, op: str, *, kind: str = "redistribute"
) -> Tensor:
    """Give every rank of an axis the rows of all; what each rank then does with them may differ.

    Args:
        x: local tensor, this rank's rows in canonical layout.
        mesh: mesh of the ranks.
        axis: position of the mesh axis.
        dim: dim (not negative) of the rows.
        rows: number of rows in all.
        op: name of the op that asks, for errors and the record.
        kind: kind of the communication, for the record.

    Communication:
        This rank's rows to every peer. The backward sends home the gradients of the rows and adds them there.
    """
    if mesh.size(axis) == 1:
        return x
    group, name = mesh.get_group(axis), _name(mesh, axis)
    return torch.ops.meshpar.all_rows.default(  # type: ignore[no-any-return]
        x, dim, rows, group.group_name, name, here(op), kind, backward=False
    )


def _name(mesh: DeviceMesh, axis: int) -> str:
    return (mesh.mesh_dim_names or ())[axis]


@torch.library.impl("meshpar::reduce_scatter", "default")
def _reduce_kernel(
    x: Tensor,
    dim: int,
    group_name: str,
    axis: str,
    label: str,
    kind: str,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    group = private.group_by_name(group_name)
    me, p = group.rank(), group.size()
    owned = chunks(x.shape[dim], p)
    peers = [peer for peer in range(p) if peer != me]
    messages = [(peer, packed(x.narrow(dim, a, b - a))) for peer, (a, b) in enumerate(owned) if peer != me]
    a, b = owned[me]
    buffers = [(peer, room_for(x, dim, b - a)) for peer in peers]
    parts = {me: x.narrow(dim, a, b - a), **dict(buffers)}
    exchange(messages, buffers, group, axis, label, kind=kind, backward=backward, meanwhile=lambda: None)
    # Sums of halves lose digits with every part.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    total = parts[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    for rank in range(1, p):
        total += parts[rank]
    return total.to(x.dtype)


def rows_kernel(
    x: Tensor,
    dim: int,
    rows: int,
    group_name: str,
    axis: str,
    label: str,
    kind: str,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    """Send the rows of this rank to all others, and put theirs around them; not differentiable."""
    group = private.group_by_name(group_name)
    me, p = group.rank(), group.size()
    owned = chunks(rows, p)
    message = packed(x)
    out = room_for(x, dim, rows)
    messages = [(peer, message) for peer in range(p) if peer != me]
    buffers = [(peer, room_for(x, dim, b - a)) for peer, (a, b) in enumerate(owned) if peer != me]

    def place(peer: int, block: Tensor) -> None:
        a, b = owned[peer]
        out.narrow(dim, a, b - a).copy_(block)

    exchange(messages, buffers, group, axis, label, kind=kind, backward=backward, meanwhile=lambda: place(me, message))
    for peer, block in buffers:
        place(peer, block)
    return out


torch.library.impl("meshpar::all_rows", "default", rows_kernel)


def _reduce_fake(x: Tensor, dim: int, group_name: str, *_: object, **__: object) -> Tensor:
    group = private.group_by_name(group_name)
    a, b = chunks(x.shape[dim], group.size())[group.rank()]
    return room_for(x, dim, b - a)


def _rows_fake(x: Tensor, dim: int, rows: int, *_: object, **__: object) -> Tensor:
    return room_for(x, dim, rows)


def _reduce_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, dim, *request, _ = inputs
    ctx.request = dim, x.shape[dim], *request


def _reduce_backward(ctx, g):  # type: ignore[no-untyped-def]
    return (torch.ops.meshpar.all_rows.default(g, *ctx.request, backward=True), *[None] * 6)


def _rows_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, dim, _, *request, _ = inputs
    ctx.request = dim, *request


def _rows_backward(ctx, g):  # type: ignore[no-untyped-def]
    return (torch.ops.meshpar.reduce_scatter.default(g, *ctx.request, backward=True), *[None] * 7)


torch.library.register_fake("meshpar::reduce_scatter", _reduce_fake)
torch.library.register_fake("meshpar::all_rows", _rows_fake)
torch.library.register_autograd("meshpar::reduce_scatter", _reduce_backward, setup_context=_reduce_context)
torch.library.register_autograd("meshpar::all_rows", _rows_backward, setup_context=_rows_context)
