"""How the ranks of a launch find each other: an address and a port that all agree on, and the store there.

Invariant: MASTER_ADDR and MASTER_PORT are set where they are unset, never overwritten.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshpar.addresses import resolve_master_addr
from meshpar.errors import SpecError, explain
from meshpar.launchers import Launch

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
"""The variables that name the place of the rendezvous."""


def agree_address(launch: Launch) -> None:
    """Set MASTER_ADDR and MASTER_PORT where they are unset, to the same on all ranks.

    Under MPI with mpi4py rank 0 picks both (its environment wins) and broadcasts them. Else the address is the host
    of rank 0 as the launcher names it, or this host's own where all ranks are on it; the port follows from the name
    of the job. What is only guessed is warned about.

    Communication:
        Under MPI with mpi4py: one broadcast over MPI.

    Raises:
        SpecError: the ranks are on several hosts and nothing names that of rank 0; MASTER_ADDR is empty, or
            MASTER_PORT not a port.
    """
    if os.environ.get("MASTER_ADDR", "x").strip() == "":
        needs, fix = "a name or an address of the host of rank 0", "unset it"
        raise SpecError(explain("MASTER_ADDR: not an address.", got="MASTER_ADDR=''", needs=needs, fix=fix))
    picked = _broadcast(launch)
    guessed = []
    if picked is None and "MASTER_ADDR" not in os.environ:
        guessed.append("MASTER_ADDR")
    if picked is None and "MASTER_PORT" not in os.environ and launch.job is None:
        guessed.append("MASTER_PORT")
    if picked is None:
        picked = _address(launch), str(launch.port)
    for name, value in zip(ADDRESS, picked, strict=True):
        os.environ.setdefault(name, value)
    _check_port(os.environ["MASTER_PORT"])
    if "MASTER_ADDR" in guessed and launch.host is not None:
        guessed.remove("MASTER_ADDR")
    if guessed and (launch.rank == 0 or launch.local_size is None):
        told = ", ".join(f"{name}={os.environ[name]}" for name in guessed)
        hint = "install mpi4py, or set them" if launch.is_mpi else "set them"
        warnings.warn(f"not set, and taken by default: {told}; on several hosts, {hint}", stacklevel=2)


def _address(launch: Launch) -> str:
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    if launch.host is not None:
        return launch.host
    if launch.local_size is not None and launch.local_size < launch.world_size:
        raise SpecError(
            explain(
                "process group: cannot be started.",
                got=f"{launch.launcher}: {launch.local_size} of {launch.world_size} ranks on {socket.gethostname()}, "
                "and no MASTER_ADDR",
                needs="the host of rank 0, known to all ranks",
                fix="install mpi4py, or pass MASTER_ADDR on (mpirun -x MASTER_ADDR=$(hostname) ...)",
            )
        )
    return resolve_master_addr()


def _check_port(text: str) -> None:
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", text) or not 0 < int(text) <= 65535:  # 0 is another one on every rank
        got = f"MASTER_PORT={text!r}"
        raise SpecError(explain("MASTER_PORT: not a port.", got=got, needs="1 to 65535", fix="leave it unset"))


def _broadcast(launch: Launch) -> tuple[str, str] | None:
    """Let rank 0 pick over MPI; None where mpi4py is missing, or sees another world than the launcher's variables."""
    if not launch.is_mpi or launch.world_size == 1 or importlib.util.find_spec("mpi4py") is None:
        return None
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"mpi4py is installed, and its MPI cannot be loaded: {error}", stacklevel=3)
        return None
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.world_size):
        seen = f"rank {world.Get_rank()} of {world.Get_size()}"
        said = f"rank {launch.rank} of {launch.world_size}"
        warnings.warn(f"mpi4py is built for another MPI: it sees {seen}, {launch.launcher} says {said}", stacklevel=3)
        return None
    mine = None
    if launch.rank == 0:
        address = os.environ.get("MASTER_ADDR") or resolve_master_addr()
        mine = address, os.environ.get("MASTER_PORT") or str(_free_port())
    picked: tuple[str, str] = world.bcast(mine, root=0)
    return picked


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def open_store(
    launch: Launch, timeout: timedelta, *, file: str | os.PathLike[str] | None = None, run_id: str | None = None
) -> Any:
    """Open the store in which the ranks of a launch meet.

    Args:
        launch: what the launcher said.
        timeout: how long to wait for the other ranks.
        file: path on a folder that all hosts share, in place of an address. The name of the run is added to it, so
            that a file that a crashed run left is never taken for this run's.
        run_id: name of the run, equal on all ranks and used once; by default the launcher's name of the job.

    Raises:
        SpecError: a file, and nothing that names the run.
    """
    if launch.world_size == 1 and file is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    if file is None:
        return next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    name = run_id or launch.job
    if name is None:
        raise SpecError(
            explain(
                "rendezvous file: cannot be used.",
                got=f"{os.fspath(file)!r}, and no name of this run ({launch.launcher})",
                needs="a name of the run, equal on all ranks: the file of a crashed run would hang this one",
                fix='run_id="..." that no other run has; or no file, and MASTER_ADDR',
            )
        )
    path = Path(file)
    shared = dist.FileStore(  # type: ignore[attr-defined]
        str(path.with_name(f"{path.name}.{re.sub('[^A-Za-z0-9_.-]', '-', name)}")), launch.world_size
    )
    shared.set_timeout(timeout)
    return shared


def tell_all(store: Any, launch: Launch, topic: str, word: str) -> list[str]:
    """Tell all ranks a word through the store, before there is a process group.

    Returns:
        The words of all ranks, by rank.

    Communication:
        One write to the store and one read of all words.
    """
    store.set(f"meshpar/{topic}/{launch.rank}", word)
    keys = [f"meshpar/{topic}/{rank}" for rank in range(launch.world_size)]
    store.wait(keys)
    return [bytes(answer).decode() for answer in store.multi_get(keys)]


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """Refuse ranks that would work on one GPU: NCCL hangs, or fails with words that do not name them.

    Args:
        gpus: the identity of each rank's GPU, the same words on all ranks.

    Raises:
        SpecError: one stands there twice; on all ranks.

    Example:
        >>> refuse_shared_gpus(["node01 GPU-a", "node01 GPU-b", "node02 GPU-c"])
    """
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        by_gpu.setdefault(gpu, []).append(rank)
    shared = [f"ranks {', '.join(map(str, ranks))} on {gpu}" for gpu, ranks in by_gpu.items() if len(ranks) > 1]
    if shared:
        raise SpecError(
            explain(
                "process group: several ranks on one GPU.",
                got=shared,
                needs="a GPU of its own for each rank",
                fix="no more ranks on a host than it has GPUs; LOCAL_RANK from the launcher; device='cpu' to try out",
            )
        )
