"""`all_to_all`: this rank's piece changes the dim along which it is cut, by an all-to-all of blocks.

Invariant: every block goes to a peer once; both layouts are canonical. The op is opaque to the compiler and its own
transpose, so that it is differentiable any number of times.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private
from meshpar.intervals import chunks
from meshpar.messages import exchange, packed

_REQUEST = "int old, int new, int rows, str group_name, str axis, str label"
torch.library.define("meshpar::transpose", f"(Tensor x, {_REQUEST}, bool backward) -> Tensor")


def all_to_all(x: Tensor, old: int, new: int, rows: int, group: dist.ProcessGroup, *, axis: str, label: str) -> Tensor:
    """Give this rank its part of another dim.

    Args:
        x: local tensor, along `old` the rows of this rank, along `new` all.
        old: dim that is cut, not negative.
        new: dim that takes its place, not negative.
        rows: size of `old` in all.
        group: process group of the axis.
        axis: name of the axis, for errors and the record.
        label: what `record.here` gave, for errors and the record.

    Returns:
        Local tensor with all rows along `old`, and this rank's along `new`.

    Communication:
        Of its piece, a rank sends what the others will own. As much in the backward.
    """
    result: Tensor = torch.ops.meshpar.transpose.default(
        x, old, new, rows, group.group_name, axis, label, backward=False
    )
    return result


@torch.library.impl("meshpar::transpose", "default")
def _kernel(
    x: Tensor,
    old: int,
    new: int,
    rows: int,
    group_name: str,
    axis: str,
    label: str,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    group = private.group_by_name(group_name)
    me, p = group.rank(), group.size()
    before, after = chunks(rows, p), chunks(x.shape[new], p)
    out = _fake(x, old, new, rows, group_name, axis, label, backward)
    a, b = after[me]
    messages, buffers = [], []
    for peer in range(p):
        if peer == me:
            continue
        c, d = after[peer]
        messages.append((peer, packed(x.narrow(new, c, d - c))))
        shape = list(out.shape)
        shape[old] = before[peer][1] - before[peer][0]
        buffers.append((peer, torch.empty(shape, dtype=x.dtype, device=x.device)))

    def place(peer: int, block: Tensor) -> None:
        c, d = before[peer]
        out.narrow(old, c, d - c).copy_(block)

    def place_own() -> None:
        place(me, x.narrow(new, a, b - a))

    exchange(messages, buffers, group, axis, label, kind="redistribute", backward=backward, meanwhile=place_own)
    for peer, block in buffers:
        place(peer, block)
    return out


def _fake(
    x: Tensor,
    old: int,
    new: int,
    rows: int,
    group_name: str,
    axis: str,
    label: str,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    group: dist.ProcessGroup = private.group_by_name(group_name)
    a, b = chunks(x.shape[new], group.size())[group.rank()]
    shape = list(x.shape)
    shape[old], shape[new] = rows, b - a
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, old, new, _, group_name, axis, label, _ = inputs
    ctx.request = new, old, x.shape[new], group_name, axis, label


def _backward(ctx, g):  # type: ignore[no-untyped-def]
    return (torch.ops.meshpar.transpose.default(g, *ctx.request, backward=True), *[None] * 7)


torch.library.register_fake("meshpar::transpose", _fake)
torch.library.register_autograd("meshpar::transpose", _backward, setup_context=_context)
