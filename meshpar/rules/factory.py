"""`torch.zeros`, `ones`, `empty` and `full` in a forward: canvases, which activations may be written into.

Invariant: the numbers are those of one process, and nothing is sent. A factory called by user code gives a canvas (see
`meshpar.canvas`) where a plain tensor of real or complex numbers would have come out. Called by torch itself, by
meshpar or by a constructor, for integers and booleans (masks, indices), with `requires_grad`, `out=` or for another
device, it gives what torch gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import canvas, pieces
from meshpar.batch import default_layout, placements_of
from meshpar.gathering import is_split, layout_after
from meshpar.private import pytree
from meshpar.registry import ALWAYS, lay_canvas, policy, rule
from meshpar.rules.selection import read_index, selection
from meshpar.spmd import call

_PLAIN_ONLY = ("out", "names", "layout", "requires_grad", "pin_memory", "memory_format")
"""Arguments with which a factory gives a plain tensor."""


def _called_by_user(frame: FrameType | None) -> bool:
    """Tell whether user code called a factory: FSDP's hooks and torch's own layers run in a forward too."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None or frame.f_code.co_name == "__init__":
        return False  # a constructor makes parameters and buffers
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "meshpar")


def _fitting(placements: tuple[Placement, ...], shape: torch.Size, sizes: tuple[int, ...]) -> list[Placement]:
    """Keep shards of dims that are long enough for all ranks."""
    return [
        p if isinstance(p, Shard) and shape[p.dim] >= n else Replicate() for p, n in zip(placements, sizes, strict=True)
    ]


def _factory(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if func is torch.full:
            args, kwargs = _read_fill(args, kwargs)
        mesh = policy().mesh
        if mesh is None or any(kwargs.get(name) not in (None, False) for name in _PLAIN_ONLY):
            return func(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and not _called_by_user(sys._getframe(1)):
            return func(*args, **kwargs)
        ghost = func(*args, **{**kwargs, "device": "meta"})  # torch's errors
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if not (ghost.is_floating_point() or ghost.is_complex()) or device.type != mesh.device_type:
            return func(*args, **kwargs)
        if compiling:
            # The compiler cannot follow a tensor that changes its layout: guess at once. Any layout is right.
            placements = placements_of(default_layout(ghost.dim()), mesh, ghost.dim())
            lying = _fitting(placements, ghost.shape, tuple(mesh.shape))
            number = _number(func, ghost, kwargs, args)
            piece = number.expand(pieces.local_shape(ghost.shape, mesh, lying)).clone()
            return pieces.whole(piece, mesh, lying, ghost.shape)
        return canvas.blank(_number(func, ghost, kwargs, args), ghost.shape, mesh)

    return handler


def _read_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read out the number to fill with, where it is an activation."""

    def read(x: Any) -> Any:
        return call(torch.Tensor.item, (x,), {}) if isinstance(x, DTensor) else x

    return tuple(read(x) for x in args), {key: read(x) for key, x in kwargs.items()}


def _number(func: Callable[..., Any], ghost: torch.Tensor, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    """Make the one number of a canvas; an empty one holds zeros."""
    device = kwargs.get("device")
    if func is torch.full:
        fill = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
        return torch.full((), fill, dtype=ghost.dtype, device=device)
    return (torch.ones if func is torch.ones else torch.zeros)((), dtype=ghost.dtype, device=device)


for _function in (torch.zeros, torch.ones, torch.empty, torch.full):
    rule(_function)(_factory(_function))
    ALWAYS.add(_function)


# the first write


@rule(lay_canvas, status="plain")
def lay_for(target: DTensor, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Lay out a free canvas as what is about to be written into it; values that all ranks hold leave it free."""
    values = [x for x in pytree.tree_leaves(args) if isinstance(x, DTensor) and x is not target and is_split(x)]
    if not values:
        canvas.lay(target, pieces.replicated(target.device_mesh))
    elif func is torch.Tensor.__setitem__ and args[2] is values[-1]:
        canvas.lay(target, _as_written(target, args[1], args[2]))
    else:
        canvas.lay(target, layout_after(max(values, key=torch.Tensor.numel), target))


def _as_written(target: DTensor, index: Any, value: DTensor) -> list[Placement]:
    """Give the placements in which a value that goes into an index lies where it is to go."""
    entries = read_index(index, target.dim())
    if isinstance(entries, str):
        return layout_after(value, target)
    plan = selection(target.shape, entries)
    home = {out - len(plan.shape) + value.dim(): dim for dim, out in plan.to.items()}
    lying: list[Placement] = []
    for placement in value.placements:
        dim = home.get(placement.dim) if isinstance(placement, Shard) else None
        fits = dim is not None and isinstance(plan.by_dim[dim], slice) and Shard(dim) not in lying
        lying.append(Shard(dim) if fits and dim is not None else Replicate())
    return lying
