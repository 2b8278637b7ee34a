"""`python -m meshpar demo`: a small U-Net trained on ranks of this machine and on one process, side by side.

Invariant: both curves start from the same weights and see the same samples; what is printed was computed just now.
"""

from __future__ import annotations

import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.batch import gather, shard
from meshpar.errors import MeshparError
from meshpar.parallelize import parallelize
from meshpar.planning.search import short
from meshpar.scope import spmd
from meshpar.showing import Explanation, explain, show
from meshpar.simulating.ranks import Ranks, ranks_for
from meshpar.tables import aligned
from meshpar.testing import mesh_for
from meshpar.testing.pool import run_ranks, shutdown_pool

NUM_STEPS = 12
SHAPE = (4, 1, 37, 49)
"""Of a batch (B, C, H, W): rows that no number of ranks from 2 to 16 shares out evenly."""

ALLOWED = 1e-9
"""The largest relative difference of two losses: float64, where sums are taken in another order."""


class SmallUNet(nn.Module):
    """Forecast the next field (B, 1, H, W) from the last one; H and W may be odd."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = _block(1, width)
        self.down = _block(width, 2 * width)
        self.bottom = _block(2 * width, 2 * width)
        self.up = _block(4 * width, width)
        self.out = _block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Go down two levels and up again."""
        fine = self.stem(x)
        middle = self.down(F.avg_pool2d(fine, 2))
        deep = self.bottom(F.max_pool2d(middle, 2))
        deep = F.interpolate(deep, size=middle.shape[-2:], mode="bilinear", align_corners=False)
        middle = self.up(torch.cat([middle, deep], dim=1))
        middle = F.interpolate(middle, size=fine.shape[-2:], mode="nearest")
        answer: Tensor = x + self.head(self.out(torch.cat([fine, middle], dim=1)))
        return answer


def _block(in_channels: int, out_channels: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, out_channels), nn.SiLU())


def waves(step: int) -> tuple[Tensor, Tensor]:
    """Make a batch of travelling waves and what they are a moment later, two of (B, 1, H, W), the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    num, _, rows, cols = SHAPE
    speed, phase = torch.rand(2, num, 1, 1, 1, generator=generator, dtype=torch.float64)
    y = torch.linspace(0, math.pi, rows, dtype=torch.float64).view(1, 1, rows, 1)
    x = torch.linspace(0, 2 * math.pi, cols + 1, dtype=torch.float64)[:-1]
    field = torch.sin(y) * torch.sin(2 * x + 6 * phase)
    return field, torch.sin(y) * torch.sin(2 * x + 6 * phase - 0.5 - speed) * 0.9


class _Training:
    """Train the net, on a mesh or on this process alone."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        net = SmallUNet().double()
        self.mesh = mesh
        self.model = net if mesh is None else parallelize(net, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, number: int) -> float:
        """Take a step; give the loss before it."""
        x, y = waves(number)
        if self.mesh is None:
            loss = F.mse_loss(self.model(x), y)
        else:
            with spmd():
                loss = F.mse_loss(self.model(shard(x, self.mesh)), shard(y, self.mesh))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(gather(loss.detach()))


_ON_THIS_RANK: dict[str, _Training] = {}
"""What a rank goes on with in its next call."""


def _begin(spec: str) -> Explanation:
    training = _ON_THIS_RANK["it"] = _Training(mesh_for(spec))
    x, y = waves(0)
    assert training.mesh is not None
    target = shard(y, training.mesh)
    return explain(training.model, shard(x, training.mesh), loss=lambda out: F.mse_loss(out, target))


def _go_on(number: int) -> float:
    return _ON_THIS_RANK["it"].step(number)


def demo(spec: str = "data=2,domain=2") -> int:
    """Show a mesh, what each layer does on it, and a training on it beside one on a single process.

    Args:
        spec: mesh of at most 16 ranks.

    Returns:
        0 where the two trainings agree, 1 where they do not, 2 for a mesh that cannot be, 130 after an interrupt.

    Communication:
        Among ranks that it starts and ends.
    """
    try:
        return _shown(ranks_for(spec, 120.0))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MeshparError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutdown_pool()


def _shown(ranks: Ranks) -> int:
    begin = time.monotonic()
    mesh, num = short(ranks.spec), ranks.num_ranks
    cores = os.cpu_count() or 1
    few = f" ({cores} cores: they take turns)" if cores < num else ""
    _say(f"1. {num} processes{few} as a mesh, and the grid of {SHAPE[-2]} x {SHAPE[-1]} that they share out")
    print(show(ranks.spec, SHAPE))
    _say("2. What each layer of a small U-Net does in a training step, as rank 0 sees it")
    alone = _Training(None)
    print(_table(run_ranks(_begin, num, str(ranks.spec), timeout_s=ranks.timeout_s)[0]))
    _say(f"3. The training: one process, and the same model on {num} ranks, in float64")
    worst = 0.0
    head = ("step", "one process", f"{num} ranks", "difference")
    rows: list[tuple[str, ...]] = []
    for step in range(NUM_STEPS):
        expected, found = alone.step(step), run_ranks(_go_on, num, step, timeout_s=ranks.timeout_s)[0]
        worst = max(worst, abs(found - expected) / abs(expected))
        rows.append((str(step), f"{expected:.15f}", f"{found:.15f}", f"{abs(found - expected):.1e}"))
        print("\n".join(aligned([head, rows[-1]])[0 if step == 0 else 1 :]), flush=True)
    verdict = "the same function" if worst <= ALLOWED else "NOT the same function: please report this"
    print(f"largest relative difference {worst:.1e}: {verdict} ({time.monotonic() - begin:.0f} s in all)")
    _say("4. What next")
    print(_NEXT.format(mesh=mesh, num=num))
    return 0 if worst <= ALLOWED else 1


def _table(found: Explanation) -> str:
    """Write the table of a step narrow enough for a terminal of 80 columns."""
    rows: list[tuple[str, ...]] = [("module", "op", "makes", "rows", "forward", "backward")]
    for row in found.rows:
        where, op, _, _, _, *numbers = row.cells()
        rows.append((where, op.removeprefix("F.").removeprefix("torch."), ", ".join(row.made), *numbers))
    return "\n".join([*aligned(rows), found.total()])


def _say(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


_NEXT = """your model, in a notebook:   run = meshpar.simulate("{mesh}", net, x)
your training script:        model = meshpar.parallelize(net, "{mesh}"), then
                             torchrun --nproc-per-node {num} script.py
before there is a machine:   python -m meshpar plan package.module:factory --input 1,70,721,1440 --mesh data=8,domain=8
on a cluster that is stuck:  python -m meshpar doctor
to read on:                  README.md, examples/notebooks/"""
