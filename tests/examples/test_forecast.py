"""The main job: a U-Net on real climate data, on meshes of processes, with the loss curve of one process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.testing import mesh_for, run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import forecast  # noqa: E402 (an example is a script, not a package)
from climate import Samples, read_fields  # noqa: E402


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
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "forecast.py")]
    options = ["--mesh", "data=1,domain=2", "--steps", "2", "--width", "4", "--synthetic", "37x24"]
    answer = subprocess.run(
        [*command, *options, "--compare", "--dtype", "float64", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert "0 gathers" in answer.stdout
    difference = float(answer.stdout.split("largest relative difference")[1].split(":")[1])
    assert difference < 1e-10
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")
