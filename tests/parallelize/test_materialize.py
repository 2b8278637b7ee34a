"""Models on the meta device get the values that one process would have, shard by shard, or an error by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nets
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

import meshpar
from meshpar import private
from meshpar.testing import RankError, mesh_for, run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

import runs


class Net(nn.Module):
    """Layers with recipes of many kinds, in the order of their constructors; a tie; a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.blocks = nn.ModuleList([nets.Block(6, 6) for _ in range(3)])
        self.norm = nn.BatchNorm2d(6)
        self.gain = Gain()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        y = self.table(x).movedim(-1, 1)
        for block in self.blocks:
            y = y + block(y)
        y = self.gain(self.norm(y)).flatten(2).permute(2, 0, 1)
        return self.head(y + self.attention(y, y, y, need_weights=False)[0])


class Gain(nn.Module):
    """A user's module with a 0-d parameter, and a table that it can compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))
        self.register_buffer("latitudes", torch.empty(1, 1, 5, 1), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.latitudes = torch.linspace(0.5, 1.0, 5, dtype=self.latitudes.dtype).view(1, 1, 5, 1)

    def forward(self, x):
        return x * self.gain * self.latitudes


def on_meta(make=Net, dtype=torch.float64) -> nn.Module:
    with torch.device("meta"):
        return make().to(dtype)


def in_double(make) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def same_values(model: nn.Module, reference: nn.Module) -> None:
    found, expected = meshpar.full_state_dict(model), reference.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, b in reference.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], b), name


def by_recipes(spec: str) -> None:
    model = meshpar.parallelize(on_meta(), mesh_for(spec))
    assert all(p.is_meta for p in model.parameters())
    names = list(model.state_dict())
    torch.manual_seed(7 if dist.get_rank() == 0 else 100 + dist.get_rank())
    before = torch.get_rng_state()
    assert meshpar.materialize(model) is model
    after = torch.get_rng_state()
    torch.manual_seed(7)
    reference = in_double(Net)
    same_values(model, reference)
    assert torch.equal(after, torch.get_rng_state() if dist.get_rank() == 0 else before)
    assert list(model.state_dict()) == names
    assert model.head.weight is model.table.weight
    assert all(private.piece_of(p).device.type == "cpu" for p in model.parameters() if isinstance(p, DTensor))
    step_as(model, reference, spec)
    assert meshpar.materialize(model) is model  # nothing to do any more


def step_as(model: nn.Module, reference: nn.Module, spec: str, *, foreach: bool = True) -> None:
    """Train a step, as one process does."""
    mesh = mesh_for(spec)
    x = torch.randint(0, 11, (4, 5, 3), generator=torch.Generator().manual_seed(1))
    own = x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]
    for m, given in ((model, own), (reference, x)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=foreach)
        with meshpar.spmd():
            m(given).square().mean().backward()
        optimizer.step()
    found = meshpar.full_state_dict(model)
    for name, value in reference.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-11), name


@pytest.mark.parametrize(("spec", "num_ranks"), [("data=2,domain=2", 4), ("data=1,domain=3", 3), ("data=1", 1)])
def test_init_functions_give_the_values_of_one_process(spec, num_ranks):
    run_ranks(by_recipes, num_ranks, spec)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)


def by_user(spec: str) -> None:
    model = meshpar.parallelize(on_meta(nets.UNet), mesh_for(spec))
    torch.manual_seed(5)
    meshpar.materialize(model, init=fill)
    torch.manual_seed(5)
    reference = on_meta(nets.UNet).to_empty(device="cpu")
    for module in children_first(reference):
        if list(module.parameters(recurse=False)):
            with torch.no_grad():
                fill(module)
    same_values(model, reference)


def children_first(module: nn.Module):
    for child in module.children():
        yield from children_first(child)
    yield module


def test_a_users_init_function_is_called_with_every_module():
    run_ranks(by_user, 4, "data=2,domain=2")


def from_saved(spec: str, folder: str) -> None:
    mesh = mesh_for(spec)
    torch.manual_seed(3)
    reference = in_double(Net)
    path = f"{folder}/plain.pt"
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), path)
    saved = meshpar.parallelize(reference, mesh)
    meshpar.save_checkpoint(f"{folder}/run", saved, step=4)
    for source in (
        {"checkpoint": f"{folder}/run"},
        {"checkpoint": f"{folder}/run", "step": 4},
        {"state_dict": path},
        {"state_dict": reference.state_dict()},
    ):
        model = meshpar.parallelize(on_meta(), mesh)
        state = torch.get_rng_state()
        meshpar.materialize(model, **source)
        if "checkpoint" in source:
            assert torch.equal(torch.get_rng_state(), state) or dist.get_rank() == 0
        same_values(model, reference)
        assert model.head.weight is model.table.weight


def test_values_from_a_checkpoint_or_a_state_dict(tmp_path):
    run_ranks(from_saved, 4, "data=2,domain=2", str(tmp_path))


def split_over_tensor(spec: str, folder: str) -> None:
    """Weights that the tensor axis has split before `fully_shard`, by hand."""
    torch.manual_seed(2)
    reference = runs.Parts()
    with torch.device("meta"):
        hollow = Scaled()
    model = runs.split(spec, hollow)
    assert any(len(p.placements) == 2 for p in model.parameters() if isinstance(p, DTensor))
    meshpar.materialize(model, state_dict=reference.state_dict())
    same_values(model, reference)
    meshpar.save_checkpoint(folder, model)
    again = runs.split(spec, hollow)
    meshpar.materialize(again, checkpoint=folder)
    same_values(again, reference)
    drawn = runs.split(spec, hollow)
    torch.manual_seed(8)
    meshpar.materialize(drawn)
    torch.manual_seed(8)
    same_values(drawn, Scaled())


class Scaled(runs.Parts):
    """Parts with a recipe for the parameter of their own."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)


def test_weights_that_the_tensor_axis_splits(tmp_path):
    run_ranks(split_over_tensor, 4, "data=2,tensor=2", str(tmp_path))


PLAN = {"attention": "colwise", "blocks.*.conv": "colwise"}


def in_every_mode(spec: str, told: dict) -> None:
    model = meshpar.parallelize(on_meta(), mesh_for(spec), **told)
    torch.manual_seed(7)
    meshpar.materialize(model)
    torch.manual_seed(7)
    reference = in_double(Net)
    same_values(model, reference)
    if told.get("precision") is None:
        step_as(model, reference, spec, foreach="tensor" not in spec)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("data=2,tensor=2", {"tensor_plan": PLAN}),
        ("data=1,tensor=2,domain=2", {"tensor_plan": PLAN, "data": "ddp"}),
        ("data=2,domain=2", {"data": "ddp", "offload": "cpu"}),
        ("replica=2,data=1,domain=2", {"data": "hsdp", "precision": "bf16"}),
    ],
)
def test_any_plan_and_mode_has_the_values_of_one_process(spec, told):
    run_ranks(in_every_mode, 4, spec, told)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.position = nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("latitudes", torch.linspace(0, 1, 5), persistent=False)


class Halfway(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Resizing(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        self.weight = nn.Parameter(torch.zeros(3 if self.weight.is_meta else 1, 3))


class Reaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.inner.weight)


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3 + (dist.get_rank() if dist.is_initialized() else 0))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))


def halfway() -> nn.Module:
    return nn.Sequential(Halfway(3, 3))


def resizing() -> nn.Module:
    return nn.Sequential(Resizing(3, 3))


def refuse(make, text: str, told: dict) -> None:
    model = meshpar.parallelize(on_meta(make), mesh_for("data=1,domain=2"))
    with pytest.raises(meshpar.MeshparError) as caught:
        meshpar.materialize(model, **told)
    assert text in str(caught.value)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    if make is not nets.UNet:
        return
    meshpar.materialize(model)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("make", "text", "told"),
    [
        (Bare, "position, of a Bare", {}),
        (Bare, "latitudes, of a Bare", {}),
        (Bare, "latitudes, of a Bare", {"state_dict": {}}),
        (Bare, "latitudes, of a Bare", {"checkpoint": "nowhere"}),
        (nets.UNet, "down.0.conv.weight: missing", {"state_dict": {}}),
        (nets.UNet, "no such folder", {"checkpoint": "nowhere"}),
        (nets.UNet, "nowhere.pt", {"state_dict": "nowhere.pt"}),
        (nets.UNet, "checkpoint, state_dict", {"checkpoint": "a", "state_dict": {}}),
        (nets.UNet, "one source of values", {"step": 3}),
        (spectral, "parametrizations.weight.original", {}),
        (halfway, "0.bias (3,) as it was after the recipe of a Halfway", {}),
        (resizing, "0.weight: (1, 3) on cpu after its recipe, (3, 3) before", {}),
        (Reaching, "the recipe of the root writes into modules below it", {}),
    ],
)
def test_what_has_no_recipe_is_named_and_the_model_stays_as_it_was(make, text, told):
    run_ranks(refuse, 2, make, text, told)


def misfit() -> None:
    model = meshpar.parallelize(on_meta(nets.UNet), mesh_for("data=1,domain=2"))
    values = nets.UNet().state_dict()
    values["head.weight"] = torch.zeros(3)
    values["more"] = torch.zeros(3)
    del values["head.bias"]
    with pytest.raises(meshpar.CheckpointError) as caught:
        meshpar.materialize(model, state_dict=values)
    for text in ("head.bias: missing", "more: not in the model", "head.weight: (3,) in the state dict, (1, 4, 1, 1)"):
        assert text in str(caught.value)
    assert all(p.is_meta for p in model.parameters())
    for fn in (meshpar.full_state_dict, lambda m: meshpar.save_checkpoint("nowhere", m)):
        with pytest.raises(meshpar.CheckpointError, match="materialize"):
            fn(model)
    with pytest.raises(RuntimeError, match="meta device"):  # of fully_shard itself
        model(torch.zeros(1, 2, 8, 8, dtype=torch.float64))


def test_a_state_dict_that_does_not_fit_and_a_model_without_values():
    run_ranks(misfit, 2)


def partly(spec: str) -> None:
    """Some parameters have values already: they stay, and are rank 0's on all ranks."""
    net = on_meta(nets.UNet)
    torch.manual_seed(dist.get_rank())
    net.head = nn.Conv2d(4, 1, 1).double()
    model = meshpar.parallelize(net, mesh_for(spec))
    torch.manual_seed(1)
    meshpar.materialize(model)
    torch.manual_seed(0)
    assert torch.equal(meshpar.full_state_dict(model)["head.weight"], nn.Conv2d(4, 1, 1).double().weight)


def test_a_model_that_is_partly_on_the_meta_device():
    run_ranks(partly, 4, "data=2,domain=2")


def different() -> None:
    meshpar.parallelize(on_meta(Odd), mesh_for("data=1,domain=2"))


def test_ranks_with_different_hollow_models():
    with pytest.raises(RankError, match="the ranks hold different models"):
        run_ranks(different, 2)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Give what each rank of each scene saw; each is a process of its own, whose peak is that of its own life."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program, folder = Path(__file__).with_name("peak.py"), tmp_path_factory.mktemp("peak")
    done = subprocess.run(
        [sys.executable, str(program), str(folder)], env=env, capture_output=True, text=True, timeout=160
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scene", ["init 2", "init 4", "checkpoint 2", "state dict 2"])
def test_peak_memory_of_a_rank_stays_under_its_share_plus_one_block(scene, grown):
    assert len(grown[scene]) == int(scene[-1])
    for seen in grown[scene]:
        assert seen["whole"] == 16 * seen["block"] == int(scene[-1]) * seen["share"]
        assert seen["grown"] < seen["share"] + seen["block"], {name: n / 2**20 for name, n in seen.items()}
