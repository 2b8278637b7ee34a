"""Split and fused weights, used otherwise than by their layers: they have the numbers of whole ones."""

import functools

import pytest
import tensor_nets as nets
import torch
import torch.nn.functional as F
from test_tensor import SPLIT, tokens
from torch import nn

from meshpar.testing import assert_equivalent


class Penalised(nets.Gated):
    """Add a penalty on all parameters, which are reached past the attributes of their modules."""

    def forward(self, x):
        return super().forward(x), sum(p.square().sum() for p in self.parameters()) * x.mean()


class Given(nets.Gated):
    """Hand parameters out."""

    def forward(self, x):
        return super().forward(x), self.gate_up.weight, self.gate_up.bias, self.down.weight[1]


@pytest.mark.parametrize("model", [Penalised, Given])
@pytest.mark.parametrize("style", ["packed:2", "colwise", "rowwise"])
def test_weights_that_are_split_are_whole_wherever_they_are_met(model, style):
    plan = {"gate_up": style, "down": "rowwise"}
    assert_equivalent(model, [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan})


class MadeBias(nn.Module):
    """Make the bias of a fused layer of several, or a weight, as BEiT and Swin-V2 do."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.fused = nn.Linear(8, 24)

    def forward(self, x):
        weight, bias = self.fused.weight, self.fused.bias
        if self.kind == "bias":
            bias = torch.cat([bias[:8], torch.zeros(8, dtype=x.dtype), bias[16:]])
        else:
            weight = weight * 2
        q, k, v = F.linear(x, weight, bias).chunk(3, -1)
        return q * k + v


@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_what_is_made_of_fused_weights_lies_as_they_do(kind):
    plan = {"fused": "packed"}
    assert_equivalent(
        functools.partial(MadeBias, kind), [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan}
    )


class Taken(nn.Module):
    """Take what comes out of a fused layer apart, or write into it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.fused = nn.ModuleList([nn.Linear(8, 24)])
        self.out = nn.Linear(12, 8)

    def forward(self, x):
        return self.out(self.kind(self.fused[0](x)))


def gate_of(h):
    return F.glu(h, -1) + F.glu(h) + nn.GLU()(h)


def write_across(h):
    h[..., 3:15] = 1.0
    return h[..., 6:18]


def write_all(h):
    h = h * 1
    h.mul_(2).add_(h.detach().mean())
    F.relu(h, inplace=True)
    a, b = h.chunk(2, -1)
    return a - b


def write_a_part(h):
    h[..., :12].mul_(2)
    h.view(*h.shape[:-1], 2, 12)[..., 1, :].add_(1)
    return h[..., 5:17]


def write_under_a_part(h):
    h = h * 1
    part = h[..., 12:]
    h.mul_(3)
    return part


def write_as_out(h):
    h = h.detach()
    torch.exp(h, out=h)
    return h.chunk(2, -1)[0]


@pytest.mark.parametrize("kind", [gate_of, write_across, write_all, write_a_part, write_under_a_part, write_as_out])
def test_packed_activations_are_written_and_gated_as_any(kind):
    plan = {"fused.0": "packed:2", "out": "rowwise"}
    assert_equivalent(functools.partial(Taken, kind), [tokens()], SPLIT[0], gathers=True, options={"tensor_plan": plan})
