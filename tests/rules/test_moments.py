"""Variances, norms, products, log-sum-exp and softmax: all signatures, sharded dims, and the numbers that hurt."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, TENSOR, Case, real, run, whole
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

DIMS = (0, 2, -2, -1, (0, 2), (1, 3), (2, 3), (0, 1, 2, 3))


def _variances(mesh: str) -> Iterator[Case]:
    for height in (5, 1):
        x = real(3, 2, height, 4)
        # One row cannot vary: numbers without a meaning, and a warning of torch, on one process too.
        for name in ("var", "std", "var_mean", "std_mean") if height > 1 else ():
            f = getattr(torch, name)
            for dim, keepdim in itertools.product((*DIMS, None), (False, True)):
                label = f"{name} {dim} {keepdim} H={height}"
                yield Case(label, lambda x, f=f, d=dim, k=keepdim: f(x, d, correction=0, keepdim=k), (x,))
        yield Case(f"all H={height}", lambda x: (x.var(), x.std(), torch.var_mean(x), x.var(unbiased=False)), (x,))
    x = real(3, 2, 5, 4)
    yield Case(
        "flags", lambda x: (x.var(False), x.std(True), torch.var(x, 2, False), torch.std(x, (0, 2), True, True)), (x,)
    )
    yield Case(
        "names", lambda x: (torch.var(x, dim=2, unbiased=False), x.std(axis=2, correction=2, keepdims=True)), (x,)
    )
    yield Case("corrections", lambda x: [torch.var(x, 2, correction=c) for c in (0, 1, 2, 3.5)], (x,))
    far = x.float() * 1e-2 + 1e3
    yield Case(
        "mean >> std", lambda x: (x.var(), x.std(2), torch.var_mean(x, (0, 2))), (far,), tolerance=2e-7, gradients=False
    )
    yield Case("mean >> std 64", lambda x: (x.var(), x.std(2)), (x + 1e8,), tolerance=1e-6)
    yield Case(
        "constant",
        lambda x: (x.std(), x.var(2), x.std((0, 2)), torch.std_mean(x, 2)),
        (torch.ones(3, 2, 5, 4).double(),),
    )
    z = torch.complex(x, x.flip(0))
    yield Case("complex", lambda z: (z.var(2), z.std(), *torch.var_mean(z, (0, 2))), (z,))
    yield Case("half", lambda x: (x.half().var(2), x.bfloat16().std()), (x,), tolerance=1e-2)
    yield Case("normalised", lambda x: (x - x.mean(2, keepdim=True)) / (x.std(2, keepdim=True) + 1e-5), (x,))
    yield Case("nan", lambda x: (torch.log(x).var(2), torch.log(x).std(0)), (x,))


def _norms(mesh: str, heights: tuple[int, ...] = (5,), dims: Any = (0, 2, (1, 3), (2, 3), None)) -> Iterator[Case]:
    for height in heights:
        x = real(3, 2, height, 4)
        zeros = torch.where(x > 0, x, torch.zeros_like(x))
        zeros[:, :, :, 1] = 0
        for p in (2, 1, 0, 3, 1.5, 0.5, -1, math.inf, -math.inf):
            for dim in dims:
                label = f"norm {p} {dim} H={height}"
                # torch's own gradients of a root at zero are not finite for p < 1 and p < 0.
                inputs = (x,) if p in (0.5, -1) else (x, zeros)
                for given in inputs:
                    yield Case(
                        label, lambda x, p=p, d=dim: torch.linalg.vector_norm(x, p, d), (given,), tolerance=1e-11
                    )
                    if dim is not None:
                        fn = lambda x, p=p, d=dim: (torch.norm(x, p, d, True), x.norm(p, dim=d))  # noqa: E731
                        yield Case(label + " torch", fn, (given,), tolerance=1e-11)
    x = real(3, 2, 5, 4)
    yield Case(
        "forms", lambda x: (x.norm(), torch.norm(x), x.norm(3), x.norm("fro", dim=(1, 2)), torch.norm(x, dim=2)), (x,)
    )
    yield Case(
        "linalg", lambda x: (torch.linalg.norm(x), torch.linalg.norm(x, dim=2), torch.linalg.norm(x, 3, 2)), (x,)
    )
    yield Case("fro", lambda x: (torch.linalg.norm(x, "fro", (1, 2)), torch.linalg.norm(input=x, dim=(0, 2))), (x,))
    wider = lambda x: (torch.norm(x, 2, 2, dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64))  # noqa: E731
    yield Case("dtype", wider, (x.float(),), tolerance=1e-6)
    yield Case(
        "keepdim",
        lambda x: (torch.linalg.vector_norm(x, keepdim=True), torch.linalg.vector_norm(x, 1, (0, 2), True)),
        (x,),
    )
    yield Case("complex", lambda z: (z.norm(), torch.linalg.vector_norm(z, 3, 2)), (torch.complex(x, x.flip(0)),))
    yield Case("half", lambda x: ((x.half() * 200).norm(), x.bfloat16().norm(dim=2)), (x,), tolerance=1e-2)
    for dim, p in itertools.product((1, 2, 3, -2), (2.0, 1.0, 3.0)):
        yield Case(f"normalize {dim} {p}", lambda x, d=dim, p=p: F.normalize(x, p, d), (x,))
    yield Case(
        "normalize", lambda x: (F.normalize(x), F.normalize(x, dim=2, eps=10.0), F.normalize(x * 0, dim=2)), (x,)
    )


def _all_norms(mesh: str) -> Iterator[Case]:
    yield from _norms(mesh, (5, 1), (*DIMS, None))


def _exponentials(mesh: str) -> Iterator[Case]:
    for height in (5, 1):
        x = real(3, 2, height, 4)
        low = torch.where(x > 0, x, torch.full_like(x, float("-inf")))
        for dim in DIMS:
            yield Case(f"logsumexp {dim}", lambda x, d=dim: (torch.logsumexp(x, d), x.logsumexp(d, keepdim=True)), (x,))
            yield Case(f"logsumexp {dim} -inf", lambda x, d=dim: torch.logsumexp(x, d), (low,))
        for d in (0, 1, 2, 3, -2):
            forms = {
                "torch": lambda x, d=d: (torch.softmax(x, d), torch.log_softmax(x, d)),
                "Tensor": lambda x, d=d: (x.softmax(d), x.log_softmax(dim=d)),
                "F": lambda x, d=d: (F.softmax(x, d), F.log_softmax(x, dim=d), F.softmin(x, d)),
                "special": lambda x, d=d: (torch.special.softmax(x, d), torch.special.log_softmax(x, d)),
            }
            for label, fn in forms.items():
                yield Case(f"softmax {label} {d} H={height}", fn, (x * 5,), keeps=True)
            yield Case(f"softmax -inf {d}", forms["torch"], (low,), keeps=True)
            yield Case(f"softmax large {d}", forms["torch"], (x * 1000,), keeps=True)
    x, n = real(3, 2, 5, 4), whole(3, 2, 5, 4)
    yield Case("all -inf", lambda x: torch.logsumexp(x, 2), (torch.full((3, 2, 5, 4), float("-inf")).double(),))
    yield Case("inf", lambda x: torch.logsumexp(x.detach(), 2), (1 / (x * 0),), gradients=False)
    yield Case(
        "ints", lambda n: (torch.logsumexp(n, 2), torch.softmax(n, 2, dtype=torch.float64)), (n,), tolerance=1e-6
    )
    yield Case(
        "dtypes",
        lambda x: (
            F.softmax(x, 2, dtype=torch.float32),
            torch.softmax(x, 2, torch.float32),
            F.log_softmax(x, 2, 3, torch.float32),
        ),
        (x,),
        tolerance=1e-6,
    )
    yield Case(
        "half",
        lambda x: (x.half().softmax(2), x.bfloat16().log_softmax(2), x.half().logsumexp(2)),
        (x,),
        tolerance=1e-2,
    )
    yield Case("complex", lambda x: torch.complex(x, 2 * x).logsumexp(2), (x,))
    yield Case("1-d", lambda x: (x.softmax(0), x.logsumexp(0), x.log_softmax(-1)), (real(7),), ("domain",))
    yield Case("0-d", lambda x: (x.softmax(0), x.logsumexp(0), x.log_softmax(-1)), (real(1)[0],), ("",))


def _products(mesh: str) -> Iterator[Case]:
    for height in (5, 1):
        x = real(3, 2, height, 4, low=0.5)
        one, two = x.clone(), x.clone()
        one[1, 0, 0, 0] = 0
        two[0, :, :, 1] = 0
        for kind, given in {"": x, "one zero": one, "zeros": two}.items():
            for d, keepdim in itertools.product((0, 1, 2, 3, -2), (False, True)):
                yield Case(f"prod {d} {kind}", lambda x, d=d, k=keepdim: (torch.prod(x, d, k), x.prod(d)), (given,))
            yield Case(f"prod {kind}", lambda x: x.prod(), (given,))
    x, n = real(3, 2, 5, 4, low=0.5), whole(3, 2, 5, 4, low=1, high=3)
    yield Case("types", lambda n: (n.prod(2), n.int().prod(), (n > 0).prod(2), n.prod(dtype=torch.float64)), (n,))
    yield Case("complex", lambda z: (z.prod(2), z.prod()), (torch.complex(x, x.flip(0)),), tolerance=1e-10)


def _along(mesh: str) -> Iterator[Case]:
    """Local along whole dims; right, by a gather, along sharded ones."""
    x = real(3, 4, 5, 6)
    split = {d for d, axis in ((0, "data"), (2, "domain")) if f"{axis}=1," not in f"{mesh}," and axis in mesh}
    for d in range(4):
        more = {} if d in split else {"quiet": True}
        for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "diff"):
            f = getattr(torch, name)
            yield Case(f"{name} {d}", lambda x, f=f, d=d: f(x, dim=d), (x,), **more)
        yield Case(f"argsort {d}", lambda x, d=d: (x.argsort(d), x.argsort(dim=d, descending=True)), (x,), **more)
        yield Case(f"topk {d}", lambda x, d=d: torch.topk(x, 2, d), (x,), **more)
        if x.shape[d] % 2 == 0:
            yield Case(f"glu {d}", lambda x, d=d: F.glu(x, d), (x,), **more)
    yield Case("defaults", lambda x: (x.sort(), x.topk(3), F.glu(x), x.diff(), x.cumsum(1, dtype=torch.float32)), (x,))
    yield Case("prepend", lambda x, y: torch.diff(x, prepend=y), (x, x[..., :1]))


FAMILIES = (_variances, _norms, _exponentials, _products)


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: object, mesh: str) -> None:
    run(family, mesh, at_least=50)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
@pytest.mark.parametrize("family", [*FAMILIES, _all_norms, _along])
def test_family_on_every_mesh(family: object, mesh: str) -> None:
    run(family, mesh, at_least=20)  # type: ignore[arg-type]


def test_along_a_dim() -> None:
    run(_along, "data=1,domain=4", at_least=20)


def _two_axes(mesh: str) -> Iterator[Case]:
    x, layout = real(2, 3, 5, 7), ("_ _ domain tensor",)
    yield Case("var", lambda x: (x.var(), x.var(2), torch.std_mean(x, (2, 3))), (x,), layout)
    yield Case("norm", lambda x: (x.norm(), x.norm(dim=3), torch.linalg.vector_norm(x, 3, (2, 3))), (x,), layout)
    yield Case("softmax", lambda x: (x.softmax(2), x.log_softmax(3), x.logsumexp((2, 3))), (x,), layout)
    yield Case("prod", lambda x: (x.prod(2), x.prod()), (x,), layout)


def test_two_spatial_axes() -> None:
    run(_two_axes, TENSOR, at_least=4)


def _small_spread() -> None:
    """In float32, with a mean 100,000 times the spread: torch's own gradient is off by a part in 500 here."""
    mesh = mesh_for("data=1,domain=4")
    far = (real(1, 1, 50, 40) * 1e-2 + 1e3).float()
    exact = far.double().requires_grad_()
    spread = exact.std()
    spread.backward()
    x = shard(far, mesh).requires_grad_()
    with spmd(on_gather="error"):
        found = x.std()
        found.backward()
    assert exact.grad is not None
    assert x.grad is not None
    assert found.detach().full_tensor().item() == pytest.approx(spread.item(), rel=1e-5)
    assert torch.allclose(x.grad.full_tensor().double(), exact.grad, rtol=0, atol=1e-5 * float(exact.grad.abs().max()))


def test_mean_much_larger_than_the_spread() -> None:
    run_ranks(_small_spread, 4)


def _too_few() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, n = real(2, 1), shard(whole(4, 4), mesh, "domain _")
    with warnings.catch_warnings(), record() as log, spmd(on_gather="error"):
        warnings.simplefilter("ignore")  # degrees of freedom <= 0
        found = shard(x, mesh, "domain _").var((0, 1), correction=2)
        assert bool(torch.isinf(found))
        assert bool(torch.isnan(shard(x[:1], mesh, "domain _").var()))
        with pytest.raises(RuntimeError):
            n.var(0)
        with pytest.raises(RuntimeError):
            torch.norm(n, 2, 0)
        with pytest.raises(IndexError):
            torch.softmax(shard(x, mesh, "domain _"), 2)
    assert all(e.op == "Tensor.var" for e in log.entries)


def test_too_few_and_wrong() -> None:
    run_ranks(_too_few, 2)
