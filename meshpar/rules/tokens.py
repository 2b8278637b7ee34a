"""What every mesh axis does in an attention, and which way the keys come to the queries.

Invariant: pure functions of global shapes and placements (but for `settled` and `enter`, which move operands to where
they were told). Every axis plays one part: it shards a batch dim (heads are one), or queries, or keys, or nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.errors import ShardingError, SpecError, explain
from meshpar.gathering import announce_gather
from meshpar.rules.spatial import settle

GATHER_BYTES = 64 * 2**20
"""Keys and values of one rank's samples that may be gathered where heads cannot be shared out."""

HEADS, GATHERED, RING = "heads", "gathered keys", "ring"
WAYS = (HEADS, GATHERED, RING)

KEYS = -1
"""The part of an axis that splits keys, and not queries."""

OP = "F.scaled_dot_product_attention"

_ASKED: contextvars.ContextVar[str | None] = contextvars.ContextVar("meshpar_attention", default=None)


@contextlib.contextmanager
def using(way: str) -> Iterator[None]:
    """Take one way inside the block, whatever the sizes, where queries and keys lie along the same axis.

    Args:
        way: "heads", "gathered keys" or "ring".

    Raises:
        SpecError: an unknown way. At the call, ShardingError: "heads" where they cannot be shared out.

    Example:
        >>> with using("ring"):
        ...     pass
    """
    if way not in WAYS:
        raise SpecError(explain("attention: unknown way.", got=repr(way), needs=f"one of {WAYS}", fix=f"{WAYS[0]!r}"))
    token = _ASKED.set(way)
    try:
        yield
    finally:
        _ASKED.reset(token)


@dataclass(frozen=True)
class Parts:
    """Hold which part every mesh axis plays.

    Args:
        mesh: mesh of the activations.
        shape: global shape of the output; dims of operands are counted from the last one.
        role: for each axis the dim of the output that it shards, KEYS, or None.
        shared: the axis along which both queries and keys lie, or None.
        grouped: whether several heads of the query share one head of the keys (`enable_gqa`).
    """

    mesh: DeviceMesh
    shape: tuple[int, ...]
    role: tuple[int | None, ...]
    shared: int | None
    grouped: bool

    @property
    def rows(self) -> int:
        """Give the dim of the queries in the output."""
        return len(self.shape) - 2

    def compute(self) -> list[Placement]:
        """Give placements that say along which axes the ranks compute different things."""
        return [Replicate() if role is None else Shard(max(role, 0)) for role in self.role]

    def along(self, role: int) -> int | None:
        """Give the axis that plays a part."""
        return self.role.index(role) if role in self.role else None


def _lies(x: Tensor, axis: int, num_dims: int) -> int | None:
    """Give the dim of the output that an axis shards an operand along."""
    if not isinstance(x, DTensor) or not pieces.is_plain_shard(x.placements[axis]):
        return None
    return x.placements[axis].dim + num_dims - x.dim()  # type: ignore[attr-defined,no-any-return]


def _spans(x: Tensor, dim: int, shape: Sequence[int], *, grouped: bool = False) -> bool:
    """Tell whether an operand has a dim of the output, rather than being broadcast along it."""
    i = dim - len(shape) + x.dim()
    if i < 0:
        return False
    return x.shape[i] == shape[dim] or (grouped and dim == len(shape) - 3 and x.shape[i] > 1)


def parts_of(
    q: DTensor, k: DTensor, v: DTensor, masks: Sequence[Tensor], shape: Sequence[int], *, grouped: bool
) -> Parts:
    """Choose the part of every axis: that of the query, else of the keys, the values, the masks."""
    mesh, nd = q.device_mesh, len(shape)
    used: set[int] = set()
    roles: list[int | None] = []
    shared: int | None = None
    for axis in range(mesh.ndim):
        role: int | None = None
        for i, x in enumerate((q, k, v, *masks)):
            dim = _lies(x, axis, nd)
            if mesh.size(axis) == 1 or dim is None or dim == nd - 1 or role is not None:
                continue
            if dim == nd - 2 and i in (1, 2):
                found = KEYS
            elif _spans(x, dim, shape, grouped=grouped and i in (1, 2)):
                found = dim
            else:
                continue
            divides = not (grouped and found == nd - 3) or all(
                x.shape[-3] % mesh.size(axis) == 0 or x.shape[-3] == 1 for x in (k, v)
            )
            # Several axes may shard a batch dim, one inside the other; queries and keys have one axis each.
            role = found if found not in used and divides else None
        if role in (nd - 2, KEYS):
            used.add(role)
        if role == nd - 2 and KEYS not in used and nd - 2 in (_lies(k, axis, nd), _lies(v, axis, nd)):
            shared = axis
            used.add(KEYS)
        roles.append(role)
    return Parts(mesh, tuple(shape), tuple(roles), shared, grouped)


def targets(x: Tensor, parts: Parts, which: str, *, keys_stay: bool) -> tuple[list[Placement], list[Placement]]:
    """Give the placements of an operand, and those of its gradient.

    Args:
        x: operand.
        parts: parts of the axes.
        which: "query", "keys" (values too) or "mask".
        keys_stay: whether keys stay sharded along the axis that they share with the queries.
    """
    own: list[Placement] = []
    nd = len(parts.shape)
    for axis, role in enumerate(parts.role):
        place: Placement = Replicate()
        if parts.mesh.size(axis) == 1 and isinstance(x, DTensor):
            place = x.placements[axis]
        elif role == KEYS:
            if which == "keys":
                place = Shard(x.dim() - 2)
            elif which == "mask" and x.shape[-1] != 1:
                place = Shard(x.dim() - 1)
        elif role == nd - 2:
            rows = which == "query" or (which == "mask" and _spans(x, role, parts.shape))
            if rows or (which == "keys" and keys_stay and axis == parts.shared):
                place = Shard(x.dim() - 2)
        elif role is not None and _spans(x, role, parts.shape, grouped=parts.grouped and which == "keys"):
            place = Shard(role - nd + x.dim())
        own.append(place)
    grad: list[Placement] = [
        Partial() if place.is_replicate() and role is not None else place
        for place, role in zip(own, parts.role, strict=True)
    ]
    return own, grad


def enter(x: Tensor, own: Sequence[Placement], grad: Sequence[Placement], parts: Parts, op: str) -> Tensor:
    """Give the local piece of an operand; what no axis of the attention can shard is gathered, and said."""
    if not isinstance(x, DTensor):
        return pieces.cut(pieces.as_part(x, parts.mesh, parts.compute()), parts.mesh, own)
    lost = [
        axis
        for axis, (old, new) in enumerate(zip(x.placements, own, strict=True))
        if parts.role[axis] is None and old.is_shard() and not new.is_shard() and parts.mesh.size(axis) > 1
    ]
    if lost:
        why = "two axes would shard one dim, or heads that do not divide"
        announce_gather(OP, [x], why)
        target = [Replicate() if axis in lost else old for axis, old in enumerate(x.placements)]
        x = pieces.moved(x, target, OP, "gather", why)
    return pieces.local(pieces.moved(x, own, op), grad)


def heads_dim(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> int | None:
    """Find a batch dim, heads first, whose local size divides by the ranks of the shared axis in q, k and v."""
    assert parts.shared is not None
    nd = len(parts.shape)
    for dim in range(nd - 3, -1, -1):
        p = parts.mesh.size(parts.shared)
        p *= math.prod(parts.mesh.size(axis) for axis, role in enumerate(parts.role) if role == dim)
        spans = all(_spans(x, dim, parts.shape, grouped=parts.grouped and x is not q) for x in (q, k, v))
        if spans and all(x.shape[dim - nd + x.dim()] % p == 0 for x in (q, k, v)):
            return dim
    return None


def choose(q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], parts: Parts) -> str:
    """Choose the way by the bytes that a rank would send, and hold; pure integers of global sizes.

    Heads where they divide, unless to gather the keys is less still (few keys, many queries); else keys are gathered
    up to `GATHER_BYTES`; else the ring.
    """
    assert parts.shared is not None
    asked, dim = _ASKED.get(), heads_dim(q, k, v, parts)
    if asked is not None:
        if asked == HEADS and dim is None:
            raise ShardingError(
                explain(
                    "attention: heads cannot be shared out.",
                    got=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
                    needs=f"a batch dim that divides by {parts.mesh.size(parts.shared)} ranks, in all three",
                    fix="another way",
                )
            )
        return asked
    p = parts.mesh.size(parts.shared)

    def num_bytes(shape: Sequence[int], item: int) -> int:
        others = math.prod(
            parts.mesh.size(axis)
            for axis, role in enumerate(parts.role)
            if role is not None and axis not in (parts.shared, parts.along(KEYS))
        )
        return math.prod(shape) * item // others

    keys = num_bytes(k.shape, k.element_size()) + num_bytes(v.shape, v.element_size())
    exchanged = keys + num_bytes(q.shape, q.element_size()) + num_bytes(parts.shape, q.element_size())
    # Heads need all rows of a mask on every rank: what lies elsewhere would have to be gathered.
    exchanged += p * sum(num_bytes(x.shape, x.element_size()) for x in masks if isinstance(x, DTensor))
    if dim is not None and (exchanged < p * keys or keys > GATHER_BYTES):
        return HEADS
    return GATHERED if keys <= GATHER_BYTES else RING


def settled(x: DTensor, num_kept: int) -> DTensor:
    """Bring an operand into placements that can be worked with: `num_kept` first dims may stay sharded."""
    return settle(x, range(num_kept), OP, nested=range(x.dim() - 2))


def out_placements(q: DTensor, parts: Parts) -> list[Placement]:
    """Give the placements of the output."""
    out: list[Placement] = []
    for axis, role in enumerate(parts.role):
        if parts.mesh.size(axis) == 1:
            dim = _lies(q, axis, len(parts.shape))
            role = dim if dim is not None else None
        out.append(Replicate() if role is None or role == KEYS else Shard(role))
    return out
