"""Checkpoints of models of transformers: what `export_hf` writes `from_pretrained` reads, and the other way round."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshpar
from meshpar import private
from meshpar.testing import mesh_for, run_ranks

pytestmark = pytest.mark.thirdparty

SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 21, "pad_token_id": 0, "eos_token_id": 1},
}


def of_transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def llama(*, tied: bool, seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    config = of_transformers("LlamaConfig")(**SIZES, tie_word_embeddings=tied, dtype=dtype)
    return of_transformers("LlamaForCausalLM")(config).to(dtype)


def spread_out(net: nn.Module, how: str) -> nn.Module:
    if how == "meshpar":
        return meshpar.parallelize(net, mesh_for("data=2,tensor=2"), tensor_plan="auto")
    line = private.flatten(mesh_for("data=2,domain=2"), ("data", "domain"), "all_ranks")
    if how == "parallelize_module":
        layer = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        plan = {f"model.layers.*.self_attn.{name}": style for name, style in layer.items()}
        plan |= {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
        return parallelize_module(net, mesh_for("data=2,tensor=2")["tensor"], plan)
    for layer in net.model.layers:
        fully_shard(layer, mesh=line)
    return fully_shard(net, mesh=line)


def write(folder: str, how: str, tied: bool, size: int | str) -> None:
    net = llama(tied=tied, seed=1)
    model = spread_out(net, how)
    with torch.inference_mode():
        if how == "fully_shard":
            model(torch.arange(6).view(1, 6))
        meshpar.distributed_save_hf_checkpoint(model, folder, 448.0, None, size)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", ["meshpar", "fully_shard", "parallelize_module"])
def test_from_pretrained_reads_what_ranks_have_exported(how, tied, tmp_path):
    for size in ("10GB", 4000):
        folder = str(tmp_path / str(size))
        run_ranks(write, 4, folder, how, tied, size)
        expected = llama(tied=tied, seed=1)
        found, told = of_transformers("LlamaForCausalLM").from_pretrained(folder, output_loading_info=True)
        assert [key for key, value in told.items() if value] == []
        assert type(found) is of_transformers("LlamaForCausalLM")
        assert found.dtype == torch.bfloat16
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
        state = found.state_dict()
        assert list(state) == list(expected.state_dict())
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
        x = torch.arange(6).view(1, 6)
        assert torch.equal(found(x).logits, expected(x).logits)


def read(folder: str, how: str, tied: bool) -> None:
    expected = spread_out(llama(tied=tied, seed=2), how)
    with torch.device("meta"):
        net = llama(tied=tied, seed=3)
    model = spread_out(net, how)
    meshpar.load_hf(model, folder, init=net._init_weights)
    for name, value in expected.state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(private.piece_of(found), private.piece_of(value)), name
    for name, value in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value), name
    if how == "meshpar":
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", ["meshpar", "fully_shard"])
def test_ranks_read_what_save_pretrained_has_written(how, tied, tmp_path):
    for size in ("10GB", "4KB"):
        folder = tmp_path / size
        llama(tied=tied, seed=2).save_pretrained(folder, max_shard_size=size)
        assert len(list(folder.glob("*.safetensors"))) > 1 or size == "10GB"
        run_ranks(read, 4, str(folder), how, tied)
