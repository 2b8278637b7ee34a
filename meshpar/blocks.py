"""Blocks of a grid as intervals of flat positions: what reshaping a sharded tensor moves.

Invariant: pure integers, no torch. A block is a span for each dim; its elements lie, in row-major order, in ascending
intervals of the flattened grid. `numbered` counts positions rank by rank, so that what every rank holds is one
interval, as `fetch` wants it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from meshpar.errors import ShardingError, explain
from meshpar.intervals import Interval, Rows, merged


def block_intervals(sizes: Sequence[int], spans: Sequence[Interval]) -> tuple[Interval, ...]:
    """Give the flat positions of a block, as ascending intervals that do not touch.

    Example:
        >>> block_intervals((2, 4, 3), ((0, 2), (1, 3), (0, 3)))
        ((3, 9), (15, 21))
    """
    if any(a >= b for a, b in spans):
        return ()
    partial = [d for d, (span, n) in enumerate(zip(spans, sizes, strict=True)) if span != (0, n)]
    if not partial:
        return ((0, math.prod(sizes)),)
    last = partial[-1]
    inner = math.prod(sizes[last + 1 :])
    lines = itertools.product(*(range(a, b) for a, b in spans[:last]))
    a, b = spans[last]
    out: list[Interval] = []
    for line in lines:
        at = 0
        for index, n in zip(line, sizes, strict=False):
            at = at * n + index
        start = at * sizes[last]
        first, stop = (start + a) * inner, (start + b) * inner
        if out and out[-1][1] == first:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((first, stop))
    return tuple(out)


def scaled_down(intervals: Sequence[Interval], unit: int) -> tuple[Interval, ...]:
    """Count positions in units, of which every interval holds whole ones."""
    assert all(a % unit == 0 and b % unit == 0 for a, b in intervals)
    return tuple((a // unit, b // unit) for a, b in intervals)


def numbered(
    have: Sequence[tuple[Interval, ...]], want: Sequence[tuple[Interval, ...]]
) -> tuple[tuple[Interval, ...], tuple[Rows, ...]]:
    """Number positions in the order in which the ranks hold them.

    Args:
        have: for every rank the positions that it holds, ascending; disjoint.
        want: for every rank the positions that it wants.

    Returns:
        `have` and `want` for `meshpar.exchange.fetch`, in the new numbers.

    Raises:
        ShardingError: a position is wanted that nobody holds.

    Example:
        >>> numbered([((0, 1), (2, 3)), ((1, 2), (3, 4))], [((0, 2),), ((2, 4),)])
        (((0, 2), (2, 4)), (((0, 2, 2),), ((1, 2, 2),)))
    """
    held: list[tuple[int, int, int]] = []
    layout: list[Interval] = []
    at = 0
    for intervals in have:
        first = at
        for a, b in intervals:
            held.append((a, b, at))
            at += b - a
        layout.append((first, at))
    held.sort()
    starts = [a for a, _, _ in held]
    wanted = [merged(run for piece in intervals for run in _renumbered(piece, held, starts)) for intervals in want]
    return tuple(layout), tuple(wanted)


def _renumbered(piece: Interval, held: list[tuple[int, int, int]], starts: list[int]) -> list[tuple[int, int, int]]:
    a, stop = piece
    runs: list[tuple[int, int, int]] = []
    at = bisect.bisect_right(starts, a) - 1
    while a < stop:
        if not 0 <= at < len(held) or not held[at][0] <= a < held[at][1]:
            raise ShardingError(
                explain(
                    "reshape: these positions cannot be exchanged.",
                    got=f"position {a} is wanted and nobody holds it",
                    needs="blocks that cover the tensor",
                    fix="report this: the layouts before and after do not fit",
                )
            )
        first, last, number = held[at]
        num = min(stop, last) - a
        runs.append((number + a - first, num, 1))
        a += num
        at += 1
    return runs
