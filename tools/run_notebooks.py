"""Run the notebooks of `examples/notebooks`, each in a kernel of its own; the tests and the site share the outputs.

Invariant: an output in `CACHE` came from the very notebook, library and versions at hand, whoever ran it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
TIMEOUT_S = 170
"""For a cell."""

CACHE = ROOT / "build" / "notebooks"
"""What notebooks printed, by a digest of them and of all that they run; only what has changed runs again."""


def notebooks() -> list[Path]:
    """List the scripts of notebooks."""
    return sorted(NOTEBOOKS.glob("*.py"))


def executed(path: Path) -> Any:
    """Run a notebook in a kernel of this very Python, in an empty folder; or take it from the cache."""
    kept = CACHE / f"{path.stem}-{_digest(path)}.ipynb"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}.part")
        part.write_text(nbformat.writes(_run(path)))
        part.replace(kept)  # one that is killed leaves nothing that looks whole
    return nbformat.reads(kept.read_text(), as_version=4)


def _digest(path: Path) -> str:
    sources = [path, Path(__file__), *sorted((ROOT / "meshpar").rglob("*.py")), ROOT / "constraints.txt"]
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('torch')}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _run(path: Path) -> Any:
    """Make the .ipynb as the documentation does, and run it; a cell that raises is an error here."""
    notebook = nbformat.reads(jupytext.writes(jupytext.read(path), fmt="ipynb"), as_version=4)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}})
        client.execute(env=env)
    return notebook
