"""The installed networks that are compared with one process: how to make each, and what it is given.

The packages are imported in the functions that make the networks: the ranks of other tests do not need them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

THREE = ("data=1,domain=4", "data=2,domain=2", "data=1,domain=3")
SQUARE = ("data=1,domain=2,domain_w=2",)


@dataclass(frozen=True)
class Network:
    """Hold how a network is made and what it is given.

    Args:
        package: what must be installed.
        make: makes it.
        shapes: global shapes of its inputs.
        meshes: what it runs on.
        further: further arguments of its forward, after the inputs.
        dtype: type of the comparison; float32 where the network itself casts to it.
        tolerance: largest difference, relative to the largest number.
    """

    package: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    meshes: tuple[str, ...] = THREE
    further: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9


def basic_unet(dims: int) -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(dims, 2, 1, features=(4, 4, 6, 6, 8, 4))


def residual_unet(dims: int, norm: str) -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(dims, 2, 1, channels=(4, 6, 8), strides=(2, 2), num_res_units=2, norm=norm)


def swin_unetr(dims: int) -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(
        1, 2, feature_size=12, depths=(2, 1, 1, 1), num_heads=(3, 3, 3, 3), window_size=4, spatial_dims=dims
    )


def fno(modes: tuple[int, ...], **options: Any) -> nn.Module:
    from neuralop.models import FNO

    return FNO(modes, in_channels=2, out_channels=1, hidden_channels=6, n_layers=2, **options)


def harmonics(num_lat: int, num_lon: int, grid: str) -> nn.Module:
    from torch_harmonics import InverseRealSHT, RealSHT

    return nn.Sequential(RealSHT(num_lat, num_lon, grid=grid), InverseRealSHT(num_lat, num_lon, grid=grid))


def sfno(size: tuple[int, int], **options: Any) -> nn.Module:
    from torch_harmonics.examples.models import SphericalFourierNeuralOperator

    return SphericalFourierNeuralOperator(size, in_chans=2, out_chans=2, embed_dim=6, num_layers=3, **options)


def diffusion_unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


NETWORKS: dict[str, Network] = {
    "monai-basicunet-2d": Network("monai", functools.partial(basic_unet, 2), ((2, 2, 37, 35),), meshes=THREE + SQUARE),
    "monai-basicunet-3d": Network("monai", functools.partial(basic_unet, 3), ((2, 2, 16, 34, 16),)),
    "monai-unet-2d": Network(
        "monai", functools.partial(residual_unet, 2, "INSTANCE"), ((2, 2, 20, 12),), meshes=THREE + SQUARE
    ),
    "monai-unet-3d": Network(
        "monai",
        functools.partial(residual_unet, 3, "BATCH"),
        ((2, 2, 8, 20, 12),),
        meshes=(*THREE, "data=1,domain_d=2,domain=2"),
    ),
    "monai-swinunetr-2d": Network("monai", functools.partial(swin_unetr, 2), ((2, 1, 64, 32),)),
    "monai-swinunetr-3d": Network("monai", functools.partial(swin_unetr, 3), ((1, 1, 32, 64, 32),)),
    "neuraloperator-fno-2d": Network(
        "neuraloperator", functools.partial(fno, (8, 6)), ((2, 2, 13, 12),), dtype=torch.float32, tolerance=1e-5
    ),
    "neuraloperator-fno-3d": Network(
        "neuraloperator", functools.partial(fno, (4, 6, 4)), ((2, 2, 6, 11, 8),), dtype=torch.float32, tolerance=1e-5
    ),
    "neuraloperator-tfno-2d": Network(
        "neuraloperator",
        functools.partial(fno, (8, 6), factorization="tucker", implementation="factorized"),
        ((2, 2, 13, 12),),
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "torch-harmonics-sht": Network(
        "torch-harmonics", functools.partial(harmonics, 13, 24, "equiangular"), ((2, 3, 13, 24),)
    ),
    "torch-harmonics-sfno": Network(
        "torch-harmonics",
        functools.partial(sfno, (17, 32), scale_factor=2, normalization_layer="instance_norm"),
        ((2, 2, 17, 32),),
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "torch-harmonics-sfno-embedded": Network(
        "torch-harmonics",
        functools.partial(sfno, (17, 32), scale_factor=1, pos_embed="learnable latlon", residual_prediction=True),
        ((2, 2, 17, 32),),
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "diffusers-unet2d": Network(
        "diffusers", diffusion_unet, ((2, 2, 18, 12),), meshes=THREE + SQUARE, further=(torch.tensor([3, 500]),)
    ),
}


MODULES = {
    "monai": "monai.networks.nets",
    "neuraloperator": "neuralop.models",
    "torch-harmonics": "torch_harmonics.examples.models",
    "diffusers": "diffusers.models.unets.unet_2d",
}
"""What the networks of a package are imported from."""

ADVICE = "pip install -r tests/thirdparty/requirements.txt -c constraints.txt"


def bring_in(package: str) -> None:
    """Import what the networks of a package need; a missing package is an error that says how to install it."""
    try:
        importlib.import_module(MODULES[package])
    except ImportError as error:
        text = f"{package} cannot be imported: {error}\n  fix: {ADVICE}"
        raise ImportError(text) from error


def build(name: str) -> nn.Module:
    """Make a network with the same values on every rank."""
    torch.manual_seed(sum(map(ord, name)))
    return NETWORKS[name].make()


def inputs(name: str) -> list[Any]:
    """Make the global inputs of a network."""
    generator = torch.Generator().manual_seed(7)
    network = NETWORKS[name]
    return [
        *(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in network.shapes),
        *network.further,
    ]
