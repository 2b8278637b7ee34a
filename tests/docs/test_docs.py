"""What the documents say runs: docstring examples, the README's code, its commands."""

import contextlib
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import meshpar
from meshpar.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(m.name for m in pkgutil.walk_packages(meshpar.__path__, "meshpar."))
STARTING_RANKS = ("meshpar.testing.pool", "meshpar.simulating.ranks", "meshpar.simulating.simulate")


def examples_of(name: str) -> tuple[int, str]:
    module = importlib.import_module(name)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=said.append)
    return runner.tries, "".join(said)


def all_examples() -> dict[str, tuple[int, str]]:
    return {name: examples_of(name) for name in MODULES if name not in STARTING_RANKS}


def test_docstring_examples_run():
    (answers,) = run_ranks(all_examples, 1)
    answers |= {name: examples_of(name) for name in STARTING_RANKS}  # on a rank they would start ranks of its own
    assert sum(tries for tries, _ in answers.values()) >= 8
    assert "".join(said for _, said in answers.values()) == ""


def readme_block(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def run_blocks(code: str, folder: str) -> tuple[tuple[int, ...], int]:
    names: dict[str, object] = {}
    with contextlib.chdir(folder):
        exec(compile(code, "README.md", "exec"), names)
        return tuple(names["full"].shape), meshpar.latest_checkpoint("out/run").step


def test_readme_code_runs_on_four_ranks(tmp_path):
    """One block goes on where the one before it ended."""
    blocks = readme_block("python")
    assert len(blocks) == 2
    assert run_ranks(run_blocks, 4, "".join(blocks), str(tmp_path)) == [((4, 1, 37, 49), 1)] * 4


def test_readme_has_the_two_commands_and_ci_takes_one_of_them():
    run, test = readme_block("sh")[:2]
    assert "examples/forecast.py" in run
    assert "pytest" in test
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_design_names_every_module():
    text = (ROOT / "docs" / "design.md").read_text()
    missing = [name for name in MODULES if name.count(".") == 1 and f"`{name.removeprefix('meshpar.')}" not in text]
    assert missing == []


def test_modules_import_only_what_stands_above_them():
    """DESIGN 8: imports run one way, in the order of the table in docs/design.md."""
    table = (ROOT / "docs" / "design.md").read_text().split("## The house")[1].split("##")[0]
    order = [name.rstrip("/") for name in re.findall(r"^\| `([a-z_]+/?)`", table, flags=re.M)]
    wrong = []
    for name in MODULES:
        part = name.split(".")[1]
        source = Path(importlib.import_module(name).__file__).read_text()
        names = re.findall(r"^\s*from meshpar\.(\w+)", source, flags=re.M)
        for line in re.findall(r"^\s*from meshpar import (.+)$", source, flags=re.M):
            names += [n.strip(" ()") for n in line.split(",")]
        wrong += [
            f"{name} imports {n}" for n in names if n in order and n != part and order.index(n) > order.index(part)
        ]
    assert wrong == []


def test_no_private_name_of_torch_outside_of_private():
    """DESIGN 8: private torch names live in one package."""
    pattern = re.compile(r"\b(torch|dist|nn|DTensor|mesh|DeviceMesh|module|owner)\.(?:\w+\.)*_[A-Za-z]\w+")
    found = []
    for path in (ROOT / "meshpar").rglob("*.py"):
        if path.parent.name != "private":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line.split("#")[0]):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
