"""The registry of rules, the policy in force, and what a call of a torch function tells about itself.

Invariant: the registry is filled when the package is imported and never after; the policies in force are kept for each
thread. No function here looks at numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import resolve_name

from meshpar import private
from meshpar.errors import SpecError, explain

Handler = TypeVar("Handler", bound=Callable[..., Any])


ON_GATHER = ("warn", "error", "allow")


@dataclass(frozen=True)
class Rule:
    """Hold what is done for one torch function.

    Args:
        handler: called with the arguments of the function.
        status: "rule" or "plain" (reads no data, or runs before any sharding matters).
    """

    handler: Callable[..., Any]
    status: str


RULES: dict[Callable[..., Any], Rule] = {}
"""What is done for each torch function; whatever is missing here is gathered."""


ALWAYS: set[Callable[..., Any]] = set()
"""Functions whose rule is asked also where all arguments are plain: torch hands them on incompletely to modes."""


RANDOM: set[Callable[..., Any]] = set()
"""Functions that draw random numbers from plain arguments: all ranks must draw the same."""


@dataclass(frozen=True)
class Policy:
    """Hold what a mode was asked to do.

    Args:
        on_gather: "warn" once per call site, "error", or "allow".
        mesh: mesh of the model, where one is known.
        batch_statistics: "global", or "data-local" for statistics that stay within a data rank.
        packed: whether activations may lie in the packed layout (see `meshpar.packed`).
    """

    on_gather: str = "warn"
    mesh: DeviceMesh | None = None
    batch_statistics: str = "global"
    packed: bool = False

    def __post_init__(self) -> None:
        if self.on_gather not in ON_GATHER:
            raise SpecError(
                explain(
                    "on_gather: unknown.",
                    got=repr(self.on_gather),
                    needs=f"one of {ON_GATHER}",
                    fix='on_gather="warn"',
                )
            )
        if self.batch_statistics not in ("global", "data-local"):
            raise SpecError(
                explain(
                    "batch_statistics: unknown.",
                    got=repr(self.batch_statistics),
                    needs='"global" or "data-local"',
                    fix='batch_statistics="global"',
                )
            )


_POLICIES = threading.local()


def policy() -> Policy:
    """Give the policy of the innermost mode of this thread, the default one outside of any."""
    stack: list[Policy] = getattr(_POLICIES, "stack", [])
    return stack[-1] if stack else Policy()


def push(told: Policy) -> None:
    """Put a policy in force in this thread, until `pop`."""
    if not hasattr(_POLICIES, "stack"):
        _POLICIES.stack = []
    _POLICIES.stack.append(told)


def pop() -> None:
    """Put the policy before the last one back in force."""
    _POLICIES.stack.pop()


@contextlib.contextmanager
def under(told: Policy) -> Iterator[None]:
    """Let a policy be in force inside the block, for rules that run without a mode, in a graph."""
    push(told)
    try:
        yield
    finally:
        pop()


def rule(*functions: Callable[..., Any], status: str = "rule") -> Callable[[Handler], Handler]:
    """Register a handler for torch functions."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            assert function not in RULES, f"two rules for {function}"
            RULES[function] = Rule(handler, status)
        return handler

    return register


def functions(*names: str, spaces: Iterable[Any] = ()) -> list[Callable[..., Any]]:
    """Find the torch functions of some names: in torch, as tensor methods, in torch.nn.functional, torch.special."""
    found: dict[Callable[..., Any], None] = {}
    modules = (torch, torch.nn.functional, torch.special, torch.linalg)
    for name in names:
        # A module has an __eq__ too, of modules.
        for space in (*spaces, torch.Tensor, *(() if name.startswith("__") else modules)):
            function = getattr(space, name, None)
            if callable(function):
                found[function] = None
    return list(found)


def find(items: Iterable[Any], found: list[DTensor]) -> None:
    """Collect the DTensors in arguments, and in lists, tuples and dicts among them."""
    for item in items:
        if isinstance(item, DTensor):
            found.append(item)
        elif type(item) in (list, tuple):
            find(item, found)
        elif type(item) is dict:
            find(item.values(), found)


def name_of(func: Callable[..., Any]) -> str:
    """Name a torch function as users write it."""
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")


def same_numbers(*args: Any, **kwargs: Any) -> Any:
    """Stand in the registry for the handler of random functions on plain arguments (see `rules.random`)."""
    raise NotImplementedError


def lay_canvas(target: DTensor, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Stand in the registry for what lays out a canvas before the first write into it (see `rules.factory`)."""
    raise NotImplementedError


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Tell whether the name of a function says that it writes into its first argument."""
    name = getattr(func, "__name__", "").partition(".")[0]  # aten functions have the overload after it
    if name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE):
        return True
    return name.endswith("_") and not name.endswith("__")


_NOT_IN_PLACE = ("__index__", "__int__", "__invert__", "__iter__", "__init__", "__instancecheck__")


@functools.lru_cache(maxsize=1024)
def inplace_position(func: FunctionType) -> int | None:
    """Give the position of the argument `inplace`: other arguments may be True for reasons of their own."""
    names = list(inspect.signature(func, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def may_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into its first argument: by its name, or by `inplace`, which may be positional."""
    if writes_in_place(func) or kwargs.get("inplace") or func in private.PART_SETTERS:
        return True
    at = inplace_position(func) if isinstance(func, FunctionType) else None
    return at is not None and len(args) > at and bool(args[at])


def targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Give the tensors that a call writes into."""
    if kwargs and (out := kwargs.get("out")) is not None:
        return tuple(out) if isinstance(out, tuple | list) else (out,)
    return (args or tuple(kwargs.values()))[:1] if may_write(func, args, kwargs) else ()
