"""Pools over windows: the numbers, positions, gradients and divisors of one process, and no byte too many."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    """One pool: function, sizes, arguments, mesh; `values` says what the numbers are like."""

    op: str
    size: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    mesh: str = "data=1,domain=4"
    layout: str | None = None
    batch: int | None = 2
    values: str = "normal"
    dtype: torch.dtype = torch.float64

    def tensor(self) -> Tensor:
        g = torch.Generator().manual_seed(11)
        lead = (2,) if self.batch is None else (self.batch, 2)
        shape = (*lead, *self.size)
        if self.values == "ties":
            return torch.randint(0, 3, shape, generator=g).to(self.dtype)
        x = torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)
        special = torch.randint(0, 4, shape, generator=g)
        if self.values == "special":
            x[special < 2] = float("-inf")
            x[special == 2] = float("nan")
        if self.values == "-inf":
            x[special < 3] = float("-inf")
        return x.abs() if self.values == "positive" else x

    def layout_of(self, x: Tensor) -> str:
        if self.layout is not None:
            return self.layout
        lead = "_" if self.batch is None else "data _"
        return f"{lead} {' '.join(['_'] * (len(self.size) - 2))} domain {'_' if len(self.size) > 1 else ''}"

    def __call__(self, x: Tensor) -> Any:
        return getattr(F, self.op)(x, *self.args, **self.options)


def same(case: Case) -> int:
    """Check a case on this rank; give the bytes sent forward."""
    x = case.tensor()
    report = assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], tolerance=1e-12)
    assert all(e.kind == "halo" for e in report.log.entries)
    return report.log.num_bytes(backward=False)


def check(case: Case) -> list[int]:
    return run_ranks(same, MESHES.get(case.mesh, 4), case)


INDICES = {"return_indices": True}
CASES = {
    "field 22: max, 2x2": Case("max_pool2d", (8, 6), (2,)),
    "field 22: max k3 s2 p1, uneven": Case("max_pool2d", (37, 7), (3, 2, 1)),
    "field 22: avg k3 s2 p1, uneven": Case("avg_pool2d", (37, 7), (3, 2, 1)),
    "field 23: avg backward": Case("avg_pool2d", (8, 6), (2,)),
    "field 17: 5 rows over 4": Case("max_pool2d", (5, 4), (3, 1, 1), INDICES),
    "1 row over 4": Case("max_pool2d", (1, 4), (3, 1, 1), INDICES),
    "1 row over 4, mean": Case("avg_pool2d", (1, 4), (3, 1, 1)),
    "721 rows over 4": Case("max_pool2d", (721, 2), (3, 2, 1), INDICES),
    "max, indices, 1d": Case("max_pool1d", (13,), (3, 2, 1), INDICES),
    "max, indices, 3d": Case("max_pool3d", (3, 9, 4), (3, 2, 1), INDICES),
    "max, unbatched": Case("max_pool2d", (9, 4), (2,), INDICES, batch=None),
    "max, unbatched 1d": Case("max_pool1d", (9,), (2,), INDICES, batch=None),
    "max, unbatched 3d": Case("max_pool3d", (2, 9, 3), (2,), INDICES, batch=None),
    "max, dilated": Case("max_pool2d", (11, 7), (3, 1, 1, 2), INDICES),
    "max, ceil": Case("max_pool2d", (11, 7), (3, 2, 1), {"ceil_mode": True, **INDICES}),
    "max, window wider than a shard": Case("max_pool2d", (9, 4), (7, 1, 3), INDICES),
    "max, stride larger than the window": Case("max_pool2d", (13, 4), (2, 3), INDICES),
    "max, windows of -inf and NaN": Case("max_pool2d", (9, 6), (3, 1, 1), INDICES, values="special"),
    "max, windows of -inf": Case("max_pool2d", (9, 6), (3, 2, 1), INDICES, values="-inf"),
    "max, ties": Case("max_pool2d", (9, 6), (4, 1, 2), INDICES, values="ties"),
    "max, both dims sharded": Case(
        "max_pool2d", (9, 7), (3, 1, 1), INDICES, mesh=TWO_AXES, layout="_ _ domain tensor", values="special"
    ),
    "avg, both dims sharded": Case(
        "avg_pool2d", (9, 7), (3, 2, 1), {"ceil_mode": True}, mesh=TWO_AXES, layout="_ _ domain tensor"
    ),
    "avg, 1d": Case("avg_pool1d", (13,), (3, 2, 1)),
    "avg, 3d": Case("avg_pool3d", (3, 9, 4), (3, 2, 1), {"ceil_mode": True}),
    "avg, unbatched": Case("avg_pool2d", (9, 4), (2,), batch=None),
    "avg, padding not counted": Case("avg_pool2d", (9, 4), (4, 1, 2), {"count_include_pad": False}),
    "avg, ceil, clipped window": Case("avg_pool2d", (10, 5), (4, 3, 1), {"ceil_mode": True}),
    "avg, ceil, clipped, not counted": Case(
        "avg_pool2d", (10, 5), (4, 3, 2), {"ceil_mode": True, "count_include_pad": False}
    ),
    "avg, divisor": Case("avg_pool2d", (10, 5), (4, 3, 2), {"ceil_mode": True, "divisor_override": 5}),
    "avg, divisor 3d": Case("avg_pool3d", (2, 10, 3), (2,), {"ceil_mode": True, "divisor_override": 3}),
    "lp": Case("lp_pool2d", (9, 4), (2.0, 3, 2), values="positive"),
    "lp, ceil": Case("lp_pool2d", (9, 5), (3, (2, 3)), {"ceil_mode": True}, values="positive"),
    "lp 1d": Case("lp_pool1d", (9,), (2, 3, 2)),
    "lp 3d": Case("lp_pool3d", (2, 9, 3), (1.5, 2), values="positive"),
    "lp, inf": Case("lp_pool2d", (9, 4), (float("inf"), 3, 2)),
    "lp, -inf": Case("lp_pool2d", (9, 4), (float("-inf"), 3, 2)),
    "width sharded": Case("max_pool2d", (5, 9), (3, 1, 1), INDICES, layout="data _ _ domain", mesh="data=2,domain=2"),
    "channels sharded": Case("max_pool2d", (5, 9), (3, 1, 1), INDICES, layout="_ domain _ _"),
    "a data rank empty": Case("max_pool2d", (5, 4), (3, 1, 1), INDICES, batch=1, mesh="data=2,domain=2"),
    "a data rank empty, 1d": Case("max_pool1d", (5,), (3, 1, 1), INDICES, batch=3, mesh="data=4"),
    "int64": Case("max_pool2d", (5, 4), (3, 1, 1), INDICES, dtype=torch.int64, values="ties"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["max_pool2d", "avg_pool2d"])
def test_windows_are_rounded_as_by_torch(op: str, dtype: torch.dtype) -> None:
    run_ranks(rounded_alike, 4, Case(op, (9, 5), (3, 2, 1), {"ceil_mode": True}, dtype=dtype))


def rounded_alike(case: Case) -> None:
    x, layouts, mesh = case.tensor(), [case.layout_of(case.tensor())], mesh_for(case.mesh)
    assert_same(case, [x], mesh=mesh, layouts=layouts, gradients=False, tolerance=0.0)
    # gradients of rows that several ranks read are added up in another order
    assert_same(case, [x], mesh=mesh, layouts=layouts, tolerance=2 * torch.finfo(case.dtype).eps)


@pytest.mark.parametrize(
    ("n", "k", "s", "p", "d"),
    [(8, 2, 2, 0, 1), (37, 2, 2, 0, 1), (37, 3, 2, 1, 1), (9, 7, 1, 3, 1), (13, 2, 3, 0, 1), (16, 3, 1, 1, 4)],
)
def test_sends_only_the_rows_that_windows_read(n: int, k: int, s: int, p: int, d: int) -> None:
    sent = check(Case("max_pool2d", (n, 3), ((k, 1), (s, 1), (p, 0), (d, 1)), batch=1))
    out = (n + 2 * p - d * (k - 1) - 1) // s + 1
    need = [{i * s + j * d - p for i in range(a, b) for j in range(k)} & set(range(n)) for a, b in chunks(out, 4)]
    least = [sum(len(need[q] & set(range(a, b))) for q in range(4) if q != r) for r, (a, b) in enumerate(chunks(n, 4))]
    assert sent == [rows * 8 * 2 * 3 for rows in least]


def placements_and_bytes(case: Case) -> tuple[Any, int]:
    x = case.tensor()
    with record() as log, spmd(on_gather="error"):
        y = case(shard(x, mesh_for(case.mesh), case.layout_of(x)))
    return tuple(y.placements), log.num_bytes()


@pytest.mark.parametrize("op", ["max_pool2d", "avg_pool2d"])
def test_output_stays_sharded_and_aligned_windows_send_nothing(op: str) -> None:
    for placements, sent in run_ranks(placements_and_bytes, 4, Case(op, (37, 4), (2,))):
        assert placements == (Shard(0), Shard(2), Replicate())
        assert sent == 0


def modules_are_same() -> None:
    x = torch.randn(2, 3, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layers = [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2, return_indices=True, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.LPPool2d(2, 3),
    ]
    for layer in layers:
        assert_same(layer, [x], mesh=mesh_for("data=2,domain=2"))
    assert_same(nn.MaxPool3d(2), [x[None]], layouts=["_ _ _ domain _"], mesh=mesh_for("data=2,domain=2"))
    line = x[:, :, :, 0].contiguous()
    for one in (nn.MaxPool1d(2), nn.MaxPool1d(2, return_indices=True), nn.AvgPool1d(2), nn.LPPool1d(2, 2)):
        assert_same(one, [line], layouts=["data _ domain"], mesh=mesh_for("data=2,domain=2"))
    for function, value, layout in (
        (torch.max_pool1d, line, "data _ domain"),
        (torch.max_pool1d_with_indices, line, "data _ domain"),
        (torch.max_pool2d, x, "data _ domain _"),
        (torch.max_pool3d, x[None], "_ _ _ domain _"),
        (F.max_pool2d_with_indices, x, "data _ domain _"),
        (torch.avg_pool1d, line, "data _ domain"),
    ):
        assert_same(lambda v, f=function: f(v, 2), [value], layouts=[layout], mesh=mesh_for("data=2,domain=2"))
        assert_same(
            lambda v, f=function: f(input=v, kernel_size=2, stride=1),
            [value],
            layouts=[layout],
            mesh=mesh_for("data=2,domain=2"),
        )


def test_modules_and_all_names_of_the_functions() -> None:
    run_ranks(modules_are_same, 4)


def differs(case: Case) -> str:
    x = case.tensor()
    kinds: list[type[BaseException] | None] = []
    with record() as log:
        for value in (x, shard(x, mesh_for(case.mesh), case.layout_of(x))):
            try:
                with spmd(on_gather="error"):
                    case(value)
            except Exception as error:
                kinds.append(type(error))
            else:
                kinds.append(None)
    return "" if kinds[0] is not None and kinds[0] is kinds[1] and not log.entries else f"{kinds} {log.entries}"


WRONG = {
    "padding too large": Case("max_pool2d", (5, 4), (2, 1, 2)),
    "padding too large, dilated": Case("max_pool2d", (9, 4), ((3, 1), 1, (2, 0), (2, 1))),
    "no kernel": Case("max_pool2d", (5, 4), (0,)),
    "no stride": Case("max_pool2d", (5, 4), (2, 0)),
    "no dilation": Case("max_pool2d", (5, 4), (2, 1, 0, 0)),
    "kernel too large": Case("max_pool2d", (5, 4), (6, 1)),
    "kernel too large, 1d": Case("max_pool1d", (5,), (6, 1)),
    "mean: padding too large": Case("avg_pool2d", (5, 4), (2, 1, 2)),
    "mean: kernel larger than the grid, 3d": Case("avg_pool3d", (1, 3, 3), ((2, 1, 1), 1, (1, 0, 0))),
    "mean: kernel larger than the sharded grid, 3d": Case("avg_pool3d", (3, 1, 3), ((1, 2, 1), 1, (0, 1, 0))),
    "mean: divisor 0": Case("avg_pool2d", (5, 4), (2,), {"divisor_override": 0}),
    "mean: too many numbers": Case("avg_pool2d", (5, 4), ((2, 2, 2),)),
    "lp: kernel too large": Case("lp_pool2d", (5, 4), (2, 6)),
}


@pytest.mark.parametrize("name", WRONG)
def test_raises_what_torch_raises(name: str) -> None:
    assert run_ranks(differs, 4, WRONG[name]) == [""] * 4


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nd = draw(st.sampled_from([1, 2, 2, 2, 3]))
    kind = draw(st.sampled_from(["max", "max", "avg", "avg", "lp"]))
    mesh = draw(st.sampled_from([*MESHES, *([TWO_AXES] if nd > 1 else [])]))
    domain = max(nd - 2, 0)
    ceil = draw(st.booleans())
    size, kernel, stride, dilation, pads = [], [], [], [], []
    for dim in range(nd):
        wide = dim == domain
        n = draw(st.integers(1, 14 if wide else 5))
        k = draw(st.integers(1, 7 if wide else 3))
        d = draw(st.integers(1, 3)) if kind == "max" else 1
        span = (k - 1) * d + 1
        p = 0 if kind == "lp" else draw(st.integers(0, k // 2))
        if n + 2 * p < span or (kind != "max" and nd == 3 and n < k):  # torch refuses the last
            k, p = 1, 0
        s = draw(st.integers(1, 4 if wide else 2))
        size.append(n), kernel.append(k), stride.append(s), dilation.append(d), pads.append(p)
        taps = [[i * s - p + j * d for j in range(k)] for i in range(-(-(n + 2 * p) // s) + 1) if i * s - p < n]
        # A dilated window without one row of the grid under it: torch's own backward writes out of bounds.
        assume(all(any(0 <= t < n for t in window) for window in taps))
    batch = draw(st.sampled_from([None, 1, 2, 3, 5]))
    spatial = ["_"] * nd
    spatial[domain] = "domain"
    if mesh == TWO_AXES:
        spatial[-1] = "tensor"
    layout = " ".join((["_"] if batch is None else ["data", "_"]) + spatial)
    common = {"mesh": mesh, "layout": layout, "batch": batch}
    step = draw(st.sampled_from([tuple(stride), None]))
    if kind == "lp":
        norm = draw(st.sampled_from([1.0, 2.0, 3.0, float("inf")]))
        window = (kernel[0], stride[0]) if nd == 1 else (tuple(kernel), tuple(stride))
        return Case(f"lp_pool{nd}d", tuple(size), (norm, *window, ceil), values="positive", **common)
    if kind == "avg":
        options: dict[str, Any] = {"ceil_mode": ceil, "count_include_pad": draw(st.booleans())}
        if nd > 1:
            options["divisor_override"] = draw(st.sampled_from([None, None, 3]))
        return Case(f"avg_pool{nd}d", tuple(size), (tuple(kernel), step, tuple(pads)), options, **common)
    options = {"ceil_mode": ceil, "return_indices": draw(st.booleans())}
    args = (tuple(kernel), step, tuple(pads), tuple(dilation))
    values = draw(st.sampled_from(["normal", "ties", "special", "-inf"]))
    return Case(f"max_pool{nd}d", tuple(size), args, options, values=values, **common)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_property(case: Case) -> None:
    check(case)


@pytest.mark.long
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_property_long(case: Case) -> None:
    check(case)


def test_dilated_window_over_nothing() -> None:
    case = Case("max_pool2d", (1, 4), ((2, 1), 1, (1, 0), (2, 1)))
    run_ranks(forward_is_same, 4, replace(case, size=(1, 4)))


def forward_is_same(case: Case) -> None:
    x = case.tensor()
    assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], gradients=False)
