"""The main job: a U-Net on real climate data, on meshes of processes, with the loss curve of one process."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, largest_difference, run_example

import meshpar
from meshpar.testing import mesh_for, run_ranks

sys.path.insert(0, str(ROOT / "examples"))

import forecast
from climate import Samples, read_fields


def plan_of(samples: Samples, data_size: int) -> forecast.Plan:
    args = forecast.parse_args(["--steps", "20", "--batch", "4", "--width", "4"])
    plan = forecast.make_plan(args, samples, data_size)
    return replace(plan, validation=plan.validation[-8:])


def curves(spec: str) -> tuple[list[float], list[float], float]:
    """Train on the mesh, then, on rank 0, on one process alone, from the same plan."""
    samples = Samples(read_fields(), torch.float64)
    mesh = mesh_for(spec)
    plan = plan_of(samples, meshpar.axis_size(mesh, "data"))
    ours = forecast.train(samples, forecast.setup_on(mesh), plan)
    if dist.get_rank() != 0:
        return ours.losses, [], 0.0
    reference = forecast.train(samples, forecast.Setup(), plan)
    return ours.losses, reference.losses, forecast.largest_difference(ours, reference)


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4", "data=1,domain=3"])
def test_twenty_steps_on_the_climate_data_equal_one_process(spec):
    """37 rows are uneven on 2, 3 and 4 ranks, and the lowest level leaves one of 4 ranks without rows."""
    answers = run_ranks(curves, 3 if spec.endswith("3") else 4, spec, timeout_s=300)
    ours, reference, difference = answers[0]
    assert len(ours) == len(reference) == 20
    assert reference[-1] < reference[0]
    assert difference < 1e-10
    assert len({tuple(ours) for ours, _, _ in answers}) == 1


def test_the_command_runs_under_torchrun(tmp_path):
    printed = run_example("forecast.py", tmp_path)
    assert "0 gathers" in printed
    assert largest_difference(printed) < 1e-10
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")
