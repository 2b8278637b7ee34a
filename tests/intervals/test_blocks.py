"""Blocks of flat positions, against lists of integers."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.blocks import block_intervals, numbered, scaled_down
from meshpar.errors import ShardingError
from meshpar.intervals import chunks, expand


@st.composite
def grids(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    spans = []
    for n in sizes:
        a = draw(st.integers(0, n))
        spans.append((a, draw(st.integers(a, n))))
    return sizes, spans


def positions(sizes, spans):
    found = []
    for line in itertools.product(*(range(a, b) for a, b in spans)):
        at = 0
        for index, n in zip(line, sizes, strict=True):
            at = at * n + index
        found.append(at)
    return found


@given(grids())
def test_blocks_hold_their_positions_in_order(grid):
    intervals = block_intervals(*grid)
    assert [p for a, b in intervals for p in range(a, b)] == positions(*grid)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(intervals))


@given(grids(), st.integers(1, 4), st.integers(1, 4))
def test_numbers_follow_the_ranks(grid, first, second):
    sizes, _ = grid
    have, want = [], []
    for a, b in itertools.product(range(first), range(second)):
        spans = [(0, n) for n in sizes]
        spans[0] = chunks(sizes[0], first)[a]
        lo, hi = spans[-1]
        c, d = chunks(hi - lo, second)[b]
        spans[-1] = (lo + c, lo + d)
        have.append(block_intervals(sizes, spans))
        n = math.prod(sizes)
        want.append((chunks(n, first * second)[a * second + b],))
    layout, rows = numbered(have, want)
    owner = [p for intervals in have for a, b in intervals for p in range(a, b)]
    assert sorted(owner) == list(range(math.prod(sizes)))
    assert [b - a for a, b in layout] == [sum(b - a for a, b in intervals) for intervals in have]
    for wanted, (interval,) in zip(rows, want, strict=True):
        assert [owner[i] for i in expand(wanted)] == list(range(*interval))


def test_a_position_that_nobody_holds():
    with pytest.raises(ShardingError, match="position 2"):
        numbered([((0, 2),), ((3, 4),)], [((0, 4),), ()])


def test_units():
    assert scaled_down(((4, 8), (12, 16)), 4) == ((1, 2), (3, 4))
