"""From pieces to DTensors and back, quicker than `from_local` and `to_local`.

Invariant: the same as the public two, with the same gradients; only that how a DTensor lies is worked out once for
each shape. What a compiler follows takes the public way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

Placements = tuple[Placement, ...]

_MOST = 65_536
_SPECS: dict[tuple[object, ...], DTensorSpec] = {}


def spec_of(
    mesh: DeviceMesh, placements: Placements, shape: Sequence[int], stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Describe how a DTensor lies (public when `from_local` takes such a description)."""
    key = (id(mesh), placements, shape, stride, dtype)
    found = _SPECS.get(key)
    if found is None:
        found = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))
        if len(_SPECS) >= _MOST:
            _SPECS.clear()
        _SPECS[key] = found  # it holds the mesh, whose id stays its own
    return found


def _reduced(placements: Placements) -> Placements:
    """Give the placements of the gradient: of a `Partial` it is on all ranks."""
    if any(p.is_partial() for p in placements):
        return tuple(Replicate() if p.is_partial() else p for p in placements)
    return placements


def _made(piece: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    # `DTensor(...)` would run an `__init__` that does nothing, and asks the compiler for leave first.
    made: DTensor = DTensor.__new__(DTensor, piece.view_as(piece), spec, requires_grad=requires_grad)
    return made


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, spec):  # type: ignore[no-untyped-def]
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return _made(piece, spec, requires_grad=piece.requires_grad)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        if g is None:
            return None, None
        wanted = _reduced(ctx.spec.placements)
        if g._spec.placements == wanted:
            return g.to_local(), None
        target = DTensorSpec(ctx.spec.mesh, wanted, tensor_meta=g._spec.tensor_meta)
        return redistribute_local_tensor(g._local_tensor, g._spec, target), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, placements):  # type: ignore[no-untyped-def]
        ctx.spec, ctx.placements = x._spec, placements
        ctx.set_materialize_grads(False)
        piece = x._local_tensor
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        if g is None:
            return None, None
        spec = ctx.spec
        placements = ctx.placements if ctx.placements is not None else _reduced(spec.placements)
        stride = global_stride(g, spec.shape)
        return enter(g, spec_of(spec.mesh, placements, spec.shape, stride, g.dtype)), None


def enter(piece: Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor of this rank's piece, as `DTensor.from_local` does."""
    if piece.requires_grad:
        if torch.is_grad_enabled():
            return _Enter.apply(piece, spec)  # type: ignore[no-any-return]
        piece = piece.detach()
    return _made(piece, spec, requires_grad=False)


def leave(x: DTensor, placements: Placements | None = None) -> Tensor:
    """Give this rank's piece, as `to_local(grad_placements=placements)` does."""
    if torch.compiler.is_compiling() or type(x) is not DTensor or getattr(x, "_is_param", False):
        return x.to_local(grad_placements=placements)
    if not torch.is_grad_enabled():
        return x._local_tensor
    if not x.requires_grad:
        return x._local_tensor.view_as(x._local_tensor)
    return _Leave.apply(x, placements)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16384)
def _strides(shape: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def global_stride(piece: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Give the strides of a global tensor whose dims lie in memory in the order of a local piece."""
    if piece.is_contiguous():
        return _strides(tuple(shape), None)
    strides = piece.stride()
    return _strides(tuple(shape), tuple(sorted(range(piece.dim()), key=lambda d: (-strides[d], d))))
