"""Hooks of the site: its pictures, and the notebooks of `examples/notebooks` with what they print.

`mkdocs build` runs the notebooks that `tests/notebooks` has not run already, and shows their outputs in the style of
the site: tables and pictures are those that a notebook would show. A notebook that raises is a build that fails.
"""

from __future__ import annotations

import base64
import html
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import nbformat
import pictures
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from run_notebooks import executed, notebooks


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the notebooks to the navigation, after the pages on how to."""
    found = [{title_of(path): f"notebooks/{path.stem}.md"} for path in notebooks()]
    if found and config.nav is not None:
        at = next(i for i, item in enumerate(config.nav) if isinstance(item, dict) and "How to" in item)
        config.nav.insert(at + 1, {"Notebooks": found})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Run the notebooks; make a page of each, and a file to download."""
    for path in notebooks():
        notebook = executed(path)
        page, download = f"notebooks/{path.stem}.md", f"notebooks/{path.stem}.ipynb"
        files.append(File.generated(config, page, content=page_of(notebook, path)))
        files.append(File.generated(config, download, content=nbformat.writes(notebook)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the pictures that a page names into it."""
    return re.sub(r"^<!-- picture: (\w+) -->$", lambda m: framed(pictures.PICTURES[m[1]]()), markdown, flags=re.M)


def framed(svg: str) -> str:
    """Give a picture as a block of HTML, which ends at the first empty line."""
    return f'<div class="picture">{_without_empty_lines(svg)}</div>'


def title_of(path: Path) -> str:
    """Read the title of a notebook: its first heading."""
    found = re.search(r"^# # (.+)$", path.read_text(), flags=re.M)
    return found[1].strip() if found else path.stem.replace("_", " ")


def page_of(notebook: Any, path: Path) -> str:
    """Write an executed notebook as Markdown: text, code, and the richest form of each output."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code" and cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
            parts += [shown for output in joined(cell.outputs) if (shown := output_of(output))]
    told = f"This page is [{path.stem}.ipynb]({path.stem}.ipynb), as it ran when the site was built."
    return "\n\n".join([*parts[:1], told, *parts[1:]]) + "\n"


def joined(outputs: list[Any]) -> list[Any]:
    """Put what a cell printed in several goes, without anything shown between, into one."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if output.output_type == "stream" and found and found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def output_of(output: Any) -> str:
    """Write one output of a cell: HTML, a picture, or text; nothing for what goes to standard error."""
    if output.output_type == "stream":
        return f"```text\n{_plain(output.text).rstrip()}\n```" if output.name == "stdout" else ""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{_without_empty_lines(data["text/html"])}</div>'
    if "image/svg+xml" in data:
        return f'<div class="output picture">{_without_empty_lines(data["image/svg+xml"])}</div>'
    if "image/png" in data:
        png = base64.b64encode(base64.b64decode(data["image/png"])).decode()
        told = html.escape(_plain(data.get("text/plain", "picture")))
        return f'<div class="output"><img alt="{told}" src="data:image/png;base64,{png}"></div>'
    return f"```text\n{_plain(data['text/plain']).rstrip()}\n```" if "text/plain" in data else ""


def _without_empty_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def _plain(text: str) -> str:
    """Drop the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
