"""Sums and gathers over the ranks of a group, as ops that are opaque to the compiler.

Invariant: what an op sends goes into the record when it runs, not when a compiler traces it. The result is a new
tensor. Not differentiable: the autograd functions of `pieces` and of the rules call them, in both directions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar import private, record
from meshpar.peers import naming

_REQUEST = "str group_name, str axis, str label, str kind, bool backward"
torch.library.define("meshpar::all_reduce", f"(Tensor x, {_REQUEST}) -> Tensor")
torch.library.define("meshpar::all_gather", f"(Tensor x, {_REQUEST}) -> Tensor")
torch.library.define("meshpar::sum_scatter", f"(Tensor x, {_REQUEST}) -> Tensor")


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, axis: str, label: str, *, kind: str = "reduction", backward: bool = False
) -> Tensor:
    """Add up a tensor over a group.

    Args:
        x: as large on every rank.
        group: process group.
        axis: name of its axis, for the record.
        label: what `record.here` gave in the forward pass.
        kind: kind of the communication, for the record.
        backward: whether this is the backward pass.

    Communication:
        One all-reduce.

    Raises:
        PeerError: a rank died, or did not come within the timeout of the group; so do the others.
    """
    return torch.ops.meshpar.all_reduce.default(x, group.group_name, axis, label, kind, backward)  # type: ignore[no-any-return]


def all_gather(
    x: Tensor, group: dist.ProcessGroup, axis: str, label: str, *, kind: str = "reduction", backward: bool = False
) -> Tensor:
    """Give the tensors of all ranks of a group, one below the other in a new first dim; arguments as in `all_reduce`.

    Communication:
        One all-gather of equal pieces, as bytes: every backend gathers those, whatever the dtype.
    """
    return torch.ops.meshpar.all_gather.default(x, group.group_name, axis, label, kind, backward)  # type: ignore[no-any-return]


def sum_scatter(
    x: Tensor, group: dist.ProcessGroup, axis: str, label: str, *, kind: str = "reduction", backward: bool = False
) -> Tensor:
    """Add up x over a group, and give each rank its slice x[rank] of the sum; arguments as in `all_reduce`.

    Communication:
        One reduce-scatter.
    """
    return torch.ops.meshpar.sum_scatter.default(x, group.group_name, axis, label, kind, backward)  # type: ignore[no-any-return]


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _summable(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which backends add up: none of them knows int16."""
    return torch.int32 if dtype is torch.int16 else dtype


@torch.library.impl("meshpar::all_reduce", "default")
def _all_reduce(x: Tensor, group_name: str, axis: str, label: str, kind: str, backward: bool) -> Tensor:  # noqa: FBT001
    group = private.group_by_name(group_name)
    total = x.detach().to(_summable(x.dtype), copy=True, memory_format=torch.contiguous_format)
    p = group.size()
    record.note(label, kind, axis, 2 * x.numel() * x.element_size() * (p - 1) // p, backward=backward)
    with naming(group, axis, label):
        dist.all_reduce(_real(total), group=group)
    return total.to(x.dtype)


@torch.library.impl("meshpar::all_gather", "default")
def _all_gather(x: Tensor, group_name: str, axis: str, label: str, kind: str, backward: bool) -> Tensor:  # noqa: FBT001
    group = private.group_by_name(group_name)
    mine = x.detach().contiguous()
    p = group.size()
    record.note(label, kind, axis, mine.numel() * mine.element_size() * (p - 1), backward=backward)
    out = torch.empty((p, *mine.shape), dtype=mine.dtype, device=mine.device)
    # A single number may have any stride: compiled code gives it 0.
    flat = mine.as_strided((mine.numel(),), (1,))
    with naming(group, axis, label):
        private.all_gather(out.view(-1).view(torch.uint8), flat.view(torch.uint8), group)
    return out


@torch.library.impl("meshpar::sum_scatter", "default")
def _sum_scatter(x: Tensor, group_name: str, axis: str, label: str, kind: str, backward: bool) -> Tensor:  # noqa: FBT001
    group = private.group_by_name(group_name)
    given = x.detach().to(_summable(x.dtype)).contiguous()
    out = torch.empty_like(given[0])
    record.note(
        label, kind, axis, given.numel() * given.element_size() * (len(given) - 1) // len(given), backward=backward
    )
    with naming(group, axis, label):
        private.reduce_scatter(_real(out).view(-1), _real(given).view(-1), group)
    return out.to(x.dtype)


def _all_reduce_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_gather_fake(x: Tensor, group_name: str, *_: object) -> Tensor:
    return x.new_empty((private.group_by_name(group_name).size(), *x.shape))


def _sum_scatter_fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[1:])


torch.library.register_fake("meshpar::all_reduce", _all_reduce_fake)
torch.library.register_fake("meshpar::all_gather", _all_gather_fake)
torch.library.register_fake("meshpar::sum_scatter", _sum_scatter_fake)
