"""Small networks for the tests of this folder, as users would write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm = nn.GroupNorm(2, c_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Two levels with skips; odd rows are brought to the size of the skip."""

    def __init__(self, c_in: int = 2, c_out: int = 1, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(c_in, width), Block(width, 2 * width)])
        self.middle = Block(2 * width, 4 * width)
        self.up = nn.ModuleList([Block(6 * width, 2 * width), Block(3 * width, width)])
        self.head = nn.Conv2d(width, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.middle(x)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class BatchNormNet(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x)), inplace=True))
        return self.head(x.mean(dim=(-2, -1)))


class Tied(nn.Module):
    """Two layers share a weight, one module is used twice, parameters and buffers are used bare."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList([self.first, self.second, nn.Conv2d(2, 2, 1)])
        self.alpha = nn.Parameter(torch.ones(2, 1, 1))
        self.position = nn.Parameter(torch.randn(1, 2, 5, 6))
        self.register_buffer("latitude", torch.linspace(0.1, 1, 5).view(1, 1, 5, 1))
        self.unregistered = [self.first]
        self.again = self.first.forward

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.alpha + self.position
        x = self.unregistered[0](x) * self.latitude
        return self.again(F.relu(x, inplace=True))[..., 1:]


def spectral(*, old: bool) -> nn.Module:
    norm = old_spectral_norm if old else parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Conv2d(2, 3, 3, padding=1)), nn.SiLU(), norm(nn.Conv2d(3, 2, 3, 2, 1)))


def weight_normed() -> nn.Module:
    first = parametrizations.weight_norm(nn.Conv2d(2, 3, 3, padding=1))
    return nn.Sequential(first, nn.SiLU(), nn.Conv2d(3, 2, 5, padding="same", dilation=2))


class Checkpointed(nn.Module):
    """Recomputes a module and a lambda whose body calls functions that only the rules do right."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.last = nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def body(v: Tensor) -> Tensor:
            return torch.tanh(F.conv2d(self.first(F.pad(v, (1, 1, 1, 1))), self.weight, padding=1))

        y = checkpoint(body, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.last, y, use_reentrant=self.use_reentrant)


class PeriodicConv2d(nn.Conv2d):
    """A user's own layer: longitude is periodic, latitude is not."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(F.pad(input, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1)), self.weight, self.bias)


def curve_of(model, optimizer, pairs, loss_of) -> list[float]:
    """Train on pairs of inputs and targets, a step each; give the losses."""
    losses = []
    for x, y in pairs:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
