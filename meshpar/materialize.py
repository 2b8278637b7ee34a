"""From a model on the meta device, parallelized, to values: shard by shard, so that no rank ever holds the whole.

Invariant: beside its share, a rank holds the whole tensors of one module at a time, or a window of a file. What has no
values to come is named before anything is made, on all ranks, and after an error the model is as hollow as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.checkpoint.load import load_checkpoint
from meshpar.checkpoint.state import hollow
from meshpar.checkpoint.together import everyone, team
from meshpar.errors import CheckpointError, SpecError, explain
from meshpar.recipes import Init, Recipes, Room, held_of, initialise
from meshpar.shares import narrowed, share_of

WINDOW_BYTES = 4 * 2**20
"""How much is read from a file of values before its pages are let go; more where a share is large."""


def materialize(
    model: nn.Module,
    *,
    init: Init | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    state_dict: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    step: int | None = None,
) -> nn.Module:
    """Give values to a model that was built under `torch.device("meta")` and parallelized, in place.

    Make the optimizer afterwards: parameters are new ones. Memory of a rank: its share, and one module.

    Args:
        model: the model; what it has on other devices stays as it is.
        init: called with each module that has parameters or buffers of its own without data, children first; they are
            whole, plain and uninitialised then, and it must fill all of them. By default a module's own
            `reset_parameters()`.
        checkpoint: take the values from a checkpoint of `save_checkpoint`.
        state_dict: take them from the state dict of one process, or from a file of it, of which a rank reads its rows.
        step: the newest checkpoint of this step.

    Returns:
        The model.

    Communication:
        The state of rank 0's generator; tiny answers of every rank.

    Raises:
        SpecError: several sources, or modules without a recipe, by name; before anything is made, on all ranks.
        CheckpointError: values that do not fit, or cannot be read; before anything is made, on all ranks.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 1)
        >>> materialize(model).weight.device
        device(type='cpu')
    """
    given = {"init": init, "checkpoint": checkpoint, "state_dict": state_dict}
    sources = [name for name, value in given.items() if value is not None]
    if len(sources) > 1 or (step is not None and checkpoint is None):
        got = ", ".join([*sources, *(["step"] if step is not None else [])])
        fix = "give one of them, step with a checkpoint alone"
        raise SpecError(explain("materialize: where from?", got=got, needs="one source of values", fix=fix))
    if not hollow(model):
        return model
    by_recipe = not sources or init is not None
    left = set(hollow(model)) - (set() if by_recipe else set(model.state_dict(keep_vars=True)))
    recipes = Recipes(model, init)
    recipes.check(left)
    room = Room(model, recipes)

    def make_room() -> None:
        room.make()
        owners = [m for m in recipes.modules if by_recipe or any(name in left for name in recipes.own(m))]
        initialise(recipes, room, owners)

    try:
        if by_recipe:
            make_room()
        elif checkpoint is not None:
            load_checkpoint(checkpoint, model, rng=False, step=step, make_room=make_room)
        else:
            _from_state_dict(model, state_dict, make_room)
    except BaseException:
        room.give_back()
        raise
    return model


def _from_state_dict(model: nn.Module, source: Any, make_room: Callable[[], None]) -> None:
    """Take values from the state dict of one process, or from a file of it, a window after the other."""

    def read() -> Mapping[str, Any]:
        if isinstance(source, Mapping):
            return source
        found = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(found, Mapping):
            text = f"the file holds a {type(found).__name__}, not a state dict"
            raise TypeError(text)
        return found

    us, what = team(), "materialize: the state dict cannot be taken."
    fix = "give the state dict of the model on one process, or a file of it"
    everyone(us, what, lambda: _check_fit(model, read()), fix=fix)
    make_room()
    others: dict[str, Any] = {}
    targets = model.state_dict(keep_vars=True)
    held = {name: held_of(t) for name, t in targets.items() if isinstance(t, Tensor)}
    window = max(WINDOW_BYTES, sum(h.nbytes for h in held.values()) // 64)  # each takes a look at the whole index

    def fill(names: list[str]) -> None:
        values = read()
        for name in names:
            if name in held:
                held[name].copy_(narrowed(values[name].detach(), share_of(targets[name])))
            else:
                others[name] = values[name]

    def fill_all() -> None:
        names: list[str] = []
        with torch.no_grad():
            for name in targets:
                names.append(name)
                if sum(held[n].nbytes for n in names if n in held) >= window:
                    fill(names)
                    names = []
            fill(names)
            model.load_state_dict({**targets, **others})  # its own tensors: runs the hooks of the model

    everyone(us, what, fill_all, fix=fix)


def _check_fit(model: nn.Module, values: Mapping[str, Any]) -> None:
    targets = model.state_dict(keep_vars=True)
    wrong = [f"{name}: missing" for name in targets if name not in values]
    wrong += [f"{name}: not in the model" for name in values if name not in targets]
    for name, target in targets.items():
        if isinstance(target, Tensor) and name in values:
            value = values[name]
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                wrong.append(f"{name}: a {type(value).__name__}, not a plain tensor")
            elif value.shape != target.shape:
                wrong.append(f"{name}: {tuple(value.shape)} in the state dict, {tuple(target.shape)} in the model")
    if wrong:
        shown = [*wrong[:20], *([f"... {len(wrong)} in all"] if len(wrong) > 20 else [])]
        needs = "the names and shapes of the model"
        fix = "the state dict of the same model on one process"
        raise CheckpointError(explain("materialize: the state dict does not fit.", got=shown, needs=needs, fix=fix))
