"""`transposed`: the shards of an activation move from one dim to another.

Invariant: the activation stays the same and its layout canonical; only the dim that lies along an axis changes.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Shard

from meshpar import pieces


def transposed(x: DTensor, axis: int, dim: int, op: str) -> DTensor:
    """Shard another dim along a mesh axis.

    Args:
        x: activation, a dim of which lies along the axis in canonical layout.
        axis: position of the mesh axis.
        dim: dim that takes its place; no axis of more than one rank shards it yet.
        op: name of the op that asks, for errors and the record.

    Returns:
        The same tensor, with `Shard(dim)` on the axis.

    Communication:
        An all-to-all over the axis: of its piece, a rank sends what the others will own. As much in the backward.
    """
    placement = x.placements[axis]
    assert isinstance(placement, Shard), f"{op}: {placement} on axis {axis}"
    dim %= x.dim()
    assert placement.dim == dim or not pieces.shard_axes(x, dim), f"{op}: dim {dim} is sharded already"
    target = [Shard(dim) if i == axis else p for i, p in enumerate(x.placements)]
    return pieces.moved(x, target, op)
