"""Patches of sharded images: unfold and fold, windows of rows, shuffles of pixels and channels, space to depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from einops import rearrange
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, check, real, run
from torch import Tensor, nn
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.errors import GatherError
from meshpar.intervals import chunks
from meshpar.record import record
from meshpar.rewrite import rewrite
from meshpar.rules.conv import wanted_rows
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

LAYOUTS = ("data _ domain _", "data _ _ domain", "_ _ domain tensor", "_ tensor domain _", "tensor _ domain data")
WINDOWS: list[tuple[Any, ...]] = [  # kernel, dilation, padding, stride
    (3, 1, 1, 1),
    (2, 1, 0, 2),
    ((3, 2), (2, 1), (2, 0), (1, 2)),
    (1, 1, 0, 3),
    (4, 1, 3, 3),
    (2, 3, 1, 1),
]


def fits(shape: tuple[int, ...], window: tuple[Any, ...]) -> bool:
    try:
        F.unfold(torch.empty(shape, device="meta"), *window)
    except RuntimeError:
        return False
    return True


def unfold_case(shape: tuple[int, ...], layout: str, window: tuple[Any, ...]) -> Case:
    return Case(f"unfold {shape} {layout} {window}", lambda x: F.unfold(x, *window), (real(*shape),), (layout,))


def fold_case(shape: tuple[int, ...], layout: str, window: tuple[Any, ...]) -> Case:
    columns = real(*F.unfold(torch.empty(shape, device="meta"), *window).shape)
    text = layout.split()
    spatial = [t for t in text[-2:] if t != "_"]
    lies = " ".join([*text[:-2], spatial[0] if spatial else "_"])
    return Case(
        f"fold {shape} {lies} {window}", lambda x: F.fold(x, shape[-2:], *window), (columns,), (lies,), tolerance=1e-12
    )


def _columns(mesh: str) -> Iterator[Case]:
    for layout in LAYOUTS if "tensor" in mesh else LAYOUTS[:2]:
        for shape in ((2, 3, 7, 5), (3, 2, 1, 4), (1, 1, 9, 1)):
            for window in WINDOWS if shape[0] == 2 else WINDOWS[:3]:
                if fits(shape, window) and not (shape[1] == 1 and "tensor" in layout):
                    yield unfold_case(shape, layout, window)
                    yield fold_case(shape, layout, window)
    yield unfold_case((3, 7, 5), "_ domain _", (3, 1, 1, 1))
    yield fold_case((3, 7, 5), "_ domain _", (3, 1, 1, 1))
    yield Case("module", nn.Unfold(2, stride=2), (real(2, 3, 6, 4),))
    yield Case("module", nn.Fold((6, 4), 2, stride=2), (real(2, 12, 6),), ("data _ domain",))
    w = real(4, 27)
    yield Case("as a convolution", _unfolded_conv, (real(2, 3, 7, 5),), weights=(w,))


def _unfolded_conv(x: Tensor, w: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return F.fold(F.linear(columns.transpose(1, 2), w).transpose(1, 2), x.shape[-2:], 1)


def test_field_23_unfold_and_fold() -> None:
    run(_columns, MESHES[0], at_least=30)


def _slices(mesh: str) -> Iterator[Case]:
    layouts = ("data _ domain _", "_ domain _ data", "data _ _ domain", *(("_ _ domain tensor",) * ("tensor" in mesh)))
    for layout in layouts:
        for shape in ((2, 5, 7, 4), (3, 4, 1, 5)):
            x = real(*shape)
            for dim in range(4):
                for size, step in ((2, 1), (3, 2), (2, 3), (shape[dim], 1)):
                    if size <= shape[dim]:
                        yield Case(
                            f"{shape} {layout} {dim, size, step}",
                            lambda x, dim=dim, size=size, step=step: x.unfold(dim, size, step),
                            (x,),
                            (layout,),
                        )
    yield Case("patches", lambda x: x.unfold(2, 3, 3).unfold(3, 2, 2).sum((2, 3)), (real(2, 3, 9, 4),))
    yield Case("named", lambda x: x.unfold(dimension=-2, size=2, step=1), (real(2, 3, 9, 4),))


def test_field_23_windows_of_rows() -> None:
    run(_slices, MESHES[0], at_least=30)


def merging(x: Tensor) -> Tensor:
    """Merge patches as Swin does, padded to even sizes."""
    x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)


def depth_of(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    y = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).contiguous()
    return y.view(b, 4 * c, h // 2, w // 2)


def focus(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)


def patchify(x: Tensor) -> Tensor:
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpatchify(x: Tensor, h: int) -> Tensor:
    return rearrange(x, "b (h w) (c p q) -> b c (h p) (w q)", h=h, p=2, q=2)


def _shuffles(mesh: str) -> Iterator[Case]:
    layouts = ["data _ domain _", "data _ _ domain", "domain _ data _"]
    layouts += ["_ tensor domain _", "_ _ tensor domain"] if "tensor" in mesh else []
    for layout in layouts:
        for h, w in ((5, 4), (3, 2), (1, 3), (4, 1), (8, 4)):
            for c, r in ((2, 2), (1, 3), (4, 1)):
                x, y = real(3, c * r * r, h, w), real(3, c, h * r, w * r)
                label = f"{layout} {h, w, c, r}"
                yield Case(f"up {label}", lambda x, r=r: F.pixel_shuffle(x, r), (x,), (layout,), keeps=True)
                yield Case(f"down {label}", lambda x, r=r: F.pixel_unshuffle(x, r), (y,), (layout,), keeps=True)
            yield Case(f"channels {layout}", lambda x: F.channel_shuffle(x, 3), (real(2, 6, h, w),), (layout,))
    yield Case("image", lambda x: F.pixel_shuffle(x, 2), (real(8, 5, 3),), ("_ domain _",), keeps=True)
    yield Case("volume", lambda x: F.channel_shuffle(x, 2), (real(2, 4, 3, 5, 2),), ("data _ domain _ _",), keeps=True)
    modules = nn.Sequential(nn.PixelUnshuffle(2), nn.ChannelShuffle(4), nn.PixelShuffle(2))
    yield Case("modules", modules, (real(2, 3, 6, 4),), keeps=True)


def test_shuffles() -> None:
    run(_shuffles, MESHES[0], at_least=60)


def _idioms(mesh: str) -> Iterator[Case]:
    for h, w in ((7, 5), (1, 3), (6, 4), (3, 9), (16, 2)):
        x = real(2, h, w, 3)
        yield Case(f"merging {h, w}", merging, (x,), ("data domain _ _",), keeps=True)
        yield Case(f"merging {h, w}, columns", merging, (x,), ("data _ domain _",), keeps=True)
        even = real(2, 3, 2 * h, 2 * w)
        yield Case(f"focus {h, w}", focus, (even,), keeps=True)
        yield Case(f"depth {h, w}", depth_of, (even,), keeps=h > 1)

        yield Case(
            f"patchify {h, w}",
            patchify,
            (even,),
        )
        yield Case(f"unpatchify {h, w}", lambda x, h=h: unpatchify(x, h), (real(2, h * w, 8),), ("data domain _",))
        yield Case(
            f"both {h, w}",
            lambda x, h=h: unpatchify(patchify(x) * 2, h),
            (even,),
        )
        embed = (real(5, 3, 2, 2), real(5))
        patch = lambda x, v, b: F.conv2d(x, v, b, stride=2).flatten(2).transpose(1, 2)  # noqa: E731
        yield Case(f"conv {h, w}", patch, (even,), weights=embed)


def test_space_to_depth() -> None:
    run(_idioms, MESHES[0], at_least=30)


BUILDERS = (_columns, _slices, _shuffles, _idioms)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__.strip("_"))
@pytest.mark.parametrize("mesh", ["data=1,domain=3", "data=1,domain=4", TENSOR])
def test_equals_one_process(mesh: str, build: Any) -> None:
    run(build, mesh)


def _bytes(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Give, for each way of sharding, what the exchanges of an unfold and a fold sent, and the least that they need."""
    mesh, (b, c, h, w) = mesh_for("data=1,domain=4"), shape
    x = shard(real(*shape), mesh).requires_grad_()
    with record() as log, spmd(on_gather="error"):
        y = x.unfold(2, 3, 1)
        z = F.fold(F.unfold(x, 3, padding=1), (h, w), 3, padding=1)
        u = F.pixel_shuffle(x, 2)
    assert [t.placements for t in (y, z, u)] == [x.placements] * 3
    sent = [
        sum(e.num_bytes for e in log.entries if e.op == op) for op in ("Tensor.unfold", "F.fold", "F.pixel_shuffle")
    ]
    return [(n, 8 * b * c * w) for n in sent]


def test_bytes_are_those_of_the_rows_that_move() -> None:
    n, held = 10, chunks(10, 4)
    answers = run_ranks(_bytes, 4, (1, 4, n, 5))
    windows = _least(wanted_rows(n, 4, n - 2, 3, 1, 1, 0, 0, "constant"), held)
    assert sum(a[0][0] for a in answers) == windows * answers[0][0][1]
    rows = [set(range(*a)) - set(range(2 * b[0], 2 * b[1])) for a, b in zip(chunks(2 * n, 4), held, strict=True)]
    # pixels: a quarter of the channels, twice the columns
    assert sum(a[2][0] for a in answers) == sum(map(len, rows)) * answers[0][2][1] // 2
    # Where the windows of whole rows lie together, a fold sends the rows of pixels that reach over, not the windows.
    answers = run_ranks(_bytes, 4, (1, 4, 8, 5))
    overlap = _least(wanted_rows(8, 4, 8, 3, 1, 1, 1, 1, "constant"), chunks(8, 4))
    assert sum(a[1][0] for a in answers) == overlap * answers[0][1][1]


def _least(want: Any, own: Any) -> int:
    """Count the rows that ranks read and do not own."""
    return sum(len({r for r in _rows(a) if r >= 0} - set(range(*b))) for a, b in zip(want, own, strict=True))


def _rows(runs: Any) -> list[int]:
    return [start + i * step for start, num, step in runs for i in range(num)]


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, columns = shard(real(2, 4, 5, 3), mesh), shard(real(2, 9, 5), mesh, "_ _ domain")
    calls: list[Callable[[], Any]] = [
        lambda: F.unfold(x, 7),
        lambda: F.unfold(x, 3, stride=0),
        lambda: F.unfold(x[0, 0], 3),
        lambda: F.fold(columns, (5, 4), 3),
        lambda: F.fold(columns, (5, 4), 2),
        lambda: x.unfold(2, 6, 1),
        lambda: x.unfold(4, 1, 1),
        lambda: F.pixel_shuffle(x, 3),
        lambda: F.pixel_unshuffle(x, 2),
        lambda: F.channel_shuffle(x, 3),
    ]
    with record() as log, spmd(on_gather="error"):
        for attempt in calls:
            with pytest.raises((RuntimeError, IndexError)) as caught:
                attempt()
            assert not isinstance(caught.value, GatherError)
    assert [e for e in log.entries if e.op != "Tensor.__getitem__"] == []


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _one_rank() -> None:
    for case in (*_columns("data=1"), *_shuffles("data=1")):
        check(case, "data=1")


def test_one_rank_communicates_nothing() -> None:
    with record() as log:
        run_ranks(_one_rank, 1)
    assert log.entries == []


def _module() -> None:
    model = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(8, 8, 3, padding=1), nn.PixelShuffle(2)).double()
    full = real(2, 2, 6, 4)
    y = rewrite(model)(shard(full, mesh_for("data=1,domain=2")))
    assert torch.allclose(y.full_tensor(), model(full), rtol=0, atol=1e-12)


def test_modules() -> None:
    run_ranks(_module, 2)


sizes = st.integers(1, 4)
pairs = st.one_of(sizes, st.tuples(sizes, sizes))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, list[Any]]:
    """Draw a mesh and some calls: of a function by name, with its arguments, on a shape in a layout."""
    mesh = draw(st.sampled_from([*MESHES, TENSOR]))
    layouts = ["data _ domain _", "data _ _ domain", "domain _ data _"]
    layouts += ["_ tensor domain _", "_ _ domain tensor"] if mesh == TENSOR else []
    calls: list[Any] = []
    for _ in range(4):
        shape = (draw(st.integers(1, 3)), draw(st.integers(2, 3)), draw(st.integers(1, 13)), draw(st.integers(1, 7)))
        layout = draw(st.sampled_from(layouts))
        kind = draw(st.sampled_from(["unfold", "fold", "slices", "up", "down"]))
        args: tuple[Any, ...]
        if kind in ("unfold", "fold"):
            pads = st.integers(0, 3)
            padding = draw(st.one_of(pads, st.tuples(pads, pads)))
            args = (draw(pairs), draw(pairs), padding, draw(pairs))
            if not fits(shape, args):
                continue
        elif kind == "slices":
            dim = draw(st.integers(-4, 3))
            args = (dim, draw(st.integers(1, shape[dim])), draw(st.integers(1, 4)))
        else:
            args = (draw(st.integers(1, 3)),)
        calls.append((kind, shape, layout, args))
    return mesh, calls


def _drawn(calls: list[Any], mesh: str) -> Iterator[Case]:
    for kind, shape, layout, args in calls:
        label = f"{kind} {shape} {layout} {args}"
        b, c, h, w = shape
        r = args[0]
        if kind == "unfold":
            yield unfold_case(shape, layout, args)
        elif kind == "fold":
            yield fold_case(shape, layout, args)
        elif kind == "slices":
            yield Case(label, lambda x, args=args: x.unfold(*args), (real(*shape),), (layout,), keeps=True)
        elif kind == "up":
            x = real(b, c * r * r, h, w)
            yield Case(label, lambda x, r=r: F.pixel_shuffle(x, r), (x,), (layout,), keeps=True)
        else:
            x = real(b, c, h * r, w * r)
            yield Case(label, lambda x, r=r: F.pixel_unshuffle(x, r), (x,), (layout,), keeps=True)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_patches_property(example: Any) -> None:
    run(functools.partial(_drawn, example[1]), example[0], at_least=0)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_patches_property_long(example: Any) -> None:
    run(functools.partial(_drawn, example[1]), example[0], at_least=0)
