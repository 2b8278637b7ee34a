"""`torch.compile`: what stands for the mode while Dynamo traces a forward.

Dynamo runs the Python of the model symbolically. The rules are left out of that: a torch function that meets an
activation becomes one node of the graph, a call of ours, which AOTAutograd then runs on fake tensors and takes apart
into the ops that the ranks run. So the rules are the same in both worlds, and compiling costs what they cost.

Invariant: a compiled graph holds nothing of a process but what its guards check: shapes, policies, module paths.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshpar import private, record
from meshpar.errors import ShardingError, explain
from meshpar.spmd import ALWAYS, RANDOM, RULES, Handler, Policy, call, find, under

NODES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each torch function what takes its place in a graph; filled when the first graph is traced."""

DIRECT: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each function of ours that layers call without a torch function, the same."""

_TOLD: list[Policy] = []
"""The policies that graphs name by their number."""


@private.constant_in_graphs
def number_of(policy: Policy) -> int:
    """Give the number by which graphs name a policy."""
    if not NODES:
        private.keep_order("meshpar")
        for function in [*RULES, *private.overridable()]:
            if function not in NODES:
                NODES[function] = private.in_graph(_node(function, call))
        for function in DIRECT:
            DIRECT[function] = private.in_graph(_node(function, _run))
    if policy not in _TOLD:
        _TOLD.append(policy)
    return _TOLD.index(policy)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def direct(function: Handler) -> Handler:
    """Let a function of ours be called by `as_node`."""
    DIRECT[function] = function
    return function


def _node(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def node(told: int, where: str, *args: Any, **kwargs: Any) -> Any:
        with record.inside(where), under(_TOLD[told]):
            return run(function, args, kwargs)

    node.__name__ = f"meshpar_{getattr(function, '__name__', 'function').strip('_')}"
    return node


PLAIN = Policy()


def is_tracing() -> bool:
    """Tell whether Dynamo traces a forward under the rules right here."""
    return torch.compiler.is_compiling() and any(isinstance(mode, Traced) for mode in private.function_modes())


def as_node(function: Callable[..., Any], policy: Policy, *args: Any, **kwargs: Any) -> Any:
    """Call a function of ours as one node of the graph that Dynamo makes."""
    told = number_of(policy)
    return DIRECT[function](told, record.where(), *args, **kwargs)


class Traced(TorchFunctionMode):
    """Be the mode in force while Dynamo traces: it has no `__enter__` of its own, which Dynamo would not follow."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.told = number_of(policy)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, MethodWrapperType):  # an attribute of a tensor; Dynamo cannot look it up in a dict
            return func(*args, **kwargs)
        found: list[DTensor] = []
        find(args, found)
        find(kwargs.values(), found)
        if not found and func in RANDOM:
            _refuse_random(func)
        if found or func in ALWAYS:
            node = NODES.get(func)
            if node is not None:
                return node(self.told, record.where(), *args, **kwargs)
        return func(*args, **kwargs)


def _refuse_random(func: Callable[..., Any]) -> None:
    raise ShardingError(
        explain(
            f"{func}: random numbers of plain arguments under torch.compile.",
            got="a graph that each rank would run with its own generator",
            needs="the same numbers on every rank",
            fix="draw them before the compiled function and hand them in, or from an activation: randn_like(x)",
        )
    )
