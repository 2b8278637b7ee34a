"""How close to the limit: ratios of times, each measured side by side: `python tests/benchmarks/speed.py`.

Every part runs its ways in turn, in the same processes; of several ranks the slowest counts in each round, and a ratio
is the median of the ratios of the rounds. One thread a rank. A time alone says nothing on another machine, or beside
other work on this one; ratios of neighbouring runs hold better. The floor of strong scaling is the machine's own:
processes that never talk. A limit is measured beside it: what the same processes take that do no more than they must
(meet at every norm, exchange the bare rows of every convolution), the kernels of a norm alone, or ops on pieces that
each make a DTensor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import Row, Times, Ways, alternate, slowest
from torch import Tensor, nn

import meshpar
from meshpar import private
from meshpar.exchange import fetch
from meshpar.intervals import chunks
from meshpar.rules.statistics import Statistics, normalise
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

GRID = (256, 512)


def stepper(
    net: nn.Module, x: Tensor, *, update: bool, meet: bool = False, rules: bool = False
) -> Callable[[], dict[str, float]]:
    """Make a function that times forward, backward and the update of a step.

    Args:
        net: the network.
        x: its input; the loss is the mean of the squares of what it gives.
        update: whether AdamW steps, else gradients are dropped.
        meet: whether ranks wait for each other between forward and backward.
        rules: whether the loss is one of activations.
    """
    optimizer = torch.optim.AdamW(net.parameters()) if update else None

    def step() -> dict[str, float]:
        begin = time.perf_counter()
        with meshpar.spmd() if rules else contextlib.nullcontext():
            loss = net(x).square().mean()
        forward = time.perf_counter()
        if meet:
            dist.barrier()
        between = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        net.zero_grad(set_to_none=True)
        end = time.perf_counter()
        return {"forward": forward - begin, "backward": backward - between, "step": end - between + forward - begin}

    return step


def unet() -> nn.Module:
    """Make the U-Net: two levels, 32 channels, 8 fields in."""
    from unet import UNet

    torch.manual_seed(0)
    return UNet(8, width=32, depth=1)


class Chain(nn.Module):
    """Chain 20 tiny convolutions with three pointwise ops after each."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 4, H, W) to the same."""
        for conv in self.convs:
            x = (F.silu(conv(x)) * 0.5).tanh()
        return x


class Wrapped(Chain):
    """Do the same on pieces of which each op makes a DTensor, with the quickest way in and out, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 4, H, W) to the same."""
        for conv in self.convs:
            for op in (conv, F.silu, lambda y: y * 0.5, torch.tanh):
                x = private.enter(op(private.leave(x)), x._spec)
        return x


def convs(num_layers: int = 6, channels: int = 32) -> nn.Module:
    """Make a stack of convolutions and nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(num_layers)))


def ours(
    net: nn.Module, x: Tensor, mesh: str, *, update: bool, meet: bool = False, data: str = "fsdp"
) -> Callable[[], dict[str, float]]:
    """Time a step of the network on a mesh."""
    model = meshpar.parallelize(net, mesh_for(mesh), data=data)
    return stepper(model, meshpar.shard(x, mesh_for(mesh)), update=update, meet=meet, rules=True)


# 1. Overhead on one rank.


def measure_overhead(rounds: int) -> Times:
    """Time whole steps, plain and on a mesh of one rank, of the U-Net and of a chain of tiny ops."""
    mesh, x, tiny = "data=1,domain=1", torch.randn(1, 8, *GRID), torch.randn(1, 4, 16, 16)
    found = alternate(
        {"plain U-Net": stepper(unet(), x, update=True), "U-Net": ours(unet(), x, mesh, update=True)}, rounds
    )
    ways = {
        "plain chain": stepper(Chain(), tiny, update=True),
        "chain": ours(Chain(), tiny, mesh, update=True),
        "wrapped": stepper(Wrapped(), meshpar.shard(tiny, mesh_for(mesh)), update=True, rules=True),
    }
    return found | alternate(ways, 5 * rounds)


def overhead(rounds: int) -> list[Row]:
    """Compare whole steps on one rank with plain torch's."""
    took = slowest(run_ranks(measure_overhead, 1, rounds, timeout_s=900))
    return [
        Row("one rank: U-Net step / plain torch", took["U-Net", "step"], took["plain U-Net", "step"], 1.03),
        Row(
            "one rank: 60 pointwise, 20 convs / plain",
            *(took["chain", "step"], took["plain chain", "step"], 2.5, took["wrapped", "step"]),
        ),
    ]


# 2. Strong scaling.


class _Meet(torch.autograd.Function):
    """Meet the other rank, forward and backward: what a norm over rows cannot do without."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        dist.all_reduce(torch.zeros(8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        dist.all_reduce(torch.zeros(8))
        return g


class _Swap(torch.autograd.Function):
    """Exchange one row with the other rank, forward and backward: what a convolution cannot do without."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        _swap(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        _swap(g)
        return g


def _swap(x: Tensor) -> None:
    row, other = x[:, :, 0].contiguous(), 1 - dist.get_rank()
    for work in (dist.irecv(torch.empty_like(row), other), dist.isend(row, other)):
        work.wait()


def least(net: nn.Module) -> nn.Module:
    """Let a network of half the rows send what it must, and compute nothing with it."""
    for layer in net.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(lambda _, args: (_Meet.apply(*args),))
        elif isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
            layer.register_forward_pre_hook(lambda _, args: (_Swap.apply(*args),))
    return net


def measure_scaling(name: str, rounds: int) -> Times:
    """Time forward and backward on 2 ranks, of half the rows in plain torch, and of all on one process."""
    make, channels = {"U-Net": (unet, 8), "convs": (convs, 32)}[name]
    whole, half = torch.randn(1, channels, *GRID), torch.randn(1, channels, GRID[0] // 2, GRID[1])
    one = stepper(make(), whole, update=False)
    ways: Ways = {
        "one": one if dist.get_rank() == 0 else lambda: {"forward": 0.0, "backward": 0.0, "step": 0.0},
        "floor": stepper(make(), half, update=False, meet=True),
        "fsdp": ours(make(), whole, "data=1,domain=2", update=False, meet=True),
        "limit": stepper(least(make()), half, update=False, meet=True),
        "ddp": ours(make(), whole, "data=1,domain=2", update=False, meet=True, data="ddp"),
    }
    return alternate(ways, rounds)


def scaling(rounds: int) -> list[Row]:
    """Compare 2 ranks with 2 processes that never talk, and those with one."""
    rows = []
    for name, bound in (("U-Net", 1.12), ("convs", 1.06)):
        took = slowest(run_ranks(measure_scaling, 2, name, 2 * rounds, timeout_s=900))
        for phase in ("forward", "backward"):
            floor, limit = took["floor", phase], took["limit", phase]
            rows += [
                Row(f"2 ranks: {name} {phase} / no talk, {data}", took[data, phase], floor, bound, limit)
                for data in ("fsdp", "ddp")
            ]
            rows.append(Row(f"   no talk / one process, {phase}", floor, took["one", phase]))
    return rows


# 3. Norms over rows.


def measure_norms(rounds: int) -> Times:
    """Time norms over sharded rows, and the local ones with a small all-reduce in each direction."""
    found: Times = {}
    full, half = torch.randn(1, 32, *GRID), torch.randn(1, 32, GRID[0] // 2, GRID[1])
    w, b = torch.ones(32, requires_grad=True), torch.zeros(32, requires_grad=True)
    mine = meshpar.shard(full, mesh_for("data=1,domain=2")).requires_grad_()
    half.requires_grad_()
    mesh = mesh_for("data=1,domain=2")
    for name, norm in norms().items():
        plan = Statistics(mesh, {}, *GROUPS[name], half[0].numel() // GROUPS[name][0], 1e-5, "|limit", half.dtype)
        weights = (None, None) if name == "LayerNorm" else (w, b)
        local = functools.partial(norm, rows=GRID[0] // 2, w=w, b=b)
        ways = {
            f"{name} local": _norm_step(local, half, reduce=True),
            f"{name} ours": _norm_step(functools.partial(norm, rows=GRID[0], w=w, b=b), mine, reduce=False),
            f"{name} limit": _norm_step(functools.partial(_kernels, weights, plan), half, reduce=True),
        }
        found |= alternate(ways, 3 * rounds)
    return found


def norms() -> dict[str, Callable[[Tensor, int, Tensor, Tensor], Tensor]]:
    """Name the norms: functions of an input, its global number of rows, and a weight and a bias for each channel."""
    return {
        "GroupNorm": lambda x, rows, w, b: F.group_norm(x, 4, w, b),
        "BatchNorm": lambda x, rows, w, b: F.batch_norm(x, None, None, w, b, training=True),
        "LayerNorm": lambda x, rows, w, b: F.layer_norm(x, (32, rows, GRID[1])),
    }


GROUPS = {"GroupNorm": (4, False), "BatchNorm": (32, True), "LayerNorm": (1, False)}
"""Groups of channels, and whether samples share their moments."""


def _kernels(weights: tuple[Tensor | None, Tensor | None], plan: Statistics, x: Tensor) -> Tensor:
    """Run what a rank computes of a norm over rows, alone."""
    return normalise(x, *weights, plan)[0]


def _norm_step(norm: Callable[[Tensor], Tensor], x: Tensor, *, reduce: bool) -> Callable[[], dict[str, float]]:
    """Time a norm, forward and backward; `reduce` adds a small all-reduce to each."""
    small, seed = torch.zeros(64), torch.ones_like(x)

    def step() -> dict[str, float]:
        begin = time.perf_counter()
        with meshpar.spmd():
            y = norm(x)
        if reduce:
            dist.all_reduce(small)
        forward = time.perf_counter()
        y.backward(seed)
        if reduce:
            dist.all_reduce(small)
        backward = time.perf_counter()
        x.grad = None
        return {"forward": forward - begin, "backward": backward - forward}

    return step


def norm_rows(rounds: int) -> list[Row]:
    """Compare norms over rows with the fused local kernel and an all-reduce."""
    took = slowest(run_ranks(measure_norms, 2, rounds, timeout_s=900))
    return [
        Row(
            f"2 ranks: {name} {phase} / local + all-reduce",
            took[f"{name} ours", phase],
            took[f"{name} local", phase],
            1.5,
            took[f"{name} limit", phase],
        )
        for name in norms()
        for phase in ("forward", "backward")
    ]


# 4. Exchange.


def measure_exchange(kib: int, rounds: int) -> Times:
    """Time `fetch` of a halo, and the same bytes sent raw."""
    group, me = mesh_for("data=1,domain=2")["domain"].get_group(), dist.get_rank()
    columns = kib * 256  # float32 of one row
    have, want = chunks(4, 2), ((0, 3), (1, 4))
    x = torch.randn(2, columns)

    def ours() -> dict[str, float]:
        begin = time.perf_counter()
        for _ in range(10):
            fetch(x, 0, have, want, group)
        return {"forward": time.perf_counter() - begin}

    def raw() -> dict[str, float]:
        begin = time.perf_counter()
        for _ in range(10):
            sent, got, room = x[-1 if me == 0 else 0].clone(), torch.empty(columns), torch.empty(3, columns)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=group, group_peer=1 - me),
                    dist.P2POp(dist.irecv, got, group=group, group_peer=1 - me),
                ]
            )
            room[me : me + 2].copy_(x)  # a padded buffer, which the next kernel needs
            for work in works:
                work.wait()
            room[0 if me else 2].copy_(got)
        return {"forward": time.perf_counter() - begin}

    return alternate({"raw": raw, "ours": ours}, 3 * rounds)


def exchange_rows(rounds: int) -> list[Row]:
    """Compare `fetch` with raw messages of the same bytes."""
    rows = []
    for kib in (64, 512, 4096):
        took = slowest(run_ranks(measure_exchange, 2, kib, rounds, timeout_s=900))
        rows.append(Row(f"fetch of {kib} KiB / raw send", took["ours", "forward"], took["raw", "forward"], 1.15))
    return rows


# 5. Memory.


def memory_rows() -> None:
    """Compare the peak of a rank with that of one process, shared out."""
    import memory

    memory.main([])


# 6. Scaling of cost.


def measure_depth(mesh: str, depth: int, rounds: int) -> Times:
    """Time a step of many tiny convolutions."""
    x = torch.randn(1, 4, 16 * ranks_of(mesh), 16)
    small = torch.randn(1, 4, 16, 16)

    def net() -> nn.Module:
        return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth)))

    ways = {"plain": stepper(net(), small, update=False), "ours": ours(net(), x, mesh, update=False)}
    return alternate(ways, 3 * rounds)


def depth_rows(rounds: int) -> list[tuple[str, float]]:
    """Give µs a layer that a step takes beyond plain torch, for depths and for ranks."""
    found = []
    for ranks, depth in ((1, 10), (1, 50), (1, 200), (2, 50), (4, 50)):
        took = slowest(run_ranks(measure_depth, ranks, f"data=1,domain={ranks}", depth, rounds, timeout_s=900))
        extra = (statistics.median(took["ours", "step"]) - statistics.median(took["plain", "step"])) / depth
        found.append((f"{ranks} rank(s), {depth} layers", extra * 1e6))
    return found


PARTS = {"overhead": overhead, "scaling": scaling, "norms": norm_rows, "exchange": exchange_rows}


def main(argv: list[str] | None = None) -> list[Row]:
    """Print the table and give its rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=[*PARTS, "memory", "depth"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    parts = args.part or [*PARTS, "memory", "depth"]
    print(f"{'':<46} {'ours ms':>9} {'other ms':>9} {'ratio':>6} {'bound':>6} {'limit':>6}", flush=True)
    rows = []
    for part in [part for part in parts if part in PARTS]:
        for row in PARTS[part](args.rounds):
            rows.append(row)
            print(row, flush=True)
    if "memory" in parts:
        memory_rows()
    if "depth" in parts:
        print("a step beyond plain torch, µs a layer", flush=True)
        for what, extra in depth_rows(args.rounds):
            print(f"  {what:<30} {extra:>9.0f}", flush=True)
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import speed  # the ranks import it by this name

    speed.main()
