"""Scaled dot-product attention, with samples, heads, queries or keys sharded.

Invariant: every mesh axis plays one part: it shards a batch dim (heads are one), or queries, or keys, or nothing; in
the output it lies as in the query. Where queries and keys lie along the same axis, one of three ways is taken, chosen
by sizes that all ranks know, and named in the record: `sdpa (heads)`, `sdpa (gathered keys)`, `sdpa (ring)`. Keys
that are split where queries are not are `sdpa (split keys)`: scores of a part each, and one sum over the axis.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn import functional as F

from meshpar import pieces, private
from meshpar.alltoall import all_to_all
from meshpar.intervals import Interval
from meshpar.record import here
from meshpar.registry import rule
from meshpar.rules.pointwise import map_pieces
from meshpar.rules.random import piece_seed, seeded
from meshpar.rules.ring import Request, causal_block, ring, wide
from meshpar.rules.tokens import (
    GATHERED,
    HEADS,
    KEYS,
    OP,
    RING,
    Parts,
    choose,
    enter,
    heads_dim,
    out_placements,
    parts_of,
    settled,
    targets,
)
from meshpar.spmd import call


@dataclass(frozen=True)
class Local:
    """Hold what one rank attends with, once everything has come.

    Args:
        q: queries `rows` of all.
        k: keys `keys` of all.
        v: values of the same keys.
        mask: what is added to the scores, or False where they do not count, or None.
        causal: whether later keys are hidden too.
        rows: global positions of the queries.
        keys: global positions of the keys.
        scale: factor of the scores.
        dropout: probability of dropping a weight.
        seed: seed of the dropout.
        grouped: whether heads of the query share heads of the keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    rows: Interval
    keys: Interval
    scale: float
    dropout: float
    seed: int
    grouped: bool


Compute = Callable[[Local], Any]


def with_causal(x: Local) -> Tensor | None:
    """Give the mask of a local attention with the later keys hidden in it."""
    if not x.causal or x.keys[1] - 1 <= x.rows[0]:
        return x.mask
    seen = causal_block(x.rows, x.keys, x.q.device)
    if x.mask is None:
        return seen
    return x.mask & seen if x.mask.dtype == torch.bool else x.mask.masked_fill(~seen, float("-inf"))


def grouped_heads(x: Local) -> Local:
    """Give heads that share keys a dim of their own, so that keys are broadcast along it."""
    if not x.grouped or x.k.shape[-3] == x.v.shape[-3] == x.q.shape[-3]:
        return x
    num, heads = math.lcm(x.k.shape[-3], x.v.shape[-3]), x.q.shape[-3]
    q = x.q.unflatten(-3, (num, heads // num))
    k, v = (t.repeat_interleave(num // t.shape[-3], -3).unsqueeze(-3) for t in (x.k, x.v))
    mask = x.mask
    if mask is not None and mask.dim() >= 3:
        mask = mask.unflatten(-3, (num, heads // num)) if mask.shape[-3] == heads else mask.unsqueeze(-3)
    return Local(q, k, v, mask, x.causal, x.rows, x.keys, x.scale, x.dropout, x.seed, grouped=False)


def _ungrouped(out: Tensor, num_dims: int) -> Tensor:
    return out.flatten(-4, -3) if out.dim() > num_dims else out


def attend(x: Local) -> Tensor:
    """Run torch's own attention on what this rank has; pieces without rows stay connected to the graph."""
    mask, causal = x.mask, x.causal
    if causal and (x.rows[0] or mask is not None):
        mask, causal = with_causal(x), False
    sizes = torch.broadcast_shapes(x.q.shape[:-2], x.v.shape[:-2] if not x.grouped else x.q.shape[:-2])
    if 0 in sizes or 0 in (x.q.shape[-2], x.k.shape[-2]):
        y = grouped_heads(x)
        s = y.q @ y.k.transpose(-2, -1)
        s = s if mask is None or mask.dtype == torch.bool else s + y.mask.to(s.dtype)  # type: ignore[union-attr]
        return _ungrouped(s.to(y.v.dtype) @ y.v, x.q.dim())
    told = {"scale": x.scale, "enable_gqa": x.grouped}
    if not x.dropout:
        return F.scaled_dot_product_attention(x.q, x.k, x.v, mask, 0.0, causal, **told)  # type: ignore[arg-type]
    with seeded(x.q.device, x.seed):
        return F.scaled_dot_product_attention(x.q, x.k, x.v, mask, x.dropout, causal, **told)  # type: ignore[arg-type]


def _swap(piece: Tensor, old: int, new: int, rows: int, mesh: DeviceMesh, axis: int, op: str) -> Tensor:
    """Let a local piece have all rows of one dim, and its share of another; see `meshpar.alltoall`."""
    name, group = pieces.axes_of(mesh)[axis], mesh.get_group(axis)
    return all_to_all(piece, old, new, rows, group, axis=name, label=here(op))


def _by_heads(x: Local, dim: int, parts: Parts, op: str, length: int, num_keys: int) -> Tensor:
    axis, nd = parts.shared, len(parts.shape)
    assert axis is not None
    mesh = parts.mesh

    def turned(t: Tensor, rows: int) -> Tensor:
        return _swap(t, t.dim() - 2, dim - nd + t.dim(), rows, mesh, axis, op)

    q, k, v = turned(x.q, length), turned(x.k, num_keys), turned(x.v, num_keys)
    mask = x.mask
    heads = x.q.shape[dim - nd + x.q.dim()]
    if mask is not None and mask.dim() >= nd - dim and mask.shape[dim - nd] == heads > 1:
        a, b = pieces.my_chunk(mesh, axis, heads)
        mask = mask.narrow(dim - nd, a, b - a)
    turned_x = Local(q, k, v, mask, x.causal, (0, length), (0, num_keys), x.scale, x.dropout, x.seed, grouped=x.grouped)
    return _swap(attend(turned_x), dim, nd - 2, heads, mesh, axis, op)


def _by_ring(x: Local, parts: Parts, op: str, length: int, num_keys: int) -> Tensor:
    axis = parts.shared
    assert axis is not None
    y = grouped_heads(x)
    request = Request(
        causal=y.causal,
        scale=y.scale,
        dropout=y.dropout,
        seed=y.seed,
        rows=length,
        keys=num_keys,
        group_name=parts.mesh.get_group(axis).group_name,
        axis=pieces.axes_of(parts.mesh)[axis],
        label=here(op),
    )
    out = ring(y.q, y.k, y.v, y.mask, request)
    return _ungrouped(out, x.q.dim())


def _by_keys(x: Local, parts: Parts, op: str) -> Tensor:
    """Attend to a part of the keys on every rank of an axis, and add up: highest scores first, then the sums."""
    axis = parts.along(KEYS)
    assert axis is not None
    y = grouped_heads(x)
    dtype = wide(y.q.dtype)
    s = (y.q.to(dtype) * y.scale) @ y.k.to(dtype).transpose(-2, -1)
    mask = with_causal(y)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    highest = s.new_full((*s.shape[:-1], 1), float("-inf"))
    if s.shape[-1]:
        highest = s.detach().amax(-1, keepdim=True)
    highest = pieces.all_gather_parts(highest, parts.mesh, axis, op).amax(0)
    weights = (s - highest.masked_fill(highest == float("-inf"), 0.0)).exp()
    total, kept = weights.sum(-1, keepdim=True), weights
    if y.dropout:
        with seeded(s.device, y.seed):
            kept = F.dropout(weights, y.dropout)
    found = kept @ y.v.to(dtype)
    sums = pieces.psum(torch.cat([found, total.expand(*found.shape[:-1], 1)], -1), parts.mesh, [axis], op)
    out, total = sums[..., :-1], sums[..., -1:]
    return _ungrouped((out / total.masked_fill(total == 0, 1.0)).to(y.q.dtype), x.q.dim())


def attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    masks: Sequence[Tensor],
    *,
    shape: Sequence[int],
    causal: bool,
    dropout: float = 0.0,
    scale: float | None = None,
    grouped: bool = False,
    whole_keys: Compute | None = None,
) -> tuple[Any, Parts, list[Placement]]:
    """Attend with activations, whatever dims of them lie on the mesh.

    Args:
        q: queries, global shape (..., L, E).
        k: keys, global shape (..., S, E).
        v: values, global shape (..., S, F).
        masks: masks that broadcast to (..., L, S): one of booleans, or any number that are added to the scores.
        shape: global shape of the output, (..., L, F).
        causal: whether query i sees keys 0 to i alone.
        dropout: probability of dropping a weight.
        scale: factor of the scores; 1/sqrt(E) by default.
        grouped: whether heads of the query share heads of the keys.
        whole_keys: what to compute instead of the attention; it is given all keys then.

    Returns:
        What was computed on this rank, the parts of the axes, and the placements of the output.
    """
    q, k, v = (settled(x, x.dim() - 1) for x in (q, k, v))
    masks = [settled(m, m.dim()) if isinstance(m, DTensor) else m for m in masks]
    parts = parts_of(q, k, v, masks, shape, grouped=grouped)
    if whole_keys is not None and KEYS in parts.role:
        roles = tuple(None if role == KEYS else role for role in parts.role)
        axis = parts.along(KEYS)
        k, v = (pieces.moved(x, _freed(x, axis), f"sdpa ({GATHERED})") for x in (k, v))
        parts = Parts(parts.mesh, parts.shape, roles, parts.shared, parts.grouped)
    way, dim = "", None
    if parts.shared is not None:
        way = GATHERED if whole_keys is not None else choose(q, k, v, masks, parts)
        dim = heads_dim(q, k, v, parts)
    elif KEYS in parts.role:
        way = "split keys"
    op = f"sdpa ({way})" if way else OP
    stay = way in (HEADS, RING)
    local_q, local_k, local_v = (
        enter(x, *targets(x, parts, which, keys_stay=stay), parts, op)
        for x, which in ((q, "query"), (k, "keys"), (v, "keys"))
    )
    mask_parts = parts
    if way == HEADS:
        roles = tuple(dim if axis == parts.shared else role for axis, role in enumerate(parts.role))
        mask_parts = Parts(parts.mesh, parts.shape, roles, parts.shared, parts.grouped)
    mask: Tensor | None = None
    for m in masks:
        own, grad = targets(m, mask_parts, "mask", keys_stay=False)
        if way == HEADS and parts.shared is not None:
            own[parts.shared], grad[parts.shared] = Replicate(), Partial()
        piece = enter(m, own, grad, mask_parts, op)
        mask = piece if mask is None else mask + piece
    length, num_keys = q.shape[-2], k.shape[-2]
    row_axis, key_axis = parts.along(parts.rows), parts.along(KEYS)
    local = Local(
        q=local_q,
        k=local_k,
        v=local_v,
        mask=mask,
        causal=causal,
        rows=(0, length) if row_axis is None else pieces.my_chunk(parts.mesh, row_axis, length),
        keys=(0, num_keys) if key_axis is None else pieces.my_chunk(parts.mesh, key_axis, num_keys),
        scale=_scale(q.shape[-1]) if scale is None else scale,
        dropout=dropout,
        seed=piece_seed(parts.mesh, parts.compute(), op) if dropout else 0,
        grouped=grouped,
    )
    if whole_keys is not None:
        out = whole_keys(local)
    elif way == HEADS:
        assert dim is not None
        out = _by_heads(local, dim, parts, op, length, num_keys)
    elif way == RING:
        out = _by_ring(local, parts, op, length, num_keys)
    else:
        out = _by_keys(local, parts, op) if key_axis is not None else attend(local)
    return out, parts, out_placements(q, parts)


def _scale(features: int) -> float:
    return 1.0 / math.sqrt(features) if features else 1.0


def _freed(x: DTensor, axis: int | None) -> list[Placement]:
    return [Replicate() if i == axis else p for i, p in enumerate(x.placements)]


def _shape_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool,
    grouped: bool,
) -> tuple[int, ...]:
    """Give the shape of the output, with torch's errors."""
    shape = (*q.shape[:-1], v.shape[-1])
    usual = (
        q.dim() == k.dim() == v.dim() > 2
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
        and q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and 0 <= dropout <= 1
    )
    if usual and mask is not None:
        scores = (*q.shape[:-1], k.shape[-2])
        usual = not causal and mask.dtype in (torch.bool, q.dtype) and 1 < mask.dim() <= q.dim()
        usual = usual and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(scores), strict=False))
    if usual:
        return shape
    what = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in (q, k, v, mask))
    return _checked(what, dropout, causal, scale, grouped)


@private.asked_once
def _checked(
    operands: tuple[Any, ...],
    dropout: float,
    causal: bool,  # noqa: FBT001
    scale: float | None,
    grouped: bool,  # noqa: FBT001
) -> tuple[int, ...]:
    """Ask torch itself, with tensors that have no data."""
    q, k, v, mask = (None if o is None else torch.empty(o[0], dtype=o[1], device="meta") for o in operands)
    told: dict[str, Any] = {"scale": scale, "enable_gqa": grouped}
    # Torch's kernel for the CPU takes a mask and is_causal together; its other ways do not.
    fused = q.dim() == 4 and q.shape[-1] == v.shape[-1]  # type: ignore[union-attr]
    causal = causal and (mask is None or not fused)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **told)  # type: ignore[arg-type]
        if mask is not None:
            alone = F.scaled_dot_product_attention(q, k, v, None, dropout, **told)  # type: ignore[arg-type]
            if alone.shape != out.shape:
                text = f"the mask {tuple(mask.shape)} does not broadcast to the scores of {tuple(alone.shape)}"
                raise RuntimeError(text)
    return tuple(out.shape)


def lifted(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Give an activation; what is plain is replicated."""
    return x if isinstance(x, DTensor) else pieces.lift(x, mesh)


@contextlib.contextmanager
def autocast(mesh: DeviceMesh, operands: list[Any]) -> Iterator[list[Any]]:
    """Cast operands as autocast would, and turn it off inside the block."""
    kind = mesh.device_type
    if not torch.is_autocast_enabled(kind):
        yield operands
        return
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype in (dtype, torch.float64):
            return x
        return map_pieces(Tensor.to, (x, dtype), {}) if isinstance(x, DTensor) else x.to(dtype)

    cast_operands = [cast(x) for x in operands]
    with torch.autocast(kind, enabled=False):
        yield cast_operands


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Attend, with samples, heads, queries or keys sharded.

    Args:
        query: global shape (..., L, E); plain ones are taken as replicated.
        key: global shape (..., S, E).
        value: global shape (..., S, F).
        attn_mask: bool or float, plain or not, broadcast to (..., L, S); its gradient is right.
        dropout_p: probability of dropping a weight; masks differ on ranks that hold different scores.
        is_causal: whether query i sees keys 0 to i alone.
        scale: factor of the scores.
        enable_gqa: whether heads of the query may share heads of keys and values.

    Returns:
        Global shape (..., L, F), in the placements of the query.

    Communication:
        None where keys are whole. Where they lie along the axis of the queries: two all-to-alls of heads, or an
        all-gather of the keys, or p - 1 hops of the ring; see `choose`. Where they lie along another axis: an
        all-gather of the highest scores and an all-reduce of the output.

    Raises:
        RuntimeError: arguments that torch refuses, on all ranks, before any communication.
    """
    given = [query, key, value, attn_mask]
    mesh = next(x for x in given if isinstance(x, DTensor)).device_mesh
    with autocast(mesh, given) as (q, k, v, mask):
        shape = _shape_of(q, k, v, mask, dropout_p, scale, causal=is_causal, grouped=enable_gqa)
        masks = [] if mask is None else [mask if mask.dim() > 1 else _two_dims(mask)]
        out, _, placements = attention(
            lifted(q, mesh),
            lifted(k, mesh),
            lifted(v, mesh),
            masks,
            shape=shape,
            causal=is_causal,
            dropout=dropout_p,
            scale=scale,
            grouped=enable_gqa,
        )
    return pieces.whole(out, mesh, placements, shape)


def _two_dims(mask: Tensor) -> Tensor:
    sizes = (1, mask.numel())
    return call(Tensor.reshape, (mask, sizes), {}) if isinstance(mask, DTensor) else mask.reshape(sizes)
