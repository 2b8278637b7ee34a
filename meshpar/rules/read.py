"""Functions that read a tensor out, and those that only look at what it is.

Invariant: a number that leaves for Python is the global one, the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.spmd import announce_gather, functions, name_of, rule

_LOOK = """
    size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed is_conj is_neg is_pinned is_same_size is_tensor is_inference get_device dim_order retain_grad
    requires_grad_ register_hook register_post_accumulate_grad_hook backward detach detach_ __hash__ __len__
    _is_view is_shared untyped_storage has_names is_nonzero_ can_cast __dlpack_device__ __deepcopy__ __reduce_ex__
    __dir__ is_set_to data_ptr is_distributed
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


_READS = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__bool__,
    torch.Tensor.__index__,
    torch.Tensor.__complex__,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.is_nonzero,
    torch.Tensor.is_nonzero,
)


def _reader(func: Any) -> Any:
    op = name_of(func)

    def handler(x: Any, *args: Any, **kwargs: Any) -> Any:
        full = _full(x, op) if isinstance(x, DTensor) else x
        rest = [_full(a, op) if isinstance(a, DTensor) else a for a in args]
        return func(full, *rest, **kwargs)

    return handler


for _function in _READS:
    rule(_function)(_reader(_function))


@rule(torch.Tensor.__format__)
def _format(x: DTensor, spec: str) -> str:
    return format(_full(x, "Tensor.__format__"), spec) if x.dim() == 0 else repr(x)


@rule(torch.Tensor.__repr__)
def _repr(x: DTensor, *, tensor_contents: Any = None) -> str:
    return repr(x)


@rule(*functions("equal"))
def _equal(a: Tensor, b: Tensor) -> bool:
    full = [_full(x, "torch.equal") if isinstance(x, DTensor) else x for x in (a, b)]
    return torch.equal(*full)


@rule(*functions("allclose"))
def _allclose(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> bool:
    full = [_full(x, "torch.allclose") if isinstance(x, DTensor) else x for x in (a, b)]
    return torch.allclose(*full, *args, **kwargs)
