"""`load_hf` of files that do not fit: all that is wrong is named on all ranks, and the model is as it was."""

import pytest
import torch
import torch.distributed as dist
from checks import refused, same_bits
from files import write, write_model
from safetensors.torch import load_file
from torch import nn

import meshpar
from meshpar.errors import CheckpointError
from meshpar.export import load_hf
from meshpar.shares import whole_of
from meshpar.testing import RankError, mesh_for, run_ranks


def load_small(folder: str, *, meta: bool = False, strict: bool = True) -> meshpar.export.LoadedHf:
    with torch.device("meta" if meta else "cpu"):
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    torch.manual_seed(5)
    for value in net.state_dict().values():
        value.fill_(3)
    model = meshpar.parallelize(net, mesh_for("data=1,domain=2"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        told = load_hf(model, folder, strict=strict)
    except Exception:
        now = model.state_dict(keep_vars=True)
        assert all(value.is_meta if meta else same_bits(value, before[name]) for name, value in now.items())
        raise
    assert not any(p.is_meta for p in model.parameters())
    for name in told.missing:
        value = model.state_dict()[name]
        assert meta or same_bits(value, before[name])
    assert torch.equal(whole_of(model[0].weight), load_file(f"{folder}/model.safetensors")["0.weight"])
    return told


def small(**changes) -> dict[str, torch.Tensor]:
    values = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).state_dict()
    values.update(changes)
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("meta", [False, True])
def test_all_that_does_not_fit_is_named_with_shapes_on_all_ranks(meta, tmp_path):
    changes = {
        "0.bias": None,
        "1.num_batches_tracked": torch.zeros(()),
        "1.weight": torch.zeros(4),
        "more": torch.zeros(2, 0),
    }
    folder = str(write(tmp_path, small(**changes)))
    text = refused(CheckpointError, load_small, folder, num_ranks=2, meta=meta)
    for line in (
        "0.bias: (5,) of torch.float32 in the model, missing in the checkpoint",
        "more: (2, 0) of torch.float32 in the checkpoint, not in the model",
        "1.weight: (4,) of torch.float32 in the checkpoint, (5,) of torch.float32 in the model",
        "1.num_batches_tracked: () of torch.float32 in the checkpoint, () of torch.int64 in the model",
        "strict=False",
    ):
        assert line in text
    text = refused(CheckpointError, load_small, folder, num_ranks=2, meta=meta, strict=False)
    assert "1.weight" in text
    assert "0.bias" not in text


def test_not_strict_leaves_what_is_missing_as_it_was(tmp_path):
    folder = str(write(tmp_path, small(**{"0.bias": None, "more": torch.zeros(2)})))
    for meta in (False, True):  # on the meta device reset_parameters fills it
        for told in run_ranks(load_small, 2, folder, meta=meta, strict=False):
            assert (told.missing, told.unexpected) == (("0.bias",), ("more",))


@pytest.mark.parametrize(
    ("there", "here", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float16, True),
        (torch.float16, torch.float64, True),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.float32, False),
        (torch.int64, torch.int32, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.bfloat16, torch.float8_e4m3fn, False),
        (torch.uint8, torch.bool, False),
        (torch.complex64, torch.float32, False),
    ],
)
def test_which_dtypes_are_rounded_to_others(there, here, fits, tmp_path):
    value = (torch.randn(5, 3) * 1000).to(there)
    folder = write(tmp_path, {"weight": value})
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(5, 3).to(here))
    if fits:
        load_hf(model, folder)
        assert torch.equal(model.weight, value.to(here))
    else:
        with pytest.raises(CheckpointError, match=rf"\(5, 3\) of {there} in the checkpoint, \(5, 3\) of {here}"):
            load_hf(model, folder, strict=False)


def test_scales_of_one_block_are_read_as_the_export_writes_them(tmp_path):
    model = nn.Module()
    model.register_buffer("weight_scale", torch.zeros(1, 4, 2))
    load_hf(model, write(tmp_path, {"weight_scale": torch.arange(8.0).view(4, 2)}))
    assert torch.equal(model.weight_scale, torch.arange(8.0).view(1, 4, 2))
    model.register_buffer("weight", torch.zeros(1, 4, 2))
    with pytest.raises(CheckpointError, match="weight: "):
        load_hf(model, write(tmp_path, {"weight_scale": torch.zeros(1, 4, 2), "weight": torch.zeros(4, 2)}))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda net: nn.ModuleDict({"model": net}), "load_hf(model.model, ...)"),
        (lambda net: net[0], "a model that holds this one as '0'"),
    ],
)
def test_names_that_begin_otherwise_get_advice(make, advice, tmp_path):
    net = nn.Sequential(nn.Linear(2, 2))
    folder = write_model(tmp_path, net)
    with pytest.raises(CheckpointError) as caught:
        load_hf(make(nn.Sequential(nn.Linear(2, 2))), folder)
    assert advice in str(caught.value)


def other_files(folder: str) -> None:
    load_small(f"{folder}/{dist.get_rank()}")


def test_ranks_that_see_other_files(tmp_path):
    for rank in range(2):
        write(tmp_path / str(rank), small(), rank + 1)
    with pytest.raises(RankError) as caught:
        run_ranks(other_files, 2, str(tmp_path))
    assert len(caught.value.exceptions) == 2
    assert all("other headers on rank 1 than on rank 0" in str(e) for e in caught.value.exceptions.values())
