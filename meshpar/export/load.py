"""`load_hf`: every rank reads its own rows of a checkpoint of Hugging Face, into a model on any mesh, or on none.

Invariant: no rank reads what it does not hold, but for short gaps. What does not fit is found before anything is read
or made, and is one error on all ranks that names every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshpar.checkpoint.together import everyone, team
from meshpar.errors import CheckpointError, explain
from meshpar.export import ties
from meshpar.export.filling import Filling, differ, fill
from meshpar.export.headers import Checkpoint, Stored, find_checkpoint
from meshpar.export.names import module_name, without_ones
from meshpar.export.runs import has_two_readings, layout_of, part_at, part_of, readings_of
from meshpar.export.state import usual_mode
from meshpar.recipes import Init, Recipes, Room, initialise

_FIX = "check the disk, and that all ranks see the same files"
_CONVERTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 20


@dataclass(frozen=True)
class LoadedHf:
    """Hold what `load_hf` did.

    Args:
        missing: names of the model that were not in the checkpoint, and kept their values.
        unexpected: names of the checkpoint that no rank's model has.
        num_bytes: how many bytes of tensors this rank has read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_bytes: int


def load_hf(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, init: Init | None = None
) -> LoadedHf:
    """Read a checkpoint of Hugging Face into a model, each rank its own rows, straight from the files.

    The model may be parallelized by meshpar, `fully_shard`, `parallelize_module`, or not at all, and have parameters on
    the meta device: they get memory for this rank's part of them. Names are those of `state_dict()`, without wrappers
    of torch. Tied weights need one of their names in the checkpoint; where several are there, they must be equal.

    Values keep their bits where the dtypes are the same. Otherwise float16, bfloat16, float32 and float64 are rounded
    to one another, as `load_state_dict` does; any other pair is an error: a quantized weight is no weight without its
    scale. Scales of shape (1, n, m) are found as (n, m), as the export writes them.

    Args:
        model: the model.
        path: a folder with `model.safetensors`, or `model.safetensors.index.json` and its files; or one such file.
        strict: whether tensors that are missing in the checkpoint, or unexpected, are an error. Shapes and dtypes that
            do not fit always are.
        init: for a model on the meta device, what fills tensors that are not in the checkpoint, as `materialize` has
            it: non-persistent buffers, and with `strict=False` all that is missing.

    Returns:
        A `LoadedHf`.

    Communication:
        A few bytes of every rank.

    Raises:
        CheckpointError: on all ranks, before anything is changed: no checkpoint, a damaged one, one that does not fit,
            files that differ between ranks. A disk that fails while it is read may leave the model half loaded; what
            was on the meta device is there again then.
        SpecError: tensors on the meta device that nothing fills; on all ranks, before anything is changed.

    Example:
        >>> load_hf(nn.Linear(2, 1), "/no/such/folder")
        Traceback (most recent call last):
        ...
        meshpar.errors.CheckpointError: load_hf: no checkpoint in /no/such/folder.
          got:    no such folder
          needs:  model.safetensors, or model.safetensors.index.json and its files
          fix:    check the path, on every rank
    """
    us, what = team(), f"load_hf: {os.fspath(path)} cannot be loaded."
    job = _Job(model, path)
    with usual_mode():
        told = everyone(us, what, job.prepare, fix=_FIX)
        missing, unexpected = job.settle(told, strict=strict)
        if any(t.doubtful for t in told):
            job.agree(everyone(us, what, lambda: job.check(init), fix=_FIX))
        try:
            job.make_room()
            num_bytes = everyone(us, what, job.read, fix=_FIX)[us.rank]
        except BaseException:
            job.give_back()
            raise
    return LoadedHf(missing, unexpected, num_bytes)


@dataclass(frozen=True)
class _Told:
    """Hold what a rank tells: what it found in the files, what does not fit, and how it reads strided shards."""

    digest: str
    wrong: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    unexpected: tuple[str, ...]
    readings: dict[str, str] = field(default_factory=dict)
    doubtful: bool = False  # ties to compare, or a model without values


class _Job:
    """Load one checkpoint on one rank, in steps that all ranks take together."""

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.path = path
        self.checkpoint = Checkpoint({}, {})
        self.sources: dict[str, Stored] = {}
        self.equal: list[tuple[str, Stored]] = []
        self.nested: dict[str, bool] = {}
        self.room: tuple[Recipes, Room, list[nn.Module]] | None = None

    def _tensors(self) -> dict[str, Any]:
        return {module_name(name): value for name, value in self.model.state_dict(keep_vars=True).items()}

    def prepare(self) -> _Told:
        """Read the headers, and see what fits."""
        self.checkpoint = find_checkpoint(self.path)
        stored = self.checkpoint.tensors
        state = self._tensors()
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        missing = [(n, f"a {type(v).__name__}") for n, v in state.items() if v is not None and n not in tensors]
        wrong: list[str] = []
        readings: dict[str, str] = {}
        for names in _groups(self.model, tensors):
            there = [name for name in names if name in stored]
            if not there:
                missing.append((names[0], _kind(tensors[names[0]].shape, tensors[names[0]].dtype)))
                continue
            for name in _one_a_tensor(names, tensors):
                source = name if name in stored else there[0]
                self.sources[name] = stored[source]
                wrong += _unlike(name, tensors[name], source, stored[source])
                x = tensors[name]
                here = isinstance(x, DTensor) and x.device_mesh.get_coordinate() is not None
                if here and has_two_readings(x.shape, layout_of(x)):
                    readings[name] = readings_of(x)
            for other in there[1:]:
                if (stored[other].shape, stored[other].dtype) != (stored[there[0]].shape, stored[there[0]].dtype):
                    kinds = [_kind(stored[name].shape, stored[name].dtype) for name in (there[0], other)]
                    wrong.append(f"{there[0]} and {other}: tied, and {kinds[0]} and {kinds[1]} in the checkpoint")
                else:
                    self.equal.append((there[0], stored[other]))
        unexpected = tuple(sorted(name for name in stored if name not in state))
        doubtful = bool(self.equal) or any(t.is_meta for _, t in self._held())
        return _Told(self.checkpoint.digest(), tuple(wrong), tuple(missing), unexpected, readings, doubtful)

    def settle(self, told: list[_Told], *, strict: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Come to one verdict on all ranks; give what is missing and what is unexpected."""
        others = [rank for rank, t in enumerate(told) if t.digest != told[0].digest]
        if others:
            got = f"other headers on rank {others[0]} than on rank 0"
            text = explain(f"load_hf: {self.path} differs.", got=got, needs="the same files on all ranks", fix=_FIX)
            raise CheckpointError(text)
        stored = self.checkpoint.tensors
        unexpected = [name for name in told[0].unexpected if all(name in t.unexpected for t in told)]
        missing = dict(pair for t in told for pair in t.missing)
        lines = list(dict.fromkeys(line for t in told for line in t.wrong))
        if strict:
            lines += [f"{name}: {kind} in the model, missing in the checkpoint" for name, kind in missing.items()]
            lines += [
                f"{name}: {_kind(stored[name].shape, stored[name].dtype)} in the checkpoint, not in the model"
                for name in unexpected
            ]
        for name in dict.fromkeys(name for t in told for name in t.readings):
            fits = {t.readings[name] for t in told if name in t.readings}
            if fits >= {"n", "l"} or "" in fits:
                lines.append(f"{name}: the pieces of different ranks come from different cuts")
            self.nested[name] = "l" not in fits
        if lines:
            shown = [*lines[:_SHOWN], *([f"... {len(lines)} in all"] if len(lines) > _SHOWN else [])]
            needs = "the names and shapes of the model, and dtypes that can be rounded to its own"
            fix = _advice(missing, unexpected) or "the checkpoint of this model; strict=False for a part of its names"
            raise CheckpointError(explain(f"load_hf: {self.path} does not fit.", got=shown, needs=needs, fix=fix))
        return tuple(missing), tuple(unexpected)

    def _held(self) -> list[tuple[str, Tensor]]:
        tables = (self.model.named_parameters, self.model.named_buffers)
        return [pair for table in tables for pair in table(remove_duplicate=False)]

    def check(self, init: Init | None) -> bool:
        """See that ties are equal in the checkpoint, and whether tensors without values get some from elsewhere."""
        tensors = self._tensors()
        for name, other in self.equal:
            first = self.checkpoint.tensors[name]
            fillings = [self._filling(n, tensors[n], first) for n, stored in self.sources.items() if stored == first]
            f = next((f for f in fillings if f is not None), None)
            if f is not None and differ(f, Filling(f.piece, f.part, other)):
                names = [n for n, stored in self.checkpoint.tensors.items() if stored == other]
                got = f"{names[0]}, tied to {name}: other values, {_kind(other.shape, other.dtype)}"
                needs, fix = "equal values for tied weights", "untie the model, or take one name out of the checkpoint"
                raise CheckpointError(explain(f"load_hf: {self.path} does not fit.", got=got, needs=needs, fix=fix))
        filled = {id(tensors[name]) for name in self.sources}
        hollow = [(name, t) for name, t in self._held() if t.is_meta]
        if hollow:
            left = {name for name, t in hollow if id(t) not in filled}
            recipes = Recipes(self.model, init)
            recipes.check(left)
            owners = [m for m in recipes.modules if left.intersection(recipes.own(m))]
            self.room = recipes, Room(self.model, recipes), owners
        return self.room is not None and bool(self.room[2])

    def agree(self, fills: list[bool]) -> None:
        """See that all ranks go on alike: functions that fill tensors draw rank 0's random numbers, on all ranks."""
        if len(set(fills)) > 1:
            got = f"such tensors on rank {fills.index(True)}, none on rank {fills.index(False)}"
            what = "load_hf: tensors on the meta device that the checkpoint does not have, on some ranks alone."
            needs, fix = "the same modules on all ranks", "give values to these tensors before load_hf, or after it"
            raise CheckpointError(explain(what, got=got, needs=needs, fix=fix))

    def make_room(self) -> None:
        """Give memory to what is on the meta device, and fill what the checkpoint does not have."""
        if self.room is not None:
            recipes, room, owners = self.room
            room.make()
            initialise(recipes, room, owners)

    def give_back(self) -> None:
        """Make a model that was on the meta device as it was."""
        if self.room is not None:
            self.room[1].give_back()

    def read(self) -> int:
        """Read this rank's rows."""
        tensors = self._tensors()
        fillings = [self._filling(name, tensors[name], stored) for name, stored in self.sources.items()]
        num_bytes = fill(f for f in fillings if f is not None)
        values = self.model.state_dict(keep_vars=True)
        inference = any(isinstance(t, Tensor) and t.is_inference() for t in values.values())
        with torch.inference_mode(mode=inference), torch.no_grad():
            # The tensors are their own targets: this runs the hooks that a model has for its loading, and lets autograd
            # count that they were written.
            self.model.load_state_dict(values, strict=False)
        return num_bytes

    def _filling(self, name: str, x: Tensor, stored: Stored) -> Filling | None:
        piece = ties.held(x).detach()
        if isinstance(x, DTensor):
            where = x.device_mesh.get_coordinate()
            if where is None or piece.numel() == 0:
                return None
            if name in self.nested:
                part = part_at(x.shape, layout_of(x), where, nested=self.nested[name])
                assert part is not None, f"{name}: its cuts have no such reading"
                return Filling(piece, part, stored)
        return Filling(piece, part_of(x), stored)


def _groups(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Give the names of each tensor, the one that others follow first."""
    declared = {module_name(a): module_name(b) for a, b in ties.declared_ties(model).items()}
    follows = ties.tied_names(tensors, declared)
    groups: dict[str, list[str]] = {name: [name] for name in tensors if name not in follows}
    for name, first in follows.items():
        groups[first].append(name)
    return list(groups.values())


def _one_a_tensor(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Leave one name to each tensor of a group."""
    found: list[str] = []
    for name in names:
        if not any(ties.is_same_tensor(tensors[name], tensors[other]) for other in found):
            found.append(name)
    return found


def _kind(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} of {dtype}"


def _unlike(name: str, x: Tensor, source: str, stored: Stored) -> list[str]:
    """Say how a tensor of the checkpoint does not fit the one that it is read into."""
    here, there = _kind(x.shape, x.dtype), _kind(stored.shape, stored.dtype)
    line = f"{name}: {there} in the checkpoint{f' as {source}' if source != name else ''}, {here} in the model"
    if stored.shape not in (tuple(x.shape), without_ones(name, x.shape)):
        return [line]
    fits = stored.dtype == x.dtype or (stored.dtype in _CONVERTED and x.dtype in _CONVERTED)
    return [] if fits else [line]


def _advice(missing: Mapping[str, str], unexpected: Iterable[str]) -> str | None:
    """Say where names differ by what they begin with alone."""
    there = set(unexpected)
    for name in missing:
        prefix, _, rest = name.partition(".")
        if rest in there:
            return f"load_hf(model.{prefix}, ...): the checkpoint has the names without {prefix!r}"
        found = next((other for other in there if other.endswith(f".{name}")), None)
        if found:
            return f"a model that holds this one as {found.removesuffix(f'.{name}')!r}, as the checkpoint has it"
    return None
