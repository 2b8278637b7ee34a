"""A checkpoint is bit by bit what one process has, whoever wrote it, however its tensors lay."""

import json
import os

import pytest
import states
import torch
import torch.distributed as dist
from checks import same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshpar
from meshpar.export import two_phase
from meshpar.export.memory import stretches
from meshpar.export.runs import Part, runs
from meshpar.testing import mesh_for, run_ranks

WRITERS = ("direct", "two-phase")


def read(folder):
    """Read a checkpoint as transformers does: the only file, or what the index says."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        assert not index.exists()
        return load_file(folder / "model.safetensors")
    told = json.loads(index.read_text())
    found = {}
    for name in sorted(set(told["weight_map"].values())):
        found |= load_file(folder / name)
    assert {k for k in found} == set(told["weight_map"])
    assert told["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in found.values())
    return found


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def export_large(folder, **options):
    state = states.large_state()
    told = meshpar.export_hf(state, folder, **options)
    assert told.writer == options["writer"]
    return told.files, told.total_bytes


@pytest.mark.parametrize("max_shard_size", ["10GB", 3000])
def test_more_than_142_tensors_of_all_layouts_and_dtypes_bit_by_bit(max_shard_size, tmp_path):
    expected = states.whole_state()
    assert len(expected) >= 142
    for writer in WRITERS:
        told = run_ranks(export_large, 4, str(tmp_path / writer), writer=writer, max_shard_size=max_shard_size)
        assert len({str(one) for one in told}) == 1
        assert told[0][1] == sum(x.numel() * x.element_size() for x in expected.values())
        assert (len(told[0][0]) > 5) == (max_shard_size == 3000)
        found = read(tmp_path / writer)
        assert set(found) == set(expected)
        wrong = [name for name in expected if not same_bits(found[name], expected[name])]
        assert wrong == []
    assert files_of(tmp_path / "direct") == files_of(tmp_path / "two-phase")
    if max_shard_size == "10GB":  # and the very file that safetensors writes
        save_file(
            {k: v.contiguous().resolve_conj() for k, v in expected.items()}, tmp_path / "theirs", {"format": "pt"}
        )
        assert (tmp_path / "theirs").read_bytes() == files_of(tmp_path / "direct")["model.safetensors"]
        with safe_open(tmp_path / "direct" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}


def export_in_small_rounds(folder):
    """Buffers so small that tensors, runs and files end anywhere in a round."""
    two_phase.BUFFER_BYTES, kept = 96, two_phase.BUFFER_BYTES
    try:
        state = states.large_state(select=lambda name: "float32" in name or "only" in name or "bool" in name)
        meshpar.export_hf(state, folder, writer="two-phase", max_shard_size=2000)
    finally:
        two_phase.BUFFER_BYTES = kept
    meshpar.export_hf(state, folder + "-direct", writer="direct", max_shard_size=2000)


def test_rounds_end_anywhere(tmp_path):
    run_ranks(export_in_small_rounds, 4, str(tmp_path / "small"))
    assert files_of(tmp_path / "small") == files_of(tmp_path / "small-direct")
    expected = states.whole_state()
    assert all(same_bits(x, expected[name]) for name, x in read(tmp_path / "small").items())


class Net(nn.Module):
    def __init__(self, n=9):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(n, 6)
        self.up, self.down = nn.Linear(6, n), nn.Linear(n, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, n, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x):
        return self.head(self.norm(self.down(self.up(self.embed(x)).relu())))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def size_for(how):
    return 10 if how == "meshpar" else 9  # its tensor plans are for equal parts


def sharded(how):
    mesh = mesh_for("data=2,tensor=2")
    net = Net(size_for(how))
    if how == "meshpar":
        return meshpar.parallelize(net, mesh, tensor_plan={"up": "colwise", "down": "rowwise"})
    if how == "hsdp":
        return fully_shard(net, mesh=mesh[("data", "tensor")])
    if how in ("tensor", "fsdp of tensor"):
        net = parallelize_module(net, mesh["tensor"], PLAN)
    if how in ("fsdp", "fsdp of tensor"):
        fully_shard(net, mesh=mesh["data"])
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    return net


HOWS = ("meshpar", "hsdp", "tensor", "fsdp", "fsdp of tensor", "none")


def export_model(folder, how, inference):
    net = sharded(how)
    x = torch.arange(4)
    with torch.inference_mode(inference):
        if how in ("hsdp", "fsdp", "none"):  # torch itself cannot run uneven tensor axes
            net(x)
        meshpar.export_hf(net, folder)


@pytest.mark.parametrize("inference", [False, True])
def test_models_parallelized_by_anyone(inference, tmp_path):
    for how in HOWS:
        expected = Net(size_for(how)).state_dict()
        del expected["head.weight"]
        run_ranks(export_model, 4, str(tmp_path / how), how, inference)
        found = read(tmp_path / how)
        assert set(found) == set(expected), how
        assert all(same_bits(found[name], expected[name]) for name in expected), how


def test_one_process_without_a_group(tmp_path):
    net = Net()
    told = meshpar.export_hf(net, tmp_path / "a" / "b", max_shard_size=150, writer="two-phase")
    assert told.path == tmp_path / "a" / "b"
    meshpar.export_hf(net, tmp_path / "c", max_shard_size=150)
    assert files_of(tmp_path / "c") == files_of(told.path)
    found = read(told.path)
    assert list(told.files) == sorted({*os.listdir(told.path)} - {"model.safetensors.index.json"})
    assert all(same_bits(found[name], x) for name, x in net.state_dict().items() if name != "head.weight")


def test_nothing_to_write_is_a_file_without_tensors(tmp_path):
    meshpar.export_hf({}, tmp_path)
    assert read(tmp_path) == {}


class Config:
    def __init__(self, told):
        self.told = told

    def to_json_file(self, path):
        with open(path, "w") as file:
            json.dump(self.told, file, indent=2, sort_keys=True)


class Configured(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.config = Config({"model_type": "linear", "hidden_size": 3})
        self.generation_config = Config({"max_length": 7})


def export_configured(folder):
    net = fully_shard(Configured(), mesh=mesh_for("data=2")["data"])
    meshpar.export_hf(net, folder, overwrite=True)
    meshpar.export_hf({"w": torch.zeros(2)}, folder + "-of", config_of=net)


def test_configurations_come_along_and_tokenizers_stay(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-00001-of-00009.safetensors").write_text("stale")
    (folder / "config.json").write_text("stale")
    run_ranks(export_configured, 2, str(folder))
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(folder)) == expected
    told = json.loads((folder / "config.json").read_text())
    assert told == {"model_type": "linear", "hidden_size": 3, "architectures": ["Configured"]}
    assert json.loads((folder / "generation_config.json").read_text()) == {"max_length": 7}
    assert (tmp_path / "run-of" / "config.json").exists()


def test_pieces_that_do_not_lie_side_by_side_come_in_windows(monkeypatch):
    monkeypatch.setattr("meshpar.export.memory.WINDOW_BYTES", 64)
    for x in (torch.arange(5 * 7 * 11).view(5, 7, 11).permute(2, 0, 1), torch.arange(300)[::3], torch.ones(40, 0).t()):
        part = Part(tuple(x.shape), tuple(((0, n),) for n in x.shape))
        for start, stop in [(0, None), (8, 80), (40, 504), (0, 8)]:
            got = [(at, bytes(data)) for at, data in stretches(x, runs(part, 8, start, stop))]
            assert all(len(data) <= 64 for _, data in got)
            whole = bytes(x.contiguous().flatten().view(torch.uint8).tolist())[start:stop]
            assert b"".join(data for _, data in got) == whole
            assert [at for at, _ in got] == [start + sum(len(d) for _, d in got[:i]) for i in range(len(got))]


def export_with_default_group_busy(folder):
    """The exchanges do not go over the default group, whose timeout may be short."""
    mine = []
    real = dist.all_gather_object
    dist.all_gather_object = lambda *args, group=None, **kw: mine.append(group) or real(*args, group=group, **kw)
    try:
        meshpar.export_hf({"w": torch.ones(2)}, folder, timeout_s=77.0)
    finally:
        dist.all_gather_object = real
    assert mine
    assert all(group is not None and group is not dist.group.WORLD for group in mine)


def test_the_exchanges_have_a_group_of_their_own(tmp_path):
    run_ranks(export_with_default_group_busy, 2, str(tmp_path / "x"))
