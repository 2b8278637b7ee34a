"""The blocks of code in the pages of the documentation: how they are found, run and compared with what is shown.

The Python blocks of a page are one program, run from top to bottom on the ranks of the pool, in an empty folder. A
`text` block shows what the block of code before it prints (on rank 0). A comment on the line above a block says what is
special about it:

- `<!-- torchrun: 4 -->`: a program of its own, run under torchrun, since it starts the process group itself;
- `<!-- alone: 1 -->`: a program of its own, run as one plain process;
- `<!-- not run: why -->`: it cannot be run here; it is only compiled.

`python tests/docs/blocks.py --write` runs all pages and writes what they print into their `text` blocks.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshpar.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NUM_RANKS = 4
OUTPUT = "text"

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)")
_COMMENT = re.compile(r"^ *<!-- (?P<note>(?:torchrun|alone|not run): .+) -->$")


@dataclass(frozen=True)
class Block:
    """Hold one block of code.

    Args:
        page: its file, from the root of the repository.
        line: number of its first line of code.
        language: what the fence says.
        code: what it holds, without indentation.
        note: "torchrun: 4", "not run: why", or nothing.
        shown: the output that the page shows for it, if any, and the number of its first line.
    """

    page: str
    line: int
    language: str
    code: str
    note: str = ""
    shown: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """Give the place of the block, as an error names it."""
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Say why it is not run; nothing where it is."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""


def pages() -> list[Path]:
    """List the pages of the documentation."""
    return sorted(DOCS.rglob("*.md"))


def blocks_of(path: Path) -> list[Block]:
    """List the blocks of a page, each with the output that is shown after it."""
    found: list[Block] = []
    page = str(path.relative_to(ROOT))
    lines = path.read_text().splitlines()
    note, start, language, indent = "", 0, None, 0
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            if language is None and line.strip():
                comment = _COMMENT.match(line)
                note = comment["note"] if comment else ""
        elif language is None:
            language, start, indent = fence["language"], number + 1, len(fence["indent"])
        else:
            code = "".join(f"{text[indent:]}\n" for text in lines[start - 1 : number - 1])
            if language == OUTPUT and found and found[-1].shown is None:
                before = found.pop()
                found.append(Block(before.page, before.line, before.language, before.code, before.note, (code, start)))
            else:
                found.append(Block(page, start, language, code, note))
            note, language = "", None
    assert language is None, f"{page}: a block that does not end"
    return found


def run_python(codes: Sequence[tuple[str, str, int]], folder: str) -> list[str]:
    """Run blocks of a page, one after the other, on this rank; give what each of them prints."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    with contextlib.chdir(folder):
        for code, page, line in codes:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + code, page, "exec"), names)
            printed.append(out.getvalue())
    return printed


def run_apart(block: Block, folder: str) -> str:
    """Run a block that is a program of its own; give what its first rank prints."""
    script = Path(folder) / "block.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{block.code}")
    how, _, ranks = block.note.partition(": ")
    many = ["torchrun", "--standalone", "--nproc-per-node", ranks, "--local-ranks-filter", "0"]
    command = [*(many if how == "torchrun" else [sys.executable]), str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert answer.returncode == 0, f"{block.name}\n{answer.stderr[-3000:]}"
    return answer.stdout


def run_shell(block: Block) -> str:
    """Run the commands of a block whose output is shown."""
    answer = subprocess.run(
        ["bash", "-e", "-c", block.code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert answer.returncode == 0, f"{block.name}\n{answer.stderr[-3000:]}"
    return answer.stdout


def run_page(path: Path) -> list[tuple[Block, str]]:
    """Run all Python blocks of a page, and the shell blocks that show an output; give what each prints."""
    found = [block for block in blocks_of(path) if not block.reason]
    program = [b for b in found if b.language == "python" and not b.note]
    printed: list[tuple[Block, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        if program:
            told = [(b.code, b.page, b.line) for b in program]
            first = run_ranks(run_python, NUM_RANKS, told, folder, timeout_s=120)[0]
            printed += zip(program, first, strict=True)
        printed += [(b, run_apart(b, folder)) for b in found if b.note]
    printed += [(b, run_shell(b)) for b in found if b.language == "sh" and b.shown]
    return printed


def is_shown(block: Block, printed: str) -> bool:
    """Tell whether a page shows what a block prints; "..." stands for anything."""
    if block.shown is None:
        return printed == ""
    shown, got = ("".join(f"{line.rstrip()}\n" for line in text.splitlines()) for text in (block.shown[0], printed))
    return doctest.OutputChecker().check_output(shown, got, doctest.ELLIPSIS)


def write(path: Path) -> int:
    """Write what the blocks of a page print into its `text` blocks; give how many changed."""
    changed = 0
    lines = path.read_text().splitlines()
    for block, printed in sorted(run_page(path), key=lambda pair: -pair[0].line):
        if is_shown(block, printed):
            continue
        if block.shown is None:
            print(f"{block.name}: prints what the page does not show:\n{printed}")
            continue
        start = block.shown[1] - 1
        indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
        new = [f"{indent}{line}".rstrip() for line in printed.rstrip("\n").splitlines()]
        lines[start : start + len(block.shown[0].splitlines())] = new
        changed += 1
    path.write_text("\n".join(lines) + "\n")
    return changed


def main(arguments: Sequence[str]) -> None:
    """Write the outputs of the pages that are named, or of all."""
    for path in [DOCS / name for name in arguments] or pages():
        print(f"{path.relative_to(ROOT)}: {write(path)} changed")


if __name__ == "__main__":
    import blocks  # by its name, under which the ranks import it

    blocks.main(sys.argv[2:])
