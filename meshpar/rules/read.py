"""Functions that read a tensor out, and those that only look at what it is.

Invariant: a number that leaves for Python is the global one, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.gathering import announce_gather
from meshpar.registry import functions, name_of, rule
from meshpar.spmd import call

_LOOK = """
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed is_conj is_neg is_pinned is_same_size is_tensor is_inference get_device dim_order retain_grad
    requires_grad_ register_hook register_post_accumulate_grad_hook backward detach detach_ __hash__ __len__
    _is_view is_shared untyped_storage has_names is_nonzero_ can_cast __dlpack_device__ __deepcopy__ __reduce_ex__
    __dir__ is_set_to data_ptr is_distributed result_type
"""


def _plain(func: Any) -> Any:
    def handler(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return handler


for _function in functions(*_LOOK.split()):
    rule(_function, status="plain")(_plain(_function))


def _full(x: DTensor, op: str) -> Tensor:
    if any(not p.is_replicate() for p in x.placements):
        if x.numel() > 1:
            announce_gather(op, [x], "its values are read out")
        x = pieces.moved(x, pieces.replicated(x.device_mesh), op, "gather" if x.numel() > 1 else "redistribute")
    return pieces.local(x)


_ONE_NUMBER = functions("item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "is_nonzero")
_MANY_NUMBERS = (torch.Tensor.tolist, torch.Tensor.__contains__)
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)


def _number_reader(func: Any) -> Any:
    op = name_of(func)

    def handler(x: DTensor) -> Any:
        if x.numel() != 1:
            return func(torch.zeros((), dtype=x.dtype).expand(x.shape))  # torch's error
        return func(_full(x, op))

    return handler


def _reader(func: Any) -> Any:
    op = name_of(func)

    def handler(*args: Any, **kwargs: Any) -> Any:
        # x.cpu() of an activation on an accelerator stays there, so that an array comes to the CPU here.
        move = torch.Tensor.cpu if func in _ARRAYS else None
        rest = [_full(a, op) if isinstance(a, DTensor) else a for a in args]
        return func(*[move(a) if move and isinstance(a, Tensor) else a for a in rest], **kwargs)

    return handler


for _function in _ONE_NUMBER:
    rule(_function)(_number_reader(_function))
for _function in (*_MANY_NUMBERS, *_ARRAYS):
    rule(_function)(_reader(_function))


@rule(torch.Tensor.__format__)
def _format(x: DTensor, spec: str) -> str:
    return format(_full(x, "Tensor.__format__"), spec) if x.dim() == 0 else format(repr(x), spec)


@rule(torch.Tensor.__repr__)
def _repr(x: DTensor, *, tensor_contents: Any = None) -> str:
    """Show a number as the global one; of a sharded tensor this rank's piece, with the placements that say so."""
    return repr(pieces.moved(x, pieces.replicated(x.device_mesh), "repr") if x.dim() == 0 else x)


@rule(torch.Tensor.__iter__)
def _iterate(x: DTensor) -> Iterator[Any]:
    return iter(call(torch.Tensor.unbind, (x, 0), {}))


@rule(torch.Tensor.__reversed__)
def _reversed(x: DTensor) -> Any:
    return call(torch.Tensor.flip, (x, 0), {}) if x.dim() else x


@rule(*functions("equal"))
def equal(input: Tensor, other: Tensor) -> bool:
    """Compare shape and numbers on all ranks, without a gather."""
    if input.shape != other.shape:
        return False
    return bool(_full(call(torch.all, (call(torch.eq, (input, other), {}),), {}), "torch.equal"))


@rule(*functions("allclose"))
def allclose(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Compare numbers on all ranks, without a gather."""
    close = call(torch.isclose, (input, other, *args), kwargs)
    return bool(_full(call(torch.all, (close,), {}), "torch.allclose"))


rule(torch.autograd.grad, status="plain")(_plain(torch.autograd.grad))
