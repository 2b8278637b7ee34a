"""Reading values out: what Python gets is the global number on every rank; looking at shapes costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rule_cases import Case, real, run, whole
from torch import Tensor

from meshpar.batch import shard
from meshpar.errors import GatherError
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.mean().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum() * 100),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: "more" if x.mean() > 0.0 else "less",
    "not": lambda x: not (x.max() < 0),
    "while": lambda x: [n for n in range(9) if n < x.amax()],
    "complex": lambda x: complex(x.sum()),
    "index": lambda x: list(range(9))[(x.sum() * 0 + 2).to(torch.int64)],
    "format": lambda x: f"{x.mean():.9f} {x.amax():8.3e}",
    "str format": lambda x: "{:.6f}".format(x.std()),  # noqa: UP032 (what users write)
    "tolist": lambda x: x.mean().tolist(),
    "numpy": lambda x: float(x.detach().sum().numpy()),
    "array": lambda x: float(np.asarray(x.detach().mean())),
    "is_nonzero": lambda x: torch.is_nonzero(x.sum()),
    "round": lambda x: round(float(x.sum()), 3),
    "max of": lambda x: max(x.amax(), x.amin()).item(),
    "one element": lambda x: x[:1, :1, :1, :1].item() + float(x[1:, 2:, 4:, 3:]),
    "len": lambda x: (len(x), x.shape[2], x.size(0), x.dim(), x.numel(), x.nelement(), x.ndim),
    "looks": lambda x: (x.dtype, x.is_floating_point(), torch.is_tensor(x), torch.numel(x), x.is_complex()),
    "result_type": lambda x: (torch.result_type(x, 1), torch.result_type(x, torch.zeros(3).half())),
    "same size": lambda x: x.is_same_size(x),
}


def _numbers() -> None:
    full = real(2, 3, 5, 4) + 0.1
    for text in ("data=2,domain=2", "data=1,domain=4"):
        x = shard(full, mesh_for(text))
        with spmd(on_gather="error"):
            for name, fn in NUMBERS.items():
                found, expected = fn(x), fn(full)
                same = found == expected or (isinstance(found, float) and abs(found - expected) < 1e-12)
                same = same or (isinstance(found, complex) and abs(found - expected) < 1e-12)
                assert same, f"{name}: {found} instead of {expected}"


def test_field_7_numbers_are_global() -> None:
    run_ranks(_numbers, 4)


def _whole_tensors() -> None:
    full = real(2, 3, 5, 4)
    x = shard(full, mesh_for("data=2,domain=2"))
    reads: dict[str, Callable[[Any], Any]] = {
        "tolist": lambda x: x.tolist(),
        "numpy": lambda x: x.numpy().tolist(),
        "array": lambda x: np.array(x).tolist(),
        "cpu": lambda x: x.cpu().numpy().tolist(),
        "contains": lambda x: (0.5 in x, float(full[1, 2, 4, 3]) in x),
    }
    for name, fn in reads.items():
        with record() as log, spmd(on_gather="allow"):
            assert fn(x) == fn(full), name
        assert log.gathers(), name
        with spmd(on_gather="error"), pytest.raises(GatherError):
            fn(x)
    with spmd(on_gather="error"):
        rows = x.sum((0, 2, 3))
        assert torch.allclose(torch.tensor(rows.tolist(), dtype=torch.float64), full.sum((0, 2, 3)))
        with pytest.raises(RuntimeError, match="grad"):
            x.clone().requires_grad_().sum().numpy()


def test_whole_tensors_are_gathered_and_said() -> None:
    run_ranks(_whole_tensors, 4)


def _comparisons() -> None:
    full = real(2, 3, 5, 4)
    for text in ("data=2,domain=2", "data=1,domain=4"):
        mesh = mesh_for(text)
        x = shard(full, mesh)
        with spmd(on_gather="error"):
            for row in range(5):
                other = full.clone()
                other[0, 0, row] += 1e-9
                y = shard(other, mesh)
                assert not torch.equal(x, y)
                assert torch.allclose(x, y)
                assert not torch.allclose(x, y, rtol=0, atol=1e-12)
                assert not torch.equal(x, other)
                assert not x.equal(y)
                assert x.allclose(other, atol=1e-6)
            assert torch.equal(x, full)
            assert torch.equal(full, x)
            assert not torch.equal(x, x[:1])
            holes = shard(torch.full_like(full, float("nan")), mesh)
            assert not torch.equal(holes, holes)
            assert not torch.allclose(holes, holes)
            assert torch.allclose(holes, holes, equal_nan=True)
            assert torch.equal(shard(whole(2, 3, 5, 4), mesh), whole(2, 3, 5, 4))


def test_comparisons_without_a_gather() -> None:
    run_ranks(_comparisons, 4)


def _iteration(mesh: str) -> Iterator[Case]:
    def columns(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for i, sample in enumerate(x):
            total = total + (i + 1) * (sample * sample).sum()
        return total

    yield Case("iterate", columns, (real(3, 2, 5, 4),), ("_ _ domain _",))
    yield Case("unpack", lambda x: [2 * part for part in x], (real(3, 2, 5, 4),), ("_ _ domain _",))
    yield Case(
        "weights",
        lambda x, w: sum((a * b for a, b in zip(x, w, strict=True)), 0.0),
        (real(3, 5, 4),),
        ("_ domain _",),
        (real(3),),
    )
    yield Case("sharded", columns, (real(3, 2, 5, 4),), ("domain _ _ _",), gathers=True)
    yield Case("reversed", lambda x: torch.stack(list(reversed(x))), (real(3, 2, 5),), ("_ _ domain",))


def test_iteration() -> None:
    run(_iteration, "data=1,domain=2", at_least=5)


def _printing() -> None:
    full = real(2, 3, 5, 4)
    x = shard(full, mesh_for("data=2,domain=2"))
    with record() as log, spmd(on_gather="error"):
        texts = [repr(x), str(x), f"{x}"]
        assert all("Shard(dim=2)" in text for text in texts)  # it says that this is one piece of several
        assert "Replicate" in repr(x.sum())
        assert f"{float(full.sum()):.4f}"[:6] in repr(x.sum())
    kinds = {entry.kind for entry in log.entries}
    assert kinds == {"reduction"}


def test_printing() -> None:
    run_ranks(_printing, 4)


def _refusals() -> None:
    x = shard(real(2, 3, 5, 4), mesh_for("data=1,domain=2"))
    with record() as log, spmd(on_gather="error"):
        for fn in (lambda: x.item(), lambda: float(x), lambda: int(x), lambda: bool(x), lambda: range(3)[x]):
            with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
                fn()
            assert not isinstance(caught.value, GatherError)
    assert log.entries == []


def test_more_than_one_number_is_refused_before_any_communication() -> None:
    run_ranks(_refusals, 2)


def _gradients() -> None:
    """`torch.autograd.grad` and `backward` are not functions of values: they pass."""
    full = real(2, 3, 5, 4)
    x = shard(full, mesh_for("data=2,domain=2")).requires_grad_()
    with record() as log, spmd(on_gather="error"):
        (g,) = torch.autograd.grad((x**3).sum(), x)
        assert g.placements == x.placements
        (x**2).sum().backward()
        h = x.register_hook(lambda g: g * 2)
        x.sin().sum().backward()
        h.remove()
    assert torch.allclose(g.full_tensor(), 3 * full**2)
    assert x.grad is not None
    assert torch.allclose(x.grad.full_tensor(), 2 * full + 2 * torch.cos(full))
    assert not log.gathers()
    assert dist.get_world_size() == 4


def test_gradients_inside_the_mode() -> None:
    run_ranks(_gradients, 4)
