"""`torch.compile`: what stands for the mode while Dynamo traces a forward.

Dynamo runs the Python of the model symbolically. The rules are left out of that: a torch function that meets an
activation becomes one node of the graph, a call of ours, which AOTAutograd then runs on fake tensors and takes apart
into the ops that the ranks run. So the rules are the same in both worlds, and compiling costs what they cost.

Invariant: a compiled graph holds nothing of a process but what its guards check: shapes, policies, module paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshpar import private, record
from meshpar.errors import ShardingError, explain
from meshpar.registry import ALWAYS, RANDOM, RULES, Handler, Policy, find, name_of, under
from meshpar.spmd import call

NODES: list[Callable[..., Any]] = []
"""What takes the place of torch functions in a graph; filled when the first graph is traced."""

DIRECT: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each function of ours that layers call without a torch function, the same."""

_NODE_OF: dict[Callable[..., Any], int] = {}
"""For each torch function the place of its node in `NODES`."""

_TOLD: list[Policy] = []
"""The policies that graphs name by their number."""


@private.constant_in_graphs
def number_of(policy: Policy) -> int:
    """Give the number by which graphs name a policy."""
    if not NODES:
        _make_nodes()
    if policy not in _TOLD:
        _TOLD.append(policy)
    return _TOLD.index(policy)


@private.constant_in_graphs
def number_of_new(on_gather: str, mesh: DeviceMesh | None) -> int:
    """Give the number of a policy that a graph itself sets up."""
    told: int = number_of(Policy(on_gather=on_gather, mesh=mesh))
    return told


def _make_nodes() -> None:
    private.keep_order("meshpar")
    for function in dict.fromkeys([*RULES, *private.overridable()]):
        if function not in RULES or RULES[function].status != "plain":
            _NODE_OF[function] = len(NODES)
            NODES.append(private.in_graph(_node(function, call)))
    for function in DIRECT:
        DIRECT[function] = private.in_graph(_node(function, _run))


@private.constant_in_graphs
def node_of(function: Callable[..., Any]) -> int:
    """Give the place in `NODES` of a torch function, -1 for one that only looks at what a tensor is.

    Dynamo knows those; others it would inline, where they are Python, or look up by an identity of its own.
    """
    return _NODE_OF.get(function, -1)


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

    def __init__(self, told: int) -> None:
        super().__init__()
        self.told = told

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: list[DTensor] = []
        find(args, found)
        find(kwargs.values(), found)
        if not found and (drawn := random_name(func)) and _draws(drawn, args, kwargs):
            refuse_random(drawn)
        if found or is_always(func):
            at = node_of(func)
            if at >= 0:
                return NODES[at](self.told, record.where(), *args, **kwargs)
        return func(*args, **kwargs)


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a random function of plain arguments draws: not in eval mode, nor with a probability of zero."""
    if "dropout" in name:
        return bool(kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)))
    if name.endswith("scaled_dot_product_attention"):
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return True


@private.constant_in_graphs
def random_name(function: Callable[..., Any]) -> str:
    """Name a function that draws random numbers from plain arguments; "" for any other."""
    return name_of(function) if function in RANDOM else ""


@private.constant_in_graphs
def is_always(function: Callable[..., Any]) -> bool:
    """Tell whether the rule of a function is asked also where all arguments are plain."""
    return function in ALWAYS


def refuse_random(op: str) -> NoReturn:
    """Say that a graph cannot draw random numbers.

    Raises:
        ShardingError: always.
    """
    raise ShardingError(
        explain(
            f"{op}: random numbers under torch.compile.",
            got="a graph that each rank would run with its own generator, or with the numbers of the trace",
            needs="numbers that the ranks agree on, new ones at each call",
            fix="draw them before the compiled function and hand them in; or compile in eval mode, without dropout",
        )
    )
