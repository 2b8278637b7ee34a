"""Gradient accumulation: backwards whose gradients stay on their rank, and are summed with those of a later one.

`fully_shard` keeps the whole gradients of its parameters meanwhile; the parts for parameters that it was told to leave,
which our own collectives sum, wait here.

Invariant: a part of a gradient is summed exactly once: by the next backward that synchronises, or before the next
forward whose backward will.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshpar.errors import SpecError, explain
from meshpar.rewrite import state_of

_WAITING = "_meshpar_waiting"
"""Name of the attribute in which a model counts the blocks that are open, and a parameter keeps what waits for it."""

Whole = Callable[[DTensor], Tensor]
"""Gives the whole of a parameter; its backward sums the parts of all ranks."""


@dataclass
class _Waiting:
    """Hold what waits.

    Args:
        depth: how many blocks of `no_sync` are open.
        part: the sum of this rank's parts of a gradient so far.
        whole: what sums them in its backward.
    """

    depth: int = 0
    part: Tensor | None = None
    whole: Whole | None = None


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards inside the block keep their gradients on their rank: accumulation without communication.

    k small batches, of which the last alone runs outside of the block, give the gradients of one large batch; where a
    loss is a mean, divide it by k. Gradients that wait are not in `grad`, and `zero_grad()` does not drop them: run a
    backward outside of the block before the step of the optimizer. Meanwhile each rank holds whole gradients.

    Args:
        model: a model of `parallelize`.

    Communication:
        None of gradients inside the block, but in compiled code, which sums them in each backward.

    Raises:
        SpecError: the model did not come out of `parallelize`.

    Example:
        >>> import meshpar
        >>> model = meshpar.parallelize(nn.Linear(2, 1), "data=1")
        >>> for is_last in (False, True):
        ...     with contextlib.nullcontext() if is_last else no_sync(model):
        ...         loss = meshpar.gather(model(torch.ones(1, 2))).sum()
        ...         loss.backward()
        >>> model.weight.grad
        tensor([[2., 2.]])
    """
    if not isinstance(model, nn.Module) or state_of(model) is None:
        fix = "model = meshpar.parallelize(model, mesh)"
        text = explain("no_sync: not parallel.", got=f"a {type(model).__name__}", needs="a parallel model", fix=fix)
        raise SpecError(text)
    _open(model, 1)
    try:
        yield
    finally:
        _open(model, -1)
        if any(_waiting(p).part is not None for p in _left(model)):
            _sum_before_the_next_forward(model)


def _left(model: nn.Module) -> list[DTensor]:
    return [p for p in model.parameters() if isinstance(p, DTensor)]


def _waiting(owner: nn.Module | DTensor) -> _Waiting:
    held: _Waiting = owner.__dict__.setdefault(_WAITING, _Waiting())
    return held


def _open(model: nn.Module, by: int) -> None:
    owners: list[nn.Module | DTensor] = [model, *_left(model)]
    for owner in owners:
        _waiting(owner).depth += by
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_requires_gradient_sync(_waiting(model).depth == 0, recurse=False)


def whole_or_waiting(p: DTensor, whole: Whole) -> Tensor:
    """Give the whole of a parameter that `fully_shard` was told to leave; its gradient waits inside of `no_sync`."""
    held = p.__dict__.get(_WAITING)
    return whole(p) if held is None else _Wait.apply(p, held, whole)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, held, whole):  # type: ignore[no-untyped-def]
        ctx.parameter, ctx.held, ctx.whole = p, held, whole
        return whole(p)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        held: _Waiting = ctx.held
        held.part, held.whole = g if held.part is None else held.part + g, ctx.whole
        if not held.depth:
            _sum(ctx.parameter, held)
        return None, None, None


def _sum(p: DTensor, held: _Waiting) -> None:
    """Sum what waits for a parameter over the ranks, into its gradient."""
    part, held.part = held.part, None
    if part is not None and held.whole is not None:
        with torch.enable_grad():
            whole = held.whole(p)
        torch.autograd.backward(whole, part)


def _sum_before_the_next_forward(model: nn.Module) -> None:
    """Sum what waits before the next forward whose backward will, since that may leave some parameters out."""

    def before(_: nn.Module, __: Any) -> None:
        if torch.is_grad_enabled() and not _waiting(model).depth:
            handle.remove()
            for p in _left(model):
                _sum(p, _waiting(p))

    handle = model.register_forward_pre_hook(before, prepend=True)
