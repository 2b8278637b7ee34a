"""F.linear: whole features times weights, with rows and samples wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rule_cases import MESHES, TENSOR, Case, check, real, run
from torch import nn
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.record import record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks


def _cases(mesh: str) -> Iterator[Case]:
    w, b = real(7, 6), real(7, salt=1)
    shapes = {
        "data _": (5, 6),
        "data domain _": (3, 5, 6),
        "data _ domain _": (3, 2, 5, 6),
        "data domain _ _": (2, 1, 3, 6),
        "domain data _": (9, 4, 6),
        "_ _": (5, 6),
        "_": (6,),
    }
    for layout, shape in shapes.items():
        x = real(*shape)
        yield Case(layout, F.linear, (x,), (layout,), (w, b), keeps=True)
        yield Case(f"{layout} no bias", F.linear, (x,), (layout,), (w,), keeps=True, quiet=True)
        yield Case(
            f"{layout} named", lambda x, w, b: F.linear(input=x, weight=w, bias=b), (x,), (layout,), (w, b), keeps=True
        )
        yield Case(f"{layout} one feature", F.linear, (x,), (layout,), (w[0],))
        replicated = " ".join("_" for _ in "ab")
        yield Case(f"{layout} activation weight", F.linear, (x, w, b), (layout, replicated, "_"), keeps=True)
    yield Case("empty batch", F.linear, (real(0, 5, 6),), ("data domain _",), (w, b), keeps=True)
    x = real(2, 5, 6)
    yield Case(
        "chain",
        lambda x, w, v: F.linear(F.relu(F.linear(x, w)), v),
        (x,),
        ("data domain _",),
        (w, w.T.clone()),
        keeps=True,
    )


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_linear(mesh: str) -> None:
    run(_cases, mesh, at_least=30)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_linear_on_every_mesh(mesh: str) -> None:
    run(_cases, mesh, at_least=30)


def _sharded(mesh: str) -> Iterator[Case]:
    w, b, x = real(7, 6), real(7, salt=1), real(3, 5, 6)
    yield Case("features", F.linear, (x,), ("data _ domain",), (w, b))
    yield Case("weight alone", lambda w, x: F.linear(x, w), (w,), ("_ domain",), (x,))
    yield Case("both", F.linear, (x, w, b), ("data _ domain", "domain _", "_"))


def test_sharded_features_stay_sharded() -> None:
    run(_sharded, "data=1,domain=2", at_least=3)


def _field_29() -> None:
    """Gradients are summed where the input is sharded and counted once where it is replicated."""
    for layout in ("data domain _", "data domain tensor", "data tensor _", "tensor domain _", "_ _ _"):
        check(Case(layout, F.linear, (real(2, 5, 6),), (layout,), (real(7, 6), real(7))), TENSOR)
    for layout in ("data _ domain _", "data _ domain tensor", "data _ _ _"):
        x, w = real(2, 3, 5, 4), real(6, 3, 1, 1)
        check(Case(f"1x1 {layout}", F.conv2d, (x,), (layout,), (w, real(6))), TENSOR)


def test_field_29_a_1x1_convolution_on_domain_and_tensor() -> None:
    run_ranks(_field_29, 4)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(3, 5, 6), mesh, "data domain _")
    with record() as log, spmd(on_gather="error"):
        for args in (
            (torch.ones(7, 5),),
            (torch.ones(7, 6), torch.ones(6)),
            (torch.ones(2, 7, 6),),
            (torch.ones(7, 6),),
        ):
            with pytest.raises(RuntimeError):
                F.linear(x, *args)  # the last has another dtype
    assert log.entries == []


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).double()
    mesh = mesh_for("data=2,domain=2")
    full = real(4, 5, 6)
    with record() as log:
        y = rewrite(model)(shard(full, mesh, "data domain _"))
    assert torch.allclose(y.full_tensor(), model(full), rtol=0, atol=1e-12)
    assert log.entries == []


def test_modules_are_local() -> None:
    run_ranks(_module, 4)
