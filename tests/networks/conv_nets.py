"""Convolutional networks as people write them, at toy size and in plain torch."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DoubleConv(nn.Module):
    def __init__(self, num_in: int, num_out: int, num_dims: int) -> None:
        super().__init__()
        conv = nn.Conv2d if num_dims == 2 else nn.Conv3d
        norm = nn.InstanceNorm2d if num_dims == 2 else nn.InstanceNorm3d
        self.body = nn.Sequential(
            conv(num_in, num_out, 3, padding=1),
            norm(num_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            conv(num_out, num_out, 3, padding=1),
            norm(num_out, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    """nnU-Net's shape: instance norms, strided convs down, transposed convs up; odd sizes padded to the skips."""

    def __init__(self, num_dims: int = 2, width: int = 4, levels: int = 2, num_in: int = 2, num_out: int = 2) -> None:
        super().__init__()
        conv = nn.Conv2d if num_dims == 2 else nn.Conv3d
        up = nn.ConvTranspose2d if num_dims == 2 else nn.ConvTranspose3d
        widths = [width * 2**i for i in range(levels + 1)]
        self.enter = DoubleConv(num_in, width, num_dims)
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b, 3, stride=2, padding=1), DoubleConv(b, b, num_dims))
            for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(up(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(DoubleConv(2 * a, a, num_dims) for a in widths[:-1])
        self.leave = conv(width, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            skip = skips.pop()
            x = up(x)
            pads: list[int] = []
            for have, need in zip(reversed(x.shape[2:]), reversed(skip.shape[2:]), strict=True):
                pads += [0, need - have]
            x = merge(torch.cat([F.pad(x, pads), skip], dim=1))
        return self.leave(x)


class Residual(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The classifier: a strided stem, max pooling, three stages, global pooling and a linear head."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 2))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ChannelsFirstNorm(nn.Module):
    """ConvNeXt's layer norm over channels, written out."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.grow, self.shrink = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.shrink(F.gelu(self.grow(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), ChannelsFirstNorm(4))
        self.first = ConvNeXtBlock(4)
        self.down = nn.Sequential(ChannelsFirstNorm(4), nn.Conv2d(4, 8, 2, stride=2))
        self.second = ConvNeXtBlock(8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class ConvLSTMCell(nn.Module):
    def __init__(self, num_in: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(num_in + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = torch.split(self.gates(torch.cat([x, h], dim=1)), self.hidden, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class ConvLSTM(nn.Module):
    """Reads (B, T, C, H, W) step by step, with a state that begins as plain zeros."""

    def __init__(self, num_in: int = 2, hidden: int = 3) -> None:
        super().__init__()
        self.cell, self.head = ConvLSTMCell(num_in, hidden), nn.Conv2d(hidden, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, steps, _, h, w = x.shape
        zeros = torch.zeros(b, self.cell.hidden, h, w, dtype=x.dtype, device=x.device)
        state = zeros, zeros
        outs = []
        for t in range(steps):
            state = self.cell(x[:, t], state)
            outs.append(self.head(state[0]))
        return torch.stack(outs, dim=1)


class Rollout(nn.Module):
    """Four steps of a small network that feeds on its own forecasts, all of them in the loss."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 3, 5, padding=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for _ in range(self.steps):
            x = x + 0.5 * self.net(F.pad(x, (1, 1, 0, 0), mode="circular")[..., 1:-1])
            outs.append(x)
        return torch.stack(outs, dim=1)


class WeightedLoss(nn.Module):
    """A forecast whose loss is weighted by the cosine of latitude and masked over land."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 1))
        weights = torch.cos(torch.deg2rad(torch.linspace(-88.0, 88.0, num_rows)))
        self.register_buffer("weights", (weights / weights.mean())[:, None])
        mask = torch.arange(num_rows * num_columns).reshape(num_rows, num_columns) % 5 != 0
        self.register_buffer("ocean", mask)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        error = self.weights * (self.net(x) - y).square()
        error = error.masked_fill(~self.ocean, 0.0)
        per_channel = error.sum(dim=(0, 2, 3)) / (self.ocean.sum() * x.shape[0])
        extra = torch.where(self.ocean, (x - y).abs(), torch.zeros_like(x)).mean()
        return per_channel.mean() + 0.1 * extra


def time_embedding(t: Tensor, channels: int) -> Tensor:
    half = channels // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=t.dtype, device=t.device) / half)
    angles = t[:, None] * frequencies[None]
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class TimeBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.time = nn.Linear(channels, num_out)
        self.norm2, self.conv2 = nn.GroupNorm(2, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.skip = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(embedding))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class SpatialAttention(nn.Module):
    """Attention over all points of an image, as diffusion networks and VAEs have it."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.GroupNorm(2, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        y = F.scaled_dot_product_attention(q.transpose(-1, -2), k.transpose(-1, -2), v.transpose(-1, -2))
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class DiffusionUNet(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.embed = nn.Sequential(nn.Linear(channels, 8), nn.SiLU(), nn.Linear(8, 8))
        self.enter = nn.Conv2d(2, channels, 3, padding=1)
        self.one, self.two = TimeBlock(channels, channels, 8), TimeBlock(channels, 2 * channels, 8)
        self.attention, self.middle = SpatialAttention(2 * channels), TimeBlock(2 * channels, 2 * channels, 8)
        self.three = TimeBlock(3 * channels, channels, 8)
        self.leave = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, 2, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        embedding = self.embed(time_embedding(t, self.channels))
        first = self.one(self.enter(x), embedding)
        y = self.two(F.avg_pool2d(first, 2, ceil_mode=True), embedding)
        y = self.middle(self.attention(y), embedding)
        y = F.interpolate(y, size=first.shape[-2:], mode="nearest")
        return self.leave(self.three(torch.cat([y, first], 1), embedding))


class VAEDecoder(nn.Module):
    """Full-frame norms and attention between upsampling convs (FIELD 56)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.attention = SpatialAttention(channels, heads=1)
        self.body = nn.Sequential(
            nn.GroupNorm(2, channels, eps=1e-6),
            nn.SiLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels, eps=1e-6),
            nn.SiLU(),
            nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=False),
            nn.Conv2d(channels, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.body(self.attention(self.enter(z)))
