"""Plans carried out for all ranks in one process, against indexing of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.errors import ShardingError
from meshpar.intervals import FILL, chunks, expand, padded
from meshpar.plans import OWN, PADDING, check, decode, encode, make_plan


@st.composite
def haves(draw, max_ranks=5, max_rows=14):
    """Draw who has what: disjoint intervals in any order, some empty, some rows nobody's."""
    p = draw(st.integers(1, max_ranks))
    n = draw(st.integers(0, max_rows))
    if draw(st.booleans()):
        return chunks(n, p)
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=2 * p, max_size=2 * p)))
    pieces = [(cuts[2 * i], cuts[2 * i + 1]) for i in range(p)]
    return tuple(draw(st.permutations(pieces)))


@st.composite
def wants(draw, have):
    """Draw the rows of one rank: several runs over rows that somebody has, repeated, reversed, strided, padding."""
    owned = sorted(row for piece in have for row in range(*piece))
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        num, step = draw(st.integers(1, 7)), draw(st.integers(-3, 3))
        if not owned or draw(st.integers(0, 5)) == 0:
            rows.append((FILL, num, 0))
            continue
        first = draw(st.sampled_from(owned))
        while num > 1 and any(first + i * step not in owned for i in range(num)):
            num -= 1
        rows.append((first, num, step if num > 1 else 1))
    return tuple(rows)


@st.composite
def requests(draw, **limits):
    have = draw(haves(**limits))
    return have, tuple(draw(wants(have)) for _ in have)


def run_plans(have, want):
    """Carry out every rank's plan on the numbers of the rows themselves; return results and messages."""
    plans = [make_plan(have, want, me) for me in range(len(have))]
    own = [list(range(*piece)) for piece in have]
    mail = {
        (me, peer): [row for a, b in pieces for row in own[me][a:b]]
        for me, plan in enumerate(plans)
        for peer, pieces in plan.sends
    }
    results = []
    for me, plan in enumerate(plans):
        inbox = [mail[peer, me] for peer, _ in plan.receives]
        assert [len(message) for message in inbox] == [rows for _, rows in plan.receives]
        out = [None] * plan.out_rows
        for copy in plan.copies:
            for i in range(copy.count):
                assert out[copy.out + i] is None, "a row is written twice"
                at = copy.start + i * copy.step
                assert at >= 0
                source = {OWN: own[me], PADDING: [FILL] * (at + 1)}.get(copy.source) or inbox[copy.source]
                out[copy.out + i] = source[at]
        results.append(out)
    return plans, results, mail


def verify(request):
    have, want = request
    plans, results, mail = run_plans(have, want)
    owner = {row: rank for rank, piece in enumerate(have) for row in range(*piece)}
    for me, plan in enumerate(plans):
        assert results[me] == expand(want[me])
        assert plan.have_rows == have[me][1] - have[me][0]
        assert [peer for peer, _ in plan.sends] == sorted({peer for peer, _ in plan.sends} - {me})
        assert [peer for peer, _ in plan.receives] == sorted({peer for peer, _ in plan.receives} - {me})
        assert {peer for peer, _ in plan.receives} == {peer for peer, to in mail if to == me}
    for (_, to), rows in mail.items():
        assert rows == sorted(set(rows)), "a row is sent twice, or out of order"
        assert set(rows) <= set(expand(want[to]))
    least = sum(len({r for r in expand(rows) if r != FILL and owner[r] != me}) for me, rows in enumerate(want))
    assert sum(map(len, mail.values())) == least
    identity = all(expand(rows) == list(range(*piece)) for rows, piece in zip(want, have, strict=True))
    assert not plans[0].identity or identity
    assert len({plan.identity for plan in plans}) == 1, "ranks disagree on whether there is anything to do"
    assert decode(*encode(have, want)) == (have, want)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_plans_are_right_and_least(request_):
    verify(request_)


@pytest.mark.long
@settings(max_examples=8000, deadline=None)
@given(requests(max_ranks=9, max_rows=40))
def test_plans_are_right_and_least_by_the_thousand(request_):
    verify(request_)


@given(st.integers(0, 30), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_asking_for_what_one_has_is_the_identity(n, p):
    have = chunks(n, p)
    want = tuple(((a, b - a, 1),) if b > a else () for a, b in have)
    plan = make_plan(have, want, 0)
    assert plan.identity
    assert not plan.sends
    assert not plan.receives


def test_a_halo_goes_over_several_hops_and_wraps():
    """FIELD 8 and 16: 2 rows a rank over 4, halo 3, periodic; both neighbours of a rank of 2 are one peer."""
    have = chunks(8, 4)
    whole = padded(8, 3, 3, "circular")
    want = tuple(tuple((row, 1, 1) for row in expand(whole)[a : b + 6]) for a, b in have)
    plan = make_plan(have, want, 0)
    assert [peer for peer, _ in plan.receives] == [1, 2, 3]
    assert [rows for _, rows in plan.receives] == [2, 2, 2]
    two = make_plan(((0, 4), (4, 8)), (((7, 1, 1), (0, 4, 1), (4, 1, 1)), ((3, 5, 1), (0, 1, 1))), 0)
    assert two.sends == ((1, ((0, 1), (3, 4))),)
    assert two.receives == ((1, 2),)


@pytest.mark.parametrize(
    ("have", "want", "says"),
    [
        (((0, 3), (2, 5)), ((), ()), r"ranks 0 and 1 both have rows \(2, 3\)"),
        (((0, 9), (1, 2), (3, 4)), ((), (), ()), "both have rows"),
        (((2, 1),), ((),), r"rank 0 has \(2, 1\)"),
        (((-1, 1),), ((),), r"rank 0 has \(-1, 1\)"),
        (((0, 3),), (((1, 3, 1),),), "1 rows belong to nobody"),
        (((0, 2), (3, 5)), (((1, 2, 1),), ()), "1 rows belong to nobody"),
        (((0, 3),), (((2, 4, -1),),), "1 rows belong to nobody"),
        (((0, 3),), (((0, -2, 1),),), "no run"),
        (((0, 3),), (((-1, -2, 0),),), "no run"),
        (((0, 3),), (((-1, 2, 1),),), "no run"),
        (((0, 3),), (((-2, 2, 1),),), "belong to nobody"),
        (((0, 3),), ((), ()), "1 ranks have rows, 2 want some"),
    ],
)
def test_lists_that_no_exchange_can_serve_are_refused(have, want, says):
    with pytest.raises(ShardingError, match=says):
        make_plan(have, want, 0)
    with pytest.raises(ShardingError, match=says):
        check(have, want)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ShardingError) as caught:
        check(((0, 3), (2, 5)), (((9, 1, 1),), ((8, 1, 1),)))
    assert all(part in str(caught.value) for part in ("both have", "rank 0 wants run (9", "rank 1 wants run (8"))
