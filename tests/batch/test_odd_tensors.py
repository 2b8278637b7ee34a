"""Tensors of a batch that are out of the ordinary: dtypes, strides, subclasses, no samples at all."""

import pytest
import torch
from test_trees import MESH, x_of
from torch import nn
from torch.distributed.tensor import DTensor

import meshpar
from meshpar.testing import mesh_for, run_ranks


def odd_tensors() -> None:
    """Tensors of any dtype, stride and kind give the same numbers, cut; and gradients go home."""
    mesh = mesh_for(MESH)
    x = x_of() - 40
    cases = {
        "bool": x > 0,
        "uint8": x.abs().byte(),
        "int16": x.short(),
        "half": x.half(),
        "bfloat16": x.bfloat16(),
        "complex": torch.complex(x, -x),
        "conj": torch.complex(x, -x).conj(),
        "neg": torch.complex(x, -x).conj().imag,
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "expanded": x[:1, :1].expand(2, 2, 5, 4),
        "stepped": torch.arange(320.0).view(2, 2, 10, 8)[:, :, ::2, ::2],
        "parameter": nn.Parameter(x.clone()),
        "leaf": x.clone().requires_grad_(),
        "no samples": x[:0],
        "no rows": x[:, :, :0],
        "no columns": x[..., :0],
        "one row": x[:, :, :1],
        "scalar": torch.tensor(3.0),
        "vector": torch.arange(2.0),
        "uint16": x.abs().to(torch.uint16),
        "uint64": x.abs().to(torch.uint64),
        "float8": x.to(torch.float8_e4m3fn),
    }
    for name, value in cases.items():
        placed = meshpar.shard_batch(value, mesh)
        expected = torch.cat([value, value]) if value.dim() else value
        assert placed.shape == expected.shape, name
        assert placed.dtype == value.dtype, name
        with torch.no_grad():
            whole = meshpar.gather(placed)
        if name in ("float8", "uint16", "uint64"):  # torch.equal does not know them
            whole, expected = whole.float(), expected.float()
        assert torch.equal(whole, expected.detach()), name
        if name == "channels last":
            assert placed.is_contiguous(memory_format=torch.channels_last)
            assert placed.to_local().stride(1) == 1
        if value.requires_grad:
            with meshpar.spmd():
                (placed * placed).sum().backward()
            torch.testing.assert_close(value.grad, 2 * value.detach())


def test_odd_tensors_keep_their_numbers_dtypes_and_strides():
    run_ranks(odd_tensors, 4)


class Marked(torch.Tensor):
    """A subclass that only adds a name, as torchvision's images do."""


def subclassed() -> None:
    mesh = mesh_for(MESH)
    placed = meshpar.shard_batch(x_of().as_subclass(Marked), mesh)
    assert type(placed) is DTensor
    assert type(placed.to_local()) is torch.Tensor
    model = meshpar.parallelize(nn.Conv2d(2, 1, 1), mesh)
    assert type(model(x_of().as_subclass(Marked))) is DTensor


def test_subclasses_of_tensors_become_plain_ones():
    run_ranks(subclassed, 4)


def no_samples(spec: str) -> None:
    """A batch of no samples on all ranks is what it is on one process: a loss of NaN, gradients of zero or NaN."""
    mesh = mesh_for(spec)
    model = meshpar.parallelize(nn.Conv2d(2, 1, 3, padding=1), mesh)
    with meshpar.spmd():
        y = model(x_of()[:0])
        assert y.shape == (0, 1, 5, 4)
        total = y.sum()
        assert total.item() == 0
        assert y.mean().isnan().item()
    total.backward()
    assert all(p.grad is not None and not meshpar.gather(p.grad).any() for p in model.parameters())


@pytest.mark.parametrize("spec", [MESH, "data=3,domain=1"])
def test_a_batch_of_no_samples(spec):
    run_ranks(no_samples, 3 if "3" in spec else 4, spec)
