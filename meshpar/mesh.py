"""Meshes of ranks: `MeshSpec` names the sizes, `make_mesh` makes the `DeviceMesh`, the rest reads it.

Invariant: the mesh is a value. Everything here but `make_mesh` is a pure function of a `DeviceMesh` (and of a rank,
this process's own unless one is named); nothing is kept between calls but caches of what follows from the mesh.
Axis order is data, domain, tensor; the last varies fastest with the rank. A second and a third domain axis, for
longitude and depth, stand beside the first where they were asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshpar import guard, lifelines, lists, private, runtime, shortcut
from meshpar.config import read_config
from meshpar.errors import SpecError, explain
from meshpar.peers import naming

AXES = ("data", "domain", "tensor")
"""The axes that every mesh has, in order; size 1 where unused."""

DOMAIN = {"domain_d": -3, "domain": -2, "domain_w": -1}
"""The axes that can share out space, in mesh order, and the dim that each shards in a tensor of images or volumes."""

FURTHER = ("replica", "domain_d", "domain_w")
"""What a spec may name besides; `replica` divides the axis data, for parameters alone."""

SUMMED = "data_domain"
"""The name of the flattened mesh of data x domain axes: gradients of parameters are summed over it."""

SPACE = "space"
"""The name of the flattened mesh of the domain axes, where there are several."""

_REPLICAS = "_meshpar_replicas"
"""Name of the attribute in which a mesh keeps the number of its replicas."""


@dataclass(frozen=True, repr=False)
class MeshSpec:
    """Name the size of each axis of a mesh; one size may be -1, taken from the number of ranks.

    Args:
        data: ranks that share out the batch.
        domain: ranks that share out the rows of one sample; or a mapping from dim to ranks, for rows (-2), columns
            (-1) and depth (-3) of a sample.
        tensor: ranks that share out the channels of one layer.
        domain_w: ranks that share out the columns (longitude, dim -1).
        domain_d: ranks that share out the depth of volumes (dim -3).
        replica: copies of the parameters, for `parallelize(data="hsdp")`. Each copy is shared out over `data` x domain
            ranks; all of them share out the batch. So the axis data of the mesh has `replica * data` ranks, the ranks
            of one copy next to each other.

    Raises:
        SpecError: a size is not an integer, is zero or below -1, two are -1, or a domain dim that is unknown.

    Example:
        >>> MeshSpec.parse("data=2,domain=4")
        MeshSpec(data=2, domain=4, tensor=1)
        >>> MeshSpec(domain=2).resolve(8)
        MeshSpec(data=4, domain=2, tensor=1)
        >>> MeshSpec(data=1, domain={-2: 2, -1: 3})
        MeshSpec(data=1, domain=2, domain_w=3, tensor=1)
        >>> MeshSpec.parse("replica=2").resolve(8)
        MeshSpec(replica=2, data=4, domain=1, tensor=1)
    """

    data: int = -1
    domain: int | Mapping[int, int] = 1
    tensor: int = 1
    domain_w: int = 1
    domain_d: int = 1
    replica: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.domain, Mapping):
            self._spread(self.domain)
        sizes = self.sizes()
        wrong = [
            f"{axis}={size!r}"
            for axis, size in sizes.items()
            if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1
        ]
        if wrong:
            raise SpecError(_spec_text(self, got=wrong, needs="each size a positive integer, or -1"))
        if list(sizes.values()).count(-1) > 1:
            raise SpecError(_spec_text(self, got=[str(self)], needs="one size of -1 at the most"))

    def _spread(self, by_dim: Mapping[int, int]) -> None:
        """Give the sizes of a mapping of dims to the axes of these dims."""
        axes = {dim: axis for axis, dim in DOMAIN.items()}
        unknown = [dim for dim in by_dim if dim not in axes]
        twice = [axis for axis in ("domain_w", "domain_d") if getattr(self, axis) != 1]
        if unknown or twice:
            got = [f"dim {dim!r}" for dim in unknown] + [f"{axis} named beside the mapping" for axis in twice]
            needs = "dims out of -2 (rows), -1 (columns), -3 (depth)"
            raise SpecError(_spec_text(dict(by_dim), got=got, needs=needs, fix="domain={-2: 2, -1: 2}"))
        for axis, dim in DOMAIN.items():
            object.__setattr__(self, axis, by_dim.get(dim, 1))

    def sizes(self) -> dict[str, int]:
        """Give the size of each axis, in mesh order; replicas and further domain axes where they are used."""
        further = {axis for axis in FURTHER if getattr(self, axis) != 1}
        order = ("replica", "data", *DOMAIN, "tensor")
        return {axis: getattr(self, axis) for axis in order if axis in AXES or axis in further}

    def __repr__(self) -> str:
        return f"MeshSpec({', '.join(f'{axis}={size}' for axis, size in self.sizes().items())})"

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes().items())

    @classmethod
    def parse(cls, text: str | Mapping[str, Any] | MeshSpec) -> MeshSpec:
        """Read `"data=2,domain=4"`, or a mapping of axis to size (of `domain` also to a mapping of dims).

        An axis that is not named has its default; `data` is -1 then, so that the world decides.

        Raises:
            SpecError: an unknown or repeated axis, or a size that is not an integer.
        """
        if isinstance(text, MeshSpec):
            return text
        pairs = list(text.items()) if isinstance(text, Mapping) else list(_pairs(text))
        unknown = [str(axis) for axis, _ in pairs if axis not in AXES and axis not in FURTHER]
        if unknown:
            raise SpecError(_spec_text(text, got=[f"unknown axis {u!r}" for u in unknown], needs=_known()))
        names = [axis for axis, _ in pairs]
        twice = sorted({axis for axis in names if names.count(axis) > 1})
        if twice:
            raise SpecError(_spec_text(text, got=[f"{axis} named twice" for axis in twice], needs=_known()))
        return cls(**dict(pairs))

    @classmethod
    def from_config(cls, conf: Mapping[str, Any]) -> MeshSpec:
        """Read the section `trainer` of a configuration: `parallelism`, or the older `mode`; see `meshpar.config`.

        The size of `data` is what the number of ranks leaves, `resolve` says which sizes fit.

        Raises:
            SpecError: an unknown or misspelt key or value, both forms at once, or neither.

        Example:
            >>> MeshSpec.from_config({"trainer": {"parallelism": {"data": "fsdp2", "tensor": 2, "domain": 4}}})
            MeshSpec(data=-1, domain=4, tensor=2)
        """
        choice = read_config(conf)
        return cls(data=choice.data_size, domain=choice.domain, tensor=choice.tensor, replica=choice.replica)

    def resolve(self, world_size: int) -> MeshSpec:
        """Put a number in place of -1 and check the product against the number of ranks.

        Raises:
            SpecError: the sizes do not multiply to `world_size`.
        """
        sizes = self.sizes()
        known = 1
        for size in sizes.values():
            known *= size if size != -1 else 1
        open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
        if open_axis is not None and world_size % known == 0:
            return MeshSpec(**{**sizes, open_axis: world_size // known})
        if open_axis is None and known == world_size:
            return self
        asked = f"{self} makes {known} ranks" if open_axis is None else f"{self}: {known} for the named axes"
        near = ", ".join(str(spec) for spec in _nearest(self, world_size))
        raise SpecError(
            _spec_text(
                self,
                got=[f"{asked}; the world has {world_size}"],
                needs="the product of the sizes to equal the number of ranks",
                fix=f"one of {near}; or start {known if open_axis is None else f'a multiple of {known}'} ranks",
            )
        )


def _known() -> str:
    return f"axes out of {', '.join(AXES)}, domain_w, domain_d and replica, each named once"


def _spec_text(spec: object, *, got: list[str], needs: str, fix: str = 'e.g. "data=2,domain=4"') -> str:
    shown = str(spec) if isinstance(spec, MeshSpec) else repr(spec)
    return explain(f"mesh {shown}: cannot be made.", got=got, needs=needs, fix=fix)


def _pairs(text: object) -> Iterator[tuple[str, int]]:
    if not isinstance(text, str):
        raise SpecError(_spec_text(text, got=[type(text).__name__], needs="a string, mapping or MeshSpec"))
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, equals, size = (p.strip() for p in part.partition("="))
        try:
            number = int(size)
        except ValueError:
            number = 0
        if not equals or number == 0:
            raise SpecError(_spec_text(text, got=[repr(part)], needs="parts like domain=4, sizes not zero"))
        yield axis, number


def _nearest(spec: MeshSpec, world_size: int) -> list[MeshSpec]:
    """List up to three specs that fit the world, the ones nearest to what was asked first."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    further = {axis: size for axis, size in spec.sizes().items() if axis not in AXES}
    further = {axis: max(size, 1) for axis, size in further.items()}
    world_size //= math.prod(further.values()) if world_size % math.prod(further.values()) == 0 else 1
    fits = [
        MeshSpec(world_size // (domain * tensor), domain, tensor, **further)
        for domain in divisors
        for tensor in divisors
        if world_size % (domain * tensor) == 0
    ]

    def distance(other: MeshSpec) -> float:
        pairs: list[tuple[int, int]] = [(size, getattr(other, axis)) for axis, size in spec.sizes().items()]
        return sum(abs(a - b) / max(a, b) for a, b in pairs if a != -1)

    return sorted(fits, key=distance)[:3]


def make_mesh(spec: str | Mapping[str, Any] | MeshSpec | DeviceMesh, device_type: str | None = None) -> DeviceMesh:
    """Make the mesh of this job, with the axes data, domain and tensor.

    Starts the process group if there is none: from torchrun's variables, else as a world of one.

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
            explain(f"axis {axis!r}: not on this mesh.", got=f"axes {names}", needs="one of them", fix=_known())
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
