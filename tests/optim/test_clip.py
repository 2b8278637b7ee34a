"""FIELD 35: the norm of gradients and clipping are those of one process, over any mix of meshes and plain tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks

PLACES = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}
MESHES = {"plain": 0, "row": 1, "column": 1, "all": 1, "both": 2, "three": 3}
"""Meshes over four ranks (two for a row or a column of them), and how many dims each has."""


@dataclass(frozen=True)
class Drawn:
    """Hold how a parameter lies, its shape and dtype, and whether it has a gradient."""

    mesh: str
    places: str
    shape: tuple[int, int]
    dtype: torch.dtype
    has_grad: bool


@functools.cache
def meshes() -> dict[str, DeviceMesh]:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    return {
        "row": two["row"],
        "column": two["column"],
        "both": two,
        "all": init_device_mesh("cpu", (4,)),
        "three": mesh_for("data=2,domain=1,tensor=2"),
    }


@st.composite
def drawn_parameters(draw: st.DrawFn) -> Drawn:
    mesh = draw(st.sampled_from(list(MESHES)))
    places = "".join(draw(st.sampled_from("R01")) for _ in range(MESHES[mesh]))
    shape = (draw(st.integers(0, 7)), draw(st.integers(1, 5)))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float64, torch.complex128]))
    return Drawn(mesh, places, shape, dtype, draw(st.integers(0, 4)) > 0)


def parameter(case: Drawn, value: Tensor) -> nn.Parameter:
    if case.mesh == "plain":
        p, g = nn.Parameter(torch.zeros_like(value)), value.clone()
    else:
        placements = [PLACES[place] for place in case.places]
        g = distribute_tensor(value, meshes()[case.mesh], placements, src_data_rank=None)
        p = nn.Parameter(torch.zeros_like(g))
    if case.has_grad:
        p.grad = g
    return p


def compare(jobs: list[tuple[list[Drawn], float, float]]) -> None:
    for cases, norm_type, max_norm in jobs:
        generator = torch.Generator().manual_seed(len(cases))
        values = [torch.randn(c.shape, dtype=c.dtype, generator=generator) for c in cases]
        ours = [parameter(c, v) for c, v in zip(cases, values, strict=True)]
        theirs = [nn.Parameter(torch.zeros_like(v)) for v in values]
        for p, v, c in zip(theirs, values, cases, strict=True):
            if c.has_grad and (v.numel() or not math.isinf(norm_type)):  # torch refuses an infinite norm of nothing
                p.grad = v.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=False)
        before = meshpar.grad_norm((p for p in ours), norm_type)
        found = meshpar.clip_grad_norm_(iter(ours), max_norm, norm_type)
        assert type(found) is Tensor
        assert found.shape == ()
        everyone = [torch.zeros_like(found) for _ in range(4)]
        dist.all_gather(everyone, found)
        assert all(torch.equal(before, other) for other in everyone)
        assert_close(found, expected.to(torch.float64) if found.dtype is torch.float64 else expected, 1e-12)
        for p, q, v in zip(ours, theirs, values, strict=True):
            if p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                assert_close(grad, v if q.grad is None else q.grad, 1e-12)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False)


NORMS = st.sampled_from([2.0, 1.0, 3.0, 2.5, 0.5, math.inf, -math.inf, 0.0])
JOB = st.tuples(st.lists(drawn_parameters(), min_size=1, max_size=6), NORMS, st.sampled_from([0.1, 1.0, 100.0]))


@given(st.lists(JOB, min_size=5, max_size=10))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_property_any_mix_of_meshes(jobs):
    run_ranks(compare, 4, jobs)


def mix(*, last: Drawn | None = None) -> list[Drawn]:
    f = torch.float64
    cases = [
        Drawn("plain", "", (3, 2), f, True),
        Drawn("all", "0", (5, 3), f, True),
        Drawn("all", "R", (4, 2), f, True),
    ]
    cases += [Drawn("both", "00", (3, 4), f, True), Drawn("both", "R1", (3, 4), f, True)]
    cases += [Drawn("three", "1R0", (5, 3), f, True), Drawn("column", "0", (1, 3), f, True)]
    return [*cases, *([last] if last else [])]


def test_a_mix_of_plain_and_all_meshes():
    run_ranks(compare, 4, [(mix(), p, max_norm) for p in (1.0, 2.0, 3.0, math.inf) for max_norm in (0.5, 1e3)])


def strided() -> None:
    """Tensor parallel and then sharded: a dim is cut along two axes, in torch's strided order."""
    mesh = meshes()["both"]
    layer = nn.Linear(3, 7, bias=False, dtype=torch.float64)
    full = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer.weight = nn.Parameter(distribute_tensor(full, mesh["column"], [Shard(0)], src_data_rank=None))
    fully_shard(layer, mesh=mesh["row"])
    assert type(layer.weight.placements[0]) is not Shard
    layer.weight.grad = layer.weight.detach().clone()
    for p in (1.0, 2.0, math.inf):
        assert_close(meshpar.grad_norm(layer.parameters(), p), torch.linalg.vector_norm(full, p), 1e-14)
    meshpar.clip_grad_norm_(layer.weight, 1.0)
    assert_close(meshpar.grad_norm(layer.weight), torch.tensor(1.0, dtype=torch.float64), 1e-6)


def test_strided_shards_of_tensor_and_data():
    run_ranks(strided, 4)


def collectives() -> list[int]:
    ours = [parameter(c, torch.ones(c.shape, dtype=c.dtype)) for c in mix() * 3]
    counts = []
    for p in (2.0, math.inf):
        with CommDebugMode() as comm:
            meshpar.clip_grad_norm_(ours, 1.0, p)
        counts.append(comm.get_comm_counts())
    assert all(set(map(str, c)) == {"c10d.allreduce_"} for c in counts)
    return [sum(c.values()) for c in counts]


def test_one_all_reduce_for_each_axis_that_shards_and_nothing_gathered():
    """The axes: all four ranks, row, column, data, tensor."""
    assert run_ranks(collectives, 4) == [[5, 5]] * 4


def not_finite(value: float, norm_type: float, owner: int) -> tuple[float, bool, bool]:
    mesh = meshes()["all"]
    p = nn.Parameter(distribute_tensor(torch.zeros(8, dtype=torch.float64), mesh, [Shard(0)], src_data_rank=None))
    p.grad = distribute_tensor(torch.ones(8, dtype=torch.float64), mesh, [Shard(0)], src_data_rank=None)
    if dist.get_rank() == owner:
        p.grad.to_local()[0] = value
    total = float(meshpar.grad_norm(p, norm_type))
    before = p.grad.to_local().clone()
    try:
        meshpar.clip_grad_norm_(p, 1.0, norm_type, error_if_nonfinite=True)
    except meshpar.NonFiniteError as error:
        said = isinstance(error, RuntimeError) and "not finite" in str(error)
    else:
        said = False
    return total, said, torch.equal(before.nan_to_num(7), p.grad.to_local().nan_to_num(7))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_inf_and_nan_on_one_rank_are_seen_by_all(value, norm_type):
    for owner in (0, 3):
        for total, said, untouched in run_ranks(not_finite, 4, value, norm_type, owner):
            assert math.isnan(total) if math.isnan(value) else total == math.inf
            assert said
            assert untouched


def missing_here() -> float:
    """A plain parameter that has a gradient on one rank alone, as under conditional computation."""
    mesh = meshes()["all"]
    ones = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
    a, b = nn.Parameter(torch.zeros_like(ones)), nn.Parameter(torch.zeros_like(ones))
    a.grad = ones
    if dist.get_rank() < 2:
        b.grad = ones.clone()
    return float(meshpar.grad_norm([a, b]))


def test_a_gradient_that_some_ranks_lack_hangs_nobody():
    assert run_ranks(missing_here, 4) == [pytest.approx(math.sqrt(8 + 4))] * 4


def of_low_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.zeros(300, dtype=dtype))
        p.grad = torch.full((300,), 30000.0).to(dtype)
        total = meshpar.grad_norm(p)
        assert total.dtype is torch.float32
        assert_close(total, p.grad.float().norm(), 1e-5)
        wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        wide.grad = torch.ones_like(wide)
        assert meshpar.grad_norm([p, wide]).dtype is torch.float64
        meshpar.clip_grad_norm_([p, wide], 1.0)
        assert p.grad.dtype is dtype
        assert_close(meshpar.grad_norm(p), torch.tensor(1.0), 5e-2)
    q = nn.Parameter(torch.zeros(5, 2))
    q.grad = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0, 2.0], [1.0, 2.0], [2.0, 0.0]], (5, 2))
    assert_close(meshpar.grad_norm(q), q.grad.to_dense().norm(), 1e-6)


def test_low_precision_is_added_up_in_float32_and_dtypes_may_mix():
    run_ranks(of_low_precision, 1)


def wrong() -> None:
    meshpar.grad_norm(["weight"])


def strange() -> None:
    meshpar.grad_norm([], "two")


def test_what_is_no_parameter_or_norm_is_named():
    for case, text in ((wrong, "got:    str"), (strange, "norm_type='two'")):
        with pytest.raises(RankError, match=text):
            run_ranks(case, 1)
    assert float(meshpar.grad_norm([])) == 0.0
    with pytest.warns(UserWarning, match="no parameters"):
        meshpar.clip_grad_norm_([], 1.0)


class Mixed(nn.Module):
    """Sharded parameters, a 0-d one, and one of another dtype, which stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 5, 3, padding=1).double()
        self.shift = nn.Parameter(torch.ones(3, dtype=torch.float32))
        self.head = nn.Conv2d(5, 3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x) * self.scale) + self.shift.double()[:, None, None]


def of_a_model(spec: str) -> None:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    net = Mixed()
    model = meshpar.parallelize(net, mesh)
    x = torch.randn(4, 2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]
    with meshpar.spmd():
        loss = model(own).square().sum()
    loss.backward()
    net(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.5)
    assert_close(meshpar.clip_grad_norm_(model.parameters(), 1.5), expected.double(), 1e-7)  # one of them is float32
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        assert_close(meshpar.gather(p.grad), q.grad, 1e-6 if q.dtype is torch.float32 else 1e-7)


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4"])
def test_the_gradients_of_a_model(spec):
    run_ranks(of_a_model, 4, spec)
