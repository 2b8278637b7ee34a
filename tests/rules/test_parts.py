"""Writes through `real`, `imag` and the turned views reach what they are views of, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshpar.testing import assert_same, mesh_for, run_ranks

Written = Callable[[Tensor], Any]


def entry_without_imaginary_part(y: Tensor) -> Tensor:
    y[..., 0].imag = 0.0  # as inverse spherical harmonic transforms do
    return y * y


def imaginary_from_real(y: Tensor) -> Tensor:
    y.imag = y.real
    return y * y


def imaginary_from_plain(y: Tensor) -> tuple[Tensor, Tensor]:
    rows = y[1:4]
    y.imag = torch.arange(y.shape[-1], dtype=torch.float64)
    return y * y, rows


def real_of_real(y: Tensor) -> Tensor:
    z = y.real * 1
    z.real = 2.5
    return z * y


def scaled_real(y: Tensor) -> Tensor:
    y.real.mul_(2)
    return y * y


def assigned_imag(y: Tensor) -> tuple[Tensor, Tensor]:
    part = torch.imag(y)
    part[:, 1] = 3.0
    return y * y, part


def scaled_transpose(y: Tensor) -> Tensor:
    y.mT.mul_(2.0)
    return y * y


def added_to_adjoint(y: Tensor) -> Tensor:
    y.mH.add_(torch.arange(4, dtype=torch.float64) * 1j)
    return y * y


WRITES = [
    entry_without_imaginary_part,
    imaginary_from_real,
    imaginary_from_plain,
    real_of_real,
    scaled_real,
    assigned_imag,
    scaled_transpose,
    added_to_adjoint,
]


def _written(write: Written, mesh: str, layout: str) -> None:
    x = torch.randn(5, 4, 6, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for gradients in (True, False):
        assert_same(lambda x: write(x * 1), [x], mesh=mesh_for(mesh), layouts=[layout], gradients=gradients)


@pytest.mark.parametrize("layout", ["domain _ _", "data domain _"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_through_parts_reach_the_whole(write: Written, layout: str) -> None:
    run_ranks(_written, 4, write, "data=2,domain=2", layout)


def _imag_of_real(mesh: str) -> None:
    import meshpar

    x = meshpar.shard(torch.ones(4, 3), mesh_for(mesh), "domain _")
    with meshpar.spmd(), pytest.raises(RuntimeError, match="imag is not implemented"):
        x.imag = 1.0


def test_real_numbers_have_no_imaginary_part() -> None:
    run_ranks(_imag_of_real, 2, "data=1,domain=2")
