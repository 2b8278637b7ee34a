"""Convolutions while their halo travels: the own rows are convolved where they lie, then the edges once more.

A convolution is linear in its rows. So the rows of a rank need no copy with a halo around it: the rank convolves its
own piece as if there were zeros beyond it, which is right for all outputs but those whose windows read rows of others;
these few are computed from a strip of the rows under them, once the halo is there. Backward, what the own rows gave is
the transpose of the first convolution with the whole gradient, and what the halo gave that of the strips.

Invariant: the same messages as `fetch` of all rows under the outputs. Whether a layer goes this way follows from global
sizes, so all ranks of an axis agree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private, record
from meshpar.exchange import fetch, fetch_by_plan, send_home_by_plan
from meshpar.intervals import FILL, Interval, Rows, Run, chunks, count, size, take
from meshpar.plans import Plan, make_plan
from meshpar.rules.compact import own_part


@dataclass(frozen=True)
class Edge:
    """Hold the outputs of a rank whose windows read rows of others, before or after its own.

    Rows are counted from the first row under the rank's outputs on, those before its own included.

    Args:
        outputs: interval of the rank's outputs.
        rows: interval of the rows under them.
        halo: interval of the rows of others.
        start: where these begin among all rows of others.
    """

    outputs: Interval
    rows: Interval
    halo: Interval
    start: int


@dataclass(frozen=True)
class Overlap:
    """Say how one rank convolves its rows while its halo travels.

    Args:
        have: for every rank, the interval of global rows that it owns.
        want: for every rank, the rows of others that it reads.
        rows: for every rank, all rows that it reads.
        plan: this rank's part of the exchange.
        before: rows under this rank's outputs before its own; as many zeros stand for them on both sides.
        edges: the outputs that are computed from strips.
    """

    have: tuple[Interval, ...]
    want: tuple[Rows, ...]
    rows: tuple[Rows, ...]
    plan: Plan
    before: int
    edges: tuple[Edge, ...]


def overlap(
    rows: tuple[Rows, ...], n: int, out: int, kernel: int, stride: int, dilation: int, me: int
) -> Overlap | None:
    """Work out how rank `me` overlaps; None where some rank cannot, or none needs to.

    Args:
        rows: for every rank, the rows under its outputs (see `rules.conv.wanted_rows`).
        n: global number of rows.
        out: global number of outputs.
        kernel: as in torch.
        stride: as in torch.
        dilation: as in torch.
        me: rank of the axis.
    """
    found = _edges_of_all(rows, n, out, kernel, stride, dilation)
    if found is None:
        return None
    have = chunks(n, len(rows))
    want = tuple(part for _, part, _ in found)
    before, _, edges = found[me]
    return Overlap(have, want, rows, make_plan(have, want, me), before, edges)


@functools.lru_cache(maxsize=4096)
def _edges_of_all(
    rows: tuple[Rows, ...], n: int, out: int, kernel: int, stride: int, dilation: int
) -> tuple[tuple[int, Rows, tuple[Edge, ...]], ...] | None:
    span, found = (kernel - 1) * dilation + 1, []
    for mine, own, outputs in zip(rows, chunks(n, len(rows)), chunks(out, len(rows)), strict=True):
        one = _edges(mine, own, size(outputs), span, stride)
        if one is None:
            return None
        found.append(one)
    return tuple(found) if any(edges for _, _, edges in found) else None


def _edges(rows: Rows, own: Interval, num: int, span: int, stride: int) -> tuple[int, Rows, tuple[Edge, ...]] | None:
    before, start, held = own_part(rows, own)
    last = before + held
    after = count(rows) - last
    if not num or start or not held or held != size(own):
        return None  # it has nothing to do, or does not read all that it has
    if (held + 2 * before - span) // stride + 1 != num:
        return None  # zeros on both sides would make other windows
    edges: list[Edge] = []
    want: list[Run] = []
    read_before, read_after = min(-(-before // stride), num), max((last - span) // stride + 1, 0)
    parts = ((0, before, 0, read_before), (last, last + after, read_after, num))
    for a, b, first, stop in parts:
        part = take(rows, a, b)
        if all(run[0] == FILL for run in part):
            continue  # zeros are there already
        under = (first * stride, (stop - 1) * stride + span)
        if a < under[0] or b > under[1]:
            return None  # windows leave out some of them
        edges.append(Edge((first, stop), under, (a, b), count(tuple(want))))
        want += part
    return before, tuple(want), tuple(edges)


@dataclass(frozen=True)
class Conv:
    """Hold what a convolution is told, and the exchange that goes with it.

    Args:
        dim: the sharded dim.
        overlap: how this rank overlaps.
        stride: for each spatial dim.
        padding: for each spatial dim; that of the sharded one is the overlap's.
        dilation: for each spatial dim.
        groups: groups of channels.
        group: process group of the axis.
        axis: name of the axis.
        op: name of the op.
    """

    dim: int
    overlap: Overlap
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    group: dist.ProcessGroup
    axis: str
    op: str

    def padded_by(self, num: int) -> list[int]:
        """Give the padding with that of the sharded dim."""
        at = self.dim - 2
        return [*self.padding[:at], num, *self.padding[at + 1 :]]

    def _told(self, num: int) -> tuple[Any, ...]:
        """Give what torch is told of a convolution: num zeros on both sides of the sharded dim."""
        none = [0] * len(self.stride)
        return list(self.stride), self.padded_by(num), list(self.dilation), False, none, self.groups

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, num: int) -> Tensor:
        """Convolve a local piece, with zeros around its rows."""
        return torch.convolution(x, weight, bias, *self._told(num))

    def transposed(self, g: Tensor, x: Tensor, weight: Tensor, num: int, needs: list[bool]) -> tuple[Any, Any, Any]:
        """Give the gradients of `run`: of x, weight and bias, as far as they are needed."""
        bias, told = [weight.shape[0]] if needs[2] else None, self._told(num)
        return torch.ops.aten.convolution_backward(g, x, weight, bias, *told, needs)  # type: ignore[no-any-return]


def can_overlap(x: Tensor) -> bool:
    """Tell whether this way is open to a piece: what others look at takes the way of ops that they know.

    torch convolves complex numbers by parts, in `F.conv2d` and its kin alone.
    """
    return private.is_eager(x) and x.numel() > 0 and x.is_floating_point()


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> Tensor:
    """Convolve a rank's piece, halo and all.

    Args:
        x: local piece, (B, C, *spatial).
        weight: local.
        bias: local, or None.
        conv: what to do.

    Communication:
        As `fetch` of the rows under the outputs: one message to every rank that reads rows of this one; backward, one
        to every rank whose rows this one read. With `create_graph=True` the backward fetches the rows again.
    """
    return _Overlapped.apply(x, weight, bias, conv, record.here(conv.op))  # type: ignore[no-any-return]


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, conv, label):  # type: ignore[no-untyped-def]
        made: list[Tensor] = []
        how = conv.overlap
        beside = fetch_by_plan(
            x,
            conv.dim,
            how.plan,
            conv.group,
            conv.axis,
            label,
            meanwhile=lambda: made.append(conv.run(x, weight, bias, how.before)),
        )
        out = made[0]
        for edge in how.edges:
            strip = _strip(x, beside, edge, conv)
            a, b = edge.outputs
            out.narrow(conv.dim, a, b - a).copy_(conv.run(strip, weight, bias, 0))
        ctx.conv, ctx.label = conv, label
        ctx.save_for_backward(x, weight, beside)
        return out

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, weight, beside = ctx.saved_tensors
        conv, needs = ctx.conv, list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            with record.inside(ctx.label.rpartition("|")[0]):
                return (*_differentiable(g, x, weight, needs, conv), None, None)
        how, dim = conv.overlap, conv.dim
        home, of_weight = torch.zeros_like(beside), []
        for edge in how.edges:
            (a, b), (first, stop) = edge.outputs, edge.halo
            strip = _apart(beside, edge, dim)
            of_strip, of_w, _ = conv.transposed(g.narrow(dim, a, b - a), strip, weight, 0, [*needs[:2], False])
            if needs[0]:
                into = home.narrow(dim, edge.start, stop - first)
                into.copy_(of_strip.narrow(dim, first - edge.rows[0], stop - first))
            of_weight.append(of_w)
        made: list[Tensor | None] = []

        def own() -> Tensor:
            made.extend(conv.transposed(g, x, weight, how.before, needs))
            return made[0]  # type: ignore[return-value]

        if needs[0]:
            made[0] = send_home_by_plan(home, dim, how.plan, conv.group, conv.axis, ctx.label, onto=own)
        else:
            own()
        if needs[1]:
            for part in of_weight:
                made[1] += part
        return (*made, None, None)


def _strip(x: Tensor, beside: Tensor, edge: Edge, conv: Conv) -> Tensor:
    """Put together the rows under the outputs of an edge: own ones and those of others."""
    how, dim = conv.overlap, conv.dim
    own = (how.before, how.before + x.shape[dim])
    parts = [(own, x, 0)] + [(other.halo, beside, other.start) for other in how.edges]
    room = x.new_zeros((*x.shape[:dim], size(edge.rows), *x.shape[dim + 1 :]))
    for (a, b), source, start in parts:
        lo, hi = max(a, edge.rows[0]), min(b, edge.rows[1])
        if hi > lo:
            rows = source.narrow(dim, start + lo - a, hi - lo)
            room.narrow(dim, lo - edge.rows[0], hi - lo).copy_(rows)
    return room


def _apart(beside: Tensor, edge: Edge, dim: int) -> Tensor:
    """Put the rows of others among zeros."""
    room = beside.new_zeros((*beside.shape[:dim], size(edge.rows), *beside.shape[dim + 1 :]))
    a, b = edge.halo
    room.narrow(dim, a - edge.rows[0], b - a).copy_(beside.narrow(dim, edge.start, b - a))
    return room


def _differentiable(g: Tensor, x: Tensor, weight: Tensor, needs: list[bool], conv: Conv) -> list[Tensor | None]:
    """Give the gradients as a graph of their own, for `create_graph=True`: of rows fetched again, then convolved."""
    how = conv.overlap
    with torch.enable_grad():
        inputs = [x.view_as(x), weight.view_as(weight)]  # hooks of the tensors themselves are for the outer backward
        rows = fetch(inputs[0], conv.dim, how.have, how.rows, conv.group, axis=conv.axis, op=conv.op)
        wanted = [one for one, need in zip(inputs, needs[:2], strict=True) if need]
        out = conv.run(rows, inputs[1], None, 0)
        found = iter(torch.autograd.grad(out, wanted, g, create_graph=True) if wanted else ())
        of_bias = g.sum((0, *range(2, g.dim()))) if needs[2] else None
    return [*(next(found) if need else None for need in needs[:2]), of_bias]
