"""Forecast next year's air temperature with a U-Net, on any mesh of processes.

    python examples/forecast.py                                      # one process
    torchrun --standalone --nproc-per-node 4 examples/forecast.py --mesh data=2,domain=2 --compare

The data are 240 years (1860 to 2099) of a Met Office climate run under scenario A1B: 37 latitudes × 49
longitudes of North America, from the package `iris-sample-data` (Open Government Licence). The network sees
four years and forecasts the next; it learns from the first 200 years and is judged on the last 40.

The training loop is written once. What a mesh changes is in `Setup`: which samples a process loads, and that
the model is parallelized. `--compare` runs the same loop a second time, on one process alone, and prints how
far the two loss curves are apart.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from climate import HISTORY, Fields, Samples, draw, read_fields, travelling_waves
from unet import UNet

# ---- one process, or a mesh


@dataclass(frozen=True)
class Setup:
    """All that the training loop is told of the processes that it runs on."""

    parallelize: Callable[[nn.Module], nn.Module] = lambda net: net
    shard: Callable[[Tensor], Tensor] = lambda batch: batch
    gather: Callable[[Tensor], Tensor] = lambda batch: batch
    losses: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    data_index: int = 0
    data_size: int = 1

    def own(self, batch: list[int]) -> list[int]:
        """Return the samples of a global batch that this process loads."""
        each = len(batch) // self.data_size
        return batch[self.data_index * each : (self.data_index + 1) * each]


def setup_on(mesh: Any) -> Setup:
    import meshpar

    return Setup(
        parallelize=lambda net: meshpar.parallelize(net, mesh),
        shard=lambda batch: meshpar.shard_batch(batch, mesh),
        gather=meshpar.gather,
        losses=meshpar.spmd,
        data_index=meshpar.coordinate(mesh, "data"),
        data_size=meshpar.axis_size(mesh, "data"),
    )


# ---- training


@dataclass(frozen=True)
class Plan:
    """The hyperparameters, and which samples each step takes: the same on every process."""

    train: list[int]
    validation: list[int]
    batch: int
    epochs: int
    steps: int
    lr: float
    seed: int
    width: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train) // self.batch

    @property
    def total_steps(self) -> int:
        total = self.epochs * self.steps_per_epoch
        return min(total, self.steps) if self.steps else total

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return the global batches of an epoch, all of them full, in an order that the seed fixes."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(self.seed * 9973 + epoch))
        shuffled = [self.train[i] for i in order.tolist()]
        return [shuffled[i * self.batch : (i + 1) * self.batch] for i in range(self.steps_per_epoch)]

    def validation_batches(self) -> list[list[int]]:
        return [self.validation[i : i + self.batch] for i in range(0, len(self.validation), self.batch)]


@dataclass(frozen=True)
class Run:
    """A trained model with its curves."""

    model: nn.Module
    losses: list[float]
    validation_losses: list[float]


def loss_of(model: nn.Module, samples: Samples, setup: Setup, batch: list[int]) -> Tensor:
    """Return the mean squared error of a global batch, over all samples and the whole grid."""
    inputs, targets = samples.load(setup.own(batch))
    return F.mse_loss(model(setup.shard(inputs)), setup.shard(targets))


def validation_loss(model: nn.Module, samples: Samples, setup: Setup, plan: Plan) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad(), setup.losses():
        for batch in plan.validation_batches():
            total += loss_of(model, samples, setup, batch).item() * len(batch)
    model.train()
    return total / len(plan.validation)


def train(samples: Samples, setup: Setup, plan: Plan, *, on_step: Any = None, on_epoch: Any = None) -> Run:
    """Train a U-Net from the plan's seed; the result depends on the plan alone, whatever the setup."""
    torch.manual_seed(plan.seed)
    net = UNet(HISTORY, width=plan.width).to(samples.dtype)
    model = setup.parallelize(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(plan.total_steps, 1))
    run = Run(model, [], [])
    epoch = 0
    while len(run.losses) < plan.total_steps:
        started = time.perf_counter()
        first_step = len(run.losses)
        for batch in plan.epoch_batches(epoch)[: plan.total_steps - first_step]:
            with setup.losses():
                loss = loss_of(model, samples, setup, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with setup.losses():  # a number read out is the global one
                run.losses.append(loss.item())
            if on_step:
                on_step(len(run.losses), run.losses[-1])
        run.validation_losses.append(validation_loss(model, samples, setup, plan))
        if on_epoch:
            mean = sum(run.losses[first_step:]) / (len(run.losses) - first_step)
            on_epoch(epoch + 1, mean, run.validation_losses[-1], time.perf_counter() - started)
        epoch += 1
    return run


def largest_difference(ours: Run, reference: Run) -> float:
    """Return the largest relative difference of two runs' loss curves, training and validation."""
    pairs = zip(ours.losses + ours.validation_losses, reference.losses + reference.validation_losses, strict=True)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)


# ---- output


class Reporter:
    """A progress bar and a line an epoch, on one process; silence on the others."""

    def __init__(self, plan: Plan, *, speaks: bool, step_losses: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.console = Console(quiet=not speaks, highlight=False, soft_wrap=True)
        self.progress = Progress(console=self.console, disable=not speaks or not self.console.is_terminal)
        self.task = self.progress.add_task("training", total=plan.total_steps)
        self.plan, self.step_losses = plan, step_losses

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def step(self, number: int, loss: float) -> None:
        self.progress.advance(self.task)
        if self.step_losses:
            self.say(f"step {number:4d}  loss {loss:.15e}")

    def epoch(self, number: int, loss: float, validation: float, seconds: float) -> None:
        self.say(f"epoch {number:3d}  train {loss:.4f}  validation {validation:.4f}  {seconds:.1f} s")


def say_baselines(say: Callable[[str], None], samples: Samples, plan: Plan) -> None:
    inputs, targets = samples.load(plan.validation)
    persistence = F.mse_loss(inputs[:, -1:], targets).item()
    mean = F.mse_loss(inputs.mean(dim=1, keepdim=True), targets).item()
    say(f"validation loss to beat: {persistence:.4f} (as last year), {mean:.4f} (the mean of {HISTORY} years)")


# ---- the command


def grid_size(text: str) -> tuple[int, int]:
    height, width = text.split("x")
    return int(height), int(width)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--mesh", default="data=-1", help="e.g. data=2,domain=2; one size may be -1 (default %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=0, help="default 8, or 2 with --synthetic")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many optimizer steps in all")
    parser.add_argument("--batch", type=int, default=0, help="global batch (default 16, or as near as the mesh allows)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=12, help="channels of the U-Net at full resolution")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--compare", action="store_true", help="also train on one process; print the difference")
    parser.add_argument("--step-losses", action="store_true", help="print every step's loss in full")
    parser.add_argument(
        "--synthetic", type=grid_size, metavar="HxW", help="generated waves on such a grid, e.g. 721x1440"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture (default %(default)s)")
    return parser.parse_args(argv)


def read(args: argparse.Namespace) -> Fields:
    if not args.synthetic:
        return read_fields()
    return travelling_waves(*args.synthetic)


def make_plan(args: argparse.Namespace, samples: Samples, data_size: int) -> Plan:
    """Choose the global batches; each must be the same number of samples on all data ranks."""
    wanted = 2 if args.synthetic else 16
    batch = args.batch or max(wanted // data_size, 1) * data_size
    if batch % data_size or not 0 < batch <= len(samples.train) or data_size > len(samples.validation):
        raise SystemExit(
            f"--batch {batch}: needs a multiple of the data size {data_size}, {len(samples.train)} at most"
        )
    validation = samples.validation[len(samples.validation) % data_size :]
    epochs = args.epochs or (2 if args.synthetic else 8)
    return Plan(samples.train, validation, batch, epochs, args.steps, args.lr, args.seed, args.width)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    import meshpar

    mesh = meshpar.make_mesh(args.mesh)
    setup = setup_on(mesh)
    fields = read(args)
    samples = Samples(fields, getattr(torch, args.dtype))
    plan = make_plan(args, samples, setup.data_size)
    speaks = torch.distributed.get_rank() == 0
    reporter = Reporter(plan, speaks=speaks, step_losses=args.step_losses)

    sizes = ", ".join(f"{axis}={meshpar.axis_size(mesh, axis)}" for axis in mesh.mesh_dim_names)
    grid = " × ".join(str(size) for size in fields.values.shape)
    reporter.say(f"mesh {sizes}; fields {grid}; {plan.total_steps} steps of {plan.batch} samples, {args.dtype}")
    say_baselines(reporter.say, samples, plan)
    with reporter.progress:
        run = train(samples, setup, plan, on_step=reporter.step, on_epoch=reporter.epoch)

    with meshpar.record() as log:
        with setup.losses():
            loss = loss_of(run.model, samples, setup, plan.epoch_batches(0)[0])
        loss.backward()
    reporter.say(f"one step communicates:\n{log.summary()}")

    last_batch = plan.validation[-setup.data_size :]
    with torch.no_grad():
        forecast = setup.gather(run.model(samples.load(setup.own(last_batch))[0]))
    if speaks:
        truth = samples.load(last_batch)[1]
        picture = args.out / "forecast.png"
        draw(
            picture,
            fields,
            samples.anomaly(truth[-1, 0]),
            samples.anomaly(forecast[-1, 0]),
            domain_size=meshpar.axis_size(mesh, "domain"),
        )
        reporter.say(f"wrote {picture}")

    if args.compare:  # every process repeats the whole run alone: none has to wait for another
        reference = train(samples, Setup(), plan)
        difference = largest_difference(run, reference)
        reporter.say(f"largest relative difference to one process over {plan.total_steps} steps: {difference:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
