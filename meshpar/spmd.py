"""Deny by default: the mode under which torch functions meet DTensors.

Invariant: inside the mode, a torch function that meets an activation follows a rule of ours, or its inputs are
gathered, which is put in the record and said. Nothing else ever reaches DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshpar import canvas, packed, pieces, private, record, views, weights
from meshpar.errors import ShardingError, explain
from meshpar.gathering import gather_call
from meshpar.layouts import layouts
from meshpar.mesh import is_ours
from meshpar.private import pytree
from meshpar.registry import (
    ALWAYS,
    RANDOM,
    RULES,
    Policy,
    find,
    lay_canvas,
    may_write,
    name_of,
    policy,
    pop,
    push,
    same_numbers,
    targets,
)


class Spmd(TorchFunctionMode):
    """Be the mode in force inside a parallelized model and inside `spmd()`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def __enter__(self) -> Spmd:
        private.wrap_checkpointed(_under_rules)
        private.show_written_parts()
        push(self.policy)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: list[DTensor] = []
        find(args, found)
        if kwargs:
            find(kwargs.values(), found)
        if not found:
            if func in ALWAYS:
                return RULES[func].handler(*args, **kwargs)
            if func in RANDOM:
                return RULES[same_numbers].handler(func, args, kwargs, self.policy.mesh)
            return func(*args, **kwargs)
        ours = [x for x in found if is_ours(x.device_mesh)]
        mesh = ours[0].device_mesh if ours else self._mesh_of_weights(func, found)
        if mesh is None:
            if not record.is_inside() and torch.is_grad_enabled() and weights.computes(func):
                args, kwargs = weights.with_gradients_in_place((args, kwargs))
            return func(*args, **kwargs)
        if len(ours) != len(found):
            args, kwargs = weights.adopted((args, kwargs), mesh)
        if any(x.device_mesh != mesh for x in ours):
            _refuse_meshes(func, ours)
        return (_logged_call if record.is_open() else call)(func, args, kwargs)

    def _mesh_of_weights(self, func: Callable[..., Any], found: list[DTensor]) -> DeviceMesh | None:
        """Give the mesh of the model where a function computes with weights of its tensor plan and nothing else."""
        known = self.policy.mesh is not None and any(weights.is_split(x) for x in found)
        return self.policy.mesh if known and weights.computes(func) else None


def _logged_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that the model calls, and put it in the record with what became of it."""
    before = record.num_gathers()
    result = call(func, args, kwargs)
    status = "gather" if record.num_gathers() > before else "rule"
    record.note_call(name_of(func), status, args, kwargs)
    record.note_step(name_of(func), status, layouts((args, kwargs)), layouts(result))
    return result


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that meets activations: by its rule, else by the gather."""
    result = _laid_call(func, args, kwargs)
    if views.gives_views(func):
        views.remember(func, args, kwargs, result)
    elif args and views.is_linked(args[0]) and may_write(func, args, kwargs) and not _is_plain(func):
        views.after_write(args[0], _laid_call)
    return result


def _is_plain(func: Callable[..., Any]) -> bool:
    return func in RULES and RULES[func].status == "plain"


def _laid_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function; packed activations are taken apart, and a canvas that it writes into is laid out, first."""
    if policy().packed and packed.meets_packed(func, args, kwargs):
        return packed.call_with_packed(func, args, kwargs, _laid_call)
    written = targets(func, args, kwargs)
    for target in written:
        if canvas.is_free(target):
            RULES[lay_canvas].handler(target, func, args)
    if written and not any(isinstance(target, DTensor) for target in written) and func not in RANDOM:
        found: list[DTensor] = []
        find((*args, *kwargs.values()), found)
        if all(pieces.is_constant(x) for x in found):  # means, say, that are kept in a buffer
            args, kwargs = _plain_values((args, kwargs), name_of(func))
            return func(*args, **kwargs)
    return _call(func, args, kwargs)


def _plain_values(tree: Any, op: str) -> Any:
    return pytree.tree_map(lambda x: pieces.full(x, op) if isinstance(x, DTensor) else x, tree)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = RULES.get(func)
    if found is not None:
        if kwargs and not _ALIASES.keys().isdisjoint(kwargs) and not isinstance(func, FunctionType):
            kwargs = {_ALIASES.get(key, key): value for key, value in kwargs.items()}
        return found.handler(*args, **kwargs)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return func(*args, **kwargs)
    return gather_call(func, args, kwargs, why="no rule")


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""The names of numpy that torch takes too."""


def _refuse_meshes(func: Callable[..., Any], ours: list[DTensor]) -> None:
    raise ShardingError(
        explain(
            f"{name_of(func)}: its inputs lie on different meshes.",
            got=[f"{tuple(x.shape)} on mesh {tuple(x.device_mesh.shape)}" for x in ours],
            needs="one mesh for all",
            fix="give the mesh of the model, meshpar.mesh_of(model), to shard_batch",
        )
    )


def is_on() -> bool:
    """Tell whether the mode is in force right here: it is not inside of a rule, nor in a recomputation."""
    return any(isinstance(mode, Spmd) for mode in private.function_modes())


def rules_alone() -> AbstractContextManager[Any]:
    """Run a rule that is called by name as one that is found by a torch function runs: outside of the mode."""
    modes = [] if torch.compiler.is_compiling() else private.function_modes()
    return private.without_innermost_mode() if modes and isinstance(modes[-1], Spmd) else nullcontext()


def _under_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpointed function meet the same rules when autograd runs it again, where no mode is in force."""
    if not is_on():
        return function
    told, label = policy(), record.here("")

    def again(*args: Any, **kwargs: Any) -> Any:
        if is_on():
            return function(*args, **kwargs)
        with record.inside(label.rpartition("|")[0]), Spmd(told):
            return function(*args, **kwargs)

    return again
