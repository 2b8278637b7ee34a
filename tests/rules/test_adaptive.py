"""Adaptive pools: the windows, positions and gradients of one process, sharded where there is a row for every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.intervals import adaptive_rows, adaptive_window, chunks
from meshpar.record import record
from meshpar.rules.adaptive import partial_segments, segments
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
    """One adaptive pool: function, sizes, mesh; `values` says what the numbers are like."""

    op: str
    size: tuple[int, ...]
    output_size: Any
    indices: bool = False
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
        return x

    def layout_of(self, x: Tensor) -> str:
        if self.layout is not None:
            return self.layout
        lead = "_" if self.batch is None else "data _"
        return f"{lead} {' '.join(['_'] * (len(self.size) - 2))} domain {'_' if len(self.size) > 1 else ''}"

    def __call__(self, x: Tensor) -> Any:
        options = {"return_indices": True} if self.indices else {}
        return getattr(F, self.op)(x, self.output_size, **options)


def same(case: Case) -> tuple[int, set[str]]:
    """Check a case on this rank; give the bytes sent forward and the kinds of communication."""
    x = case.tensor()
    report = assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], tolerance=1e-12)
    assert not [e for e in report.log.select(backward=True) if e.kind != "halo"]
    return report.log.num_bytes(backward=False), {e.kind for e in report.log.entries}


def check(case: Case) -> list[tuple[int, set[str]]]:
    return run_ranks(same, MESHES.get(case.mesh, 4), case)


AVG, MAX = "adaptive_avg_pool2d", "adaptive_max_pool2d"
CASES = {
    "field 22: global mean": Case(AVG, (8, 6), 1),
    "field 22: global maximum": Case(MAX, (8, 6), 1, indices=True),
    "global mean, uneven": Case(AVG, (5, 3), (1, 1), batch=3, mesh="data=2,domain=2"),
    "global maximum, 1 row over 4": Case(MAX, (1, 3), 1, indices=True),
    "global mean, 1 row over 4": Case(AVG, (1, 3), 1),
    "fewer outputs than ranks": Case(AVG, (9, 5), (3, 2)),
    "fewer outputs than ranks, maximum": Case(MAX, (9, 5), (3, 2), indices=True),
    "as many outputs as ranks": Case(AVG, (9, 5), (4, 2)),
    "as many outputs as ranks, maximum": Case(MAX, (9, 5), (4, 2), indices=True),
    "one rank without outputs": Case(MAX, (13, 5), (5, 2), indices=True),
    "one rank without outputs, mean": Case(AVG, (13, 5), (5, 2)),
    "more outputs than rows": Case(AVG, (3, 5), (7, 2)),
    "more outputs than rows, maximum": Case(MAX, (3, 5), (7, 9), indices=True),
    "several periods": Case(AVG, (36, 3), (24, 2)),
    "None keeps the size": Case(AVG, (9, 5), (None, 2)),
    "None keeps the size, maximum": Case(MAX, (9, 5), (None, 1), indices=True),
    "721 to 90": Case(AVG, (721, 2), (90, 1)),
    "1d": Case("adaptive_avg_pool1d", (9,), 5),
    "1d, tuple": Case("adaptive_avg_pool1d", (9,), (2,)),
    "1d, maximum": Case("adaptive_max_pool1d", (9,), 2, indices=True),
    "3d": Case("adaptive_avg_pool3d", (3, 9, 4), (2, 5, None)),
    "3d, maximum": Case("adaptive_max_pool3d", (3, 9, 4), (2, 1, 3), indices=True),
    "unbatched": Case(AVG, (9, 5), 2, batch=None),
    "unbatched, maximum": Case(MAX, (9, 5), 5, indices=True, batch=None),
    "ties": Case(MAX, (9, 6), 2, indices=True, values="ties"),
    "-inf": Case(MAX, (9, 6), 2, indices=True, values="-inf"),
    "NaN": Case(MAX, (9, 6), 2, indices=True, values="special"),
    "NaN, sharded": Case(MAX, (9, 6), 5, indices=True, values="special"),
    "NaN, width sharded": Case(MAX, (4, 9), (2, 1), values="special", indices=True, layout="_ _ _ domain"),
    "ties, width sharded": Case(MAX, (4, 9), (1, 3), values="ties", indices=True, layout="_ _ _ domain"),
    "both dims sharded": Case(MAX, (9, 7), 1, values="ties", indices=True, mesh=TWO_AXES, layout="_ _ domain tensor"),
    "both dims sharded, NaN": Case(
        MAX, (9, 7), (1, 3), values="special", indices=True, mesh=TWO_AXES, layout="_ _ domain tensor"
    ),
    "both dims sharded, mean": Case(AVG, (9, 7), (3, 1), mesh=TWO_AXES, layout="_ _ domain tensor"),
    "both dims sharded, global mean": Case(AVG, (1, 7), 1, mesh=TWO_AXES, layout="_ _ domain tensor"),
    "channels sharded": Case(AVG, (5, 3), 1, layout="_ domain _ _"),
    "channels sharded, maximum": Case(MAX, (5, 3), 1, layout="_ domain _ _", indices=True),
    "a data rank empty": Case(MAX, (5, 3), 2, batch=1, mesh="data=2,domain=2", indices=True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def forward_is_same(case: Case) -> None:
    x = case.tensor()
    assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], gradients=False)


@pytest.mark.parametrize("case", [Case(AVG, (5, 3), (0, 2)), Case(MAX, (5, 3), (2, 0), indices=True)], ids=str)
def test_no_outputs_at_all(case: Case) -> None:
    run_ranks(forward_is_same, 4, case)  # torch has no backward for it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    run_ranks(rounded, 4, Case(AVG, (721, 3), 1, dtype=dtype))


def rounded(case: Case) -> None:
    x = case.tensor()
    eps = torch.finfo(case.dtype).eps
    assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], tolerance=2 * eps)


def test_fewer_outputs_than_ranks_moves_sums_alone() -> None:
    for sent, kinds in check(Case(AVG, (37, 6), (3, 2))):
        assert kinds == {"reduction"}
        assert sent == 2 * (2 * 2 * 3 * 2) * 8 * 3 // 4  # a ring all-reduce of the outputs


def test_fewer_outputs_than_ranks_moves_maxima_alone() -> None:
    for sent, kinds in check(Case(MAX, (37, 6), (3, 2))):
        assert kinds == {"reduction"}
        assert sent == (2 * 2 * 3 * 2) * (8 + 8) * 3  # values and positions, to each other rank


@pytest.mark.parametrize(("n", "m"), [(37, 9), (8, 4), (9, 9), (5, 11), (13, 5)])
@pytest.mark.parametrize("op", [AVG, MAX])
def test_sends_only_the_rows_that_windows_read(op: str, n: int, m: int) -> None:
    found = check(Case(op, (n, 3), (m, 2), batch=1))
    need = [set(range(*adaptive_rows(outputs, n, m))) for outputs in chunks(m, 4)]
    least = [sum(len(need[q] & set(range(a, b))) for q in range(4) if q != r) for r, (a, b) in enumerate(chunks(n, 4))]
    assert [sent for sent, _ in found] == [rows * 8 * 2 * 3 for rows in least]


def placements(case: Case) -> tuple[Any, ...]:
    x = case.tensor()
    with record(), spmd(on_gather="error"):
        y = case(shard(x, mesh_for(case.mesh), case.layout_of(x)))
    return tuple(y.placements)


@pytest.mark.parametrize("op", [AVG, MAX])
def test_placements(op: str) -> None:
    kept, replicated = (Shard(0), Shard(2), Replicate()), (Shard(0), Replicate(), Replicate())
    assert run_ranks(placements, 4, Case(op, (9, 4), (4, 1))) == [kept] * 4
    assert run_ranks(placements, 4, Case(op, (9, 4), (3, 1))) == [replicated] * 4


def head_is_same(mesh: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 9, 5, generator=g, dtype=torch.float64)
    w = torch.randn(6, 4, generator=g, dtype=torch.float64)
    b = torch.randn(6, generator=g, dtype=torch.float64)

    def head(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1), w, b)

    report = assert_same(head, [x], weights=[w, b], mesh=mesh_for(mesh), gathers=True)
    assert not [e for e in report.log.gathers() if "pool" in e.op]


@pytest.mark.parametrize("mesh", ["data=1,domain=4", "data=2,domain=2"])
def test_a_classifier_head_has_the_gradients_of_one_process(mesh: str) -> None:
    run_ranks(head_is_same, 4, mesh)


def modules_are_same() -> None:
    x = torch.randn(2, 3, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = mesh_for("data=2,domain=2")
    for layer in (
        nn.AdaptiveAvgPool2d((5, None)),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d((5, None)),
        nn.AdaptiveMaxPool2d(1, return_indices=True),
    ):
        assert_same(layer, [x], mesh=mesh)
    line = x[:, :, :, 0].contiguous()
    for one in (
        nn.AdaptiveAvgPool1d(4),
        nn.AdaptiveMaxPool1d(1),
        nn.AdaptiveMaxPool1d(4, return_indices=True),
        lambda v: torch.adaptive_max_pool1d(v, 3),
        lambda v: torch.adaptive_avg_pool1d(v, 3),
        lambda v: F.adaptive_max_pool1d_with_indices(v, output_size=3),
    ):
        assert_same(one, [line], layouts=["data _ domain"], mesh=mesh)
    for three in (nn.AdaptiveAvgPool3d((None, 4, 1)), nn.AdaptiveMaxPool3d((None, 1, 2), return_indices=True)):
        assert_same(three, [x[None]], layouts=["_ _ _ domain _"], mesh=mesh)


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
    "negative": Case(AVG, (5, 4), -1),
    "negative, maximum": Case(MAX, (5, 4), -1),
    "three sizes": Case(AVG, (5, 4), (1, 2, 3)),
    "three sizes, maximum": Case(MAX, (5, 4), (1, 2, 3)),
    "None in 1d": Case("adaptive_avg_pool1d", (5,), None),
}


@pytest.mark.parametrize("name", WRONG)
def test_raises_what_torch_raises(name: str) -> None:
    assert run_ranks(differs, 4, WRONG[name]) == [""] * 4


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_segments_hold_the_windows_of_torch(n: int, m: int, p: int) -> None:
    for outputs in chunks(m, p):
        first = adaptive_rows(outputs, n, m)[0]
        at = outputs[0]
        for s in segments(outputs, n, m):
            assert s.start == (s.row - first if s.outputs else 0)
            for i in range(s.outputs):
                start, stop = adaptive_window(i, s.rows, s.size)
                assert (start + s.row, stop + s.row) == adaptive_window(at + i, n, m)
            at += s.outputs
        assert at == outputs[1]
    for i in range(m):
        shares = [partial_segments(own, n, m)[i] for own in chunks(n, p)]
        assert sum(s.scale for s in shares) == pytest.approx(1)
        rows = [row for s in shares for row in range(s.row, s.row + s.rows)]
        assert rows == list(range(*adaptive_window(i, n, m)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nd = draw(st.sampled_from([1, 2, 2, 2, 3]))
    mesh = draw(st.sampled_from([*MESHES, *([TWO_AXES] if nd > 1 else [])]))
    domain = max(nd - 2, 0)
    size = tuple(draw(st.integers(1, 14 if dim == domain else 5)) for dim in range(nd))
    out: list[int | None] = [draw(st.integers(1, 11 if dim == domain else 4)) for dim in range(nd)]
    if nd > 1 and draw(st.booleans()):
        out[draw(st.integers(0, nd - 1))] = None
    batch = draw(st.sampled_from([None, 1, 2, 3, 5]))
    spatial = ["_"] * nd
    spatial[domain] = "domain"
    if mesh == TWO_AXES:
        spatial[-1] = "tensor"
    layout = " ".join((["_"] if batch is None else ["data", "_"]) + spatial)
    kind = draw(st.sampled_from(["avg", "max", "max"]))
    return Case(
        f"adaptive_{kind}_pool{nd}d",
        size,
        tuple(out),
        indices=kind == "max" and draw(st.booleans()),
        mesh=mesh,
        layout=layout,
        batch=batch,
        values=draw(st.sampled_from(["normal", "ties", "special", "-inf"])) if kind == "max" else "normal",
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
