"""Scales of one block: (1, n, m) in a model, (n, m) in a checkpoint of Hugging Face, wherever their rows lie."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar import private
from meshpar.intervals import chunks


def of_two_dims(x: Tensor) -> Tensor:
    """Take the first dim of a scale away, of size 1.

    Communication:
        Where an axis cuts that dim, its one rank with rows hands them to the others, who keep a chunk each.
    """
    if not isinstance(x, DTensor):
        return x.squeeze(0)
    mesh, piece = x.device_mesh, private.piece_of(x).detach()
    where = mesh.get_coordinate()
    cutting = [i for i, p in enumerate(x.placements) if getattr(p, "dim", None) == 0]
    placements: list[Any] = [Replicate() if i in cutting else _shifted(p) for i, p in enumerate(x.placements)]
    if where is not None and any(mesh.size(i) > 1 for i in cutting):
        piece = piece if piece.shape[0] else piece.new_empty((1, *piece.shape[1:]))
        home = piece.device
        piece = piece.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        for i in cutting:
            if mesh.size(i) > 1:
                # as bytes: gloo does not know the dtypes of scales
                dist.broadcast(piece.view(-1).view(torch.uint8), group=mesh.get_group(i), group_src=0)
        first = cutting[0]
        if not any(getattr(p, "dim", None) == 0 for p in placements):
            a, b = chunks(piece.shape[1], mesh.size(first))[where[first]]
            piece = piece[:, a:b].clone()
            placements[first] = Shard(0)
        piece = piece.to(home)
    piece = piece.squeeze(0) if where is not None else piece.new_empty(0)
    shape = x.shape[1:]
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))


def _shifted(placement: Any) -> Any:
    """Give the placement of what is left when the first dim goes."""
    if isinstance(placement, private.StridedShard):
        return private.StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    return Shard(placement.dim - 1) if isinstance(placement, Shard) else placement
