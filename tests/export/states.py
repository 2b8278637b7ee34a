"""State dicts of tensors that lie in every way, made on each rank from numbers that all know."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshpar import private
from meshpar.testing import mesh_for

FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "int8", "uint8", "int16", "int32", "int64", "bool", "complex64")
SHAPES = ((8, 4, 4), (7, 5, 3), (1, 2, 2), (3, 1, 9), (0, 3, 2), (2, 6, 0))

S, R = Shard, Replicate


def SS(dim, factor):
    return private.StridedShard(dim, split_factor=factor)


# Over which axes, and how; a tensor over fewer than all axes has siblings.
LAYOUTS = {
    "replicated": ("data tensor", (R(), R())),
    "rows": ("data tensor", (S(0), R())),
    "columns": ("data tensor", (R(), S(1))),
    "last": ("data tensor", (R(), S(2))),
    "rows and columns": ("data tensor", (S(0), S(1))),
    "columns and rows": ("data tensor", (S(1), S(0))),
    "nested": ("data tensor", (S(0), S(0))),
    "strided": ("data tensor", (SS(0, 2), S(0))),
    "strided columns": ("data tensor", (SS(1, 2), S(1))),
    "disjoint": ("data tensor", (SS(0, 2), R())),
    "disjoint columns": ("data tensor", (R(), SS(1, 3))),
    "disjoint twice": ("data tensor", (SS(0, 2), SS(1, 2))),
    "tensor axis alone": ("tensor", (S(0),)),
    "data axis alone": ("data", (S(1),)),
    "one axis, replicated": ("data", (R(),)),
}


def numbers(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Give the whole of a tensor, any bits at all, as integers of the size of its elements."""
    item = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (*shape, item), dtype=torch.uint8, generator=generator)
    holder = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]
    return data.view(holder).reshape(shape) if data.numel() else torch.empty(shape, dtype=holder)


def lay(whole: Tensor, dtype: torch.dtype, axes: str, placements, mesh: DeviceMesh) -> DTensor:
    """Lay a tensor of integers over a mesh, as one of a dtype; torch itself cuts it."""
    own = mesh[tuple(axes.split())]
    x = distribute_tensor(whole, own, placements, src_data_rank=None)
    piece = x.to_local().contiguous().view(dtype)
    return DTensor.from_local(piece, own, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def wanted() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name the tensors of the large state dict, in its order."""
    found = {}
    for i, layout in enumerate(LAYOUTS):
        for j, dtype in enumerate(DTYPES):
            found[f"{layout}.{dtype}"] = (SHAPES[(i + j) % len(SHAPES)], getattr(torch, dtype))
    for dtype in DTYPES:
        found[f"plain.{dtype}"] = ((5, 3), getattr(torch, dtype))
        found[f"number.{dtype}"] = ((), getattr(torch, dtype))
    found["replicated number"] = ((), torch.float32)
    found["transposed"] = ((6, 4), torch.float32)
    found["transposed piece"] = ((8, 4), torch.bfloat16)
    found["every second"] = ((4, 3), torch.int16)
    found["conjugated"] = ((3, 2), torch.complex64)
    for rank in range(4):
        found[f"only on {rank}"] = ((3, rank), torch.float32)
    for first in (0, 2):
        found[f"only on {first} and {first + 1}"] = ((5, 2), torch.float16)
    return found


def whole_state() -> dict[str, Tensor]:
    """Give what one process has."""
    return {name: numbers(name, shape, dtype).view(dtype) for name, (shape, dtype) in wanted().items()}


def strange(name: str, whole: Tensor, mesh: DeviceMesh, dtype: torch.dtype) -> Tensor | None:
    """Make the tensors that lie in their own way."""
    rank = dist.get_rank()
    if name == "transposed":
        return whole.view(dtype).t().contiguous().t()
    if name == "transposed piece":
        piece = whole.view(dtype).chunk(2)[mesh.get_local_rank("data")].t().contiguous().t()
        assert not piece.is_contiguous()
        return DTensor.from_local(piece, mesh["data"], [Shard(0)], run_check=False, shape=whole.shape, stride=(1, 8))
    if name == "every second":
        return torch.stack([whole, whole + 1], dim=1).flatten(0, 1)[::2].view(dtype)
    if name == "conjugated":
        return whole.view(dtype).conj().resolve_conj().conj()
    if " and " in name:
        return lay(whole, dtype, "tensor", (Shard(0),), mesh) if str(rank) in name else None
    return whole.view(dtype) if str(rank) in name else None


def large_state(mesh_spec: str = "data=2,tensor=2", select: Callable[[str], bool] = bool) -> dict[str, Tensor]:
    """Give what this rank has of the large state dict."""
    mesh = mesh_for(mesh_spec)
    state: dict[str, Tensor] = {}
    for name, (shape, dtype) in wanted().items():
        if not select(name):
            continue
        whole = numbers(name, shape, dtype)
        kind = name.rpartition(".")[0]
        if kind in LAYOUTS:
            state[name] = lay(whole, dtype, *LAYOUTS[kind], mesh)
        elif kind in ("plain", "number"):
            state[name] = whole.view(dtype)
        elif name == "replicated number":
            state[name] = lay(whole, dtype, "data tensor", (R(), R()), mesh)
        elif (x := strange(name, whole, mesh, dtype)) is not None:
            state[name] = x
    return state
