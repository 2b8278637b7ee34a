"""Tensor plans: any plan gives the numbers of one process; a good one costs what it must, and no more."""

import copy
import functools
import itertools

import pytest
import tensor_nets as nets
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import meshpar
from meshpar.errors import SpecError
from meshpar.tensor import plan_splits
from meshpar.testing import RankError, assert_equivalent, run_ranks
from meshpar.testing.meshes import mesh_for, ranks_of

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


class Penalised(nets.Gated):
    """Add a penalty on all parameters, which are reached past the attributes of their modules."""

    def forward(self, x):
        return super().forward(x), sum(p.square().sum() for p in self.parameters()) * x.mean()


class Given(nets.Gated):
    """Hand parameters out."""

    def forward(self, x):
        return super().forward(x), self.gate_up.weight, self.gate_up.bias, self.down.weight[1]


@pytest.mark.parametrize("model", [Penalised, Given])
@pytest.mark.parametrize("style", ["packed:2", "colwise", "rowwise"])
def test_weights_that_are_split_are_whole_wherever_they_are_met(model, style):
    plan = {"gate_up": style, "down": "rowwise"}
    assert_equivalent(model, [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan})


class MadeBias(nn.Module):
    """Make the bias of a fused layer of several, or a weight, as BEiT and Swin-V2 do."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.fused = nn.Linear(8, 24)

    def forward(self, x):
        weight, bias = self.fused.weight, self.fused.bias
        if self.kind == "bias":
            bias = torch.cat([bias[:8], torch.zeros(8, dtype=x.dtype), bias[16:]])
        else:
            weight = weight * 2
        q, k, v = F.linear(x, weight, bias).chunk(3, -1)
        return q * k + v


@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_what_is_made_of_fused_weights_lies_as_they_do(kind):
    plan = {"fused": "packed"}
    assert_equivalent(
        functools.partial(MadeBias, kind), [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan}
    )


class Taken(nn.Module):
    """Take what comes out of a fused layer apart, or write into it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.fused = nn.ModuleList([nn.Linear(8, 24)])
        self.out = nn.Linear(12, 8)

    def forward(self, x):
        return self.out(self.kind(self.fused[0](x)))


def gate_of(h):
    return F.glu(h, -1) + F.glu(h) + nn.GLU()(h)


def write_across(h):
    h[..., 3:15] = 1.0
    return h[..., 6:18]


def write_all(h):
    h = h * 1
    h.mul_(2).add_(h.detach().mean())
    F.relu(h, inplace=True)
    a, b = h.chunk(2, -1)
    return a - b


def write_a_part(h):
    h[..., :12].mul_(2)
    h.view(*h.shape[:-1], 2, 12)[..., 1, :].add_(1)
    return h[..., 5:17]


def write_under_a_part(h):
    h = h * 1
    part = h[..., 12:]
    h.mul_(3)
    return part


def write_as_out(h):
    h = h.detach()
    torch.exp(h, out=h)
    return h.chunk(2, -1)[0]


@pytest.mark.parametrize("kind", [gate_of, write_across, write_all, write_a_part, write_under_a_part, write_as_out])
def test_packed_activations_are_written_and_gated_as_any(kind):
    plan = {"fused.0": "packed:2", "out": "rowwise"}
    assert_equivalent(functools.partial(Taken, kind), [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan})


# drawn networks and plans


class Drawn(nn.Module):
    """Layers on images (B, C, H, W), or, after `tokens`, on (B, H*W, C)."""

    def __init__(self, layers, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.kinds = [kind for kind, _ in layers]
        made = []
        for kind, _ in layers:
            made.append(
                {
                    "conv": lambda: nn.Conv2d(width, width, 3, padding=1),
                    "wide": lambda: nn.Sequential(
                        nn.Conv2d(width, 2 * width, 1), nn.ReLU(), nn.Conv2d(2 * width, width, 1)
                    ),
                    "strided": lambda: nn.Conv2d(width, width, 2, stride=2, padding=1, bias=False),
                    "depthwise": lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
                    "groups": lambda: nn.Conv2d(width, 2 * width, 1, groups=4),
                    "transposed": lambda: nn.ConvTranspose2d(width, width, 3, stride=2, output_padding=1),
                    "depthwise transposed": lambda: nn.ConvTranspose2d(width, width, 2, groups=width, bias=False),
                    "group norm": lambda: nn.GroupNorm(4, width),
                    "batch norm": lambda: nn.BatchNorm2d(width),
                    "up": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
                    "linear": lambda: nn.Linear(width, width),
                    "layer norm": lambda: nn.LayerNorm(width),
                    "gated": lambda: nn.Linear(width, 2 * width),
                    "attention": lambda: nn.MultiheadAttention(width, 4, batch_first=True),
                    "silu": lambda: nn.SiLU(),
                }[kind]()
            )
        self.layers = nn.ModuleList(made)

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ("linear", "layer norm", "gated", "attention"):
                b, c, h, w = x.shape
                y = x.flatten(2).transpose(1, 2)
                y = layer(y, y, y, need_weights=False)[0] if kind == "attention" else layer(y)
                if kind == "gated":
                    gate, up = y.chunk(2, -1)
                    y = torch.tanh(gate) * up
                x = y.transpose(1, 2).reshape(b, c, h, w)
            elif kind == "groups":
                x = F.glu(layer(x), 1)
            else:
                x = layer(x)
        return x


STYLES = {
    "conv": ("colwise", "rowwise", "packed:2", None),
    "wide": ("pair", "crossed", None),
    "strided": ("colwise", "rowwise", None),
    "depthwise": ("colwise", None),
    "groups": ("colwise", None),
    "transposed": ("colwise", "rowwise", "packed:2", None),
    "depthwise transposed": ("colwise", None),
    "linear": ("colwise", "rowwise", None),
    "gated": ("packed:2", "colwise", "rowwise", None),
    "attention": ("colwise", None),
    **dict.fromkeys(("group norm", "batch norm", "up", "layer norm", "silu"), (None,)),
}


@st.composite
def drawn_networks(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(STYLES)), min_size=1, max_size=5))
    layers = [(kind, draw(st.sampled_from(STYLES[kind]))) for kind in kinds]
    shape = (draw(st.integers(2, 5)), 8, draw(st.integers(1, 9)), draw(st.integers(1, 5)))
    return layers, shape


def plan_of(layers):
    plan = {}
    for i, (_, style) in enumerate(layers):
        if style == "pair":
            plan |= {f"layers.{i}.0": "colwise", f"layers.{i}.2": "rowwise"}
        elif style == "crossed":
            plan |= {f"layers.{i}.0": "rowwise", f"layers.{i}.2": "packed:2"}
        elif style is not None:
            plan[f"layers.{i}"] = style
    return plan


def check_drawn(mesh, num_examples):
    @settings(max_examples=num_examples)
    @given(drawn_networks())
    def check(drawn):
        check_one(*drawn, mesh)

    check()


def check_one(layers, shape, mesh):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if x[:, 0].numel() < 8:  # batch norm of a single value is refused
        return
    assert_equivalent(
        functools.partial(Drawn, layers), [x], mesh, gathers=True, options={"tensor_plan": plan_of(layers)}
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_drawn_network_under_a_drawn_plan_property(mesh):
    check_drawn(mesh, 12)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_many_drawn_networks_under_drawn_plans(mesh):
    check_drawn(mesh, 150)


# what a plan may say


def plan_of_one_word():
    meshpar.parallelize(nn.Linear(2, 2), mesh_for("data=1"), tensor_plan="best")


def test_a_wrong_plan_is_one_error_with_all_that_is_wrong():
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(5, 9))
    plan = {
        "0": "colwise",
        "1": "colwise",
        "2": "colwise",
        "3": "rowwise",
        "4": "packed",
        "fc*": "colwise",
        "*": "sideways",
    }
    with pytest.raises(SpecError) as error:
        plan_splits(model, {key: value for key, value in plan.items() if key != "*"}, 4)
    text = str(error.value)
    assert "10 out channels are not shared out equally by 4 ranks" in text
    assert "a GELU has no style 'colwise'" in text
    assert "7 out channels are not shared out equally by 4 ranks" in text
    assert "its 2 groups of channels cannot be split by rows" in text
    assert "9 channels out of 5 do not tell how many parts" in text
    assert "'fc*' matches no module" in text
    with pytest.raises(SpecError, match="unknown style 'sideways'"):
        plan_splits(model, {"*": "sideways"}, 2)
    with pytest.raises(SpecError, match="a list"):
        plan_splits(model, ["0"], 2)
    with pytest.raises(RankError, match="tensor_plan='best'"):
        run_ranks(plan_of_one_word, 1)


def test_ties_must_be_split_alike():
    with pytest.raises(SpecError, match="one parameter, split in different ways"):
        plan_splits(nets.Transformer(tied=True), {"head": "rowwise", "embed": "rowwise"}, 2)


def test_the_last_glob_that_matches_holds():
    splits = plan_splits(nets.Transformer(), {"blocks.*.fc?": "colwise", "blocks.1.mlp.fc1": "replicate"}, 2)
    assert set(splits) == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}


def shown(mesh):
    model = meshpar.parallelize(nets.Mlp(), mesh_for(mesh), tensor_plan={"fc1": "colwise", "fc2": "rowwise"})
    pieces = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if hasattr(p, "to_local")}
    return str(model), pieces


def test_the_model_shows_its_plan_and_each_rank_holds_its_share():
    text, pieces = run_ranks(shown, 2, "data=1,tensor=2")[0]
    assert "fc1): Linear(in_features=8, out_features=16, bias=True, colwise over tensor)" in text
    assert pieces == {"fc1.weight": (8, 8), "fc1.bias": (8,), "fc2.weight": (8, 8)}


def loaded(mesh, state):
    torch.manual_seed(5)
    model = meshpar.parallelize(nets.ConvNet(), mesh_for(mesh), tensor_plan=CASES["columns then rows"][2])
    model.load_state_dict(state)
    return whole_state(model)


@pytest.mark.parametrize("mesh", SPLIT)
def test_a_state_dict_of_one_process_loads_into_a_split_model(mesh):
    torch.manual_seed(6)
    state = nets.ConvNet().state_dict()
    for found in run_ranks(loaded, ranks_of(mesh), mesh, state):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
