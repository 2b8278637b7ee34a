"""A rank that dies, or never comes, is an error on the others that names axis, ranks and op, within the timeout.

The ranks are forks of one process that imports torch once, so that a real death costs no pool. Run as a program, this
file is that process: it prints what each rank saw, and leaves no process behind.
"""

import datetime
import json
import os
import signal
import tempfile
import time
from functools import partial

import pytest
from programs import forked, left_in, played

TIMEOUT_S = 2.0
HAVE = ((0, 2), (2, 4), (4, 6))
WANT = ((0, 3), (1, 5), (3, 6))  # a halo of one row: ranks 0 and 2 are no peers
SCENES = ("exits", "exits in backward", "killed in the exchange", "sleeps", "sleeps in backward")


def be_rank(rank, store, scene):
    """Exchange rows; rank 2 fails as the scene has it, the others return what they saw."""
    import torch
    import torch.distributed as dist

    from meshpar.exchange import fetch
    from meshpar.record import inside

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 3),
        rank=rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    x = torch.ones(2, 200_000, requires_grad=True)
    with inside("encoder.0.conv"):
        y = fetch(x, 0, HAVE, WANT, dist.group.WORLD, axis="domain", op="F.conv2d")
    if rank == 2:
        if scene.startswith("exits"):
            os._exit(3)
        if scene.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * TIMEOUT_S)
        os._exit(0)
    start = time.monotonic()
    try:
        if scene.endswith("backward"):
            y.sum().backward()
        else:
            for _ in range(3):  # rank 0 learns of it through rank 1, in the next rounds at the latest
                with inside("encoder.0.conv"):
                    fetch(x, 0, HAVE, WANT, dist.group.WORLD, axis="domain", op="F.conv2d")
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def play(scene, folder):
    """Fork three ranks, and collect what ranks 0 and 1 saw."""
    pids = [forked(partial(be_rank, rank, f"{folder}/store", scene), f"{folder}/{rank}") for rank in range(3)]
    for pid in pids[:2]:
        os.waitpid(pid, 0)
    if scene.startswith("sleeps"):
        os.kill(pids[2], signal.SIGKILL)
    os.waitpid(pids[2], 0)
    return [left_in(f"{folder}/{rank}") for rank in range(2)]


def main():
    """Play all scenes and print what was seen."""
    import torch

    import meshpar  # noqa: F401

    torch.set_num_threads(1)
    seen = {}
    for scene in SCENES:
        with tempfile.TemporaryDirectory() as folder:
            seen[scene] = play(scene, folder)
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def seen():
    return played(__file__, timeout_s=600)[0]


@pytest.mark.parametrize("scene", SCENES)
def test_the_others_get_an_error_in_time(scene, seen):
    name, text, seconds = seen[scene][1]
    assert name == "PeerError"
    assert "encoder.0.conv: F.conv2d lost a peer on axis domain" in text
    assert "rank 1 exchanged rows with global rank(s) [0, 2]" in text
    assert "it failed with global rank(s) [2]" in text
    assert seconds < TIMEOUT_S + 2.0
    if scene.startswith("sleeps"):
        assert "Timed out" in text


@pytest.mark.parametrize("scene", ["exits", "killed in the exchange", "sleeps"])
def test_a_rank_further_off_learns_of_it_too(scene, seen):
    """Rank 0 exchanges with rank 1 alone; when that one is gone, it is told so and does not hang."""
    name, text, seconds = seen[scene][0]
    assert name == "PeerError"
    assert "rank 0 exchanged rows with global rank(s) [1]" in text
    assert seconds < 2 * TIMEOUT_S + 2.0


if __name__ == "__main__":
    main()
