"""Tables for people, and bytes as they are written and read.

Invariant: pure.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from meshpar.errors import SpecError, explain

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out rows of a table, the head first, as lines."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


_CELL = 'style="text-align:left"'
_MARK = ' style="background:rgba(220,40,40,.2)"'
"""Red over whatever colour the page has: it is read in dark and in light."""


def html_table(rows: Sequence[Sequence[str]], *, caption: str = "", marked: Collection[int] = ()) -> str:
    """Lay out rows of a table, the head first, for a notebook.

    Args:
        rows: the head, and the rows.
        caption: what stands above it.
        marked: numbers of rows, the first one after the head being 0, that are to be seen.

    Example:
        >>> html_table([("rank",), ("0",)])
        '<table><tr><th style="text-align:left">rank</th></tr><tr><td style="text-align:left">0</td></tr></table>'
    """
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th {_CELL}>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr{_MARK if i in marked else ''}>"
        + "".join(f"<td {_CELL}>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for i, row in enumerate(rows[1:])
    )
    return f"<table>{above}<tr>{head}</tr>{body}</table>"


def tell_bytes(num_bytes: float) -> str:
    """Write bytes for people, in decimal units.

    Example:
        >>> tell_bytes(1_530_000)
        '1.53 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes.

    Raises:
        SpecError: it is none.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("2 GiB")
        (80000000000, 2147483648)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    number = str(text).strip().rstrip("BbKkMmGgTtIi").strip()
    unit = str(text).strip()[len(number) :].strip().upper()
    try:
        num_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = -1
    if num_bytes < 0 or isinstance(text, bool):
        needs = "a number and a unit: B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise SpecError(explain("memory: not a size.", got=repr(text), needs=needs, fix='"80GB"'))
    return num_bytes
