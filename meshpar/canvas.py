"""Canvases: constant tensors made in a forward, `torch.zeros(shape)` and its kin, that activations may be written into.

A model says `out = torch.zeros(B, C, H, W)` and then `out[:, :, :8] = y`. The name `out` cannot be bound to another
tensor, so that the factory must give an activation; how it is to be shared out is known only at the write. Until then a
canvas is one number, which stands for all of them on every rank; with the first activation that is written into it, it
takes the layout of that, without communication.

Invariant: a canvas is a DTensor like any other, right under every rule. That it is one number, or still free to take
any layout, is known to this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshpar import pieces, private

_NUMBER = "_meshpar_canvas"
"""The one number of a canvas without memory; None for one that has memory, whole on every rank, and no gradient yet."""


def blank(number: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """Make a canvas.

    Args:
        number: plain tensor without dims.
        shape: global shape.
        mesh: mesh of the model.
    """
    made = pieces.whole(number.expand(tuple(shape)), mesh, pieces.replicated(mesh), shape)
    setattr(made, _NUMBER, number)
    return made


def is_free(x: Any) -> bool:
    """Tell whether a tensor is a canvas into which nothing sharded was written yet, or a view of a blank one."""
    if not isinstance(x, DTensor) or torch.compiler.is_compiling():
        return False
    return _NUMBER in x.__dict__ or (x.dim() > 0 and not any(private.piece_of(x).stride()) and x.numel() > 1)


def is_blank(x: DTensor) -> bool:
    """Tell whether a canvas is one number still."""
    return not torch.compiler.is_compiling() and x.__dict__.get(_NUMBER) is not None


def lay(x: DTensor, placements: Sequence[Placement]) -> None:
    """Give a free canvas memory for this rank's piece of it, in a layout; one that nothing shards leaves it free."""
    mesh = x.device_mesh
    marked = _NUMBER in x.__dict__
    number: Tensor | None = x.__dict__.pop(_NUMBER, None)
    split = any(p.is_shard() and mesh.size(axis) > 1 for axis, p in enumerate(placements))
    if not marked:  # a view of a blank one: where it lies is what its base will be told
        private.lay(x, pieces.local(x).clone(), x.placements)
    elif x.requires_grad:
        return
    elif number is not None:
        private.lay(x, number.expand(pieces.local_shape(x.shape, mesh, placements)).clone(), placements)
    elif split:
        private.lay(x, pieces.cut(pieces.local(x), mesh, placements).clone(), placements)
    if marked and not split:
        setattr(x, _NUMBER, None)


def mapped(x: DTensor, func: Callable[[Tensor], Any]) -> Any:
    """Run a function that converts elements on the one number of a blank canvas."""
    number: Tensor = x.__dict__[_NUMBER]
    found = func(number)
    if found is number:
        return x
    return blank(found, x.shape, x.device_mesh) if isinstance(found, Tensor) else found
