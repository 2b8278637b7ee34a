"""Launchers, each by its environment: whole, in part, hostile, and one inside of another."""

import pytest

from meshpar.errors import SpecError
from meshpar.launchers import DEFAULT_MASTER_PORT, Launch, expand_nodes, forgotten_launcher, read_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
HAND = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node01", "MASTER_PORT": "29511"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1234",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
PALS = {**CRAY, "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_APID": "id7"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, None),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, None, "abc-2")),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, Launch("torchrun", 5, 8, 1, 4)),
        (HAND, Launch("RANK and WORLD_SIZE", 5, 8, 1)),
        ({**HAND, "RANK": " 5 "}, Launch("RANK and WORLD_SIZE", 5, 8, 1)),
        (OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2, None, "1234")),
        (MPICH, Launch("PMI", 3, 4, 1, 2)),
        (CRAY, Launch("PMI", 3, 4, 1, 2)),
        (PALS, Launch("PALS", 3, 4, 1, 2, None, "id7")),
        (MVAPICH, Launch("MVAPICH", 3, 4, 1)),
        (SLURM, Launch("SLURM", 2, 4, 0, None, "node07", "77-0")),
        ({**SLURM, "SLURM_STEP_NODELIST": "node08"}, Launch("SLURM", 2, 4, 0, None, "node08", "77-0")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, Launch("SLURM", 2, 4, 0, 4, "node07", "77-0")),
        ({**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4"}, read_launch(SLURM)),
        ({**SLURM, "SLURM_RESTART_COUNT": "1"}, Launch("SLURM", 2, 4, 0, None, "node07", "77-0-1")),
        ({**SLURM, "LOCAL_RANK": "1"}, Launch("SLURM", 2, 4, 1, None, "node07", "77-0")),
    ],
)
def test_each_launcher_is_read(env, launch):
    assert read_launch(env) == launch


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "local_rank"),
    [
        ({**SLURM, **TORCHRUN}, "torchrun", 5, 1),
        ({**SLURM, **OPEN_MPI, **HAND}, "RANK and WORLD_SIZE", 5, 1),
        ({**SLURM, **OPEN_MPI, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "Open MPI", 3, 1),
        ({**SLURM, **MPICH}, "PMI", 3, 1),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}, "PMI", 2, 0),
        ({**SLURM, "PMIX_RANK": "2"}, "SLURM", 2, 0),
        ({**SLURM, "MASTER_ADDR": "mine"}, "SLURM", 2, 0),
    ],
)
def test_field_48_the_inner_launcher_is_believed(env, launcher, rank, local_rank):
    launch = read_launch(env)
    assert (launch.launcher, launch.rank, launch.local_rank) == (launcher, rank, local_rank)


@pytest.mark.parametrize(
    "hint",
    [
        {"ENVIRONMENT": "BATCH"},
        {"SLURM_STEP_ID": str(0xFFFFFFFB), "ENVIRONMENT": "BATCH"},
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},
    ],
)
def test_the_script_of_a_slurm_job_is_no_rank_of_it(hint):
    """By its variables it is rank 0 of 4; the other three never come."""
    env = {**{k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, "SLURM_PROCID": "0", **hint}
    assert read_launch(env) is None
    assert "4 tasks: start with `srun" in forgotten_launcher(env)


def test_only_a_job_of_several_tasks_forgets_its_launcher():
    assert forgotten_launcher({}) is None
    assert forgotten_launcher({"SLURM_NTASKS": "1"}) is None
    assert forgotten_launcher({"SLURM_NTASKS": "4(x2)"}) is None


def without(env, *names):
    return {k: v for k, v in env.items() if k not in names}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (without(HAND, "RANK"), ["missing in the environment: RANK"]),
        (without(HAND, "WORLD_SIZE", "MASTER_PORT"), ["missing in the environment: WORLD_SIZE, MASTER_PORT"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK='1'", "RANK and WORLD_SIZE"]),
        ({"PMIX_RANK": "1"}, ["PMIX_RANK='1'", "the number of ranks"]),
        ({**HAND, "RANK": "-1"}, ["RANK='-1'"]),
        ({**HAND, "RANK": ""}, ["RANK=''"]),
        ({**HAND, "RANK": "1_0", "WORLD_SIZE": "4.0"}, ["RANK='1_0'", "WORLD_SIZE='4.0'"]),
        ({**HAND, "RANK": "8"}, ["RANK=8, WORLD_SIZE=8"]),
        ({**HAND, "LOCAL_RANK": "x"}, ["LOCAL_RANK='x'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4, of 4 ranks on this host"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "many"}, ["LOCAL_WORLD_SIZE='many'"]),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK='3'"]),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), ["missing in the environment: OMPI_COMM_WORLD_RANK"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "one"}, ["OMPI_COMM_WORLD_LOCAL_RANK='one'"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["local rank 2, of 2 ranks on this host"]),
        (without(MPICH, "PMI_SIZE"), ["missing in the environment: PMI_SIZE"]),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}, ["missing in the environment: PMI_SIZE", "PALS_RANKID='0'"]),
        ({**MPICH, "PMI_RANK": "4"}, ["PMI_RANK=4, PMI_SIZE=4"]),
        (without(SLURM, "SLURM_NTASKS"), ["missing in the environment: SLURM_NTASKS"]),
        (without(SLURM, "SLURM_LOCALID"), ["missing in the environment: SLURM_LOCALID"]),
        (without(SLURM, "SLURM_PROCID"), ["missing in the environment: SLURM_PROCID"]),
        ({**SLURM, "SLURM_NTASKS": "4(x2)"}, ["SLURM_NTASKS='4(x2)'"]),
        ({**SLURM, "SLURM_NTASKS": "2"}, ["SLURM_PROCID=2, SLURM_NTASKS=2"]),
        ({**SLURM, "SLURM_JOB_NODELIST": "node[07-"}, ["'node[07-'", "set MASTER_ADDR"]),
    ],
)
def test_half_a_launcher_and_hostile_values_are_errors_that_name_them(env, says):
    with pytest.raises(SpecError) as caught:
        read_launch(env)
    assert [part for part in says if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("alpha,beta", ["alpha", "beta"]),
        ("alpha", ["alpha"]),
        ("gpu-a[1,3]-ib,login.x", ["gpu-a1-ib", "gpu-a3-ib", "login.x"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        (" a , b[1] ", ["a", "b1"]),
    ],
)
def test_field_49_lists_of_nodes_are_written_out(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a[2-1]", "a[x]", "a[]", "a]1[", "a[1]]", "$(rm)", "a[0-9999999]"])
def test_what_is_no_list_of_nodes_is_an_error(text):
    with pytest.raises(SpecError, match="list of nodes: cannot be read"):
        expand_nodes(text)


def test_jobs_on_one_host_get_ports_of_their_own_and_ranks_of_one_job_the_same():
    ports = [Launch("SLURM", rank, 4, job=job).port for job in ("77-0", "77-1", "78-0") for rank in range(4)]
    assert [len(set(ports[start : start + 4])) for start in (0, 4, 8)] == [1, 1, 1]
    assert len(set(ports)) == 3
    assert all(DEFAULT_MASTER_PORT < port < 32768 for port in ports)
    assert Launch("PMI", 0, 4).port == DEFAULT_MASTER_PORT == 29500
