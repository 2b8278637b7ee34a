"""The example on zarr: the loss curve of one process that holds everything, from stores of which ranks read rows."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import ROOT, largest_difference, run_example

import meshpar
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

sys.path.insert(0, str(ROOT / "examples"))

import forecast
import forecast_zarr
from climate import Samples, read_fields, travelling_waves


def curves(spec: str, path: Path) -> tuple[list[float], float]:
    import zarr

    mesh, fields = mesh_for(spec), read_fields()
    if dist.get_rank() == 0:
        forecast_zarr.write_store(fields, path)
    dist.barrier()
    samples = forecast_zarr.OwnRows(zarr.open_array(path, mode="r"), mesh, fields.num_train, torch.float64)
    args = forecast.parse_args(["--steps", "6", "--batch", "4", "--width", "4"])
    plan = forecast.make_plan(args, samples, meshpar.axis_size(mesh, "data"))
    plan = replace(plan, validation=plan.validation[-4:])
    ours = forecast.train(samples, forecast_zarr.setup_on(mesh), plan)
    if dist.get_rank() != 0:
        return ours.losses, 0.0
    reference = forecast.train(Samples(fields, torch.float64), forecast.Setup(), plan)
    return ours.losses, forecast.largest_difference(ours, reference)


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=3"])
def test_the_loss_curve_from_zarr_is_that_of_one_process(spec, tmp_path):
    answers = run_ranks(curves, ranks_of(spec), spec, tmp_path / "air.zarr", timeout_s=200)
    assert len(answers[0][0]) == 6
    assert answers[0][1] < 1e-10
    assert len({tuple(losses) for losses, _ in answers}) == 1


def test_the_command_on_zarr_runs_under_torchrun(tmp_path):
    printed = run_example("forecast_zarr.py", tmp_path)
    assert "of which this process reads rows 0 to 19" in printed
    assert largest_difference(printed) < 1e-10


def test_a_store_is_written_once_and_whole(tmp_path):
    import zarr

    path = tmp_path / "deep" / "waves.zarr"
    fields = travelling_waves(9, 8)
    forecast_zarr.write_store(fields, path)
    written = path.stat().st_mtime_ns
    forecast_zarr.write_store(travelling_waves(9, 16), path)
    assert path.stat().st_mtime_ns == written
    assert np.array_equal(zarr.open_array(path, mode="r")[:], fields.values)
    assert [p.name for p in path.parent.iterdir()] == ["waves.zarr"]
