"""Peak activation memory of a rank against one process: `python tests/benchmarks/memory.py`.

A training step (forward, loss, backward) of each network runs once on one process and once on each of 4 ranks, and
torch's profiler lists every allocation and release of the CPU allocator. The peak above what was allocated before the
step is what activations, their gradients and temporary buffers need; parameters and their gradients are small here.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import meshpar
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

BOUND = 1.1


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Name the networks: how to make each, and the global shape of its input.

    Two samples, since torch convolves a single small one by unfolding it, which takes 9 or 27 times its memory.
    """
    import conv_nets
    import transformers_nets

    return {
        "U-Net 2-D": (functools.partial(conv_nets.UNet, 2, 8, 3), (2, 2, 384, 384)),
        "U-Net 3-D": (functools.partial(conv_nets.UNet, 3, 8, 2), (2, 2, 48, 64, 48)),
        "Swin": (functools.partial(transformers_nets.Swin, 32, 8), (2, 2, 256, 256)),
    }


def peak_of(step: Callable[[], object]) -> int:
    """Give the peak of the CPU allocator during a step, in bytes above where it began."""
    step()  # caches, and what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, num_bytes in changes:
        now += num_bytes
        peak = max(peak, now)
    return peak


def train_step(net: nn.Module, x: Tensor) -> None:
    """Run forward and backward of a squared mean, without keeping gradients."""
    with meshpar.spmd():
        loss = net(x).square().mean()
    loss.backward()
    net.zero_grad(set_to_none=True)


def measure(name: str, mesh: str) -> int:
    """Measure on this rank; on one process where there is no mesh."""
    make, shape = networks()[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    if mesh:
        net = meshpar.parallelize(net, mesh_for(mesh))
        x = meshpar.shard(x, mesh_for(mesh))
    return peak_of(lambda: train_step(net, x))


def main(argv: list[str] | None = None) -> list[tuple[str, str, float]]:
    """Print the table and give its ratios: network, mesh, worst rank x ranks / one process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", action="append", help="default: data=1,domain=4")
    parser.add_argument("--network", action="append", choices=list(networks()))
    args = parser.parse_args(argv)
    rows = []
    print(f"{'network':<12} {'mesh':<26} {'one process':>12} {'worst rank':>12} {'x ranks / one':>14}  bound {BOUND}")
    for name in args.network or networks():
        (one,) = run_ranks(measure, 1, name, "", timeout_s=600)
        for mesh in args.mesh or ["data=1,domain=4"]:
            ranks = run_ranks(measure, ranks_of(mesh), name, mesh, timeout_s=600)
            ratio = max(ranks) * len(ranks) / one
            rows.append((name, mesh, ratio))
            print(f"{name:<12} {mesh:<26} {one / 2**20:>8.1f} MiB {max(ranks) / 2**20:>8.1f} MiB {ratio:>14.3f}")
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import memory  # the ranks import it by this name

    memory.main()
