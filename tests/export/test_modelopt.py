"""`distributed_save_hf_checkpoint` from end to end, read back by `safetensors`, and by `load_hf` on other layouts."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from quantized import EXPORTED, Attention, Quantizer, Tied, laid_out
from safetensors.torch import load_file
from test_load import Net, fill, net_of, same_bits, spread_out
from torch import nn

import meshpar
from meshpar.errors import CheckpointError, SpecError
from meshpar.testing import RankError, run_ranks


class Quantized(Tied):
    """A tied model with an attention that has been quantized, and a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention.k_bmm_quantizer._amax = torch.tensor([1.0, 22.4])
        for module in (self.table, self.head):
            module.register_buffer("weight_scale", torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.attention.q_proj(self.table(x)).sum()


NAMES = ["table.weight", "table.weight_scale", "body.weight", "body.bias", *(f"attention.{n}" for n in EXPORTED)]


def exported(folder: str, how: str, size: int | str) -> None:
    torch.manual_seed(3)
    model = laid_out(Quantized(), how)
    with torch.inference_mode():
        if how == "fully_shard":
            model(torch.arange(4))
        meshpar.distributed_save_hf_checkpoint(model, folder, 448.0, "FP8", size)
        assert torch.is_inference_mode_enabled()


def whole(folder) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: found[file][name] for name, file in weight_map.items()}


@pytest.mark.parametrize("size", ["10GB", 500])
@pytest.mark.parametrize("how", ["none", "meshpar", "fully_shard", "parallelize_module"])
def test_a_quantized_model_under_inference_mode(how, size, tmp_path):
    folder = tmp_path / "out"
    run_ranks(exported, 1 if how == "none" else 4, str(folder), how, size)
    torch.manual_seed(3)
    net = Quantized()
    found = whole(folder)
    assert sorted(found) == sorted(NAMES)
    state = net.state_dict()
    renamed = {
        "attention.k_proj.k_scale": torch.tensor(22.4) / 448,
        "attention.v_proj.v_scale": torch.tensor(0.25),
        "attention.k_proj.k_bias": state["attention.k_bmm_quantizer._bias_value"],
        "attention.q_proj.pre_quant_scale": state["attention.q_proj.input_quantizer._pre_quant_scale"],
        "attention.q_proj.weight_scale": state["attention.q_proj.weight_scale"][0],
    }
    for name, value in found.items():
        assert same_bits(value, renamed.get(name, state.get(name))), name
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size == 500)


def refused(folder: str, what: str) -> None:
    net = Quantized()
    told = [448.0, "FP8"]
    if what == "a cache without a format":
        told[1] = None
    elif what == "a bound of 0":
        told[0] = 0.0
    elif what == "a tie that differs on rank 1" and dist.get_rank() == 1:
        net.head.weight = nn.Parameter(net.table.weight.detach() + 1)
    elif what == "a collision":
        net.attention.v_bmm_quantizer = Quantizer(bias_value=torch.ones(1))
        net.attention.v_proj = nn.Module()
        net.attention.v_proj.register_buffer("v_bias", torch.ones(1))
    meshpar.distributed_save_hf_checkpoint(net, folder, *told, max_shard_size=0 if what == "a size of 0" else "1GB")


@pytest.mark.parametrize(
    "what",
    ["a cache without a format", "a bound of 0", "a tie that differs on rank 1", "a collision", "a size of 0"],
)
def test_what_cannot_be_exported_leaves_nothing_behind(what, tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(refused, 2, str(tmp_path / "out"), what)
    errors = caught.value.exceptions
    assert {type(e) for e in errors.values()} == {SpecError}
    assert len(errors) == 2
    assert len({str(e) for e in errors.values()}) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_checkpoint_is_kept_or_replaced(tmp_path):
    net = nn.Linear(3, 2)
    meshpar.distributed_save_hf_checkpoint(net, tmp_path, 448.0, None)
    with pytest.raises(CheckpointError, match="occupied"):
        meshpar.distributed_save_hf_checkpoint(nn.Linear(4, 4), tmp_path, 448.0, None)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], net.weight)
    other = nn.Linear(4, 4)
    meshpar.distributed_save_hf_checkpoint(other, tmp_path, 0.0, None, overwrite=True)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], other.weight)


def save_as(folder: str, how: str, size: int | str) -> None:
    meshpar.export_hf(spread_out(net_of(1), how), folder, max_shard_size=size)


def load_as(folder: str, how: str) -> None:
    expected = spread_out(net_of(1), how)
    with torch.device("meta"):
        net = Net()
    model = spread_out(net, how)
    meshpar.load_hf(model, folder, init=fill)
    for name, value in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("meshpar", "fully_shard"),
        ("fully_shard", "meshpar, over tensor"),
        ("meshpar, over tensor", "one process"),
        ("fully_shard over parallelize_module", "meshpar"),
        ("one process", "fully_shard over parallelize_module"),
        ("parallelize_module", "meshpar, copies"),
    ],
)
def test_round_trips_from_one_layout_to_another(first, second, tmp_path):
    for size in ("10GB", 400):
        folder = str(tmp_path / str(size))
        run_ranks(save_as, 1 if first == "one process" else 4, folder, first, size)
        run_ranks(load_as, 1 if second == "one process" else 4, folder, second)
        assert ("model.safetensors.index.json" in os.listdir(folder)) == (size == 400)
