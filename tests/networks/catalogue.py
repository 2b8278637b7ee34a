"""The networks that the tests compare with one process: how to make each, and what it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import conv_nets as conv
import spectral_nets as spectral
import torch
import transformers_nets as transformers
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """Hold how a network is made and the global shapes of its inputs.

    Args:
        make: makes it.
        shapes: global shapes of its inputs.
        layouts: their layouts; default ones where None.
        meshes: what it runs on.
        note: what it stands for, for docs/coverage.md.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    note: str
    layouts: tuple[str | None, ...] | None = None
    meshes: tuple[str, ...] = ("data=1,domain=4", "data=2,domain=2", "data=1,domain=3")


SQUARE = ("data=1,domain=2,domain_w=2",)
THREE = ("data=1,domain=4", "data=2,domain=2", "data=1,domain=3")
VIDEO = ("data _ _ domain _",)

NETWORKS: dict[str, Network] = {
    "unet2d": Network(
        conv.UNet, ((2, 2, 37, 26),), "instance norms, strided convs down, transposed convs up", meshes=THREE + SQUARE
    ),
    "unet3d": Network(
        functools.partial(conv.UNet, 3),
        ((2, 2, 6, 13, 8),),
        "the same on volumes (FIELD 55)",
        meshes=(*THREE, "data=1,domain_d=2,domain=2", "data=1,domain_d=3", "data=1,domain_d=2,domain_w=2"),
    ),
    "resnet": Network(
        conv.ResNet, ((4, 3, 45, 32),), "batch norms, max pooling, global pooling, linear head", meshes=THREE + SQUARE
    ),
    "convnext": Network(
        conv.ConvNeXt, ((2, 3, 40, 24),), "depthwise 7 x 7 convs, layer norms over channels", meshes=THREE + SQUARE
    ),
    "swin": Network(
        transformers.Swin, ((2, 2, 32, 24),), "shifted windows, odd sizes padded to the window", meshes=THREE + SQUARE
    ),
    "crossformer": Network(
        transformers.CrossFormer,
        ((2, 2, 21, 29),),
        "several kernel sizes, zero padding, short and long attention",
        meshes=THREE + SQUARE,
    ),
    "vit": Network(
        functools.partial(transformers.ViT, (24, 20)), ((2, 3, 24, 20),), "learned position embedding, class token"
    ),
    "dit": Network(transformers.DiT, ((2, 2, 14, 10), (2,)), "adaptive norms, nn.MultiheadAttention"),
    "neighbourhood": Network(
        transformers.NeighbourhoodAttention, ((2, 2, 11, 7),), "neighbourhood attention by unfold"
    ),
    "encoder": Network(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        ((2, 13, 8),),
        "torch's own transformer encoder, tokens sharded",
        layouts=("data domain _",),
    ),
    "afno": Network(spectral.AFNO, ((2, 2, 20, 12),), "FourCastNet's mixer of modes"),
    "fno": Network(spectral.FNO, ((2, 2, 13, 12),), "modes written into complex zeros"),
    "sfno": Network(
        functools.partial(spectral.SFNO, 13, 12), ((2, 2, 13, 12),), "spherical harmonics: contraction over latitude"
    ),
    "convlstm": Network(conv.ConvLSTM, ((2, 3, 2, 11, 7),), "a state of plain zeros, over time", layouts=VIDEO),
    "vae": Network(
        conv.VAEDecoder, ((2, 3, 9, 6),), "full-frame norms and attention (FIELD 56)", meshes=THREE + SQUARE
    ),
    "rollout": Network(conv.Rollout, ((2, 3, 19, 12),), "four steps back-propagated through", meshes=THREE + SQUARE),
    "diffusion": Network(conv.DiffusionUNet, ((2, 2, 15, 10), (2,)), "time embedding, attention in the middle"),
    "weighted": Network(
        functools.partial(conv.WeightedLoss, 19, 14),
        ((2, 2, 19, 14), (2, 2, 19, 14)),
        "latitude weights and masks in the loss (FIELD 28)",
        meshes=THREE + SQUARE,
    ),
}


def build(name: str) -> nn.Module:
    """Make a network with the same values on every rank."""
    torch.manual_seed(sum(map(ord, name)))
    return NETWORKS[name].make()


def inputs(name: str) -> list[Tensor]:
    """Make the global inputs of a network."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in NETWORKS[name].shapes]


GATHERS: dict[tuple[str, str], set[str]] = {
    ("vae", SQUARE[0]): {"F.scaled_dot_product_attention"},
}
"""What is gathered, by network and mesh; whatever is not named here gathers nothing."""
