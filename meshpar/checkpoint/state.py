"""What a checkpoint holds: tensors as pieces by name, and the rest as plain Python values.

Invariant: names are those of one process, for the states of the optimizer too, which torch numbers. Nothing here
communicates or touches a file. What is not a tensor can be read back without running code.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from meshpar import private
from meshpar.checkpoint.generators import sample_coordinate
from meshpar.checkpoint.planner import Piece
from meshpar.errors import CheckpointError, explain
from meshpar.mesh import ranks_of
from meshpar.shares import laid_as, share_of

MODEL, OPTIMIZER = "model.", "optimizer."
"""What the names of tensors begin with."""

_PLAIN_STATES = ("step", "eta", "mu", "mu_product")
"""Numbers that optimizers of torch keep beside each parameter; of a 0-d parameter all states have that shape."""


_HOW = ("foreach", "fused", "capturable")
"""Options of an optimizer that say how it computes, not what: they belong to the mesh and the device of now."""


class Stateful(Protocol):
    """Anything that can tell its state and take it back: a scheduler, a sampler, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""
        ...


@dataclass
class Contents:
    """Hold what a rank has of a checkpoint.

    Args:
        pieces: its part of every tensor, by name.
        plain: the rest.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


def piece_of(x: Tensor, *, writes: bool = True) -> Piece:
    """Give what this rank holds of a tensor."""
    held = private.piece_of(x) if isinstance(x, DTensor) else x
    return Piece(held.detach(), tuple(x.shape), share_of(x), writes)


def speaks_for_parameters(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Tell whether this rank's parameters are those that count.

    They are on every rank, but where each data coordinate trains parameters of its own (`data="none"`): then those of
    the first one count.
    """
    here = sample_coordinate(mesh)
    if mesh is None or here == 0:
        return True
    firsts = {rank for rank in ranks_of(mesh) if sample_coordinate(mesh, rank) == 0}
    return all(isinstance(p, DTensor) and not firsts.isdisjoint(ranks_of(p.device_mesh)) for p in model.parameters())


def hollow(model: nn.Module) -> list[str]:
    """Name the parameters and buffers of a model that have no data yet."""
    return [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Give the tensors of the state dict of a model, what else is there, and which names are ties of earlier ones."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    ties: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            others[name] = value
        elif id(value) in names:
            ties[name] = names[id(value)]
        else:
            names[id(value)] = name
            tensors[name] = value
    return tensors, others, ties


def collect_model(model: nn.Module, into: Contents, *, first: bool, speaks: bool) -> None:
    """Add the state dict of a model.

    Args:
        model: the model.
        into: what is collected.
        first: whether this is rank 0, whose buffers are kept: ranks may have others (`batch_statistics="data-local"`).
        speaks: see `speaks_for_parameters`.
    """
    tensors, others, ties = model_tensors(model)
    for name, value in tensors.items():
        writes = speaks if isinstance(value, DTensor | nn.Parameter) else first
        into.pieces[MODEL + name] = piece_of(value, writes=writes)
    into.plain["model"] = {"others": others, "ties": ties}


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name the parameters in each group of an optimizer.

    Raises:
        CheckpointError: it holds parameters that are not those of the model.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    strangers = [
        f"group {g}, parameter {i}: {tuple(optimizer.param_groups[g]['params'][i].shape)}"
        for g, group in enumerate(found)
        for i, name in enumerate(group)
        if not name
    ]
    if strangers:
        raise CheckpointError(
            explain(
                "the optimizer holds parameters that are not in the model.",
                got=strangers[:5],
                needs="an optimizer of model.parameters(), made after parallelize and materialize",
                fix="optimizer = AdamW(model.parameters(), ...), of the same model",
            )
        )
    return found


def collect_optimizer(model: nn.Module, optimizer: Optimizer, into: Contents, *, speaks: bool) -> None:
    """Add the states and the options of an optimizer, by the names of the parameters; see `collect_model`."""
    names = names_of(model, optimizer)
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    kinds: dict[str, tuple[str, str, bool]] = {}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": members})
        for p, name in zip(group["params"], members, strict=True):
            states[name] = {}
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    full = f"{OPTIMIZER}{name}:{key}"
                    into.pieces[full] = piece_of(value, writes=speaks)
                    kinds[full] = (name, key, isinstance(value, DTensor))
                else:
                    states[name][key] = value
    into.plain["optimizer"] = {"groups": groups, "states": states, "tensors": kinds}


def room_for(p: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype, *, placed: bool) -> Tensor:
    """Make the memory of a state of a parameter: it lies as the parameter where it has its shape.

    Args:
        p: the parameter.
        key: name of the state.
        shape: global shape of the state.
        dtype: dtype of the state.
        placed: whether it was a DTensor where it was saved.
    """
    if isinstance(p, DTensor):
        if shape == tuple(p.shape) and (shape or key not in _PLAIN_STATES):
            held = private.piece_of(p)
            return laid_as(p, torch.empty_like(held, dtype=dtype, memory_format=torch.contiguous_format))
        if placed:
            whole = torch.empty(shape, dtype=dtype, device=p.device)
            return DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
    return torch.empty(shape, dtype=dtype, device="cpu" if key in _PLAIN_STATES else p.device)


def apply_optimizer(
    model: nn.Module, optimizer: Optimizer, told: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the options and the states that were saved."""
    states: dict[str, dict[str, Any]] = {name: dict(state) for name, state in told["states"].items()}
    for full, (name, key, _) in told["tensors"].items():
        states.setdefault(name, {})[key] = tensors[full]
    numbers: dict[str, int] = {}
    groups = []
    for members, group, now in zip(names_of(model, optimizer), told["groups"], optimizer.param_groups, strict=True):
        for name in members:
            numbers[name] = len(numbers)
        how = {key: now[key] for key in _HOW if key in now}
        groups.append({**group, **how, "params": [numbers[name] for name in members]})
    by_number = {numbers[name]: state for name, state in states.items() if state}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def to_bytes(plain: dict[str, Any]) -> bytes:
    """Turn plain values into bytes that can be read without running code.

    Raises:
        CheckpointError: there are other things among them; their places are named.
    """
    leaves = list(_leaves(plain, ""))
    buffer = io.BytesIO()
    bad = [where for where, value in leaves if isinstance(value, DTensor)]
    if not bad:
        if _is_read_back(plain, buffer):
            return buffer.getvalue()
        bad = [where for where, value in leaves if not _is_read_back(value, io.BytesIO())]
    raise CheckpointError(
        explain(
            "save_checkpoint: values that cannot be read back without running code.",
            got=bad[:5],
            needs="numbers, strings, tensors that all ranks hold, and lists, tuples and dicts of them",
            fix="turn them into such values, in the state_dict that gives them",
        )
    )


def from_bytes(data: bytes) -> dict[str, Any]:
    """Read what `to_bytes` made."""
    found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return found


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """List what is in dicts, lists and tuples, each with its place; numbers and strings are left out."""
    if type(value) is dict:
        for key, item in value.items():
            yield from _leaves(item, f"{where}[{key!r}]" if where else str(key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}[{i}]")
    elif type(value) not in (int, float, str, bool, NoneType):
        yield f"{where}: a {type(value).__name__}", value


def _is_read_back(value: Any, buffer: io.BytesIO) -> bool:
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def detached(plain: Any) -> Any:
    """Copy plain values, so that what is done to the originals later is not seen."""
    if isinstance(plain, Tensor):
        return plain.detach().to("cpu", copy=True)
    if type(plain) is dict:
        return {key: detached(value) for key, value in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(detached(value) for value in plain)
    return plain


def staged(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Copy pieces to memory of their own, so that later updates are not seen."""
    return {name: Piece(p.data.to("cpu", copy=True), p.size, p.share) for name, p in pieces.items() if p.writes}
