"""The notebooks run in a kernel, with the outputs that their text speaks of; `simulate` in one that is interrupted."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = ("explore_placements", "bring_your_model", "plan_a_mesh", "property_test")


@pytest.fixture(autouse=True)
def _kernels_find_us(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)


def executed(name: str) -> Any:
    """Run a notebook as the site does, which then shows these very outputs; a cell that raises is an error here."""
    import nbformat

    book = runpy.run_path(str(ROOT / "tools" / "run_notebooks.py"))["executed"](FOLDER / f"{name}.py")
    nbformat.validate(book)
    return book


def outputs(book: Any, kind: str) -> list[str]:
    """List the outputs of a kind: "text" for what is printed, or a MIME type."""
    found = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output["text"]
            if kind == "text" and output.output_type == "stream":
                found.append(output["text"])
            elif kind in output.get("data", {}):
                found.append(output["data"][kind])
    return found


def test_there_are_no_others():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NOTEBOOKS)


def test_explore_placements():
    book = executed("explore_placements")
    said, pages = "\n".join(outputs(book, "text")), outputs(book, "text/html")
    assert "rank 3: rows 30 to 36 of 1 x 1 x 37/domain x 49" in said
    assert "[all ranks] rows of the domain axis are shared out over 4 ranks" in said
    assert float(re.findall(r"one process: (\S+)", said)[0]) < 1e-12
    assert len(outputs(book, "image/svg+xml")) == 2
    assert len(outputs(book, "image/png")) == 1
    assert [page.count('<tr style="background:rgba(220,40,40,.2)') for page in pages] == [0, 1, 0]
    conv = re.findall(r"F\.conv2d</td>.*?</tr>", pages[0])[0]
    assert re.findall(r">(\d+ B)<", conv) == ["392 B", "784 B", "784 B", "392 B"]  # the poles have one neighbour
    assert "columns 25 to 48" in pages[2]


def test_bring_your_model():
    book = executed("bring_your_model")
    said, pages = "\n".join(outputs(book, "text")), outputs(book, "text/html")
    rows = re.findall(r"^(\S+) +(\S+) from one process; gathers: (.*)$", said, flags=re.M)
    assert len(rows) == 4
    assert all(float(difference) < 1e-10 for _, difference, _ in rows)
    assert [mesh for mesh, _, gathers in rows if gathers != "none"] == ["domain=2,domain_w=2"]
    assert "48/tensor x 16" in said
    assert float(re.findall(r"the curves are (\S+) apart", said)[0]) < 1e-9
    assert "sdpa (heads)" in pages[0]
    assert len(outputs(book, "image/png")) == 2


def test_plan_a_mesh():
    book = executed("plan_a_mesh")
    said = "\n".join(outputs(book, "text"))
    peaks = [float(peak) for peak in re.findall(r"(\d+\.\d\d) GB at the peak,", said)]
    assert len(peaks) == 4
    assert peaks == sorted(peaks, reverse=True)
    assert {fits for fits in re.findall(r"^\S+ +(yes|no) ", said, flags=re.M)} == {"yes", "no"}
    assert re.search(r"take data=4,domain=2", said)
    with_it, without = map(float, re.findall(r"(\S+) GB on the rank .* in place of (\S+) GB", said)[0])
    assert with_it < without
    planned = re.findall(r"planned (\d+) bytes, sent (\d+)", said)
    assert len(planned) == 3
    assert all(a == b for a, b in planned)
    assert "no layer gathers" in outputs(book, "text/html")[0]


def test_property_test():
    said = "\n".join(outputs(executed("property_test"), "text"))
    assert re.search(r"1[0-9] examples held", said)
    assert "found: domain=2, (1, 2, 3, 2): output differs" in said  # the smallest


def test_a_notebook_runs_as_a_script(tmp_path):
    """The part of one that shows values, runs a function of its own on ranks, and draws."""
    begin, found, _ = (FOLDER / "explore_placements.py").read_text().partition("# ## A step of a model")
    assert found
    (tmp_path / "script.py").write_text(begin)
    answer = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "svg"},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert "[all ranks] rows of the domain axis are shared out over 4 ranks" in answer.stdout
    assert "rank 3: rows 30 to 36 of 1 x 1 x 37/domain x 49" in answer.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_a_script_without_names_that_only_a_kernel_has(name):
    """The whole of each: no magics, and nothing that IPython puts into a kernel."""
    text = (FOLDER / f"{name}.py").read_text()
    nodes = list(ast.walk(ast.parse(text)))
    assert not {node.id for node in nodes if isinstance(node, ast.Name)} & {"display", "get_ipython", "In", "Out"}
    assert not re.search(r"^# *[%!](?!%)", text, flags=re.M)  # jupytext writes magics as comments


def ranks_under(pid: int) -> list[int]:
    return [p.pid for p in psutil.Process(pid).children(recursive=True)]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60  # a loaded machine takes its time
    while any(psutil.pid_exists(p) for p in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


def test_a_kernel_that_is_interrupted_goes_on_and_one_that_is_killed_leaves_no_rank():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    printed: list[str] = []
    errors: list[str] = []

    def hook(message: Any) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            errors.append(message["content"]["ename"])

    def run(code: str) -> str:
        return str(client.execute_interactive(code, timeout=120, output_hook=hook)["content"]["status"])

    try:
        assert (
            run(
                "import meshpar, os, time, torch, threading\nfrom torch import nn\nranks = meshpar.simulate('domain=2')"
            )
            == "ok"
        )
        assert run("def pid(mesh): return os.getpid()\nprint(os.getpid(), *ranks.run(pid))") == "ok"
        kernel, *before = map(int, "".join(printed).split())
        assert set(before) <= set(ranks_under(kernel))
        late = "import signal; t = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)); t.start()\n"
        assert run(f"{late}ranks.run(lambda mesh: time.sleep(60))") == "error"
        assert errors == ["KeyboardInterrupt"]
        assert_gone(before)
        printed.clear()
        step = "class Net(nn.Conv2d): pass\nrun = meshpar.simulate('domain=2', Net(1, 1, 3), torch.ones(1, 1, 5, 5))\n"
        assert run(f"{step}print(run.difference < 1e-6, torch.distributed.is_initialized())") == "ok"
        assert "".join(printed).split() == ["True", "False"]
        left = ranks_under(kernel)
        assert len(left) >= 3
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)  # kills it
    assert_gone(left)
