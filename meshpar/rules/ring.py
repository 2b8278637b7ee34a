"""Ring attention: keys and values go round the ranks of an axis, queries stay; scores exist a block at a time.

Invariant: no rank ever holds more than two blocks of keys, and scores of more than `TILE_BYTES`. A hop is one packed
message to the next rank; empty blocks travel as no message at all, on both sides. Sums are kept in float32 or wider.

The softmax is built up block by block from running maxima and sums (Milakov and Gimelshein 2018; Liu et al. 2023,
"Ring Attention with Blockwise Transformers"). The backward computes the scores again: keys and values go round once
more, and the gradients of a block follow it one hop behind, so that they travel while the next block is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private
from meshpar.intervals import Interval, chunks
from meshpar.messages import as_bytes, exchange

TILE_BYTES = 64 * 2**20
"""Scores that exist at one time: the queries of a rank are taken in tiles of as many rows as fit."""

_MINUS_INFINITY = float("-inf")
_REQUEST = "bool causal, float scale, float dropout, int seed, int rows, int keys, str group_name, str axis, str label"
torch.library.define("meshpar::ring", f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {_REQUEST}) -> (Tensor, Tensor)")
torch.library.define(
    "meshpar::ring_backward",
    f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor total, bool mask_grad, {_REQUEST})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True)
class Request:
    """Hold what one call asks for; everything that both directions must agree on follows from it.

    Args:
        causal: whether query i sees keys 0 to i alone.
        scale: factor of the scores.
        dropout: probability that a weight is dropped.
        seed: seed of this rank's dropout masks.
        rows: number of queries over all ranks.
        keys: number of keys over all ranks.
        group_name: process group of the axis.
        axis: name of the axis, for errors and the record.
        label: what `record.here` gave.
    """

    causal: bool
    scale: float
    dropout: float
    seed: int
    rows: int
    keys: int
    group_name: str
    axis: str
    label: str

    @property
    def group(self) -> dist.ProcessGroup:
        """Give the process group of the axis."""
        return private.group_by_name(self.group_name)

    def mine(self) -> Interval:
        """Give the queries of this rank."""
        return chunks(self.rows, self.group.size())[self.group.rank()]

    def block(self, rank: int) -> Interval:
        """Give the keys of a rank, counted round the ring."""
        return chunks(self.keys, self.group.size())[rank % self.group.size()]

    def sees(self, keys: Interval) -> bool:
        """Tell whether any query of this rank may look at any of these keys."""
        start, stop = self.mine()
        return keys[1] > keys[0] and stop > start and not (self.causal and keys[0] > stop - 1)


def ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, request: Request) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks of a group.

    Args:
        q: local queries, (..., rows of this rank, features); leading dims broadcast against those of k and v.
        k: local keys, (..., keys of this rank, features).
        v: local values, (..., keys of this rank, features of the output).
        mask: what is added to the scores, or False where they do not count; (..., rows of this rank or 1, all keys
            or 1), or None.
        request: all else; equal on all ranks but for the seed.

    Returns:
        Local tensor (..., rows of this rank, features of the output); zeros for queries that see no key.

    Communication:
        Forward: a rank passes on p - 1 blocks of keys and values. Backward: as many, and p blocks of gradients.
    """
    told = [getattr(request, field.name) for field in fields(request)]
    out: Tensor = torch.ops.meshpar.ring.default(q, k, v, mask, *told)[0]
    return out


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which sums are kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def causal_block(rows: Interval, keys: Interval, device: torch.device) -> Tensor:
    """Tell, for queries and keys by their global positions, which may be seen: key j by query i where j <= i."""
    i = torch.arange(*rows, device=device).unsqueeze(1)
    return torch.arange(*keys, device=device) <= i


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, rows: Interval, keys: Interval, *, causal: bool) -> Tensor:
    s = q @ k.transpose(-2, -1)
    if mask is not None:
        s = s.masked_fill(~mask, _MINUS_INFINITY) if mask.dtype == torch.bool else s + mask
    if causal and keys[1] - 1 > rows[0]:
        s = s.masked_fill(~causal_block(rows, keys, s.device), _MINUS_INFINITY)
    return s


def _cut(mask: Tensor | None, tile: Interval, keys: Interval, request: Request) -> Tensor | None:
    """Cut the part of a mask that belongs to a tile of rows, counted from the first local one, and a block of keys."""
    if mask is None:
        return None
    if mask.shape[-1] == request.keys:
        mask = mask.narrow(-1, keys[0], keys[1] - keys[0])
    return mask if mask.shape[-2] == 1 else mask.narrow(-2, tile[0], tile[1] - tile[0])


def _tiles(rows: int, batch: Sequence[int], keys: int, dtype: torch.dtype) -> Iterator[Interval]:
    a_row = torch.Size(batch).numel() * keys * torch.empty((), dtype=dtype, device="meta").element_size()
    step = max(1, TILE_BYTES // max(a_row, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _kept(like: Tensor, request: Request, block: int, tile: Interval) -> Tensor:
    """Draw which weights of a tile stay, and scale them; the backward draws the same."""
    if request.dropout == 1.0:
        return torch.zeros_like(like)
    key = (request.seed + 0x9E3779B9 * (4099 * tile[0] + block + 1)) & ((1 << 63) - 1)
    generator = torch.Generator(like.device).manual_seed(key)
    drawn = torch.rand(like.shape, dtype=torch.float32, device=like.device, generator=generator)
    return (drawn >= request.dropout).to(like.dtype) / (1.0 - request.dropout)


def _pack(*parts: Tensor) -> Tensor:
    return torch.cat([as_bytes(part.contiguous()) for part in parts])


def _unpack(message: Tensor, start: int, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
    out = []
    width = torch.empty((), dtype=dtype, device="meta").element_size()
    for shape in shapes:
        num_bytes = torch.Size(shape).numel() * width
        out.append(message.narrow(0, start, num_bytes).view(dtype).view(torch.Size(shape)))
        start += num_bytes
    return out


def _resized(x: Tensor, keys: Interval) -> list[int]:
    return [*x.shape[:-2], keys[1] - keys[0], x.shape[-1]]


def _num_bytes(*parts: tuple[Sequence[int], torch.dtype]) -> int:
    return sum(
        torch.Size(shape).numel() * torch.empty((), dtype=dtype, device="meta").element_size() for shape, dtype in parts
    )


def _hop(message: Tensor, num_bytes: int, request: Request, meanwhile: Callable[[], None], *, backward: bool) -> Tensor:
    """Pass a message on to the next rank, and give what came from the one before."""
    group = request.group
    me, p = group.rank(), group.size()
    into = torch.empty(num_bytes, dtype=torch.uint8, device=message.device)
    exchange(
        [((me + 1) % p, message)],
        [((me - 1) % p, into)],
        group,
        request.axis,
        request.label,
        kind="redistribute",
        backward=backward,
        meanwhile=meanwhile,
    )
    return into


def _batch(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in tensors)))


def _nothing() -> None:
    pass


@torch.library.impl("meshpar::ring", "default")
def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *told: object) -> tuple[Tensor, Tensor]:
    request = Request(*told)  # type: ignore[arg-type]
    me, p = request.group.rank(), request.group.size()
    dtype, batch = wide(q.dtype), _batch(q, k, v)
    scaled = q.to(dtype) * request.scale
    highest = scaled.new_full((*batch, q.shape[-2], 1), _MINUS_INFINITY)
    total = torch.zeros_like(highest)
    out = scaled.new_zeros((*batch, q.shape[-2], v.shape[-1]))

    def look(held: Tensor, rank: int) -> None:
        keys = request.block(rank)
        if not request.sees(keys):
            return
        some_k, some_v = (x.to(dtype) for x in _unpack(held, 0, k.dtype, _resized(k, keys), _resized(v, keys)))
        first = request.mine()[0]
        for tile in _tiles(q.shape[-2], batch, keys[1] - keys[0], dtype):
            a, n = tile[0], tile[1] - tile[0]
            rows = (first + tile[0], first + tile[1])
            part = _cut(mask, tile, keys, request)
            s = _scores(scaled.narrow(-2, a, n), some_k, part, rows, keys, causal=request.causal)
            before = highest.narrow(-2, a, n)
            now = torch.maximum(before, s.amax(-1, keepdim=True))
            level = now.masked_fill(now == _MINUS_INFINITY, 0.0)
            weights = (s - level).exp_()
            decay = (before - level).exp_()
            total.narrow(-2, a, n).mul_(decay).add_(weights.sum(-1, keepdim=True))
            if request.dropout:
                weights = weights * _kept(weights, request, rank % p, tile)
            out.narrow(-2, a, n).mul_(decay).add_(weights @ some_v)
            before.copy_(now)

    held = _pack(k, v)
    for step in range(p - 1):
        following = request.block(me - step - 1)
        num_bytes = _num_bytes((_resized(k, following), k.dtype), (_resized(v, following), v.dtype))
        held = _hop(held, num_bytes, request, functools.partial(look, held, me - step), backward=False)
    look(held, me + 1)
    dead = total == 0  # queries that see no key: torch gives zeros, and a total of infinity makes their weights zero
    out = out / total.masked_fill(dead, 1.0)
    return out.to(q.dtype), (highest + total.log()).masked_fill(dead, float("inf"))


@torch.library.impl("meshpar::ring_backward", "default")
def _backward_kernel(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    mask_grad: bool,  # noqa: FBT001
    *told: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    request = Request(*told)  # type: ignore[arg-type]
    me, p = request.group.rank(), request.group.size()
    dtype, batch = wide(q.dtype), _batch(q, k, v)
    scaled, g = q.to(dtype) * request.scale, g.to(dtype)
    mean = (g * out.to(dtype)).sum(-1, keepdim=True)
    grad_q = torch.zeros_like(scaled)
    grad_mask = torch.zeros(mask.shape if mask is not None and mask_grad else (0,), dtype=dtype, device=q.device)

    def look(held: Tensor, rank: int, found: list[Tensor]) -> None:
        keys = request.block(rank)
        shapes = _resized(k, keys), _resized(v, keys)
        grad_k, grad_v = (torch.zeros(shape, dtype=dtype, device=q.device) for shape in shapes)
        found.extend((grad_k, grad_v))
        if not request.sees(keys):
            return
        some_k, some_v = (x.to(dtype) for x in _unpack(held, 0, k.dtype, *shapes))
        first = request.mine()[0]
        for tile in _tiles(q.shape[-2], batch, keys[1] - keys[0], dtype):
            a, n = tile[0], tile[1] - tile[0]
            rows = (first + tile[0], first + tile[1])
            part = _cut(mask, tile, keys, request)
            some_q, some_g = scaled.narrow(-2, a, n), g.narrow(-2, a, n)
            s = _scores(some_q, some_k, part, rows, keys, causal=request.causal)
            weights = (s - total.narrow(-2, a, n)).exp_()
            toward = some_g @ some_v.transpose(-2, -1)
            kept = weights
            if request.dropout:
                drawn = _kept(weights, request, rank % p, tile)
                kept, toward = weights * drawn, toward * drawn
            grad_v += (kept.transpose(-2, -1) @ some_g).sum_to_size(grad_v.shape)
            grad_s = weights * (toward - mean.narrow(-2, a, n))
            grad_k += (grad_s.transpose(-2, -1) @ some_q).sum_to_size(grad_k.shape)
            grad_q.narrow(-2, a, n).add_((grad_s @ some_k).sum_to_size(some_q.shape))
            if part is not None and mask_grad:
                place = _cut(grad_mask, tile, keys, request)
                assert place is not None
                place.add_(grad_s.sum_to_size(part.shape))

    held = _pack(k, v)
    carried = held.narrow(0, 0, 0)
    for step in range(p):
        rank = me - step
        keys, following = request.block(rank), request.block(rank - 1)
        shapes = _resized(k, keys), _resized(v, keys)
        # The gradients come first in a message: they are the wider ones, and must lie on multiples of their size.
        coming = _num_bytes(*((shape, dtype) for shape in shapes)) if step else 0
        more = step < p - 1
        num_bytes = coming
        if more:
            num_bytes += _num_bytes((_resized(k, following), k.dtype), (_resized(v, following), v.dtype))
        fresh: list[Tensor] = []
        into = _hop(
            torch.cat([carried, held]) if more else carried,
            num_bytes,
            request,
            functools.partial(look, held, rank, fresh),
            backward=True,
        )
        if step:
            for mine, sent in zip(fresh, _unpack(into, 0, dtype, *shapes), strict=True):
                mine += sent
        carried, held = _pack(*fresh), into.narrow(0, coming, num_bytes - coming)
    shapes = _resized(k, request.block(me)), _resized(v, request.block(me))
    home = _hop(carried, _num_bytes(*((s, dtype) for s in shapes)), request, _nothing, backward=True)
    grad_k, grad_v = _unpack(home, 0, dtype, *shapes)
    grads = grad_q * request.scale, grad_k, grad_v
    wanted = grad_mask if mask is None else grad_mask.to(mask.dtype)
    return grads[0].to(q.dtype), grads[1].to(k.dtype, copy=True), grads[2].to(v.dtype, copy=True), wanted


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *told: object) -> tuple[Tensor, Tensor]:
    batch = _batch(q, k, v)
    out = q.new_empty((*batch, q.shape[-2], v.shape[-1]))
    return out, q.new_empty((*batch, q.shape[-2], 1), dtype=wide(q.dtype))


def _backward_fake(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    mask_grad: bool,  # noqa: FBT001
    *told: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = q.new_empty((0,), dtype=wide(q.dtype)) if mask is None or not mask_grad else torch.empty_like(mask)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), wanted


def _context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.told = inputs[4:]


def _backward(ctx, g, _):  # type: ignore[no-untyped-def]
    q, k, v, mask, out, total = ctx.saved_tensors
    mask_grad = ctx.needs_input_grad[3]
    grads = torch.ops.meshpar.ring_backward.default(g, q, k, v, mask, out, total, mask_grad, *ctx.told)
    return (*grads[:3], grads[3] if mask_grad else None, *[None] * 9)


def _no_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    pass


def _once(ctx, *grads):  # type: ignore[no-untyped-def]
    text = "sdpa (ring) can be differentiated once; for second derivatives ask for rules.tokens.using('gathered keys')"
    raise RuntimeError(text)


torch.library.register_fake("meshpar::ring", _fake)
torch.library.register_fake("meshpar::ring_backward", _backward_fake)
torch.library.register_autograd("meshpar::ring", _backward, setup_context=_context)
torch.library.register_autograd("meshpar::ring_backward", _once, setup_context=_no_context)
