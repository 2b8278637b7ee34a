"""Meshes and process groups: flattened and joined meshes, groups by name, collectives by the name that torch has.

Invariant: what is made here is made by all ranks of a group, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten some axes into a one-dimensional mesh (public when `DeviceMesh.flatten` comes)."""
    return mesh[axes]._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Give a mesh of one axis several (public when `DeviceMesh.unflatten` comes); the same one at every call."""
    made: dict[Any, DeviceMesh] = mesh._get_root_mesh().__dict__.setdefault("_meshpar_unflattened", {})
    key = mesh.mesh_dim_names, sizes, names
    if key not in made:
        made[key] = mesh._unflatten(0, sizes, names)
    return made[key]


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Put meshes that were cut from one into one, their axes in order (public when `DeviceMesh.concatenate` comes)."""
    return DeviceMesh._concatenate(list(meshes))


def group_by_name(name: str) -> dist.ProcessGroup:
    """Find a process group by its `group_name` (public when custom ops take groups as arguments)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather equal pieces (torch 2.13 renamed the function; the old name is what 2.11 has)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


def reduce_scatter(out: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up and scatter equal pieces (renamed in torch 2.13, as `all_gather` was)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, given, group=group)


def abort_groups() -> None:
    """End all process groups without waiting for a peer (public when `abort_process_group` comes)."""
    dist.distributed_c10d._abort_process_group()


def gloo_group(name: str, ranks: Sequence[int], timeout: Any) -> Any:
    """Make a gloo group of ranks that alone take part; peers and tags are given by rank of the group.

    `new_group(use_local_synchronization=True)` names a group by how many each rank has, so ranks with different numbers
    of groups wait for each other in vain (torch 2.13). Public when the default store or such a name is.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, list(ranks).index(dist.get_rank()), len(ranks), timeout)
