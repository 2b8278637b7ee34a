"""Folders and models that do not fit: one clear error on all ranks, an `Exception`, and nothing is half done."""

import json
import os
import pickle
import shutil

import pytest
import runs
import torch
from torch import nn

import meshpar
from meshpar.errors import CheckpointError
from meshpar.testing import RankError, mesh_for, run_ranks

SPEC = "data=1,domain=2"


def write(folder: str, steps: int = 1) -> str:
    run = runs.Run(SPEC)
    path = ""
    for _ in range(steps):
        run.train(1)
        path = str(run.save(folder).result())
    return path


def read(folder: str, step: int | None = None) -> None:
    runs.Run(SPEC).load(folder, step=step)


def refused(fn, *args, num_ranks=2) -> str:
    """Give the text of the error that a function raises on all ranks."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, num_ranks, *args)
    errors = caught.value.exceptions
    assert sorted(errors) == list(range(num_ranks))
    assert {type(e) for e in errors.values()} == {CheckpointError}
    assert len({str(e) for e in errors.values()}) == 1
    assert isinstance(errors[0], Exception)
    return str(errors[0])


def test_folders_without_a_checkpoint(tmp_path):
    assert "no such folder" in refused(read, str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    assert "a file" in refused(read, str(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "an empty folder" in refused(read, str(tmp_path / "empty"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    assert "1 other entries, e.g. ['notes.txt']" in refused(read, str(tmp_path / "other"))
    (tmp_path / "half" / ".saving-000001-step-3").mkdir(parents=True)
    assert "a save that did not end: ['.saving-000001-step-3']" in refused(read, str(tmp_path / "half"))
    (tmp_path / "half" / "000001-step-3").mkdir()  # whoever made this, it was not a save
    assert "a save that did not end" in refused(read, str(tmp_path / "half"))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_text("")
    assert "a checkpoint of torch.distributed.checkpoint itself" in refused(read, str(tmp_path / "dcp"))


def test_damaged_checkpoints(tmp_path):
    folder = tmp_path / "run"
    path = run_ranks(write, 2, str(folder), 2)[0]
    run_ranks(read, 2, path)  # one checkpoint, by its own path
    run_ranks(read, 2, str(folder), 1)
    assert "no step 7, but steps [1, 2]" in refused(read, str(folder), 7)
    spoiled = tmp_path / "spoiled"

    def spoil(change) -> str:
        shutil.rmtree(spoiled, ignore_errors=True)
        shutil.copytree(folder, spoiled)
        change(spoiled / os.path.basename(path))
        return refused(read, str(spoiled))

    def shorten(where):
        with (where / "__0_0.distcp").open("r+b") as file:
            file.truncate(100)

    text = spoil(shorten)
    assert "__0_0.distcp: 100 bytes" in text
    assert "load an older one: step=1" in text
    assert "__1_0.distcp: missing" in spoil(lambda where: (where / "__1_0.distcp").unlink())
    assert "state.pt: missing" in spoil(lambda where: (where / "state.pt").unlink())
    assert "JSONDecodeError" in spoil(lambda where: (where / "meshpar.json").write_text("{"))
    assert "KeyError: 'files'" in spoil(lambda where: (where / "meshpar.json").write_text("{}"))
    later = '{"format": 99, "files": {}}'
    assert "format 99" in spoil(lambda where: (where / "meshpar.json").write_text(later))


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("name", [".metadata", "state.pt"])
def test_a_hostile_pickle_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "run" / "000001-step-1"
    run_ranks(write, 2, str(tmp_path / "run"))
    if name == "state.pt":
        torch.save({"model": Trap()}, where / name)
    else:
        (where / name).write_bytes(pickle.dumps(Trap()))
    told = json.loads((where / "meshpar.json").read_text())
    told["files"][name] = (where / name).stat().st_size
    (where / "meshpar.json").write_text(json.dumps(told))
    text = refused(read, str(tmp_path / "run"))
    assert "UnpicklingError" in text
    assert "mkdir" in text
    assert not (tmp_path / "trapped").exists()


def save_plain(folder: str, **options) -> None:
    net = meshpar.parallelize(nn.Linear(3, 5), mesh_for(SPEC))
    meshpar.save_checkpoint(folder, net, **options).result()


def save_and_wait(folder: str) -> None:
    save_plain(folder, asynchronous=True)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for fn in (save_plain, save_and_wait):
        text = refused(fn, str(tmp_path / "file" / "run"))
        assert "cannot be written" in text
        assert "NotADirectoryError" in text


def save_while_the_disk_fails(folder: str, asynchronous: bool) -> str:
    """On rank 1 alone the disk is full; the next save finds it well again."""
    from meshpar.checkpoint import save

    class Full(save.FileSystemWriter):
        def write_data(self, plan, planner):
            raise OSError(28, "No space left on device")

    net = meshpar.parallelize(nn.Linear(3, 5), mesh_for(SPEC))
    meshpar.save_checkpoint(folder, net, step=1)
    well = save.FileSystemWriter
    if torch.distributed.get_rank() == 1:
        save.FileSystemWriter = Full
    try:
        saving = meshpar.save_checkpoint(folder, net, step=2, asynchronous=asynchronous)
        assert asynchronous
        with pytest.raises(CheckpointError, match=r"rank 1: OSError.*No space left") as info:
            saving.result()
        caught = info.value
        # the error of a save that nobody asked for comes with the next call
        meshpar.save_checkpoint(folder, net, step=2, asynchronous=True)
        with pytest.raises(CheckpointError, match="No space left"):
            meshpar.save_checkpoint(folder, net, step=3)
    except CheckpointError as error:
        assert not asynchronous
        caught = error
    finally:
        save.FileSystemWriter = well
    assert [saved.step for saved in meshpar.list_checkpoints(folder)] == [1]
    meshpar.load_checkpoint(folder, net)
    meshpar.save_checkpoint(folder, net, step=4)
    assert [saved.step for saved in meshpar.list_checkpoints(folder)] == [1, 4]
    return str(caught)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_what_was_there(asynchronous, tmp_path):
    texts = run_ranks(save_while_the_disk_fails, 2, str(tmp_path), asynchronous)
    assert all("No space left" in text for text in texts)


def load_other(folder: str) -> None:
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(2, 8, 3)
            self.norm = nn.BatchNorm2d(7, affine=False)
            self.added = nn.Linear(2, 2)

    model = meshpar.parallelize(Other(), mesh_for(SPEC))
    before = meshpar.full_state_dict(model)
    try:
        meshpar.load_checkpoint(folder, model)
    finally:
        after = meshpar.full_state_dict(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_field_44_mismatches_name_keys_shapes_and_dtypes_and_change_nothing(tmp_path):
    run_ranks(write, 2, str(tmp_path))
    text = refused(load_other, str(tmp_path))
    assert "added.weight: missing in the checkpoint" in text
    assert "blocks.0.0.weight: in the checkpoint, not in the model" in text
    assert "blocks.2.0.weight: in the checkpoint, not in the model" in text  # a tie has both of its names
    assert "stem.weight: (7, 2, 3, 3) of torch.float64 in the checkpoint, (8, 2, 3, 3) of torch.float32" in text
    assert "norm.running_mean: (7,) of torch.float64 in the checkpoint, (7,) of torch.float32 in the model" in text


def load_with_other_optimizer(folder: str, kind: str) -> None:
    run = runs.Run(SPEC)
    parameters = list(run.model.parameters())
    if kind == "groups":
        run.optimizer = torch.optim.AdamW(parameters)
    elif kind == "members":
        run.optimizer = torch.optim.AdamW([{"params": parameters[:-2]}, {"params": parameters[-2:]}])
    elif kind == "strangers":
        run.optimizer = torch.optim.AdamW(runs.Run(SPEC).model.parameters())
    run.load(folder, **({"sampler": Position(0)} if kind == "sampler" else {}))


class Position:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def save_only(folder: str, kind: str) -> None:
    run = runs.Run(SPEC)
    if kind == "no optimizer":
        meshpar.save_checkpoint(folder, run.model, rng=False)
    run.load(folder)


def test_optimizers_that_do_not_fit(tmp_path):
    run_ranks(write, 2, str(tmp_path))
    assert "2 groups were saved, this one has 1" in refused(load_with_other_optimizer, str(tmp_path), "groups")
    text = refused(load_with_other_optimizer, str(tmp_path), "members")
    assert "optimizer group 1: head.weight was not in it" in text
    assert "optimizer group 0: head.weight is not in it now" in text
    assert "parameters that are not in the model" in refused(load_with_other_optimizer, str(tmp_path), "strangers")
    assert "no sampler was saved" in refused(load_with_other_optimizer, str(tmp_path), "sampler")
    text = refused(save_only, str(tmp_path / "bare"), "no optimizer")
    assert "no optimizer was saved" in text
    assert "no scheduler was saved" in text
    assert "no random number generators were saved" in text


def save_strange(folder: str, kind: str) -> None:
    net = nn.Linear(2 + (torch.distributed.get_rank() if kind == "ranks" else 0), 1)
    told = {
        "extra": {"extra": {"a": [1, {"b": Trap()}], "c": 3}},
        "dtensor": {"extra": {"w": meshpar.shard(torch.zeros(2, 4), mesh_for(SPEC), "_ domain")}},
        "step": {"step": -1, "keep": 0},
    }.get(kind, {})
    meshpar.save_checkpoint(folder, net, **told)


def test_arguments_that_cannot_be_saved(tmp_path):
    assert "extra['a'][1]['b']: a Trap" in refused(save_strange, str(tmp_path), "extra")
    assert "extra['w']: a DTensor" in refused(save_strange, str(tmp_path), "dtensor")
    text = refused(save_strange, str(tmp_path), "step")
    assert "step=-1" in text
    assert "keep=0" in text
    text = refused(save_strange, str(tmp_path), "ranks")
    assert "rank 1 differs from rank 0 in 1 tensors, e.g. ['model.weight']" in text
    assert list(tmp_path.iterdir()) == []
