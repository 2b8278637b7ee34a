"""Plans of meshes that are not there: what they list, what they refuse, and that nothing of them is left."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar.errors import SpecError
from meshpar.planning import plan, search
from meshpar.planning.search import meshes, short
from meshpar.planning.worlds import differing, mesh_sizes, rank_of
from meshpar.tables import parse_bytes, tell_bytes
from meshpar.testing import run_ranks


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, 1, 1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))  # type: ignore[no-any-return]


class NoRule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.median(x * 2)


def test_the_ranks_that_differ_are_first_middle_and_last_of_each_axis():
    spec = meshpar.MeshSpec(data=4, domain=8)
    assert [rank_of(spec, where) for where in differing(spec)] == [0, 4, 7, 16, 24]
    corners = meshpar.MeshSpec(data=1, domain={-2: 2, -1: 3})
    assert len(differing(corners)) == 6
    assert mesh_sizes(meshpar.MeshSpec(replica=2, data=3, domain=2)) == {"data": 6, "domain": 2, "tensor": 1}


def test_a_plan_counts_halos_statistics_and_parameters_and_leaves_nothing():
    model = net()
    found = plan(model, "data=2,domain=4", (1, 3, 721, 16))
    assert not dist.is_initialized()
    assert all(not p.is_meta for p in model.parameters())
    assert found.world == 8
    row = 3 * 16 * 4
    halo = {r.place["domain"]: sum(t.num_bytes for t in r.transfers if t.kind == "halo") for r in found.ranks.values()}
    assert halo == {0: row, 2: 2 * row, 3: row}  # of the first convolution alone; its input needs no gradient
    weights = [p.numel() for p in model.parameters()]
    padded = sum(-(-p.shape[0] // 8) * p[0].numel() for p in model.parameters())
    first = found.ranks[0]
    assert first.parameters_bytes == 4 * padded == first.gradients_bytes
    assert first.optimizer_bytes == 2 * first.parameters_bytes + 4 * len(weights)
    sent = {t.kind: t for t in first.transfers}
    assert sent["reduce-scatter"].num_bytes == 4 * 8 * padded * 7 // 8
    assert found.gathers() == []
    assert "domain" in str(found)
    assert found._repr_html_().count("<tr>") == 4 + 1 + len({(t.axis, t.kind) for t in first.transfers}) + 1


def test_every_rank_holds_a_quarter_and_the_last_has_fewer_rows():
    one = plan(net(), "data=1", (1, 3, 721, 64)).ranks[0]
    four = plan(net(), "data=1,domain=4", (1, 3, 721, 64)).ranks
    assert 0.24 < four[0].activations_bytes / one.activations_bytes < 0.28
    assert four[3].activations_bytes < four[2].activations_bytes
    assert sum(r.flops for r in (four[0], four[2], four[2], four[3])) == pytest.approx(one.flops, rel=0.02)


def test_options_change_the_plan_as_they_change_the_step():
    deep = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(6)))
    plain = plan(deep, "data=1,domain=2", (1, 8, 64, 64))
    less = plan(deep, "data=1,domain=2", (1, 8, 64, 64), checkpoint="all")
    assert less.ranks[0].activations_bytes < 0.8 * plain.ranks[0].activations_bytes
    half = plan(deep, "data=1,domain=2", (1, 8, 64, 64), precision="bf16")
    assert half.ranks[0].activations_bytes < 0.7 * plain.ranks[0].activations_bytes
    copies = plan(deep, "data=2", (1, 8, 64, 64), data="ddp", optimizer="sgd")
    assert copies.ranks[0].parameters_bytes == 4 * sum(p.numel() for p in deep.parameters())
    assert copies.ranks[0].optimizer_bytes == 0
    forward = plan(deep, "data=1,domain=2", (1, 8, 64, 64), optimizer=None)
    assert forward.ranks[0].gradients_bytes == 0
    assert forward.ranks[0].activations_bytes < plain.ranks[0].activations_bytes


def test_copies_and_shards_are_named_by_their_axes():
    model, shape = net(), (1, 3, 16, 16)
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    copies = plan(model, "data=2,domain=2", shape, data="ddp")
    assert copies.num_bytes(kind="all-reduce", axis="data x domain") == 2 * num_bytes * 3 // 4
    both = plan(model, "replica=2,data=1,domain=2", shape, data="hsdp")
    kinds = {(t.axis, t.kind) for t in both.ranks[0].transfers}
    assert {("replica", "all-reduce"), ("shard", "all-gather"), ("shard", "reduce-scatter")} <= kinds
    shards = plan(model, "data=2,domain=2", shape)
    axes = {t.axis for t in shards.ranks[0].transfers}
    assert axes == {"mesh", "domain", "data x domain"}


def test_a_tensor_axis_is_planned():
    shape = {"x": (4, 10, 16)}
    whole = plan(Mlp(), "data=1", shape)
    split = plan(Mlp(), "data=1,tensor=2", shape, tensor_plan={"fc1": "colwise", "fc2": "rowwise"})
    assert split.num_bytes(axis="tensor") > 0
    assert split.ranks[0].parameters_bytes < 0.6 * whole.ranks[0].parameters_bytes
    assert split.ranks[0].flops == whole.ranks[0].flops // 2


def test_layers_that_gather_are_named():
    found = plan(nn.Sequential(nn.Conv2d(1, 1, 1), NoRule()), "data=1,domain=2", (1, 1, 8, 4))
    assert [(e.where, e.kind) for e in found.gathers()] == [("1", "gather")]
    assert "gathers: 1: " in str(found)


def test_shapes_by_name_with_dtypes():
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.table(tokens) * scale  # type: ignore[no-any-return]

    tokens = torch.empty(2, 6, dtype=torch.int64, device="meta")
    assert plan(Embedded(), "data=2", {"tokens": tokens, "scale": (2, 6, 1)}).world == 2


def test_a_meta_model_is_planned():
    with torch.device("meta"):
        model = net()
    assert plan(model, "data=1,domain=2", (1, 3, 16, 16)).peak_bytes > 0


def beside_a_model_of_one_rank() -> tuple[bool, float]:
    model = meshpar.parallelize(net(), "data=1")
    found = plan(net(), "data=2,domain=2", (1, 3, 16, 16))
    x = torch.ones(1, 3, 16, 16)
    model(x).sum().backward()
    return found.world == 4 and dist.get_world_size() == 1, float(meshpar.grad_norm(model.parameters()))


def test_a_process_that_is_alone_plans_beside_its_own_group():
    ((planned, norm),) = run_ranks(beside_a_model_of_one_rank, 1)
    assert planned
    assert norm > 0


def within_a_job() -> str:
    with pytest.raises(SpecError) as caught:
        plan(net(), "data=2", (1, 3, 8, 8))
    return str(caught.value)


def test_a_process_of_a_job_is_told_so():
    assert all("a process group of 2 ranks" in said for said in run_ranks(within_a_job, 2))


@pytest.mark.parametrize(
    ("spec", "shapes", "kwargs", "says"),
    [
        ("data=-1,domain=2", (1, 3, 8, 8), {"world": 3}, "3"),
        ("domain=-1,data=2", (1, 3, 8, 8), {}, "no number of ranks|cannot be planned"),
        ("data=2", (1, 3, 8, 8), {"world": 5000}, "5000"),
        ("data=2", (1, 3, 8, 8), {"world": True}, "True"),
        ("data=8192", (1, 3, 8, 8), {}, "8192"),
        ("data=2", "1,3,8,8", {}, "1,3,8,8"),
        ("data=2", (1, 3, -8, 8), {}, "-8"),
        ("data=2", [(1, 3, 8, 8), "x"], {}, "input 1"),
        ("data=2", (1, 3, 8, 8), {"optimizer": "adamx"}, "adamx"),
        ("data=2,domian=2", (1, 3, 8, 8), {}, "domian"),
        ("data=2", (1, 3, 8, 8), {"data": "fdsp"}, "fdsp"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_leaves_nothing(spec, shapes, kwargs, says):
    with pytest.raises(SpecError, match=says):
        plan(net(), spec, shapes, **kwargs)
    assert not dist.is_initialized()


def test_a_model_that_raises_leaves_nothing():
    with pytest.raises(RuntimeError, match="channels"):
        plan(net(), "data=1,domain=2", (1, 5, 8, 8))
    assert not dist.is_initialized()


def test_search_ranks_the_meshes_that_fit_first():
    found = search(net(16), (1, 3, 256, 256), devices=4, memory="80GB")
    assert {short(p.spec) for p in found.plans} == {"data=4", "data=2,domain=2", "domain=4"}
    assert short(found.best.spec) == "data=4"
    peaks = {short(p.spec): p.peak_bytes for p in found.plans}
    tight = search(net(16), (1, 3, 256, 256), devices=4, memory=peaks["domain=4"])
    assert tight._repr_html_().count("<tr style") == sum(row[1] == "no" for row in tight.rows()) > 0
    assert short(tight.best.spec) == "domain=4"
    assert [row[1] for row in tight.rows()] == ["fits", "yes", "no", "no"]
    with pytest.raises(SpecError, match="no mesh fits"):
        _ = search(net(16), (1, 3, 256, 256), devices=4, memory="1KB").best
    with pytest.raises(SpecError, match="devices=0"):
        search(net(), (1, 3, 8, 8), devices=0)


def test_the_meshes_of_a_number_of_devices():
    assert [short(s) for s in meshes(4, 2, with_tensor=True)] == [
        "data=4",
        "data=2,domain=2",
        "data=2,tensor=2",
        "domain=2,tensor=2",
        "tensor=4",
    ]


@pytest.mark.parametrize(("text", "num"), [("80GB", 80 * 10**9), ("1.5 KiB", 1536), (7, 7), ("12", 12), ("3b", 3)])
def test_sizes_are_read(text, num):
    assert parse_bytes(text) == num


@pytest.mark.parametrize("text", ["GB", "x", "-1", -1, "1 XB", None, True, "inf GB"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(SpecError, match="not a size"):
        parse_bytes(text)


def test_sizes_are_written():
    assert [tell_bytes(n) for n in (0, 999, 1000, 2_500_000, 3e12)] == ["0 B", "999 B", "1 KB", "2.5 MB", "3 TB"]
