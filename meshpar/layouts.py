"""Layouts in words: the shape of an activation, and the mesh axes that shard its dims.

Invariant: pure; axes of one rank are left out.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard

from meshpar.private import pytree


def told(x: DTensor) -> str:
    """Write the global shape of a DTensor, each dim with the axes that shard it.

    Example:
        >>> import meshpar, torch
        >>> told(meshpar.shard(torch.zeros(2, 3, 8, 8), meshpar.make_mesh("data=1")))
        '2 x 3 x 8 x 8'
    """
    names = x.device_mesh.mesh_dim_names or ()
    axes: dict[int, list[str]] = {}
    for i, placement in enumerate(x.placements):
        if isinstance(placement, Shard) and x.device_mesh.size(i) > 1:
            axes.setdefault(placement.dim, []).append(names[i])
    return (
        "scalar"
        if not x.dim()
        else " x ".join(f"{n}/{'/'.join(axes[dim])}" if dim in axes else str(n) for dim, n in enumerate(x.shape))
    )


def layouts(tree: Any) -> tuple[str, ...]:
    """Write the layouts of all DTensors of a tree, in their order."""
    return tuple(told(x) for x in pytree.tree_leaves(tree) if isinstance(x, DTensor))
