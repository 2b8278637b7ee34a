"""Activation checkpointing: chosen modules keep their inputs alone, and run again in the backward.

Invariant: the second run computes the numbers of the first one. It meets the same rules, begins with the same random
state, buffers, parameters and training flags, makes all of its exchanges in the same order on every rank, and leaves
nothing behind: running statistics and power iterations move once a step, as without checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshpar import private
from meshpar.chosen import modules_to_checkpoint
from meshpar.errors import ShardingError, explain
from meshpar.private import pytree
from meshpar.registry import ALWAYS, rule
from meshpar.rewrite import state_of

SMALL_BYTES = 2**16
"""Buffers up to this size are kept as the forward finds them, even if it does not write into them."""


def checkpoint_activations(model: nn.Module, what: Any) -> nn.Module:
    """Let chosen modules of a rewritten model run again in the backward instead of keeping their activations.

    Args:
        model: a model out of `rewrite`, before `fully_shard`; the classes of its chosen modules are changed in place.
        what: None, "blocks", "all", a module class, a list of them, or a predicate; see `modules_to_checkpoint`.

    Returns:
        The model. Names of modules, parameters and buffers stay.

    Communication:
        None here. In the backward, the exchanges of the forward of each chosen module once more.

    Raises:
        SpecError: `what` cannot be used, or chooses nothing.
    """
    for module in modules_to_checkpoint(model, what):
        module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]
    return model


@functools.lru_cache(maxsize=4096)
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a module that runs again in the backward."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, super(made, self).forward, args, kwargs)  # type: ignore[misc]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type[nn.Module] = type(cls.__name__, (cls,), {"_meshpar_aware": True, "forward": forward, **names})
    return made


def _run(module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A compiler decides itself what it keeps. Parameters that `functional_call` replaced are gone in the backward.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_replaced(module):
        return inner(*args, **kwargs)
    state = state_of(module)
    if state is not None and state.entry is not None:
        args, kwargs = state.entry(args, kwargs)  # once: in the second run they are activations already
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    rest = [None if isinstance(x, Tensor) else x for x in leaves]

    def part(*tensors: Tensor) -> Any:
        items = list(rest)
        for i, x in zip(at, tensors, strict=True):
            items[i] = x
        again, named = pytree.tree_unflatten(items, spec)
        return inner(*again, **named)

    start = _Start(module)
    # torch would end the second run after the last tensor that the first one saved. Should a rank with an empty shard
    # save less than others, it would leave out an exchange that they wait for.
    return checkpoint(
        part,
        *[leaves[i] for i in at],
        use_reentrant=False,
        early_stop=False,
        context_fn=lambda: (start.watching(), start),
    )


def _is_replaced(module: nn.Module) -> bool:
    return any(
        value is not None and not isinstance(value, nn.Parameter)
        for owner in module.modules()
        for value in private.parameters_of(owner).values()
    )


@dataclass
class _Buffer:
    """Hold a buffer as a forward finds it.

    Args:
        table: where its module keeps buffers.
        name: its name there.
        value: the tensor itself.
        version: how often it had been written into.
        copy: its numbers; None where it is large and the forward did not write into it.
    """

    table: dict[str, Any]
    name: str
    value: Tensor
    version: int
    copy: Tensor | None

    def is_as_before(self) -> bool:
        """Tell whether nobody wrote into the buffer or put another one in its place, as far as torch counts."""
        return self.table.get(self.name) is self.value and private.version_of(self.value) == self.version


class _Start:
    """Hold what a forward of a module begins with; as a context, let the second run inside begin with that.

    It may be entered again: a graph that is kept is run through more than once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.owners = list(module.modules())
        own = vars(module)
        self.attributes: list[tuple[dict[str, Any], str, Any]] = []
        self.attributes += [(own, name, x) for name, x in own.items() if isinstance(x, Tensor)]
        self.attributes += [(vars(owner), "training", owner.training) for owner in self.owners]
        self.parameters = [(t, name, x) for t in map(private.parameters_of, self.owners) for name, x in t.items()]
        self.buffers: list[_Buffer] = []
        self.now: list[tuple[dict[str, Any], str, Any]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Find out inside the block, the first run, which buffers it writes into; drop large copies of the others."""
        for table in map(private.buffers_of, self.owners):
            for name, value in table.items():
                if value is not None:
                    copy = value.detach().clone()
                    self.buffers.append(_Buffer(table, name, value, private.version_of(value), copy))
        touched: set[int] = set()
        _WATCHED.append(touched)
        try:
            yield
        finally:
            _WATCHED.pop()
        for held in self.buffers:
            is_large = held.value.numel() * held.value.element_size() > SMALL_BYTES
            if is_large and held.is_as_before() and id(held.value) not in touched:
                held.copy = None

    def __enter__(self) -> None:
        self._check()
        tables = [table for owner in self.owners for table in (vars(owner), private.buffers_of(owner))]
        self.now = [(table, name, x) for table in tables for name, x in table.items() if isinstance(x, Tensor | bool)]
        for table, name, value in self.parameters:
            if _is_other(table.get(name), value):
                self.now.append((table, name, table[name]))
                table[name] = value
        for table, name, value in self.attributes:
            table[name] = value
        twins: dict[int, Tensor] = {}  # a buffer that two modules share stays one
        for held in self.buffers:
            if held.copy is not None:
                held.table[held.name] = twins.setdefault(id(held.value), held.copy.clone())

    def __exit__(self, *error: object) -> None:
        for table, name, value in self.now:
            table[name] = value
        self.now = []

    def _check(self) -> None:
        moved = [held.name for held in self.buffers if held.copy is None and not held.is_as_before()]
        if moved:
            raise ShardingError(
                explain(
                    "checkpoint: a forward cannot run again as it ran.",
                    got=f"large buffers {moved[:5]}, which changed between the forward and the backward",
                    needs="the buffers that the forward read",
                    fix="write into them after the backward, or leave these modules out of checkpoint=",
                )
            )


_WATCHED: list[set[int]] = []
"""For each first run that goes on, the tensors that were asked for their `data`: writes into that are not counted."""


@rule(torch.Tensor.data.__get__, status="plain")  # type: ignore[attr-defined]
def data_of(x: Tensor) -> Tensor:
    """Give the data of a tensor; a forward that is watched may write into it."""
    for touched in _WATCHED:
        touched.add(id(x))
    return x.data


ALWAYS.add(torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _is_other(now: Any, then: Any) -> bool:
    """Tell whether another parameter took the place of one: not `fully_shard`, whose shards come and go as DTensors."""
    if now is then or not isinstance(now, Tensor) or not isinstance(then, Tensor):
        return False
    return not isinstance(now, DTensor) and not isinstance(then, DTensor)
