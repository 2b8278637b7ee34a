"""The private names of torch that meshpar stands on, each with the public name that will replace it.

Invariant: no other module names anything of torch that begins with an underscore.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree

pytree = _pytree
"""Trees of tensors: map, flatten, unflatten (public when `torch.utils.pytree` comes)."""

DYNAMO = "torch._dynamo"
"""The module that DTensor imports at its first op (its public face, `torch.compiler`, does not load it)."""

ITEM = torch.ops.aten._local_scalar_dense.default
"""The aten op behind `item()` (the op has no public name)."""


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten some axes into a one-dimensional mesh (public when `DeviceMesh.flatten` comes)."""
    return mesh[axes]._flatten(name)


def group_by_name(name: str) -> dist.ProcessGroup:
    """Find a process group by its `group_name` (public when custom ops take groups as arguments)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def function_modes() -> list[TorchFunctionMode]:
    """List the torch-function modes in force (no public name is planned)."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


def set_dtensor_handler(op: Any, handler: Callable[..., Any]) -> None:
    """Route one aten op of DTensor to a handler (public when DTensor takes op strategies that refuse)."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def dtensor_handler(op: Any) -> Callable[..., Any] | None:
    """Give the handler that DTensor has for an aten op, if any."""
    return DTensor._op_dispatcher._custom_op_handlers.get(op)


def piece_of(x: DTensor) -> torch.Tensor:
    """Give the piece itself, for a handler below autograd (`to_local` makes a view, above it)."""
    return x._local_tensor


def like(x: DTensor, piece: torch.Tensor) -> DTensor:
    """Make a DTensor that lies as x, for a handler below autograd (`from_local` works above it)."""
    spec, held = x._spec, x._local_tensor
    if piece.dtype != held.dtype or piece.stride() != held.stride():
        held_strides = piece.stride()
        order = sorted(range(piece.dim()), key=lambda d: (-held_strides[d], d))
        strides, step = [1] * piece.dim(), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(x.shape[d], 1)
        meta = TensorMeta(x.shape, tuple(strides), piece.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(piece, spec, requires_grad=piece.requires_grad)


@contextlib.contextmanager
def without_dtensor_handler(op: Any) -> Iterator[None]:
    """Let an aten op of DTensor go its ordinary way inside the block."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    held = handlers.pop(op)
    try:
        yield
    finally:
        handlers[op] = held


def rebound_hook(hook: Any, module: torch.nn.Module) -> Any:
    """Give a state-dict hook that was registered with its module for a copy of the module (no public name)."""
    if not getattr(hook, "with_module", False):
        return hook
    twin = copy.copy(hook)
    twin.module = weakref.ref(module)
    return twin


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather equal pieces (torch 2.13 renamed the function; the old name is what 2.11 has)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


@functools.cache
def wrap_checkpointed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Pass every function given to `torch.utils.checkpoint` through `wrap` first, from now on in this process.

    Public when `checkpoint` keeps the function modes for the recomputation, or takes a hook for all calls.
    """
    module = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator
    apply = module.CheckpointFunction.apply

    @functools.wraps(generator)
    def wrapped_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(fn), *args, **kwargs)

    class Reentrant:
        """Stand where `torch.utils.checkpoint` looks for its autograd function."""

        @staticmethod
        def apply(fn: Callable[..., Any], *args: Any) -> Any:
            return apply(wrap(fn), *args)

    module._checkpoint_without_reentrant_generator = wrapped_generator
    module.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]
