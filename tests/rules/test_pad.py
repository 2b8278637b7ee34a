"""`F.pad` and the `nn.*Pad*` layers on sharded rows against one process."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshpar.batch import shard
from meshpar.intervals import chunks, expand
from meshpar.rules.pad import padded_rows
from meshpar.scope import spmd
from meshpar.testing import RankError, run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for

MESHES = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}
MODES = ("constant", "reflect", "replicate", "circular")


def image(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(dtype)


def check(spec: str, shape: tuple[int, ...], layout: str | None, kwargs: dict[str, Any], **options: Any) -> int:
    """Compare with one process, gradients too; give the bytes that this rank sent forward."""
    fn = functools.partial(F.pad, **kwargs)
    x = image(shape, options.pop("dtype", torch.float64))
    report = assert_same(fn, [x], mesh=mesh_for(spec), layouts=[layout], tolerance=1e-12, **options)
    return report.log.num_bytes(backward=False)


def check_layer(spec: str, layer: nn.Module, shape: tuple[int, ...], layout: str | None = None) -> None:
    assert_same(layer, [image(shape)], mesh=mesh_for(spec), layouts=[layout], tolerance=1e-12)


def padded(spec: str, shape: tuple[int, ...], kwargs: dict[str, Any]) -> tuple[bool, tuple[int, ...]]:
    x = shard(image(shape), mesh_for(spec))
    with spmd(on_gather="error"):
        y = F.pad(x, **kwargs)
    return y.placements == x.placements, tuple(y.to_local().shape)


def written_after_padding(spec: str) -> None:
    x = shard(image((1, 1, 8, 3)), mesh_for(spec))
    with spmd(on_gather="error"):
        y = F.pad(x, (0, 0, 0, 0))
        y.add_(1.0)
    torch.testing.assert_close(x.full_tensor(), image((1, 1, 8, 3)))


def padded_conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1)), w)


def check_field_15(spec: str) -> None:
    assert_same(padded_conv, [image((2, 2, 8, 5))], mesh=mesh_for(spec), weights=[image((3, 2, 3, 3))])


@pytest.mark.parametrize("spec", ["data=1,domain=2", "data=1,domain=4"])
def test_field_15_padding_touches_the_ends_only(spec: str) -> None:
    run_ranks(check_field_15, MESHES[spec], spec)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [4, 5, 8])
def test_field_23_every_mode(mode: str, rows: int) -> None:
    for spec, p in MESHES.items():
        run_ranks(check, p, spec, (5, 2, rows, 4), None, {"pad": (1, 2, 3, 3), "mode": mode})


@pytest.mark.parametrize(
    ("layer", "shape", "layout"),
    [
        (nn.ReflectionPad1d((1, 2)), (2, 2, 5), "data _ domain"),
        (nn.ReflectionPad2d((1, 2, 3, 0)), (2, 2, 5, 4), None),
        (nn.ReflectionPad3d(1), (2, 2, 3, 5, 4), None),
        (nn.ReplicationPad2d((1, 2, 9, 7)), (2, 2, 1, 4), None),
        (nn.ReplicationPad3d(2), (2, 2, 1, 5, 4), "data _ domain _ _"),
        (nn.ZeroPad1d(3), (2, 2, 5), "data _ domain"),
        (nn.ZeroPad2d((1, 0, 2, 7)), (2, 2, 1, 4), None),
        (nn.ZeroPad3d(1), (2, 2, 2, 3, 4), None),
        (nn.ConstantPad2d(2, 3.5), (2, 2, 3, 4), None),
        (nn.CircularPad1d((3, 1)), (2, 2, 5), "data _ domain"),
        (nn.CircularPad2d((1, 2, 5, 5)), (2, 2, 5, 4), None),
        (nn.CircularPad3d(2), (2, 2, 2, 3, 4), None),
    ],
)
def test_layers(layer: nn.Module, shape: tuple[int, ...], layout: str | None) -> None:
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        run_ranks(check_layer, 4, spec, layer, shape, layout)


def test_output_is_sharded_in_canonical_layout() -> None:
    found = run_ranks(padded, 4, "data=1,domain=4", (1, 1, 5, 3), {"pad": (0, 0, 3, 1), "mode": "circular"})
    assert [same for same, _ in found] == [True] * 4
    assert [shape[2] for _, shape in found] == [b - a for a, b in chunks(9, 4)]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_of_the_rows_that_move(mode: str) -> None:
    n, lo, hi, p = 9, 2, 3, 4
    kwargs = {"pad": (1, 1, lo, hi), "mode": mode}
    sent = run_ranks(check, p, "data=1,domain=4", (1, 2, n, 3), None, kwargs)
    rows = expand(padded_rows(n, lo, hi, mode))
    least = 0
    for (a, b), (first, last) in zip(chunks(n + lo + hi, p), chunks(n, p), strict=True):
        least += len(set(rows[a:b]) - set(range(first, last)) - {-1}) * 2 * 3 * 8
    assert sum(sent) == least


def test_unsharded_dims_send_nothing() -> None:
    assert sum(run_ranks(check, 4, "data=1,domain=4", (1, 2, 9, 3), None, {"pad": (2, 1)})) == 0
    assert sum(run_ranks(check, 4, "data=4", (5, 2, 9, 3), None, {"pad": (2, 1, 3, 3)})) == 0


@pytest.mark.parametrize("mode", MODES)
def test_two_sharded_dims(mode: str) -> None:
    for pad in ((2, 1, 1, 3), (-1, 2, 2, -1)):
        kwargs = {"pad": pad, "mode": mode}
        run_ranks(check, 4, "data=1,domain=2,tensor=2", (2, 1, 5, 4), "_ _ domain tensor", kwargs)


def test_sharded_batch_and_channels() -> None:
    kwargs = {"pad": (0, 1, 1, 0, 2, 1, 1, 2), "value": -2.0}
    run_ranks(check, 4, "data=2,domain=1,tensor=2", (3, 5, 2, 2), "data tensor _ _", kwargs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    for mode in ("constant", "circular") if dtype == torch.bool else MODES:
        kwargs = {"pad": (1, 1, 2, 1), "mode": mode}
        run_ranks(check, 4, "data=1,domain=4", (1, 2, 5, 3), None, kwargs, dtype=dtype, gradients=False)


def test_output_is_a_new_tensor() -> None:
    run_ranks(written_after_padding, 2, "data=1,domain=2")


@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((1, 1, 3, 4), {"pad": (0, 0, 3, 0), "mode": "reflect"}),
        ((1, 1, 3, 4), {"pad": (0, 0, 4, 0), "mode": "circular"}),
        ((1, 1, 3, 4), {"pad": (1, 1), "mode": "reflect"}),
        ((1, 1, 3, 4), {"pad": (1, 1, 1)}),
        ((1, 1, 3, 4), {"pad": (0, 0, -2, -2)}),
        ((1, 1, 3, 4), {"pad": (1, 1, 1, 1), "mode": "mirror"}),
        ((1, 1, 3, 4), {"pad": (1, 1, 1, 1), "mode": "reflect", "value": 1.0}),
    ],
)
def test_errors_are_those_of_one_process(shape: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    try:
        F.pad(torch.zeros(shape), **kwargs)
    except Exception as error:
        expected = type(error)
    with pytest.raises(RankError) as caught:
        run_ranks(padded, 2, "data=1,domain=2", shape, kwargs)
    assert {type(e) for e in caught.value.exceptions.values()} == {expected}
    assert len(caught.value.exceptions) == 2


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 9), lo=st.integers(-9, 9), hi=st.integers(-9, 9), mode=st.sampled_from(MODES))
def test_rows_are_those_of_torch(n: int, lo: int, hi: int, mode: str) -> None:
    ramp = torch.arange(n, dtype=torch.float64).view(1, 1, n)
    if not valid(n, lo, hi, mode):
        return
    kwargs = {"value": -1.0} if mode == "constant" else {}
    assert expand(padded_rows(n, lo, hi, mode)) == F.pad(ramp, (lo, hi), mode, **kwargs).flatten().tolist()


def valid(n: int, lo: int, hi: int, mode: str) -> bool:
    """Leave out what torch refuses, and what makes it read rows that are not there (torch 2.13)."""
    if min(lo, 0) + min(hi, 0) + n < 1 or lo + hi + n < 1:
        return False
    if mode == "reflect":
        return max(lo, hi) < n
    if mode == "circular":
        return max(lo, hi) <= n + min(lo, 0) + min(hi, 0)
    return True


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], str, dict[str, Any]]:
    spec = draw(st.sampled_from(list(MESHES)))
    mode = draw(st.sampled_from(MODES))
    spatial = draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 2)), *(draw(st.integers(1, 9)) for _ in range(spatial)))
    num = draw(st.integers(1, spatial + 2)) if mode == "constant" else spatial
    pads: list[int] = []
    for i in range(num):
        n = shape[-1 - i]
        pairs = st.tuples(st.integers(-3, 6), st.integers(-3, 6)).filter(lambda v, n=n: valid(n, *v, mode))
        pads += draw(pairs)
    kwargs: dict[str, Any] = {"pad": tuple(pads), "mode": mode}
    if mode == "constant" and draw(st.booleans()):
        kwargs["value"] = draw(st.sampled_from([0, 1.5, -2]))
    where = draw(st.integers(2, len(shape) - 1))
    layout = " ".join("data" if d == 0 else "domain" if d == where else "_" for d in range(len(shape)))
    return spec, shape, layout, kwargs


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process(case: Any) -> None:
    run_ranks(check, MESHES[case[0]], *case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process_long(case: Any) -> None:
    run_ranks(check, MESHES[case[0]], *case)
