"""Which rank a process is, as its launcher said: a pure reading of environment variables.

Invariant: one launcher is believed, in a fixed order (by hand or torchrun, MPI, a SLURM step); half of a launcher, or
a variable that is not a number, is an error that names all that is wrong, never a silent rank 0.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshpar.errors import SpecError, explain

DEFAULT_MASTER_PORT = 29500
"""The port of the rendezvous where nothing names a better one."""

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets, from which a process group can be started; `LOCAL_RANK` goes with them."""

_PORTS = 3000  # from DEFAULT_MASTER_PORT on; they end below the ports that Linux gives to clients


@dataclass(frozen=True)
class Launch:
    """Hold what a launcher said.

    Args:
        launcher: its name, for people.
        rank: of this process, over all hosts.
        world_size: number of processes.
        local_rank: among the processes of this host; None where nothing says so.
        local_size: processes of this host; None where nothing says so.
        host: the host of rank 0; None where nothing says so.
        job: what tells this start apart from others on the same hosts, equal on all ranks; None where nothing does.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    host: str | None = None
    job: str | None = None

    @property
    def port(self) -> int:
        """Give a port that all ranks work out alike, and two jobs on one host most likely apart."""
        if self.job is None:
            return DEFAULT_MASTER_PORT
        return DEFAULT_MASTER_PORT + 1 + zlib.crc32(self.job.encode()) % _PORTS

    @property
    def is_mpi(self) -> bool:
        """Tell whether the ranks can talk through MPI before there is a process group."""
        return self.launcher in {family[0] for family in _MPI}


_Family = tuple[str, str, str, tuple[str, ...], tuple[str, ...]]

_MPI: tuple[_Family, ...] = (  # name, rank, size, local rank, local size
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "PALS",  # cray-mpich under PBS; the number of ranks comes with its PMI
        "PALS_RANKID",
        "PMI_SIZE",
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    (
        "PMI",  # MPICH, Intel MPI, cray-mpich
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)


def read_launch(env: Mapping[str, str]) -> Launch | None:
    """Say which rank this is, from the variables of the launcher; None for a process without one.

    `RANK` with `WORLD_SIZE`, set by hand or by torchrun, go before MPI's variables, and those before SLURM's: an
    `mpirun` or `torchrun` inside of a SLURM job inherits the variables of the job. A `LOCAL_RANK` that is set counts
    under every launcher.

    Args:
        env: the environment.

    Raises:
        SpecError: a launcher's variables are there in part, are not numbers, or do not fit each other.

    Example:
        >>> env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[01-02]"}
        >>> read_launch(env)
        Launch(launcher='SLURM', rank=3, world_size=4, local_rank=1, local_size=None, host='n01', job=None)
    """
    launch = _by_hand(env) or _mpi(env) or _slurm(env)
    if launch is not None:
        return _with_local_rank(launch, env)
    alone = [name for name in ("LOCAL_RANK", "PMIX_RANK") if name in env]
    if alone:
        got = [f"{name}={env[name]!r}, without the rank and the number of ranks" for name in alone]
        needs = "RANK and WORLD_SIZE beside it, as torchrun sets them"
        if alone == ["PMIX_RANK"]:
            needs = "the number of ranks, which PMIx does not put into the environment"
        raise _refusal(got, needs, "start with torchrun, mpirun of Open MPI, or srun; or set RANK and WORLD_SIZE")
    return None


def forgotten_launcher(env: Mapping[str, str]) -> str | None:
    """Say what a process without a launcher may have forgotten: `srun`, inside of a SLURM job of several tasks."""
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        return f"the SLURM job has {tasks} tasks: start with `srun python ...` to use them"
    return None


def _by_hand(env: Mapping[str, str]) -> Launch | None:
    if not {"RANK", "WORLD_SIZE"} & set(env):
        return None
    missing = [name for name in TORCHRUN if name not in env]
    if missing:
        raise _refusal(
            [f"missing in the environment: {', '.join(missing)}"],
            f"all of {', '.join(TORCHRUN)}, or neither RANK nor WORLD_SIZE for a single process",
            "start with torchrun",
        )
    rank, size, _ = _integers(env, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    _check_rank(env, "RANK", "WORLD_SIZE")
    local_size = _optional(env, ("LOCAL_WORLD_SIZE",))
    elastic = env.get("TORCHELASTIC_RUN_ID")
    named = elastic not in (None, "none")  # "none" is what torchrun says where it was given no id
    job = f"{elastic}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if named else None
    return Launch("torchrun" if elastic else "RANK and WORLD_SIZE", rank, size, local_size=local_size, job=job)


def _mpi(env: Mapping[str, str]) -> Launch | None:
    for name, rank_name, size_name, local_rank, local_size in _MPI:
        if rank_name not in env and (size_name not in env or name == "PALS"):
            continue
        _require(env, (rank_name, size_name), name)
        rank, size = _integers(env, (rank_name, size_name))
        _check_rank(env, rank_name, size_name)
        local = _optional(env, local_rank)
        if local is None and env.get("SLURM_PROCID") == str(rank):  # srun --mpi=pmi2: the two speak of one rank
            local = _optional(env, ("SLURM_LOCALID",))
        return Launch(name, rank, size, local, _optional(env, local_size), _first_host(env), _job(env))
    return None


def _slurm(env: Mapping[str, str]) -> Launch | None:
    if not {"SLURM_PROCID", "SLURM_LOCALID"} & set(env) or _is_batch_script(env):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    _require(env, ("SLURM_PROCID", "SLURM_LOCALID", size_name), "SLURM")
    rank, local, size = _integers(env, ("SLURM_PROCID", "SLURM_LOCALID", size_name))
    _check_rank(env, "SLURM_PROCID", size_name)
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    local_size = size if re.fullmatch(rf"0*{size}", per_node) else None
    if local_size is None and env.get("SLURM_STEP_NUM_NODES") == "1":
        local_size = size
    return Launch("SLURM", rank, size, local, local_size, _first_host(env), _job(env))


def _is_batch_script(env: Mapping[str, str]) -> bool:
    """Tell whether this is the script of a job itself: rank 0 of many by its variables, though the others never come.

    Its step, and that of `salloc`, have no number, or one of those that SLURM keeps for itself.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return int(step) >= 0xFFFFFFF0 if step.isdecimal() else env.get("ENVIRONMENT") == "BATCH"


def _with_local_rank(launch: Launch, env: Mapping[str, str]) -> Launch:
    local = _optional(env, ("LOCAL_RANK",))
    local = launch.local_rank if local is None else local
    if local is None and launch.world_size == 1:
        local = 0
    top = launch.world_size if launch.local_size is None else launch.local_size
    if local is not None and local >= top:
        raise _refusal(
            [f"local rank {local}, of {top} ranks on this host ({launch.launcher})"],
            "a local rank from 0 to the number of ranks of the host less one",
            "leave LOCAL_RANK to the launcher",
        )
    return replace(launch, local_rank=local)


def _first_host(env: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return expand_nodes(env[name])[0]
    return None


def _job(env: Mapping[str, str]) -> str | None:
    """Give what names this start on every rank alike: a job, and where it can be had the step and the restart."""
    slurm = [env[n] for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT") if n in env]
    if "PMIX_NAMESPACE" in env:
        return env["PMIX_NAMESPACE"]
    if "SLURM_JOB_ID" in env:
        return "-".join(slurm)
    return env.get("PALS_APID") or env.get("PBS_JOBID")


def expand_nodes(text: str) -> list[str]:
    """Write out a list of nodes as SLURM shortens it; leading zeros stay.

    Args:
        text: names with commas between; in brackets numbers and ranges, also more than once in a name.

    Raises:
        SpecError: brackets that do not close, a range that is none, or no name at all.

    Example:
        >>> expand_nodes("node[01-03,7],alpha")
        ['node01', 'node02', 'node03', 'node7', 'alpha']
    """
    parts = re.split(r",(?![^\[]*\])", text.strip())
    nodes = [node for part in parts for node in _expand(part.strip(), text)]
    if not nodes or any(not re.fullmatch(r"[A-Za-z0-9_.:-]+", node) for node in nodes):
        raise _bad_nodes(text)
    return nodes


def _expand(part: str, text: str) -> list[str]:
    start, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, close, rest = rest.partition("]")
    if not close:
        raise _bad_nodes(text)
    tails = _expand(rest, text)
    return [f"{start}{number}{tail}" for item in inside.split(",") for number in _range(item, text) for tail in tails]


def _range(item: str, text: str) -> list[str]:
    match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
    if match is None:
        raise _bad_nodes(text)
    first, last = match[1], match[2] or match[1]
    if not 0 <= int(last) - int(first) < 1 << 20:
        raise _bad_nodes(text)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _bad_nodes(text: str) -> SpecError:
    return SpecError(
        explain(
            "list of nodes: cannot be read.",
            got=repr(text),
            needs="names with commas between, numbers and ranges in brackets: node[01-03,7],alpha",
            fix="set MASTER_ADDR and MASTER_PORT yourself, and unset the variable with the list",
        )
    )


def _require(env: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        seen = ", ".join(f"{name}={env[name]!r}" for name in names if name in env)
        raise _refusal(
            [f"missing in the environment: {', '.join(missing)}", f"there is {seen}"],
            f"all of {', '.join(names)} ({launcher})",
            "start with the launcher itself, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )


def _integers(env: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    wrong = [name for name in names if not re.fullmatch(r"\s*[0-9]{1,9}\s*", env[name])]
    if wrong:
        raise SpecError(
            explain(
                f"{', '.join(wrong)}: not a number.",
                got=[f"{name}={env[name]!r}" for name in wrong],
                needs="an integer that is not negative",
                fix="start with torchrun, mpirun or srun",
            )
        )
    return [int(env[name]) for name in names]


def _optional(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_integers(env, (name,))[0] for name in names if name in env), None)


def _check_rank(env: Mapping[str, str], rank: str, size: str) -> None:
    if int(env[rank]) >= int(env[size]):
        raise _refusal(
            [f"{rank}={int(env[rank])}, {size}={int(env[size])}"],
            "a rank from 0 to the number of ranks less one",
            "start with torchrun, mpirun or srun",
        )


def _refusal(got: list[str], needs: str, fix: str) -> SpecError:
    return SpecError(explain("process group: cannot be started.", got=got, needs=needs, fix=fix))
