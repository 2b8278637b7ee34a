"""Tensor plans: any plan gives the numbers of one process; a good one costs what it must, and no more."""

import copy
import functools
import itertools

import pytest
import tensor_nets as nets
import torch
import torch.nn.functional as F
from torch import nn

import meshpar
from meshpar.testing import assert_equivalent, run_ranks
from meshpar.testing.meshes import mesh_for

MESHES = ("data=1,domain=2,tensor=2", "data=2,domain=1,tensor=2", "data=1,tensor=4", "data=2,domain=2,tensor=1")
SPLIT = MESHES[:3]


def tokens():
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def images():
    return torch.randn(4, 3, 9, 8, generator=torch.Generator().manual_seed(1))


CASES = {
    "mlp": (nets.Mlp, tokens, {"fc1": "colwise", "fc2": "rowwise"}),
    "gated": (nets.Gated, tokens, {"gate_up": "packed:2", "down": "rowwise"}),
    "attention": (nets.FusedAttention, tokens, {"qkv": "packed", "proj": "rowwise"}),
    "transformer": (nets.Transformer, lambda: torch.randint(0, 12, (4, 6)), nets.TRANSFORMER_PLAN),
    "tied": (
        functools.partial(nets.Transformer, tied=True),
        lambda: torch.randint(0, 12, (4, 6)),
        {"embed": "rowwise", "head": "colwise"},
    ),
    "columns of an embedding": (nets.Transformer, lambda: torch.randint(0, 12, (4, 6)), {"embed": "colwise"}),
    "multihead": (
        functools.partial(nn.TransformerEncoderLayer, 8, 4, 16, dropout=0.0, batch_first=True),
        tokens,
        {"self_attn": "colwise", "linear1": "colwise", "linear2": "rowwise"},
    ),
    "convolutions": (
        nets.ConvNet,
        images,
        {"stem": "colwise", "depth": "colwise", "down": "colwise", "squeeze": "rowwise"},
    ),
    "columns then rows": (nets.ConvNet, images, {"stem": "colwise", "down": "rowwise"}),
    "spectral": (nets.Spectral, lambda: images()[:, :2], {"conv": "colwise", "old": "rowwise", "lin": "colwise"}),
}


@pytest.mark.parametrize("mesh", SPLIT)
@pytest.mark.parametrize("name", CASES)
def test_a_split_network_equals_one_process(name, mesh):
    model, make, plan = CASES[name]
    if mesh.endswith("tensor=4") and name in ("spectral",):
        plan = {"conv": "colwise", "old": "rowwise"}
    torch.manual_seed(0)
    assert_equivalent(model, [make()], mesh, options={"tensor_plan": plan})


@pytest.mark.parametrize("mesh", SPLIT)
def test_shares_of_shares_may_be_uneven_and_empty(mesh):
    """Rows are cut by `tensor` first, then over data x domain: 6 rows are 3 and 3, then 2, 1, 2, 1; 4 are 1 each."""
    sizes = (8, 12, 4, 4) if mesh.endswith("4") else (8, 6, 2, 2)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    plan = {"0": "colwise", "1": "rowwise", "2": "colwise"}
    report = assert_equivalent(nn.Sequential(*layers), [tokens()], mesh, options={"tensor_plan": plan})
    assert report.log.gathers() == []
    conv = nn.Sequential(nn.Conv2d(3, sizes[1], 3, padding=1), nn.Conv2d(sizes[1], sizes[2], 1))
    assert_equivalent(conv, [images()], mesh, options={"tensor_plan": {"0": "colwise", "1": "colwise"}})


@pytest.mark.parametrize("name", ["mlp", "attention", "gated", "convolutions"])
def test_a_split_network_is_right(name):
    model, make, plan = CASES[name]
    assert_equivalent(model, [make()], SPLIT[0], options={"tensor_plan": plan})


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
def test_a_compiled_split_network_equals_one_process(name):
    model, make, plan = CASES[name]
    assert_equivalent(model, [make()], SPLIT[0], options={"tensor_plan": plan}, compiled="aot_eager")


def moved(log, *, backward=False):
    """List what moved over `tensor`: op, kind and bytes of this rank."""
    return [(e.op, e.kind, e.num_bytes) for e in log.entries if e.axis == "tensor" and e.backward is backward]


def test_an_mlp_costs_one_sum_of_its_output():
    plan = {"0": "colwise", "2": "rowwise"}
    mlp = functools.partial(nn.Sequential, nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    log = assert_equivalent(mlp, [tokens()], "data=1,tensor=2", options={"tensor_plan": plan}).log
    assert moved(log) == [("F.linear", "reduction", 4 * 6 * 8 * 8)]
    assert moved(log, backward=True) == []


def test_fused_queries_keys_and_values_move_weights_and_no_activation():
    """Rank 0 holds rows 0 to 11 of 24 and wants 0-3, 8-11, 16-19: it sends rank 1 the rows 4 to 7."""
    log = assert_equivalent(
        nets.FusedAttention, [tokens()], "data=1,tensor=2", options={"tensor_plan": CASES["attention"][2]}
    ).log
    assert moved(log) == [
        ("F.linear (fused weight)", "halo", 4 * 8 * 8),
        ("F.linear (fused weight)", "halo", 4 * 8),
        ("F.linear", "reduction", 4 * 6 * 8 * 8),
    ]


def test_a_bad_plan_only_costs_and_the_record_says_so():
    plan = {"qkv": "colwise", "proj": "colwise"}
    report = assert_equivalent(nets.FusedAttention, [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan})
    assert sum(num for _, _, num in moved(report.log)) > 4 * 6 * 8 * 8


def loss_at(mesh, plan):
    torch.manual_seed(3)
    model = nets.FusedAttention().double()
    x = tokens().double()
    parallel = meshpar.parallelize(model, mesh_for(mesh), tensor_plan=plan)
    with meshpar.spmd():
        y = parallel(meshpar.shard(x, mesh_for(mesh)))
        loss = F.mse_loss(y, meshpar.shard(x, mesh_for(mesh)))
    return float(loss.detach().full_tensor())


def test_field_39_fused_qkv_has_the_loss_of_one_rank():
    alone = run_ranks(loss_at, 1, "data=1", None)[0]
    for found in run_ranks(loss_at, 2, "data=1,tensor=2", CASES["attention"][2]):
        assert abs(found - alone) < 1e-12


def train(model, mesh, plan, x, steps=20):
    """Train on the mesh and on one process; give the largest difference, and this rank's whole parameters."""
    alone = copy.deepcopy(model)
    parallel = meshpar.parallelize(model, mesh, tensor_plan=plan)
    for net, batch in ((alone, x), (parallel, meshpar.shard(x, mesh))):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(steps):
            with meshpar.spmd():
                loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = whole_state(parallel), alone.state_dict()
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items()), ours


def whole_state(model):
    return meshpar.gather(model.state_dict())


def train_norms(mesh):
    torch.manual_seed(0)
    error, state = train(nets.Mlp().double(), mesh_for(mesh), CASES["mlp"][2], tokens().double())
    return error, state["norm.weight"], state["norm.bias"]


def test_field_34_a_norm_between_columns_and_rows_trains_as_on_one_process():
    found = run_ranks(train_norms, 4, "data=1,domain=1,tensor=4")
    for error, weight, bias in found:
        assert error < 1e-10
        assert torch.equal(weight, found[0][1])
        assert torch.equal(bias, found[0][2])


def train_spectral(mesh):
    torch.manual_seed(0)
    return train(nets.Spectral().double(), mesh_for(mesh), CASES["spectral"][2], images()[:, :2].double(), steps=3)[0]


def test_field_40_spectral_norm_trains_under_a_plan():
    """Power iterations and all: `u` and `v` are part of the state that is compared."""
    assert max(run_ranks(train_spectral, 4, "data=1,domain=2,tensor=2")) < 1e-10
