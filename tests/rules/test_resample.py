"""`F.interpolate` on sharded rows against one process."""

import functools
import unittest.mock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshpar.batch import gather, shard
from meshpar.intervals import chunks
from meshpar.rules import resample
from meshpar.rules.resample import taps
from meshpar.scope import spmd
from meshpar.testing import RankError, run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for

MESHES = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}
LAYOUTS = {3: "data _ domain", 4: "data _ domain _", 5: "data _ domain _ _"}
MODES = {
    3: ("nearest", "nearest-exact", "linear", "area"),
    4: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    5: ("nearest", "nearest-exact", "trilinear", "area"),
}


def image(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(dtype)


def transposed(shape: tuple[int, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch's own backward is the transpose of its forward: for some sizes it is not."""
    if kwargs.get("mode") != "bicubic" and not kwargs.get("antialias"):
        return True
    x = image(shape).requires_grad_()
    y = F.interpolate(x, **kwargs)
    g = torch.rand_like(y)
    (back,) = torch.autograd.grad(y, x, g)
    return abs(float((back * x).sum() - (y * g).sum())) < 1e-9


def check(spec: str, shape: tuple[int, ...], layout: str, kwargs: dict[str, Any], **options: Any) -> int:
    """Compare with one process; give the bytes that this rank sent forward."""
    fn = functools.partial(F.interpolate, **kwargs)
    dtype = options.pop("dtype", torch.float64)
    options.setdefault("gradients", transposed(shape, kwargs))
    report = assert_same(fn, [image(shape, dtype)], mesh=mesh_for(spec), layouts=[layout], **options)
    return report.log.num_bytes(backward=False)


def check_module(spec: str, layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert_same(layer, [image(shape)], mesh=mesh_for(spec))


def check_sharded(spec: str, shape: tuple[int, ...], kwargs: dict[str, Any]) -> tuple[bool, int]:
    x = shard(image(shape), mesh_for(spec))
    with spmd(on_gather="error"):
        y = F.interpolate(x, **kwargs)
    return y.placements == x.placements, y.to_local().shape[2]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize(("n", "out"), [(181, 192), (721, 720)])
@pytest.mark.parametrize("spec", ["data=1,domain=4", "data=1,domain=3"])
def test_field_25_size(mode: str, n: int, out: int, spec: str) -> None:
    choices: list[dict[str, Any]] = [{}]
    if mode in ("bilinear", "bicubic"):
        choices = [{"align_corners": False}, {"align_corners": True}]
    for more in choices:
        run_ranks(check, MESHES[spec], spec, (1, 2, n, 3), LAYOUTS[4], {"size": (out, 4), "mode": mode, **more})


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [192 / 181, 720 / 721, (1.3, 0.7), 0.31, 2])
def test_field_25_scale_factor(mode: str, factor: Any) -> None:
    choices: list[dict[str, Any]] = [{}]
    if mode in ("bilinear", "bicubic"):
        choices = [{"align_corners": False}, {"align_corners": True}]
    for n in (181,):
        for more in choices:
            for recompute in (None, True):
                kwargs = {"scale_factor": factor, "mode": mode, "recompute_scale_factor": recompute, **more}
                run_ranks(check, 4, "data=1,domain=4", (1, 1, n, 5), LAYOUTS[4], kwargs)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_bytes_are_those_of_the_windows(mode: str) -> None:
    n, out, p = 11, 25, 4
    real = torch.float64
    made = taps(n, out, None, mode, align=False, antialias=False, real=real, others=(3,))
    sent = run_ranks(check, p, "data=1,domain=4", (1, 2, n, 3), LAYOUTS[4], {"size": (out, 3), "mode": mode})
    least = 0
    for (a, b), (lo, hi) in zip(chunks(out, p), chunks(n, p), strict=True):
        rows = set(range(int(made.rows[:, a:b].min()), int(made.rows[:, a:b].max()) + 1)) if b > a else set()
        least += len(rows - set(range(lo, hi))) * 2 * 3 * 8
    assert sum(sent) == least


def test_one_rank_along_the_domain_sends_nothing() -> None:
    for kwargs in ({"scale_factor": 2}, {"size": 7, "mode": "bicubic"}):
        assert sum(run_ranks(check, 4, "data=4", (5, 2, 6, 3), LAYOUTS[4], kwargs)) == 0


def test_output_stays_sharded() -> None:
    found = run_ranks(check_sharded, 4, "data=1,domain=4", (1, 1, 5, 3), {"scale_factor": 2})
    assert [same for same, _ in found] == [True] * 4
    assert [rows for _, rows in found] == [b - a for a, b in chunks(10, 4)]


@pytest.mark.parametrize(
    ("mode", "align"),
    [("bilinear", False), ("bilinear", True), ("bicubic", False), ("bicubic", True), ("lanczos", False)],
)
@pytest.mark.parametrize("kwargs", [{"size": (5, 9)}, {"size": (40, 3)}, {"scale_factor": (0.3, 1.7)}])
def test_antialias(mode: str, align: bool, kwargs: dict[str, Any]) -> None:
    full = {**kwargs, "mode": mode, "align_corners": align, "antialias": True}
    run_ranks(check, 4, "data=1,domain=4", (1, 2, 17, 6), LAYOUTS[4], full)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("size", [(9, 13), (3, 4), (5, 2)])
def test_two_sharded_dims(mode: str, size: tuple[int, int]) -> None:
    run_ranks(check, 4, "data=1,domain=2,tensor=2", (2, 1, 5, 7), "_ _ domain tensor", {"size": size, "mode": mode})


def test_the_sharded_dim_need_not_be_the_second_last() -> None:
    kwargs = {"size": (7, 5, 3), "mode": "trilinear", "align_corners": False}
    run_ranks(check, 4, "data=1,domain=4", (1, 2, 5, 3, 4), "_ _ _ _ domain", kwargs)
    run_ranks(check, 4, "data=1,domain=4", (1, 2, 5, 3, 4), "_ domain _ _ _", kwargs)


@pytest.mark.parametrize(
    ("mode", "dtype", "tolerance"),
    [
        ("bilinear", torch.float32, 2e-6),
        ("bicubic", torch.float32, 2e-6),
        ("bilinear", torch.bfloat16, 2e-2),
        ("nearest", torch.float32, 1e-6),
        ("nearest", torch.bfloat16, 1e-2),
    ],
)
def test_dtypes(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    kwargs = {"size": (19, 8), "mode": mode}
    run_ranks(check, 4, "data=1,domain=4", (1, 2, 13, 5), LAYOUTS[4], kwargs, dtype=dtype, tolerance=tolerance)


def test_whole_numbers() -> None:
    for kwargs in ({"scale_factor": 2}, {"size": (3, 9), "mode": "nearest-exact"}):
        run_ranks(check, 4, "data=1,domain=4", (1, 2, 5, 4), LAYOUTS[4], kwargs, dtype=torch.uint8)
    kwargs = {"size": (7, 9), "mode": "bilinear"}
    run_ranks(check, 4, "data=1,domain=4", (1, 2, 5, 4), LAYOUTS[4], kwargs, dtype=torch.uint8, gathers=True)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Upsample(scale_factor=2),
        nn.Upsample(size=(9, 4), mode="bicubic"),
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.UpsamplingNearest2d(size=(7, 7)),
    ],
)
def test_layers(layer: nn.Module) -> None:
    run_ranks(check_module, 4, "data=2,domain=2", layer, (3, 2, 5, 4))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_batch_of_no_samples(mode: str) -> None:
    run_ranks(check, 2, "data=1,domain=2", (0, 2, 5, 4), "data _ domain _", {"size": (7, 3), "mode": mode})


@pytest.mark.parametrize(
    ("shape", "kwargs", "error"),
    [
        ((1, 1, 4, 4), {"size": 3, "mode": "linear"}, NotImplementedError),
        ((1, 1, 4, 4), {"size": 3, "mode": "trilinear"}, NotImplementedError),
        ((1, 1, 4, 4), {"size": 3, "mode": "cubic"}, NotImplementedError),
        ((1, 1, 4, 4), {}, ValueError),
        ((1, 1, 4, 4), {"size": 3, "scale_factor": 2}, ValueError),
        ((1, 1, 4, 4), {"size": (3, 3, 3)}, ValueError),
        ((1, 1, 4, 4), {"scale_factor": 0.1}, RuntimeError),
        ((1, 1, 0, 4), {"size": 3}, RuntimeError),
        ((1, 1, 4, 4), {"size": 3, "align_corners": True}, ValueError),
        ((1, 1, 4, 4), {"size": 3, "antialias": True}, ValueError),
    ],
)
def test_errors_are_those_of_one_process(shape: tuple[int, ...], kwargs: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        F.interpolate(torch.zeros(shape), **kwargs)
    with pytest.raises(RankError) as caught:
        run_ranks(check_sharded, 2, "data=1,domain=2", shape, kwargs)
    assert all(isinstance(e, error) for e in caught.value.exceptions.values())
    assert len(caught.value.exceptions) == 2


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], str, dict[str, Any]]:
    spec = draw(st.sampled_from(list(MESHES)))
    num = draw(st.sampled_from([3, 4, 4, 4, 5]))
    small = st.integers(1, 4)
    rows = draw(st.integers(1, 13))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 2)), rows, *(draw(small) for _ in range(num - 3)))
    mode = draw(st.sampled_from(MODES[num]))
    kwargs: dict[str, Any] = {"mode": mode}
    if mode in ("linear", "bilinear", "bicubic", "trilinear"):
        kwargs["align_corners"] = draw(st.sampled_from([None, False, True]))
        # torch's antialiasing of one column is wrong on one process: rows (0, 1) twice as high are (0, 0, 0, 0).
        if num == 4 and shape[3] > 1 and draw(st.integers(0, 3)) == 0:
            kwargs["antialias"] = True
    if draw(st.booleans()):
        least = 2 if kwargs.get("antialias") else 1
        sizes = (draw(st.integers(1, 30)), *(draw(st.integers(least, 6)) for _ in range(num - 3)))
        kwargs["size"] = sizes if draw(st.booleans()) else sizes[0] % 7 + least
    else:
        # A factor low enough to leave no row is an error; so start at one row.
        least = 1 if kwargs.get("antialias") else 1 / 99
        lows = [1 / n for n in shape[2:]]
        factors = tuple(
            draw(st.floats(max(low, least), 4).filter(lambda f, n=n: int(n * f) >= 1))
            for low, n in zip(lows, shape[2:], strict=True)
        )
        scalar = draw(st.booleans()) and all(int(n * factors[0]) >= 1 for n in shape[2:])
        kwargs["scale_factor"] = factors[0] if scalar else factors
        kwargs["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    layout = LAYOUTS[num]
    if num == 4 and draw(st.booleans()):
        layout = "data _ _ domain"
    return spec, shape, layout, kwargs


def _run(case: tuple[str, tuple[int, ...], str, dict[str, Any]]) -> None:
    run_ranks(check, MESHES[case[0]], *case)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process(case: Any) -> None:
    _run(case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process_long(case: Any) -> None:
    _run(case)


def by_its_kernel(factor: int, sizes: bool) -> tuple[bool, int]:
    """Resample uneven rows; give whether the bits are those of one process, and how often rows were weighted."""
    torch.manual_seed(0)
    whole = torch.randn(2, 3, 13, 10)
    given = {"size": (13 * factor, 10 * factor)} if sizes else {"scale_factor": factor}
    with unittest.mock.patch.object(resample, "select", wraps=resample.select) as chosen, spmd():
        y = F.interpolate(shard(whole, mesh_for("data=1,domain=4")), mode="bilinear", **given)
    return torch.equal(gather(y), F.interpolate(whole, mode="bilinear", **given)), chosen.call_count


@pytest.mark.parametrize("sizes", [True, False], ids=["size", "scale_factor"])
def test_powers_of_two_go_to_torchs_own_kernel(sizes: bool) -> None:
    for factor, num_chosen in ((2, 0), (4, 0), (3, 1)):
        for same, chosen in run_ranks(by_its_kernel, 4, factor, sizes):
            assert chosen == num_chosen
            assert same or factor == 3
