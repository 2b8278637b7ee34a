"""Which part of a tensor each rank of a mesh holds: pure integers, for any mesh that can be named.

Invariant: the parts of the ranks that differ along sharding axes alone are disjoint and make up the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor, Shard

from meshpar import private
from meshpar.batch import default_layout
from meshpar.errors import SpecError, explain
from meshpar.intervals import Interval, chunks
from meshpar.spec import MeshSpec

AxesOf = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the axes that shard it, the outer one first."""


@dataclass(frozen=True)
class Cell:
    """Hold what one rank has.

    Args:
        rank: its number in the mesh, the last axis fastest.
        place: its coordinate on each axis.
        part: for each dim of the tensor the interval that it holds.
    """

    rank: int
    place: dict[str, int]
    part: tuple[Interval, ...]

    @property
    def is_empty(self) -> bool:
        """Tell whether the rank holds nothing."""
        return any(a >= b for a, b in self.part)


def cells_of(sizes: Mapping[str, int], axes: AxesOf, shape: Sequence[int]) -> list[Cell]:
    """List what each rank of a mesh holds of a tensor.

    Args:
        sizes: of the axes, in the order of the mesh.
        axes: for each dim the axes that shard it; a dim that several shard is cut by the first, then its parts.
        shape: global shape.

    Example:
        >>> cells_of({"data": 1, "domain": 2}, ((), ("domain",)), (3, 5))[1].part
        ((0, 3), (3, 5))
    """
    found = []
    for rank, where in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        place = dict(zip(sizes, where, strict=True))
        part = []
        for dim, n in enumerate(shape):
            start, stop = 0, n
            for axis in axes[dim]:
                a, b = chunks(stop - start, sizes[axis])[place[axis]]
                start, stop = start + a, start + b
            part.append((start, stop))
        found.append(Cell(rank, place, tuple(part)))
    return found


def read_layout(layout: str | None, sizes: Mapping[str, int], num_dims: int) -> AxesOf:
    """Read a layout string for a mesh that is named by its sizes.

    Raises:
        SpecError: another number of dims, an unknown axis, or an axis named twice.
    """
    tokens = (default_layout(num_dims, list(sizes)) if layout is None else layout).split()
    wrong = [f"unknown axis {token!r}" for token in tokens if token != "_" and token not in sizes]
    wrong += [f"axis {token!r} twice" for token in sorted(set(tokens) - {"_"}) if tokens.count(token) > 1]
    if len(tokens) != num_dims:
        wrong.append(f"{len(tokens)} dims, for a shape of {num_dims}")
    if wrong:
        needs = f"for each dim one of {', '.join(sizes)}, or _"
        raise SpecError(
            explain(f"layout {layout!r}: cannot be shown.", got=wrong, needs=needs, fix='"data _ domain _"')
        )
    return tuple(() if token == "_" else (token,) for token in tokens)


def axes_of_tensor(x: DTensor) -> tuple[dict[str, int], AxesOf]:
    """Give the sizes of the mesh of a DTensor, and for each dim the axes that shard it."""
    names = x.device_mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(x.device_mesh.ndim))
    sizes = dict(zip(names, x.device_mesh.shape, strict=True))
    axes: list[list[str]] = [[] for _ in x.shape]
    for name, placement in zip(names, x.placements, strict=True):
        if isinstance(placement, private.StridedShard):
            got, needs = f"{placement} along {name}", "plain shards"
            fix = "show an activation outside of packed layers"
            raise SpecError(explain("show: this layout has no picture.", got=got, needs=needs, fix=fix))
        if isinstance(placement, Shard):
            axes[placement.dim % x.dim()].append(name)
    return sizes, tuple(map(tuple, axes))


def sizes_of(spec: MeshSpec) -> dict[str, int]:
    """Give the sizes of the axes of a spec, one of -1 being an error.

    Raises:
        SpecError: a size is not known.
    """
    sizes = spec.sizes()
    if -1 in sizes.values():
        got, needs = str(spec), "the size of every axis"
        raise SpecError(explain("show: no number of ranks.", got=got, needs=needs, fix='"data=2,domain=4"'))
    sizes["data"] *= sizes.pop("replica", 1)
    return sizes
