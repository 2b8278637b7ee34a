"""What the spatial rules share: placements that a rule can work with, and rows from other ranks.

Invariant: after `settle` nothing is `Partial`, and every dim is sharded in canonical layout: by one axis at the most,
but for the dims along which a rule said that it takes nested shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.exchange import fetch
from meshpar.gathering import announce_gather
from meshpar.intervals import Interval, Rows


def settle(x: DTensor, keep: Collection[int], op: str, *, nested: Collection[int] = ()) -> DTensor:
    """Bring an activation into placements that a rule can work with.

    Args:
        x: activation.
        keep: dims (not negative) that may stay sharded: batch dims and those whose rows the rule can fetch.
        op: name of the op, for the record.
        nested: those of them that several axes may shard: along these the rule treats every row alike.

    Communication:
        None as a rule. A dim sharded otherwise is gathered, and said; a `Partial` is reduced.
    """
    target: list[Placement] = []
    used: set[int] = set()
    for axis, placement in enumerate(x.placements):
        ok = pieces.is_plain_shard(placement) and placement.dim in keep  # type: ignore[attr-defined]
        alone = x.device_mesh.size(axis) == 1
        if ok and (alone or placement.dim not in used or placement.dim in nested):  # type: ignore[attr-defined]
            target.append(placement)
            if not alone:
                used.add(placement.dim)  # type: ignore[attr-defined]
        else:
            target.append(Replicate())
    lost = [p for p, t in zip(x.placements, target, strict=True) if p.is_shard() and not t.is_shard()]
    if lost and any(x.device_mesh.size(i) > 1 for i, p in enumerate(x.placements) if p in lost):
        why = f"dim {', '.join(str(p.dim) for p in lost)} is sharded"  # type: ignore[attr-defined]
        announce_gather(op, [x], why)
        return pieces.moved(x, target, op, "gather", why)
    return pieces.moved(x, target, op)


def sharded_dims(x: DTensor) -> dict[int, int]:
    """Map each sharded dim to the position of its mesh axis; axes of one rank do not count."""
    found: dict[int, int] = {}
    for axis, placement in enumerate(x.placements):
        if placement.is_shard() and x.device_mesh.size(axis) > 1:
            found[placement.dim] = axis  # type: ignore[attr-defined]
    return found


def fetch_rows(
    piece: Tensor,
    dim: int,
    n: int,
    want: Sequence[Interval | Rows],
    mesh: DeviceMesh,
    axis: int,
    op: str,
    *,
    fill: float = 0.0,
    have: Sequence[Interval] | None = None,
) -> Tensor:
    """Fetch rows of a dim of global size n along a mesh axis (by position); see `meshpar.exchange.fetch`."""
    name = pieces.axes_of(mesh)[axis]
    held = pieces.axis_chunks(mesh, axis, n) if have is None else have
    return fetch(piece, dim, held, want, mesh.get_group(axis), axis=name, op=op, fill=fill)


def remapped(placements: Sequence[Placement], to: Mapping[int, int]) -> list[Placement]:
    """Give placements after dims were renumbered; a shard of a dim that is gone becomes `Replicate`."""
    return [Shard(to[p.dim]) if isinstance(p, Shard) and p.dim in to else Replicate() for p in placements]


def whole_along(x: DTensor, axes: Sequence[int], op: str, why: str = "") -> DTensor:
    """Bring all rows to every rank of some mesh axes: announced as a gather where a reason is given."""
    if not axes:
        return x
    if why:
        announce_gather(op, [x], why)
    target = [Replicate() if i in axes else p for i, p in enumerate(x.placements)]
    return pieces.moved(x, target, op, "gather" if why else "redistribute", why)
