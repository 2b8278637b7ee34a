"""Activation checkpointing: the numbers, names and buffers of the model without it, with fewer bytes kept."""

from __future__ import annotations

import functools

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

import meshpar
from meshpar.chosen import modules_to_checkpoint
from meshpar.testing import RankError, assert_equivalent, mesh_for, run_ranks

MESHES = ("data=2,domain=2", "data=1,domain=4")


class Residual(nn.Module):
    """A block with all that a second run could get wrong: statistics, power iteration, dropout, noise, counters."""

    def __init__(self, width: int, *, old: bool = True, noise: bool = False) -> None:
        super().__init__()
        spectral = old_spectral_norm if old else parametrizations.spectral_norm
        self.conv = spectral(nn.Conv2d(width, width, 3, padding=1))
        self.norm = nn.BatchNorm2d(width, momentum=None)
        self.drop = nn.Dropout(0.3 if noise else 0.0)
        self.noise = noise
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width))
        self.drop.register_buffer("mean", self.mean)  # another module reads it by its own name
        self.register_buffer("last", torch.zeros(width))
        self.register_buffer("table", torch.linspace(0.5, 1.0, width * 4096).view(width, -1))

    def forward(self, x: Tensor, scale: Tensor | None = None, *, names: tuple[str, ...] = ()) -> Tensor:
        y = self.drop(F.silu(self.norm(self.conv(x)))) * self.table[:, 0, None, None]
        if self.noise:
            y = y + 0.1 * torch.randn(y.shape, dtype=y.dtype)
        if self.training:
            self.calls.add_(1)
            self.mean.data.mul_(0.9).add_(0.1)  # written where torch does not count
            self.last = self.last + 2 * self.mean  # another tensor takes its place
        y = y * (1 + self.drop.mean.view(-1, 1, 1)) * (1 + self.last.view(-1, 1, 1)) * self.calls.clone()
        return x + (y if scale is None else y * scale["by"]) * len(names)


class Net(nn.Module):
    def __init__(self, *, old: bool = True, noise: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.blocks = nn.ModuleList([Residual(4, old=old, noise=noise) for _ in range(3)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, self.blocks[0]):  # one of them runs twice
            x = block(x, {"by": x.mean(dim=1, keepdim=True)}, names=("a", "b"))
        return self.head(x)


def test_a_unet_is_the_same_function_without_a_gather():
    x = torch.randn(2, 2, 9, 6, generator=torch.Generator().manual_seed(1))
    report = assert_equivalent(nets.UNet, [x], "data=2,domain=2", options={"checkpoint": "blocks"})
    assert not report.log.gathers()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("checkpoint", ["blocks", "all", nets.Block, [nn.Conv2d, nn.GroupNorm], nets.UNet])
def test_property_a_unet_with_each_choice(mesh, checkpoint):
    x = torch.randn(2, 2, 9, 6, generator=torch.Generator().manual_seed(1))
    assert_equivalent(nets.UNet, [x], mesh, options={"checkpoint": checkpoint})


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,domain=2", {"data": "ddp"}),
        ("replica=2,data=1,domain=2", {"data": "hsdp"}),
        ("data=1,domain=2,tensor=2", {"tensor_plan": {"*.conv": "colwise"}}),
        ("data=2,domain=1,tensor=2", {"tensor_plan": {"*.conv": "rowwise"}, "data": "ddp"}),
        ("data=1,domain=4", {"shard_modules": nn.Conv2d}),
    ],
)
@pytest.mark.parametrize("checkpoint", ["blocks", nets.UNet])
def test_property_with_other_options(mesh, options, checkpoint):
    """Sharded parts inside of a part that runs again, copies of parameters, split weights."""
    x = torch.randn(2, 2, 9, 6, generator=torch.Generator().manual_seed(1))
    assert_equivalent(nets.UNet, [x], mesh, options={"checkpoint": checkpoint, **options})


def test_property_a_compiler_chooses_itself():
    x = torch.randn(2, 2, 9, 6, generator=torch.Generator().manual_seed(1))
    options = {"checkpoint": "blocks"}
    assert_equivalent(nets.UNet, [x], "data=1,domain=2", options=options, compiled="aot_eager")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("old", [True, False])
def test_property_buffers_move_once_and_gradients_are_those_of_the_first_run(mesh, old):
    """Batch norm, spectral norm, counters, buffers replaced or written through `data`; equal without checkpointing."""
    make = functools.partial(Net, old=old)
    x = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    for checkpoint in ("blocks", [nn.Conv2d], Net):
        assert_equivalent(make, [x], mesh, options={"checkpoint": checkpoint}, tolerance=1e-12)


def test_statistics_and_power_iterations_move_once():
    x = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    assert_equivalent(Net, [x], "data=1,domain=2", options={"checkpoint": "blocks"}, tolerance=1e-12)


def noisy(spec: str, checkpoint) -> tuple[list[Tensor], float]:
    """Train three steps with dropout and noise; give gradients, buffers, and a random number drawn at the end."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    model = meshpar.parallelize(Net(noise=True).double(), mesh, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    own = x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]
    for _ in range(3):
        with meshpar.spmd():
            loss = model(own).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = [meshpar.gather(p.grad) for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return found, float(torch.rand(()))


@pytest.mark.parametrize("mesh", MESHES)
def test_property_random_numbers_are_those_of_the_first_run(mesh):
    expected = run_ranks(noisy, 4, mesh, None)
    for checkpoint in ("blocks", Net):
        for (found, drawn), (wanted, number) in zip(run_ranks(noisy, 4, mesh, checkpoint), expected, strict=True):
            assert drawn == number
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def exchanges(spec: str, checkpoint) -> list[tuple[str, str, str, int, bool]]:
    model = meshpar.parallelize(nets.UNet(), mesh_for(spec), checkpoint=checkpoint, on_gather="error")
    with meshpar.record() as log:
        with meshpar.spmd():
            loss = model(torch.ones(1, 2, 6, 5)).square().mean()
        loss.backward()
    return [(e.where, e.op, e.kind, e.num_bytes, e.backward) for e in log.entries]


def test_the_second_run_makes_the_exchanges_of_the_first_in_their_order():
    """FIELD 32. Six rows on four ranks: the last one has none, and saves less than the others."""
    for plain, again in zip(*(run_ranks(exchanges, 4, "data=1,domain=4", c) for c in (None, nets.Block)), strict=True):
        forward = [e for e in plain if not e[-1]]
        order = ("up.1", "up.0", "middle", "down.1", "down.0")
        second = [e for e in again if not e[-1]][len(forward) :]
        assert [e for e in again if not e[-1]][: len(forward)] == forward
        assert [e for e in second if e[0]] == [e for name in order for e in forward if e[0].startswith(name)]
        assert sorted(e for e in again if e[-1]) == sorted(e for e in plain if e[-1])


class Deep(nn.Module):
    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 1)
        self.blocks = nn.Sequential(*[nets.Block(width, width) for _ in range(depth)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def kept_bytes(checkpoint, *, eval_mode: bool = False) -> int:
    """Count the bytes that a forward keeps for the backward: of every piece of memory once."""
    model = meshpar.parallelize(Deep(), mesh_for("data=1,domain=4"), checkpoint=checkpoint)
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        piece = x.to_local() if hasattr(x, "to_local") else x
        held[piece.untyped_storage().data_ptr()] = piece.untyped_storage().nbytes()
        return x

    x = torch.randn(1, 2, 64, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        meshpar.spmd(),
        torch.set_grad_enabled(not eval_mode),
    ):
        loss = model(x).square().mean()
    del loss
    return sum(held.values())


def test_fewer_bytes_are_kept():
    plain, blocks, every = (min(run_ranks(kept_bytes, 4, c)) for c in (None, "blocks", "all"))
    assert blocks < 0.4 * plain
    assert every < 0.4 * plain


def peak(checkpoint) -> int:
    from memory import peak_of, train_step

    model = meshpar.parallelize(Deep(16, 8), mesh_for("data=1,domain=4"), checkpoint=checkpoint)
    x = meshpar.shard(torch.randn(2, 2, 256, 64), mesh_for("data=1,domain=4"))
    return peak_of(lambda: train_step(model, x))


def test_property_the_peak_of_memory_falls(monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parents[1] / "benchmarks"))
    assert max(run_ranks(peak, 4, "blocks")) < 0.5 * min(run_ranks(peak, 4, None))


def forwards(checkpoint) -> dict[str, int]:
    """Count the forwards of a convolution by what it exchanges."""
    model = meshpar.parallelize(Deep(depth=2), mesh_for("data=1,domain=2"), checkpoint=checkpoint)
    counts: dict[str, int] = {}
    for name, context in (
        ("no_grad", torch.no_grad),
        ("inference", torch.inference_mode),
        ("train", torch.enable_grad),
    ):
        with meshpar.record() as log, context():
            with meshpar.spmd():
                loss = model(torch.ones(1, 2, 6, 5)).square().mean()
            if name == "train":
                loss.backward()
        counts[name] = len([e for e in log.select(kind="halo", backward=False) if e.where == "blocks.0.conv"])
    return counts


def test_a_forward_runs_again_once_and_only_for_a_backward():
    assert run_ranks(forwards, 2, None) == [{"no_grad": 1, "inference": 1, "train": 1}] * 2
    for checkpoint in ("blocks", "all", [nn.Sequential, nets.Block, nn.Conv2d]):
        assert run_ranks(forwards, 2, checkpoint) == [{"no_grad": 1, "inference": 1, "train": 2}] * 2


def replaced(spec: str) -> None:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    reference = Deep(4, 2).double()
    model = meshpar.parallelize(reference, mesh, checkpoint="blocks")
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]
    generator = torch.Generator().manual_seed(7)
    other = {k: torch.randn(p.shape, generator=generator, dtype=p.dtype) for k, p in reference.named_parameters()}
    for wrap in (lambda t: t.clone().requires_grad_(), lambda t: nn.Parameter(t.clone())):
        ours, theirs = ({k: wrap(v) for k, v in other.items()} for _ in range(2))
        with meshpar.spmd():
            loss = torch.func.functional_call(model, ours, own).square().mean()
        loss.backward()
        torch.func.functional_call(reference, theirs, x).square().mean().backward()
        for k, v in theirs.items():
            torch.testing.assert_close(ours[k].grad, v.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("spec", "num_ranks"), [("data=1,domain=2", 2), ("data=1", 1)])
def test_parameters_of_functional_call_are_those_of_the_second_run_too(spec, num_ranks):
    run_ranks(replaced, num_ranks, spec)


def later() -> list[str]:
    """Between forward and backward: eval mode, a second forward, and a buffer that somebody writes into."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    grads: list[list[Tensor]] = []
    for checkpoint in (None, "blocks"):
        torch.manual_seed(1)
        model = meshpar.parallelize(Net(noise=True).double(), mesh_for("data=1,domain=2"), checkpoint=checkpoint)
        with meshpar.spmd():
            first, second = model(x).square().mean(), model(2 * x).square().mean()
        model.eval()
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        grads.append([meshpar.gather(p.grad) for p in model.parameters()])
        grads[-1] += [b.clone() for b in model.buffers()]
        assert not any(m.training for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    model.train()
    with meshpar.spmd():
        loss = model(x).square().mean()
    model.blocks[0].table.mul_(2)
    try:
        loss.backward()
    except meshpar.ShardingError as error:
        return [str(error)]
    return []


def test_what_changes_between_forward_and_backward_does_not_reach_the_second_run():
    for said in run_ranks(later, 2):
        assert len(said) == 1
        assert "['table'], which changed between the forward and the backward" in said[0]


def names(checkpoint) -> tuple[list[str], ...]:
    model = meshpar.parallelize(Net(), mesh_for("data=2,domain=2"), checkpoint=checkpoint)
    return (
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_buffers()],
        [n for n, _ in model.named_modules()],
        list(model.state_dict()),
        [type(m).__name__ for m in model.modules()],
    )


def test_names_stay():
    assert run_ranks(names, 4, "all") == run_ranks(names, 4, None)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.qkv(x).chunk(3, -1)[0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(4), Attend()
        self.norm2, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.Sequential(Layer(), Layer())
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), nn.Dropout()]), nn.ModuleList([nn.Linear(4, 4)])])
        self.rnn, self.drop, self.head = nn.LSTM(4, 4), DropPath(), parametrizations.spectral_norm(nn.Linear(4, 2))


def chosen(what) -> list[str]:
    model = meshpar.rewrite(Transformer())
    names = {id(m): name for name, m in model.named_modules()}
    return [names[id(m)] for m in modules_to_checkpoint(model, what)]


def test_what_is_chosen():
    layers = ["encoder.layers.0", "encoder.layers.1"]
    assert sorted(chosen("blocks")) == ["blocks.0", "blocks.1", *layers, "stages.0.0"]
    inside = [f"{block}.{part}" for block in ("blocks.0", "blocks.1", "stages.0.0") for part in ("attn", "mlp")]
    assert sorted(chosen("all")) == sorted([*inside, *layers, "rnn"])
    assert sorted(chosen(Layer)) == ["blocks.0", "blocks.1", "stages.0.0"]
    assert sorted(chosen([Layer, Attend])) == ["blocks.0.attn", "blocks.1.attn", "stages.0.0.attn"]
    assert chosen(lambda m: isinstance(m, nn.LSTM | nn.ModuleList)) == ["rnn"]
    assert chosen(None) == []


def test_cheap_modules_are_told():
    cheap = [nn.Dropout2d(), nn.BatchNorm2d(1), nn.InstanceNorm1d(1), nn.GroupNorm(1, 1), nn.LayerNorm(1), nn.ReLU()]
    cheap += [nn.GELU(), nn.Softmax(), nn.MaxPool2d(2), nn.AdaptiveAvgPool3d(1), nn.Embedding(1, 1), nn.Identity()]
    cheap += [nn.Flatten(), nn.RMSNorm(1), DropPath(), nn.PReLU(), nn.EmbeddingBag(1, 1), nn.AlphaDropout()]
    dear = [nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.MultiheadAttention(2, 1), nn.LSTM(1, 1), Layer(), nn.Sequential()]
    assert [type(m).__name__ for m in cheap if not meshpar.should_not_checkpoint(m)] == []
    assert [type(m).__name__ for m in dear if meshpar.should_not_checkpoint(m)] == []
    assert meshpar.should_not_checkpoint(meshpar.rewrite(nn.GroupNorm(1, 1)))


def refused(what) -> None:
    meshpar.parallelize(nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU()), mesh_for("data=2"), checkpoint=what)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("block", "checkpoint='block'\n.*\n.*fix: +checkpoint=\"blocks\""),
        (3, "checkpoint=3"),
        ("blocks", "nothing is chosen"),
        (nn.LSTM, "checkpoint=LSTM for a Sequential"),
        ([nn.LSTM, nn.GRU], "checkpoint=LSTM, GRU"),
        (nn.ModuleList, "nothing is chosen"),
    ],
)
def test_a_selection_that_chooses_nothing_is_refused_on_all_ranks(what, text):
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(refused, 2, what)
    assert all(isinstance(e, meshpar.SpecError) for e in caught.value.exceptions.values())
    assert len(caught.value.exceptions) == 2
