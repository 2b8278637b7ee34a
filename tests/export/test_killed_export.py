"""SIGKILL during an export, at every file operation: the old checkpoint loads, or none, or the new one; never a mix."""

import signal
from pathlib import Path

import pytest
from programs import played

PROGRAM = Path(__file__).with_name("killed_export.py")


def play(scene, folder):
    return played(PROGRAM, scene, folder, timeout_s=160)


@pytest.mark.parametrize("old", ["one", "several"])
@pytest.mark.parametrize("new", ["one", "several"])
def test_one_process_killed_at_every_file_operation(old, new, tmp_path):
    seen, errors = play(f"process:{old}:{new}", tmp_path)
    assert seen[-1] == {"code": 0, "found": 2.0, "left": 0}, errors
    assert len(seen) > 25
    assert all(one["code"] == -signal.SIGKILL for one in seen[:-1])
    found = [one["found"] for one in seen]
    # The old one, then none, then the new one: no way back.
    order = [1.0, None, 2.0]
    assert set(found) == set(order)
    assert found == sorted(found, key=order.index)


@pytest.mark.parametrize("writer", ["direct", "two-phase"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_every_file_operation(writer, victim, tmp_path):
    seen, errors = play(f"rank:{writer}:{victim}", tmp_path)
    assert seen[-1]["codes"] == [0, 0], errors
    assert len(seen) > 5
    for one in seen[:-1]:
        assert one["codes"][victim] == -signal.SIGKILL
        assert one["codes"][1 - victim] == 3, errors  # a CheckpointError, and not after the timeout
        assert one["seconds"] < 8
        assert one["found"] in (1.0, None, 2.0)
        assert one["found"] == 1.0 or victim == 0


def test_two_exports_into_one_folder_at_once(tmp_path):
    seen, errors = play("both", tmp_path)
    for one in seen:
        assert all(codes in ([0, 0], [3, 3]) for codes in one["codes"]), errors
        assert [0, 0] in one["codes"]
        assert one["found"] in (2.0, 3.0)


def test_a_writer_slower_than_the_timeout_of_the_default_group(tmp_path):
    codes, errors = play("slow", tmp_path)
    assert codes == [0, 0], errors
