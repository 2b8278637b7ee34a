"""What meshpar needs of DTensor and of plain tensors: pieces, layouts, memory, versions, handlers of ops.

Invariant: a piece is handed out and taken back as it is, without a copy and without a trace for autograd.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor, Placement, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from meshpar import pretend
from meshpar.private.crossing import global_stride, spec_of
from meshpar.private.modes import function_modes

NESTED_FROM_MASK = torch._nested_tensor_from_mask_left_aligned
"""What nn.TransformerEncoder asks before its nested-tensor path (no public name is planned)."""


UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The aten op by which `torch.amp.GradScaler` unscales gradients (public when the scaler has a hook for its check)."""


StridedShard = _StridedShard
"""A shard of each of the equal parts of a dim, as a placement (public when DTensor settles on a name)."""


ITEM = torch.ops.aten._local_scalar_dense.default
"""The aten op behind `item()` (the op has no public name)."""


def set_dtensor_handler(op: Any, handler: Callable[..., Any]) -> None:
    """Route one aten op of DTensor to a handler (public when DTensor takes op strategies that refuse)."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def dtensor_handler(op: Any) -> Callable[..., Any] | None:
    """Give the handler that DTensor has for an aten op, if any."""
    return DTensor._op_dispatcher._custom_op_handlers.get(op)


def list_ops(names: Sequence[str]) -> list[Any]:
    """List the aten ops on lists of tensors of some names, and the fused steps (public when `torch.foreach` comes)."""
    wanted = [f"_foreach_{name}{ending}" for name in names for ending in ("", "_")]
    wanted += [f"_fused_{name}_" for name in ("sgd", "adagrad", "adam", "adamw")]
    packets = [getattr(torch.ops.aten, name) for name in wanted if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if "out" not in overload]


def piece_of(x: DTensor) -> torch.Tensor:
    """Give the piece itself, for a handler below autograd (`to_local` makes a view, above it)."""
    return x._local_tensor


def like(x: DTensor, piece: torch.Tensor) -> DTensor:
    """Make a DTensor that lies as x, for a handler below autograd (`from_local` works above it)."""
    spec, held = x._spec, x._local_tensor
    if piece.dtype != held.dtype or piece.stride() != held.stride():
        spec = spec_of(spec.mesh, spec.placements, x.shape, global_stride(piece, x.shape), piece.dtype)
    return DTensor(piece, spec, requires_grad=piece.requires_grad)


def is_sole_owner(x: DTensor) -> bool:
    """Tell whether nothing else sees the memory of a piece: no view, no saved tensor (no public name is planned)."""
    piece = x._local_tensor
    strides = zip(piece.stride(), piece.shape, strict=True)
    if not is_plain(piece) or any(s == 0 and n > 1 for s, n in strides):
        return False
    # The piece, the storage object just made, and what `from_local` made the piece a view of.
    least = 2 + (piece._base is not None)
    return torch._C._storage_Use_Count(piece.untyped_storage()._cdata) <= least


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Let `copy_` into a DTensor that is the sole owner of its memory take over the memory of its source."""
    _ADOPTING.append(True)
    try:
        yield
    finally:
        _ADOPTING.pop()


_ADOPTING: list[bool] = []


def adopt(x: DTensor, source: torch.Tensor) -> bool:
    """Take over the memory of a source, where `adopting` is in force."""
    if not _ADOPTING or not isinstance(source, DTensor):
        return False
    old, new = x._local_tensor, source._local_tensor
    if old.stride() != new.stride():
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)
    x._local_tensor = new
    return True


def count_write(x: DTensor) -> None:
    """Count a write into the piece of a DTensor (public: `increment_version`, but for DTensors it counts the outer)."""
    torch.autograd.graph.increment_version(x._local_tensor)
    if torch.compiler.is_compiling():
        # AOTAutograd asks pieces for their history, which a view, as `from_local` makes them, would build anew.
        x._local_tensor = x._local_tensor.detach()


def saved_tensors_are_hooked() -> bool:
    """Tell whether somebody looks after saved tensors, activation checkpointing say (no public name is planned)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003


def version_of(x: torch.Tensor) -> int:
    """Count the writes into a tensor (public when `Tensor.version` comes)."""
    return x._version


def lay(x: DTensor, piece: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Let a DTensor lie otherwise from now on, with this rank's piece given (no public name is planned)."""
    meta = TensorMeta(x.shape, x.stride(), piece.dtype)
    x._local_tensor, x._spec = piece, DTensorSpec(x.device_mesh, tuple(placements), tensor_meta=meta)


@contextlib.contextmanager
def without_dtensor_handler(op: Any) -> Iterator[None]:
    """Let an aten op of DTensor go its ordinary way inside the block."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    held = handlers.pop(op)
    try:
        yield
    finally:
        handlers[op] = held


PART_SETTERS = tuple(getattr(torch.Tensor, part).__set__ for part in ("real", "imag"))
"""What `x.real = y` and `x.imag = y` stand for."""


@functools.cache
def show_written_parts() -> None:
    """Let the modes see `x.real = y` and `x.imag = y` on DTensors, which torch writes without asking them.

    Public when these setters ask, as those of the other attributes do.
    """
    for write in PART_SETTERS:
        part = write.__self__

        def asking(x: DTensor, value: Any, write: Any = write) -> None:
            if function_modes():
                torch.overrides.handle_torch_function(write, (x,), x, value)
            else:
                write(x, value)

        setattr(DTensor, part.__name__, property(part.__get__, asking))


@functools.cache
def name_failures_of_dtensor(
    naming: Callable[[Sequence[dist.ProcessGroup], str, str], contextlib.AbstractContextManager[None]],
) -> None:
    """Run what DTensor sends by itself inside `naming(groups, axes, label)`, from now on in this process.

    Public when DTensor's collectives can be given, or hooked.
    """
    redistribute = _redistribute.redistribute_local_tensor

    @functools.wraps(redistribute)
    def inside(piece: Any, old: DTensorSpec, new: DTensorSpec, **kwargs: Any) -> Any:
        pairs = enumerate(zip(old.placements, new.placements, strict=True))
        moved = [i for i, (a, b) in pairs if a != b and old.mesh.size(i) > 1]
        if torch.compiler.is_compiling() or not moved:
            return redistribute(piece, old, new, **kwargs)
        axes = [(old.mesh.mesh_dim_names or [str(j) for j in range(old.mesh.ndim)])[i] for i in moved]
        with naming([old.mesh.get_group(i) for i in moved], " or ".join(axes), "|redistribute of a DTensor"):
            return redistribute(piece, old, new, **kwargs)

    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = inside  # type: ignore[attr-defined]


def is_fake(x: torch.Tensor) -> bool:
    """Tell whether a tensor has no values (no public name is planned)."""
    return isinstance(x, FakeTensor)


def is_plain(x: torch.Tensor) -> bool:
    """Tell whether a tensor is torch's own, not of a subclass; a plan's is, without its values."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) or (pretend.is_on() and is_fake(x))


def is_eager(x: torch.Tensor) -> bool:
    """Tell whether what is done to a tensor is done at once, and nobody looks on who must see ops of ours whole.

    Selective checkpointing keeps what ops give, and is told of ours by their names: it would see what they write into.
    """
    if torch.compiler.is_compiling() or not is_plain(x) or x.is_meta:
        return False
    return torch._C._len_torch_dispatch_stack() == 0 or pretend.is_on()


def memory_of(x: torch.Tensor) -> int:
    """Give what two tensors have in common that are views of one memory, also where it is a fake.

    Public when storages can be compared.
    """
    storage = x.untyped_storage()
    return storage._cdata if is_fake(x) else storage.data_ptr()
