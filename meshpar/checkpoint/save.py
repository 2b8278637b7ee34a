"""`save_checkpoint`: all ranks write their shares into one folder, which becomes complete by one rename.

Invariant: what was saved before stays until the new checkpoint is complete. In the background, nothing is written that
the training changes later, and no group is used that the training uses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import Optimizer

from meshpar.checkpoint import folders, generators, state
from meshpar.checkpoint import objects as things_of
from meshpar.checkpoint.planner import Piece, PieceSaver
from meshpar.checkpoint.state import Contents, Stateful
from meshpar.checkpoint.together import Team, background_team, by_first, everyone, first, team
from meshpar.errors import CheckpointError, explain

STATE = "state.pt"
"""The file of what is no tensor of the model or the optimizer."""

_FIX = "check the disk, and that all ranks see the same folder; older checkpoints are as they were"

_PENDING: list[Saving] = []
"""The save that runs in the background, if any: the next one waits for it."""


@dataclass(frozen=True)
class Saving:
    """Hold a save that may still run in the background.

    Args:
        path: where the checkpoint is, once it is complete.
    """

    path: Path
    _future: Future[None]

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._future.done()

    def result(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and give its path.

        Raises:
            CheckpointError: it could not be written.
        """
        if self in _PENDING:
            _PENDING.remove(self)
        self._future.result()
        return self.path


def wait_for_pending() -> None:
    """Wait for the save that runs in the background; its error is raised here, if nobody has asked for it."""
    while _PENDING:
        _PENDING[0].result()


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int = 0,
    sampler: Stateful | None = None,
    rng: bool = True,
    objects: Mapping[str, Stateful] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Save a training run, so that it can go on on any other mesh.

    A kill at any moment leaves the last complete checkpoint. All hosts must see the same folder.

    Args:
        folder: a folder for the checkpoints of this run alone; each gets a folder in it, `000003-step-1200`.
        model: a parallelized model, or a plain one on one process. Buffers are those of rank 0; parameters that each
            data coordinate has for itself (`data="none"`) those of the first.
        optimizer: an optimizer of its parameters.
        scheduler: a learning-rate scheduler.
        step: number of the step, 0 or more.
        sampler: a sampler whose position is the same on all ranks; rank 0's is kept.
        rng: whether the random number generators are kept: torch, Python and NumPy, of every rank.
        objects: further objects by name, with a `state_dict` and a `load_state_dict`: an average of the parameters, a
            scaler. DTensors in their states are saved in shares.
        extra: further values: numbers, strings, plain tensors, lists and dicts of them; rank 0's are kept.
        keep: how many checkpoints to keep, the newest ones; all of them by default.
        asynchronous: whether to write in the background, from a copy in main memory; see `Saving.result`. The next
            save or load waits for it first, and raises its error.

    Returns:
        A `Saving`, whose `result()` is the path.

    Communication:
        Plans and results of writing, small, between rank 0 and all. No values of parameters.

    Raises:
        CheckpointError: on all ranks: arguments that cannot work, a folder that cannot be written, a rank that failed.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model, step=5).result().name
        '000001-step-5'
    """
    wait_for_pending()
    us = team()
    mesh = generators.mesh_in(model)

    def collect() -> tuple[dict[str, Any], Any]:
        _check(step, keep)
        contents = _collect(model, optimizer, objects or {}, first=us.rank == 0)
        for name, part in (("scheduler", scheduler), ("sampler", sampler)):
            if part is not None:
                contents.plain[name] = part.state_dict()
        contents.plain["extra"] = dict(extra or {})
        if us.rank == 0:
            state.to_bytes(contents.plain)  # to learn now that it can be done
        held.append(contents)
        return _digest(contents), generators.collect(mesh) if rng else None

    held: list[Contents] = []
    told = everyone(us, "save_checkpoint: the state cannot be saved.", collect, fix="see above")
    _check_same([digest for digest, _ in told])
    contents = held[0]
    contents.plain["rng"] = [rank_told for _, rank_told in told] if rng else None
    contents.plain["mesh"] = generators.sizes_of(mesh)
    root = Path(folder)
    what = f"save_checkpoint: {root} cannot be written."
    temporary, saved = first(us, what, lambda: folders.begin(root, step), fix=_FIX)
    everyone(us, what, lambda: _check_seen(temporary), fix=_FIX)
    if not asynchronous:
        _write(us, temporary, saved, contents.pieces, contents.plain, keep)
        finished: Future[None] = Future()
        finished.set_result(None)
        return Saving(saved.path, finished)
    behind = background_team()
    pieces, plain = state.staged(contents.pieces), state.detached(contents.plain)
    future: Future[None] = Future()

    def run() -> None:
        try:
            _write(behind, temporary, saved, pieces, plain, keep)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="save_checkpoint").start()
    saving = Saving(saved.path, future)
    _PENDING.append(saving)
    return saving


def _collect(model: nn.Module, optimizer: Optimizer | None, things: Mapping[str, Stateful], *, first: bool) -> Contents:
    empty = state.hollow(model)
    if empty:
        got = f"{len(empty)} parameters or buffers without data, e.g. {empty[:3]}"
        needs, fix = "a model with values", "materialize(model) before"
        raise CheckpointError(explain("save_checkpoint: nothing to save.", got=got, needs=needs, fix=fix))
    contents = Contents()
    speaks = state.speaks_for_parameters(model, generators.mesh_in(model))
    state.collect_model(model, contents, first=first, speaks=speaks)
    if optimizer is not None:
        state.collect_optimizer(model, optimizer, contents, speaks=speaks)
    for name, thing in things.items():
        things_of.collect_object(name, thing, contents, first=first, speaks=speaks)
    return contents


def _check(step: object, keep: object) -> None:
    wrong = []
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        wrong.append(f"step={step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        wrong.append(f"keep={keep!r}")
    if wrong:
        needs = "step an integer of 0 or more; keep an integer of 1 or more, or None"
        text = explain("save_checkpoint: cannot be done.", got=wrong, needs=needs, fix="step=0, keep=3")
        raise CheckpointError(text)


def _digest(contents: Contents) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (piece.size, str(piece.data.dtype)) for name, piece in contents.pieces.items()}


def _check_same(digests: list[dict[str, Any]]) -> None:
    """Check that all ranks save the same tensors; all of them see the same answer."""
    got = []
    for rank, other in enumerate(digests):
        if other != digests[0]:
            names = sorted(n for n in {*other, *digests[0]} if other.get(n) != digests[0].get(n))
            got.append(f"rank {rank} differs from rank 0 in {len(names)} tensors, e.g. {names[:3]}")
    if got:
        needs, fix = "the same model and optimizer on every rank", "save the same on all ranks, after the same steps"
        raise CheckpointError(explain("save_checkpoint: the ranks differ.", got=got[:5], needs=needs, fix=fix))


def _check_seen(temporary: Path) -> None:
    if not temporary.is_dir():
        text = f"{temporary}, which rank 0 has made, is not there: a folder of this host alone?"
        raise FileNotFoundError(text)


def _write(
    us: Team, temporary: Path, saved: folders.Saved, pieces: dict[str, Piece], plain: dict[str, Any], keep: int | None
) -> None:
    """Write a checkpoint by the parts of DCP, each step taken by all ranks together."""
    what = f"save_checkpoint: {saved.path} cannot be written."
    lead = us.rank == 0
    planner, writer = PieceSaver(), FileSystemWriter(temporary)
    planner.set_up_planner(pieces, is_coordinator=lead)
    writer.set_up_storage_writer(lead, rank=us.rank, use_collectives=True)
    metadata: list[Any] = []

    def combine(plans: list[Any]) -> list[Any]:
        every, told = planner.create_global_plan(plans)
        metadata.append(told)
        return writer.prepare_global_plan(every)

    plan = by_first(us, what, lambda: writer.prepare_local_plan(planner.create_local_plan()), combine, fix=_FIX)
    plan = planner.finish_plan(plan)
    results = everyone(us, what, lambda: writer.write_data(plan, planner).wait(), fix=_FIX)

    def finish() -> None:
        writer.finish(metadata[0], results)
        folders.write_synced(temporary / STATE, state.to_bytes(plain))
        folders.commit(temporary, saved, {"mesh": plain["mesh"], "ranks": us.size})
        if keep is not None:
            folders.prune(saved.path.parent, keep)

    first(us, what, finish, fix=_FIX)
