"""Models with what a quantization toolkit leaves in them, without the toolkit; models with ties; layouts."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshpar
from meshpar import private
from meshpar.testing import mesh_for


class Quantizer(nn.Module):
    """Buffers as a quantizer has them."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(f"_{name}", value)


class Attention(nn.Module):
    """Layers of an attention with quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.q_proj.input_quantizer = Quantizer(amax=torch.tensor(2.0), pre_quant_scale=torch.rand(6))
        self.q_proj.weight_quantizer = Quantizer(
            amax=torch.tensor(2.0), scale=torch.rand(6), double_scale=torch.rand(1)
        )
        self.q_proj.output_quantizer = Quantizer(amax=torch.tensor(2.0))
        self.q_proj.register_buffer("weight_scale", torch.rand(1, 6, 3))
        self.k_bmm_quantizer = Quantizer(amax=torch.tensor([[1.0], [56.0]]), bias_value=torch.rand(1, 2))
        self.v_bmm_quantizer = Quantizer(amax=torch.tensor(112.0, dtype=torch.bfloat16))
        self.q_bmm_quantizer = Quantizer(amax=torch.tensor(1.0))


EXPORTED = [
    "q_proj.weight",
    "q_proj.bias",
    "q_proj.weight_scale",
    "q_proj.pre_quant_scale",
    "k_proj.weight",
    "k_proj.k_scale",
    "k_proj.k_bias",
    "v_proj.v_scale",
]


class Tied(nn.Module):
    """A table that is the head too, and layers in between; `declared` as a model of transformers says it."""

    def __init__(self, *, declared: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight
        if declared:
            self.all_tied_weights_keys = {"head.weight": "table.weight"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(x)))


def laid_out(net: nn.Module, how: str) -> nn.Module:
    """Lay a model with layers `table`, `body` and `head` over 4 ranks (2 for "pair")."""
    if how == "none":
        return net
    if how == "meshpar":
        return meshpar.parallelize(net, mesh_for("data=2,domain=2"))
    if how == "meshpar tensor":
        return meshpar.parallelize(net, mesh_for("data=2,tensor=2"), tensor_plan={"body": "colwise"})
    if how == "fully_shard":
        mesh = private.flatten(mesh_for("data=2,domain=2"), ("data", "domain"), "all_ranks")
        fully_shard(net.body, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    mesh = mesh_for("data=2,tensor=2")["tensor"]
    assert how == "parallelize_module"
    return parallelize_module(
        net, mesh, {"table": RowwiseParallel(), "head": ColwiseParallel(), "body": ColwiseParallel()}
    )


def placed(whole: torch.Tensor, mesh: str, placements: list) -> DTensor:
    """Cut a tensor that every rank has."""
    return distribute_tensor(whole, mesh_for(mesh), placements, src_data_rank=None)


__all__ = ["EXPORTED", "Attention", "Quantizer", "Replicate", "Shard", "Tied", "laid_out", "placed"]
