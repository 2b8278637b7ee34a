"""Plans of an exchange: what one rank sends, receives and copies, worked out from `have` and `want`.

Invariant: pure integers. The two ends of every message derive it from the same lists, so they agree on its rows and
their order without asking; one message goes to each peer, and every row goes to a peer once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshpar.errors import ShardingError, explain
from meshpar.intervals import FILL, Interval, Rows, count, distinct, intersect, part_inside, size

OWN = -1
PADDING = -2


@dataclass(frozen=True)
class Copy:
    """Tell where `count` consecutive output rows come from.

    Args:
        out: first output row.
        count: rows.
        source: index into `Plan.receives`, or OWN, or PADDING.
        start: first row in the source, counted in the source.
        step: distance of the rows in the source; 0 repeats one row.
    """

    out: int
    count: int
    source: int
    start: int
    step: int


@dataclass(frozen=True)
class Plan:
    """Hold one rank's part of an exchange.

    Args:
        out_rows: rows of the result.
        have_rows: rows of the input.
        sends: peer and intervals of own rows, counted from the first own row.
        receives: peer and number of rows.
        copies: how the result is put together.
        identity: every rank asks for exactly what it has.
    """

    out_rows: int
    have_rows: int
    sends: tuple[tuple[int, tuple[Interval, ...]], ...]
    receives: tuple[tuple[int, int], ...]
    copies: tuple[Copy, ...]
    identity: bool


def encode(have: Sequence[Interval], want: Sequence[Rows]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Flatten the two lists into integers, which custom ops can take."""
    flat_have = tuple(bound for interval in have for bound in interval)
    flat_want: list[int] = []
    for rows in want:
        flat_want.append(len(rows))
        for run in rows:
            flat_want.extend(run)
    return flat_have, tuple(flat_want)


def decode(have: Sequence[int], want: Sequence[int]) -> tuple[tuple[Interval, ...], tuple[Rows, ...]]:
    """Undo `encode`."""
    intervals = tuple((have[i], have[i + 1]) for i in range(0, len(have), 2))
    rows: list[Rows] = []
    at = 0
    while at < len(want):
        num = want[at]
        runs = want[at + 1 : at + 1 + 3 * num]
        rows.append(tuple((runs[i], runs[i + 1], runs[i + 2]) for i in range(0, 3 * num, 3)))
        at += 1 + 3 * num
    return intervals, tuple(rows)


@functools.lru_cache(maxsize=16384)
def make_plan(have: tuple[Interval, ...], want: tuple[Rows, ...], me: int) -> Plan:
    """Work out the part of rank `me`.

    Raises:
        ShardingError: the lists differ in length, intervals of `have` overlap, or a row is wanted that nobody has.
    """
    check(have, want)
    mine = have[me]
    sends: list[tuple[int, tuple[Interval, ...]]] = []
    receives: list[tuple[int, int]] = []
    packed: dict[int, tuple[int, tuple[Interval, ...]]] = {}
    for peer in range(len(have)):
        if peer == me:
            continue
        if out := distinct(want[peer], mine):
            sends.append((peer, tuple((a - mine[0], b - mine[0]) for a, b in out)))
        if into := distinct(want[me], have[peer]):
            packed[peer] = (len(receives), into)
            receives.append((peer, sum(size(interval) for interval in into)))
    copies = _copies(have, want[me], me, packed)
    identity = all(rows == (((a, b - a, 1),) if b > a else ()) for rows, (a, b) in zip(want, have, strict=True))
    return Plan(count(want[me]), size(mine), tuple(sends), tuple(receives), copies, identity)


def _copies(
    have: tuple[Interval, ...], rows: Rows, me: int, packed: dict[int, tuple[int, tuple[Interval, ...]]]
) -> tuple[Copy, ...]:
    copies: list[Copy] = []
    at = 0
    for run in rows:
        first, num, step = run
        if first == FILL:
            copies.append(Copy(at, num, PADDING, 0, 0))
        for rank, interval in enumerate(have):
            a, b = part_inside(run, interval)
            if b <= a:
                continue
            start = first + a * step
            if rank == me:
                copies.append(Copy(at + a, b - a, OWN, start - have[me][0], step))
            else:
                source, pieces = packed[rank]
                places = [_place(pieces, start + i * step) for i in range(b - a)] if step not in (-1, 0, 1) else []
                copies.extend(_spread(at + a, b - a, source, _place(pieces, start), step, places))
        at += num
    return tuple(sorted(copies, key=lambda copy: copy.out))


def _place(pieces: tuple[Interval, ...], row: int) -> int:
    """Give the position of a row in a message that holds these intervals one after the other."""
    at = 0
    for start, stop in pieces:
        if start <= row < stop:
            return at + row - start
        at += stop - start
    msg = f"row {row} is not in the message"
    raise AssertionError(msg)


def _spread(out: int, num: int, source: int, start: int, step: int, places: list[int]) -> list[Copy]:
    if not places:
        return [Copy(out, num, source, start, step)]
    steps = {b - a for a, b in itertools.pairwise(places)}
    if len(steps) <= 1:
        return [Copy(out, num, source, places[0], next(iter(steps), 1))]
    return [Copy(out + i, 1, source, place, 1) for i, place in enumerate(places)]


@functools.lru_cache(maxsize=16384)
def check(have: tuple[Interval, ...], want: tuple[Rows, ...]) -> None:
    """Refuse lists that no exchange can serve; see `make_plan`."""
    wrong: list[str] = []
    if len(have) != len(want):
        wrong.append(f"{len(have)} ranks have rows, {len(want)} want some")
    wrong += [f"rank {r} has {piece}" for r, piece in enumerate(have) if not 0 <= piece[0] <= piece[1]]
    full = sorted((piece, r) for r, piece in enumerate(have) if piece[1] > piece[0])
    for (a, r), (b, q) in itertools.pairwise(full):
        if size(intersect(a, b)):
            wrong.append(f"ranks {r} and {q} both have rows {intersect(a, b)}")
    for r, rows in enumerate(want):
        for run in rows:
            owned = sum(size(part_inside(run, piece)) for piece in have)
            if run[1] < 0 or (run[0] == FILL and run[2] != 0):
                wrong.append(f"rank {r} wants {run}, which is no run")
            elif run[0] != FILL and owned != run[1]:
                wrong.append(f"rank {r} wants run {run}, of which {run[1] - owned} rows belong to nobody")
    if wrong:
        raise ShardingError(
            explain(
                "fetch: these rows cannot be exchanged.",
                got=wrong,
                needs="disjoint intervals, one a rank, that hold every row asked for",
                fix="derive both lists from the global size, e.g. with meshpar.intervals.chunks",
            )
        )
