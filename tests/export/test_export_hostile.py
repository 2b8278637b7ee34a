"""What cannot be exported, and disks that fail: one error on all ranks, and what was there is as it was."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checks import refused
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshpar
from meshpar.errors import CheckpointError, SpecError
from meshpar.export import folder as folders
from meshpar.export import places, save, two_phase, writers
from meshpar.export.places import Seen, chosen_writer, file_system_of
from meshpar.testing import mesh_for, run_ranks


def strange_state(kind):
    mesh, rank = mesh_for("data=2")["data"], dist.get_rank()
    values = {
        "partial": lambda: DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False),
        "dtype": lambda: torch.ones(2, dtype=torch.complex128),
        "meta": lambda: torch.ones(2, device="meta"),
        "sparse": lambda: torch.ones(2).to_sparse(),
        "object": lambda: [1, 2],
        "piece": lambda: DTensor.from_local(torch.ones(2 + rank), mesh, [Shard(0)], shape=(4,), stride=(1,)),
        "one rank": lambda: [1] if rank else torch.ones(2),
        "shapes": lambda: torch.ones(2 + rank),
        "dtypes": lambda: torch.ones(2, dtype=[torch.int8, torch.int16][rank]),
        "missing": lambda: DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False),
    }
    state = {"a": torch.zeros(1), "b.weight": values[kind]()}
    if kind == "missing" and rank:
        del state["b.weight"]
    return state


def export_strange(folder, kind):
    meshpar.export_hf(strange_state(kind), folder)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("partial", "b.weight: a tensor of which no rank holds a part."),
        ("dtype", "b.weight: dtype torch.complex128"),
        ("meta", "b.weight: on the meta device"),
        ("sparse", "b.weight: layout torch.sparse_coo"),
        ("object", "b.weight: a list"),
        ("piece", "got:    (3,) on rank 1 for (4,)"),
        ("one rank", "b.weight: a list"),
        ("shapes", "b.weight: (2,) of F32 on rank 0, (3,) of F32 on rank 1"),
        ("dtypes", "b.weight: (2,) of I8 on rank 0, (2,) of I16 on rank 1"),
        ("missing", "b.weight: rank 0 has a part of it on ranks [0, 1], rank 1 has none"),
    ],
)
def test_values_that_no_file_can_hold_and_ranks_that_differ(kind, text, tmp_path):
    assert text in refused(SpecError, export_strange, str(tmp_path / "run"), kind)
    assert not (tmp_path / "run").exists()


def export_with(folder, options, other):
    options = options | (other if dist.get_rank() else {})
    meshpar.export_hf({"w": torch.ones(3)}, options.pop("dir", folder), **options)


@pytest.mark.parametrize(
    ("options", "other", "text"),
    [
        ({"writer": "fast"}, {}, "unknown writer"),
        ({"max_shard_size": 0}, {}, "max_shard_size: no size"),
        ({}, {"max_shard_size": "-1GB"}, "max_shard_size: no size"),
        ({}, {"max_shard_size": "2GB"}, "max_shard_size='2GB' on rank 1, '10GB' on rank 0"),
        ({"max_shard_size": "10GB"}, {"overwrite": True}, "overwrite=True on rank 1"),
        ({"max_shard_size": "10GB"}, {"dir": "/somewhere/else"}, "dir='/somewhere/else' on rank 1"),
    ],
)
def test_arguments_that_cannot_be_or_differ(options, other, text, tmp_path):
    options = {"overwrite": False, "writer": "auto", "max_shard_size": "10GB"} | options
    assert text in refused(SpecError, export_with, str(tmp_path / "run"), options, other)
    assert not (tmp_path / "run").exists()


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def export_plain(folder, overwrite=False, value=1.0, max_shard_size="10GB", writer="auto"):
    state = {f"w{i}": torch.full((4,), value) for i in range(3)}
    meshpar.export_hf(state, folder, overwrite=overwrite, max_shard_size=max_shard_size, writer=writer)


def test_folders_that_are_occupied_or_in_use_or_no_folders(tmp_path):
    run_ranks(export_plain, 2, str(tmp_path / "run"))
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    before = contents(tmp_path / "run")
    assert "the folder is occupied" in refused(CheckpointError, export_plain, str(tmp_path / "run"))
    assert contents(tmp_path / "run") == before
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_text("")
    assert "has pytorch_model.bin" in refused(CheckpointError, export_plain, str(tmp_path / "old"))
    (tmp_path / "file").write_text("")
    assert "NotADirectoryError" in refused(CheckpointError, export_plain, str(tmp_path / "file" / "run"))
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "another export is at work" in refused(CheckpointError, export_plain, str(tmp_path / "run"), True)
    os.close(handle)
    assert contents(tmp_path / "run") == before
    run_ranks(export_plain, 2, str(tmp_path / "run"), True, 2.0)
    assert load_file(tmp_path / "run" / "model.safetensors")["w1"].tolist() == [2.0] * 4


def test_nothing_stale_is_left(tmp_path):
    folder = tmp_path / "run"
    run_ranks(export_plain, 2, str(folder), max_shard_size=16)
    (folder / "pytorch_model.bin").write_text("")
    (folder / "vocab.txt").write_text("")
    (folder / ".meshpar-export-of-a-killed-one").mkdir()
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    run_ranks(export_plain, 2, str(folder), True, 2.0, 32)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(os.listdir(folder)) == [*names, "vocab.txt"]
    run_ranks(export_plain, 2, str(folder), True, 3.0)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "vocab.txt"]


def fail_for_good(folder):
    with Failing(folder, "rename", 0, 2, errno.EACCES) as failing:
        failing.for_good = True
        export_plain(folder, True, 2.0, 16)


def test_a_folder_that_fails_half_way_and_back_says_where_the_old_files_are(tmp_path):
    folder = tmp_path / "run"
    run_ranks(export_plain, 2, str(folder), False, 1.0, 16)
    text = refused(CheckpointError, fail_for_good, str(folder))
    assert "export: stopped half-way." in text
    assert "1 old files are in " in text
    (old,) = folder.glob(".meshpar-export-*/old")
    assert str(old) in text
    assert os.listdir(old) == ["model.safetensors.index.json"]


class Failing:
    """Let a function of the system fail on one rank from its call of a number on, where a folder is concerned."""

    def __init__(self, where, name, rank, number, code):
        self.where, self.name, self.number, self.code = where, name, number, code
        self.on = dist.get_rank() == rank
        self.owner = Path if name in ("mkdir", "rename") else os
        self.real = getattr(self.owner, name)
        self.calls, self.for_good = 0, False

    def __enter__(self):
        real, this = self.real, self

        def failing(*args, **kwargs):
            about = args[0] if not isinstance(args[0], int) else os.readlink(f"/proc/self/fd/{args[0]}")
            if this.on and str(this.where) in str(about):
                this.calls += 1
                # Else there is no way back, and no way to clean up.
                once = this.name in ("rename", "open") and not this.for_good
                if this.calls == this.number or (this.calls > this.number and not once):
                    raise OSError(this.code, os.strerror(this.code))
            return real(*args, **kwargs)

        setattr(self.owner, self.name, failing)
        return self

    def __exit__(self, *_):
        setattr(self.owner, self.name, self.real)


STEPS = (
    *(("mkdir", 1, errno.EACCES), ("mkdir", 2, errno.ENOSPC), ("open", 1, errno.EACCES), ("open", 3, errno.EACCES)),
    *(("open", 5, errno.EMFILE), ("ftruncate", 1, errno.ENOSPC), ("pwrite", 1, errno.ENOSPC), ("pwrite", 3, errno.EIO)),
    *(("write", 1, errno.ENOSPC), ("write", 2, errno.ENOSPC), ("fsync", 1, errno.EIO), ("fsync", 4, errno.EIO)),
    *(("fsync", 8, errno.EIO), ("rename", 1, errno.EACCES), ("rename", 2, errno.EIO), ("rename", 6, errno.EACCES)),
)


def error_of(act):
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def fail_at_each_step(folder, writer):
    """On one rank after the other a step fails; the old checkpoint stays. Give how many have failed."""
    failed = []
    for rank in (0, 1):
        for name, number, code in STEPS:
            with Failing(folder, name, rank, number, code):
                error = error_of(lambda: export_plain(folder, True, 2.0, 16, writer))
            if error:
                assert os.strerror(code) in error, error
                failed.append((rank, name, number, error))
            dist.barrier()
            if dist.get_rank() == 0:
                found = sorted(os.listdir(folder))
                assert len(found) == 4, (rank, name, number, found)
                first = torch.tensor([float(load_file(f"{folder}/{n}")[f"w{i}"][0]) for i, n in enumerate(found[:3])])
                done = not failed or failed[-1][:3] != (rank, name, number)
                assert set(first.tolist()) == {2.0 if done else 1.0}, (rank, name, number)
            dist.barrier()
            export_plain(folder, True, 1.0, 16, writer)
    return failed


@pytest.mark.parametrize("writer", ["direct", "two-phase"])
def test_a_disk_that_fails_on_one_rank_at_each_step(writer, tmp_path):
    folder = str(tmp_path / "run")
    run_ranks(export_plain, 2, folder, False, 1.0, 16)
    told = run_ranks(fail_at_each_step, 2, folder, writer)
    assert told[0] == told[1]
    steps = {(rank, name) for rank, name, _, _ in told[0]}
    assert {(0, "mkdir"), (0, "open"), (1, "open"), (0, "fsync"), (1, "fsync"), (0, "rename")} <= steps
    assert {(rank, "pwrite" if writer == "direct" else "write") for rank in (0, 1)} <= steps
    assert (writer != "direct") or {(0, "ftruncate"), (1, "ftruncate")} <= steps


def export_while_files_show_late(folder, never):
    real, tries = os.open, {}

    def late(path, flags, *args, **kwargs):
        name = str(path)
        if folder in name and not flags & os.O_CREAT and not os.path.isdir(name):
            tries[name] = tries.get(name, 0) + 1
            if tries[name] <= 3 or never:
                raise FileNotFoundError(errno.ENOENT, "not yet", name)
        return real(path, flags, *args, **kwargs)

    if dist.get_rank() == 1:
        os.open = late
    kept, writers.VISIBLE_S = writers.VISIBLE_S, (0.2 if never else 10.0)
    try:
        export_plain(folder, writer="direct")
    finally:
        os.open, writers.VISIBLE_S = real, kept
    return sum(tries.values())


def test_files_that_show_late_or_never(tmp_path):
    run_ranks(export_while_files_show_late, 2, str(tmp_path / "late"), False)
    assert load_file(tmp_path / "late" / "model.safetensors")["w2"].tolist() == [1.0] * 4
    text = refused(CheckpointError, export_while_files_show_late, str(tmp_path / "never"), True)
    assert "not all ranks see the folder" in text
    assert "rank 1: FileNotFoundError" in text
    assert not (tmp_path / "never").exists()


def truncate_after_writing(folder):
    real = folders.check_sizes

    def shortened(staging, sizes):
        os.truncate(staging.path / "model.safetensors", 10)
        real(staging, sizes)

    folders.check_sizes = shortened
    try:
        export_plain(folder)
    finally:
        folders.check_sizes = real


def test_a_file_that_is_not_as_written(tmp_path):
    text = refused(CheckpointError, truncate_after_writing, str(tmp_path / "run"))
    assert "model.safetensors: 10 bytes, " in text
    assert not (tmp_path / "run").exists()


def leave_a_rank_behind(folder):
    """A rank that does not come within the timeout is an error, and the next export is well."""
    real = writers._fill_one
    if dist.get_rank() == 1:
        writers._fill_one = lambda *args: time.sleep(2.5) or real(*args)
    try:
        with pytest.raises(CheckpointError, match="no answer of a rank"):
            meshpar.export_hf({"w": torch.ones(4 << 20)}, folder, timeout_s=1.0, writer="direct")
    finally:
        writers._fill_one = real
    dist.barrier()
    meshpar.export_hf({"w": torch.ones(3)}, folder, timeout_s=1.0)


def test_a_rank_that_does_not_come(tmp_path):
    run_ranks(leave_a_rank_behind, 2, str(tmp_path / "run"))
    assert load_file(tmp_path / "run" / "model.safetensors")["w"].tolist() == [1.0] * 3


def odd_names(folder):
    mesh = mesh_for("data=2")["data"]
    names = ["", " ", "a/b", "..", 'quote"', "new\nline", "é€😀", "x" * 5000, "nul\0"]
    state = {n: DTensor.from_local(torch.full((2,), float(i)), mesh, [Shard(0)]) for i, n in enumerate(names)}
    meshpar.export_hf(state, folder, max_shard_size=24)
    return names


def test_odd_names(tmp_path):
    names = run_ranks(odd_names, 2, str(tmp_path / "run"))[0]
    found = {k: v for path in (tmp_path / "run").glob("*.safetensors") for k, v in load_file(path).items()}
    assert {name: found[name].tolist() for name in names} == {name: [float(i)] * 4 for i, name in enumerate(names)}


def test_the_writer_follows_from_hosts_and_file_systems():
    def seen(*pairs):
        return [Seen(host, kind) for host, kind in pairs]

    assert chosen_writer("auto", seen(("a", "nfs4"), ("a", "nfs4"))) == "direct"
    assert chosen_writer("auto", seen(("a", "nfs4"), ("b", "nfs4"))) == "two-phase"
    assert chosen_writer("auto", seen(("a", "lustre"), ("b", "lustre"))) == "direct"
    assert chosen_writer("auto", seen(("a", "ext4"), ("b", "ext4"))) == "two-phase"
    assert chosen_writer("auto", seen(("a", "fuse.s3fs"), ("a", "fuse.s3fs"))) == "two-phase"
    assert chosen_writer("auto", seen(("a", ""))) == "two-phase"
    assert chosen_writer("direct", seen(("a", "nfs4"), ("b", "nfs4"))) == "direct"
    assert places.spread(seen(("a", ""), ("a", ""), ("b", ""), ("c", ""))) == [0, 2, 3, 1]
    assert file_system_of("/proc/self") == "proc"
    assert places.host_id() == places.host_id()


def watched(folder, show):
    shown = []
    real = save.bar

    def counting(num_bytes, *, show):
        shown.append((num_bytes, show))
        return real(num_bytes, show=show)

    save.bar = counting
    two_phase.BUFFER_BYTES, kept = 64, two_phase.BUFFER_BYTES
    try:
        mesh = mesh_for("data=2")["data"]
        state = {"w": DTensor.from_local(torch.ones(50), mesh, [Replicate()]), "v": torch.ones(7)}
        meshpar.export_hf(state, folder, progress=show, writer="two-phase")
    finally:
        save.bar, two_phase.BUFFER_BYTES = real, kept
    return shown


def test_rank_0_alone_shows_a_bar(tmp_path, capfd):
    told = run_ranks(watched, 2, str(tmp_path / "run"), True)
    assert told == [[(228, True)], [(0, False)]]


def test_a_bar_is_shown_where_rich_is_and_none_where_it_is_missing(monkeypatch, capfd):
    from meshpar.export import progress

    with progress.bar(10, show=True) as told:
        told(10)
    assert "export (rank 0)" in capfd.readouterr().err
    monkeypatch.setattr(progress, "_rich", lambda: None)
    with progress.bar(10, show=True) as told:
        told(10)
    assert capfd.readouterr().err == ""


def test_a_model_without_values_is_refused(tmp_path):
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(SpecError, match=r"meta|no data|no values"):
        meshpar.export_hf(net, tmp_path)
