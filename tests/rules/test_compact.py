"""Inputs of convolutions are kept once for the backward, and what is written in place may take over memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshpar.batch import shard
from meshpar.intervals import chunks, expand, padded, take
from meshpar.rules.compact import Recipe, own_part
from meshpar.rules.conv import convolve
from meshpar.scope import spmd
from meshpar.testing import assert_same, mesh_for, run_ranks

MODES = ("constant", "circular", "reflect", "replicate")


@given(st.integers(4, 20), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(MODES))
def test_the_own_part_is_own_rows_in_order(n, p, lo, hi, mode):
    all_rows = padded(n, lo, hi, mode)
    for (a, b), own in zip(chunks(n, p), chunks(n, p), strict=True):
        rows = take(all_rows, a, b + lo + hi) if b > a else ()
        first, start, count = own_part(rows, own)
        assert expand(rows)[first : first + count] == list(range(own[0] + start, own[0] + start + count))
        assert count == own[1] - own[0]


def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = F.leaky_relu(F.conv2d(x, w, padding=1), 0.1, inplace=True)
    y = F.conv2d(F.pad(y, (1, 1, 1, 1), mode="circular"), v, stride=2, groups=2)
    return F.elu(y, inplace=True)


def aliased(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Write in place where others see the memory: a detached twin, a view, a tensor that a backward needs."""
    y = F.conv2d(x, w, padding=1)
    a = y * 2
    twin, view = a.detach(), a[:, :1]
    F.relu(a, inplace=True)
    b = torch.exp(y * 0.1)
    c = b * 1
    F.celu(c, inplace=True)
    return a, twin + 0, view + 1, b, c * F.conv2d(c, v, groups=2, padding=1)


def compared(form: torch.memory_format) -> float:
    x = torch.randn(2, 2, 9, 6, dtype=torch.float64).to(memory_format=form)
    w, v = torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randn(4, 2, 3, 3, dtype=torch.float64)
    worst = 0.0
    for spec in ("data=1,domain=4", "data=2,domain=2", "data=1,domain=2,domain_w=2"):
        for fn in (chain, aliased, checkpointed):
            report = assert_same(fn, [x], mesh=mesh_for(spec), weights=[w, v])
            worst = max(worst, *report.errors.values())
    return worst


def checkpointed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return checkpoint(chain, x, w, v, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_are_those_of_one_process(form):
    assert max(run_ranks(compared, 4, form)) < 1e-12


def kept() -> tuple[int, int, list[str]]:
    """Count what a convolution keeps beside its input, and what a write into the input does to the backward."""
    mesh = mesh_for("data=1,domain=4")
    x = shard(torch.randn(1, 2, 40, 8), mesh).requires_grad_()
    w = torch.randn(2, 2, 3, 1, requires_grad=True)
    with spmd():
        h = x * 1
        y = convolve(h, w, padding=(1, 0), padding_mode="circular")  # zeros would let it be convolved where it lies
    held = y.to_local().grad_fn
    assert held is not None
    recipes = [o for o in _saved(held) if isinstance(o, Recipe)]
    beside = sum(part.numel() for recipe in recipes for halo in recipe.halos for part in (halo.before, halo.after))
    with spmd():
        h.mul_(2)
    said = []
    try:
        y.sum().backward()
    except RuntimeError as error:
        said.append(str(error))
    return len(recipes), beside, said


def _saved(node: object) -> list[object]:
    found: list[object] = []
    seen: set[object] = set()
    left = [node]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        raw = getattr(one, "_raw_saved_input", None)
        if raw is not None:
            found.append(raw.data)
        left += [n for n, _ in getattr(one, "next_functions", ())]
    return found


def test_a_convolution_keeps_halos_alone_and_sees_writes_into_its_input():
    answers = run_ranks(kept, 4)
    assert [n for n, _, _ in answers] == [1] * 4
    assert [beside for _, beside, _ in answers] == [2 * 2 * 8] * 4  # a row on each side, 2 channels of 8
    assert all("modified by an inplace operation" in said[0] for _, _, said in answers)
