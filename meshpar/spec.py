"""`MeshSpec`: the size of each axis of a mesh, read and checked before there is a mesh.

Invariant: a value, and pure functions of it: nothing here knows of ranks, devices or groups. Axis order is data,
domain, tensor; a second and a third domain axis, for longitude and depth, stand beside the first where they were asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.config import read_config
from meshpar.errors import SpecError, explain

AXES = ("data", "domain", "tensor")
"""The axes that every mesh has, in order; size 1 where unused."""

DOMAIN = {"domain_d": -3, "domain": -2, "domain_w": -1}
"""The axes that can share out space, in mesh order, and the dim that each shards in a tensor of images or volumes."""

FURTHER = ("replica", "domain_d", "domain_w")
"""What a spec may name besides; `replica` divides the axis data, for parameters alone."""


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
            raise SpecError(_spec_text(text, got=[f"unknown axis {u!r}" for u in unknown], needs=known_axes()))
        names = [axis for axis, _ in pairs]
        twice = sorted({axis for axis in names if names.count(axis) > 1})
        if twice:
            raise SpecError(_spec_text(text, got=[f"{axis} named twice" for axis in twice], needs=known_axes()))
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


def known_axes() -> str:
    """Say which axes there are, for errors."""
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
