"""A bar for long writes, on rank 0, where `rich` is installed and someone watches."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

LONG_BYTES = 1 << 30
"""From how many bytes of a rank a write is long."""


@contextlib.contextmanager
def bar(num_bytes: int, *, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a bar while the body runs, and give what is told of bytes that were written.

    Args:
        num_bytes: what this rank writes.
        show: whether to show it; None where the write is long and standard error is a terminal.
    """
    if show is None:
        show = num_bytes >= LONG_BYTES and sys.stderr.isatty()
    rich = _rich() if show else None
    if rich is None:
        yield lambda _: None
        return
    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn()]
    columns += [rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
    console = importlib.import_module("rich.console").Console(stderr=True)
    with rich.Progress(*columns, console=console) as progress:
        task = progress.add_task("export (rank 0)", total=num_bytes)
        yield lambda done: progress.advance(task, done)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None
