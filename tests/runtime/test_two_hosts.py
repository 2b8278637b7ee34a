"""Two hosts with real interfaces between them: torchrun over both, the doctor, and passing things on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import psutil
import pytest

HERE = Path(__file__).parent
PATIENCE_S = 600  # bounds a hang: imports of torch take a loaded machine minutes
STARTS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "PALS", "MPI_", "MV2_", "SLURM", "TORCHELASTIC")
PICK = "from meshpar import runtime; print(runtime.resolve_master_addr())"  # as docs/clusters.md has it


def environment(**variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*STARTS, "GLOO_", "NCCL_"))}
    return kept | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", **variables}


def links():
    return subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    before = links(), Path("/etc/hosts").read_text(), os.uname().nodename
    with hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        pids = [host.pid for host in made]
        yield made
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (links(), Path("/etc/hosts").read_text(), os.uname().nodename) == before


def both(two, *commands, variables=({}, {})):
    """Run a command on each host at once, and give what they printed and the codes."""
    started = [
        host.start(sys.executable, *command, env=environment(**own))
        for host, command, own in zip(two, commands, variables, strict=True)
    ]
    said = [process.communicate(timeout=PATIENCE_S) for process in started]
    return [(out, err, process.returncode) for (out, err), process in zip(said, started, strict=True)]


@pytest.fixture(scope="module")
def picked(two):
    """The address that each host picks for itself."""
    return [out.strip() for out, err, _ in both(two, ("-c", PICK), ("-c", PICK))]


def test_each_host_picks_the_address_that_the_other_reaches(two, picked):
    assert picked == [host.address for host in two]
    for host in two:
        assert f"127.0.1.1       {host.name}" in host.run("getent", "hosts", host.name)
    assert "default" not in two[0].run("ip", "route")
    assert "default via 172.17.0.2 dev docker0" in two[1].run("ip", "route")


@pytest.fixture(scope="module")
def seen(two, picked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("across")
    first = ["--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", f"{picked[0]}:29500"]
    start = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *first]
    # torchrun takes a node for the first one if its name resolves to the address: here it does not.
    own = [
        ["--local-addr", address, "--rdzv-conf", f"is_host={address == picked[0]},read_timeout=600"]
        for address in picked
    ]
    commands = [[*start, *mine, str(HERE / "across.py"), str(folder)] for mine in own]
    for _, err, code in both(two, *commands):
        assert code == 0, err
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(4)]


def test_torchrun_over_both_has_its_ranks_and_the_interface_between_them(two, picked, seen):
    by_host = {}
    for one in seen:
        by_host.setdefault(one["host"], []).append(one["local_rank"])
    assert by_host == {"node1": [0, 1], "node2": [0, 1]}
    first = next(host.address for host in two if host.name == seen[0]["host"])  # torchrun numbers hosts as they come
    assert [one["variables"] for one in seen] == [[first, "eth0"]] * 4
    assert {one["launcher"] for one in seen} == {"torchrun"}
    assert {one["resolves"] for one in seen} == {"127.0.1.1"}


@pytest.mark.parametrize("mesh", ["domain", "both"])
def test_training_steps_have_the_numbers_of_one_process(mesh, seen):
    """Halos between the hosts (domain=4), and the batch between them (data=2,domain=2)."""
    assert max(one[mesh] for one in seen) < 1e-12


def test_shared_memory_does_not_reach_the_other_host_and_that_is_said_on_all(seen):
    told = [one["all tensors"] for one in seen]
    assert told == [told[0]] * 4
    name, text = told[0]
    assert name == "ShareError"
    assert "shared memory does not reach all ranks" in text
    assert "rank 0: host node" in text
    assert "rank 3: host node" in text
    assert "workspace_path=a folder that all of them share" in text


def test_ranks_of_one_host_pass_tensors_and_a_folder_passes_configs_of_all(seen):
    assert [one["tensors of a host"] for one in seen] == [[[0, 0], [1, 1]], [], [[2, 2], [3, 3]], []]
    assert seen[0]["all configs"] == [[rank, [rank, rank]] for rank in range(4)]
    assert [one["all configs"] for one in seen[1:]] == [[]] * 3


def test_the_doctor_over_both_as_tasks_of_a_slurm_step(two):
    """Node names from the list of the step; rank 0 resolves its own to 127.0.1.1."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODELIST": "node[1-2]"}
    variables = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"} for rank in range(2)]
    command = ["-m", "meshpar", "doctor", "--mesh", "domain=2", "--device", "cpu", "--timeout-s", "300"]
    (out, err, code), (rest, _, _) = both(two, command, command, variables=variables)
    assert code == 1, err
    for line in (
        "launcher    SLURM, 2 ranks",
        "host        node1: ranks 0\n",
        "host        node2: ranks 1\n",
        "  address   10.77.3.1, interface eth0",
        "  address   10.77.3.2, interface eth0",
        "  interface enp9s0 (up): no address",
        "MASTER_ADDR=node1",
        "GLOO_SOCKET_IFNAME=eth0",
        "axis        domain of 2: ring of sends, ",
        "WRONG       node1: the host name resolves to 127.0.1.1, so MASTER_ADDR=node1 works on node1 alone; "
        "MASTER_ADDR=10.77.3.1 is right if rank 0 is there",
    ):
        assert line in out, out
    assert rest == ""


def test_the_hosts_end_with_the_process_that_made_them(tmp_path):
    before = links()
    maker = subprocess.Popen([sys.executable, str(HERE / "hosts.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) >= 6, "two hosts, each with its first process, and a command on it"
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert links() == before


def test_what_is_missing_is_a_failure_and_no_skip(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "ip" else tool)
    with pytest.raises(AssertionError, match=r"two hosts need \['ip'\]"):
        hosts.check_tools()
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(AssertionError, match="need root"):
        hosts.check_tools()
