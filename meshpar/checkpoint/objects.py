"""Further objects with a state, such as an average of the parameters: their DTensors are saved and read in shares.

Invariant: the state that an object gets back has the form of the one that it gave; DTensors in it lie as those in the
state that the object has now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from meshpar.checkpoint.state import Contents, Stateful, piece_of
from meshpar.shares import laid_as

Path = tuple[Any, ...]


def collect_object(name: str, thing: Stateful, into: Contents, *, first: bool, speaks: bool) -> None:
    """Add the state of an object; see `state.collect_model`."""
    places: list[tuple[Path, str]] = []

    def take(value: Any, path: Path) -> Any:
        if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim()):
            full = f"object.{name}:{'/'.join(map(str, path))}"
            into.pieces[full] = piece_of(value, writes=speaks if isinstance(value, DTensor) else first)
            places.append((path, full))
            return None
        if type(value) is dict:
            return {key: take(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(take(item, (*path, i)) for i, item in enumerate(value))
        return value

    told = take(dict(thing.state_dict()), ())
    into.plain.setdefault("objects", {})[name] = {"state": told, "places": places}


def room_for_object(
    name: str, thing: Stateful, told: Mapping[str, Any], metadata: Metadata, targets: dict[str, Tensor]
) -> list[str]:
    """Make memory for the tensors of the state of an object, and say what does not fit."""
    now, wrong = thing.state_dict(), []
    for path, full in told["places"]:
        about = metadata.state_dict_metadata[full]
        assert isinstance(about, TensorStorageMetadata)
        here, dtype = _at(now, path), about.properties.dtype
        if isinstance(here, Tensor) and here.shape != about.size:
            where = "/".join(map(str, path))
            wrong.append(f"{name}, {where}: {tuple(about.size)} in the checkpoint, {tuple(here.shape)} in the object")
        elif isinstance(here, DTensor):
            targets[full] = laid_as(here, torch.empty_like(here.to_local(), dtype=dtype))
        else:
            targets[full] = torch.empty(about.size, dtype=dtype, device=here.device if here is not None else "cpu")
    return wrong


def apply_object(thing: Stateful, told: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Give an object its state back."""
    tensors = {path: targets[full] for path, full in told["places"]}

    def put(value: Any, path: Path) -> Any:
        if path in tensors:
            return tensors[path]
        if type(value) is dict:
            return {key: put(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(put(item, (*path, i)) for i, item in enumerate(value))
        return value

    thing.load_state_dict(put(told["state"], ()))


def _at(tree: Any, path: Path) -> Tensor | None:
    """Give the tensor at a place in a state, None where there is none."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree if isinstance(tree, Tensor) else None
