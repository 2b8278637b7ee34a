"""The algebra of rows against lists of integers, written out one row at a time."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar import intervals as iv
from meshpar.errors import ShardingError

LONG = []


def prove(*strategies, examples=60):
    """Make a property a test of some examples, and of thirty times as many in the long run."""

    def wrap(check):
        LONG.append(settings(max_examples=30 * examples, deadline=None)(given(*strategies)(check)))
        return settings(max_examples=examples, deadline=None)(given(*strategies)(check))

    return wrap


RANKS = st.integers(1, 9)
SIZE = st.integers(0, 30)


@st.composite
def runs(draw, n):
    """Draw a run whose rows lie in [0, n), or padding."""
    num = draw(st.integers(1, 6))
    if n == 0 or draw(st.integers(0, 4)) == 0:
        return (iv.FILL, num, 0)
    step = draw(st.integers(-4, 4))
    reach = (num - 1) * step
    if abs(reach) >= n:
        num, reach = 1, 0
    return (draw(st.integers(max(0, -reach), n - 1 - max(0, reach))), num, step)


@st.composite
def sized_rows(draw):
    """Draw a number of rows and some rows out of them."""
    n = draw(st.integers(0, 12))
    return n, tuple(draw(st.lists(runs(n), max_size=5)))


def positions(interval):
    return list(range(*interval))


@prove(SIZE, RANKS)
def test_chunks_are_those_of_dtensor(n, p):
    pieces = [piece.tolist() for piece in torch.arange(n).chunk(p)] if n else []
    pieces += [[]] * (p - len(pieces))
    assert [positions(interval) for interval in iv.chunks(n, p)] == pieces
    assert [iv.size(interval) for interval in iv.chunks(n, p)] == [len(piece) for piece in pieces]
    assert all(0 <= a <= b <= n for a, b in iv.chunks(n, p))


@prove(sized_rows())
def test_expand_and_count(drawn):
    _, rows = drawn
    slow = []
    for start, num, step in rows:
        for _ in range(num):
            slow.append(start)
            start += step
    assert iv.expand(rows) == slow
    assert iv.count(rows) == len(slow)


@prove(st.tuples(SIZE, SIZE).map(sorted))
def test_interval_rows(bounds):
    assert iv.expand(iv.interval_rows(tuple(bounds))) == list(range(*bounds))


@prove(sized_rows(), st.integers(-3, 40), st.integers(-3, 40))
def test_take(drawn, start, stop):
    _, rows = drawn
    kept = [row for at, row in enumerate(iv.expand(rows)) if start <= at < stop]
    assert iv.expand(iv.take(rows, start, stop)) == kept


@prove(sized_rows(), st.data())
def test_compose(drawn, data):
    _, inner = drawn
    flat = iv.expand(inner)
    outer = tuple(data.draw(st.lists(runs(len(flat)), max_size=5)))
    expected = [flat[row] if row != iv.FILL else iv.FILL for row in iv.expand(outer)]
    assert iv.expand(iv.compose(outer, inner)) == expected


@prove(sized_rows())
def test_backwards(drawn):
    _, rows = drawn
    assert iv.expand(iv.backwards(rows)) == iv.expand(rows)[::-1]


@prove(sized_rows(), st.data())
def test_merged_changes_no_row_and_joins_what_was_cut(drawn, data):
    _, rows = drawn
    pieces = []
    for run in rows:
        cut = data.draw(st.integers(0, run[1]))
        pieces += [(run[0], cut, run[2]), (run[0] + cut * run[2], run[1] - cut, run[2])]
    merged = iv.merged(pieces)
    assert iv.expand(merged) == iv.expand(rows)
    assert len(merged) <= len(rows)
    assert all(num > 0 for _, num, _ in merged)


@prove(st.integers(0, 9), st.integers(-4, 9), st.integers(-4, 9), st.sampled_from(iv.PAD_MODES))
def test_padded_is_f_pad(n, lo, hi, mode):
    """Every mode, negative padding, and the same refusals; FILL stands for -1."""
    x = torch.arange(n, dtype=torch.float64).view(1, 1, n)
    try:
        expected = F.pad(x, (lo, hi), mode, *([-1.0] if mode == "constant" else [])).long().flatten().tolist()
    except (RuntimeError, ValueError):
        if n > 0 and n + lo + hi > 0:  # torch refuses empty inputs and outputs too, which is not for us to say
            with pytest.raises(ShardingError):
                iv.padded(n, lo, hi, mode)
        return
    if mode == "circular" and max(lo, hi) > n + min(lo, 0) + min(hi, 0):
        with pytest.raises(ShardingError):  # torch reads memory that it has not written yet
            iv.padded(n, lo, hi, mode)
        return
    assert iv.expand(iv.padded(n, lo, hi, mode)) == expected


def test_padded_names_modes_and_least_rows():
    with pytest.raises(ShardingError, match="unknown mode"):
        iv.padded(4, 1, 1, "wrap")
    with pytest.raises(ShardingError, match="at least 4 rows"):
        iv.padded(3, 1, 3, "reflect")
    with pytest.raises(ShardingError, match="at least 4 rows"):
        iv.padded(3, 4, 1, "circular")
    assert iv.padded(0, 0, 0, "reflect") == ()


@prove(SIZE, st.integers(-70, 70))
def test_rolled_is_torch_roll(n, shift):
    assert iv.expand(iv.rolled(n, shift)) == torch.arange(n).roll(shift).tolist()


@prove(SIZE)
def test_flipped_is_torch_flip(n):
    assert iv.expand(iv.flipped(n)) == torch.arange(n).flip(0).tolist()


BOUND = st.none() | st.integers(-35, 35)


@prove(SIZE, BOUND, BOUND, st.none() | st.integers(1, 9))
def test_sliced_is_a_slice(n, start, stop, step):
    assert iv.expand(iv.sliced(n, start, stop, step)) == list(range(n))[start:stop:step]


WINDOW = {
    "kernel": st.integers(1, 5),
    "stride": st.integers(1, 4),
    "dilation": st.integers(1, 3),
    "lo": st.integers(-2, 5),
    "hi": st.integers(-2, 5),
}


def taps(out, kernel, stride, dilation):
    """List the padded positions that an output reads."""
    return [out * stride + tap * dilation for tap in range(kernel)]


@prove(st.integers(0, 15), *WINDOW.values())
def test_window_size_counts_what_fits(n, kernel, stride, dilation, lo, hi):
    size = n + lo + hi
    fits = 0
    while taps(fits, kernel, stride, dilation)[-1] < size:
        fits += 1
    assert max(iv.window_size(n, kernel, stride, dilation, lo, hi), 0) == fits


@prove(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), *list(WINDOW.values())[:3])
def test_window_is_the_hull_of_its_taps(outputs, kernel, stride, dilation):
    read = [tap for out in range(*outputs) for tap in taps(out, kernel, stride, dilation)]
    assert iv.window(tuple(outputs), kernel, stride, dilation) == ((min(read), max(read) + 1) if read else (0, 0))


@prove(st.integers(1, 15), RANKS, *WINDOW.values(), st.sampled_from(iv.PAD_MODES), st.integers(0, 2), examples=120)
def test_window_rows_hold_every_tap_of_every_output(n, p, kernel, stride, dilation, lo, hi, mode, extra):
    """Rank by rank, tap by tap; `extra` outputs as `ceil_mode` adds them, which read padding past the end."""
    out = iv.window_size(n, kernel, stride, dilation, lo, hi)
    if out < 1 or n + min(lo, 0) + min(hi, 0) < 0:
        return
    if mode == "constant":
        out += extra
    try:
        whole = iv.expand(iv.padded(n, lo, hi, mode))
    except ShardingError:
        with pytest.raises(ShardingError):
            iv.window_rows(n, p, out=out, kernel=kernel, stride=stride, dilation=dilation, lo=lo, hi=hi, mode=mode)
        return
    whole += [iv.FILL] * (extra * stride)
    ranks = iv.window_rows(n, p, out=out, kernel=kernel, stride=stride, dilation=dilation, lo=lo, hi=hi, mode=mode)
    assert len(ranks) == p
    for rows, (a, b) in zip(ranks, iv.chunks(out, p), strict=True):
        got = iv.expand(rows)
        assert len(got) == ((b - a - 1) * stride + (kernel - 1) * dilation + 1 if b > a else 0)
        for output in range(a, b):
            for tap in taps(output, kernel, stride, dilation):
                assert got[tap - a * stride] == whole[tap]


@prove(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 6),
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted),
    examples=120,
)
def test_transposed_window_holds_every_row_that_reaches_the_outputs(n, kernel, stride, dilation, pad, outputs):
    """Row i reaches output i * stride - pad + tap * dilation; with dilation 1 nothing but such rows is inside."""
    reach = [
        i
        for i in range(n)
        if any(outputs[0] <= i * stride - pad + tap * dilation < outputs[1] for tap in range(kernel))
    ]
    a, b = iv.transposed_window(tuple(outputs), n, kernel, stride, dilation, pad)
    assert 0 <= a <= b
    assert set(reach) <= set(range(a, b))
    assert b <= n or a == b
    if dilation == 1:
        assert list(range(a, b)) == reach


@prove(st.integers(1, 20), st.integers(1, 20), st.data())
def test_adaptive_windows_are_those_of_torch(n, m, data):
    """The gradient of one output of `adaptive_avg_pool1d` is not zero on the rows of its window alone."""
    x = torch.zeros(1, 1, n, dtype=torch.float64, requires_grad=True)
    y = F.adaptive_avg_pool1d(x, m).flatten()
    windows = []
    for i in range(m):
        (g,) = torch.autograd.grad(y[i], x, retain_graph=True)
        windows.append(g.flatten().nonzero().flatten().tolist())
        assert positions(iv.adaptive_window(i, n, m)) == windows[-1]
    a = data.draw(st.integers(0, m))
    b = data.draw(st.integers(a, m))
    read = sorted({row for i in range(a, b) for row in windows[i]})
    assert positions(iv.adaptive_rows((a, b), n, m)) == read


@prove(st.lists(SIZE))
def test_hull(indices):
    a, b = iv.hull(indices)
    assert (a, b) == ((min(indices), max(indices) + 1) if indices else (0, 0))


@prove(st.lists(st.integers(0, 6), max_size=6), st.data())
def test_concatenated_cuts_each_tensor(sizes, data):
    owners = [(which, row) for which, n in enumerate(sizes) for row in range(n)]
    a = data.draw(st.integers(0, len(owners)))
    b = data.draw(st.integers(a, len(owners)))
    found = iv.concatenated(sizes, (a, b))
    assert len(found) == len(sizes)
    assert [(which, row) for which, piece in enumerate(found) for row in range(*piece)] == owners[a:b]


@prove(st.integers(0, 12), RANKS, st.integers(1, 5))
def test_aligned_chunks(groups, p, multiple):
    found = iv.aligned_chunks(groups * multiple, p, multiple)
    assert [row for piece in found for row in range(*piece)] == list(range(groups * multiple))
    assert all(a % multiple == 0 and b % multiple == 0 for a, b in found)
    assert [iv.size(piece) // multiple for piece in found] == [iv.size(piece) for piece in iv.chunks(groups, p)]


INTERVAL = st.tuples(st.integers(0, 14), st.integers(0, 14)).map(lambda t: (min(t), max(t)))


@prove(INTERVAL, INTERVAL)
def test_intersect(a, b):
    assert positions(iv.intersect(a, b)) == sorted(set(positions(a)) & set(positions(b)))


@prove(runs(13), INTERVAL, examples=200)
def test_part_inside(run, interval):
    inside = [at for at, row in enumerate(iv.expand((run,))) if interval[0] <= row < interval[1]]
    assert positions(iv.part_inside(run, interval)) == inside


@prove(sized_rows(), INTERVAL, examples=200)
def test_distinct(drawn, interval):
    _, rows = drawn
    found = iv.distinct(rows, interval)
    expected = sorted({row for row in iv.expand(rows) if interval[0] <= row < interval[1]})
    assert [row for piece in found for row in range(*piece)] == expected
    assert all(a[1] < b[0] for a, b in pairwise(found)), "intervals that touch were not joined"
    assert all(a < b for a, b in found)


@pytest.mark.long
@pytest.mark.parametrize("check", LONG, ids=lambda check: check.__name__)
def test_by_the_thousand(check):
    check()
