"""Time a newcomer's path: clone, environment, packages, first right answer; `python tools/newcomer.py`.

The repository is cloned into an empty folder, and the commands of `docs/index.md` are run there: an environment, torch,
the library. The first right answer is the page's own block under torchrun on 4 processes, which compares its loss with
that of one process. Then `python -m meshpar demo`. Packages come from the caches and registries that pip has.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def first_program() -> str:
    """Read the first block of Python of the first page."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "docs" / "index.md").read_text(), flags=re.M | re.S)
    assert found is not None
    return found[1]


def stages(clone: str, folder: Path) -> list[tuple[str, list[str]]]:
    """List the stages: what each is, and its command."""
    pip = [str(folder / ".venv" / "bin" / "pip"), "install", "--quiet", "-c", "constraints.txt"]
    torchrun = [str(folder / ".venv" / "bin" / "torchrun"), "--standalone", "--nproc-per-node", "4"]
    return [
        ("clone", ["git", "clone", "--quiet", clone, str(folder)]),
        ("environment", [sys.executable, "-m", "venv", ".venv"]),
        ("torch", [*pip, "torch==2.13.0"]),
        ("meshpar", [*pip, "."]),
        ("first right answer", [*torchrun, "first.py"]),
        ("demo", [str(folder / ".venv" / "bin" / "python"), "-m", "meshpar", "demo"]),
    ]


def main() -> None:
    """Run the stages and print the seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", default=str(ROOT), help="what to clone; this repository by default")
    given = parser.parse_args()
    total = 0.0
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "meshpar"
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}
        for name, command in stages(given.clone, folder):
            where = folder if folder.exists() else Path(home)
            start = time.perf_counter()
            answer = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
            total += seconds
            if answer.returncode != 0:
                sys.exit(f"{name}: code {answer.returncode}\n{answer.stdout[-2000:]}{answer.stderr[-2000:]}")
            if name == "first right answer" and "same loss: True" not in answer.stdout:
                sys.exit(f"{name}: not right\n{answer.stdout}")
            if name == "clone":
                (folder / "first.py").write_text(first_program())
            print(f"{name:<20}{seconds:8.1f} s{total:8.1f} s in all", flush=True)
    print(f"load of this machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
