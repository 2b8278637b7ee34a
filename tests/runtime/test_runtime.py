"""The runtime: ranks by launcher, the address that all agree on, devices, `distributed`, and two real ranks."""

import datetime
import logging
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshpar import rendezvous, runtime
from meshpar.errors import SpecError
from meshpar.launchers import Launch

ROOT = Path(__file__).resolve().parents[2]
STARTS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "PALS", "MPI_", "MV2_", "SLURM", "TORCHELASTIC")
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
ONE_HOST = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[07-08]"}


@pytest.fixture
def env(monkeypatch):
    """Set the variables of a launcher, and no others; without mpi4py unless a test brings its own."""
    for name in [*filter(lambda n: n.startswith(STARTS), os.environ), "MASTER_ADDR", "MASTER_PORT"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(rendezvous.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(rendezvous, "resolve_master_addr", lambda: "10.0.0.5")

    def make(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


def place():
    return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")


@pytest.mark.parametrize("mode", runtime.DISTRIBUTED_MODES)
def test_ranks_by_mode(env, mode):
    env(**SLURM)
    with pytest.warns(UserWarning, match="taken by default: MASTER_PORT=29500"):
        assert runtime.get_rank_info(mode) == (1, 3, 4)
    assert place() == ("n07", "29500")


@pytest.mark.parametrize("mode", ["none", None, "anything"])
def test_any_other_mode_is_one_process(env, mode):
    env(**SLURM)
    assert runtime.get_rank_info(mode) == (0, 0, 1)
    assert place() == (None, None)


def test_a_plain_script_is_one_process_and_that_is_said_once(env, caplog):
    runtime._say_alone.cache_clear()
    with caplog.at_level(logging.WARNING, logger="meshpar"):
        assert [runtime.get_rank_info("fsdp") for _ in range(3)] == [(0, 0, 1)] * 3
    assert [record.message.split(";")[0] for record in caplog.records] == ["no launcher: one process"]


def test_field_50_the_users_address_is_never_overwritten(env):
    env(**SLURM, SLURM_JOB_ID="7", MASTER_ADDR="mine", MASTER_PORT="1234")
    runtime.get_rank_info("ddp")
    assert place() == ("mine", "1234")


def test_half_an_address_is_completed(env):
    env(**SLURM, SLURM_JOB_ID="7", MASTER_PORT="1234")
    runtime.get_rank_info("ddp")
    assert place() == ("n07", "1234")


def test_slurm_needs_no_guess_and_warns_of_none(env):
    env(**SLURM, SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    runtime.get_rank_info("ddp")
    assert place() == ("n07", str(Launch("SLURM", 0, 4, job="7-0").port))


def test_defaults_are_warned_about(env):
    env(**ONE_HOST)
    with pytest.warns(UserWarning, match=r"taken by default: MASTER_ADDR=10.0.0.5, MASTER_PORT=29500.*mpi4py"):
        assert runtime.get_rank_info("ddp") == (0, 0, 4)
    assert place() == ("10.0.0.5", "29500")


def test_several_hosts_without_a_common_address_are_an_error(env):
    env(**MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    with pytest.raises(SpecError, match=r"2 of 4 ranks on .*, and no MASTER_ADDR"):
        runtime.get_rank_info("ddp")
    assert place() == (None, None)


@pytest.mark.parametrize("port", ["x", "-1", "70000", "", "0", "٣"])
def test_a_port_that_is_none_is_an_error(env, port):
    env(**SLURM, MASTER_PORT=port)
    with pytest.raises(SpecError, match="MASTER_PORT"):
        runtime.get_rank_info("ddp")


def test_a_local_rank_that_nothing_says_is_an_error(env):
    env(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    with pytest.raises(SpecError, match="local rank: not known"):
        runtime.get_rank_info("ddp")
    env(LOCAL_RANK="1")
    assert runtime.get_rank_info("ddp") == (1, 1, 2)


def with_mpi4py(monkeypatch, rank, size, sent):
    """Put a module in mpi4py's place, whose broadcast gives what rank 0 sent."""
    given = []

    def bcast(mine, root):
        given.append(mine)
        return sent if mine is None else mine

    world = types.SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size, bcast=bcast)
    monkeypatch.setattr(rendezvous.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(COMM_WORLD=world))
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=sys.modules["mpi4py.MPI"]))
    return given


def test_field_51_with_mpi4py_rank_0_picks_address_and_port_for_all(env, monkeypatch):
    env(**MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    given = with_mpi4py(monkeypatch, 0, 4, None)
    runtime.get_rank_info("ddp")
    assert given == [place()]
    assert place()[0] == "10.0.0.5"
    assert int(place()[1]) > 1023
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    env(OMPI_COMM_WORLD_RANK="2")
    assert with_mpi4py(monkeypatch, 2, 4, ("10.0.0.7", "4321")) == []
    assert runtime.get_rank_info("ddp") == (0, 2, 4)
    assert place() == ("10.0.0.7", "4321")


def test_the_environment_of_rank_0_goes_to_all(env, monkeypatch):
    env(**MPI, MASTER_ADDR="mine", MASTER_PORT="77")
    assert with_mpi4py(monkeypatch, 0, 4, None) == []
    runtime.get_rank_info("ddp")
    assert place() == ("mine", "77")


def test_an_mpi4py_of_another_mpi_is_not_believed(env, monkeypatch):
    env(**ONE_HOST, PMIX_NAMESPACE="5")
    with_mpi4py(monkeypatch, 0, 1, None)
    with (
        pytest.warns(UserWarning, match="it sees rank 0 of 1, Open MPI says rank 0 of 4"),
        pytest.warns(UserWarning, match="taken by default: MASTER_ADDR=10.0.0.5"),
    ):
        runtime.get_rank_info("ddp")


def test_field_51_ranks_on_one_gpu_are_refused_by_name():
    rendezvous.refuse_shared_gpus(["a 1", "a 2", "b 1"])
    with pytest.raises(SpecError, match="ranks 0, 2 on a 1"):
        rendezvous.refuse_shared_gpus(["a 1", "a 2", "a 1"])


def test_words_reach_all_ranks_before_there_is_a_group():
    store, heard = dist.HashStore(), {}

    def tell(rank):
        heard[rank] = rendezvous.tell_all(store, Launch("x", rank, 3), "gpu", f"word {rank}")

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard == {rank: ["word 0", "word 1", "word 2"] for rank in range(3)}


def test_an_explicit_device_wins_and_the_benchmark_is_left_alone():
    before = torch.backends.cudnn.benchmark
    assert runtime.select_device(3, "cpu") == torch.device("cpu")
    assert runtime.select_device(device=torch.device("meta"), set_benchmark=True) == torch.device("meta")
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize(
    ("count", "local_rank", "device", "chosen"),
    [(4, 2, None, "cuda:2"), (4, 2, "cuda", "cuda:2"), (4, 2, "cuda:1", "cuda:1"), (1, 3, None, "cuda:0")],
)
def test_the_gpu_of_a_rank(monkeypatch, count, local_rank, device, chosen):
    """A process that sees one GPU of its own takes that one."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert runtime.select_device(local_rank, device) == torch.device(chosen)
    assert current == [torch.device(chosen)]


def test_more_ranks_than_gpus_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SpecError, match="cuda:2 for local rank 2; 2 GPUs seen"):
        runtime.select_device(2, "cuda")


def test_a_block_has_a_group_and_leaves_none(env):
    with runtime.distributed(device="cpu", rank=0, world_size=1, local_rank=0) as process:
        assert (process.rank, process.world_size, process.device.type) == (0, 1, "cpu")
        group = dist.group.WORLD
        with runtime.distributed(device="cpu") as inner:
            assert inner.world_size == 1
        assert dist.group.WORLD is group, "a group that existed was taken down"
    assert not dist.is_initialized()
    with pytest.raises(KeyError), runtime.distributed(device="cpu"):
        raise KeyError
    assert not dist.is_initialized()
    assert place() == (None, None)


@pytest.mark.parametrize("address", ["", "  "])
def test_an_address_that_is_empty_is_an_error(env, address):
    env(**SLURM, MASTER_ADDR=address)
    with pytest.raises(SpecError, match="MASTER_ADDR: not an address"):
        runtime.get_rank_info("ddp")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "60", True, 1e20])
def test_a_time_limit_that_is_none_is_an_error(env, timeout_s):
    with pytest.raises(SpecError, match="timeout_s="), runtime.distributed(device="cpu", timeout_s=timeout_s):
        pass
    with pytest.raises(SpecError, match="timeout_s="):
        runtime.setup(0, 1, "ddp", timeout_s=timeout_s)
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", ["gpu", "", "cpu:x", 1.5, ["cpu"]])
def test_a_device_that_is_none_is_an_error(device):
    with pytest.raises(SpecError, match="device: not known"), runtime.distributed(device=device):
        pass


def test_half_of_a_rank_is_an_error(env):
    odd = ({"rank": "0", "world_size": 1}, {"rank": True, "world_size": 2}, {"rank": 0.0, "world_size": 1})
    odd += ({"rank": 0, "world_size": 1, "local_rank": -1}, {"rank": 0, "world_size": 1, "local_rank": 1})
    halves = ({"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 1})
    for given in (*halves, *odd):
        with pytest.raises(SpecError, match="rank="), runtime.distributed(device="cpu", **given):
            pass
    with pytest.raises(SpecError, match="rank=3"):
        runtime.setup(3, 2, "ddp")


def test_setup_starts_a_group_in_distributed_modes_alone(env):
    runtime.setup(0, 1, "none")
    assert not dist.is_initialized()
    runtime.setup(0, 1, "fsdp2", backend="gloo", timeout_s=20)
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    runtime.setup(0, 1, "fsdp2")
    dist.destroy_process_group()


def test_field_46_a_given_interface_is_checked_before_the_start(env):
    env(GLOO_SOCKET_IFNAME="^lo")
    with pytest.raises(SpecError, match="gloo leaves nothing out"), runtime.distributed(device="cpu"):
        pass
    assert not dist.is_initialized()


def test_field_52_the_file_of_a_crashed_run_is_not_taken(env, tmp_path):
    """A file of the same path, left with the keys of a run of two ranks that died."""
    file = tmp_path / "meet"
    left = rendezvous.open_store(Launch("x", 0, 2), datetime.timedelta(seconds=5), file=file, run_id="crashed")
    left.set("meshpar/gpu/0", "old")
    file.write_bytes((tmp_path / "meet.crashed").read_bytes())
    with runtime.distributed(device="cpu", rank=0, world_size=1, rendezvous_file=file, run_id="new/7") as process:
        assert process.world_size == 1
        assert (tmp_path / "meet.new-7").exists()
    with (
        pytest.raises(SpecError, match="no name of this run"),
        runtime.distributed(device="cpu", rank=0, world_size=1, rendezvous_file=file),
    ):
        pass


SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
from meshpar import runtime

with runtime.distributed(device="cpu") as process:
    total = torch.tensor([float(process.rank + 1)])
    dist.all_reduce(total)
    assert total.item() == process.world_size * (process.world_size + 1) / 2
    # A file for each rank: what several processes print into one pipe comes mixed.
    said = pathlib.Path(sys.argv[1], f"rank{process.rank}")
    said.write_text(f"{runtime.get_rank_info('fsdp')} {process.launcher}")
    if sys.argv[2:] == ["raise"]:
        if process.rank == 1:
            raise KeyError("on purpose")
        start = time.perf_counter()
        try:
            dist.all_reduce(total)
        except RuntimeError:
            said.write_text(f"{said.read_text()} failed after {int(time.perf_counter() - start)}")
            raise
assert not dist.is_initialized()
"""


PATIENCE_S = 600  # bounds a hang: on a loaded machine an import of torch alone takes a minute


def launched(tmp_path, *command):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith(STARTS)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = [*command, str(script), str(tmp_path)]
    done = subprocess.run(whole, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [file.read_text() for file in sorted(tmp_path.glob("rank*"))]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_two_ranks_under_torchrun(tmp_path):
    assert launched(tmp_path, *TORCHRUN) == [f"({rank}, {rank}, 2) torchrun" for rank in range(2)]


@pytest.mark.thirdparty
def test_four_ranks_under_mpirun(tmp_path):
    """Open MPI's own launcher, of Debian or of the requirements' wheel; with mpi4py where it is installed."""
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable)
    assert launched(tmp_path, *mpirun) == [f"({rank}, {rank}, 4) Open MPI" for rank in range(4)]


def test_slurm_variables_start_two_ranks_and_one_that_raises_frees_the_other(tmp_path):
    """No srun here: the two tasks of a step, each with its variables. The tear-down of one does not wait."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith(STARTS)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    env |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), "raise"],
            env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=PATIENCE_S) for task in tasks]
    assert [task.returncode for task in tasks] == [1, 1], said
    assert "on purpose" in said[1][1]
    seen, _, after = (tmp_path / "rank0").read_text().partition(" failed after ")
    assert seen == "(0, 0, 2) SLURM"
    assert int(after) < 300, "the other waited for the timeout of 600 s"
