"""A small U-Net in plain torch: it knows nothing of meshes, ranks or shards."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return two 3×3 convolutions, each with its norm and activation.

    The convolutions have no bias: the norm that follows would take most of it out again.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Map the last fields (B, K, H, W) to the next one (B, 1, H, W), as a correction to the newest of them.

    Args:
        in_channels: K, the number of fields it sees; the last channel is the newest.
        width: channels at full resolution; each level down has twice as many.
        depth: number of levels below full resolution.
    """

    def __init__(self, in_channels: int, *, width: int = 12, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = block(in_channels, width)
        self.down = nn.ModuleList(block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, 1, 1)
        nn.init.zeros_(self.head.weight)  # the first forecast is persistence: next year is like this one
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Forecast the next field; H and W may be odd."""
        newest = x[:, -1:]
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(F.avg_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up in reversed(self.up):
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([x, skip], dim=1))
        return newest + self.head(x)
