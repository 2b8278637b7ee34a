"""The short way through DTensor: alike operands on their pieces, anything else as DTensor does it."""

from __future__ import annotations

import torch
from rule_cases import real
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshpar.batch import shard
from meshpar.testing import mesh_for, run_ranks


def _alike() -> None:
    mesh = mesh_for("data=2,domain=2")
    full, other = real(3, 2, 5, 4), real(3, 2, 5, 4, salt=1)
    x, y = shard(full, mesh), shard(other, mesh)
    assert torch.equal(torch.add(x, y, alpha=2).full_tensor(), full + 2 * other)
    assert torch.equal((x + 1).full_tensor(), full + 1)
    assert (x + y).placements == x.placements
    z = x.clone()
    assert z.add_(y) is z
    assert torch.equal(z.full_tensor(), full + other)
    assert torch.equal(x.full_tensor(), full)
    z.copy_(y.float())
    assert z.dtype == torch.float64
    assert torch.equal(z.full_tensor(), other.float().double())
    mixed = x + y.float()
    assert mixed.dtype == torch.float64
    assert torch.equal(mixed.full_tensor(), full + other.float())
    last = shard(full.to(memory_format=torch.channels_last), mesh)
    assert (last + last).to_local().is_contiguous(memory_format=torch.channels_last)
    assert x.clone(memory_format=torch.channels_last).to_local().is_contiguous(memory_format=torch.channels_last)
    assert torch.equal((last + y).full_tensor(), full + other)


def test_operands_that_lie_alike() -> None:
    run_ranks(_alike, 4)


def _otherwise() -> None:
    mesh = mesh_for("data=2,domain=2")
    full, other = real(4, 2, 6, 4), real(4, 2, 6, 4, salt=1)
    x = shard(full, mesh)
    for layout in ("_ _ _ _", "data _ _ _", "_ _ data domain"):
        assert torch.equal((x + shard(other, mesh, layout)).full_tensor(), full + other)
    assert torch.equal((x + shard(other[:1], mesh, "_ _ domain _")).full_tensor(), full + other[:1])
    part = DTensor.from_local(full / 2, mesh, (Partial(), Replicate(), Replicate()), run_check=False)
    assert torch.allclose((part + part).full_tensor(), 2 * full)
    assert torch.allclose((part + x).full_tensor(), 2 * full)
    assert x.clone().copy_(shard(other, mesh, "_ _ _ _")).placements == x.placements
    flat = DTensor.from_local(torch.ones(2), mesh["data"], (Shard(0),), run_check=False)
    assert torch.equal((flat + flat).full_tensor(), 2 * torch.ones(4))


def test_operands_that_do_not() -> None:
    run_ranks(_otherwise, 4)


def _accumulated() -> None:
    for text in ("data=2,domain=2", "data=1,domain=4"):
        x = shard(real(3, 2, 5, 4), mesh_for(text)).requires_grad_()
        (x * 2 + x.clone() + x).backward(torch.ones_like(x))
        x.backward(torch.ones_like(x))
        assert x.grad is not None
        assert x.grad.placements == x.placements
        assert torch.equal(x.grad.full_tensor(), torch.full((3, 2, 5, 4), 5.0).double())


def test_gradients_add_up() -> None:
    run_ranks(_accumulated, 4)
