"""The training of forecast.py from a zarr store, of which each process reads its own rows and nothing else.

    torchrun --standalone --nproc-per-node 4 examples/forecast_zarr.py --mesh data=2,domain=2 --compare

The NetCDF file is turned into a store once, by one process, in the folder `--out`. For fields that no process could
hold whole, this is the way to write a dataset; the training loop is that of forecast.py.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zarr
from torch import Tensor

import forecast
import meshpar
from climate import HISTORY, Fields, Samples


def write_store(fields: Fields, path: Path) -> None:
    """Write the fields to a zarr store, unless it is there; what a killed run leaves behind has another name."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    zarr.create_array(aside, data=fields.values, chunks=(16, 8, fields.values.shape[2]))
    try:
        aside.rename(path)
    except OSError:  # another run was faster
        shutil.rmtree(aside)


class OwnRows:
    """The samples of `climate.Samples`, of which this process reads its own rows (B, HISTORY, H/domain, W)."""

    def __init__(self, source: Any, mesh: Any, num_train: int, dtype: torch.dtype) -> None:
        self.source, self.mesh, self.dtype = source, mesh, dtype
        train = self.read(slice(0, num_train)).numpy()
        self.mean = torch.from_numpy(train.mean(axis=0, keepdims=True))
        self.spread = torch.from_numpy(train.std(axis=0, keepdims=True)) + 1e-3
        self.train = list(range(HISTORY, num_train))
        self.validation = list(range(max(HISTORY, num_train), source.shape[0]))

    def read(self, years: slice) -> Tensor:
        return meshpar.read_rows(self.source, self.mesh, years)

    def load(self, targets: list[int]) -> tuple[Tensor, Tensor]:
        """Return own rows of inputs (B, HISTORY, H/domain, W) and of targets (B, 1, H/domain, W)."""
        years = torch.stack([self.read(slice(t - HISTORY, t + 1)) for t in targets])
        values = ((years - self.mean) / self.spread).to(self.dtype)
        return values[:, :HISTORY], values[:, HISTORY:]


def setup_on(mesh: Any) -> forecast.Setup:
    """What the loop is told: as for forecast.py, but each process has its own rows already."""
    return replace(forecast.setup_on(mesh), shard=lambda batch: meshpar.shard_batch(batch, mesh, rows="local"))


def main() -> None:
    args = forecast.parse_args()
    mesh = meshpar.make_mesh(args.mesh)
    speaks = torch.distributed.get_rank() == 0
    fields = forecast.read(args) if speaks or args.compare else None
    kind = f"waves-{args.synthetic[0]}x{args.synthetic[1]}" if args.synthetic else "air"
    path = args.out / f"{kind}.zarr"
    if fields is not None and speaks:
        write_store(fields, path)
    torch.distributed.barrier()

    setup = setup_on(mesh)
    dtype = getattr(torch, args.dtype)
    samples = OwnRows(zarr.open_array(path, mode="r"), mesh, 8 if args.synthetic else 200, dtype)
    plan = forecast.make_plan(args, samples, setup.data_size)
    reporter = forecast.Reporter(plan, speaks=speaks, step_losses=args.step_losses)
    rows = meshpar.shard_slices(samples.source.shape, mesh)[1]
    reporter.say(f"{path}: {samples.source.shape}, of which this process reads rows {rows.start} to {rows.stop}")
    with reporter.progress:
        run = forecast.train(samples, setup, plan, on_step=reporter.step, on_epoch=reporter.epoch)
    if fields is not None and args.compare:
        reference = forecast.train(Samples(fields, dtype), forecast.Setup(), plan)
        difference = forecast.largest_difference(run, reference)
        reporter.say(f"largest relative difference to one process over {plan.total_steps} steps: {difference:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
