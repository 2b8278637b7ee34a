"""Hypothesis strategies: meshes, sizes that are hard for sharding, and layers with all their arguments.

Invariant: what is drawn works on one process; it is tried there, on one small tensor, before it is given.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import nn

from meshpar.testing.equivalence import Report
from meshpar.testing.models import assert_equivalent

MESHES = (
    "data=1,domain=4",
    "data=2,domain=2",
    "data=4,domain=1",
    "data=1,domain=3",
    "data=1,domain=2",
    "data=1,domain=2,domain_w=2",
    "data=1,domain=1,domain_w=3",
)


def meshes() -> st.SearchStrategy[str]:
    """Draw a mesh spec of 2 to 4 ranks."""
    return st.sampled_from(MESHES)


def rows(least: int = 1, most: int = 14) -> st.SearchStrategy[int]:
    """Draw a number of rows: from one up, so that shards are uneven, empty, or smaller than a halo."""
    return st.integers(least, most)


@dataclass(frozen=True)
class LayerCase:
    """Hold a layer and the input to give it.

    Args:
        name: class in `torch.nn`.
        shape: global shape of the input.
        layout: layout string of the input.
        arguments: keyword arguments of the class.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    arguments: dict[str, Any] = field(hash=False)

    def build(self) -> nn.Module:
        """Make the layer, in float64, with values that its name and shape decide."""
        torch.manual_seed(len(self.name) + sum(self.shape))
        layer: nn.Module = getattr(nn, self.name)(**self.arguments)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.5)
        return layer.double()

    def check(self, mesh: str, *, tolerance: float = 1e-9) -> Report:
        """Compare the layer with one process; see `assert_equivalent`."""
        with torch.random.fork_rng():
            torch.manual_seed(sum(self.shape))
            x = torch.randn(self.shape, dtype=torch.float64)
        everywhere = self.name != "Linear" and len(self.shape) > 3  # rows, columns, depth: as many axes as there are
        layouts = [None if everywhere else self.layout]
        return assert_equivalent(self.build, [x], mesh, layouts=layouts, tolerance=tolerance, shard_parameters=False)


def _layout(num_dims: int) -> str:
    tokens = ["data", *["_"] * (num_dims - 1)]
    tokens[-2 if num_dims > 3 else -1] = "domain"
    return " ".join(tokens)


def _works(case: LayerCase) -> LayerCase:
    """Keep a case that one process can run, without an output that is empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = case.build()(torch.randn(case.shape, dtype=torch.float64))
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError, OverflowError):
        reject()
    first = out[0] if isinstance(out, tuple) else out
    if math.prod(first.shape) == 0:
        reject()
    return case


@st.composite
def image_shapes(draw: st.DrawFn, num_spatial: int, channels: int) -> tuple[int, ...]:
    """Draw a global shape (B, C, *spatial) with any number of rows in the sharded dim."""
    spatial = [draw(rows()) for _ in range(num_spatial)]
    if num_spatial == 3:
        spatial = [spatial[0] % 6 + 1, spatial[1], spatial[2] % 6 + 1]
    return (draw(st.integers(1, 3)), channels, *spatial)


def _sizes(num_spatial: int, least: int, most: int) -> st.SearchStrategy[Any]:
    one = st.integers(least, most)
    return st.one_of(one, st.tuples(*[one] * num_spatial))


@st.composite
def convolutions(draw: st.DrawFn) -> LayerCase:
    """Draw a convolution of 1 to 3 dims: even kernels, dilation, groups, strides, every padding and padding mode."""
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2]))
    channels = groups * draw(st.integers(1, 2))
    same = draw(st.sampled_from([False, False, False, True]))
    arguments = {
        "in_channels": channels,
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": draw(_sizes(nd, 1, 5)),
        "stride": 1 if same else draw(_sizes(nd, 1, 3)),
        "padding": draw(st.sampled_from(["same", "valid"])) if same else draw(_sizes(nd, 0, 4)),
        "dilation": draw(_sizes(nd, 1, 3)),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
    }
    shape = draw(image_shapes(nd, channels))
    return _works(LayerCase(f"Conv{nd}d", shape, _layout(nd + 2), arguments))


@st.composite
def pools(draw: st.DrawFn) -> LayerCase:
    """Draw a pooling layer, adaptive ones too."""
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    kind = draw(st.sampled_from(["MaxPool", "AvgPool", "LPPool", "AdaptiveAvgPool", "AdaptiveMaxPool"]))
    shape = draw(image_shapes(nd, 2))
    if kind.startswith("Adaptive"):
        size = draw(_sizes(nd, 1, 9))
        return _works(LayerCase(f"{kind}{nd}d", shape, _layout(nd + 2), {"output_size": size}))
    arguments: dict[str, Any] = {
        "kernel_size": draw(_sizes(nd, 1, 4)),
        "stride": draw(st.one_of(st.none(), _sizes(nd, 1, 3))),
    }
    arguments["ceil_mode"] = draw(st.booleans())
    if kind == "LPPool":
        # On one side of zero its gradient is not that of a number: keep to what torch differentiates.
        arguments["norm_type"] = draw(st.sampled_from([1.0, 2.0, 3.0]))
    else:
        arguments["padding"] = draw(_sizes(nd, 0, 2))
    if kind == "MaxPool":
        arguments["dilation"] = draw(_sizes(nd, 1, 2))
        arguments["return_indices"] = draw(st.booleans())
    if kind == "AvgPool":
        arguments["count_include_pad"] = draw(st.booleans())
        if nd > 1:
            arguments["divisor_override"] = draw(st.sampled_from([None, None, 3]))
    return _works(LayerCase(f"{kind}{nd}d", shape, _layout(nd + 2), arguments))


@st.composite
def paddings(draw: st.DrawFn) -> LayerCase:
    """Draw a padding layer."""
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    kind = draw(st.sampled_from(["ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"]))
    least = -1 if kind in ("ZeroPad", "ConstantPad") else 0
    arguments: dict[str, Any] = {"padding": draw(st.tuples(*[st.integers(least, 4)] * (2 * nd)))}
    if kind == "ConstantPad":
        arguments["value"] = draw(st.sampled_from([0.5, -2.0]))
    return _works(LayerCase(f"{kind}{nd}d", draw(image_shapes(nd, 2)), _layout(nd + 2), arguments))


@st.composite
def norms(draw: st.DrawFn) -> LayerCase:
    """Draw a norm."""
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    kind = draw(st.sampled_from(["GroupNorm", "InstanceNorm", "BatchNorm", "LayerNorm"]))
    shape = draw(image_shapes(nd, 4))
    affine = draw(st.booleans())
    if kind == "GroupNorm":
        arguments: dict[str, Any] = {
            "num_groups": draw(st.sampled_from([1, 2, 4])),
            "num_channels": 4,
            "affine": affine,
        }
        return _works(LayerCase(kind, shape, _layout(nd + 2), arguments))
    if kind == "LayerNorm":
        last = draw(st.integers(1, len(shape) - 1))
        arguments = {"normalized_shape": shape[-last:], "elementwise_affine": affine}
        return _works(LayerCase(kind, shape, _layout(nd + 2), arguments))
    arguments = {"num_features": 4, "affine": affine, "track_running_stats": draw(st.booleans())}
    if kind == "BatchNorm":
        arguments["momentum"] = draw(st.sampled_from([0.1, None]))
    return _works(LayerCase(f"{kind}{nd}d", shape, _layout(nd + 2), arguments))


@st.composite
def resamplings(draw: st.DrawFn) -> LayerCase:
    """Draw an upsampling layer; it samples down as well."""
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[nd]
    mode = draw(st.sampled_from(["nearest", "nearest-exact", *smooth]))
    arguments: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        arguments["size"] = draw(_sizes(nd, 1, 17))
    else:
        arguments["scale_factor"] = draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.7]))
        arguments["recompute_scale_factor"] = draw(st.sampled_from([None, True]))
    if mode not in ("nearest", "nearest-exact"):
        arguments["align_corners"] = draw(st.booleans())
    return _works(LayerCase("Upsample", draw(image_shapes(nd, 2)), _layout(nd + 2), arguments))


@st.composite
def others(draw: st.DrawFn) -> LayerCase:
    """Draw a linear layer or an activation."""
    nd = draw(st.sampled_from([1, 2, 3]))
    shape = draw(image_shapes(nd, 2))
    name = draw(
        st.sampled_from(["Linear", "ReLU", "GELU", "SiLU", "Softplus", "LeakyReLU", "Tanh", "Hardswish", "ELU"])
    )
    if name == "Linear":
        layout = "data _ domain _" if nd == 2 else _layout(nd + 2) if nd == 3 else "data domain _"
        return _works(
            LayerCase(name, shape, layout, {"in_features": shape[-1], "out_features": draw(st.integers(1, 3))})
        )
    inplace = {"inplace": draw(st.booleans())} if name in ("LeakyReLU", "Hardswish", "ELU") else {}
    return _works(LayerCase(name, shape, _layout(nd + 2), {} if inplace.get("inplace") else inplace))


def layers() -> st.SearchStrategy[LayerCase]:
    """Draw any layer that has a rule."""
    return st.one_of(convolutions(), convolutions(), pools(), pools(), paddings(), norms(), resamplings(), others())
