"""The guard at the door of DTensor: each op that it stops, where it lets through, and why it is on the list.

One probe for each op. Without the guard the probe shows what DTensor does on its own: numbers that are not those of one
process, or different numbers on ranks that should agree. Were torch to mend an op, `test_without_the_guard` fails, and
the op leaves the list.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshpar import guard, private
from meshpar.errors import ShardingError
from meshpar.testing import run_ranks
from meshpar.testing.meshes import mesh_for

ATEN = torch.ops.aten
SHARDED = (Replicate(), Shard(2), Replicate())
SEED = 5


def image():
    """Give a tensor of 5 rows: 3 and 2 on two ranks. Its pieces differ, its first row is far from the rest."""
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[:, :, 0] += 3
    return x


def weight():
    return torch.randn(4, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def kept(x):
    """Tell which rows of each pair of an all-ones image survive a dropout: equal masks show as equal halves."""
    return x[:, :, :2].ne(0).equal(x[:, :, 2:4].ne(0))


def loss_and_gradient(loss):
    def probe(x, target):
        x = x.detach().requires_grad_()
        value = loss(x, target)
        value.backward()
        return value.detach(), x.grad

    return probe


PROBES = {
    ATEN.convolution.default: lambda x, y: F.conv2d(x, y, padding=1),
    ATEN.mse_loss.default: loss_and_gradient(F.mse_loss),
    ATEN.smooth_l1_loss.default: loss_and_gradient(F.smooth_l1_loss),
    ATEN.huber_loss.default: loss_and_gradient(F.huber_loss),
    ATEN.native_dropout.default: lambda x, y: torch.native_dropout(x, 0.5, True)[0],
    ATEN.bernoulli_.float: lambda x, y: x.detach().clone().bernoulli_(0.5),
    ATEN.bernoulli.default: lambda x, y: torch.bernoulli(x.detach() * 0 + 0.5),
    ATEN._local_scalar_dense.default: lambda x, y: x.sum().item(),
}


def plain_companion(op):
    return weight() if op is ATEN.convolution.default else image().flip(0)
