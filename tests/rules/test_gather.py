"""What has no rule: gathered, right in outputs and gradients, put back in its layout, recorded, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import MESHES, TENSOR, Case, check_all, real, run, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from meshpar.batch import shard
from meshpar.errors import GatherError, GatherWarning, ShardingError
from meshpar.gathering import gather_call
from meshpar.mesh import SUMMED, make_mesh
from meshpar.record import record
from meshpar.registry import Policy
from meshpar.rewrite import rewrite
from meshpar.scope import spmd
from meshpar.testing import assert_same, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of


def by_gather(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that is gathered whatever rule it has."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        met = any(isinstance(x, DTensor) for item in given for x in (item if isinstance(item, tuple) else (item,)))
        return gather_call(func, args, kwargs, why="a test") if met else func(*args, **kwargs)

    return apply


def _cases(mesh: str) -> Iterator[Case]:
    x, square = real(2, 3, 5, 4), real(2, 3, 5, 5) + 4 * torch.eye(5).double()
    w = real(4, 6, salt=3)
    index = whole(2, 3, 5, 4, high=5)
    sort, cumsum, matmul, einsum = (by_gather(f) for f in (torch.sort, torch.cumsum, torch.matmul, torch.einsum))
    scatter, scatter_ = by_gather(torch.scatter), by_gather(Tensor.scatter_)
    cases = {
        "rfft2": (by_gather(torch.fft.rfft2), x),
        "fft along": (lambda x: by_gather(torch.fft.fft)(x, dim=1).abs(), x),
        "det": (by_gather(torch.linalg.det), square),
        "inverse": (by_gather(torch.linalg.inv), square),
        "sort": (lambda x: sort(x, 2), x),
        "median": (lambda x: by_gather(torch.median)(x, 2), x),
        "gram": (lambda x: matmul(x, x.transpose(-1, -2)), x),
        "cdist": (lambda x: by_gather(torch.cdist)(x, x + 1), x),
        "cumsum": (lambda x: cumsum(x, -2), x),
        "trapezoid": (lambda x: by_gather(torch.trapezoid)(x, dim=2), x),
        "kron": (lambda x: by_gather(torch.kron)(x[0, 0], x[0, 0]), x),
        "no rule at all": (lambda x: torch.special.bessel_j0(x.detach()) + x, x),
    }
    for name, (fn, given) in cases.items():
        yield Case(name, fn, (given,), gathers=True, tolerance=1e-9)
    yield Case("weights", matmul, (x,), weights=(w,), gathers=True)
    yield Case("weight first", lambda x, w: matmul(w, x), (x,), weights=(real(6, 5),), gathers=True)
    yield Case("einsum", lambda x, w: einsum("bchw,wk->bkhc", x, w), (x,), weights=(w,), gathers=True)
    yield Case("two activations", lambda x, y: einsum("bchw,bchv->bwv", x, y), (x, x + 1), gathers=True)
    yield Case("scatter", lambda x, v: scatter(x, 2, index, v), (x,), weights=(real(2, 3, 5, 4, salt=2),), gathers=True)
    yield Case("scatter_", lambda x: (scatter_(x * 1, 2, index, 0.5), x * 2), (x,), gathers=True, keeps=True)
    yield Case("cumsum_", lambda x: _twice_used(x * 1), (x,), gathers=True, keeps=True)

    def out(x: Tensor) -> Any:
        values, indices = x.new_zeros(x.shape), torch.zeros_like(x, dtype=torch.int64)
        single = torch.zeros_like(x)
        with torch.no_grad():
            cumsum(x, 2, out=single)
            sort(x, 2, out=(values, indices))
        return single, values, indices

    yield Case("out", out, (x,), gathers=True, keeps=True, gradients=False)


def _twice_used(h: Tensor) -> Any:
    before = h * 3
    by_gather(Tensor.cumsum_)(h, 2)
    return before, h, h.sin()


@pytest.mark.parametrize("mesh", ["data=2,domain=2", TENSOR])
def test_right_and_back_in_layout(mesh: str) -> None:
    run(_cases, mesh, at_least=15)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [m for m in MESHES if "domain" in m])
def test_on_every_mesh(mesh: str) -> None:
    run(_cases, mesh, at_least=15)


def test_nothing_is_gathered_on_one_rank() -> None:
    (answer,) = run_ranks(check_all, 1, _quiet, "data=1")
    assert answer[1] == []


def _quiet(mesh: str) -> Iterator[Case]:
    x = real(2, 3, 5, 4)
    for name, fn in {"sort": by_gather(torch.sort), "fft": by_gather(torch.fft.rfft2), "j0": _bessel}.items():
        yield Case(name, fn, (x,), quiet=True)  # on_gather="error" is in force


def _layouts() -> None:
    mesh = mesh_for("data=2,domain=2")
    x = shard(real(2, 3, 5, 4), mesh)
    with record() as log, spmd(on_gather="allow"):
        same = by_gather(torch.sort)(x, 2)
        assert isinstance(same, torch.return_types.sort)
        assert same.values.placements == same.indices.placements == x.placements
        spectrum = by_gather(torch.fft.rfft2)(x)  # (2, 3, 5, 3): rows are as many as before
        assert spectrum.placements == x.placements
        assert spectrum.shape == (2, 3, 5, 3)
        det = by_gather(torch.linalg.det)
        gone = det(real(2, 3, 5, 5) + shard(real(2, 3, 5, 5), mesh))  # (2, 3): no rows left
        assert gone.placements == (x.placements[0], Replicate(), Replicate())
        assert not bool(det(x[:, :, :4]).isnan().any())
    gathers = [e for e in log.gathers() if "sort" in e.op]
    assert [e.axis for e in gathers] == ["data", "domain"]
    piece = x.to_local().numel() * 8
    assert gathers[0].num_bytes >= piece  # a ring over two ranks sends each piece once, then what it has by then
    assert all(e.note for e in log.gathers())


def test_layouts_types_and_bytes() -> None:
    run_ranks(_layouts, 4)


def _said(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in found if issubclass(w.category, GatherWarning)]


def _bessel(x: Tensor) -> Tensor:
    return torch.special.bessel_j0(x.detach()) + x


class _Special(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.special.bessel_y1(x)
        for _ in range(3):
            y = y + torch.special.bessel_j0(y)
        return y


def _warnings() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 5, 4), mesh)
    with warnings.catch_warnings(record=True) as found, spmd():
        warnings.simplefilter("default")
        for _ in range(3):
            torch.special.bessel_j0(x)
        torch.special.bessel_j0(x)
    texts = _said(found)
    assert len(texts) == 2, len(texts)  # two call sites, one of them in a loop
    assert found[0].filename == __file__
    assert "bessel_j0" in texts[0]
    assert f"{x.numel() * 8} bytes" in texts[0]
    assert "(2, 3, 5, 4) in" in texts[0]
    assert "domain: S(2)" in texts[0]

    model = rewrite(nn.Sequential(nn.Identity(), _Special()))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        model(x)
        model(x)
    texts = _said(found)
    assert len(texts) == 2
    assert all(text.startswith("1: ") for text in texts)  # the path of the module
    assert "bessel_y1" in texts[0]
    assert "bessel_j0" in texts[1]

    with warnings.catch_warnings(record=True) as found, spmd(on_gather="allow"):
        warnings.simplefilter("always")
        torch.special.bessel_j0(x)
    assert _said(found) == []


def test_warned_once_for_each_call_site() -> None:
    run_ranks(_warnings, 2)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(2, 3, 5, 4), mesh)
    model = rewrite(nn.Sequential(_Special()), policy=Policy(on_gather="error", mesh=mesh))
    index = whole(2, 3, 5, 4)
    with record() as log:
        with spmd(on_gather="error"):
            sort, scatter_ = by_gather(torch.sort), by_gather(Tensor.scatter_)
            for fn in (lambda: torch.special.bessel_j0(x), lambda: sort(x, 2), lambda: scatter_(x, 2, index, 1.0)):
                with pytest.raises(GatherError, match="gathers its inputs"):
                    fn()
        with pytest.raises(GatherError, match=r"^0: "):
            model(x)
    assert log.entries == [], log.entries
    with spmd(on_gather="allow"):
        with pytest.raises(ShardingError, match="plain tensor"):
            by_gather(Tensor.scatter_)(torch.ones(2, 3, 5, 4, dtype=torch.float64), 2, index, x)
        with pytest.raises(ShardingError, match="plain tensor"):
            by_gather(torch.cumsum)(x, 2, out=torch.ones(2, 3, 5, 4, dtype=torch.float64))
        with pytest.raises(RuntimeError):
            x @ torch.ones(7, 7, dtype=torch.float64)


def test_error_is_raised_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _other_meshes() -> None:
    mesh = mesh_for("data=2,domain=2")
    linear = nn.Linear(4, 4).double()
    for parameter in linear.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    plain_weight = linear.weight.detach().clone().requires_grad_()
    fully_shard(linear, mesh=mesh[SUMMED])
    weight = linear.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh != mesh
    full = real(2, 3, 5, 4)
    x, reference = shard(full, mesh).requires_grad_(), full.clone().requires_grad_()
    with spmd(on_gather="allow"):
        y = torch.sin(x) * weight[:1] + (x**2).sum() * weight.sum()
        y.sum().backward()
    z = torch.sin(reference) * plain_weight[:1] + (reference**2).sum() * plain_weight.sum()
    z.sum().backward()
    assert torch.allclose(y.full_tensor(), z)
    for a, b in ((x.grad, reference.grad), (weight.grad, plain_weight.grad)):
        assert isinstance(a, DTensor)
        assert b is not None
        assert torch.allclose(a.full_tensor(), b)


def test_parameters_of_fully_shard_meet_activations() -> None:
    run_ranks(_other_meshes, 4)


def _two_meshes() -> None:
    a, b = mesh_for("data=2,domain=2"), mesh_for("data=1,domain=4")
    x, y = shard(real(2, 3, 5, 4), a), shard(real(2, 3, 5, 4), b)
    fns: list[Callable[[], Any]] = [lambda: x + y, lambda: torch.cat([x, y]), lambda: torch.linalg.solve(x, y)]
    with record() as log, spmd():
        for fn in fns:
            with pytest.raises(ShardingError, match="different meshes"):
                fn()
    assert log.entries == []


def test_two_meshes_are_refused() -> None:
    run_ranks(_two_meshes, 4)


def _structures() -> None:
    mesh = mesh_for("data=1,domain=3")
    x = real(2, 3, 5, 4)
    report = assert_same(lambda x: by_gather(torch.linalg.svd)(x)[1], (x,), mesh=mesh, gathers=True)
    assert report.log.gathers()
    d = shard(x, mesh)
    with spmd(on_gather="allow"):
        parts = by_gather(torch.linalg.eigh)(d @ d.mT)
        assert type(parts) is torch.return_types.linalg_eigh
        assert all(isinstance(p, DTensor) for p in parts)
        assert isinstance(torch.meshgrid(d[0, 0, 0], d[0, 0, 0], indexing="ij"), tuple)
        assert torch.linalg.matrix_rank(d).shape == (2, 3)
        with torch.no_grad():
            assert torch.equal(torch.unique(shard(whole(9), mesh, "domain")).full_tensor(), whole(9).unique())


def test_tuples_come_back_as_they_are() -> None:
    run_ranks(_structures, ranks_of("data=1,domain=3"))


def _fresh_mesh() -> None:
    """A mesh that equals another one in its axes and ranks is the same mesh."""
    x = shard(real(2, 3, 5, 4), mesh_for("data=1,domain=2"))
    y = shard(real(2, 3, 5, 4), make_mesh("data=1,domain=2", "cpu"))
    with spmd(on_gather="error"):
        assert torch.equal((x + y).full_tensor(), 2 * real(2, 3, 5, 4))


def test_equal_meshes_are_one() -> None:
    run_ranks(_fresh_mesh, 2)
