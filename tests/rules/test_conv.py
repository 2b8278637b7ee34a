"""Convolutions: the numbers and gradients of one process, no gather, and no byte more than the windows read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.intervals import chunks
from meshpar.pieces import whole
from meshpar.record import record
from meshpar.rules.conv import convolve
from meshpar.scope import spmd
from meshpar.testing.equivalence import assert_same, check_close, sum_parts
from meshpar.testing.meshes import mesh_for
from meshpar.testing.pool import RankError, run_ranks

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
    """One convolution: sizes, arguments, mesh."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    padding_mode: str = "zeros"
    bias: bool = True
    mesh: str = "data=1,domain=4"
    layout: str | None = None
    batch: int | None = 2
    channels: tuple[int, int] = (2, 3)
    channels_last: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def op(self) -> str:
        return f"conv{len(self.size)}d"

    def tensors(self) -> tuple[Tensor, list[Tensor]]:
        g = torch.Generator().manual_seed(7)
        inner, outer = self.channels[0] * self.groups, self.channels[1] * self.groups
        lead = (inner,) if self.batch is None else (self.batch, inner)
        x = torch.randn(*lead, *self.size, generator=g, dtype=self.dtype)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        weights = [torch.randn(outer, self.channels[0], *self.kernel, generator=g, dtype=self.dtype)]
        if self.bias:
            weights.append(torch.randn(outer, generator=g, dtype=self.dtype))
        return x, weights

    def layout_of(self, x: Tensor) -> str:
        if self.layout is not None:
            return self.layout
        lead = "_" if self.batch is None else "data _"
        return f"{lead} {' '.join(['_'] * (len(self.size) - 2))} domain {'_' if len(self.size) > 1 else ''}"

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        if self.padding_mode == "zeros":
            function = getattr(F, self.op)
            bias = weights[1] if self.bias else None
            return function(x, weights[0], bias, self.stride, self.padding, self.dilation, self.groups)
        return convolve(
            x,
            *weights,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=self.padding_mode,
            op=self.op,
        )


def same(case: Case) -> list[int]:
    """Check a case on this rank; give the rows sent forward (bytes over those of one row of the input)."""
    x, weights = case.tensors()
    report = assert_same(case, [x], mesh=mesh_for(case.mesh), layouts=[case.layout_of(x)], weights=weights)
    halo = report.log.select(kind="halo")
    assert all(e.kind == "halo" or (e.backward and e.axis == "tensor") for e in report.log.entries)
    return [sum(e.num_bytes for e in halo if e.backward is b) for b in (False, True)]


def check(case: Case) -> list[list[int]]:
    return run_ranks(same, MESHES.get(case.mesh, 4), case)


def rows_sent(case: Case) -> list[int]:
    """Give, rank by rank, the rows of the domain axis sent forward."""
    per_row = 8 * case.channels[0] * case.groups * (case.batch or 1)
    for n in case.size[:-2] + case.size[-1:] if len(case.size) > 1 else ():
        per_row *= n
    found = check(case)
    return [forward // per_row for forward, _ in found]


def rows_read(case: Case, n: int, lo: int, out: int, p: int) -> list[int]:
    """Count, by brute force, the rows of each rank that windows of other ranks read."""
    k, s, d = case.kernel[-2] if len(case.size) > 1 else case.kernel[0], case.stride, case.dilation
    need = [{i * s + j * d - lo for i in range(a, b) for j in range(k)} & set(range(n)) for a, b in chunks(out, p)]
    return [sum(len(need[q] & set(range(a, b))) for q in range(p) if q != r) for r, (a, b) in enumerate(chunks(n, p))]


CASES = {
    "field 1: k3 p1 on 8x8 over 2": Case((8, 8), (3, 3), padding=1, mesh="data=1,domain=2", batch=1),
    "field 1: 3d": Case((3, 8, 4), (3, 3, 3), padding=1),
    "field 1: stride and dilation, uneven": Case((11, 4), (3, 3), stride=2, dilation=2, padding=2),
    "field 12: domain of one": Case((9, 4), (3, 3), padding=1, mesh="data=4", batch=5),
    "field 13: k4 s1 p2": Case((8, 5), (4, 4), padding=2, mesh="data=1,domain=2"),
    "field 13: k2 s1 p0": Case((8, 5), (2, 2), mesh="data=1,domain=2"),
    "field 14: k3 s2 p1": Case((8, 5), (3, 3), stride=2, padding=1),
    "field 14: k3 d2 p2": Case((8, 5), (3, 3), dilation=2, padding=2),
    "field 14: k3 p0": Case((8, 5), (3, 3)),
    "field 16: k7 p3, 2 rows a rank": Case((8, 7), (7, 7), padding=3),
    "field 16: dilation 8 on 4 rows a rank": Case((16, 3), (3, 1), dilation=(8, 1), padding=(8, 0)),
    "field 17: 5 rows over 4": Case((5, 4), (3, 3), padding=1),
    "1 row over 4": Case((1, 4), (3, 3), padding=1),
    "721 rows over 4": Case((721, 3), (3, 3), padding=1, channels=(1, 1)),
    "unbatched": Case((9, 4), (3, 3), padding=1, batch=None),
    "unbatched 1d": Case((9,), (3,), padding=1, batch=None),
    "unbatched 3d": Case((2, 9, 2), (1, 3, 2), batch=None),
    "1d": Case((13,), (5,), stride=2, padding=2),
    "same, even kernel": Case((7, 6), (4, 2), padding="same"),
    "same, even kernel, dilated": Case((7, 6), (2, 4), padding="same", dilation=(3, 1)),
    "valid": Case((7, 6), (3, 2), padding="valid"),
    "grouped, without bias": Case((7, 3), (3, 3), padding=1, groups=2, bias=False),
    "depthwise": Case((7, 3), (3, 3), padding=1, groups=3, channels=(1, 1)),
    "stride larger than the kernel": Case((13, 3), (2, 2), stride=4, padding=1),
    "reflect": Case((9, 5), (5, 3), padding=(2, 1), padding_mode="reflect"),
    "replicate": Case((5, 5), (7, 3), padding=(3, 1), padding_mode="replicate"),
    "circular": Case((8, 5), (3, 3), padding=1, padding_mode="circular"),
    "field 8: circular over 2": Case((8, 5), (3, 3), padding=1, padding_mode="circular", mesh="data=1,domain=2"),
    "circular, asymmetric": Case((5, 5), (4, 2), padding="same", padding_mode="circular"),
    "reflect of the other dim": Case((1, 5), (1, 3), padding=(0, 2), padding_mode="reflect"),
    "both dims sharded": Case((7, 5), (3, 3), padding=1, mesh=TWO_AXES, layout="_ _ domain tensor"),
    "both dims sharded, corners": Case(
        (5, 9), (4, 5), padding="same", padding_mode="circular", mesh=TWO_AXES, layout="_ _ domain tensor"
    ),
    "both dims sharded, a rank empty": Case((1, 1), (3, 3), padding=1, mesh=TWO_AXES, layout="_ _ domain tensor"),
    "width sharded": Case((5, 9), (3, 3), padding=1, layout="data _ _ domain", mesh="data=2,domain=2"),
    "depth sharded": Case((9, 3, 2), (3, 2, 1), padding=(1, 0, 0), layout="data _ domain _ _"),
    "a data rank empty": Case((5, 4), (3, 3), padding=1, batch=1, mesh="data=2,domain=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    "case",
    [
        Case((8, 5), (3, 3), padding=1),
        Case((8, 5), (7, 3), padding=3),
        Case((37, 5), (3, 3), padding=1, stride=2),
        Case((16, 3), (3, 3), dilation=8, padding=8),
        Case((13, 4), (2, 2), stride=3),
        Case((5, 4), (3, 3), padding=1),
        Case((12, 4), (1, 1)),
    ],
    ids=str,
)
def test_sends_only_the_rows_that_windows_read(case: Case) -> None:
    n, k = case.size[0], case.kernel[0]
    out = (n + 2 * case.padding - case.dilation * (k - 1) - 1) // case.stride + 1
    assert rows_sent(case) == rows_read(case, n, case.padding, out, 4)


def look(case: Case) -> tuple[Any, ...]:
    x, weights = case.tensors()
    sharded = shard(x, mesh_for(case.mesh), case.layout_of(x))
    if case.channels_last:  # a piece of a tensor that is cut along its rows has gaps
        piece = sharded.to_local().contiguous(memory_format=torch.channels_last)
        sharded = whole(piece, sharded.device_mesh, sharded.placements, x.shape)
    with record() as log, spmd(on_gather="error"):
        y = case(sharded, *weights)
    assert isinstance(y, DTensor)
    last = y.to_local().is_contiguous(memory_format=torch.channels_last) if y.dim() == 4 else False
    return tuple(y.placements), last and not y.to_local().is_contiguous(), log.num_bytes()


def test_output_stays_sharded() -> None:
    for placements, _, sent in run_ranks(look, 4, Case((8, 4), (3, 3), padding=1)):
        assert placements == (Shard(0), Shard(2), Replicate())
        assert sent > 0


def test_field_12_axis_of_one_rank_sends_nothing() -> None:
    assert [sent for *_, sent in run_ranks(look, 4, CASES["field 12: domain of one"])] == [0] * 4
    alone = replace(CASES["field 12: domain of one"], mesh="data=1")
    assert [sent for *_, sent in run_ranks(look, 1, alone)] == [0]


def test_field_18_channels_last_is_kept() -> None:
    case = Case((8, 4), (3, 3), padding=1, channels_last=True, channels=(4, 4))
    assert all(last for _, last, _ in run_ranks(look, 4, case))
    check(case)


def same_with_module(layer: torch.nn.Module, shape: tuple[int, ...], mesh: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names, weights = zip(*layer.double().named_parameters(), strict=True)

    def call(x: Tensor, *own: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, own, strict=True)), (x,))

    assert_same(call, [x], mesh=mesh_for(mesh), weights=[w.detach() for w in weights])


def test_modules() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(2, 4, 3, padding=1, stride=2)
    run_ranks(same_with_module, 4, layer, (2, 2, 9, 5), "data=2,domain=2")


def differs(case: Case) -> str:
    """Give what torch and the rule raise; empty when they raise the same type, before any communication."""
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
        {"stride": 0},
        {"dilation": 0},
        {"padding": -1},
        {"padding": "some"},
        {"padding": "same", "stride": 2},
        {"kernel": (9, 9)},
        {"stride": (1, 2, 3)},
        {"batch": 2, "size": (5,), "kernel": (3, 3)},
        {"padding": 5, "padding_mode": "reflect"},
        {"padding": 6, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "reflect", "size": (1, 3)},
    ],
    ids=str,
)
def test_raises_what_torch_raises(change: dict[str, Any]) -> None:
    case = replace(Case((5, 4), (3, 3)), **change)
    assert run_ranks(differs, 4, case) == [""] * 4


def wrong_weights(weight: tuple[int, ...], bias: tuple[int, ...], dtype: torch.dtype, groups: int) -> bool:
    x = shard(torch.zeros(1, 4, 8, 3), mesh_for("data=1,domain=4"))
    with record() as log, spmd(on_gather="error"), pytest.raises(RuntimeError):
        F.conv2d(x, torch.zeros(weight, dtype=dtype), torch.zeros(bias, dtype=dtype), groups=groups)
    return not log.entries


@pytest.mark.parametrize(
    "args",
    [
        ((4, 3, 3, 3), (4,), torch.float32, 1),
        ((4, 4, 3, 3), (3,), torch.float32, 1),
        ((4, 4, 3, 3), (1,), torch.float32, 1),
        ((4, 4, 3, 3), (4,), torch.float64, 1),
        ((5, 2, 3, 3), (5,), torch.float32, 2),
    ],
    ids=str,
)
def test_wrong_weights_raise_before_any_message(args: tuple[Any, ...]) -> None:
    assert all(run_ranks(wrong_weights, 4, *args))


def under_autocast() -> None:
    x, weights = Case((9, 4), (3, 3), padding=1, dtype=torch.float32).tensors()

    def call(x: Tensor, *own: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.conv2d(F.conv2d(x, *own, padding=1)[:, :2], *own, padding=1)

    assert_same(call, [x], mesh=mesh_for("data=2,domain=2"), weights=weights, tolerance=0.05, gathers=True)


def test_autocast_casts_as_on_one_process() -> None:
    run_ranks(under_autocast, 4)


def second_order(case: Case) -> None:
    x, weights = case.tensors()
    mesh = mesh_for(case.mesh)
    plain, sharded = x.requires_grad_(), shard(x, mesh, case.layout_of(x)).requires_grad_()
    found = []
    for value in (plain, sharded):
        own = [w.clone().requires_grad_() for w in weights]
        with spmd(on_gather="error"):
            y = case(value, *own)
        (g,) = torch.autograd.grad(y, value, grad_outputs=y, create_graph=True)
        found.append([g, *torch.autograd.grad(g, [value, *own[:1]], grad_outputs=g.detach())])
    for i, (expected, other) in enumerate(zip(*found, strict=True)):
        total = other.full_tensor() if isinstance(other, DTensor) else other.clone()
        if not isinstance(other, DTensor):
            sum_parts(total, mesh)
        check_close(f"second order {i}", total, expected, 1e-9)


def test_twice_differentiable() -> None:
    run_ranks(second_order, 4, Case((9, 4), (3, 3), padding=1))


def gathers(name: str) -> tuple[int, str]:
    """Run what has no sharded form (yet); give the number of gathers in the record."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 6, 3, generator=g, dtype=torch.float64)
    w = torch.randn(2, 4, 3, 3, generator=g, dtype=torch.float64)
    if name == "channels sharded":
        inputs, layouts, weights = [x], ["data domain _ _"], [w]
    else:  # the weight is an activation and the input is plain
        inputs, layouts, weights = [w], ["_ _ _ _"], [x]
    mesh = mesh_for("data=1,domain=4")

    def call(a: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(a, b) if name == "channels sharded" else F.conv2d(b, a)

    report = assert_same(call, inputs, layouts=layouts, weights=weights, mesh=mesh, gathers=True)
    return len(report.log.gathers()), name


def test_sharded_channels_are_gathered_and_said() -> None:
    assert run_ranks(gathers, 4, "channels sharded")[0][0] == 1


def test_plain_input_with_an_activation_as_weight() -> None:
    run_ranks(gathers, 4, "plain input")


def with_dtensor_weight(layout: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 4, generator=g, dtype=torch.float64)
    w = torch.randn(4, 3, 3, 3, generator=g, dtype=torch.float64)
    mesh = mesh_for("data=2,domain=2")
    assert_same(lambda a, b: F.conv2d(a, b, padding=1), [x, w], layouts=[None, layout], mesh=mesh)


@pytest.mark.parametrize("layout", ["_ _ _ _", "domain _ _ _"])
def test_weight_may_be_a_dtensor(layout: str) -> None:
    run_ranks(with_dtensor_weight, 4, layout)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nd = draw(st.sampled_from([1, 2, 2, 2, 3]))
    mesh = draw(st.sampled_from([*MESHES, *([TWO_AXES] if nd > 1 else [])]))
    domain = max(nd - 2, 0)
    small = st.integers(1, 3)
    size, kernel, stride, dilation, pads = [], [], [], [], []
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    named = draw(st.sampled_from([None, None, None, "same", "valid"]))
    for dim in range(nd):
        wide = dim == domain
        n = draw(st.integers(1, 14 if wide else 5))
        k = draw(st.integers(1, 7 if wide else 3))
        d = draw(small if wide else st.integers(1, 2))
        s = 1 if named == "same" else draw(st.integers(1, 4 if wide else 2))
        span = (k - 1) * d + 1
        most = {"zeros": span, "reflect": n - 1, "replicate": span, "circular": n}[mode]
        if named == "same" and span - 1 - (span - 1) // 2 > most:
            k, span = 1, 1
        if named == "valid" and span > n:
            k, span = 1, 1
        p = draw(st.integers(0, most))
        if named is None and n + 2 * p < span:
            k = 1
        size.append(n), kernel.append(k), stride.append(s), dilation.append(d), pads.append(p)
    batch = draw(st.sampled_from([None, 1, 2, 3, 5]))
    spatial = ["_"] * nd
    spatial[domain] = "domain"
    if mesh == TWO_AXES:
        spatial[-1] = "tensor"
    lead = ["_"] if batch is None else ["data", "_"]
    return Case(
        tuple(size),
        tuple(kernel),
        stride=tuple(stride),
        padding=named or tuple(pads),
        dilation=tuple(dilation),
        groups=draw(st.integers(1, 2)),
        padding_mode=mode,
        bias=draw(st.booleans()),
        mesh=mesh,
        layout=" ".join(lead + spatial),
        batch=batch,
        channels=draw(st.sampled_from([(1, 1), (2, 1), (1, 2)])),
        channels_last=nd == 2 and batch is not None and draw(st.booleans()),
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


def test_a_wrong_number_would_be_seen() -> None:
    with pytest.raises(RankError, match="Difference"):
        run_ranks(sabotaged, 2)


def sabotaged() -> None:
    x = torch.ones(1, 1, 8, 3, dtype=torch.float64)
    w = torch.ones(1, 1, 3, 3, dtype=torch.float64)

    def call(x: Tensor, w: Tensor) -> Tensor:
        piece = x.to_local() if isinstance(x, DTensor) else x
        out = F.conv2d(piece, w, padding=1)
        if not isinstance(x, DTensor):
            return out
        return DTensor.from_local(out, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())

    assert_same(call, [x], mesh=mesh_for("data=1,domain=2"), weights=[w])
