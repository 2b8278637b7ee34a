"""Processes: which rank this is, which device, and the start of the process group.

Invariant: a process group that exists is never replaced, and variables that the user has set always win.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshpar import private
from meshpar.addresses import (
    GLOO,
    check_gloo_ifname,
    configure_gloo_ifname,
    resolve_master_addr,
    resolve_socket_ifname,
)
from meshpar.config import DISTRIBUTED_MODES
from meshpar.errors import SpecError, explain
from meshpar.launchers import DEFAULT_MASTER_PORT, Launch, forgotten_launcher, read_launch
from meshpar.rendezvous import agree_address, open_store, refuse_shared_gpus, tell_all

__all__ = [
    "DEFAULT_MASTER_PORT",
    "DISTRIBUTED_MODES",
    "Process",
    "configure_gloo_ifname",
    "default_device_type",
    "distributed",
    "ensure_process_group",
    "get_rank_info",
    "local_device",
    "local_rank",
    "resolve_master_addr",
    "resolve_socket_ifname",
    "select_device",
    "setup",
    "world_size",
]


LONGEST_S = 10**8
"""The longest time limit: three years."""


@dataclass(frozen=True)
class Process:
    """Hold what a process is to its job.

    Args:
        rank: over all hosts.
        world_size: number of processes.
        local_rank: among the processes of this host.
        device: where it computes.
        launcher: what said so.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    launcher: str


def world_size() -> int:
    """Give the number of ranks: of the process group, else as the launcher says, else 1.

    Raises:
        SpecError: a launcher's variables are there in part, or are not numbers that fit.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    launch = read_launch(os.environ)
    return 1 if launch is None else launch.world_size


def refuse_rank_of_a_job(what: str, *, needs: str, fix: str) -> None:
    """Refuse what only a process may do that is alone.

    Raises:
        SpecError: this process is one of several ranks.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        got = f"a process group of {dist.get_world_size()} ranks"
        raise SpecError(explain(f"{what}: this process is a rank of a job.", got=got, needs=needs, fix=fix))


def local_rank() -> int:
    """Give the rank among the processes of this host, 0 where nothing says otherwise."""
    launch = read_launch(os.environ)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank


def get_rank_info(trainer_mode: str | None) -> tuple[int, int, int]:
    """Say which rank this is: (local rank, rank, number of ranks).

    In a mode that is distributed, MASTER_ADDR and MASTER_PORT are set where they are unset.

    Args:
        trainer_mode: one of `DISTRIBUTED_MODES`; any other mode is one process, whatever the environment.

    Communication:
        Under MPI with mpi4py: one broadcast over MPI.

    Raises:
        SpecError: a launcher's variables are there in part, or are not numbers that fit; the local rank is not known;
            nothing names the host of rank 0.

    Example:
        >>> get_rank_info("none")
        (0, 0, 1)
    """
    if trainer_mode not in DISTRIBUTED_MODES:
        return 0, 0, 1
    launch = read_launch(os.environ)
    if launch is None:
        _say_alone(forgotten_launcher(os.environ))
        return 0, 0, 1
    local = _known_local_rank(launch)
    agree_address(launch)
    return local, launch.rank, launch.world_size


@functools.cache  # said once
def _say_alone(forgotten: str | None) -> None:
    hint = "start with torchrun, mpirun or srun for more" if forgotten is None else forgotten
    logging.getLogger("meshpar").warning("no launcher: one process; %s", hint)


def _known_local_rank(launch: Launch) -> int:
    if launch.local_rank is None:
        raise SpecError(
            explain(
                "local rank: not known.",
                got=f"rank {launch.rank} of {launch.world_size} ({launch.launcher}), no LOCAL_RANK",
                needs="the rank among the processes of this host: all of them would work on one GPU",
                fix="set LOCAL_RANK, or start with torchrun",
            )
        )
    return launch.local_rank


def select_device(
    local_rank: int = 0,
    device: str | torch.device | None = None,
    set_benchmark: bool = False,  # noqa: FBT001, FBT002 - the signature that trainers know
) -> torch.device:
    """Give the device of a rank, and make it the current one where it is a GPU.

    Args:
        local_rank: rank among the processes of this host. Where a process sees a single GPU, that is its GPU:
            launchers may show each rank its own.
        device: one that is wanted; by default CUDA, then MPS, then the CPU.
        set_benchmark: let cuDNN try out its algorithms.

    Raises:
        SpecError: more ranks on this host than GPUs, a GPU that is not there, or no device at all.

    Example:
        >>> select_device(3, "cpu")
        device(type='cpu')
    """
    chosen = _device(device)
    if chosen.type == "cuda":
        chosen = _gpu(local_rank, chosen)
        torch.cuda.set_device(chosen)
        if set_benchmark:
            torch.backends.cudnn.benchmark = True
    return chosen


def _device(device: Any) -> torch.device:
    try:
        return torch.device(_default_type() if device is None else device)
    except (RuntimeError, TypeError) as error:
        got, needs = f"device={device!r}: {str(error).splitlines()[0]}"[:300], "a device, or None for the best one"
        raise SpecError(explain("device: not known.", got=got, needs=needs, fix='"cuda" or "cpu"')) from error


def _gpu(local_rank: int, wanted: torch.device) -> torch.device:
    count = torch.cuda.device_count()
    index = wanted.index if wanted.index is not None else 0 if count == 1 else local_rank
    if index >= count:
        raise SpecError(
            explain(
                "device: there is no such GPU.",
                got=f"cuda:{index} for local rank {local_rank}; {count} GPUs seen on {socket.gethostname()}",
                needs="a GPU for each rank of a host",
                fix=f"at most {count} ranks on this host, or device='cpu'",
            )
        )
    return torch.device("cuda", index)


def _default_type() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def default_device_type() -> str:
    """Give "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(device_type: str) -> torch.device:
    """Give the device of this rank."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def ensure_process_group(device_type: str) -> None:
    """Start the process group where there is none: as the launcher says, else as a world of one.

    Raises:
        SpecError: a launcher's variables are there in part, or are not numbers that fit; several ranks on one GPU.
    """
    if dist.is_initialized():
        return
    launch = read_launch(os.environ) or Launch("none", 0, 1, 0)
    local = _known_local_rank(launch) if device_type == "cuda" else 0
    device = select_device(local, device_type)
    _start(launch, device)


def setup(
    rank: int,
    world_size: int,
    mode: str | None,
    backend: str | None = None,
    device_id: int | torch.device | None = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """Start the process group of a distributed mode; nothing for any other mode, or where there is a group.

    Args:
        rank: of this process.
        world_size: number of processes.
        mode: one of `DISTRIBUTED_MODES`, or another for one process.
        backend: by default "gloo", or "cpu:gloo,cuda:nccl" with a GPU.
        device_id: the GPU, which NCCL is told at once; by default the current one where there is one.
        timeout_s: seconds after which a communication fails; by default torch's.

    Communication:
        The rendezvous at MASTER_ADDR and MASTER_PORT.

    Raises:
        SpecError: a rank that does not fit; several ranks on one GPU, on all ranks.
    """
    if mode not in DISTRIBUTED_MODES or dist.is_initialized():
        return
    _check_given(rank, world_size)
    _check_timeout(timeout_s)
    if device_id is None:
        device = local_device(default_device_type() if backend != "gloo" else "cpu")
    else:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    if device.type == "cuda":
        torch.cuda.set_device(device)
    said = None if {"RANK", "WORLD_SIZE"} & set(os.environ) else read_launch(os.environ)
    same = said is not None and (said.rank, said.world_size) == (rank, world_size)
    launch = said if same and said is not None else Launch("arguments", rank, world_size)
    _start(launch, device, backend=backend, timeout_s=timeout_s)


def _check_timeout(timeout_s: object) -> None:
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s <= LONGEST_S):  # type: ignore[operator]
        got, needs = f"timeout_s={timeout_s!r}", f"seconds, more than 0 and at most {LONGEST_S:g}"
        raise SpecError(explain("process group: cannot be started.", got=got, needs=needs, fix="timeout_s=600"))


def _check_given(rank: int, world_size: int) -> None:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, world_size))
    if not whole or not 0 <= rank < world_size:
        got = f"rank={rank}, world_size={world_size}"
        needs = "a rank from 0 to the number of ranks less one"
        raise SpecError(explain("process group: cannot be started.", got=got, needs=needs, fix="see get_rank_info"))


@contextlib.contextmanager
def distributed(
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    rendezvous_file: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
) -> Iterator[Process]:
    """Run a block as one rank of the job: device, interface, process group; the group is gone after the block.

    A group that exists is used, and left. After an error in the block the group is torn down without waiting for
    the other ranks: those that wait for this one fail at once.

    Args:
        device: by default CUDA by local rank, then MPS, then the CPU.
        backend: by default "gloo", or "cpu:gloo,cuda:nccl" with a GPU.
        timeout_s: seconds after which a communication, or the wait for other ranks, fails.
        rank: in place of what the launcher says; with `world_size`.
        world_size: number of processes; with `rank`.
        local_rank: rank on this host, in place of what the launcher says.
        rendezvous_file: path in a shared folder at which the ranks meet, in place of an address.
        run_id: name of this run in that file's name; by default the launcher's name of the job.

    Communication:
        The rendezvous.

    Raises:
        SpecError: a launcher's variables are there in part, or are not numbers that fit; several ranks on one GPU.

    Example:
        >>> with distributed(device="cpu") as process:
        ...     process.world_size
        1
    """
    _check_timeout(timeout_s)
    if local_rank is not None:
        _check_given(local_rank, LONGEST_S if world_size is None else world_size)
    launch = _given(rank, world_size, local_rank) or read_launch(os.environ)
    if launch is None:
        _say_alone(forgotten_launcher(os.environ))
        launch = Launch("none", 0, 1, 0)
    local = local_rank if local_rank is not None else launch.local_rank
    wants_gpu = _device(device).type == "cuda"
    if local is None and wants_gpu:
        local = _known_local_rank(launch)
    chosen = select_device(local or 0, device)
    started = not dist.is_initialized()
    if started:
        _start(launch, chosen, backend=backend, timeout_s=timeout_s, file=rendezvous_file, run_id=run_id)
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), local or 0, chosen, launch.launcher)
    except BaseException:
        if started and dist.is_initialized():
            private.abort_groups()
        raise
    if started and dist.is_initialized():
        dist.destroy_process_group()


def _given(rank: int | None, world_size: int | None, local_rank: int | None) -> Launch | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        got = f"rank={rank}, world_size={world_size}"
        raise SpecError(explain("distributed: half of a rank.", got=got, needs="both or neither", fix="give both"))
    _check_given(rank, world_size)
    return Launch("arguments", rank, world_size, local_rank)


def _start(
    launch: Launch,
    device: torch.device,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    file: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
) -> None:
    """Start the process group of a launch: address, interface, store, the check of the GPUs, the group."""
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if launch.world_size > 1 and file is None:
        agree_address(launch)
    _choose_interface(launch)
    store = open_store(launch, timeout or timedelta(minutes=30), file=file, run_id=run_id)
    on_gpu = device.type == "cuda" and "nccl" in backend
    if on_gpu:
        refuse_shared_gpus(tell_all(store, launch, "gpu", _identity(device)))
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def _choose_interface(launch: Launch) -> None:
    """Set gloo's interface where ranks may be on other hosts; on one host it needs none. A given one is checked."""
    if launch.world_size > 1 and launch.local_size != launch.world_size:
        configure_gloo_ifname()
    elif os.environ.get(GLOO):
        check_gloo_ifname(os.environ[GLOO])


def _identity(device: torch.device) -> str:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device)
    return f"{socket.gethostname()} {uuid}"
