"""Time and memory of a plan: a U-Net of 100 layers on 721 x 1440, 1,024 ranks; `python tests/benchmarks/plan.py`."""

from __future__ import annotations

import argparse
import functools
import itertools
import resource
import time

import torch
from torch import Tensor, nn

import meshpar


class UNet(nn.Module):
    """Stages of blocks of convolution, norm and activation, with skips; `3 * blocks + 4 * levels + 2` layers or so."""

    def __init__(self, levels: int = 3, blocks: int = 4, channels: int = 32) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(levels + 1)]
        stage = functools.partial(_stage, blocks=blocks)
        self.first = nn.Conv2d(70, channels, 3, padding=1)
        self.down = nn.ModuleList(stage(a, a) for a in widths[:-1])
        self.pools = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.middle = stage(widths[-1], widths[-1])
        self.ups = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(stage(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(channels, 70, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Go down, keep what is passed, and come up."""
        x, kept = self.first(x), []
        for down, pool in zip(self.down, self.pools, strict=True):
            kept.append(down(x))
            x = pool(kept[-1])
        x = self.middle(x)
        for up, merge, skip in zip(reversed(self.up), reversed(self.ups), reversed(kept), strict=True):
            x = nn.functional.interpolate(merge(x), size=skip.shape[-2:])
            x = up(torch.cat([x, skip], 1))
        return self.last(x)  # type: ignore[no-any-return]


def _stage(inp: int, out: int, blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(blocks):
        layers += [nn.Conv2d(inp if i == 0 else out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()]
    return nn.Sequential(*layers)


def main() -> None:
    """Print the plan, the seconds and the memory that it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", default="data=128,domain=8")
    args = parser.parse_args()
    net = UNet()
    print(f"{sum(1 for m in net.modules() if not list(m.children()))} layers")
    start, cpu = time.perf_counter(), time.process_time()
    print(meshpar.plan(net, args.mesh, (1, 70, 721, 1440)))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.perf_counter() - start:.1f} s, of which {time.process_time() - cpu:.1f} s CPU; {used:.2f} GiB in all")


if __name__ == "__main__":
    main()
