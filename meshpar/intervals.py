"""The integer algebra of rows: who owns which, and which input rows an output row needs.

Invariant: pure integers, no torch. Every rank computes the same answer from global sizes alone, which is why no
shape is ever sent. Three values carry the whole library:

- an *interval* `(start, stop)` of global rows, empty where start == stop;
- a *run* `(start, count, step)`: rows start, start + step, ...; step 0 repeats one row; start == FILL stands for
  `count` rows of padding that no rank owns;
- *rows*: a tuple of runs, read one after the other. `padded`, `rolled`, `sliced` describe a whole output in terms of
  input rows; `take` cuts out the part that one rank computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from meshpar.errors import ShardingError, explain

Interval = tuple[int, int]
Run = tuple[int, int, int]
Rows = tuple[Run, ...]

FILL = -1
"""The start of a run of padding rows."""

PAD_MODES = ("constant", "reflect", "replicate", "circular")


@functools.lru_cache(maxsize=65536)
def chunks(n: int, p: int) -> tuple[Interval, ...]:
    """Give the canonical layout, DTensor's chunk rule: n rows over p ranks, ceil(n/p) each while they last.

    Example:
        >>> chunks(5, 4)
        ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    c = -(-n // p)
    return tuple((min(r * c, n), min((r + 1) * c, n)) for r in range(p))


def size(interval: Interval) -> int:
    """Count the rows of an interval."""
    return interval[1] - interval[0]


def interval_rows(interval: Interval) -> Rows:
    """Give an interval as rows."""
    start, stop = interval
    return ((start, stop - start, 1),) if stop > start else ()


def count(rows: Rows) -> int:
    """Count rows, padding included."""
    return sum(run[1] for run in rows)


def expand(rows: Rows) -> list[int]:
    """List every row, FILL for padding: the slow and obvious form."""
    return [start + i * step for start, num, step in rows for i in range(num)]


def take(rows: Rows, start: int, stop: int) -> Rows:
    """Cut out positions [start, stop) of `rows`.

    Example:
        >>> take(((3, 4, -1), (7, 2, 0)), 2, 5)
        ((1, 2, -1), (7, 1, 0))
    """
    out: list[Run] = []
    at = 0
    for first, num, step in rows:
        lo, hi = max(start - at, 0), min(stop - at, num)
        if hi > lo:
            out.append((first + lo * step, hi - lo, step))
        at += num
    return tuple(out)


def compose(outer: Rows, inner: Rows) -> Rows:
    """Give the rows that `outer`, whose rows are positions in `inner`, reads in the end."""
    out: list[Run] = []
    for first, num, step in outer:
        if first == FILL:
            out.append((FILL, num, 0))
        elif step == 1:
            out.extend(take(inner, first, first + num))
        elif step == -1:
            out.extend(backwards(take(inner, first - num + 1, first + 1)))
        else:
            for i in range(num):
                out.extend(take(inner, first + i * step, first + i * step + 1))
    return merged(out)


def backwards(rows: Rows) -> Rows:
    """Read rows from last to first."""
    return tuple((first + (num - 1) * step, num, -step) for first, num, step in reversed(rows))


def merged(runs: Iterable[Run]) -> Rows:
    """Join neighbouring runs that continue each other, and drop empty ones."""
    out: list[Run] = []
    for run in runs:
        joined = _join(out[-1], run) if out else None
        if run[1] == 0:
            continue
        if joined is None:
            out.append(run)
        else:
            out[-1] = joined
    return tuple(out)


def _join(a: Run, b: Run) -> Run | None:
    if (a[0] == FILL) != (b[0] == FILL):
        return None
    if a[0] == FILL:
        return (FILL, a[1] + b[1], 0)
    step = a[2] if a[1] > 1 else b[0] - a[0]
    follows = b[0] == a[0] + a[1] * step and (b[1] == 1 or b[2] == step)
    return (a[0], a[1] + b[1], step) if follows else None


def padded(n: int, lo: int, hi: int, mode: str = "constant") -> Rows:
    """Give the rows of n rows padded by lo and hi; negative padding crops, before a circular one wraps.

    Args:
        n: rows in all.
        lo: rows added before the first.
        hi: rows added after the last.
        mode: one of `PAD_MODES`, as in `torch.nn.functional.pad`.

    Raises:
        ShardingError: the mode needs more rows than there are.
    """
    before, after, crop = max(lo, 0), max(hi, 0), (max(-lo, 0), max(-hi, 0))
    least = {
        "constant": sum(crop),
        "reflect": max(before, after) + 1,
        "replicate": 1,
        "circular": max(before, after) + sum(crop),
    }
    if mode not in least:
        raise ShardingError(
            explain("pad: unknown mode.", got=f"mode={mode!r}", needs=f"one of {PAD_MODES}", fix="mode='constant'")
        )
    needed = max(least[mode], sum(crop) - before - after)
    if (lo or hi) and n < needed:
        raise ShardingError(
            explain(
                "pad: too few rows.",
                got=f"{n} rows; mode={mode!r}, padding {lo} and {hi}",
                needs=f"at least {needed} rows in all for this padding",
                fix="less padding, or mode='constant'",
            )
        )
    edge: dict[str, tuple[Run, Run]] = {
        "constant": ((FILL, before, 0), (FILL, after, 0)),
        "reflect": ((before, before, -1), (n - 2, after, -1)),
        "replicate": ((0, before, 0), (n - 1, after, 0)),
        "circular": ((n - crop[1] - before, before, 1), (crop[0], after, 1)),
    }
    first, last = edge[mode]
    whole = tuple(run for run in (first, (0, n, 1), last) if run[1])
    return take(whole, crop[0], count(whole) - crop[1])


def rolled(n: int, shift: int) -> Rows:
    """Give the rows of `torch.roll` by `shift`."""
    k = shift % n if n else 0
    return tuple(run for run in ((n - k, k, 1), (0, n - k, 1)) if run[1])


def flipped(n: int) -> Rows:
    """Give n rows from last to first."""
    return ((n - 1, n, -1),) if n else ()


def sliced(n: int, start: int | None, stop: int | None, step: int | None) -> Rows:
    """Give the rows of a Python slice with a positive step."""
    first, last, stride = slice(start, stop, step).indices(n)
    num = max(0, -(-(last - first) // stride))
    return ((first, num, stride),) if num else ()


def window_size(n: int, kernel: int, stride: int, dilation: int, lo: int, hi: int) -> int:
    """Count the outputs of windows over n rows padded by lo and hi; may be below 1 where none fits."""
    return (n + lo + hi - dilation * (kernel - 1) - 1) // stride + 1


def window(interval: Interval, kernel: int, stride: int, dilation: int) -> Interval:
    """Give the padded rows under the windows of outputs [a, b), counted from the first row of padding."""
    a, b = interval
    if b <= a:
        return (0, 0)
    return (a * stride, (b - 1) * stride + (kernel - 1) * dilation + 1)


@functools.lru_cache(maxsize=65536)
def window_rows(
    n: int,
    p: int,
    *,
    out: int,
    kernel: int,
    stride: int,
    dilation: int,
    lo: int,
    hi: int,
    mode: str = "constant",
) -> tuple[Rows, ...]:
    """Give, rank by rank, the rows under the windows of its outputs; what no window reaches is padding as needed.

    A rank without outputs asks for nothing. `out` is the number of outputs in all, which `ceil_mode` may have raised
    above `window_size`: windows past the end read padding.
    """
    whole = padded(n, lo, hi, mode)
    beyond = window((0, out), kernel, stride, dilation)[1] - count(whole)
    if beyond > 0:
        whole = (*whole, (FILL, beyond, 0))
    return tuple(take(whole, *window(piece, kernel, stride, dilation)) for piece in chunks(out, p))


def transposed_window(interval: Interval, n: int, kernel: int, stride: int, dilation: int, pad: int) -> Interval:
    """Give the input rows that reach outputs [a, b) of a transposed convolution over n rows."""
    a, b = interval
    if b <= a:
        return (0, 0)
    start = max(-(-(a + pad - (kernel - 1) * dilation) // stride), 0)
    stop = min((b - 1 + pad) // stride + 1, n)
    return (start, max(start, stop))


def adaptive_window(i: int, n: int, m: int) -> Interval:
    """Give the input rows of output row i of an adaptive pool from n rows to m."""
    return (i * n // m, -(-((i + 1) * n) // m))


def adaptive_rows(interval: Interval, n: int, m: int) -> Interval:
    """Give the input rows under outputs [a, b) of an adaptive pool from n rows to m."""
    a, b = interval
    return (adaptive_window(a, n, m)[0], adaptive_window(b - 1, n, m)[1]) if b > a else (0, 0)


def hull(indices: Sequence[int]) -> Interval:
    """Give the smallest interval that holds all the indices."""
    return (min(indices), max(indices) + 1) if indices else (0, 0)


def concatenated(sizes: Sequence[int], interval: Interval) -> tuple[Interval, ...]:
    """Give, tensor by tensor, the rows of it that lie in [a, b) of their concatenation."""
    out: list[Interval] = []
    at = 0
    for n in sizes:
        lo, hi = max(interval[0] - at, 0), min(interval[1] - at, n)
        out.append((lo, hi) if hi > lo else (0, 0))
        at += n
    return tuple(out)


def aligned_chunks(n: int, p: int, multiple: int) -> tuple[Interval, ...]:
    """Give a layout of n rows over p ranks in which every piece is a multiple of `multiple` rows.

    It is the canonical layout of n / multiple groups: what a reshape of (n) into (n / multiple, multiple) needs.
    """
    assert n % multiple == 0
    return tuple((a * multiple, b * multiple) for a, b in chunks(n // multiple, p))


def intersect(a: Interval, b: Interval) -> Interval:
    """Give the rows that lie in both."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if stop > start else (0, 0)


def part_inside(run: Run, interval: Interval) -> Interval:
    """Give the positions of a run whose rows lie in an interval: consecutive, since a run is monotonous."""
    first, num, step = run
    lo, hi = interval
    if first == FILL or hi <= lo or num == 0:
        return (0, 0)
    if step == 0:
        return (0, num) if lo <= first < hi else (0, 0)
    if step > 0:
        a, b = -(-(lo - first) // step), (hi - 1 - first) // step + 1
    else:
        a, b = -(-(first - hi + 1) // -step), (first - lo) // -step + 1
    a, b = max(a, 0), min(b, num)
    return (a, b) if b > a else (0, 0)


def distinct(rows: Rows, interval: Interval) -> tuple[Interval, ...]:
    """Give the distinct rows of `rows` inside an interval, as ascending intervals that do not touch."""
    found: list[Interval] = []
    for run in rows:
        a, b = part_inside(run, interval)
        if b <= a:
            continue
        first, last = run[0] + a * run[2], run[0] + (b - 1) * run[2]
        if abs(run[2]) <= 1:
            found.append((min(first, last), max(first, last) + 1))
        else:
            found.extend((row, row + 1) for row in range(min(first, last), max(first, last) + 1, abs(run[2])))
    out: list[Interval] = []
    for start, stop in sorted(found):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)
