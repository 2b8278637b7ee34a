"""Reports 34 to 38 from the field (shared/cases/FIELD.md): parameters, their meshes, gradients and clipping."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshpar
from meshpar.testing import assert_equivalent, mesh_for, run_ranks

TENSOR = "data=1,domain=2,tensor=2"


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)
    ).double()


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with meshpar.spmd():
        (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam_copies() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with ranks along `tensor`, which do the same work; give this rank's shards, and one process's values."""
    mesh = mesh_for(TENSOR)
    one, x = block(), torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(1)).double()
    ours = meshpar.parallelize(block(), mesh)
    for model in (one, ours):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            step(model, x, optimizer)
    mine = [p.to_local() if isinstance(p, DTensor) else p for p in ours.parameters()]
    whole = [meshpar.gather(p) for p in ours.parameters()]
    for a, b in zip(whole, one.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    return [p.detach() for p in mine], [p.detach() for p in whole]


def test_field_34_copies_over_tensor_stay_bit_equal_through_twenty_adam_steps():
    answers = run_ranks(adam_copies, 4)
    for domain in range(2):
        first, second = answers[2 * domain][0], answers[2 * domain + 1][0]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def clipped(spec: str, norm_type: float) -> float:
    """Clip the gradients of a model with a 0-d parameter, which stays whole on every rank."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = block(), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.body(x)

    x = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(1)).double()
    mesh = mesh_for(spec)
    one, ours = Scaled(), meshpar.parallelize(Scaled(), mesh)
    num, first = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    norms = []
    for model, given in ((one, x), (ours, x.chunk(num)[first])):
        with meshpar.spmd():
            model(given).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        norms.append(float(meshpar.gather(norm)))
    for a, b in zip(ours.parameters(), one.parameters(), strict=True):
        assert torch.allclose(meshpar.gather(a.grad), b.grad, rtol=1e-9, atol=1e-12)
    return abs(norms[0] - norms[1])


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("spec", ["data=2,domain=2", TENSOR])
def test_field_35_the_norm_of_gradients_is_that_of_one_process(spec, norm_type):
    assert max(run_ranks(clipped, 4, spec, norm_type)) < 1e-12


def parameter_meshes(spec: str) -> set[tuple[int, ...]]:
    model = meshpar.parallelize(block(), mesh_for(spec))
    return {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)}


def test_field_36_parameters_are_sharded_over_one_flat_mesh():
    assert run_ranks(parameter_meshes, 4, "data=2,domain=2") == [{(4,)}] * 4
    assert run_ranks(parameter_meshes, 4, TENSOR) == [{(2,)}] * 4


def test_field_37_copies_go_with_parameters_split_over_tensor():
    mlp = functools.partial(nn.Sequential, nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    options = {"data": "ddp", "tensor_plan": {"0": "colwise", "2": "rowwise"}}
    assert_equivalent(mlp, [torch.randn(4, 3, 4)], "data=2,domain=1,tensor=2", options=options)


def test_field_38_a_weight_of_seven_channels_over_two_ranks():
    layer = functools.partial(nn.Conv2d, 3, 7, 3, padding=1)
    assert_equivalent(layer, [torch.randn(2, 3, 6, 5)], "data=1,domain=2")
    assert_equivalent(layer, [torch.randn(2, 3, 6, 5)], "data=2,domain=2")
