"""Processes: which rank this is, which device, and the start of the process group.

Invariant: a process group that exists is never replaced, and variables that the user has set always win.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from meshpar.errors import SpecError, explain

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets, from which a process group can be started."""


def world_size() -> int:
    """Give the number of ranks: of the process group, else of torchrun's variables, else 1.

    Raises:
        SpecError: some of torchrun's variables are set and others are missing, or they are not numbers that fit.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    return _integer("WORLD_SIZE", 1) if _launched() else 1


def _launched() -> bool:
    """Tell whether torchrun's variables are there; an address alone does not name a rank."""
    missing = [name for name in LAUNCHER if name not in os.environ]
    if {"RANK", "WORLD_SIZE"} <= set(missing):
        return False
    if missing:
        raise SpecError(
            explain(
                "process group: cannot be started.",
                got=f"missing in the environment: {', '.join(missing)}",
                needs=f"all of {', '.join(LAUNCHER)}, or neither RANK nor WORLD_SIZE for a single process",
                fix="start with torchrun",
            )
        )
    rank, size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    _integer("MASTER_PORT", 0)
    if not 0 <= rank < size:
        raise SpecError(
            explain(
                "process group: cannot be started.",
                got=f"RANK={rank}, WORLD_SIZE={size}",
                needs="a rank from 0 to the number of ranks less one",
                fix="start with torchrun",
            )
        )
    return True


def local_rank() -> int:
    """Give the rank among the processes of this host, 0 where nothing says otherwise."""
    return _integer("LOCAL_RANK", 0)


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise SpecError(
            explain(f"{name}: not a number.", got=f"{name}={text!r}", needs="an integer", fix="start with torchrun")
        ) from None


def default_device_type() -> str:
    """Give "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(device_type: str) -> torch.device:
    """Give the device of this rank."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def ensure_process_group(device_type: str) -> None:
    """Start the process group where there is none: from torchrun's variables, else as a world of one.

    Raises:
        SpecError: some of torchrun's variables are set and others are missing, or they are not numbers that fit.
    """
    if dist.is_initialized():
        return
    launched = _launched()
    if device_type == "cuda":
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
