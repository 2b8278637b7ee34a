"""SIGKILL during a save, at random moments and at every file operation: the last good checkpoint is there."""

from pathlib import Path

import pytest
import runs
import torch
from programs import played

PROGRAM = Path(__file__).with_name("killed.py")


def play(scene, folder):
    return played(PROGRAM, scene, folder, timeout_s=600)


def losses_alone(steps):
    torch.set_num_threads(1)
    return runs.Run("").train(steps)


@pytest.mark.parametrize(("scene", "hits"), [("synchronous", 3), ("asynchronous", 1)])
def test_killed_at_random_moments_it_resumes_from_the_last_good_checkpoint(scene, hits, tmp_path):
    seen, errors = play(scene, tmp_path)
    assert len(seen["kills"]) == (10 if scene == "synchronous" else 3)
    assert seen["codes"] == [0, 0], errors
    expected = losses_alone(int(seen["last"][-2].split()[1]) + 4)
    known, steps_before = 0, 0  # the step that was surely saved
    for scene_seen in [*seen["kills"], {"log": seen["last"], "left": [], "complete": []}]:
        lines = [line.split() for line in scene_seen["log"] if line.count(" ") == 2 or line.startswith("saved")]
        losses = {int(line[1]): float(line[2]) for line in lines if line[0] == "loss"}
        # It went on from a step that had been saved, at least the last one that was known to be.
        assert min(losses) > known
        assert min(losses) - 1 in (steps_before, known) or known < min(losses) - 1 <= steps_before
        for step, loss in losses.items():
            assert abs(loss - expected[step - 1]) < 1e-9 * abs(loss)
        known = max([known, *(int(line[1]) for line in lines if line[0] == "saved")])
        steps_before = max(losses)
        if scene_seen["complete"]:
            assert max(scene_seen["complete"]) >= known
            known = max(scene_seen["complete"])
    # The kills did hit saves, and what they left is gone after the next save.
    assert sum(any(name.startswith(".saving-") for name in kill["left"]) for kill in seen["kills"]) >= hits
    assert [name for name in seen["names"] if name.startswith(".")] == []
    assert len(seen["names"]) == 2


def test_killed_at_every_file_operation_of_a_save(tmp_path):
    seen, errors = play("events", tmp_path)
    assert seen[-1]["code"] == 0, errors
    assert len(seen) > 10
    for one in seen:
        assert one["complete"] in ([1, 2], [1, 2, 3], [2, 3])
        assert len(one["left"]) <= 1
    assert seen[0]["complete"] == [1, 2]
    assert seen[-1] == {"code": 0, "complete": [2, 3], "left": []}
    # Once complete, it stays so.
    assert sorted(one["complete"][-1] for one in seen) == [one["complete"][-1] for one in seen]
