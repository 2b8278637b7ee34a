"""`fetch`: the one communication primitive for space, and its transpose.

Invariant: every rank of the axis calls `fetch` with the same `have` and `want`. One message goes to each peer, in rank
order; peers are ranks of the axis's own group (see `messages`). Both directions are differentiable any number of times,
since each is the other's derivative. What a compiler follows goes through custom ops, opaque to it; eager tensors go
around them, which saves the dispatcher a list of numbers each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private, record
from meshpar.errors import ShardingError, explain
from meshpar.intervals import Interval, Rows, interval_rows
from meshpar.messages import exchange, packed, room_for
from meshpar.plans import OWN, PADDING, Copy, Plan, decode, encode, make_plan


def fetch(
    x: Tensor,
    dim: int,
    have: Sequence[Interval],
    want: Sequence[Interval | Rows],
    group: dist.ProcessGroup,
    *,
    axis: str = "domain",
    op: str = "fetch",
    fill: float = 0.0,
) -> Tensor:
    """Give this rank the rows that it asks for, from the ranks that own them.

    Args:
        x: local tensor of any dtype; along `dim` it holds the rows `have[me]`.
        dim: dim of the rows.
        have: for every rank of the group, the interval of global rows that it owns; disjoint.
        want: for every rank, the rows that it asks for: an interval, or runs (see `meshpar.intervals`).
        group: process group of the axis.
        axis: name of the axis, for errors and the record.
        op: name of the op that asks, for errors and the record.
        fill: value of padding rows.

    Returns:
        Local tensor with the rows `want[me]` in their order; a memory format like `channels_last` is kept.

    Communication:
        One message to every rank that wants rows of this one, each row once. The backward sends the gradients of
        the same rows home, and adds them there.

    Raises:
        ShardingError: the lists overlap, or ask for rows that nobody owns; on all ranks, before any message. On the
            rank concerned, x does not hold the rows that `have` says.
        PeerError: a peer died, or did not come within the timeout of the group.
    """
    plan, request = _planned(x, dim, have, want, group, axis, op)
    if x.shape[request[0]] != plan.have_rows:
        mine = f"{x.shape[dim]} rows along dim {dim} on rank {group.rank()} of axis {axis}, which owns {plan.have_rows}"
        _refuse(op, mine, "a piece with the rows that its rank owns")
    if plan.identity:
        return x
    if private.is_eager(x):
        return _Fetched.apply(x, plan, group, request, fill, False)  # type: ignore[no-any-return]  # noqa: FBT003
    return torch.ops.meshpar.fetch.default(x, *request, fill, backward=False)  # type: ignore[no-any-return]


def send_home(
    x: Tensor,
    dim: int,
    have: Sequence[Interval],
    want: Sequence[Interval | Rows],
    group: dist.ProcessGroup,
    *,
    axis: str = "domain",
    op: str = "send_home",
) -> Tensor:
    """Send rows to the ranks that own them, where they are added up: the transpose of `fetch`, as a forward.

    Args:
        x: local tensor; along `dim` it holds contributions to the rows `want[me]`; those to padding are dropped.
        dim: dim of the rows.
        have: for every rank of the group, the interval of global rows that it owns; disjoint.
        want: for every rank, the rows that it contributes to: an interval, or runs (see `meshpar.intervals`).
        group: process group of the axis.
        axis: name of the axis, for errors and the record.
        op: name of the op that asks, for errors and the record.

    Returns:
        Local tensor with the rows `have[me]`; zero where nobody contributes.

    Communication:
        One message to every rank that owns rows of this one's. The backward fetches the gradients of those rows.
    """
    plan, request = _planned(x, dim, have, want, group, axis, op)
    if x.shape[request[0]] != plan.out_rows:
        mine = f"{x.shape[dim]} rows along dim {dim} on rank {group.rank()} of axis {axis}, for {plan.out_rows}"
        _refuse(op, mine, "a piece with the rows that its rank contributes to")
    if plan.identity:
        return x
    if private.is_eager(x):
        return _SentHome.apply(x, plan, group, request, False)  # type: ignore[no-any-return]  # noqa: FBT003
    return torch.ops.meshpar.fetch_transpose.default(x, *request, backward=False)  # type: ignore[no-any-return]


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(x, plan, group, request, fill, backward):  # type: ignore[no-untyped-def]
        dim, _, _, _, axis, label = request
        return fetch_by_plan(x, dim, plan, group, axis, label, fill=fill, backward=backward)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.how = inputs[1:4]

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return (_SentHome.apply(g, *ctx.how, True), *[None] * 5)  # noqa: FBT003


class _SentHome(torch.autograd.Function):
    @staticmethod
    def forward(g, plan, group, request, backward):  # type: ignore[no-untyped-def]
        dim, _, _, _, axis, label = request
        return send_home_by_plan(g, dim, plan, group, axis, label, backward=backward)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.how = inputs[1:4]

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return (_Fetched.apply(g, *ctx.how, 0.0, True), *[None] * 4)  # noqa: FBT003


Request = tuple[int, list[int], list[int], str, str, str]
"""What both ops are told: dim, flat `have` and `want`, name of the group, axis, label."""


def _planned(
    x: Tensor,
    dim: int,
    have: Sequence[Interval],
    want: Sequence[Interval | Rows],
    group: dist.ProcessGroup,
    axis: str,
    op: str,
) -> tuple[Plan, Request]:
    """Check the lists, and give this rank's plan and what the ops are told."""
    dim = _checked_dim(x, dim, op)
    rows = tuple(_as_rows(item) for item in want)
    pieces = tuple((a, b) for a, b in have)
    if len(pieces) != group.size():
        _refuse(op, f"rows of {len(pieces)} ranks, for a group of {group.size()} on axis {axis}", "one interval a rank")
    flat_have, flat_want = encode(pieces, rows)
    request = (dim, list(flat_have), list(flat_want), group.group_name, axis, record.here(op))
    return make_plan(pieces, rows, group.rank()), request


def _as_rows(item: Interval | Rows) -> Rows:
    if len(item) == 2 and isinstance(item[0], int):
        return interval_rows(item)
    return tuple((start, num, step) for start, num, step in item)


def _checked_dim(x: Tensor, dim: int, op: str) -> int:
    if not -x.dim() <= dim < x.dim():
        _refuse(op, f"dim {dim}, for a tensor of {x.dim()} dims", f"{-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def _refuse(op: str, got: str, needs: str) -> NoReturn:
    fix = "derive both lists from the global size, e.g. with meshpar.intervals.chunks"
    raise ShardingError(explain(f"{op}: these rows cannot be exchanged.", got=got, needs=needs, fix=fix))


# Defined by schema rather than with `torch.library.custom_op`, whose wrapper imports torch._dynamo (a second or more in
# every process) at the first call, and costs every later call twice what the dispatcher does.
_REQUEST = "int dim, int[] have, int[] want, str group_name, str axis, str label"
torch.library.define("meshpar::fetch", f"(Tensor x, {_REQUEST}, float fill, bool backward) -> Tensor")
torch.library.define("meshpar::fetch_transpose", f"(Tensor g, {_REQUEST}, bool backward=True) -> Tensor")


def _plan_of(have: list[int], want: list[int], group_name: str) -> tuple[Plan, dist.ProcessGroup]:
    group = private.group_by_name(group_name)
    return make_plan(*decode(have, want), group.rank()), group


@torch.library.impl("meshpar::fetch", "default")
def _fetch_kernel(
    x: Tensor,
    dim: int,
    have: list[int],
    want: list[int],
    group_name: str,
    axis: str,
    label: str,
    fill: float,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    plan, group = _plan_of(have, want, group_name)
    return fetch_by_plan(x, dim, plan, group, axis, label, fill=fill, backward=backward)


@torch.library.impl("meshpar::fetch_transpose", "default")
def _transpose_kernel(
    g: Tensor,
    dim: int,
    have: list[int],
    want: list[int],
    group_name: str,
    axis: str,
    label: str,
    backward: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    plan, group = _plan_of(have, want, group_name)
    return send_home_by_plan(g, dim, plan, group, axis, label, backward=backward)


def _fetch_fake(
    x: Tensor,
    dim: int,
    have: list[int],
    want: list[int],
    group_name: str,
    axis: str,
    label: str,
    fill: float,
    backward: bool,  # noqa: FBT001
) -> Tensor:
    return _empty_rows(x, dim, _plan_of(have, want, group_name)[0].out_rows)


def _transpose_fake(
    g: Tensor,
    dim: int,
    have: list[int],
    want: list[int],
    group_name: str,
    axis: str,
    label: str,
    backward: bool = True,  # noqa: FBT001, FBT002
) -> Tensor:
    return _empty_rows(g, dim, _plan_of(have, want, group_name)[0].have_rows)


def _fetch_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.request = inputs[1:7]


def _fetch_backward(ctx, g):  # type: ignore[no-untyped-def]
    return (torch.ops.meshpar.fetch_transpose.default(g, *ctx.request), *[None] * 8)


def _transpose_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.request = inputs[1:7]


def _transpose_backward(ctx, g):  # type: ignore[no-untyped-def]
    return (torch.ops.meshpar.fetch.default(g, *ctx.request, 0.0, backward=True), *[None] * 7)


torch.library.register_fake("meshpar::fetch", _fetch_fake)
torch.library.register_fake("meshpar::fetch_transpose", _transpose_fake)
torch.library.register_autograd("meshpar::fetch", _fetch_backward, setup_context=_fetch_context)
torch.library.register_autograd("meshpar::fetch_transpose", _transpose_backward, setup_context=_transpose_context)


def _empty_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Make room for `rows` rows in the memory format of x."""
    shape = list(x.shape)
    shape[dim] = rows
    form = torch.contiguous_format
    if x.dim() in (4, 5) and not _lies_in(x, range(x.dim())) and _lies_in(x, (0, *range(2, x.dim()), 1)):
        form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)


def _lies_in(x: Tensor, order: Sequence[int]) -> bool:
    """Tell whether the dims of x lie in this order in memory, the last one fastest.

    Strides tell it rather than `is_contiguous`, which says no to a slice of rows and yes to anything without rows.
    """
    step = 1
    for dim in reversed(order):
        if x.shape[dim] > 1:
            if x.stride(dim) < step:
                return False
            step = x.stride(dim) * x.shape[dim]
    return True


def fetch_by_plan(
    x: Tensor,
    dim: int,
    plan: Plan,
    group: dist.ProcessGroup,
    axis: str,
    label: str,
    *,
    fill: float = 0.0,
    backward: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Fetch rows as `fetch` does, by a plan; not differentiable. `meanwhile` is done while they travel."""
    out = _empty_rows(x, dim, plan.out_rows)
    messages = [(peer, _packed(x, dim, pieces)) for peer, pieces in plan.sends]
    buffers = [(peer, room_for(x, dim, rows)) for peer, rows in plan.receives]

    def place_own() -> None:
        for copy in plan.copies:
            if copy.source == PADDING:
                out.narrow(dim, copy.out, copy.count).fill_(fill)
            elif copy.source == OWN:
                out.narrow(dim, copy.out, copy.count).copy_(_read(x, dim, copy))
        if meanwhile is not None:
            meanwhile()

    rows = sum(rows for _, rows in plan.receives)
    exchange(messages, buffers, group, axis, label, kind="halo", backward=backward, meanwhile=place_own, num_rows=rows)
    for copy in plan.copies:
        if copy.source >= 0:
            out.narrow(dim, copy.out, copy.count).copy_(_read(buffers[copy.source][1], dim, copy))
    return out


def send_home_by_plan(
    g: Tensor,
    dim: int,
    plan: Plan,
    group: dist.ProcessGroup,
    axis: str,
    label: str,
    *,
    backward: bool = True,
    onto: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Send rows home as `send_home` does, by a plan; not differentiable.

    What `onto` makes while they travel takes them in place, with this rank's own; else they come into a new tensor.
    """
    messages = []
    for source, (peer, rows) in enumerate(plan.receives):
        messages.append((peer, _gathered(g, dim, rows, [c for c in plan.copies if c.source == source])))
    buffers = [(peer, room_for(g, dim, sum(b - a for a, b in pieces))) for peer, pieces in plan.sends]
    home: list[Tensor] = []

    def add_own() -> None:
        own = [c for c in plan.copies if c.source == OWN]
        home.append(_gathered(g, dim, plan.have_rows, own, like=g) if onto is None else onto())
        if onto is not None:
            _add(g, dim, own, home[0])

    rows = sum(b - a for _, pieces in plan.sends for a, b in pieces)
    exchange(messages, buffers, group, axis, label, kind="halo", backward=backward, meanwhile=add_own, num_rows=rows)
    for (_, pieces), (_, buffer) in zip(plan.sends, buffers, strict=True):
        at = 0
        for a, b in pieces:
            home[0].narrow(dim, a, b - a).add_(buffer.narrow(dim, at, b - a))
            at += b - a
    return home[0]


def _gathered(g: Tensor, dim: int, rows: int, copies: list[Copy], like: Tensor | None = None) -> Tensor:
    """Add up the gradients of one source's rows: the transpose of reading them."""
    room = room_for(g, dim, rows) if like is None else _empty_rows(like, dim, rows)
    if len(copies) == 1 and copies[0].step == 1 and copies[0].count == rows:
        return room.copy_(g.narrow(dim, copies[0].out, rows))
    _add(g, dim, copies, room.zero_())
    return room


def _add(g: Tensor, dim: int, copies: Sequence[Copy], room: Tensor) -> None:
    """Add gradients to the rows of a source that copies read."""
    for copy in copies:
        piece = g.narrow(dim, copy.out, copy.count)
        if copy.step == 0:
            piece = piece.sum(dim, keepdim=True, dtype=piece.dtype)
        _read(room, dim, copy, once=True).add_(piece.flip(dim) if copy.step < 0 else piece)


def _read(x: Tensor, dim: int, copy: Copy, *, once: bool = False) -> Tensor:
    """View the rows of a source that a copy reads; `once` gives distinct rows, ascending."""
    start, num, step = copy.start, copy.count, copy.step
    if step == 1:
        return x.narrow(dim, start, num)
    if step == 0:
        one = x.narrow(dim, start, 1)
        return one if once else one.expand(*x.shape[:dim], num, *x.shape[dim + 1 :])
    first = min(start, start + (num - 1) * step)
    last = max(start, start + (num - 1) * step)
    rows = x[(slice(None),) * dim + (slice(first, last + 1, abs(step)),)]
    return rows.flip(dim) if step < 0 and not once else rows


def _packed(x: Tensor, dim: int, pieces: tuple[Interval, ...]) -> Tensor:
    """Copy rows into one contiguous message."""
    views = [x.narrow(dim, a, b - a) for a, b in pieces]
    return packed(views[0] if len(views) == 1 else torch.cat(views, dim))
