"""Files of a workspace are complete or not there, run no code, and a crashed run is not mistaken for this one."""

import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.share import workspace
from meshpar.testing import run_ranks


def write_and_read(folder):
    rank = dist.get_rank()
    space = meshpar.NFSWorkspace(folder)
    dist.barrier()
    big = torch.arange(1_000_000, dtype=torch.float32)
    weights = {"w": big[rank : rank + 2], "b": torch.ones(2, 0, dtype=torch.bfloat16), "c": big.view(1000, -1)[:3, 1]}
    if rank != 2:
        space.write_configs_and_weights({"rank": rank, "names": ["a", None]}, weights)
    dist.barrier()
    read = [space.read_configs_and_weights_from_rank(other) for other in range(3)]
    dist.barrier()
    return [
        None if config is None else (config, weights["w"].tolist(), tuple(weights["b"].shape), weights["b"].dtype)
        for config, weights in read
    ]


def test_every_rank_reads_every_rank(tmp_path):
    folder = tmp_path / "deep" / "space"
    answers = run_ranks(write_and_read, 3, str(folder))
    want = [({"rank": r, "names": ["a", None]}, [r, r + 1.0], (2, 0), torch.bfloat16) for r in range(2)]
    assert answers == [[*want, None]] * 3
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0_state.pth", "rank_1_state.pth"]
    assert max(path.stat().st_size for path in folder.iterdir()) < 10_000  # a view does not bring its storage


def test_without_a_folder():
    space = meshpar.NFSWorkspace()
    assert not space.is_initialized
    with pytest.raises(meshpar.SpecError, match="not initialized"):
        space.write_configs_and_weights({}, {})
    with pytest.raises(meshpar.SpecError, match="not initialized"):
        space.read_configs_and_weights_from_rank(0)


def test_what_a_crashed_run_left_is_removed_by_its_rank(tmp_path):
    meshpar.NFSWorkspace(tmp_path).write_configs_and_weights({"old": True}, {})
    (tmp_path / f"rank_0_state.pth.0123{workspace._ASIDE}").write_bytes(b"half")
    (tmp_path / "rank_1_state.pth").write_bytes(b"not mine")
    (tmp_path / "notes.txt").write_text("not mine")
    space = meshpar.NFSWorkspace(tmp_path)
    assert space.is_initialized
    assert space.read_configs_and_weights_from_rank(0) == (None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "rank_1_state.pth"]


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_a_pickle_with_code_is_refused(form, tmp_path):
    space = meshpar.NFSWorkspace(tmp_path)
    file, sprung = tmp_path / "rank_0_state.pth", tmp_path / "sprung"
    state = {"config": Trap(str(sprung)), "weights": {}}
    if form == "torch.save":
        torch.save(state, file)
    else:
        file.write_bytes(pickle.dumps(state, protocol=2))
    with pytest.raises(meshpar.ShareError, match="refused") as caught:
        space.read_configs_and_weights_from_rank(0)
    assert "mkdir" in str(caught.value)
    assert not sprung.exists()


def test_a_truncated_file_is_an_error(tmp_path):
    space = meshpar.NFSWorkspace(tmp_path)
    space.write_configs_and_weights({"a": 1}, {"w": torch.ones(1000)})
    file = tmp_path / "rank_0_state.pth"
    whole = file.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(meshpar.ShareError, match=r"rank_0_state.pth: (cannot be read|refused)"):
            space.read_configs_and_weights_from_rank(0)
    torch.save([1], file)
    with pytest.raises(meshpar.ShareError, match="is no state of a rank"):
        space.read_configs_and_weights_from_rank(0)


def test_a_write_that_fails_leaves_the_older_state(tmp_path, monkeypatch):
    space = meshpar.NFSWorkspace(tmp_path)
    space.write_configs_and_weights({"a": 1}, {})

    def fail(handle):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(meshpar.ShareError, match="Input/output error"):
            space.write_configs_and_weights({"a": 2}, {})
    with pytest.raises(meshpar.SpecError, match=r"state\['config'\]\['a'\]: a Trap"):
        space.write_configs_and_weights({"a": Trap("")}, {})
    assert space.read_configs_and_weights_from_rank(0) == ({"a": 1}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0_state.pth"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(meshpar.ShareError, match="cannot be used"):
        meshpar.NFSWorkspace(tmp_path / "file")


def test_a_reader_never_sees_half_a_file(tmp_path):
    """A process rewrites its state again and again, and is killed in the midst of it."""
    code = (
        "import sys, torch, meshpar\n"
        "space, i = meshpar.NFSWorkspace(sys.argv[1]), 0\n"
        "while True:\n"
        "    i += 1\n"
        "    space.write_configs_and_weights({'i': i}, {'w': torch.full((200_000,), i)})\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env)
    try:
        # The time bounds a hang: the writer imports torch first, which takes a loaded machine a minute or more.
        file, seen, end = tmp_path / "rank_0_state.pth", set(), time.monotonic() + 600
        reader = meshpar.NFSWorkspace(tmp_path / "other")
        reader.path = tmp_path
        while len(seen) < 20 and writer.poll() is None and time.monotonic() < end:
            config, weights = reader.read_configs_and_weights_from_rank(0)
            if config is not None:
                assert bool((weights["w"] == config["i"]).all())
                seen.add(config["i"])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) == 20
    assert reader.read_configs_and_weights_from_rank(0)[0]["i"] >= max(seen)
    assert file.exists()


def damage(kind, folder):
    """Rank 1's file is changed between its write and rank 0's read of it."""
    from meshpar.share import gathers

    def after_write(file, state):
        size = workspace.write_state(file, state)
        if kind == "truncated":
            os.truncate(file, size - 10)
        else:
            torch.save(Trap(f"{folder}/sprung"), file)
            size = file.stat().st_size
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathers, "write_state", after_write)
        try:
            with meshpar.get_configs_parallel({"w": torch.ones(3)}, [0, 1], None, folder):
                return "no error"
        except meshpar.ShareError as error:
            return str(error)


@pytest.mark.parametrize(("kind", "text"), [("truncated", "is not what rank 1 wrote"), ("hostile", "refused")])
def test_a_bad_file_in_a_gather_is_the_same_error_on_all(kind, text, tmp_path):
    first, second = run_ranks(damage, 2, kind, str(tmp_path))
    assert first == second
    assert text in first
    assert list(tmp_path.iterdir()) == []


def gather_again(folder):
    with meshpar.get_configs_parallel({"rank": dist.get_rank()}, [0, 1], None, folder) as got:
        return [config["rank"] for config in got]


def test_a_folder_that_a_crashed_run_left_is_not_looked_at(tmp_path):
    old = tmp_path / "gather-0123"
    old.mkdir()
    torch.save({"rank": 77}, old / "rank_1.pth")
    assert run_ranks(gather_again, 2, str(tmp_path)) == [[0, 1], []]
    assert [path.name for path in tmp_path.iterdir()] == ["gather-0123"]
