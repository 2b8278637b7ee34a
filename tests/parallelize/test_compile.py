"""`torch.compile` of a parallel model (FIELD 41): one graph for each shape of input, the same numbers."""

import copy
import functools

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks

LIMIT_S = 600.0
"""Compilers share the cores with each other and with everybody else."""


class Attention(nn.Module):
    """A transformer block on tokens (B, N, C)."""

    def __init__(self, width: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Small(nn.Module):
    """A block that `fully_shard` gathers by itself, and a head that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nets.Block(2, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixed(nn.Module):
    """Batch statistics with running buffers, an in-place function, a write into a view, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)
        self.norm = nn.BatchNorm2d(1)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        x = x * self.gain
        x[..., :1].mul_(2.0)
        return x


class Methods(nn.Module):
    """Methods of tensors that are Python functions, operators with the number in front, attributes that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * x
        y = x.norm(dim=1, keepdim=True) + (1 - x) / 2 + 1 / (2 + x * x)
        left, right = x.split([2, x.size(-1) - 2], dim=-1)
        y = y + x.mT.mT + x.unflatten(-1, (2, 3)).flatten(-2) + torch.cat([left, right], -1)
        return y[:, :1]


def curve(model, params, batches, loss_of) -> list[float]:
    return nets.curve_of(model, torch.optim.SGD(params, lr=0.1), batches, loss_of)


def trained(spec: str, make, shapes, *, backend: str, method: str, layout: str | None = None):
    """Train a model compiled, in eager mode, and on one process; give the number of graphs and the errors."""
    torch._dynamo.reset()
    mesh = mesh_for(spec)
    num, index = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    torch.manual_seed(0)
    reference = make().double()
    compiled, eager = (meshpar.parallelize(reference, mesh, on_gather="error", inputs=layout or None) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    if method == "compile":
        compiled.compile(fullgraph=True, backend=counter)
        called = compiled
    else:
        called = torch.compile(compiled, fullgraph=True, backend=counter)
    generator = torch.Generator().manual_seed(5)
    batches = []
    for shape in shapes:
        x = torch.randn(2 * num, *shape, generator=generator, dtype=torch.float64)
        target = (2 * num, *shape[:-1], 1) if layout else (2 * num, 1, *shape[1:])
        batches.append((x, torch.randn(target, generator=generator, dtype=torch.float64)))
    own = [(x[2 * index : 2 * index + 2], y[2 * index : 2 * index + 2]) for x, y in batches]

    def loss_of(y, target):
        with meshpar.spmd():
            return F.mse_loss(y, meshpar.shard_batch(target, mesh, layout))

    expected = curve(reference, reference.parameters(), batches, F.mse_loss)
    ours = curve(called, called.parameters(), own, loss_of)
    plain = curve(eager, eager.parameters(), own, loss_of)
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) < 1e-12, (ours, expected)
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-12, (ours, plain)
    states = [meshpar.gather(m.state_dict()) for m in (compiled, eager)]
    errors = [
        max(float((state[k].double() - v.double()).abs().max()) for k, v in reference.state_dict().items())
        for state in states
    ]
    assert max(errors) < 1e-12, errors
    return counter.frame_count


@pytest.mark.parametrize(
    ("mesh", "method"),
    [("data=2,domain=2", "compile"), ("data=1,domain=3", "torch.compile")],
)
def test_unet_in_one_graph(mesh, method):
    """Odd rows, empty shards included; steps of the optimizer between the calls."""
    job = functools.partial(trained, backend="aot_eager", method=method)
    num_ranks = 3 if mesh.endswith("3") else 4
    assert run_ranks(job, num_ranks, mesh, nets.UNet, [(2, 13, 6)] * 3, timeout_s=LIMIT_S) == [1] * num_ranks


def test_one_graph_for_each_shape():
    """No recompilation but for new shapes, none for a shape that was seen before."""
    job = functools.partial(trained, backend="aot_eager", method="compile")
    shapes = [(2, 5, 6), (2, 5, 6), (2, 7, 6), (2, 5, 6), (2, 7, 8), (2, 7, 6)]
    assert run_ranks(job, 2, "data=1,domain=2", Small, shapes, timeout_s=LIMIT_S) == [3, 3]


@pytest.mark.parametrize("mesh", ["data=1,domain=3", "data=2,domain=1"])
def test_transformer_in_one_graph(mesh):
    job = functools.partial(trained, backend="aot_eager", method="torch.compile", layout="data domain _")
    num_ranks = int(mesh[-1]) if mesh.endswith("3") else 2
    assert run_ranks(job, num_ranks, mesh, Transformer, [(5, 2)] * 2, timeout_s=LIMIT_S) == [1] * num_ranks


@pytest.mark.parametrize("make", [Mixed, Methods])
def test_buffers_writes_and_methods_in_one_graph(make):
    job = functools.partial(trained, backend="aot_eager", method="torch.compile")
    assert run_ranks(job, 2, "data=1,domain=2", make, [(2, 5, 6)] * 2, timeout_s=LIMIT_S) == [1, 1]


def test_inductor_gives_the_same_numbers():
    job = functools.partial(trained, backend="inductor", method="torch.compile")
    assert run_ranks(job, 2, "data=1,domain=2", Small, [(2, 5, 6)] * 2, timeout_s=LIMIT_S) == [1, 1]


def noted() -> tuple[list, list]:
    torch._dynamo.reset()
    mesh = mesh_for("data=1,domain=2")
    models = [meshpar.parallelize(Small().double(), mesh) for _ in range(2)]
    models[1].compile(fullgraph=True, backend="aot_eager")
    logs = []
    for model in models:
        x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
        model(x)
        with meshpar.record() as log, meshpar.spmd():
            (model(x) ** 2).mean().backward()
        logs.append([e for e in log.entries if e.kind != "parameters"])
    return logs[0], logs[1]


def test_the_record_is_that_of_the_eager_model():
    """What compiled code sends is noted when it runs, with the path of the module, and not while it is traced."""
    for eager, compiled in run_ranks(noted, 2, timeout_s=LIMIT_S):
        assert eager == compiled
        assert {e.where for e in compiled} >= {"blocks.0.conv", "blocks.0.norm"}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


class Dropping(nn.Module):
    """Dropout of an activation, and of a plain tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training) + F.dropout(torch.arange(4.0), 0.5, self.training)


def refused(make, train: bool) -> None:
    torch._dynamo.reset()
    model = meshpar.parallelize(make(), mesh_for("data=1,domain=2")).train(train)
    model.compile(fullgraph=True, backend="aot_eager")
    model(torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize("make", [Noisy, Dropping])
def test_random_numbers_in_a_graph_are_refused(make):
    """Each rank would draw its own, or the same ones at every call: said, not done."""
    with pytest.raises(RankError, match="random numbers"):
        run_ranks(refused, 2, make, True, timeout_s=LIMIT_S)


def test_dropout_that_does_nothing_compiles():
    run_ranks(refused, 2, Dropping, False, timeout_s=LIMIT_S)


def within() -> None:
    torch._dynamo.reset()
    mesh = mesh_for("data=1,domain=2")
    reference = Small().double()
    model = meshpar.parallelize(reference, mesh)
    reference.load_state_dict(meshpar.gather(model.state_dict()))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, y):
        with meshpar.spmd():
            return F.mse_loss(model(x), y)

    x, y = torch.randn(2, 2, 5, 6).double(), torch.randn(2, 1, 5, 6).double()
    x, y = meshpar.gather(meshpar.parallelize(nn.Identity(), mesh)(x)), y  # a plain tensor stays one
    torch.distributed.broadcast(x, 0)
    torch.distributed.broadcast(y, 0)
    loss = step(*meshpar.shard_batch((x, y), mesh))
    loss.backward()
    expected = F.mse_loss(reference(x), y)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert float((meshpar.gather(ours.grad) - theirs.grad).abs().max()) < 1e-12
    with pytest.raises(Exception, match="its inputs are plain tensors"):
        step(x, y)


def test_a_compiled_step_with_the_loss_in_it():
    run_ranks(within, 2, timeout_s=LIMIT_S)


def toggled() -> None:
    torch._dynamo.reset()
    mesh = mesh_for("data=1,domain=2")
    model = meshpar.parallelize(Mixed().double(), mesh)
    twin = copy.deepcopy(model.state_dict())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    found = []
    for run in (compiled, model):
        model.load_state_dict(twin)
        for train in (True, False):
            model.train(train)
            with torch.no_grad():
                found.append(meshpar.gather(run(x)))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_train_and_eval_have_graphs_of_their_own():
    run_ranks(toggled, 2, timeout_s=LIMIT_S)
