"""`python -m meshpar doctor`: what this job found, how fast its ranks talk, and what is wrong, in words.

Invariant: facts are gathered before anything is judged; what is wrong is said by one rank, for all.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshpar.addresses import GLOO, interfaces, resolve_master_addr, resolve_socket_ifname
from meshpar.errors import SpecError, explain
from meshpar.launchers import forgotten_launcher
from meshpar.mesh import axis_group, axis_ranks, axis_size, make_mesh
from meshpar.runtime import Process, distributed

SHM = Path("/dev/shm")
_SMALL_SHM_BYTES = 1 << 30
_MESSAGE_BYTES = 8 << 20


@dataclass(frozen=True)
class Facts:
    """Hold what one rank sees of its host.

    Args:
        rank: of the process.
        host: name of its host.
        launcher: what named the rank.
        device: where it computes.
        versions: of Python, torch and, where there is one, NCCL.
        master_addr: an address at which others can reach the host.
        interface: the interface towards the others; None where there is none.
        interfaces: name, state and addresses of all.
        num_gpus: GPUs that the process sees.
        shm_bytes: size of /dev/shm and what is free of it; None where there is none.
        named: addresses that the host name resolves to.
    """

    rank: int
    host: str
    launcher: str
    device: str
    versions: str
    master_addr: str
    interface: str | None
    interfaces: tuple[str, ...] = ()
    num_gpus: int = 0
    shm_bytes: tuple[int, int] | None = None
    named: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Speed:
    """Hold how fast the ranks of an axis pass messages round their ring, the slowest of them."""

    axis: str
    size: int
    latency_s: float
    bytes_per_s: float


@dataclass
class Report:
    """Hold what was found and what is wrong."""

    facts: list[Facts]
    speeds: list[Speed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def look(process: Process) -> Facts:
    """See what this rank has: no communication."""
    nccl = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    listed = [f"{i.name} ({'up' if i.up else 'down'}): {', '.join(i.addresses) or 'no address'}" for i in interfaces()]
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    return Facts(
        rank=process.rank,
        host=socket.gethostname(),
        launcher=process.launcher,
        device=str(process.device),
        versions=f"Python {platform.python_version()}, torch {torch.__version__}{nccl}",
        master_addr=resolve_master_addr(),
        interface=resolve_socket_ifname(),
        interfaces=tuple(listed),
        num_gpus=torch.cuda.device_count(),
        shm_bytes=None if shm is None else (shm.total, shm.free),
        named=_named(),
        hint=forgotten_launcher(os.environ) if process.launcher == "none" else None,
    )


def _named() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(where[0]) for *_, where in found}))


def judge(facts: Sequence[Facts]) -> list[str]:
    """Say in words what is wrong with what the ranks see.

    Args:
        facts: of all ranks.
    """
    problems = [f.hint for f in facts if f.hint]
    for what in ("versions", "launcher"):
        seen = sorted({getattr(f, what) for f in facts})
        if len(seen) > 1:
            problems.append(f"the ranks differ in their {what}: {'; '.join(seen)}")
    first_of = {f.host: f for f in reversed(facts)}
    several = len(first_of) > 1
    for host, f in sorted(first_of.items()):
        on_host = [other for other in facts if other.host == host]
        if several and f.interface is None:
            problems.append(f"{host}: no interface with an address that other hosts could reach: {f.interfaces}")
        if several and f.named and all(name.startswith(("127.", "::1")) for name in f.named):
            problems.append(
                f"{host}: the host name resolves to {', '.join(f.named)}, so MASTER_ADDR={host} works on {host} alone; "
                f"MASTER_ADDR={f.master_addr} is right if rank 0 is there"
            )
        if f.num_gpus and any(other.device == "cpu" for other in on_host):
            problems.append(f"{host}: {f.num_gpus} GPUs, and ranks that compute on the CPU")
        problems += _about_memory(f)
    return problems


def _about_memory(f: Facts) -> list[str]:
    if f.shm_bytes is None:
        return [f"{f.host}: no {SHM}; data loaders with workers and meshpar.share need it"]
    total, free = f.shm_bytes
    if free >= _SMALL_SHM_BYTES:
        return []
    fix = "docker run --shm-size=16g" if total < _SMALL_SHM_BYTES else "remove what crashed jobs left there"
    return [f"{f.host}: {SHM} has {_mib(free)} free of {_mib(total)}: data loaders may die of SIGBUS; {fix}"]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def measure(
    mesh: DeviceMesh, device: torch.device, *, num_bytes: int = _MESSAGE_BYTES, repeats: int = 5
) -> list[Speed]:
    """Pass messages round the ring of each axis of more than one rank.

    Args:
        mesh: of the job.
        device: where the messages lie.
        num_bytes: size of the large message.
        repeats: how often each is sent; the best counts.

    Communication:
        A ring of sends on each axis in turn, one element and `num_bytes`; a maximum over all ranks.
    """
    speeds = []
    for axis in mesh.mesh_dim_names or ():
        if axis_size(mesh, axis) > 1:
            small = _ring(mesh, axis, torch.zeros(1, dtype=torch.uint8, device=device), repeats=4 * repeats)
            large = _ring(mesh, axis, torch.zeros(num_bytes, dtype=torch.uint8, device=device), repeats=repeats)
            slowest = torch.tensor([small, large], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            latency, seconds = slowest.tolist()
            speeds.append(Speed(axis, axis_size(mesh, axis), latency, num_bytes / seconds))
    return speeds


def _ring(mesh: DeviceMesh, axis: str, message: torch.Tensor, *, repeats: int) -> float:
    ranks, group = axis_ranks(mesh, axis), axis_group(mesh, axis)
    place = ranks.index(dist.get_rank())
    received = torch.empty_like(message)
    sent = torch.full_like(message, place)
    best = float("inf")
    for _ in range(repeats + 1):  # the first makes the connections
        start = time.perf_counter()
        ops = [
            dist.P2POp(dist.isend, sent, ranks[(place + 1) % len(ranks)], group),
            dist.P2POp(dist.irecv, received, ranks[place - 1], group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        best = min(best, time.perf_counter() - start)
    if not bool((received == (place - 1) % len(ranks)).all()):
        source = ranks[place - 1]
        got = f"other bytes than rank {source} sent to rank {dist.get_rank()} on axis {axis}"
        fix = "another interface: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; NCCL_P2P_DISABLE=1"
        raise SpecError(explain("ring of sends: wrong.", got=got, needs="the bytes that were sent", fix=fix))
    return best


def _check_sum(device: torch.device) -> list[str]:
    """Check a barrier and an all-reduce."""
    dist.barrier()
    total = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(total)
    n = dist.get_world_size()
    wanted = n * (n + 1) / 2
    return [] if total.item() == wanted else [f"rank {dist.get_rank()}: all-reduce gave {total.item()}, not {wanted}"]


def examine(process: Process, spec: str) -> Report:
    """Gather the facts of all ranks, try their communication, and judge.

    Args:
        process: what `distributed` gave.
        spec: mesh whose axes are measured.

    Communication:
        The facts of all ranks to all; a barrier, an all-reduce, and rings of sends on each axis.
    """
    talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    mine = look(process)
    facts: list[Any] = [None] * process.world_size
    dist.all_gather_object(facts, mine, group=talk)
    mesh = make_mesh(spec, process.device.type)
    wrong: list[Any] = [None] * process.world_size
    dist.all_gather_object(wrong, _check_sum(process.device), group=talk)
    report = Report(facts, measure(mesh, process.device))
    report.problems = judge(facts) + [said for one in wrong for said in one]
    return report


def render(report: Report) -> str:
    """Lay out a report for people."""
    facts = report.facts
    lines = [f"launcher    {facts[0].launcher}, {len(facts)} rank{'s' if len(facts) > 1 else ''}"]
    lines.append(f"versions    {facts[0].versions}")
    for host in dict.fromkeys(f.host for f in facts):
        on_host = [f for f in facts if f.host == host]
        first = on_host[0]
        lines.append(f"host        {host}: ranks {', '.join(str(f.rank) for f in on_host)}")
        lines.append(f"  devices   {', '.join(f.device for f in on_host)}; {first.num_gpus} GPUs seen")
        lines.append(f"  address   {first.master_addr}, interface {first.interface or 'none to another host'}")
        lines += [f"  interface {text}" for text in first.interfaces]
        if first.shm_bytes is not None:
            total, free = first.shm_bytes
            lines.append(f"  /dev/shm  {_mib(total)}, {_mib(free)} free")
    chosen = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", GLOO) if name in os.environ}
    lines.append(f"variables   {', '.join(f'{k}={v}' for k, v in chosen.items()) or 'none'}")
    lines.append("barrier and all-reduce: run")
    for s in report.speeds:
        speed = f"{s.bytes_per_s / 1e9:.2f} GB/s, {s.latency_s * 1e6:.0f} microseconds"
        lines.append(f"axis        {s.axis} of {s.size}: ring of sends, {speed} (slowest rank)")
    if not report.speeds:
        lines.append("axis        none of more than one rank: no sends to measure")
    lines += [f"WRONG       {problem}" for problem in report.problems] or ["nothing is wrong"]
    return "\n".join(lines)


def doctor(*, spec: str = "", device: str | None = None, timeout_s: float = 60.0) -> int:
    """Examine this job; rank 0 prints the report.

    Args:
        spec: mesh whose axes are measured; by default all ranks on data.
        device: as in `distributed`.
        timeout_s: seconds to wait for other ranks.

    Communication:
        As `examine`.

    Returns:
        0 where nothing is wrong, else 1; the code of the process.
    """
    rank, host = os.environ.get("RANK", "?"), socket.gethostname()
    try:
        with distributed(device=device, timeout_s=timeout_s) as process:
            rank = str(process.rank)
            report = examine(process, spec)
    except SpecError as error:
        print(f"WRONG       on {host}, rank {rank}: {error}", flush=True)
        return 1
    except RuntimeError as error:  # of torch: no peer, no connection; its subclasses have no common public name
        place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
        print(f"WRONG       on {host}, rank {rank}: the ranks do not reach each other ({place}): {error}", flush=True)
        return 1
    if process.rank == 0:
        print(render(report), flush=True)
    return 1 if report.problems else 0
