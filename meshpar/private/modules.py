"""What torch keeps in a module: parameters, buffers and hooks by name.

Invariant: no hook and no `__setattr__` of a module is set off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint


def replaced(
    held: Sequence[tuple[torch.nn.Module, str, torch.Tensor]],
) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """List what stands where modules held parameters, if it is something else."""
    now = [(module, name, module._parameters.get(name), p) for module, name, p in held]
    return [(module, name, value) for module, name, value, p in now if value is not None and value is not p]


def holds_parameter(module: torch.nn.Module, name: str) -> bool:
    """Tell whether a module has a parameter of its own of a name, without asking for it."""
    return name in module._parameters


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Give where a module keeps its parameters by name (no public name is planned)."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Give where a module keeps its buffers by name (no public name is planned)."""
    return module._buffers


def wrap_pre_hooks(module: torch.nn.Module, wrap: Callable[..., Any]) -> None:
    """Put other functions in the place of the hooks that run before a forward (no public name is planned)."""
    hooks = module._forward_pre_hooks
    hooks.update({key: wrap(hook) for key, hook in hooks.items()})


def put_parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter, as `torch.func.functional_call` does for a call."""
    module._parameters[name] = value  # type: ignore[assignment]


def fill_hollow(model: torch.nn.Module) -> None:
    """Give memory without values to what a model has on the meta device, in place (`to_empty` would empty all)."""
    model._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x)
