"""Functions along a sharded dim: sorting, running sums, lengths, searches; against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, Case, check, real, run, whole
from torch import Tensor
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

ROWS, COLUMNS = "data _ domain _", "data _ _ domain"
Function = Callable[[Tensor, int], Any]

KEPT: dict[str, Function] = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumsum_": lambda x, d: (x * 1).cumsum_(d),
    "cumsum single": lambda x, d: torch.cumsum(x.detach().round(), dim=d, dtype=torch.float32),
    "cumprod": lambda x, d: x.cumprod(d),
    "cumprod zeros": lambda x, d: torch.where(x.abs() > 0.9, x * 0, x).cumprod(d),
    "cumprod_": lambda x, d: (x * 2).cumprod_(d),
    "cummax": lambda x, d: x.round().cummax(d),
    "cummin": lambda x, d: torch.cummin(x, d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "sort": lambda x, d: x.sort(d),
    "sort stable": lambda x, d: torch.sort(x.round(), stable=True, dim=d, descending=True),
    "argsort": lambda x, d: x.argsort(d, descending=True),
    "topk": lambda x, d: x.topk(min(2, x.shape[d]), d, largest=False),
    "msort": lambda x, d: x.transpose(0, d).msort().transpose(0, d),
    "renorm": lambda x, d: torch.renorm(x, 2, d, 1.1),
    "renorm_": lambda x, d: (x * 2).renorm_(1, d, 1.1),
    "normalize": lambda x, d: F.normalize(x, dim=d),
}

DROPPED: dict[str, Function] = {
    "kthvalue": lambda x, d: x.kthvalue(x.shape[d], d),
    "kthvalue keepdim": lambda x, d: torch.kthvalue(x, 1, d, True),
    "median": lambda x, d: x.median(d),
    "median keepdim": lambda x, d: x.median(dim=d, keepdim=True),
    "nanmedian": lambda x, d: torch.where(x > 1, x * float("nan"), x).detach().nanmedian(d),
    "mode": lambda x, d: x.round().mode(d),
    "quantile": lambda x, d: x.quantile(0.3, d, True),
    "nanquantile": lambda x, d: torch.nanquantile(x, x.new_tensor([0.3, 0.9]), dim=d, interpolation="lower"),
    "cosine": lambda x, d: F.cosine_similarity(x, x.flip(1) + 0.1, d),
}


def _case(name: str, function: Function, x: Tensor, d: int, layout: str, **more: Any) -> Case:
    return Case(
        f"{name} {d} {tuple(x.shape)} {layout}", lambda x: function(x, d), (x,), (layout,), tolerance=1e-11, **more
    )


def _every(mesh: str) -> Iterator[Case]:
    x = real(2, 3, 5, 4)
    for layout, dims in ((ROWS, (2, -1)), (COLUMNS, (-1,))):
        for d in dims:
            for name, function in KEPT.items():
                yield _case(name, function, x, d, layout, keeps=True)
            for name, function in DROPPED.items():
                yield _case(name, function, x, d, layout)
    for h in (1, 2):
        for name, function in KEPT.items():
            yield _case(name, function, real(2, 3, h, 4), 2, ROWS, keeps=True)


def _rows(mesh: str) -> Iterator[Case]:
    x = real(2, 3, 5, 4)
    for name, function in (KEPT | DROPPED).items():
        yield _case(name, function, x, 2, ROWS, **({"keeps": True} if name in KEPT else {}))


def test_every_function_along_rows() -> None:
    run(_rows, "data=1,domain=3", at_least=26)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_function_equals_one_process(mesh: str) -> None:
    run(_every, mesh, at_least=100)


def _whole_numbers(mesh: str) -> Iterator[Case]:
    x = whole(2, 3, 5, 4)
    for name in ("cumsum", "cumprod", "cummax", "sort", "topk", "median", "mode", "kthvalue"):
        args = (2, 2) if name in ("topk", "kthvalue") else (2,)
        yield Case(name, lambda x, n=name, a=args: getattr(torch, n)(x, *a), (x,))
    yield Case("bool", lambda x: ((x > 3).cumsum(2), (x > 3).int().cumprod(2)), (x,))
    yield Case("half", lambda x: x.half().cumsum(2).double(), (x,))
    yield Case("0-d", lambda x: x.sum().cumsum(0), (x,))


def test_whole_numbers() -> None:
    run(_whole_numbers, "data=1,domain=3")


def _others(mesh: str) -> Iterator[Case]:
    x, y = real(2, 3, 4, 6), real(2, 3, 4, 6, salt=3)
    bounds = torch.linspace(-1, 1, 5, dtype=torch.float64)
    plain = y.sort(-1).values
    for layout in (ROWS, COLUMNS):
        for d in (2, 3):
            yield Case(f"glu {d}", lambda x, d=d: F.glu(x, d), (x,), (layout,), keeps=True)
        for k in range(-1, 4):
            yield Case(f"rot90 {k}", lambda x, k=k: torch.rot90(x, k, (-2, -1)), (x,), (layout,))
            yield Case(f"rot90 channels {k}", lambda x, k=k: x.rot90(k, [1, 2]), (x,), (layout,))
        yield Case("pairwise", lambda x, y: F.pairwise_distance(x, y, keepdim=True), (x, y), (layout, layout))
        yield Case("pairwise weight", lambda x, w: F.pairwise_distance(x, w, 1.0), (x,), (layout,), (y[0, 0, 0],))
        yield Case("cosine weight", lambda x, w: F.cosine_similarity(x, w, 2, 2.0), (x,), (layout,), (y,))
        yield Case("cosine broadcast", lambda x, w: F.cosine_similarity(x, w), (x,), (layout,), (y[:1, :, :, :1],))
        yield Case("bucketize", lambda x: torch.bucketize(x, bounds, right=True), (x,), (layout,), keeps=True)
        yield Case("searchsorted", lambda x: torch.searchsorted(bounds, x, side="right"), (x,), (layout,), keeps=True)
        yield Case(
            "rows", lambda x, s: torch.searchsorted(s, x, out_int32=True), (x, plain), (layout, ROWS), keeps=True
        )
        yield Case("plain rows", lambda x: torch.searchsorted(plain, x), (x,), (layout,), keeps=True)


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_halves_turns_distances_and_searches(mesh: str) -> None:
    run(_others, mesh)


def _whole_sorts() -> None:
    x = real(2, 3, 5, 4)
    for label, fn in {
        "median": lambda x: x.median(),
        "nanmedian": lambda x: torch.nanmedian(x),
        "quantile": lambda x: x.quantile(0.2),
    }.items():
        check(Case(label, fn, (x,), gathers=True), "data=1,domain=2")
        check(Case(label, fn, (x,), ("_ _ _ _",), quiet=True), "data=1,domain=2")
    check(Case("sort", lambda x: x.sort(), (real(9),), ("domain",), gathers=True), "data=1,domain=2")
    check(Case("cumsum", lambda x: x.cumsum(0), (real(9),), ("domain",), keeps=True), "data=1,domain=2")


def test_what_has_no_other_dim_is_gathered_and_said() -> None:
    run_ranks(_whole_sorts, 2)


def _bytes() -> None:
    mesh = mesh_for("data=1,domain=4")
    x = shard(real(2, 4, 6, 5), mesh, ROWS).requires_grad_()  # 2, 2, 2 and no rows
    rank = torch.distributed.get_rank()
    row = 2 * 4 * 5 * 8
    with record() as log, spmd(on_gather="error"):
        y = x.cumsum(2)
    assert log.num_bytes() == row * (3 - rank)  # a total to each rank behind
    with record() as log:
        y.sum().backward()
    assert log.num_bytes(kind="halo") == row * rank
    with record() as log, spmd(on_gather="error"):
        values, indices = x.sort(2)
    rows = 2 if rank < 3 else 0
    piece = 2 * (4 - 1) * 5 * rows * 8  # what the three other ranks get of a piece, one channel each
    back = 2 * 1 * 5 * (6 - rows) * 8
    assert [e.num_bytes for e in log.entries] == [piece, back, back]
    assert values.placements == indices.placements == x.placements
    with record() as log, spmd(on_gather="error"):
        x.sort(1)
    assert not log.entries


def test_bytes_are_the_least() -> None:
    run_ranks(_bytes, 4)


def _out_and_errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    full = real(2, 3, 5, 4)
    x = shard(full, mesh)
    with spmd(on_gather="error"):
        values, indices = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)
        torch.sort(x, 2, out=(values, indices))
        assert torch.equal(values.full_tensor(), full.sort(2).values)
        torch.cumsum(x, 2, out=values)
        assert torch.allclose(values.full_tensor(), full.cumsum(2))
    for call in (
        lambda x: x.cumsum(4),
        lambda x: x.sort(-5),
        lambda x: x.topk(6, 2),
        lambda x: x.kthvalue(6, 2),
        lambda x: x.quantile(1.5, 2),
        lambda x: x.long().quantile(0.5, 2),
        lambda x: F.glu(x, 2),
        lambda x: x.renorm(2, 5, 1.0),
        lambda x: F.cosine_similarity(x, x[:, :2]),
        lambda x: torch.rot90(x, 1, (2, 2)),
    ):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            call(full)
        with record() as log, spmd(on_gather="error"), pytest.raises(plain.type):
            call(x)
        assert not [e for e in log.entries if e.kind != "halo"]  # the slice in an argument is none of ours


def test_out_arguments_and_errors() -> None:
    run_ranks(_out_and_errors, 2)


def _drawn(seed: int, count: int) -> Iterator[Case]:
    draw = random.Random(seed)
    functions = [(n, f, True) for n, f in KEPT.items()] + [(n, f, False) for n, f in DROPPED.items()]
    for i in range(count):
        name, function, keeps = draw.choice(functions)
        num_dims = draw.choice((3, 4))
        shape = [draw.choice((1, 2, 3, 4, 5, 7, 9)) for _ in range(num_dims)]
        order = draw.sample(range(num_dims), 3)
        layout = ["_"] * num_dims
        layout[order[0]], layout[order[1]] = "data", "domain"
        shape[order[2]] = draw.randint(2, 6)  # a dim to step aside to
        d = draw.choice([order[0], order[1], order[1], order[1] - num_dims])
        yield _case(name, function, real(*shape, salt=i), d, " ".join(layout), **({"keeps": True} if keeps else {}))


def _draw_40(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh) + 500, 40)


def _draw_400(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh), 400)


@pytest.mark.parametrize("mesh", MESHES)
def test_any_function_along_a_dim_equals_one_process(mesh: str) -> None:
    run(_draw_40, mesh, at_least=40)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_many_functions_along_dims(mesh: str) -> None:
    run(_draw_400, mesh, at_least=400)
