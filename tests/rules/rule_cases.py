"""Cases of rules, built on the ranks by a function of a test module, and run many in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshpar.testing import assert_same, mesh_for, run_ranks
from meshpar.testing.equivalence import Report
from meshpar.testing.meshes import ranks_of

MESHES = ("data=2,domain=2", "data=1,domain=4", "data=1,domain=3", "data=4", "data=1,domain=2")
TENSOR = "data=1,domain=2,tensor=2"


@dataclass(frozen=True)
class Case:
    """One call: `fn(*inputs, *weights)`, inputs sharded by `layouts`; `keeps` says that outputs lie as input 0."""

    label: str
    fn: Callable[..., Any]
    inputs: Sequence[Any]
    layouts: Sequence[str | None] | None = None
    weights: Sequence[Tensor] = ()
    tolerance: float = 1e-12
    gradients: bool = True
    gathers: bool = False
    keeps: bool = False
    quiet: bool = False


def real(
    *shape: int, salt: int = 0, low: float = -1.5, high: float = 1.5, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(77 + salt)
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator).to(dtype)


def whole(*shape: int, salt: int = 0, low: int = 0, high: int = 7, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(55 + salt)).to(dtype)


def einsum(equation: str) -> Callable[..., Tensor]:
    return functools.partial(torch.einsum, equation)


def check(case: Case, mesh: str) -> Report:
    """Run one case on this rank."""
    the_mesh = mesh_for(mesh)
    seen: list[tuple[Any, Any]] = []

    def watched(*args: Any) -> Any:
        out = case.fn(*args)
        seen.append((args, out))
        return out

    report = assert_same(
        watched,
        case.inputs,
        mesh=the_mesh,
        layouts=case.layouts,
        weights=case.weights,
        tolerance=case.tolerance,
        gradients=case.gradients,
        gathers=case.gathers,
    )
    args, found = seen[-1]
    for x in pytree.tree_leaves(found):
        if not isinstance(x, Tensor):
            continue
        assert isinstance(x, DTensor), f"a plain {tuple(x.shape)} came out"
        assert not any(p.is_partial() for p in x.placements), f"Partial: {x.placements}"
        if case.keeps:
            assert x.placements == args[0].placements, f"{x.placements}, the input lies in {args[0].placements}"
    if case.quiet:
        assert report.log.num_bytes() == 0, report.log.summary()
    if case.gathers:
        assert report.log.gathers(), "nothing was gathered"
    return report


def check_all(build: Callable[[str], Iterable[Case]], mesh: str) -> tuple[int, list[str]]:
    """Run all cases that `build` makes for a mesh, on this rank; give their number and what went wrong."""
    wrong: list[str] = []
    num = 0
    for case in build(mesh):
        num += 1
        try:
            check(case, mesh)
        except Exception as error:
            text = str(error).splitlines() or [""]
            wrong.append(f"{case.label}: {type(error).__name__}: {' | '.join(text[:4])[:400]}")
    return num, wrong


def run(build: Callable[[str], Iterable[Case]], mesh: str, *, at_least: int = 1) -> None:
    """Run all cases on the ranks of a mesh, and fail with all that went wrong on any of them."""
    answers = run_ranks(check_all, ranks_of(mesh), build, mesh, timeout_s=300.0)
    wrong = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(answers) for text in texts]
    assert not wrong, f"{len(wrong)} wrong on {mesh}:\n" + "\n".join(wrong[:60])
    assert answers[0][0] >= at_least
