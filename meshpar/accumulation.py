"""Gradient accumulation: backwards whose gradients stay on their rank, and are summed with those of a later one.

`fully_shard` keeps the whole gradient of its parameters meanwhile. Parameters that it was told to leave are summed by
our own all-reduce; their parts wait here.

Invariant: a part of a gradient is summed exactly once: by the next backward that synchronises, or before the next
forward whose backward will.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshpar.collectives import all_reduce
from meshpar.errors import SpecError, explain
from meshpar.mesh import SUMMED
from meshpar.rewrite import state_of

_WAITING = "_meshpar_waiting"
"""Name of the attribute in which a parameter keeps the part of its gradient that waits."""


@dataclass
class _Waiting:
    """Hold what waits for a parameter.

    Args:
        depth: how many blocks of `no_sync` are open.
        part: the sum of this rank's parts so far.
    """

    depth: int = 0
    part: Tensor | None = None


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards inside the block keep their gradients on their rank: gradient accumulation without communication.

    k small batches, of which only the last runs outside of the block, give the gradients of one large batch. Divide each
    loss by k where a loss is a mean. Gradients that wait are not in `grad` yet, and `zero_grad()` does not drop them: end
    with a backward outside of the block before the optimizer's step.

    Args:
        model: a model of `parallelize`, or a part of one.

    Communication:
        None of gradients in the block, but in compiled code, which sums them at each backward.

    Raises:
        SpecError: the model did not come out of `parallelize`.

    Example:
        >>> import meshpar
        >>> model = meshpar.parallelize(nn.Linear(2, 1), "data=1")
        >>> for x, last in ((torch.ones(1, 2), False), (torch.ones(1, 2), True)):
        ...     with contextlib.nullcontext() if last else no_sync(model), meshpar.spmd():
        ...         model(x).sum().backward()
        >>> model.weight.grad
        tensor([[2., 2.]])
    """
    if not isinstance(model, nn.Module) or state_of(model) is None:
        raise SpecError(
            explain(
                "no_sync: not a parallel model.",
                got=f"a {type(model).__name__}",
                needs="a model of parallelize",
                fix="model = meshpar.parallelize(model, mesh)",
            )
        )
    left = [_waiting(p) for p in _left(model)]
    _open(model, left, 1)
    try:
        yield
    finally:
        _open(model, left, -1)
        if any(held.part is not None for held in left):
            _sum_before_the_next_forward(model)


def _left(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that our own all-reduce sums: whole on every rank, beside those of `fully_shard`."""
    return [p for p in model.parameters() if isinstance(p, DTensor) and all(q.is_replicate() for q in p.placements)]


def _waiting(p: nn.Parameter) -> _Waiting:
    held: _Waiting = p.__dict__.setdefault(_WAITING, _Waiting())
    return held


def _open(model: nn.Module, left: list[_Waiting], by: int) -> None:
    own: _Waiting = model.__dict__.setdefault(_WAITING, _Waiting())
    own.depth += by
    for held in left:
        held.depth += by
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_requires_gradient_sync(own.depth == 0, recurse=False)


def keep(p: Tensor, part: Tensor) -> Tensor | None:
    """Take a part of the gradient of a parameter: None where it waits, else all parts of this rank that wait."""
    held: _Waiting | None = p.__dict__.get(_WAITING)
    if held is None:
        return part
    if held.part is not None:
        part = held.part + part
    held.part = part if held.depth else None
    return None if held.depth else part


def _sum_before_the_next_forward(model: nn.Module) -> None:
    """Sum what waits before the next forward that will synchronise, which may leave some of the parameters out."""

    def before(module: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled() or module.__dict__[_WAITING].depth:
            return
        handle.remove()
        for p in _left(module):
            held = _waiting(p)
            if held.part is not None:
                part, held.part = held.part, None
                p.grad = _added(p.grad, _summed(p, part))

    handle = model.register_forward_pre_hook(before, prepend=True)


def _summed(p: nn.Parameter, part: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    mesh = p.device_mesh
    total = all_reduce(part, mesh.get_group(), SUMMED, "|no_sync", kind="parameters", backward=True)
    return DTensor.from_local(total, mesh, p.placements, run_check=False)


def _added(grad: Tensor | None, more: Tensor) -> Tensor:
    return more if grad is None else grad + more
