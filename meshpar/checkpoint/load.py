"""`load_checkpoint`: every rank reads its own rows, on whatever mesh it is now.

Invariant: what does not fit is found before anything is read, and is one error on all ranks that names every key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from meshpar.checkpoint import folders, generators, state
from meshpar.checkpoint.objects import apply_object, room_for_object
from meshpar.checkpoint.planner import Piece, PieceLoader, Reader
from meshpar.checkpoint.save import STATE, wait_for_pending
from meshpar.checkpoint.state import MODEL, Stateful
from meshpar.checkpoint.together import everyone, first, team
from meshpar.errors import CheckpointError, explain

_FIX = "check the disk, and that all ranks see the same folder; or load an older checkpoint, with step="


@dataclass(frozen=True)
class Loaded:
    """Hold what was loaded beside the state of the objects that were given.

    Args:
        path: the checkpoint.
        step: its step.
        extra: the further values that were saved with it.
    """

    path: Path
    step: int
    extra: dict[str, Any]


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    objects: Mapping[str, Stateful] | None = None,
    rng: bool = True,
    step: int | None = None,
    make_room: Callable[[], None] | None = None,
) -> Loaded:
    """Load what `save_checkpoint` has saved, on any mesh, into the objects given.

    Args:
        folder: the folder of the run, of which the newest checkpoint is taken, or one checkpoint in it.
        model: a model of the same names, shapes and dtypes.
        optimizer: an optimizer of its parameters; it need not have done a step.
        scheduler: a scheduler of the same kind.
        sampler: a sampler.
        objects: further objects, by the names under which they were saved.
        rng: whether the random number generators are set. On the mesh that saved, each rank has its own back; on
            another one, ranks of one data coordinate have the same, see `meshpar.checkpoint.generators`.
        step: the newest checkpoint of this step.
        make_room: called once the checkpoint is known to fit, for a model on the meta device; see `materialize`.

    Returns:
        A `Loaded`: path, step and extra values.

    Communication:
        The path, from rank 0; tiny answers of every rank. Each rank reads its own rows from the folder.

    Raises:
        CheckpointError: on all ranks: no checkpoint, a damaged one, or one that does not fit; nothing has been changed
            then. A disk that fails while it is read may leave the model half loaded.

    Example:
        >>> import tempfile
        >>> from meshpar.checkpoint import save_checkpoint
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, model, step=5, extra={"note": "good"}).result()
        ...     loaded = load_checkpoint(folder, nn.Linear(2, 1))
        >>> loaded.step, loaded.extra
        (5, {'note': 'good'})
    """
    wait_for_pending()
    us = team()
    root = Path(folder)

    def choose() -> tuple[Path, int]:
        path = folders.find(root, step)
        return path, folders.read_manifest(path)["step"]

    path, saved_step = first(us, f"load_checkpoint: {root} cannot be read.", choose, fix=_FIX)
    what = f"load_checkpoint: {path} cannot be loaded."
    job = _Job(path, model, optimizer)
    parts = {"scheduler": scheduler, "sampler": sampler}
    job.things = dict(objects or {})
    everyone(us, what, lambda: job.prepare(parts, rng=rng, hollow=make_room is not None), fix=_FIX)
    if make_room is not None:
        make_room()
        everyone(us, what, lambda: job.prepare(parts, rng=rng, hollow=False), fix=_FIX)
    everyone(us, what, job.read, fix=_FIX)

    def apply() -> None:
        job.apply(parts)
        if rng:
            told = job.plain
            generators.restore(told["rng"], told["mesh"], generators.mesh_in(model), us.rank)

    everyone(us, what, apply, fix=_FIX)
    return Loaded(path, saved_step, job.plain["extra"])


class _Job:
    """Load one checkpoint on one rank, in steps that all ranks take together."""

    def __init__(self, path: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.path = path
        self.reader = Reader(path)
        self.plain: dict[str, Any] = {}
        self.targets: dict[str, Tensor] = {}
        self.saved_as: dict[str, str] = {}
        self.things: dict[str, Stateful] = {}

    def prepare(self, parts: Mapping[str, Stateful | None], *, rng: bool, hollow: bool) -> None:
        """Read what there is, and check that it fits."""
        self.metadata = self.reader.read_metadata()
        self.plain = state.from_bytes((self.path / STATE).read_bytes())
        wrong = [f"no {name} was saved" for name, part in parts.items() if part is not None and name not in self.plain]
        if rng and self.plain["rng"] is None:
            wrong.append("no random number generators were saved")
        if not hollow:
            self._check_room()
        wrong += self._prepare_model()
        if self.optimizer is not None:
            wrong += self._prepare_optimizer(self.optimizer)
        told = self.plain.get("objects", {})
        for name, thing in self.things.items():
            if name in told:
                wrong += room_for_object(name, thing, told[name], self.metadata, self.targets)
            else:
                wrong.append(f"no {name} was saved")
        if wrong:
            shown = [*wrong[:20], f"... {len(wrong)} in all"] if len(wrong) > 20 else wrong
            raise CheckpointError(
                explain(
                    f"load_checkpoint: {self.path} does not fit.",
                    got=shown,
                    needs="the names, shapes and dtypes that were saved, and only what was saved",
                    fix="build the model and the optimizer as they were when they were saved; leave out what was not",
                )
            )

    def _check_room(self) -> None:
        empty = state.hollow(self.model)
        if empty:
            got = f"{len(empty)} parameters or buffers on the meta device, e.g. {empty[:3]}"
            fix = f"materialize(model, checkpoint={str(self.path)!r})"
            text = explain("load_checkpoint: no room for values.", got=got, needs="a model with memory", fix=fix)
            raise CheckpointError(text)

    def _prepare_model(self) -> list[str]:
        tensors, others, _ = state.model_tensors(self.model)
        told = self.plain["model"]
        saved = {name[len(MODEL) :] for name in self.metadata.state_dict_metadata if name.startswith(MODEL)}
        here = set(self.model.state_dict(keep_vars=True))
        there = saved | set(told["ties"]) | set(told["others"])
        wrong: list[str] = []
        for name, value in tensors.items():
            source = MODEL + told["ties"].get(name, name)
            if name in told["others"]:
                wrong.append(f"{name}: not a tensor in the checkpoint")
            elif name in there:
                wrong += _unlike(name, value, self.metadata, source)
                self.targets[MODEL + name], self.saved_as[MODEL + name] = value, source
        wrong += [f"{name}: a tensor in the checkpoint" for name in others if name in there - set(told["others"])]
        wrong += [f"{name}: missing in the checkpoint" for name in sorted(here - there)]
        return wrong + [f"{name}: in the checkpoint, not in the model" for name in sorted(there - here)]

    def _prepare_optimizer(self, optimizer: Optimizer) -> list[str]:
        told = self.plain.get("optimizer")
        if told is None:
            return ["no optimizer was saved"]
        names = state.names_of(self.model, optimizer)
        saved = [group["params"] for group in told["groups"]]
        if len(names) != len(saved):
            return [f"optimizer: {len(saved)} groups were saved, this one has {len(names)}"]
        wrong = []
        for i, (ours, theirs) in enumerate(zip(names, saved, strict=True)):
            wrong += [f"optimizer group {i}: {name} was not in it" for name in sorted(set(ours) - set(theirs))]
            wrong += [f"optimizer group {i}: {name} is not in it now" for name in sorted(set(theirs) - set(ours))]
        if wrong:
            return wrong
        members = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = dict(zip([name for group in names for name in group], members, strict=True))
        for full, (name, key, placed) in told["tensors"].items():
            about = self.metadata.state_dict_metadata[full]
            assert isinstance(about, TensorStorageMetadata)
            p = parameters[name]
            self.targets[full] = state.room_for(p, key, tuple(about.size), about.properties.dtype, placed=placed)
        return []

    def read(self) -> None:
        """Read this rank's rows of every tensor."""
        pieces: dict[str, Piece] = {name: state.piece_of(value) for name, value in self.targets.items()}
        planner = PieceLoader(pieces, self.saved_as)
        planner.set_up_planner({}, self.metadata)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        with torch.no_grad():
            self.reader.read_data(self.reader.prepare_local_plan(planner.create_local_plan()), planner).wait()

    def apply(self, parts: Mapping[str, Stateful | None]) -> None:
        """Hand over what was read."""
        values = self.model.state_dict(keep_vars=True)
        values.update(self.plain["model"]["others"])
        # The tensors are their own targets: this runs the hooks that a model has for its loading.
        with torch.no_grad():
            self.model.load_state_dict(values)
        if self.optimizer is not None:
            state.apply_optimizer(self.model, self.optimizer, self.plain["optimizer"], self.targets)
        for name, thing in self.things.items():
            apply_object(thing, self.plain["objects"][name], self.targets)
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(self.plain[name])


def _unlike(name: str, value: Tensor, metadata: Metadata, source: str) -> list[str]:
    about = metadata.state_dict_metadata[source]
    assert isinstance(about, TensorStorageMetadata)
    saved, here = (tuple(about.size), about.properties.dtype), (tuple(value.shape), value.dtype)
    if saved == here:
        return []
    return [f"{name}: {saved[0]} of {saved[1]} in the checkpoint, {here[0]} of {here[1]} in the model"]
