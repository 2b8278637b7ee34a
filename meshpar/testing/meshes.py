"""Meshes for tests, made once in each process of the pool."""

from __future__ import annotations

import functools
import math

from torch.distributed.device_mesh import DeviceMesh

from meshpar.mesh import make_mesh
from meshpar.spec import MeshSpec


@functools.lru_cache(maxsize=64)
def mesh_for(spec: str) -> DeviceMesh:
    """Give the mesh of a spec; the same one at every call in a process, so that groups are made once."""
    return make_mesh(spec, "cpu")


def ranks_of(spec: str) -> int:
    """Count the ranks of a spec without open sizes: `"data=1,domain=2,domain_w=2"` has 4."""
    return math.prod(max(size, 1) for size in MeshSpec.parse(spec).sizes().values())
