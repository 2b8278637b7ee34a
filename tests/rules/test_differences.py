"""Differences of neighbouring rows, integrals and gradients of fields against one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, TENSOR, Case, real, run
from torch import Tensor

from meshpar.batch import shard
from meshpar.intervals import chunks
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

ROWS, COLUMNS = "data _ domain _", "data _ _ domain"
Function = Callable[[Tensor, int], Any]


def _places(n: int) -> Tensor:
    """Give coordinates that are not equidistant."""
    return real(n, salt=4, low=0.5).cumsum(0)


KEPT: dict[str, Function] = {
    "diff": lambda x, d: x.diff(dim=d),
    "diff 0": lambda x, d: torch.diff(x, 0, d),
    "diff 2": lambda x, d: torch.diff(x, 2, d),
    "diff 4": lambda x, d: torch.diff(x, n=4, dim=d),
    "diff bool": lambda x, d: (x > 0).diff(dim=d),
    "diff more": lambda x, d: torch.diff(x, dim=d, prepend=torch.ones_like(x.narrow(d, 0, 1)), append=x),
    "running": lambda x, d: torch.cumulative_trapezoid(x, dx=0.3, dim=d),
    "running places": lambda x, d: torch.cumulative_trapezoid(x, _places(x.shape[d]), dim=d),
}

WHOLE: dict[str, Function] = {
    "trapezoid": lambda x, d: torch.trapezoid(x, dim=d),
    "trapezoid places": lambda x, d: torch.trapezoid(x, _places(x.shape[d]), dim=d),
    "trapezoid of itself": lambda x, d: torch.trapz(x, x * 2, dim=d),
    "trapezoid of long": lambda x, d: torch.trapezoid((x * 3).long(), dx=0.5, dim=d),
}

FIELDS: dict[str, Function] = {
    "gradient": lambda x, d: torch.gradient(x, dim=d),
    "gradient spacing": lambda x, d: torch.gradient(x, spacing=0.5, dim=(d,)),
    "gradient second": lambda x, d: torch.gradient(x, dim=d, edge_order=2),
    "gradient places": lambda x, d: torch.gradient(x, spacing=(_places(x.shape[d]),), dim=d, edge_order=2),
    "gradient two": lambda x, d: torch.gradient(x, spacing=[0.5, 2.0], dim=[d, 1]),
}


def _case(name: str, x: Tensor, d: int, layout: str) -> Case:
    function = (KEPT | WHOLE | FIELDS)[name]
    keeps = name not in WHOLE
    return Case(f"{name} {d} {tuple(x.shape)} {layout}", lambda x: function(x, d), (x,), (layout,), keeps=keeps)


def _every(mesh: str) -> Iterator[Case]:
    for h, d, layout in ((5, 2, ROWS), (9, -2, ROWS), (3, -1, COLUMNS)):
        x = real(2, 3, h, 4)
        for name in KEPT | WHOLE | FIELDS:
            yield _case(name, x, d, layout)
    for name in KEPT | WHOLE:
        yield _case(name, real(2, 3, 1, 4), 2, ROWS)


def test_every_difference() -> None:
    run(_every, "data=1,domain=3", at_least=60)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_difference_equals_one_process(mesh: str) -> None:
    run(_every, mesh, at_least=60)


def _others(mesh: str) -> Iterator[Case]:
    x = real(2, 3, 5, 4)
    yield Case("all dims", lambda x: torch.gradient(x[:, :, :, :3]), (x,), ("_ _ domain tensor",), keeps=True)
    yield Case("both", lambda x: torch.gradient(x, dim=(2, 3), edge_order=2), (x,), ("_ _ domain tensor",), keeps=True)
    yield Case("weight", lambda w, x: torch.trapezoid(w, x, dim=2), (x,), ("_ _ domain _",), (real(5, salt=2),))
    yield Case(
        "weight y", lambda x, w: torch.trapezoid(w, x, dim=2), (x,), ("_ _ domain _",), (real(2, 3, 5, 4, salt=2),)
    )
    yield Case("twice", lambda x: x.diff(dim=2).diff(dim=3).cumsum(2), (x,), ("_ _ domain tensor",), keeps=True)
    yield Case("plain before", lambda x, w: torch.diff(x, prepend=w), (x,), ("_ _ domain _",), (real(2, 3, 5, 1),))


def test_two_sharded_dims_and_weights() -> None:
    run(_others, TENSOR)


def _bytes() -> None:
    mesh, p, n = mesh_for("data=1,domain=4"), 4, 11
    x = shard(real(1, 2, n, 3), mesh, ROWS)
    rank = torch.distributed.get_rank()
    owned = chunks(n, p)
    for call, reach, m in (
        (lambda: x.diff(dim=2), (0, 1), n - 1),
        (lambda: torch.diff(x, 3, 2), (0, 3), n - 3),
        (lambda: torch.gradient(x, dim=2), (-1, 1), n),
    ):
        with record() as log, spmd(on_gather="error"):
            call()
        sent = 0
        for peer, (a, b) in enumerate(chunks(m, p)):
            rows = set(range(max(a + reach[0], 0), min(b + reach[1], n))) if b > a and peer != rank else set()
            sent += len(rows & set(range(*owned[rank])) - set(range(*owned[peer])))
        assert log.num_bytes() == sent * 2 * 3 * 8


def test_bytes_are_those_of_the_halo() -> None:
    run_ranks(_bytes, 4)


def _errors() -> None:
    full = real(2, 3, 5, 4)
    x = shard(full, mesh_for("data=1,domain=2"))
    for call in (
        lambda x: x.diff(dim=4),
        lambda x: x.diff(n=-1),
        lambda x: torch.gradient(x, dim=2, edge_order=3),
        lambda x: torch.gradient(x, dim=(2, 2)),
        lambda x: torch.gradient(x, spacing=(1.0, 2.0), dim=2),
        lambda x: torch.trapezoid(x, torch.ones(7), dim=2),
        lambda x: torch.cumulative_trapezoid(x, dim=5),
    ):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            call(full)
        with record() as log, spmd(on_gather="error"), pytest.raises(plain.type):
            call(x)
        assert not log.entries


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _drawn(seed: int, count: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for i in range(count):
        name = draw.choice(list(KEPT | WHOLE | FIELDS))
        shape = [draw.choice((1, 2, 3, 4, 5, 7, 9)) for _ in range(4)]
        order = draw.sample(range(4), 2)
        layout = ["_"] * 4
        layout[order[0]], layout[order[1]] = "data", "domain"
        d = order[draw.choice((0, 1, 1))]
        if name in FIELDS:
            shape[d], shape[1] = max(shape[d], 3), max(shape[1], 3)
            d = 2 if name == "gradient two" and d == 1 else d
            shape[d] = max(shape[d], 3)
        yield _case(name, real(*shape, salt=i), d, " ".join(layout))


def _draw_40(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh) + 500, 40)


def _draw_400(mesh: str) -> Iterator[Case]:
    yield from _drawn(len(mesh), 400)


@pytest.mark.parametrize("mesh", MESHES)
def test_any_difference_equals_one_process(mesh: str) -> None:
    run(_draw_40, mesh, at_least=40)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_many_differences(mesh: str) -> None:
    run(_draw_400, mesh, at_least=400)
