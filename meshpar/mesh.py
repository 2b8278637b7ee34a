"""Meshes of ranks: `make_mesh` makes the `DeviceMesh` of a `MeshSpec`, the rest reads it.

Invariant: the mesh is a value. Everything here but `make_mesh` is a pure function of a `DeviceMesh` (and of a rank,
this process's own unless one is named); nothing is kept between calls but caches of what follows from the mesh.
The last axis varies fastest with the rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshpar import guard, lifelines, lists, private, runtime, shortcut
from meshpar.errors import SpecError, explain
from meshpar.peers import naming
from meshpar.spec import AXES, DOMAIN, MeshSpec, known_axes

SUMMED = "data_domain"
"""The name of the flattened mesh of data x domain axes: gradients of parameters are summed over it."""

SPACE = "space"
"""The name of the flattened mesh of the domain axes, where there are several."""

_REPLICAS = "_meshpar_replicas"
"""Name of the attribute in which a mesh keeps the number of its replicas."""


def make_mesh(spec: str | Mapping[str, Any] | MeshSpec | DeviceMesh, device_type: str | None = None) -> DeviceMesh:
    """Make the mesh of this job, with the axes data, domain and tensor.

    Starts the process group if there is none: as the launcher says, else as a world of one.

    Args:
        spec: `"data=2,domain=4"`, a mapping, a `MeshSpec`, or a mesh made before (checked, warmed and returned).
        device_type: "cpu", "cuda", ...; by default CUDA where there is one, else the CPU.

    Returns:
        A `DeviceMesh` whose `mesh_dim_names` are ("data", "domain", "tensor"), with "domain_d" before and "domain_w"
        after "domain" where the spec has them. Replicas are no axis of it, see `replicas`.

    Communication:
        The making of the groups, and one tiny ring of sends on every axis: on NCCL the first batched send of a
        group must include all of its ranks. Once in a job an all-gather of 64 bytes, so that a rank that is lost
        later can be named.

    Raises:
        SpecError: the spec is wrong or does not fit the world; on all ranks, before any group is made.
    """
    guard.install()
    shortcut.install()
    lists.install()
    private.name_failures_of_dtensor(naming)
    if isinstance(spec, DeviceMesh):
        return _checked(spec)
    resolved = MeshSpec.parse(spec).resolve(runtime.world_size())
    device_type = _checked_device_type(device_type or runtime.default_device_type())
    runtime.ensure_process_group(device_type)
    sizes = resolved.sizes()
    sizes["data"] *= sizes.pop("replica", 1)
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    setattr(mesh, _REPLICAS, resolved.replica)
    _flatten(mesh)
    _warm(mesh)
    _exchange_lines(mesh)
    return mesh


def replicas(mesh: DeviceMesh) -> int:
    """Give the number of copies of the parameters that a mesh was made for (`MeshSpec(replica=...)`), else 1."""
    return int(getattr(mesh, _REPLICAS, 1))


def _flatten(mesh: DeviceMesh) -> None:
    """Make the groups that span several axes, which every rank of the job must do."""
    summed_mesh(mesh)
    if len(space_axes(mesh)) > 1:
        private.flatten(mesh, space_axes(mesh), SPACE)


def summed_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Give the flattened mesh of data x domain axes, over which the gradients of parameters are summed."""
    return private.flatten(mesh, summed_axes(mesh), SUMMED)


def space_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Give the ranks of one data coordinate (and one tensor coordinate) as a mesh of one axis."""
    axes = space_axes(mesh)
    return mesh[axes[0]] if len(axes) == 1 else private.flatten(mesh, axes, SPACE)


def space_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Name the domain axes of a mesh, in mesh order."""
    return tuple(axis for axis in mesh.mesh_dim_names or () if axis in DOMAIN)


def summed_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Name the axes over which the parts of the gradient of a parameter are added up."""
    return ("data", *space_axes(mesh))


def axes_in(mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    """Name the axes that a group of a mesh spans: several for the flattened ones."""
    return summed_axes(mesh) if name == SUMMED else space_axes(mesh) if name == SPACE else (name,)


def _checked_device_type(device_type: str) -> str:
    try:
        known = torch.device(device_type).index is None
    except RuntimeError:
        known = False
    if not known:
        needs = "a type of device, without an index"
        raise SpecError(explain("mesh: cannot be made.", got=f"device_type={device_type!r}", needs=needs, fix='"cpu"'))
    return device_type


def _checked(mesh: DeviceMesh) -> DeviceMesh:
    if not is_ours(mesh):
        raise SpecError(
            explain(
                "mesh: this DeviceMesh cannot be used.",
                got=f"axes {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}",
                needs=f"the axes {AXES}, size 1 where unused",
                fix='make it with meshpar.make_mesh("data=...,domain=...")',
            )
        )
    _flatten(mesh)
    if mesh.get_coordinate() is None:
        raise SpecError(
            explain(
                "mesh: this DeviceMesh cannot be used here.",
                got=f"sizes {tuple(mesh.shape)}; this process is not on it",
                needs="a mesh that holds every rank that uses it",
                fix='make it with meshpar.make_mesh("data=...,domain=...")',
            )
        )
    _warm(mesh)
    _exchange_lines(mesh)
    return mesh


def _exchange_lines(mesh: DeviceMesh) -> None:
    """Let every rank know how to ask, after a failure, whether another is still there."""
    world, size = dist.group.WORLD, dist.get_world_size()
    if lifelines.is_known(world) or mesh.size() != size or size == 1:
        return
    device = runtime.local_device(mesh.device_type)
    mine = lifelines.own_line().encode().ljust(lifelines.RECORD_BYTES, b"\0")
    everyone = torch.zeros(size * len(mine), dtype=torch.uint8, device=device)
    with naming(None, "mesh", "|make_mesh"):
        private.all_gather(everyone, torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device), None)
    rows = everyone.view(size, -1).tolist()
    lifelines.learn(world, [bytes(row).rstrip(b"\0").decode("ascii", "replace") for row in rows])


def _warm(mesh: DeviceMesh) -> None:
    for axis in mesh.mesh_dim_names or ():
        size = axis_size(mesh, axis)
        if size == 1:
            continue
        me, group = coordinate(mesh, axis), axis_group(mesh, axis)
        device = runtime.local_device(mesh.device_type)
        out, into = torch.zeros(1, device=device), torch.zeros(1, device=device)
        ops = [
            dist.P2POp(dist.isend, out, group=group, group_peer=(me + 1) % size),
            dist.P2POp(dist.irecv, into, group=group, group_peer=(me - 1) % size),
        ]
        with naming(group, axis, "|make_mesh"):
            for work in dist.batch_isend_irecv(ops):
                work.wait()


def is_ours(mesh: DeviceMesh) -> bool:
    """Tell whether activations live on this mesh: it has the axes of `make_mesh`."""
    return mesh.mesh_dim_names in guard.OURS


def axis_index(mesh: DeviceMesh, axis: str) -> int:
    """Give the position of an axis in the mesh."""
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise SpecError(
            explain(f"axis {axis!r}: not on this mesh.", got=f"axes {names}", needs="one of them", fix=known_axes())
        )
    return names.index(axis)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Give the number of ranks along an axis."""
    return int(mesh.shape[axis_index(mesh, axis)])


def coordinate(mesh: DeviceMesh, axis: str, rank: int | None = None) -> int:
    """Give the coordinate along an axis of this process, or of a global rank.

    Raises:
        SpecError: the mesh has no such axis, or does not hold the rank.
    """
    return coordinates(mesh, rank)[axis_index(mesh, axis)]


def coordinates(mesh: DeviceMesh, rank: int | None = None) -> tuple[int, ...]:
    """Give the coordinates along all axes of this process, or of a global rank."""
    # Meshes are equal whatever rank looks at them, so what is this rank's own is not cached.
    mine = mesh.get_coordinate() if rank is None else _coordinates_of(mesh, rank)
    if mine is None:
        who = "this process" if rank is None else f"rank {rank}"
        ranks = f"ranks {min(ranks_of(mesh))} to {max(ranks_of(mesh))} in sizes {tuple(mesh.shape)}"
        raise SpecError(
            explain(f"{who}: not on this mesh.", got=ranks, needs="one of its ranks", fix="ask for a rank of the mesh")
        )
    return tuple(mine)


@functools.lru_cache(maxsize=4096)
def _coordinates_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    ranks = ranks_of(mesh)
    if ranks.count(rank) != 1:
        return None
    place, where = ranks.index(rank), []
    for size in reversed(mesh.shape):
        place, i = divmod(place, size)
        where.append(i)
    return tuple(reversed(where))


@functools.lru_cache(maxsize=256)
def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """List the global ranks of a mesh, the last axis fastest."""
    found: list[int] = private.for_real(lambda: mesh.mesh.flatten().tolist())
    return tuple(found)


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Give the process group of the ranks that differ from this one along an axis alone."""
    return mesh.get_group(axis_index(mesh, axis))


def axis_ranks(mesh: DeviceMesh, axis: str, rank: int | None = None) -> tuple[int, ...]:
    """Give the global ranks of the group of `axis_group`, in coordinate order."""
    return _line(mesh, axis_index(mesh, axis), coordinates(mesh, rank))


@functools.lru_cache(maxsize=4096)
def _line(mesh: DeviceMesh, index: int, where: tuple[int, ...]) -> tuple[int, ...]:
    step = math.prod(mesh.shape[index + 1 :])
    first = sum(i * math.prod(mesh.shape[k + 1 :]) for k, i in enumerate(where) if k != index)
    return ranks_of(mesh)[first::step][: mesh.shape[index]]


def neighbours(
    mesh: DeviceMesh, axis: str = "domain", *, rank: int | None = None, periodic: bool = False
) -> tuple[int | None, int | None]:
    """Give the global ranks before and after along an axis: None at an edge, none of which a periodic axis has."""
    ranks = axis_ranks(mesh, axis, rank)
    me = coordinate(mesh, axis, rank)
    if periodic:
        return ranks[(me - 1) % len(ranks)], ranks[(me + 1) % len(ranks)]
    return (ranks[me - 1] if me > 0 else None, ranks[me + 1] if me + 1 < len(ranks) else None)


def is_first(mesh: DeviceMesh, axis: str = "domain", *, rank: int | None = None) -> bool:
    """Tell whether a rank holds the first rows along an axis (the north edge, where row 0 is north)."""
    return coordinate(mesh, axis, rank) == 0


def is_last(mesh: DeviceMesh, axis: str = "domain", *, rank: int | None = None) -> bool:
    """Tell whether a rank is the last along an axis (the south edge, where row 0 is north)."""
    return coordinate(mesh, axis, rank) == axis_size(mesh, axis) - 1
