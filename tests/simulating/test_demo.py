"""`python -m meshpar demo`: two curves that agree, on nothing but the core; errors in words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.__main__ import main
from meshpar.simulating import demo

ROOT = Path(__file__).resolve().parents[2]
CORE_ONLY = """
import sys
for name in ("rich", "matplotlib", "cloudpickle", "hypothesis", "pytest"):
    sys.modules[name] = None
from meshpar.__main__ import main
sys.exit(main(["demo", *sys.argv[1:]]))
"""


def test_the_demo_shows_two_equal_curves():
    answer = subprocess.run(
        [sys.executable, "-c", CORE_ONLY],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert answer.returncode == 0, answer.stdout[-1000:] + answer.stderr[-2000:]
    assert answer.stderr == ""
    said = answer.stdout
    assert max(map(len, said.splitlines())) <= 120
    assert "4 processes" in said
    assert "rank 3: rows 19 to 36, columns 0 to 48" in said
    assert re.search(r"stem\.0 +conv2d +4/data x 8 x 37/domain x 49 +1 ", said)
    assert "0 gathers" in said
    steps = re.findall(r"^(\d+) +(0\.\d+) +(0\.\d+) +\d\.\de[-+]\d\d$", said, flags=re.M)
    assert [int(step) for step, _, _ in steps] == list(range(demo.NUM_STEPS))
    assert all(abs(float(a) - float(b)) < 1e-12 for _, a, b in steps)
    assert float(steps[-1][1]) < 0.5 * float(steps[0][1])
    assert "the same function" in said
    assert "torchrun --nproc-per-node 4" in said


def test_curves_that_differ_are_said_and_told_by_the_code(monkeypatch, capsys):
    """Sabotage: the single process sees other samples."""
    monkeypatch.setattr(demo, "NUM_STEPS", 1)
    monkeypatch.setattr(demo, "shutdown_pool", lambda: None)  # other tests go on with the ranks
    true_waves = demo.waves
    monkeypatch.setattr(demo, "waves", lambda step: true_waves(step + 1))
    assert main(["demo", "--mesh", "domain=2"]) == 1
    assert "NOT the same function" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mesh", "says"), [("domain=17", "at most 16"), ("rows=2", "unknown axis"), ("domain", "parts")]
)
def test_a_mesh_that_cannot_be_is_an_error_in_words(capsys, mesh, says):
    assert main(["demo", "--mesh", mesh]) == 2
    assert says in capsys.readouterr().err


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", "3"])
    assert caught.value.code == 2
    assert "--steps" in capsys.readouterr().err
