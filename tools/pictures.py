"""The pictures of "How it works", drawn from what meshpar itself says of rows, messages and bytes."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable

from torch import nn

import meshpar
from meshpar.intervals import chunks, size, window_rows
from meshpar.plans import make_plan
from meshpar.showing.picture import COLOURS
from meshpar.tables import tell_bytes


def exchange(num_rows: int = 10, num_ranks: int = 4, kernel: int = 9) -> str:
    """Draw the rows of each rank, and which of them are sent where for a convolution."""
    pad = kernel // 2
    have = chunks(num_rows, num_ranks)
    want = window_rows(
        num_rows, num_ranks, out=num_rows, kernel=kernel, stride=1, dilation=1, lo=pad, hi=pad, mode="constant"
    )
    plans = [make_plan(have, want, rank) for rank in range(num_ranks)]
    row, left, wide, gap = 17.0, 70.0, 110.0, 30.0
    top = 46.0
    parts = []
    for rank, (own, plan) in enumerate(zip(have, plans, strict=True)):
        x = left + rank * (wide + gap)
        told = f"rank {rank}" + ("" if size(own) else " (no rows)")
        parts.append(_text(x + wide / 2, top - 10, told, anchor="middle"))
        needed = {first + i for first, count, _ in want[rank] if first >= 0 for i in range(count)}
        for n in sorted(needed | set(range(*own))):
            owner = next(r for r, (a, b) in enumerate(have) if a <= n < b)
            mine = owner == rank
            parts.append(
                f'<rect x="{x:.0f}" y="{top + n * row:.1f}" width="{wide:.0f}" height="{row - 2:.1f}" '
                f'fill="{COLOURS[owner]}" fill-opacity="{0.8 if mine else 0.25}" stroke="{COLOURS[owner]}"'
                + ("/>" if mine else ' stroke-dasharray="3 2"/>')
            )
            if not mine:
                told = f"from rank {owner}"
                parts.append(_text(x + wide / 2, top + n * row + row - 5, told, anchor="middle", small=True))
        got = sum(count for _, count in plan.receives)
        said = f"is sent {got} rows" if got != 1 else "is sent 1 row"
        parts.append(_text(x + wide / 2, top + num_rows * row + 16, said, anchor="middle", small=True))
    parts += [_text(left - 12, top + n * row + row - 5, str(n), anchor="end", small=True) for n in range(num_rows)]
    parts.append(_text(10, 18, f"{num_rows} rows over {num_ranks} ranks, kernel {kernel}", size=14))
    return _svg(left + num_ranks * (wide + gap), top + num_rows * row + 30, parts)


def step() -> str:
    """Draw what the busiest rank sends in a training step of a small network, by axis and purpose."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.GroupNorm(8, 128), nn.GELU()),
        *(nn.ConvTranspose2d(128, 64, 2, stride=2), nn.GELU(), nn.Conv2d(64, 3, 3, padding=1)),
    )
    plan = meshpar.plan(net, "data=2,domain=4", (1, 3, 720, 1440))
    busiest = max(plan.ranks.values(), key=lambda r: sum(t.num_bytes for t in r.transfers))
    bars = sorted(((t.num_bytes, f"{t.kind} on {t.axis}") for t in busiest.transfers), reverse=True)
    most, left, wide, row = bars[0][0], 240.0, 330.0, 24.0
    parts = [_text(10, 18, f"rank {busiest.rank} of data=2, domain=4; one training step", size=14)]
    for i, (num_bytes, told) in enumerate(bars):
        y = 36 + i * row
        length = max(wide * num_bytes / most, 1.5)
        parts.append(_text(left - 8, y + 13, told, anchor="end"))
        parts.append(
            f'<rect x="{left:.0f}" y="{y:.0f}" width="{length:.1f}" height="{row - 8:.0f}" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(left + length + 6, y + 13, tell_bytes(num_bytes)))
    return _svg(left + wide + 90, 44 + len(bars) * row, parts)


def _text(x: float, y: float, told: str, *, anchor: str = "start", small: bool = False, size: int = 0) -> str:
    points = size or (10 if small else 12)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{points}" text-anchor="{anchor}" '
        f'fill="currentColor">{html.escape(told)}</text>'
    )


def _svg(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
    return "\n".join([f'{head}viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">', *parts, "</svg>"])


def _shown(*args: object, **options: object) -> str:
    return meshpar.show(*args, **options).svg()  # type: ignore[arg-type]


PICTURES: dict[str, Callable[[], str]] = {
    "mesh": functools.partial(_shown, "data=2,domain=4,tensor=2"),
    "rows": functools.partial(_shown, "data=2,domain=4", (2, 3, 37, 49)),
    "halo": functools.partial(_shown, "data=1,domain=4", (1, 3, 37, 49), halo=3),
    "exchange": exchange,
    "step": step,
}
"""By the name by which a page asks for one: `<!-- picture: name -->`."""
