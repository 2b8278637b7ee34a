"""The commands of the examples, run as users run them."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, out: Path, *options: str) -> str:
    """Run an example on two ranks under torchrun, compared with one process; give what it prints."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / name)]
    told = ["--mesh", "data=1,domain=2", "--steps", "2", "--width", "4", "--synthetic", "37x24", "--dtype", "float64"]
    answer = subprocess.run(
        [*command, *told, "--compare", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


def largest_difference(printed: str) -> float:
    """Read how far the curve is from that of one process."""
    return float(printed.split("largest relative difference")[1].split(":")[1])
