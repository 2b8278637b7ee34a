"""grid_sample and affine_grid: the rows that data-dependent points touch, and no others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, check_all, real, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import assert_equivalent, assert_same, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

PADDINGS = ("zeros", "border", "reflection")
COLUMNS = "data=1,domain=2,domain_w=2"


def _sample(mode: str, padding: str, align: bool) -> Any:
    return lambda x, grid: F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=align)


def _on_rows(shape: tuple[int, ...], outputs: tuple[int, ...], align: bool, salt: int = 0) -> Tensor:
    """Draw points that lie on rows, halfway between them, or at the edges, up to rounding: where gradients jump."""
    generator = torch.Generator().manual_seed(5 + salt)
    columns = []
    for n in reversed(shape[2:]):
        half_rows = torch.randint(-3, 2 * n + 3, (shape[0], *outputs), generator=generator).double() / 2
        scale = (2 / max(n - 1, 1)) if align else 2 / n
        columns.append((half_rows + (0 if align else 0.5)) * scale - 1)
    return torch.stack(columns, -1)


def _explicit(mesh: str) -> Iterator[Case]:
    image, volume = (2, 3, 9, 5), (2, 2, 4, 7, 5)
    for mode, padding, align in itertools.product(("bilinear", "nearest", "bicubic"), PADDINGS, (True, False)):
        fn, label = _sample(mode, padding, align), f"{mode} {padding} {align}"
        x, grid = real(*image), real(2, 6, 4, 2, salt=1, low=-1.6, high=1.6)
        yield Case(label, fn, (x, grid), ("data _ domain _", "data domain _ _"), tolerance=1e-9, keeps=True)
        near = real(2, 9, 5, 2, salt=2, low=-0.1, high=0.1) + F.affine_grid(
            torch.eye(2, 3).double().expand(2, 2, 3), list(image), align_corners=align
        )
        yield Case(f"{label} near", fn, (x, near), ("data _ domain _", "data domain _ _"), tolerance=1e-9, keeps=True)
        if mode != "bicubic":
            v, points = real(*volume), real(2, 3, 6, 2, 3, salt=3, low=-1.6, high=1.6)
            layouts = ("data _ _ domain _", "data _ domain _ _")
            yield Case(f"{label} 3-d", fn, (v, points), layouts, tolerance=1e-9, keeps=True)


def test_every_mode() -> None:
    run(_explicit, "data=2,domain=2", at_least=48)


@pytest.mark.parametrize("mesh", ["data=1,domain=4", "data=4", "data=1,domain=3"])
def test_every_mode_equals_one_process(mesh: str) -> None:
    run(_explicit, mesh, at_least=48)


def _kinks(mesh: str) -> Iterator[Case]:
    for padding, align in itertools.product(PADDINGS, (True, False)):
        for shape in ((2, 2, 9, 7), (1, 2, 10, 3), (2, 1, 1, 4), (2, 1, 2, 4)):
            for mode in ("nearest", "bilinear"):
                grid = _on_rows(shape, (7, 6), align)
                layouts = ("data _ domain _", "data domain _ _")
                label = f"{mode} {padding} {align} {shape}"
                yield Case(label, _sample(mode, padding, align), (real(*shape), grid), layouts, tolerance=1e-9)
        shape = (1, 2, 6, 5, 3)
        grid = _on_rows(shape, (5, 2, 3), align)
        layouts = ("data _ domain _ _", "data domain _ _ _")
        yield Case(f"{padding} {align} 3-d", _sample("bilinear", padding, align), (real(*shape), grid), layouts)


def test_points_on_rows_keep_their_side() -> None:
    run(_kinks, "data=1,domain=3", at_least=50)


def test_points_on_rows_equals_one_process() -> None:
    run(_kinks, "data=2,domain=2", at_least=50)


def _layouts(mesh: str) -> Iterator[Case]:
    fn = _sample("bilinear", "zeros", False)
    x, grid = real(4, 3, 7, 6), real(4, 5, 8, 2, salt=1, low=-1.3, high=1.3)
    for a, b in (
        ("data _ domain _", "data _ domain _"),
        ("data _ _ domain", "data domain _ _"),
        ("data _ domain _", "data _ _ _"),
        ("data _ domain _", "_ domain _ _"),
        ("_ _ domain _", "data domain _ _"),
        ("data _ _ _", "data domain _ _"),
        ("domain _ data _", "domain data _ _"),
        ("domain _ data _", "data domain _ _"),
        ("data domain _ _", "data domain _ _"),
        ("data _ domain _", "domain data _ _"),
        ("_ _ _ _", "_ _ _ _"),
    ):
        yield Case(f"{a} at {b}", fn, (x, grid), (a, b), tolerance=1e-9)
    yield Case("a plain grid", fn, (x,), None, (grid,), tolerance=1e-9, keeps=True)
    yield Case("a plain input", lambda g, x: fn(x, g), (grid,), ("data domain _ _",), (x,), tolerance=1e-9)
    yield Case("numbers", lambda x, g: torch.grid_sampler(x, g, 2, 1, True), (x, grid), (None, "data domain _ _"))
    single = (x.float(), grid.float())
    yield Case("float32", fn, single, ("data _ domain _", "data domain _ _"), tolerance=1e-5)
    yield Case("no channels", fn, (x[:, :0], grid), (None, "data domain _ _"))
    yield Case("no samples", fn, (x[:0], grid[:0]), (None, "data domain _ _"))
    yield Case("no points", fn, (x, grid[:, :0]), (None, "data domain _ _"))
    volume, points = real(2, 2, 3, 5, 4), real(2, 2, 3, 4, 3, salt=3, low=-1.2, high=1.2)
    yield Case("3-d", fn, (volume, points), ("data _ domain _ _", "data _ _ domain _"), tolerance=1e-9)


def test_wherever_input_and_grid_lie() -> None:
    run(_layouts, "data=2,domain=2", at_least=18)


def test_wherever_they_lie_equals_one_process() -> None:
    run(_layouts, "data=1,domain=3", at_least=18)


def _halves() -> None:
    """Coordinates are worked out in float32: the result is nearer to the truth than torch's own in bfloat16."""
    mesh = mesh_for("data=1,domain=3")
    x, grid = real(2, 3, 7, 6).bfloat16(), real(2, 5, 8, 2, salt=1, low=-1.3, high=1.3).bfloat16()
    with spmd(on_gather="error"):
        found = F.grid_sample(shard(x, mesh), shard(grid, mesh, "data domain _ _"), align_corners=False)
    assert found.dtype == F.grid_sample(x, grid, align_corners=False).dtype
    expected = F.grid_sample(x.float(), grid.float(), align_corners=False).to(found.dtype)
    assert torch.allclose(found.full_tensor(), expected, rtol=1e-2, atol=1e-2)


def test_bfloat16() -> None:
    run_ranks(_halves, 3)


def _two_axes(mesh: str) -> Iterator[Case]:
    rows, columns = mesh_for(mesh).mesh_dim_names[-3:-1] if "domain_w" in mesh else ("domain", "tensor")
    for (mode, padding), align in itertools.product((("bilinear", "zeros"), ("bicubic", "reflection")), (True, False)):
        fn = _sample(mode, padding, align)
        x, grid = real(1, 2, 7, 5), real(1, 5, 6, 2, low=-1.4, high=1.4)
        image = f"_ _ {rows} {columns}"
        for points in (f"_ {rows} {columns} _", f"_ {columns} {rows} _", f"_ {rows} _ _", f"_ _ {rows} _", "_ _ _ _"):
            yield Case(f"{mode} at {points}", fn, (x, grid), (image, points), tolerance=1e-9)
        yield Case(f"{mode} plain", fn, (x,), (image,), (grid,), tolerance=1e-9, keeps=True)
        channels = f"_ {columns} {rows} _"
        yield Case(f"{mode} channels", fn, (x, grid), (channels, f"_ {rows} _ _"), tolerance=1e-9, keeps=True)
        yield Case(f"{mode} channels, plain", fn, (x,), (channels,), (grid,), tolerance=1e-9, keeps=True)
    volume, points = real(1, 1, 4, 5, 6), real(1, 3, 4, 5, 3, low=-1.2, high=1.2)
    layouts = (f"_ _ _ {rows} {columns}", f"_ {columns} {rows} _ _")
    yield Case("3-d", _sample("bilinear", "border", False), (volume, points), layouts, tolerance=1e-9)


def test_rows_and_columns_corners_too() -> None:
    run(_two_axes, COLUMNS, at_least=30)


def test_rows_and_channels_equals_one_process() -> None:
    run(_two_axes, TENSOR, at_least=30)


def _bytes() -> None:
    """A rank receives the rows between the lowest and the highest that its points touch, and not one more."""
    mesh = mesh_for("data=1,domain=4")
    x, layouts = real(1, 3, 16, 6), ("data _ domain _", "data domain _ _")
    row, me = 3 * 6 * 8, mesh.get_local_rank("domain")
    told = 3 * 2 * 8

    def sent(grid: Tensor, mode: str, *, backward: bool = False) -> int:
        report = assert_same(_sample(mode, "zeros", True), (x, grid), mesh=mesh, layouts=layouts)
        assert report.log.num_bytes(kind="redistribute") == told
        return report.log.num_bytes(kind="halo", backward=backward)

    inner = torch.arange(16, dtype=torch.float64).add(0.25).clamp(max=14.9)
    here = torch.stack([real(16, 5, salt=1, low=-0.9, high=0.9), (inner * 2 / 15 - 1).expand(5, 16).T], -1)[None]
    assert sent(here, "nearest") == 0
    assert sent(here, "bilinear") == (row if me > 0 else 0)  # the row below the last own one, to the rank before
    assert sent(here, "bilinear", backward=True) == (row if me < 3 else 0)
    assert sent(here, "bicubic") == (2 * row if me > 0 else 0) + (row if me < 3 else 0)
    outside = here.clone()
    outside[..., 1] = torch.where(torch.arange(5) == 2, 7.0, outside[..., 1])  # touches nothing, costs nothing
    assert sent(outside, "bilinear") == (row if me > 0 else 0)
    assert sent(here.flip(1), "nearest") == 4 * row


def test_just_the_rows_that_points_touch_are_sent() -> None:
    run_ranks(_bytes, 4)


def _nowhere() -> None:
    mesh = mesh_for("data=1,domain=4")
    for bad, shape, mode in itertools.product((math.nan, math.inf, -math.inf, 1e30), (2, 3), ("bilinear", "nearest")):
        x = real(1, 2, *[7, 4, 5][:shape])
        grid = real(1, *[6, 3, 4][:shape], shape, low=-0.9, high=0.9)
        grid[:, ::2, 1, ..., shape - 1] = bad
        layouts = ("_ _ domain " + "_ " * (shape - 1), "_ domain " + "_ " * shape)
        assert_same(_sample(mode, "zeros", False), (x, grid), mesh=mesh, layouts=layouts)
    # torch 2.13 crashes in the backward of such points with other paddings, so the gradient is not compared there.
    for bad, padding, mode in itertools.product(
        (math.nan, math.inf), ("border", "reflection"), ("bilinear", "nearest")
    ):
        x, grid = real(1, 2, 7, 5), real(1, 6, 4, 2, low=-0.9, high=0.9)
        grid[:, ::2, 1, 1] = bad
        layouts = ("_ _ domain _", "_ domain _ _")
        assert_same(_sample(mode, padding, False), (x, grid), mesh=mesh, layouts=layouts, gradients=False)


def test_points_that_are_no_numbers() -> None:
    run_ranks(_nowhere, 4)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, grid = shard(real(2, 3, 6, 4), mesh), shard(real(2, 6, 4, 2), mesh, "data domain _ _")
    with record() as log, spmd(on_gather="error"):
        for args, options in (
            ((x, grid[:1]), {}),
            ((x[:, :, :0], grid), {}),
            ((x, shard(real(2, 6, 4, 3), mesh)), {}),
            ((x, grid.float()), {}),
            ((x, grid), {"mode": "cubic"}),
            ((x, grid), {"padding_mode": "circular"}),
            ((shard(real(2, 3, 2, 6, 4), mesh), shard(real(2, 2, 6, 4, 3), mesh)), {"mode": "bicubic"}),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                F.grid_sample(*args, align_corners=False, **options)
        with pytest.warns(UserWarning, match="align_corners"):
            F.grid_sample(x, x[:, :2, :, :].movedim(1, -1))
        for size in ([2, 3, 4], [2, 3, 4, 0], [3, 3, 4, 4]):
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                F.affine_grid(shard(real(2, 2, 3), mesh), size, align_corners=False)
    assert not log.gathers()


def test_what_torch_refuses_is_refused() -> None:
    run_ranks(_errors, 2)


# affine_grid


def _affine(mesh: str) -> Iterator[Case]:
    for align in (True, False):
        flat, solid = real(2, 2, 3), real(2, 3, 4)
        for layout in ("data _ _", "_ _ _"):
            for size in ((2, 1, 9, 5), (2, 3, 1, 1), (2, 3, 5, 2)):
                fn = lambda t, s=size: F.affine_grid(t, s, align_corners=align)  # noqa: B023, E731
                if not (align and min(size[2:]) == 1):  # torch warns
                    yield Case(f"{layout} {size} {align}", fn, (flat,), (layout,))
            yield Case(f"{layout} 3-d", lambda t: F.affine_grid(t, (2, 1, 4, 7, 3), False), (solid,), (layout,))
        x = real(2, 3, 9, 5)
        warp = lambda t, x: F.grid_sample(x, F.affine_grid(t, x.shape, align), align_corners=align)  # noqa: B023, E731
        yield Case("activation", warp, (flat, x), ("data _ _", "data _ domain _"), tolerance=1e-9)
        yield Case("parameter", lambda x, t: warp(t, x), (x,), None, (flat,), tolerance=1e-9, keeps=True)  # noqa: B023


def test_affine_grid() -> None:
    run(_affine, "data=2,domain=2", at_least=14)


@pytest.mark.parametrize("mesh", ["data=1,domain=3", COLUMNS])
def test_affine_grid_equals_one_process(mesh: str) -> None:
    run(_affine, mesh, at_least=14)


def _rows_lie_over_domain() -> None:
    for text, expected in (
        ("data=2,domain=2", (0, 1)),
        (COLUMNS, (0, 1, 2)),
        ("data=1,domain=2,domain_d=2", (0, 1, 2)),
    ):
        mesh = mesh_for(text)
        with spmd(on_gather="error"):
            if "domain_d" in text:
                grid = F.affine_grid(shard(real(2, 3, 4), mesh), (2, 1, 4, 7, 3), align_corners=False)
            else:
                grid = F.affine_grid(shard(real(2, 2, 3), mesh), (2, 1, 8, 6), align_corners=False)
        assert isinstance(grid, DTensor)
        assert [p.dim for p in grid.placements if isinstance(p, Shard)] == list(expected), grid.placements


def test_rows_of_an_affine_grid_lie_over_domain() -> None:
    run_ranks(_rows_lie_over_domain, 4)


class Warp(nn.Module):
    """Move an image along a flow that a convolution gives, as optical flow and registration networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(3, 2, 3, padding=1)
        self.texture = nn.Parameter(torch.randn(1, 2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape
        rows, columns = torch.meshgrid(
            torch.linspace(-1, 1, H, dtype=x.dtype), torch.linspace(-1, 1, W, dtype=x.dtype), indexing="ij"
        )
        grid = torch.stack((columns, rows), -1).unsqueeze(0) + 0.3 * self.flow(x).permute(0, 2, 3, 1)
        moved = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=True)
        painted = F.grid_sample(self.texture.expand(B, -1, -1, -1), grid, mode="bicubic", align_corners=False)
        return torch.cat((moved, painted), 1)


class Transformer(nn.Module):
    """A spatial transformer: a network looks at the image and turns it."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.head(self.look(x)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", COLUMNS])
@pytest.mark.parametrize("model", [Warp, Transformer])
def test_networks_that_warp(model: type[nn.Module], mesh: str) -> None:
    report = assert_equivalent(model, [torch.randn(2, 3, 9, 6)], mesh)
    assert not report.log.gathers()


# drawn cases


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    num_dims = draw(st.sampled_from((2, 2, 3)))
    mode = draw(st.sampled_from(("bilinear", "nearest", "bicubic") if num_dims == 2 else ("bilinear", "nearest")))
    padding, align = draw(st.sampled_from(PADDINGS)), draw(st.booleans())
    samples, channels = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = [draw(st.integers(1, 11 if i == 0 else 5)) for i in range(num_dims)]
    outputs = [draw(st.integers(1, 9 if i == 0 else 4)) for i in range(num_dims)]
    reach = draw(st.sampled_from((0.4, 1.0, 1.3, 4.0)))
    dims = draw(st.permutations(range(num_dims)))
    at = draw(st.sampled_from(range(num_dims)))
    return num_dims, mode, padding, align, samples, channels, sizes, outputs, reach, dims[0], at, draw(st.booleans())


def _case(drawn: tuple[Any, ...], salt: int) -> Case:
    num_dims, mode, padding, align, samples, channels, sizes, outputs, reach, dim, at, on_rows = drawn
    shape = (samples, channels, *sizes)
    x = real(*shape, salt=salt)
    grid = real(samples, *outputs, num_dims, salt=salt + 1, low=-reach, high=reach)
    if on_rows:
        grid = _on_rows(shape, tuple(outputs), align, salt)
    image, points = ["data", "_", *"_" * num_dims], ["data", *"_" * num_dims, "_"]
    image[2 + dim] = points[1 + at] = "domain"
    layouts = (" ".join(image), " ".join(points))
    return Case(f"{drawn}", _sample(mode, padding, align), (x, grid), layouts, tolerance=1e-9)


def _run_drawn(drawn: list[tuple[Any, ...]], mesh: str) -> list[str]:
    return check_all(lambda _: [_case(d, i) for i, d in enumerate(drawn)], mesh)[1]


def _property(mesh: str, drawn: list[tuple[Any, ...]]) -> None:
    wrong = [text for texts in run_ranks(_run_drawn, ranks_of(mesh), drawn, mesh, timeout_s=300.0) for text in texts]
    assert not wrong, "\n".join(wrong[:10])


@given(mesh=st.sampled_from(MESHES), drawn=st.lists(drawn_cases(), min_size=4, max_size=12))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_grid_sample_property(mesh: str, drawn: list[tuple[Any, ...]]) -> None:
    _property(mesh, drawn)


@pytest.mark.long
@given(mesh=st.sampled_from(MESHES), drawn=st.lists(drawn_cases(), min_size=10, max_size=20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_grid_sample_on_every_mesh_property(mesh: str, drawn: list[tuple[Any, ...]]) -> None:
    _property(mesh, drawn)
