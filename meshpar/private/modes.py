"""Modes and the compiler: what is in force, what a graph holds, and what must stay outside of it.

Invariant: outside of graphs and plans every function here is what it wraps.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch._C._dynamo import eval_frame
from torch._library.effects import EffectType
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshpar import pretend

Answer = TypeVar("Answer")

pytree = _pytree
"""Trees of tensors: map, flatten, unflatten (public when `torch.utils.pytree` comes)."""


def map_output(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of what a forward returned; what it changes nothing in stays the same object.

    A shape stays a `torch.Size`, which pytree loses. Public when `torch.utils.pytree` comes.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))
    mapped = [function(x) for x in leaves]
    same = all(a is b for a, b in zip(leaves, mapped, strict=True))
    return tree if same else pytree.tree_unflatten(mapped, spec)


DispatchMode = TorchDispatchMode
"""A mode that sees every op (public in all but the name of its module)."""


DYNAMO = "torch._dynamo"
"""The module that DTensor imports at its first op (its public face, `torch.compiler`, does not load it)."""


def function_modes() -> list[TorchFunctionMode]:
    """List the torch-function modes in force (no public name is planned)."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


without_innermost_mode = _pop_mode_temporarily
"""Put the innermost torch-function mode out of force for a while (public when modes can be left out)."""


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


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo run a function for real while it traces, and take the result as a constant.

    This is what `torch._dynamo.assume_constant_result` does, without the second that the import of Dynamo takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be one node of Dynamo's graphs: `torch.compiler.allow_in_graph`, which is public."""
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(function)
    return allowed


def overridable() -> list[Callable[..., Any]]:
    """List the torch functions that modes see, but for the getters of attributes."""
    return [f for f in torch.overrides.get_testing_overrides() if not isinstance(f, types.MethodWrapperType)]


def for_real(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of plain numbers that works with tensors inside, on real ones even in a trace or a plan.

    Public when `torch.compiler` can leave the modes by which it traces.
    """
    if not (torch.compiler.is_compiling() or pretend.is_on()):
        return function(*args)
    with _disable_current_modes():
        return function(*args)


def asked_once(function: Callable[..., Answer]) -> functools._lru_cache_wrapper[Answer]:
    """Keep the answers of a function that asks torch for a shape, or for its error, with tensors that stand for others.

    No mode sees the question: who counts ops, as selective checkpointing does, would meet it in the forward and miss it
    in the recomputation, when the answer is known. Public when `torch.utils` can leave dispatch modes.
    """

    @functools.wraps(function)
    def unseen(*args: Any) -> Answer:
        with _disable_current_modes(), torch.no_grad():
            return function(*args)

    return functools.lru_cache(maxsize=4096)(unseen)


def constant(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give a real tensor, made with `for_real`, to a computation that a compiler may be tracing."""
    if not torch.compiler.is_compiling():
        return x.to(device)
    return torch.tensor(for_real(x.tolist), dtype=x.dtype, device=device)


def run_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the frame of a function run as it is under `torch.compile`; what it calls is compiled.

    Public when `torch.compiler.disable(recursive=False)` does not import Dynamo.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@run_as_it_is
def compiles(module: torch.nn.Module) -> bool:
    """Tell whether a call of a module is being compiled, or runs compiled: by either way to ask for it."""
    return (
        torch.compiler.is_compiling()
        or module._compiled_call_impl is not None
        or eval_frame.get_eval_frame_callback() is not None
    )


@run_as_it_is
def outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without Dynamo looking at its frames."""
    callback = eval_frame.set_eval_frame(None)
    try:
        return function(*args)
    finally:
        eval_frame.set_eval_frame(callback)


def keep_static(x: torch.Tensor) -> None:
    """Let the sizes of an input be constants of its graph."""
    torch._dynamo.mark_static(x)


def keep_order(namespace: str) -> None:
    """Let the ops of a namespace run in the order of the program in compiled code, all of them.

    They send: what a rank left out because it needs no result of it, or did in another order, would be a hang. Public
    when `torch.library` lets an op name its effects.
    """
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            torch.library._register_effectful_op(name.partition(".")[0], EffectType.ORDERED)
