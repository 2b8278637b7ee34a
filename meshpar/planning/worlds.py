"""One process as a rank of any world: a process group whose other ranks are not there, and the ranks worth being.

Invariant: the group is gone when the block ends, whatever happens in it. A group of this process alone, which meshpar
starts where there is no launcher, is set aside for the block; a larger one is never touched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from meshpar import pretend, private
from meshpar.errors import SpecError, explain
from meshpar.runtime import refuse_rank_of_a_job
from meshpar.spec import MeshSpec

MAX_RANKS = 4096
"""The largest world that can be planned for."""


def resolved(spec: str | Mapping[str, int] | MeshSpec, world: int | None) -> tuple[MeshSpec, int]:
    """Give a mesh with all its sizes, and the number of its ranks.

    Args:
        spec: mesh; one size may be -1 where `world` is given.
        world: number of ranks; by default the product of the sizes.

    Raises:
        SpecError: sizes that do not multiply to the world, none for a size of -1, or too many ranks.
    """
    read = MeshSpec.parse(spec)
    if world is None:
        sizes = read.sizes()
        if -1 in sizes.values():
            sizes = {axis: size for axis, size in sizes.items() if size != -1 or axis != "data"}
            if -1 in sizes.values():
                raise _bad(read, "world=64, or a size in the place of -1")
            read = MeshSpec.parse({**sizes, "data": 1})
        world = 1
        for size in read.sizes().values():
            world *= size
    if isinstance(world, bool) or not isinstance(world, int) or not 1 <= world <= MAX_RANKS:
        raise _bad(world, f"world=1 to {MAX_RANKS}")
    return read.resolve(world), world


def _bad(got: object, fix: str) -> SpecError:
    needs = "a number of ranks"
    return SpecError(explain("plan: this world cannot be planned for.", got=repr(got), needs=needs, fix=fix))


@contextlib.contextmanager
def being(rank: int, num_ranks: int) -> Iterator[None]:
    """Be a rank of a world inside the block.

    Raises:
        SpecError: this process is one of several ranks.
    """
    fix = "plan in a process of its own, or call torch.distributed.destroy_process_group() first"
    refuse_rank_of_a_job("plan", needs="a process without a group: the plan makes worlds of its own", fix=fix)
    with private.world_set_aside():
        private.start_fake_group(rank, num_ranks)
        try:
            with pretend.pretending(), private.quick_chunks():
                yield
        finally:
            dist.destroy_process_group()


def rank_of(spec: MeshSpec, where: Mapping[str, int]) -> int:
    """Give the rank at coordinates; those not named are 0."""
    rank = 0
    for axis, size in mesh_sizes(spec).items():
        rank = rank * size + where.get(axis, 0)
    return rank


def mesh_sizes(spec: MeshSpec) -> dict[str, int]:
    """Give the size of each axis of the mesh of a spec, in its order."""
    sizes = spec.sizes()
    sizes["data"] *= sizes.pop("replica", 1)
    return sizes


def differing(spec: MeshSpec) -> list[dict[str, int]]:
    """List the coordinates of the ranks that differ in what they compute: first, middle and last of each axis.

    Ranks that differ along data alone compute the same; they stand at the end.
    """
    ends = {axis: sorted({0, size // 2, size - 1}) for axis, size in mesh_sizes(spec).items() if size > 1}
    split = [axis for axis in ends if axis != "data"]
    found = [dict(zip(split, where, strict=True)) for where in itertools.product(*(ends[axis] for axis in split))]
    return found + [{"data": i} for i in ends.get("data", ()) if i]
