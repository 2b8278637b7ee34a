"""The shell blocks of the documents, run with stand-ins for what starts processes or changes the machine.

A stand-in writes down what it was called with. What it was asked to do is then held against what is there: the options
of torchrun and of our own commands, the files of the repository, the extras of `pyproject.toml`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from blocks import ROOT, Block
from torch.distributed.run import get_args_parser

import meshpar.__main__ as command

STAND_INS = ("torchrun", "python", "python3", "pip", "srun", "mpirun", "mpiexec", "scontrol", "git", "mkdocs")
TRAINING_SCRIPTS = ("train.py", "first.py")
"""What pages call a script of the user's own."""

_END = "\x1e"
_SCRIPT = f"""#!/bin/sh
{{ printf '%s\\0' "${{0##*/}}" "$@"; printf '{_END}'; }} >> "$CALLS"
case "$0 $1" in
  *scontrol*) echo node01 ;;
  *"/python -c") exec "$REAL_PYTHON" "$@" ;;
esac
"""


def calls_of(block: Block, folder: Path) -> list[list[str]]:
    """Run a block with stand-ins; give what was called, in order."""
    names, calls = folder / "bin", folder / "calls"
    names.mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "meshpar").mkdir()
    (folder / "nodes").write_text("node01\nnode02\n")
    for name in STAND_INS:
        (names / name).write_text(_SCRIPT)
        (names / name).chmod(0o755)
    told = {"PATH": f"{names}:/usr/bin:/bin", "CALLS": str(calls), "REAL_PYTHON": sys.executable}
    told |= {"SLURM_JOB_NODELIST": "node[01-02]", "SLURM_JOB_ID": "7", "PBS_NODEFILE": str(folder / "nodes")}
    answer = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={**os.environ, **told, "PYTHONPATH": str(ROOT)},
    )
    assert answer.returncode == 0, f"{block.name}\n{answer.stderr}"
    return [call.split("\0")[:-1] for call in calls.read_text().split(_END) if call]


def check_call(call: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one call: that its options are known, and that what it names is there."""
    name, *rest = call
    if name in ("srun", "mpirun", "mpiexec"):
        at = next((i for i, word in enumerate(rest) if word in ("python", "torchrun")), None)
        if at is not None:
            check_call(rest[at:], monkeypatch)
    elif name == "torchrun":
        given = get_args_parser().parse_args(rest)
        _check_script(given.training_script)
    elif name.startswith("python"):
        _check_python(rest, monkeypatch)
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in rest for extra in re.findall(r"\.\[(.+)\]", word)]
        assert set(asked) <= set(extras), call
        assert all((ROOT / rest[i + 1]).exists() for i, word in enumerate(rest) if word == "-c"), call


def _check_python(rest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if rest[0] == "-m" and rest[1] == "meshpar":
        # The command is parsed, and then not run.
        for run in ("doctor", "_planned", "_demo", "demo"):
            if hasattr(command, run):
                monkeypatch.setattr(command, run, lambda *_, **__: 0)
        assert command.main(rest[2:]) == 0, rest
    elif rest[0] == "-m":
        assert rest[1] in ("venv", "pip", "pytest"), rest
    elif rest[0] != "-c":
        _check_script(rest[0])


def _check_script(script: str) -> None:
    assert script in TRAINING_SCRIPTS or (ROOT / script).is_file(), script
