"""`shard_modules`: which modules are gathered as one."""

import unittest.mock as mock

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshpar
from meshpar import units as units_module
from meshpar.testing import assert_equivalent, mesh_for, run_ranks
from meshpar.units import units


def names_of(net: nn.Module, shard_modules, limit_bytes: int | None = None) -> list[str]:
    chosen = {id(m) for m in units(net, shard_modules, limit_bytes)}
    return [name for name, m in net.named_modules() if id(m) in chosen]


def gathered(net: nn.Module, chosen: list[nn.Module]) -> dict[str, int]:
    """Count, by brute force, the bytes that each unit gathers for itself."""
    taken: set[int] = set()
    sizes = {}
    names = {id(m): name for name, m in net.named_modules()}
    for unit in [*chosen, net]:
        own = {id(p): p.numel() * p.element_size() for p in unit.parameters() if id(p) not in taken}
        taken |= set(own)
        sizes[names[id(unit)]] = sum(own.values())
    return sizes


class Big(nn.Module):
    """Repeated blocks, a head that is large in all, and a layer that is large by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)))
        self.head = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 200)})
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.stem(x) * self.scale
        return self.head["a"](x).sum() + self.head["b"](x).sum()


@pytest.mark.parametrize("limit", [64, 600, 1300, 3000, 8000, 10**6])
def test_auto_splits_until_no_unit_gathers_more(limit):
    net = Big()
    sizes = gathered(net, units(net, "auto", limit))
    layers = {name: sum(p.numel() * 4 for p in m.parameters(recurse=False)) for name, m in net.named_modules()}
    assert {"blocks.0", "blocks.1"} <= set(sizes)
    for name, size in sizes.items():
        assert size <= max(limit, layers[name]), name
    # Nothing is split that need not be.
    assert (len(sizes) == 3) == (limit == 10**6)


def test_auto_keeps_blocks_together_and_knows_its_number():
    net = Big()
    assert names_of(net, "auto") == ["blocks.0", "blocks.1"]
    assert units_module.UNIT_BYTES == 256 * 2**20
    assert "256 MiB" in units.__doc__
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(8192, 8192), nn.Linear(8192, 8), nn.Linear(8, 8))
    assert names_of(large, "auto") == ["0"]  # 256 MiB and a little


def test_globs_classes_and_predicates():
    net = nets.UNet()
    assert names_of(net, "down.*") == [n for n, _ in net.named_modules() if n.startswith("down.") and _has(net, n)]
    assert names_of(net, "*.conv") == [*("down.0.conv", "down.1.conv", "middle.conv", "up.0.conv", "up.1.conv")]
    assert names_of(net, ["up.?", "middle"]) == ["middle", "up.0", "up.1"]
    assert names_of(net, ["head", nets.Block]) == ["down.0", "down.1", "middle", "up.0", "up.1", "head"]
    assert names_of(net, lambda m: isinstance(m, nn.GroupNorm) and m.num_channels == 16) == ["middle.norm"]
    assert names_of(net, None) == names_of(net, []) == []


def _has(net: nn.Module, name: str) -> bool:
    return next(net.get_submodule(name).parameters(), None) is not None


@pytest.mark.parametrize(
    ("shard_modules", "parts"),
    [
        ("encoder.*", ["'encoder.*'", "near names"]),
        (["down.*", "midle"], ["'midle'", "'middle'"]),
        ("down", ["down: a ModuleList", '"down.*"']),
        (3, ["3"]),
        ([nn.Conv2d, 3], ["3"]),
    ],
)
def test_what_names_no_unit_is_an_error(shard_modules, parts):
    with pytest.raises(meshpar.SpecError) as caught:
        units(nets.UNet(), shard_modules)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


class Shared(nn.Module):
    """Two blocks hold the same layer; a layer is held once and tied to another; one block stands alone."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Conv2d(2, 2, 1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(2, 2, 1), layer), nn.Sequential(layer), nn.Conv2d(2, 2, 1)]
        )
        self.tied = nn.Conv2d(2, 2, 1)
        self.other = nn.Conv2d(2, 2, 1)
        self.other.weight = self.tied.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.other(self.tied(x))


def test_what_two_parts_share_is_left_to_the_root():
    net = Shared()
    assert names_of(net, "auto") == ["blocks.2"]
    assert names_of(net, nn.Conv2d) == ["blocks.0.0", "blocks.0.1", "blocks.2"]
    for chosen in ("auto", nn.Conv2d):
        options = {"shard_modules": chosen}
        assert_equivalent(net, [torch.randn(2, 2, 5, 4)], "data=2,domain=2", options=options)


class Reading(nn.Module):
    """Reads the weights of layers that it does not call, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x) + self.attention(x, x, x, need_weights=False)[0]
        return F.linear(x, self.out.weight * 2, self.out.bias) + self.out(x)


def small_units(data: str, spec: str) -> list[str]:
    mesh = mesh_for(spec)
    with mock.patch.object(units_module, "UNIT_BYTES", 8):
        options = {"data": data, "inputs": "data domain _"}
        torch.manual_seed(0)
        net, x = Reading(), torch.randn(4, 5, 4)
        assert_equivalent(net, [x], mesh, layouts=["data domain _"], options=options)
    return names_of(net, "auto", 8)


@pytest.mark.parametrize(("data", "spec"), [("fsdp", "data=2,domain=2"), ("hsdp", "replica=2,data=1,domain=2")])
def test_a_weight_that_is_read_while_its_unit_does_not_run_is_whole(data, spec):
    assert run_ranks(small_units, 4, data, spec) == [["embed", "attention", "attention.out_proj", "out"]] * 4


def inside_of_spmd() -> float:
    """The first forward, and loading, under the mode: the hooks of fully_shard must see shards."""
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    net = nets.UNet().double()
    model = meshpar.parallelize(net, mesh)
    x = torch.randn(4, 2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    index = meshpar.coordinate(mesh, "data")
    with meshpar.spmd():
        model.load_state_dict(net.state_dict())
        loss = (model(x[2 * index : 2 * index + 2]) ** 2).sum()
        loss.backward()
    (net(x) ** 2).sum().backward()
    pairs = zip(model.parameters(), net.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - ref.grad).abs().max()) for p, ref in pairs)


def test_a_first_forward_under_the_mode():
    assert max(run_ranks(inside_of_spmd, 4)) < 1e-10


class Positions(nn.Module):
    """Return a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, 8))

    def forward(self, x):
        return self.table[:, : x.shape[1]]


class Codes(nn.Module):
    """Return a parameter itself, one of a child, and a number made of one."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Embedding(6, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return {
            "x": x * self.scale + self.book.weight,
            "book": [self.book.weight, self.scale],
            "n": self.scale.sum(),
            "shape": x.shape,
        }


class Reads(nn.Module):
    """Use, after a unit has run, what it returned of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.ModuleList([Positions(), Positions()])
        self.codes = nn.ModuleList([Codes()])

    def forward(self, x):
        for layer in self.positions:
            x = x + layer(x)
        found = self.codes[0](x)
        return found["x"] * found["book"][0] * found["book"][1] * found["n"]


@pytest.mark.parametrize("model", [Reads, Positions, Codes])
def test_parameters_that_a_unit_returns_outlive_it(model):
    """`fully_shard` frees their memory; a plain one that leaves the model would have a gradient of its own a rank."""
    assert_equivalent(model, [torch.randn(4, 6, 8)], "data=2,domain=2")
    assert_equivalent(model, [torch.randn(4, 6, 8)], "data=1,domain=1,tensor=2")
