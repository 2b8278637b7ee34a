"""Meshes for tests, made once in each process of the pool."""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh

from meshpar.mesh import make_mesh


@functools.lru_cache(maxsize=64)
def mesh_for(spec: str) -> DeviceMesh:
    """Give the mesh of a spec; the same one at every call in a process, so that groups are made once."""
    return make_mesh(spec, "cpu")
