"""`fully_shard`: its hooks, its shards, and its collectives.

Invariant: what `fully_shard` does stays what it does; it is only told when, and asked what it holds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group


def rebound_hook(hook: Any, module: torch.nn.Module) -> Any:
    """Give a state-dict hook that was registered with its module for a copy of the module (no public name)."""
    if not getattr(hook, "with_module", False):
        return hook
    twin = copy.copy(hook)
    twin.module = weakref.ref(module)
    return twin


def new_hooks(
    module: torch.nn.Module,
    make: Callable[[], Any],
    before: Callable[[Callable[..., Any]], Callable[..., Any]],
    after: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap the hooks before and after the forward that `make` registers on a module."""
    tables = ((module._forward_pre_hooks, before), (module._forward_hooks, after))
    old = [set(table) for table, _ in tables]
    make()
    for (table, wrap), known in zip(tables, old, strict=True):
        for key in set(table) - known:
            table[key] = wrap(table[key])


def pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """List what runs before the forward of a module (no public name is planned)."""
    return list(module._forward_pre_hooks.values())


@functools.cache
def keep_missing_gradients() -> None:
    """Let the hooks of `fully_shard` pass on that an input of a unit has no gradient, from now on in this process.

    They make zeros of it, plain ones, which nothing can add to the gradients of an activation (torch 2.13). Public when
    they do not.
    """
    hooked = _fsdp_param_group.RegisterPostBackwardFunction
    name = "setup_context" if "setup_context" in vars(hooked) else "forward"
    told = getattr(hooked, name)

    @functools.wraps(told)
    def wrapped(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return told(ctx, *args)

    setattr(hooked, name, staticmethod(wrapped))


@functools.cache
def name_failures_of_fully_shard(
    naming: Callable[[Sequence[dist.ProcessGroup], str, str], contextlib.AbstractContextManager[None]],
) -> None:
    """Run each collective of `fully_shard` inside `naming(groups, axes, label)`, from now on in this process.

    Public as `set_custom_all_gather` and `set_custom_reduce_scatter` for two of them; whole when the sum over copies
    can be given, too.
    """
    ops = {
        "foreach_all_gather": (("group",), "all-gather of parameters"),
        "foreach_all_gather_copy_out": (("group",), "all-gather of parameters"),
        "foreach_reduce": (("reduce_scatter_group", "all_reduce_group"), "sum of gradients"),
    }

    def wrapped(function: Callable[..., Any], given: tuple[str, ...], op: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            told = signature.bind(*args, **kwargs).arguments
            param = next(iter(told["fsdp_params"]), None)
            if param is None:
                return function(*args, **kwargs)
            mesh, path = param.mesh_info.mesh, (getattr(param, "_param_fqn", None) or "").rpartition(".")[0]
            groups = [g for g in (told.get(name) for name in given) if g is not None and g.size() > 1]
            axes = [axis for axis in mesh.mesh_dim_names or () if mesh.get_group(axis) in groups]
            with naming(groups, " or ".join(axes), f"{path}|fully_shard ({op})"):
                return function(*args, **kwargs)

        return inside

    for name, (given, op) in ops.items():
        setattr(_fsdp_param_group, name, wrapped(getattr(_fsdp_param_group, name), given, op))


def replaced_parameters(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """List what stands where `fully_shard` keeps the parameters of a unit, and is not of its making."""
    found = []
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        for param in group.fsdp_params:
            info = param._module_info
            held = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for owner, name in held:
                value = owner._parameters.get(name)
                if (
                    value is not None
                    and value is not param.sharded_param
                    and value is not getattr(param, "_unsharded_param", None)
                ):
                    found.append((owner, name, value))
    return found


def refresh_shards(module: torch.nn.Module) -> None:
    """Let the units of `fully_shard` take over parameters that were put in the place of theirs.

    Public as a side effect of `to_empty` and of `load_state_dict(assign=True)`, which break ties.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.reset_sharded_param()


def kept_on_cpu(module: torch.nn.Module) -> set[int]:
    """Give the ids of the parameters that units of `fully_shard` keep on the CPU (no public name is planned)."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return {id(param.sharded_param) for group in groups for param in group.fsdp_params if param.offload_to_cpu}


def recipe_for_all_below(module: torch.nn.Module) -> Callable[[], None] | None:
    """Give what sets initial values in a module of torch and in those below it (public as `reset_parameters`, else)."""
    if isinstance(module, torch.nn.MultiheadAttention | torch.nn.Transformer):
        return module._reset_parameters
    return None
