"""`auto_plan` finds MLPs and attention by names and shapes of common libraries, and leaves alone what does not fit."""

import logging

import tensor_nets as nets
import torch
from torch import nn

import meshpar
from meshpar.autoplan import auto_plan
from meshpar.tensor import plan_splits
from meshpar.testing import assert_equivalent, run_ranks
from meshpar.testing.meshes import mesh_for


class Named(nn.Module):
    """Layers under dotted names, as a library has them; their forwards do not matter here."""

    def __init__(self, heads=None, /, **layers):
        super().__init__()
        if heads:
            self.num_heads = heads
        for path, layer in layers.items():
            owner = self
            *parents, name = path.split("__")
            for parent in parents:
                if parent not in owner._modules:
                    owner.add_module(parent, nn.Module())
                owner = owner._modules[parent]
            owner.add_module(name, layer)


def linear(num_in, num_out):
    return nn.Linear(num_in, num_out, device="meta")


def test_attention_and_mlp_of_timm():
    assert auto_plan(nets.Transformer(depth=1), 2) == {
        "blocks.0.attn.qkv": "packed:3",
        "blocks.0.attn.proj": "rowwise",
        "blocks.0.mlp.fc1": "colwise",
        "blocks.0.mlp.fc2": "rowwise",
    }


def test_grouped_queries_and_gates_of_llama():
    attention = Named(4, q_proj=linear(8, 8), k_proj=linear(8, 4), v_proj=linear(8, 4), o_proj=linear(8, 8))
    attention.num_key_value_heads = 2
    mlp = Named(gate_proj=linear(8, 12), up_proj=linear(8, 12), down_proj=linear(12, 8))
    plan = auto_plan(nn.ModuleDict({"self_attn": attention, "mlp": mlp}), 2)
    assert plan["self_attn.k_proj"] == "colwise"
    assert plan["self_attn.o_proj"] == "rowwise"
    assert plan["mlp.up_proj"] == "colwise"
    assert plan["mlp.down_proj"] == "rowwise"
    attention.num_key_value_heads = 3
    assert "self_attn.q_proj" not in auto_plan(nn.ModuleDict({"self_attn": attention}), 2)


def test_bert_diffusers_and_t5():
    bert = Named(
        intermediate__dense=linear(8, 16),
        output__dense=linear(16, 8),
    )
    assert auto_plan(bert, 2) == {"intermediate.dense": "colwise", "output.dense": "rowwise"}
    unet = Named(2, to_q=linear(8, 8), to_k=linear(6, 8), to_v=linear(6, 8), to_out=nn.ModuleList([linear(8, 8)]))
    assert auto_plan(unet, 2)["to_out.0"] == "rowwise"
    t5 = Named(wi_0=linear(8, 16), wi_1=linear(8, 16), wo=linear(16, 8))
    assert auto_plan(t5, 4) == {"wi_0": "colwise", "wi_1": "colwise", "wo": "rowwise"}


def test_what_does_not_fit_is_left_alone():
    assert auto_plan(Named(fc1=linear(8, 9), fc2=linear(9, 8)), 2) == {}, "9 features, 2 ranks"
    assert auto_plan(Named(fc1=linear(8, 16), fc2=linear(8, 8)), 2) == {}, "fc2 does not read fc1"
    assert auto_plan(Named(qkv=linear(8, 24), proj=linear(8, 8)), 2) == {}, "nothing tells the number of heads"
    assert auto_plan(Named(3, qkv=linear(6, 18), proj=linear(6, 6)), 2) == {}, "3 heads, 2 ranks"
    assert auto_plan(nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8)), 2) == {}, (
        "softmax mixes features"
    )
    assert auto_plan(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)), 2) == {}, "it narrows"
    assert auto_plan(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), 2) == {}, "no 1x1 convolutions"


def test_whatever_is_found_is_a_plan():
    for model in (nn.TransformerDecoderLayer(8, 4, 16), nets.Transformer(), nets.ConvNet(), nets.Gated()):
        for ranks in (2, 4):
            plan_splits(model, auto_plan(model, ranks), ranks)


def test_the_plan_that_is_found_gives_the_numbers_of_one_process():
    torch.manual_seed(0)
    x = torch.randint(0, 12, (4, 6))
    report = assert_equivalent(nets.Transformer, [x], "data=1,domain=2,tensor=2", options={"tensor_plan": "auto"})
    sums = [e for e in report.log.entries if e.axis == "tensor" and e.kind == "reduction" and not e.backward]
    assert len(sums) == 4, "one for each MLP and each attention of two blocks"


def told(mesh):
    said = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())
    logger = logging.getLogger("meshpar")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        meshpar.parallelize(nets.Mlp(), mesh_for(mesh), tensor_plan="auto")
        meshpar.parallelize(nn.Linear(2, 2), mesh_for(mesh), tensor_plan="auto")
    finally:
        logger.removeHandler(handler)
    return said


def test_what_was_found_is_told_once():
    assert run_ranks(told, 2, "data=1,tensor=2") == [
        [
            'tensor_plan="auto" over 2 ranks splits\n  fc1: colwise\n  fc2: rowwise',
            'tensor_plan="auto" over 2 ranks splits nothing',
        ],
        [],
    ]
