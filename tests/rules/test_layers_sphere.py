"""Padding on the sphere, against an oracle that walks over the globe point by point; periodic longitudes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, check_all, real, run
from torch import Tensor, nn
from torch.nn import functional as F

from meshpar import SpecError, SpherePad2d, sphere_pad
from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import assert_equivalent, assert_same, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

COLUMNS = "data=1,domain=2,domain_w=2"
POLES = ("reflect", "symmetric")


def oracle(x: Tensor, padding: tuple[int, int, int, int], poles: str, flips: tuple[int, ...] = ()) -> Tensor:
    """Walk from every point of the padded grid back onto the globe, in degrees.

    Latitudes of rows at the poles are 90 - 180 i / (H - 1); those of cell centres are 90 - 180 (i + 0.5) / H.
    """
    left, right, top, bottom = padding
    *_, h, w = x.shape
    first, step = (90.0, 180 / (h - 1) if h > 1 else 0.0) if poles == "reflect" else (90 - 90 / h, 180 / h)
    out = x.new_empty((*x.shape[:-2], h + top + bottom, w + left + right))
    for i, j in itertools.product(range(h + top + bottom), range(w + left + right)):
        latitude, longitude = first - step * (i - top), 360 / w * (j - left)
        crossed = abs(latitude) > 90 + 1e-6
        if crossed:
            latitude, longitude = (180 if latitude > 0 else -180) - latitude, longitude + 180
        row = round((first - latitude) / step) if step else 0
        column = round(longitude % 360 / 360 * w) % w
        value = x[..., row, column].clone()
        if crossed:
            for channel in flips:
                value[..., channel] = -value[..., channel]
        out[..., i, j] = value
    return out


@pytest.mark.parametrize("poles", POLES)
def test_plain_tensors_against_the_oracle(poles: str) -> None:
    for h, w, padding in itertools.product((2, 5, 8), (2, 6), ((0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 0, 1), (0, 1, 1, 0))):
        x = real(2, 3, h, w)
        assert torch.equal(sphere_pad(x, padding, poles=poles), oracle(x, padding, poles)), (h, w, padding)
        found = sphere_pad(x, padding, poles=poles, flips=(0, -1))
        assert torch.equal(found, oracle(x, padding, poles, (0, 2))), (h, w, padding)
    x = real(7, 4)
    most = 6 if poles == "reflect" else 7
    assert torch.equal(sphere_pad(x, (4, 4, most, most), poles=poles), oracle(x, (4, 4, most, most), poles))
    assert sphere_pad(x, 0).data_ptr() != x.data_ptr()
    assert torch.autograd.gradcheck(lambda x: sphere_pad(x, (1, 2, 2, 1), poles=poles), x.requires_grad_())


def test_a_layer_shows_its_arguments() -> None:
    layer = SpherePad2d((1, 1, 2, 2), poles="symmetric", flips=[0, 1])
    assert repr(layer) == "SpherePad2d((1, 1, 2, 2), poles='symmetric', flips=(0, 1))"
    assert torch.equal(layer(real(1, 2, 4, 6)), oracle(real(1, 2, 4, 6), (1, 1, 2, 2), "symmetric", (0, 1)))


def _same_as_plain(mesh: str) -> Iterator[Case]:
    images = ["data _ domain _", "data _ _ domain", "data domain _ _", "_ _ _ _"]
    if "domain_w" in mesh:
        images = ["data _ domain domain_w", "data _ domain_w domain", "data domain_w domain _"]
    if "tensor" in mesh:
        images = ["_ tensor domain _", "_ _ domain tensor", "_ _ tensor domain"]
    for image, poles in itertools.product(images, POLES):
        for h, w, padding in ((9, 6, (1, 1, 1, 1)), (2, 2, (2, 1, 1, 0)), (7, 4, (0, 0, 6, 6)), (5, 6, (3, 6, 0, 2))):
            fn = lambda x, p=padding, poles=poles: sphere_pad(x, p, poles=poles, flips=(1,))  # noqa: E731
            yield Case(f"{image} {poles} {padding}", fn, (real(2, 3, h, w),), (image,), keeps=True)
    yield Case("nothing", lambda x: sphere_pad(x, 0), (real(2, 3, 4, 4),), (images[0],), keeps=True, quiet=True)
    yield Case("a plain one", lambda x, w: x + sphere_pad(w, 1), (real(2, 3, 6, 8),), (images[0],), (real(4, 6),))


@pytest.mark.parametrize("mesh", ["data=1,domain=4", COLUMNS])
def test_sharded_as_whole(mesh: str) -> None:
    run(_same_as_plain, mesh, at_least=26)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", TENSOR])
def test_sharded_equals_one_process(mesh: str) -> None:
    run(_same_as_plain, mesh, at_least=26)


def _bytes() -> None:
    """Rows move as the output's layout has it; the rows beyond a pole come from the rank that has the pole itself."""
    mesh = mesh_for("data=1,domain=4")
    me = mesh.get_local_rank("domain")
    row = 3 * 6 * 8
    x = real(1, 3, 12, 6)
    with record() as log, spmd(on_gather="error"):
        sphere_pad(shard(x, mesh), (1, 1, 2, 2))
    # 16 padded rows in fours, from 12 in threes; rows 2 and 1 lie beyond the one pole, 10 and 9 beyond the other.
    have = [range(3 * r, 3 * r + 3) for r in range(4)]
    mirror = [2, 1, *range(12), 10, 9]
    want = [set(mirror[4 * r : 4 * r + 4]) for r in range(4)]
    least = sum(len(want[r] & set(have[me])) for r in range(4) if r != me)
    assert log.num_bytes() == least * row
    both = mesh_for(COLUMNS)
    with record() as log, spmd(on_gather="error"):
        sphere_pad(shard(x, both), (1, 1, 2, 2))
    assert not log.gathers()
    assert {e.op for e in log.entries} == {"sphere_pad"}
    assert len(log.select(axis="domain_w")) == 2  # between the poles, and beyond the one that this rank has
    assert len(log.select(axis="domain")) <= 1


def test_one_fetch_of_the_least_rows() -> None:
    run_ranks(_bytes, 4)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    cases: list[tuple[Any, dict[str, Any]]] = [
        ((real(1, 2, 4, 5), 1), {}),
        ((real(1, 2, 4, 6), (1, 1, 4, 0)), {}),
        ((real(1, 2, 4, 6), (1, 1, 5, 0)), {"poles": "symmetric"}),
        ((real(1, 2, 4, 6), (7, 0, 0, 0)), {}),
        ((real(1, 2, 4, 6), (1, 1)), {}),
        ((real(1, 2, 4, 6), -1), {}),
        ((real(1, 2, 4, 6), 1), {"poles": "north"}),
        ((real(1, 2, 4, 6), 1), {"flips": (2,)}),
    ]
    with record() as log:
        for (x, padding), options in cases:
            with pytest.raises(SpecError, match="sphere_pad"):
                sphere_pad(x, padding, **options)
            with pytest.raises(SpecError, match="sphere_pad"), spmd():
                sphere_pad(shard(x, mesh), padding, **options)
    assert log.entries == []
    with pytest.raises(SpecError):
        SpherePad2d(1, poles="south")
    assert sphere_pad(real(1, 2, 4, 5), (1, 1, 0, 0)).shape == (
        1,
        2,
        4,
        7,
    )  # no row beyond a pole: any number of columns


def test_errors_come_before_any_communication() -> None:
    run_ranks(_errors, 2)


class Globe(nn.Module):
    """A small weather network: padded on the sphere, convolved, strided, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = SpherePad2d((1, 1, 1, 1), flips=(0, 1))
        self.wide = SpherePad2d((2, 2, 2, 2), poles="symmetric")
        self.first = nn.Conv2d(3, 6, 3)
        self.second = nn.Conv2d(6, 4, 5)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.wide(F.gelu(self.norm(self.first(self.pad(x)))))) + x.mean(1, keepdim=True)


class Cylinder(nn.Module):
    """Periodic longitudes as users write them, the poles left to zeros."""

    def __init__(self, padding: int = 1) -> None:
        super().__init__()
        self.padding = padding
        self.conv = nn.Conv2d(3, 3, 2 * padding + 1, padding=(padding, 0))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.conv(F.pad(x, (self.padding, self.padding, 0, 0), mode="circular"))
        return x


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3", COLUMNS])
@pytest.mark.parametrize("model", [Globe, Cylinder])
def test_networks_on_the_globe(model: type[nn.Module], mesh: str) -> None:
    report = assert_equivalent(model, [torch.randn(2, 3, 9, 8)], mesh)
    assert not report.log.gathers()


def _longitudes() -> None:
    """A convolution along whole longitudes sends rows alone; along sharded ones, what padding moves and halos."""
    x, weight = real(1, 3, 12, 8), real(3, 3, 3, 3)

    def conv(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 0, 0), mode="circular"), w, padding=(1, 0))

    mesh = mesh_for("data=1,domain=4")
    me = mesh.get_local_rank("domain")
    log = assert_same(conv, (x,), mesh=mesh, weights=(weight,)).log
    edges = 1 if me in (0, 3) else 2
    assert log.num_bytes(backward=False) == edges * 3 * 10 * 8  # 10 columns: padded before they are sent
    assert log.num_bytes(backward=True) == edges * 3 * 10 * 8
    log = assert_same(conv, (x,), mesh=mesh, layouts=("_ _ _ domain",), weights=(weight,)).log
    # 10 padded columns in threes from 8 in twos, column 7 first: 7 0 1 | 2 3 4 | 5 6 7 | 0; outputs in twos read four.
    padded = [7, *range(8), 0]
    have = [range(2 * r, 2 * r + 2) for r in range(4)]
    want = [set(padded[3 * r : 3 * r + 3]) for r in range(4)]
    pad = sum(len(want[r] & set(have[me])) for r in range(4) if r != me)
    held = [range(3 * r, min(3 * r + 3, 10)) for r in range(4)]
    read = [set(range(2 * r, 2 * r + 4)) for r in range(4)]
    halo = sum(len(read[r] & set(held[me])) for r in range(4) if r != me)
    assert log.num_bytes(backward=False) == (pad + halo) * 3 * 12 * 8


def test_periodic_longitudes_send_the_least() -> None:
    run_ranks(_longitudes, 4)


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    h, w = draw(st.integers(2, 12)), 2 * draw(st.integers(1, 5))
    poles = draw(st.sampled_from(POLES))
    most = h - 1 if poles == "reflect" else h
    padding = (draw(st.integers(0, w)), draw(st.integers(0, w)), draw(st.integers(0, most)), draw(st.integers(0, most)))
    flips = draw(st.sampled_from((None, (0,), (1, -2))))
    axes = draw(st.sampled_from((("domain", "domain_w"), ("domain_w", "domain"), ("domain", "_"), ("_", "domain"))))
    return h, w, poles, padding, flips, axes


def _drawn(cases: list[tuple[Any, ...]], mesh: str) -> list[str]:
    def build(_: str) -> Iterator[Case]:
        for i, (h, w, poles, padding, flips, axes) in enumerate(cases):
            rows, columns = (a if a != "domain_w" or "domain_w" in mesh else "_" for a in axes)
            x = real(2, 2, h, w, salt=i)
            expected = oracle(x, padding, poles, tuple(flips or ()))
            assert torch.equal(sphere_pad(x, padding, poles=poles, flips=flips), expected)
            fn = lambda x, p=padding, q=poles, f=flips: sphere_pad(x, p, poles=q, flips=f)  # noqa: E731
            yield Case(f"{h, w, poles, padding, flips, axes}", fn, (x,), (f"data _ {rows} {columns}",), keeps=True)

    return check_all(build, mesh)[1]


def _property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    wrong = [text for texts in run_ranks(_drawn, ranks_of(mesh), cases, mesh, timeout_s=300.0) for text in texts]
    assert not wrong, "\n".join(wrong[:10])


@given(mesh=st.sampled_from((*MESHES, COLUMNS)), cases=st.lists(drawn_cases(), min_size=3, max_size=8))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sphere_pad_property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    _property(mesh, cases)


@pytest.mark.long
@given(mesh=st.sampled_from((*MESHES, COLUMNS)), cases=st.lists(drawn_cases(), min_size=6, max_size=12))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sphere_pad_on_every_mesh_property(mesh: str, cases: list[tuple[Any, ...]]) -> None:
    _property(mesh, cases)
