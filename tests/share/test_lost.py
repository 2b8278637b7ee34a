"""A process that is killed in a gather: the others get an error that names it, and nothing of it is left (FIELD 53).

Two jobs of equal ranks on one host. The ranks are forks of one process that imports torch once; run as a program, this
file is that process, and prints what each rank saw.
"""

import json
import os
import signal
import tempfile
import time
from functools import partial

import pytest
from programs import forked, left_in, played

TIMEOUT_S = 10.0
NUM_RUNS = 10
SCENES = ("reader in its block", "writer in its write", "writer in the block")


def be_rank(rank, store, scene):
    """Pass tensors to rank 0; the rank of the scene is killed."""
    import torch
    import torch.distributed as dist

    import meshpar
    from meshpar.share import gathers

    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    with meshpar.get_tensors_parallel(torch.full((1 << 18,), float(rank)), [0, 1, 2]) as got:
        seen = [x.unique().tolist() for x in got]
    if scene.startswith("job"):
        with meshpar.get_tensors_parallel(torch.full((1 << 18,), float(scene[-1])), [0, 1, 2]) as got:
            time.sleep(0.3)
            return [x.unique().tolist() for x in got]
    assert len(seen) == (3 if rank == 0 else 0)

    write = gathers.write_segment

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and scene == "writer in its write":
        gathers.write_segment = lambda parcel: (write(parcel), die())
    start = time.monotonic()
    try:
        with meshpar.get_tensors_parallel(torch.ones(1 << 18), [0, 1, 2], timeout_s=TIMEOUT_S):
            if (rank, scene) in ((0, "reader in its block"), (1, "writer in the block")):
                die()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def start(scene, folder):
    """Fork the ranks of a job."""
    return [forked(partial(be_rank, rank, f"{folder}/store", scene), f"{folder}/{rank}") for rank in range(3)]


def end(pids, folder):
    """Wait for the ranks, and give what each saw; None for one that was killed."""
    for pid in pids:
        os.waitpid(pid, 0)
    return [left_in(f"{folder}/{rank}") for rank in range(3)]


def main():
    import torch

    import meshpar  # noqa: F401

    torch.set_num_threads(1)
    before = set(os.listdir("/dev/shm"))
    seen = {}
    for scene in SCENES:
        seen[scene] = []
        for _ in range(NUM_RUNS):
            with tempfile.TemporaryDirectory() as folder:
                seen[scene].append(end(start(scene, folder), folder))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        jobs = [(start("job 1", one), one), (start("job 2", two), two)]
        seen["jobs"] = [end(*job) for job in jobs]
    seen["left"] = sorted(set(os.listdir("/dev/shm")) - before)
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def done():
    return played(__file__, timeout_s=600)


@pytest.fixture(scope="module")
def seen(done):
    return done[0]


@pytest.mark.parametrize("scene", SCENES)
def test_the_others_get_an_error_that_names_it(scene, seen):
    dead = 0 if scene.startswith("reader") else 1
    assert len(seen[scene]) == NUM_RUNS
    for run in seen[scene]:
        assert run[dead] is None
        for rank in {0, 1, 2} - {dead}:
            name, text, seconds = run[rank]
            assert name == "PeerError"
            assert f"lost rank {dead}" in text
            assert seconds < TIMEOUT_S


def test_two_jobs_of_equal_ranks_do_not_meet(seen):
    for job, (first, *rest) in zip((1, 2), seen["jobs"], strict=True):
        assert first == [[job]] * 3
        assert rest == [[], []]


def test_nothing_is_left_and_no_tracker_complains(seen, done):
    assert seen["left"] == []
    assert "resource_tracker" not in done[1]
    assert "Traceback" not in done[1]


if __name__ == "__main__":
    main()
