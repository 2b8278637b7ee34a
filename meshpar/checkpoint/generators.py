"""The random number generators of the ranks, in a checkpoint, and on another mesh.

Invariant: on the mesh that saved, every rank goes on with its own generators. On another mesh, ranks that share a data
coordinate go on with the same ones: those of the first rank that had this coordinate, or, where there was none, with
new ones that follow from rank 0's and the coordinate. Random numbers in a forward are rank 0's everywhere, so that they
go on as if nothing had happened on any mesh.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.mesh import coordinate
from meshpar.rewrite import state_of


def mesh_in(model: nn.Module) -> DeviceMesh | None:
    """Give the mesh of a parallelized model, None for any other."""
    state = state_of(model)
    return None if state is None else state.policy.mesh


def sizes_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Give the sizes of the axes of a mesh."""
    return {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), map(int, mesh.shape), strict=True))


def sample_coordinate(mesh: DeviceMesh | None, rank: int | None = None) -> int:
    """Number the part of the batch that a rank has, this one by default."""
    return 0 if mesh is None else coordinate(mesh, "data", rank)


def generator_states() -> dict[str, Any]:
    """Give the states of the generators of torch, Python and NumPy of this process, as plain values."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return found


def set_generators(states: dict[str, Any]) -> None:
    """Put the generators of this process into states that were saved."""
    torch.set_rng_state(states["torch"])
    random.setstate(_tuple(states["python"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(_tuple(states["numpy"]))


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def collect(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Give what a rank tells of its generators."""
    return {"coordinate": sample_coordinate(mesh), "states": generator_states()}


def restore(told: list[dict[str, Any]], sizes: dict[str, int], mesh: DeviceMesh | None, rank: int) -> None:
    """Set the generators of this rank from what all ranks told when they saved.

    Args:
        told: what `collect` gave on each rank.
        sizes: sizes of the mesh that saved.
        mesh: the mesh of now.
        rank: this rank.
    """
    if sizes == sizes_of(mesh) and rank < len(told):
        set_generators(told[rank]["states"])
        return
    here = sample_coordinate(mesh)
    for other in told:
        if other["coordinate"] == here:
            set_generators(other["states"])
            return
    source = told[0]["states"]["torch"].numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(source + here.to_bytes(8, "big")).digest()[:7], "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
