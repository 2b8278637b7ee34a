"""Transposed convolutions: the numbers and gradients of one process, no gather, no byte more than outputs need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.intervals import chunks
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for
from meshpar.testing.pool import run_ranks

MESHES = {
    "data=1,domain=4": 4,
    "data=2,domain=2": 4,
    "data=4": 4,
    "data=1,domain=3": 3,
    "data=1,domain=2": 2,
}
TWO_AXES = "data=1,domain=2,tensor=2"


@dataclass(frozen=True)
class Case:
    """One transposed convolution: sizes, arguments, mesh."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    output_padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    bias: bool = True
    mesh: str = "data=1,domain=4"
    layout: str | None = None
    batch: int | None = 2
    channels: tuple[int, int] = (2, 3)

    def tensors(self) -> tuple[Tensor, list[Tensor]]:
        g = torch.Generator().manual_seed(7)
        inner = self.channels[0] * self.groups
        lead = (inner,) if self.batch is None else (self.batch, inner)
        x = torch.randn(*lead, *self.size, generator=g, dtype=torch.float64)
        weights = [torch.randn(inner, self.channels[1], *self.kernel, generator=g, dtype=torch.float64)]
        if self.bias:
            weights.append(torch.randn(self.channels[1] * self.groups, generator=g, dtype=torch.float64))
        return x, weights

    def layout_of(self, x: Tensor) -> str:
        if self.layout is not None:
            return self.layout
        lead = "_" if self.batch is None else "data _"
        return f"{lead} {' '.join(['_'] * (len(self.size) - 2))} domain {'_' if len(self.size) > 1 else ''}"

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        return getattr(F, f"conv_transpose{len(self.size)}d")(
            x,
            weights[0],
            weights[1] if self.bias else None,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            groups=self.groups,
            dilation=self.dilation,
        )


def same(case: Case) -> int:
    """Check a case on this rank; give the bytes sent forward."""
    x, weights = case.tensors()
    report = assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], weights=weights)
    assert all(e.kind == "halo" or (e.backward and e.axis == "tensor") for e in report.log.entries)
    return report.log.num_bytes(backward=False)


def check(case: Case) -> list[int]:
    return run_ranks(same, MESHES.get(case.mesh, 4), case)


CASES = {
    "field 55: k2 s2": Case((9, 4), (2, 2), stride=2),
    "field 55: 3d": Case((3, 9, 4), (2, 2, 2), stride=2, mesh="data=1,domain=3"),
    "field 1: k3 p1": Case((8, 8), (3, 3), padding=1),
    "k4 s2 p1": Case((9, 4), (4, 4), stride=2, padding=1),
    "k3 s2 p1 op1": Case((9, 4), (3, 3), stride=2, padding=1, output_padding=1),
    "5 rows over 4": Case((5, 4), (3, 3), stride=2),
    "1 row over 4": Case((1, 4), (3, 3), stride=2),
    "1 row, all outputs cropped but one": Case((1, 4), (3, 3), padding=1),
    "gaps between windows": Case((5, 3), (1, 2), stride=3, output_padding=2),
    "dilated": Case((7, 3), (3, 2), dilation=3, stride=2, padding=1),
    "dilated, large output padding": Case((7, 3), (2, 2), dilation=5, output_padding=4),
    "several hops": Case((5, 3), (7, 1), padding=(2, 0)),
    "1d": Case((9,), (4,), stride=2, padding=1),
    "unbatched": Case((9, 4), (3, 3), stride=2, batch=None),
    "unbatched 1d": Case((9,), (3,), batch=None),
    "grouped, without bias": Case((9, 4), (3, 3), stride=2, groups=2, bias=False),
    "both dims sharded": Case(
        (5, 7), (3, 3), stride=2, padding=1, output_padding=1, mesh=TWO_AXES, layout="_ _ domain tensor"
    ),
    "both dims sharded, a rank empty": Case((1, 1), (1, 1), mesh=TWO_AXES, layout="_ _ domain tensor"),
    "a data rank empty": Case((5, 4), (3, 3), batch=1, mesh="data=2,domain=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    ("n", "k", "s", "p", "d"), [(8, 2, 2, 0, 1), (9, 4, 2, 1, 1), (16, 3, 1, 4, 4), (37, 3, 2, 1, 1)]
)
def test_sends_only_the_rows_that_outputs_need(n: int, k: int, s: int, p: int, d: int) -> None:
    case = Case((n, 3), (k, 1), stride=(s, 1), padding=(p, 0), dilation=(d, 1), batch=1)
    out = (n - 1) * s - 2 * p + d * (k - 1) + 1
    need = [{i for i in range(n) for j in range(k) if a <= i * s + j * d - p < b} for a, b in chunks(out, 4)]
    least = [sum(len(need[q] & set(range(a, b))) for q in range(4) if q != r) for r, (a, b) in enumerate(chunks(n, 4))]
    assert check(case) == [rows * 8 * 2 * 3 for rows in least]


def placements(case: Case) -> tuple[Any, ...]:
    x, weights = case.tensors()
    with record(), spmd(on_gather="error"):
        return tuple(case(shard(x, mesh_for(case.mesh), case.layout_of(x)), *weights).placements)


def test_output_stays_sharded() -> None:
    kept = (Shard(0), Shard(2), Replicate())
    assert run_ranks(placements, 4, CASES["k4 s2 p1"]) == [kept] * 4


def module_is_same(output_size: list[int] | None) -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1).double()
    x = torch.randn(2, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(w.shape, generator=g, dtype=torch.float64) for w in layer.parameters()]

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, own, (x, output_size))

    assert_same(call, [x], mesh=mesh_for("data=2,domain=2"), weights=weights)


@pytest.mark.parametrize("output_size", [None, [18, 9]])
def test_module(output_size: list[int] | None) -> None:
    run_ranks(module_is_same, 4, output_size)


def differs(case: Case) -> str:
    x, weights = case.tensors()
    kinds: list[type[BaseException] | None] = []
    with record() as log:
        for value in (x, shard(x, mesh_for(case.mesh), case.layout_of(x))):
            try:
                with spmd(on_gather="error"):
                    case(value, *weights)
            except Exception as error:
                kinds.append(type(error))
            else:
                kinds.append(None)
    return "" if kinds[0] is not None and kinds[0] is kinds[1] and not log.entries else f"{kinds} {log.entries}"


@pytest.mark.parametrize(
    "change",
    [
        {"output_padding": 2},
        {"stride": 0},
        {"padding": -1},
        {"dilation": 0},
        {"size": (1, 1), "padding": 2},
        {"size": (5,), "kernel": (3, 3)},
    ],
    ids=str,
)
def test_raises_what_torch_raises(change: dict[str, Any]) -> None:
    case = replace(Case((5, 4), (3, 3)), **change)
    if change.get("size") == (5,):
        case = replace(case, layout="data _ _")
    assert run_ranks(differs, 4, case) == [""] * 4


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nd = draw(st.sampled_from([1, 2, 2, 2, 3]))
    mesh = draw(st.sampled_from([*MESHES, *([TWO_AXES] if nd > 1 else [])]))
    domain = max(nd - 2, 0)
    size, kernel, stride, dilation, pads, extra = [], [], [], [], [], []
    for dim in range(nd):
        wide = dim == domain
        n = draw(st.integers(1, 11 if wide else 4))
        k = draw(st.integers(1, 6 if wide else 3))
        s = draw(st.integers(1, 4 if wide else 2))
        d = draw(st.integers(1, 3 if wide else 2))
        more = draw(st.integers(0, max(s, d) - 1))
        p = draw(st.integers(0, (k - 1) * d + 1))
        assume((n - 1) * s - 2 * p + d * (k - 1) + more + 1 > 0)
        size.append(n), kernel.append(k), stride.append(s), dilation.append(d), pads.append(p), extra.append(more)
    batch = draw(st.sampled_from([None, 1, 2, 3, 5]))
    spatial = ["_"] * nd
    spatial[domain] = "domain"
    if mesh == TWO_AXES:
        spatial[-1] = "tensor"
    return Case(
        tuple(size),
        tuple(kernel),
        stride=tuple(stride),
        padding=tuple(pads),
        output_padding=tuple(extra),
        dilation=tuple(dilation),
        groups=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        mesh=mesh,
        layout=" ".join((["_"] if batch is None else ["data", "_"]) + spatial),
        batch=batch,
        channels=draw(st.sampled_from([(1, 1), (2, 1), (1, 2)])),
    )


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_property(case: Case) -> None:
    check(case)


@pytest.mark.long
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_property_long(case: Case) -> None:
    check(case)
