"""Drawn networks under drawn plans: any plan gives the numbers of one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tensor import MESHES
from torch import nn

from meshpar.testing import assert_equivalent


class Drawn(nn.Module):
    """Layers on images (B, C, H, W), or, after `tokens`, on (B, H*W, C)."""

    def __init__(self, layers, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.kinds = [kind for kind, _ in layers]
        made = []
        for kind, _ in layers:
            made.append(
                {
                    "conv": lambda: nn.Conv2d(width, width, 3, padding=1),
                    "wide": lambda: nn.Sequential(
                        nn.Conv2d(width, 2 * width, 1), nn.ReLU(), nn.Conv2d(2 * width, width, 1)
                    ),
                    "strided": lambda: nn.Conv2d(width, width, 2, stride=2, padding=1, bias=False),
                    "depthwise": lambda: nn.Conv2d(width, width, 3, padding=1, groups=width),
                    "groups": lambda: nn.Conv2d(width, 2 * width, 1, groups=4),
                    "transposed": lambda: nn.ConvTranspose2d(width, width, 3, stride=2, output_padding=1),
                    "depthwise transposed": lambda: nn.ConvTranspose2d(width, width, 2, groups=width, bias=False),
                    "group norm": lambda: nn.GroupNorm(4, width),
                    "batch norm": lambda: nn.BatchNorm2d(width),
                    "up": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
                    "linear": lambda: nn.Linear(width, width),
                    "layer norm": lambda: nn.LayerNorm(width),
                    "gated": lambda: nn.Linear(width, 2 * width),
                    "attention": lambda: nn.MultiheadAttention(width, 4, batch_first=True),
                    "silu": lambda: nn.SiLU(),
                }[kind]()
            )
        self.layers = nn.ModuleList(made)

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ("linear", "layer norm", "gated", "attention"):
                b, c, h, w = x.shape
                y = x.flatten(2).transpose(1, 2)
                y = layer(y, y, y, need_weights=False)[0] if kind == "attention" else layer(y)
                if kind == "gated":
                    gate, up = y.chunk(2, -1)
                    y = torch.tanh(gate) * up
                x = y.transpose(1, 2).reshape(b, c, h, w)
            elif kind == "groups":
                x = F.glu(layer(x), 1)
            else:
                x = layer(x)
        return x


STYLES = {
    "conv": ("colwise", "rowwise", "packed:2", None),
    "wide": ("pair", "crossed", None),
    "strided": ("colwise", "rowwise", None),
    "depthwise": ("colwise", None),
    "groups": ("colwise", None),
    "transposed": ("colwise", "rowwise", "packed:2", None),
    "depthwise transposed": ("colwise", None),
    "linear": ("colwise", "rowwise", None),
    "gated": ("packed:2", "colwise", "rowwise", None),
    "attention": ("colwise", None),
    **dict.fromkeys(("group norm", "batch norm", "up", "layer norm", "silu"), (None,)),
}


@st.composite
def drawn_networks(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(STYLES)), min_size=1, max_size=5))
    layers = [(kind, draw(st.sampled_from(STYLES[kind]))) for kind in kinds]
    shape = (draw(st.integers(2, 5)), 8, draw(st.integers(1, 9)), draw(st.integers(1, 5)))
    return layers, shape


def plan_of(layers):
    plan = {}
    for i, (_, style) in enumerate(layers):
        if style == "pair":
            plan |= {f"layers.{i}.0": "colwise", f"layers.{i}.2": "rowwise"}
        elif style == "crossed":
            plan |= {f"layers.{i}.0": "rowwise", f"layers.{i}.2": "packed:2"}
        elif style is not None:
            plan[f"layers.{i}"] = style
    return plan


def check_drawn(mesh, num_examples):
    @settings(max_examples=num_examples)
    @given(drawn_networks())
    def check(drawn):
        check_one(*drawn, mesh)

    check()


def check_one(layers, shape, mesh):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if x[:, 0].numel() < 8:  # batch norm of a single value is refused
        return
    assert_equivalent(
        functools.partial(Drawn, layers), [x], mesh, gathers=True, options={"tensor_plan": plan_of(layers)}
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_drawn_network_under_a_drawn_plan_property(mesh):
    check_drawn(mesh, 12)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_many_drawn_networks_under_drawn_plans(mesh):
    check_drawn(mesh, 150)
