"""The gather: inputs replicated, the function run on every rank alike, the outputs put back in their layout; and said.

Invariant: nothing is gathered without a warning, an error or a policy that allows it, and the bytes go into the record.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar import pieces, record
from meshpar.errors import GatherError, GatherWarning, ShardingError, explain
from meshpar.private import pytree
from meshpar.registry import RANDOM, RULES, find, name_of, policy, same_numbers, writes_in_place


def is_split(x: DTensor) -> bool:
    """Tell whether ranks hold different things: axes of one rank do not count."""
    return any(not p.is_replicate() and x.device_mesh.size(axis) > 1 for axis, p in enumerate(x.placements))


def announce_gather(op: str, tensors: Iterable[DTensor], why: str) -> None:
    """Say that an op gathers: an error, a warning once per call site, or nothing, as the policy has it.

    The bytes go into the record when the tensors are moved.
    """
    mode = policy().on_gather
    if mode == "allow":
        return
    sharded = [x for x in tensors if is_split(x)]
    if not sharded:
        return
    num_bytes = sum(int(x.numel()) * x.element_size() for x in sharded)
    where = record.here(op).rpartition("|")[0] or "root"
    text = explain(
        f"{where}: {op} gathers its inputs ({why}).",
        got=[f"{tuple(x.shape)} in {_show(x)}" for x in sharded] + [f"{num_bytes} bytes on every rank"],
        needs="a rule for these placements to run sharded",
        fix='nothing: the numbers are right. on_gather="error" forbids it, "allow" silences this',
    )
    if mode == "error":
        raise GatherError(text)
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, GatherWarning, stacklevel=2)
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    if _action(text, frame) in ("default", "module", "once"):
        # Python's own memory of call sites is lost whenever anybody touches the filters, as torch does now and then.
        site = (file, line, where, op, tuple(warnings.filters))
        if site in _SAID:
            return
        _SAID.add(site)
    warnings.warn_explicit(text, GatherWarning, file, line)


_SAID: set[tuple[Any, ...]] = set()
"""Call sites of gathers that have been warned about."""


def _action(text: str, frame: FrameType) -> str:
    """Find what the filters say about a gather warning from a frame."""
    module = frame.f_globals.get("__name__", "")
    for action, message, category, modules, line in warnings.filters:
        if (
            issubclass(GatherWarning, category)
            and (message is None or message.match(text))
            and (modules is None or modules.match(module))
            and line in (0, frame.f_lineno)
        ):
            return action
    return "default"


def _show(x: DTensor) -> str:
    names = [
        f"{axis}: {placement}"
        for axis, placement in zip(pieces.axes_of(x.device_mesh), x.placements, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(names)


def _user_frame() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("meshpar", "torch", "contextlib"):
            return frame
        frame = frame.f_back
    return None


def gather_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, why: str) -> Any:
    """Replicate the inputs, run the function on every rank alike, and put the outputs back in their layout.

    An output keeps a sharded dim that is still there with its size; otherwise it is replicated. In-place functions
    and `out=` write into the tensor that they were given. A function that draws random numbers draws those of rank 0.

    Communication:
        An all-gather of every sharded input; of every gradient of a sharded output in the backward.
    """
    op = name_of(func)
    found: list[DTensor] = []
    find((args, kwargs), found)
    out = kwargs.get("out")
    target = args[0] if args and writes_in_place(func) else out
    if target is not None:
        check_targets(target, op)
    announce_gather(op, found, why)
    reference = max(found, key=lambda x: (sum(not p.is_replicate() for p in x.placements), x.numel()))
    mesh = reference.device_mesh
    factor = pieces.part_factor(mesh, pieces.replicated(mesh))

    def enter(x: Any) -> Any:
        if isinstance(x, DTensor):
            return pieces.local(pieces.moved(x, pieces.replicated(mesh), op, "gather", why))
        return pieces.scale_grad(x, factor) if isinstance(x, Tensor) else x

    def leave(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        full = pieces.whole(x, mesh, pieces.replicated(mesh), x.shape)
        return pieces.moved(full, layout_after(reference, x), op)

    def write(old: DTensor, new: Tensor) -> DTensor:
        full = pieces.whole(new, mesh, pieces.replicated(mesh), new.shape)
        return pieces.overwrite(old, pieces.moved(full, old.placements, op))

    named = {key: value for key, value in kwargs.items() if key != "out"}
    plain_args, plain_kwargs = pytree.tree_map(enter, (args, named))
    if target is not None and target is not out:
        # A copy, since the backward of what made the target may need it as it was.
        plain_args = (plain_args[0].clone(), *plain_args[1:])
    if func in RANDOM:
        result = RULES[same_numbers].handler(func, plain_args, plain_kwargs, mesh)
    else:
        result = func(*plain_args, **plain_kwargs)
    if target is None:
        return pytree.tree_map(leave, result)
    if target is not out:
        return write(target, plain_args[0])
    if isinstance(out, DTensor):
        return write(out, result)
    parts = [write(old, new) for old, new in zip(out, result, strict=True)]
    return type(result)(parts)


def check_targets(target: Any, op: str) -> None:
    """Refuse to write activations into plain tensors.

    Raises:
        ShardingError: a target, or one of several, is plain.
    """
    for x in target if isinstance(target, list | tuple) else (target,):
        if not isinstance(x, DTensor):
            what = f"a plain tensor {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ShardingError(
                explain(
                    f"{op}: cannot write activations into a plain tensor.",
                    got=f"{what} to write into",
                    needs="an activation as the target: a plain tensor is the same on every rank, these values differ",
                    fix="make it with zeros_like(x) or x.new_zeros(...), or write y = y + x",
                )
            )


def layout_after(reference: DTensor, x: Tensor) -> list[Any]:
    """Choose placements for a tensor that follows from another: a dim of the same size, from the front or the back."""
    out: list[Any] = []
    used: set[int] = set()
    for axis, placement in enumerate(reference.placements):
        keep: Any = Replicate()
        if isinstance(placement, Shard):
            n = reference.shape[placement.dim]
            back = placement.dim - reference.dim() + x.dim()
            for dim in (placement.dim, back):
                if 0 <= dim < x.dim() and x.shape[dim] == n and dim not in used:
                    keep = Shard(dim)
                    break
            if keep.is_shard() and reference.device_mesh.size(axis) > 1:
                used.add(keep.dim)
        out.append(keep)
    return out
