"""The state dict of one process, from a model that lies over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshpar.checkpoint import state
from meshpar.checkpoint.together import everyone, team
from meshpar.errors import CheckpointError, explain
from meshpar.shares import whole_of


def full_state_dict(model: nn.Module, *, ranks: str = "all") -> dict[str, Any]:
    """Give the state dict that one process would have: whole, plain tensors on the CPU, under the same names.

    Tied weights share their memory in it, as on one process. It loads into the model on one process, and
    `load_state_dict` of a parallelized model takes it as well: every rank cuts out its rows.

    Args:
        model: a parallelized model, or any other.
        ranks: "all", or "first" for rank 0 alone; the others then get an empty dict.

    Returns:
        The state dict.

    Communication:
        An all-gather of each parameter, one after the other: a rank holds one more parameter on its device at a time.

    Raises:
        CheckpointError: an unknown `ranks`, or parameters without data; on all ranks, before the gathers.

    Example:
        >>> full_state_dict(nn.Linear(2, 1))["weight"].shape
        torch.Size([1, 2])
    """
    us = team()
    everyone(us, "full_state_dict: cannot be made.", lambda: _check(model, ranks), fix="see above")
    keeps = ranks == "all" or us.rank == 0
    wholes: dict[int, Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in wholes:
            whole = whole_of(value)
            wholes[id(value)] = whole.to("cpu", copy=True) if keeps else torch.empty(0)
        if keeps:
            found[name] = wholes[id(value)] if isinstance(value, Tensor) else value
    return found


def _check(model: nn.Module, ranks: str) -> None:
    if ranks not in ("all", "first"):
        text = explain("full_state_dict: unknown ranks.", got=repr(ranks), needs='"all" or "first"', fix='ranks="all"')
        raise CheckpointError(text)
    empty = state.hollow(model)
    if empty:
        got = f"{len(empty)} parameters or buffers on the meta device, e.g. {empty[:3]}"
        text = explain("full_state_dict: no values.", got=got, needs="a model with values", fix="materialize(model)")
        raise CheckpointError(text)
