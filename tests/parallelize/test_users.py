"""What users bring that is not in the textbook: odd parameters, odd arguments, odd ways to load a state."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshpar
from meshpar.testing import RankError, assert_equivalent, mesh_for, run_ranks


class Scaled(nn.Module):
    """A learnable 0-d scale, used twice, one of a list, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.gains = nn.ParameterList([torch.tensor(0.5), torch.ones(2, 1, 1)])
        self.fixed = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x) * self.scale * self.gains[1] + self.scale.exp() * self.gains[0] * self.fixed
        for block in self.blocks:
            y = block(y)
        return y


class Block(nn.Module):
    """A residual branch with a 0-d gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.gate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.conv(x)


class MixedDtypes(nn.Module):
    """Parameters of four dtypes in one unit, an empty one too."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 3, padding=1).double()
        self.narrow = nn.Conv2d(4, 1, 1)
        self.phase = nn.Parameter(torch.polar(torch.ones(6), torch.arange(6.0)))
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.wide(x).float())
        return (y * self.phase).abs() * self.steps[2]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tensors and something else."""

    image: torch.Tensor
    name: str
    more: Any = None


class Hidden:
    """Tensors that nobody can see."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OnBatch(nn.Module):
    """Take and return a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, batch: Any) -> Any:
        x = batch.image if isinstance(batch, Batch) else batch.x
        return Batch(self.conv(x), "out", [x])


def test_scalar_parameters():
    assert_equivalent(Scaled, [torch.randn(2, 2, 5, 6)], "data=2,domain=2")


def steps(spec: str, make, dtype: torch.dtype) -> None:
    """Three steps of torch's own clipping and optimizer, and a state loaded back, against one process."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    net = make()
    model, reference = meshpar.parallelize(net, mesh), copy.deepcopy(net)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    index, num = meshpar.coordinate(mesh, "data"), meshpar.axis_size(mesh, "data")
    x = torch.randn(4, 2, 5, 6, dtype=dtype)
    own = slice(index * 4 // num, (index + 1) * 4 // num)
    for _ in range(3):
        with meshpar.spmd():
            loss = model(x[own]).pow(2).mean()
        expected = reference(x).pow(2).mean()
        for value, m, optimizer in zip((loss, expected), (model, reference), optimizers, strict=True):
            value.backward()
            real = [p for p in m.parameters() if p.grad is not None and not p.grad.is_complex()]
            torch.nn.utils.clip_grad_norm_(real, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(meshpar.gather(loss), expected)
    ours, theirs = meshpar.gather(model.state_dict()), reference.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value)
    model.load_state_dict(net.state_dict())
    torch.testing.assert_close(meshpar.gather(model(x[own])), net(x))


def test_scalar_parameters_train_and_load():
    run_ranks(functools.partial(steps, make=functools.partial(made, Scaled), dtype=torch.float64), 4, "data=2,domain=2")


def made(cls: type[nn.Module]) -> nn.Module:
    return cls().double()


def test_parameters_of_mixed_dtypes_train_and_load():
    run_ranks(functools.partial(steps, make=MixedDtypes, dtype=torch.float64), 4, "data=2,domain=2")


def dataclasses_in_and_out(spec: str) -> None:
    mesh = mesh_for(spec)
    model = meshpar.parallelize(OnBatch(), mesh)
    x = torch.arange(240.0).view(4, 2, 5, 6)
    index = meshpar.coordinate(mesh, "data")
    found = model(Batch(x[2 * index : 2 * index + 2], "in"))
    whole = meshpar.gather(found)
    assert isinstance(whole, Batch)
    assert type(whole.image) is torch.Tensor
    assert torch.equal(whole.more[0], x)
    full = meshpar.gather(model.state_dict())
    torch.testing.assert_close(whole.image, F.conv2d(x, full["conv.weight"], full["conv.bias"], padding=1))


def test_dataclasses_are_cut_and_gathered():
    run_ranks(dataclasses_in_and_out, 4, "data=2,domain=2")


def hidden_tensors(spec: str) -> None:
    meshpar.parallelize(OnBatch(), mesh_for(spec))(Hidden(torch.zeros(1, 2, 5, 6)))


def test_tensors_hidden_in_an_object_are_refused_on_all_ranks():
    with pytest.raises(RankError, match=r"failed on 2 ranks(.|\n)*holds \['x'\]"):
        run_ranks(hidden_tensors, 2, "data=2")


def part_loaded(spec: str) -> None:
    model = meshpar.parallelize(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)), mesh_for(spec))
    values = {"weight": torch.full((2, 2, 1, 1), 7.0), "bias": torch.arange(2.0)}
    model[1].load_state_dict(values)
    found = meshpar.gather(model[1].state_dict())
    assert all(torch.equal(found[key], value) for key, value in values.items())


def test_a_part_of_the_model_takes_plain_values():
    run_ranks(part_loaded, 2, "data=2")


def wrong_arguments(spec: str) -> list[str]:
    mesh = mesh_for(spec)
    x = torch.zeros(2, 2, 5, 6)
    calls = (
        lambda: meshpar.shard_batch(x, None),
        lambda: meshpar.shard_batch(x, "data=2"),
        lambda: meshpar.shard_batch({1: x, "a": x}, mesh, {2: "_"}),
        lambda: meshpar.shard("x", mesh),
        lambda: meshpar.shard(meshpar.shard(x, mesh), mesh),
        lambda: meshpar.mesh_of(3),
        lambda: meshpar.parallelize(nn.ReLU(), mesh, inputs=3),
        lambda: meshpar.parallelize(nn.ReLU(), mesh, inputs=["data _", "data _"]),
    )
    told = []
    for call in calls:
        with pytest.raises(meshpar.SpecError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_wrong_arguments_are_told():
    for text in run_ranks(wrong_arguments, 2, "data=2")[0]:
        assert all(word in text for word in ("got:", "needs:", "fix:"))


class Settings(dict):
    """A mapping that shows its entries as attributes too, as those of `diffusers` do."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)

    def copy(self) -> "Settings":
        twin = Settings()
        twin.update(self)
        return twin


class Registered(nn.Module):
    """Wants a name of every subclass, and makes modules of its own class while it runs, as those of `tltorch` do."""

    known: dict[str, type] = {}  # noqa: RUF012

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.known[name] = cls

    def forward(self) -> torch.Tensor:
        return self.weight


class Kernel(Registered, name="kernel"):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)

    def __getitem__(self, index: Any) -> "Kernel":
        return self.__class__(self.weight[index])


class Unused(nn.Module):
    """A block that is given more than it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        return self.conv(x)


class Installed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Settings(gain=2.0)
        self.kernel = Kernel(nn.Parameter(torch.randn(3, 2, 2, 1, 1)))
        self.context = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Unused(), Unused()])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        context = self.context(t)
        x = F.conv2d(x, self.kernel[1]())
        for block in self.blocks:
            x = block(x, context=context)
        return x * self.config.gain + context[:, :2, None, None]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        state["_metadata"] = {"gain": 2.0}
        return state


@pytest.mark.parametrize("mesh", ["data=1,domain=2", "data=2,domain=2"])
def test_habits_of_installed_networks(mesh: str) -> None:
    torch.manual_seed(0)
    assert_equivalent(Installed(), [torch.randn(2, 2, 5, 3), torch.randn(2, 4)], mesh, layouts=[None, "data _"])
    assert Registered.known == {"kernel": Kernel}


class Remembers(nn.Module):
    """Keep statistics in buffers, in the ways of users: in place, by parts, as `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("peak", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(3, 4))
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        with torch.no_grad():
            mean = x.mean((0, 2, 3))
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
            self.mean.lerp_(x.std((0, 2, 3)), 0.5)
            torch.maximum(self.peak, x.amax((0, 2, 3)), out=self.peak)
            self.seen[:, 1] = mean
            self.seen[:, 2:].index_add_(1, torch.tensor([1]), mean[:, None])
        self.peak += x.detach().sum((0, 2, 3))
        return self.conv(x - self.mean.view(1, -1, 1, 1)) * self.peak.sum()


def keeps_rows(spec: str) -> None:
    model = Remembers()
    model.forward = lambda x: model.seen.copy_(x[0, :, :, 0].detach())
    mesh = mesh_for(spec)
    with meshpar.spmd():
        model.forward(meshpar.shard(torch.ones(2, 3, 4, 5), mesh))


def test_buffers_take_what_is_the_same_on_all_ranks():
    for mesh in ("data=2,domain=2", "data=1,domain=3"):
        assert_equivalent(Remembers, [torch.randn(2, 3, 5, 4)], mesh)
    with pytest.raises(RankError, match="cannot write activations into a plain tensor"):
        run_ranks(keeps_rows, 2, "data=1,domain=2")


def penalised(spec: str) -> float:
    """Give the largest difference of gradients with a penalty on the parameters outside of the model."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.SiLU(), nn.Conv2d(5, 2, 1)).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    mesh = mesh_for(spec)
    parallel = meshpar.parallelize(alone, mesh)
    with meshpar.spmd():
        loss = parallel(meshpar.shard(x, mesh)).square().mean()
        loss = loss + sum(p.square().sum() + 2 * p.sum() for p in parallel.parameters())
    loss.backward()
    (alone(x).square().mean() + sum(p.square().sum() + 2 * p.sum() for p in alone.parameters())).backward()
    pairs = zip(parallel.parameters(), alone.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)


def test_a_penalty_on_parameters_outside_of_the_model():
    """Of a bias of 2 over 4 ranks, two have nothing: there it was an error, on these ranks alone."""
    assert max(run_ranks(penalised, 4, "data=2,domain=2")) < 1e-12
    assert max(run_ranks(penalised, 3, "data=1,domain=3")) < 1e-12
