"""Reductions and extremes: every form of dims and dtype, sharded dims or not, uneven and empty shards, ties, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, check, real, run, whole
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

DIMS: tuple[Any, ...] = (None, 0, 1, 2, -2, -1, (0, 2), (1, 3), (-1, -2), (0, 1, 2, 3), ())


def _forms(name: str, dims: Any, **more: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for dim, keepdim in itertools.product(dims, (False, True)):
        f = getattr(torch, name)
        if dim is None:
            if not keepdim:
                yield f"{name}()", lambda x, f=f: f(x, **more)
        else:
            yield f"{name}({dim}, {keepdim})", lambda x, f=f, d=dim, k=keepdim: f(x, d, k, **more)


def _sums(mesh: str) -> Iterator[Case]:
    for height in (5, 1):
        x = real(3, 2, height, 4)
        holes = torch.where(x > 0.8, torch.full_like(x, float("nan")), x)
        for name in ("sum", "mean"):
            for label, fn in _forms(name, DIMS):
                yield Case(f"{label} H={height}", fn, (x,))
        for name in ("nansum", "nanmean"):
            for label, fn in _forms(name, DIMS):
                yield Case(f"{label} H={height}", fn, (holes,))
        for name in ("any", "all"):
            for label, fn in _forms(name, DIMS):
                yield Case(f"{label} H={height}", fn, ((x > -1.2).to(torch.float64) * x,), gradients=False)
                yield Case(f"{label} H={height} bool", fn, (x > 1.2,), gradients=False)
        for dim in DIMS:
            yield Case(f"count {dim}", lambda x, d=dim: torch.count_nonzero(x, d), (whole(3, 2, height, 4, high=2),))
    x, n = real(3, 2, 5, 4), whole(3, 2, 5, 4)
    yield Case("methods", lambda x: (x.sum(), x.sum((0, 2)), x.mean(dim=-2, keepdim=True), x.nansum(2)), (x,))
    yield Case("names", lambda x: (torch.sum(input=x, dim=2), x.sum(axis=2, keepdims=True), x.mean(axis=(0, 2))), (x,))
    yield Case("dtype", lambda x: (x.sum(dtype=torch.float32), x.mean(2, dtype=torch.float32)), (x,), tolerance=1e-6)
    yield Case("ints", lambda n: (n.sum(), n.sum(2, dtype=torch.int32), n.float().mean(), n.nansum(2)), (n,))
    yield Case("int mean", lambda n: n.mean(2, dtype=torch.float64), (n,))
    yield Case("bools", lambda n: ((n > 3).sum(), (n > 3).sum((0, 2)), (n > 3).any(2), (n > 3).all()), (n,))
    yield Case("uint8", lambda n: (n.to(torch.uint8).any(2), n.to(torch.uint8).all(2), n.to(torch.uint8).sum()), (n,))
    z = torch.complex(x, x + 1)
    yield Case("complex", lambda z: (z.sum(), z.mean((0, 2)), z.sum(2, keepdim=True)), (z,))
    yield Case("0-d", lambda x: (x.sum(), x.mean(0), x.amax(), x.max(), x.any(), x.sum(-1)), (x[0, 0, 0, 0],), ("",))
    yield Case("empty batch", lambda x: (x.sum(2), x.mean(2), x.sum(), x.nansum((0, 2)), x.mean()), (x[:0],))
    yield Case("of nothing", lambda x: (x.sum(2), x.mean(2), x.sum(), x.any(), x.all()), (x[:, :, :0],))
    yield Case("out", lambda x: torch.sum(x.detach(), 2, out=x.detach().new_zeros(3, 2, 4)), (x,), gradients=False)
    yield Case("then sharded", lambda x: x / x.sum((1, 2), keepdim=True) + x.mean(), (x,))
    yield Case("square", lambda x: ((x - x.mean(2, keepdim=True)) ** 2).sum(), (x,))


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_sums(mesh: str) -> None:
    run(_sums, mesh, at_least=200)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_sums_on_every_mesh(mesh: str) -> None:
    run(_sums, mesh, at_least=200)


def _extremes_of(heights: tuple[int, ...], dims: Any) -> Iterator[Case]:
    for height in heights:
        distinct = torch.randperm(3 * 2 * height * 4, generator=torch.Generator().manual_seed(3)).double()
        ties = whole(3, 2, height, 4, high=3).double()
        holes = torch.where(ties == 0, torch.full_like(ties, float("nan")), ties)
        low = torch.full_like(ties, float("-inf"))
        inputs = {"distinct": distinct.view(3, 2, height, 4), "ties": ties, "nan": holes, "-inf": low, "inf": -low}
        for kind, x in inputs.items():
            for name in ("amax", "amin"):
                for label, fn in _forms(name, dims):
                    yield Case(f"{label} {kind} H={height}", fn, (x,))
            for name in ("max", "min"):
                for label, fn in _forms(name, [None, *(d for d in dims if isinstance(d, int))]):
                    yield Case(f"{label} {kind} H={height}", fn, (x,))
            for name in ("argmax", "argmin"):
                for label, fn in _forms(name, [None, *(d for d in dims if isinstance(d, int))]):
                    yield Case(f"{label} {kind} H={height}", fn, (x,), gradients=False)


def _extremes(mesh: str) -> Iterator[Case]:
    yield from _extremes_of((5, 1), (None, 0, -2, (0, 2), (1, 3)))
    yield from _other_extremes()


def _all_extremes(mesh: str) -> Iterator[Case]:
    yield from _extremes_of((5, 1, 9), DIMS)
    yield from _other_extremes()


def _other_extremes() -> Iterator[Case]:
    x, n = real(3, 2, 5, 4), whole(3, 2, 5, 4)
    yield Case("pairs", lambda x, y: (torch.max(x, y), x.min(y), torch.max(x, other=y)), (x, -x))
    yield Case("pair weight", lambda x, w: (torch.max(x, w), torch.min(w, x)), (x,), weights=(x[:1, :, :, :1],))
    yield Case("names", lambda x: (x.max(dim=2).values, torch.min(x, dim=2, keepdim=True)[1], x.max(axis=2)[0]), (x,))
    yield Case("ints", lambda n: (n.amax(2), n.max(), n.max(2), n.argmin(2), n.int().amin((0, 2)), n.argmax()), (n,))
    yield Case("bools", lambda n: ((n > 3).amax(2), (n > 3).max(), (n > 3).max(2)), (n,))
    yield Case("short", lambda n: (n.to(torch.int16).amax(2).int(), n.to(torch.uint8).max(2)), (n,))
    yield Case("half", lambda x: (x.half().amax(2), x.bfloat16().max(2), x.half().max()), (x,))
    yield Case("aminmax", lambda x: (torch.aminmax(x), x.aminmax(dim=2), x.aminmax(dim=2, keepdim=True)), (x,))
    yield Case("argmax keepdim", lambda x: (x.argmax(keepdim=True), torch.argmax(x, dim=-2, keepdim=True)), (x,))
    yield Case("used", lambda x: x - x.amax((1, 2, 3), keepdim=True) + x.max() * x.min(2, keepdim=True)[0], (x,))
    out = (torch.zeros(3, 2, 4).double(), torch.zeros(3, 2, 4).long())
    yield Case(
        "out", lambda x, a, b: tuple(torch.max(x.detach(), 2, out=(a.clone(), b.clone()))), (x, *out), gradients=False
    )


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_extremes(mesh: str) -> None:
    run(_extremes, mesh, at_least=300)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_extremes_on_every_mesh(mesh: str) -> None:
    run(_all_extremes, mesh, at_least=1000)


def _two_axes(mesh: str) -> Iterator[Case]:
    x, layout = real(2, 3, 5, 7), ("_ _ domain tensor",)
    for name in ("sum", "mean", "amax", "any", "argmax"):
        f = getattr(torch, name)
        yield Case(name, f, (x,), layout, gradients=name in ("sum", "mean", "amax"))
        if name != "argmax":
            yield Case(f"{name} grid", lambda x, f=f: f(x, (2, 3)), (x,), layout, gradients=name not in ("any",))
        yield Case(f"{name} rows", lambda x, f=f: f(x, 2), (x,), layout, gradients=name not in ("any", "argmax"))
    yield Case("max", lambda x: (torch.max(x), x.max(3), x.min(2)), (x,), layout)


def test_two_spatial_axes() -> None:
    run(_two_axes, TENSOR, at_least=10)


def _half(dtype: torch.dtype) -> None:
    """Parts are added up in float32: 3000 ones in bfloat16 are 3000 to its rounding, not 256."""
    mesh = mesh_for("data=1,domain=4")
    full = torch.ones(1, 1, 3000, 2, dtype=dtype)
    x = shard(full, mesh)
    with spmd(on_gather="error"):
        found = [x.sum(), x.sum(2), x.mean(2), x.norm(), x.var(2), (x * 300).mean()]
    want = [full.sum(), full.sum(2), full.mean(2), full.norm(), full.var(2), (full * 300).mean()]
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.full_tensor(), b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_up_in_float32(dtype: torch.dtype) -> None:
    run_ranks(_half, 4, dtype)


def _one_rank_empty() -> None:
    for shape, layout in (((3, 4), "domain _"), ((1, 4), "domain _")):
        check(Case("mean", lambda x: (x.mean(), x.mean(0), x.sum(0)), (real(*shape),), (layout,)), "data=1,domain=2")


def test_field_3_mean_with_an_empty_rank() -> None:
    run_ranks(_one_rank_empty, 2)


def _bytes() -> None:
    mesh = mesh_for("data=2,domain=2")
    x = shard(real(2, 3, 5, 4), mesh).requires_grad_()
    with record() as log, spmd(on_gather="error"):
        y = x.mean((1, 3))
        assert isinstance(y, DTensor)
        assert y.placements == (*x.placements[:1], y.placements[1], Replicate())
        assert log.num_bytes() == 0  # neither dim is sharded
        z = x.sum((0, 2))
        z.sum().backward()
    # 3 x 4 float64 once around a ring of four ranks; nothing backward.
    (entry,) = log.entries
    assert (entry.kind, entry.axis, entry.num_bytes) == ("reduction", "data_domain", 2 * 12 * 8 * 3 // 4)
    assert x.grad is not None
    assert x.grad.placements == x.placements


def test_one_all_reduce_forward_and_none_backward() -> None:
    run_ranks(_bytes, 4)


def _refusals() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 5, 4), mesh)
    n = shard(whole(2, 3, 5, 4), mesh)
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (IndexError, lambda: x.sum(4)),
        (RuntimeError, lambda: x.sum((2, -2))),
        (RuntimeError, lambda: n.mean()),
        (RuntimeError, lambda: n.mean(2)),
        (IndexError, lambda: x.max(7)),
        (IndexError, lambda: x.argmax(7)),
        (TypeError, lambda: x.sum(2, dtipe=torch.float32)),
        (IndexError, lambda: x[:, :, :0].amax(2)),
        (IndexError, lambda: x[:, :, :0].argmax(2)),
    ]
    with record() as log, spmd(on_gather="error"):
        for error, call in wrong:
            with pytest.raises(error):
                call()
    assert log.num_bytes() == 0


def test_wrong_arguments_raise_as_torch_does() -> None:
    run_ranks(_refusals, 2)


OPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": lambda x, d, k: torch.var(x, d, keepdim=k, correction=0),
    "std": lambda x, d, k: torch.std(x, d, keepdim=k, correction=0),
    "norm": lambda x, d, k: torch.norm(x, 3, d, k),
    "logsumexp": torch.logsumexp,
}


def _drawn(cases: list[tuple[str, tuple[int, ...], tuple[int, ...], bool, str]], mesh: str) -> None:
    for name, shape, dims, keepdim, layout in cases:
        x = real(*shape, salt=len(shape))
        fn = OPS[name]
        check(Case(name, lambda x, f=fn, d=dims, k=keepdim: f(x, d, k), (x,), (layout,), tolerance=1e-9), mesh)


@st.composite
def drawn_cases(draw: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], bool, str]:
    num_dims = draw(st.integers(1, 5))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=num_dims, max_size=num_dims)))
    dims = tuple(draw(st.sets(st.integers(0, num_dims - 1), min_size=1)))
    places = draw(st.permutations(range(num_dims)))
    tokens = ["_"] * num_dims
    for axis, place in zip(
        draw(st.sampled_from([("domain", "data"), ("domain",), ("data", "domain")])), places, strict=False
    ):
        tokens[place] = axis
    return draw(st.sampled_from(sorted(OPS))), shape, dims, draw(st.booleans()), " ".join(tokens)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(drawn_cases(), min_size=5, max_size=15))
def test_property(mesh: str, cases: Any) -> None:
    run_ranks(_drawn, ranks_of(mesh), cases, mesh)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(drawn_cases(), min_size=5, max_size=15))
def test_property_long(mesh: str, cases: Any) -> None:
    run_ranks(_drawn, ranks_of(mesh), cases, mesh)
