"""Linear algebra of whole matrices with a sharded batch, and cross products, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, Case, real, run
from torch import Tensor

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

BATCH, ROWS = "data domain _ _", "data _ domain _"
EYE = torch.eye(3, dtype=torch.float64) * 5


def _symmetric(x: Tensor) -> Tensor:
    return x + x.transpose(-1, -2) + EYE


ONE: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: lambda x, n=name: getattr(torch.linalg, n)(_symmetric(x))
        for name in ("inv", "det", "slogdet", "svdvals", "eigvalsh", "qr", "cholesky", "matrix_exp", "pinv", "inv_ex")
    },
    "logdet": lambda x: (x + EYE).logdet(),
    "inverse": lambda x: torch.inverse(x + EYE),
    "rank": torch.linalg.matrix_rank,
    "power": lambda x: torch.linalg.matrix_power(x, 3),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    "eigh": lambda x: torch.linalg.eigh(_symmetric(x)).eigenvalues,
    "lu": lambda x: torch.linalg.lu_factor(x + EYE),
    "named": lambda x: torch.linalg.inv(A=x + EYE),
}


def _cases(mesh: str) -> Iterator[Case]:
    solve = torch.linalg.solve
    for b in (1, 2, 5):
        x = real(2, b, 3, 3, low=-0.7, high=0.7, salt=b)
        for layout in (BATCH, ROWS) if b > 1 else (BATCH,):
            for name, fn in ONE.items():
                yield Case(f"{name} {b} {layout}", fn, (x,), (layout,), tolerance=1e-11)
            for d in (-1, -2):
                cross = lambda x, y, d=d: torch.linalg.cross(x, y, dim=d)  # noqa: E731
                yield Case(f"cross {d} {b}", cross, (x, real(2, b, 3, 3, salt=3)), (layout, layout))
        for label, fn, other, text in (
            ("solve", solve, real(2, b, 3, 2), BATCH),
            ("solve vectors", solve, real(2, b, 3), "data domain _"),
            ("solve on another axis", solve, real(2, b, 3, 1), "_ _ _ _"),
            ("triangular", lambda a, y: torch.linalg.solve_triangular(a, y, upper=True), real(2, b, 3, 2), BATCH),
            ("cholesky", lambda a, y: torch.cholesky_solve(y, a), real(2, b, 3, 2), BATCH),
        ):
            yield Case(f"{label} {b}", lambda x, y, f=fn: f(x + EYE, y), (x, other), (BATCH, text), tolerance=1e-11)
        yield Case(f"weight {b}", lambda x, w: solve(w + EYE, x), (x,), (BATCH,), (real(3, 3),), tolerance=1e-11)
        yield Case(f"weight b {b}", lambda x, w: solve(x + EYE, w), (x,), (BATCH,), (real(b, 3, 1),), tolerance=1e-11)
    image, w = real(2, 3, 5, 4), real(1, 3, 1, 1)
    yield Case("cross fields", lambda x: torch.cross(x, x.flip(2), dim=1), (image,), keeps=True)
    yield Case("first of three", lambda x: torch.cross(x, x.flip(2)), (image,), keeps=True)
    yield Case("cross weight", lambda x, w: torch.linalg.cross(x, w, dim=1), (image,), None, (w,), keeps=True)


@pytest.mark.parametrize("mesh", MESHES)
def test_matrices_equals_one_process(mesh: str) -> None:
    run(_cases, mesh, at_least=90)


def _few(mesh: str) -> Iterator[Case]:
    yield from (case for i, case in enumerate(_cases(mesh)) if i % 4 == 0)


def test_matrices() -> None:
    run(_few, "data=2,domain=2", at_least=20)


def _quiet() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(_symmetric(real(2, 5, 3, 3)), mesh, BATCH)
    with record() as log, spmd(on_gather="error"):
        assert torch.linalg.inv(x).placements == x.placements
        assert torch.linalg.det(x).shape == (2, 5)
        torch.linalg.solve(x, x)
        torch.linalg.eigh(x)
    assert not log.entries
    for call in (lambda x: torch.linalg.inv(x[..., :2]), lambda x: torch.linalg.solve(x, x[..., :2, :])):
        with spmd(on_gather="error"), pytest.raises(RuntimeError):
            call(x)


def test_a_batch_of_matrices_sends_nothing() -> None:
    run_ranks(_quiet, 2)


def _gathered(mesh: str) -> Iterator[Case]:
    yield Case(
        "alone", lambda x: torch.linalg.inv(x + EYE), (real(3, 3),), ("domain _",), gathers=True, tolerance=1e-11
    )
    solve = lambda x, y: torch.linalg.solve(x + EYE, y)  # noqa: E731
    yield Case("rows", solve, (real(2, 2, 3, 3), real(2, 2, 3, 1)), (ROWS, ROWS), gathers=True, tolerance=1e-11)


def test_sharded_matrices_without_a_batch_are_gathered_and_said() -> None:
    run(_gathered, "data=1,domain=2", at_least=2)
