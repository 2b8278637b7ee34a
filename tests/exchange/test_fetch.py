"""`fetch` and its transpose on 1 to 4 real ranks, against indexing of the whole tensor.

All numbers are small integers, so that sums are exact in every dtype and every comparison is an equality.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist
from fetch_cases import (
    DTYPES,
    FORMS,
    MODES,
    ROWS,
    Case,
    batches,
    check_cases,
    numbers,
    picked,
)
from hypothesis import Phase, given, settings

from meshpar.errors import ShardingError
from meshpar.exchange import fetch
from meshpar.intervals import FILL, chunks, flipped, padded, take
from meshpar.plans import encode
from meshpar.record import record
from meshpar.testing import RankError, mesh_for, run_ranks

UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # the message names the case; shrinking would take minutes


@settings(max_examples=40, deadline=None, phases=UNSHRUNK)
@given(batches())
def test_fetch_is_indexing(batch):
    where, world, drawn = batch
    run_ranks(check_cases, world, drawn, where)


@pytest.mark.long
@settings(max_examples=1500, deadline=None, phases=UNSHRUNK)
@given(batches())
def test_fetch_is_indexing_by_the_thousand(batch):
    where, world, drawn = batch
    run_ranks(check_cases, world, drawn, where)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_form_and_mode(dtype):
    """Every combination once, on a halo that wraps and a reversal, so that none depends on the draw."""
    have = chunks(7, 3)
    halo = tuple(take(padded(7, 2, 2, "circular"), a, b + 4) for a, b in have)
    turned = tuple(take(flipped(7), a, b) for a, b in have)
    drawn = [
        Case(have, want, shape, dim, dtype, form, mode, 1.0)
        for want in (halo, turned)
        for shape, dim in (((2, 3, ROWS, 2), 2), ((1, 2, 3, ROWS, 2), 3), ((ROWS,), 0))
        for form in FORMS
        for mode in MODES
    ]
    run_ranks(check_cases, 3, drawn, "world")


# Reports from the field


def halo_case(p, n, lo, hi, mode, dtype=torch.float64):
    have = chunks(n, p)
    want = tuple(take(padded(n, lo, hi, mode), a, b + lo + hi) if b > a else () for a, b in have)
    return Case(have, want, (1, 2, ROWS, 3), 2, dtype, "plain", "grad")


def test_field_8_two_ranks_that_wrap_around():
    """Both neighbours are one peer: one message, and the halos do not arrive swapped."""
    run_ranks(check_cases, 2, [halo_case(2, 8, 1, 1, "circular"), halo_case(2, 5, 2, 1, "circular")], "world")
    run_ranks(check_cases, 1, [halo_case(1, 8, 2, 1, "circular")], "world")


@pytest.mark.parametrize("where", ["data", "domain"])
def test_field_9_and_20_peers_are_ranks_of_the_group(where):
    """On 2x2 the groups are [0, 1] [2, 3] and [0, 2] [1, 3], each with numbers of its own."""
    run_ranks(check_cases, 4, [halo_case(2, 7, 1, 2, mode) for mode in ("constant", "circular")], where)


def alone():
    def forbidden(*_):
        raise AssertionError

    case = halo_case(1, 8, 2, 2, "circular")
    for name in ("batch_isend_irecv", "isend", "irecv"):
        setattr(dist, name, forbidden)
    try:
        x = numbers((1, 2, 8, 3), torch.float64, 0).requires_grad_()
        with record() as log:
            assert fetch(x, 2, ((0, 8),), ((0, 8),), dist.group.WORLD) is x
            fetch(x, 2, case.have, case.want, dist.group.WORLD).sum().backward()
    finally:
        for name in ("batch_isend_irecv", "isend", "irecv"):
            setattr(dist, name, getattr(dist.distributed_c10d, name))
    assert x.grad is not None
    return log.num_bytes(), sum(entry.num_messages for entry in log.entries)


def test_field_12_one_rank_sends_nothing():
    assert run_ranks(alone, 1) == [(0, 0)]


def test_field_16_over_several_hops():
    """k7 p3 with 2 rows a rank over 4, dilation 8 on 4 rows, and 5 rows over 4 (FIELD 17)."""
    drawn = [halo_case(4, 8, 3, 3, mode) for mode in ("constant", "reflect", "replicate", "circular")]
    drawn += [halo_case(4, 4, 8, 8, "constant"), halo_case(4, 5, 4, 4, "reflect"), halo_case(4, 1, 1, 1, "circular")]
    run_ranks(check_cases, 4, drawn, "world")


def hurry(rounds):
    """Do exchanges back to back, ranks at different speeds, and look at the results only after the last."""
    rank, p = dist.get_rank(), dist.get_world_size()
    have = chunks(3 * p, p)
    pace = random.Random(rank)
    results = []
    for i in range(rounds):
        lo, hi = i % 3, (i // 3) % 3
        want = tuple(take(padded(3 * p, lo, hi, "circular"), a, b + lo + hi) for a, b in have)
        whole = torch.arange(3 * p * 500, dtype=torch.float64).view(3 * p, 500) + 1000 * i
        x = whole[have[rank][0] : have[rank][1]].clone().requires_grad_()
        y = fetch(x, 0, have, want, dist.group.WORLD)
        results.append((y, picked(whole, 0, want[rank], 0.0), x))
        if pace.random() < 0.2:
            time.sleep(0.002)
    assert all(torch.equal(y, expected) for y, expected, _ in results)
    for y, _, _ in reversed(results):
        y.sum().backward()
    for i, (_, _, x) in enumerate(results):
        assert x.grad.sum() == 500 * (3 + i % 3 + (i // 3) % 3), f"round {i}"


def test_field_21_exchanges_back_to_back():
    run_ranks(hurry, 4, 40)


# Refusals


def refused(have, want, rows, dim):
    group = dist.group.WORLD
    x = torch.zeros(rows if rows is not None else have[group.rank()][1] - have[group.rank()][0], 2)
    with record() as log, pytest.raises(ShardingError) as caught:
        fetch(x, dim, have, want, group, op="conv2d")
    total = torch.ones(1)
    dist.all_reduce(total)  # all ranks are here, in step
    assert total == group.size()
    return str(caught.value), len(log.entries)


@pytest.mark.parametrize(
    ("have", "want", "rows", "dim", "says"),
    [
        (((0, 3), (2, 5)), ((0, 3), (2, 5)), None, 0, "ranks 0 and 1 both have rows"),
        (((0, 3), (3, 5)), ((0, 4), (3, 6)), None, 0, "rank 1 wants"),
        (((0, 2), (3, 5)), ((0, 2), (2, 4)), None, 0, "belong to nobody"),
        (((0, 3), (3, 5), (5, 6)), ((0, 3), (3, 5), (5, 6)), None, 0, "rows of 3 ranks, for a group of 2"),
        (((0, 3),), ((0, 3),), 3, 0, "rows of 1 ranks, for a group of 2"),
        (((0, 3), (3, 5)), ((0, 3),), None, 0, "2 ranks have rows, 1 want some"),
        (((0, 3), (3, 5)), ((0, 4), (3, 5)), 7, 0, "7 rows along dim 0"),
        (((0, 3), (3, 5)), ((0, 3), (3, 5)), 7, 0, "7 rows along dim 0"),
        (((0, 3), (3, 5)), ((0, 4), (3, 5)), None, 2, "dim 2, for a tensor of 2 dims"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_on_all_ranks_before_any_message(have, want, rows, dim, says):
    for text, num_entries in run_ranks(refused, 2, have, want, rows, dim):
        assert says in text
        assert num_entries == 0


# Derivatives by differences


def by_differences(dtype_name):
    """Check first and second derivatives of a curved function of all ranks' pieces against central differences."""
    dtype = getattr(torch, dtype_name)
    group = dist.group.WORLD
    me = group.rank()
    have = ((0, 2), (2, 2), (2, 5))
    want = (((4, 2, -1), (FILL, 1, 0), (0, 2, 1)), ((1, 3, 1), (2, 2, 0)), ((0, 3, 2),))
    a, b = have[me]
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(2, 5, dtype=dtype, generator=generator)
    v = torch.randn(2, 5, dtype=dtype, generator=generator)

    def summed(value):
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item()

    def energy(x):
        y = fetch(x, 1, have, want, group)
        return (y.abs() ** 3).sum() + (y * y * (1 + me)).sum().real

    def slope(x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(energy(x), x, create_graph=True)
        return x, (g.conj() * v[:, a:b]).sum().real

    x = whole[:, a:b].clone().requires_grad_()
    (g,) = torch.autograd.grad(energy(x), x)
    leaf, value = slope(x)
    (h,) = torch.autograd.grad(value, leaf)
    eps = 1e-6
    for i in range(2):
        for row in range(5):
            for unit in (1.0, 1.0j) if dtype.is_complex else (1.0,):
                found = []
                for sign in (1, -1):
                    moved = whole.clone()
                    moved[i, row] += sign * eps * unit
                    piece = moved[:, a:b]
                    found.append((summed(energy(piece)), summed(slope(piece)[1])))
                for k, grad in enumerate((g, h)):
                    mine = (grad[i, row - a] * torch.tensor(unit, dtype=dtype).conj()).real if a <= row < b else 0.0
                    exact = summed(torch.as_tensor(mine, dtype=torch.float64))
                    numeric = (found[0][k] - found[1][k]) / (2 * eps)
                    assert abs(exact - numeric) <= 1e-6 * max(1.0, abs(exact)), (k, i, row, unit, exact, numeric)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_equal_central_differences(dtype):
    run_ranks(by_differences, 3, dtype)


# The ops as torch sees them


def opchecked(p):
    group = dist.group.WORLD
    me = group.rank()
    have = chunks(5, p)
    want = tuple(take(padded(5, 1, 2, "constant"), a, b + 3) for a, b in have)
    flat = [list(numbers) for numbers in encode(have, want)]
    rows = have[me][1] - have[me][0]
    x = torch.randn(2, 3, rows, 2, dtype=torch.float64)
    g = torch.randn(2, 3, rows + 3, 2, dtype=torch.float64)
    for form in (torch.contiguous_format, torch.channels_last):
        like = [t.contiguous(memory_format=form).requires_grad_() for t in (x, g)]
        request = (2, *flat, group.group_name, "domain", "|probe")
        torch.library.opcheck(torch.ops.meshpar.fetch.default, (like[0], *request, 0.0, False))
        torch.library.opcheck(torch.ops.meshpar.fetch_transpose.default, (like[1], *request))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("p", [1, pytest.param(2, marks=pytest.mark.long)])
def test_opcheck(p):
    run_ranks(opchecked, p, p)


def empty_channels_last():
    """A rank without rows keeps the format for the rows that it receives, which its neighbours have."""
    me = dist.get_rank()
    whole = torch.randn(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    x = whole[:, :, :0] if me else whole
    y = fetch(x, 2, ((0, 2), (2, 2)), ((0, 1), (1, 2)), dist.group.WORLD)
    return y.is_contiguous(memory_format=torch.channels_last) or y.stride()


def test_a_rank_without_rows_keeps_channels_last():
    assert run_ranks(empty_channels_last, 2) == [True, True]


def own_fault():
    x = torch.zeros(2, dtype=torch.int32)
    have, want = ((0, 2), (2, 4)), (((FILL, 1, 0), (0, 3, 1)), ((1, 3, 1),))
    fetch(x, 0, have, want, dist.group.WORLD, fill=float("inf"))


def test_a_fault_of_this_rank_is_not_said_to_be_a_lost_peer():
    """Infinity does not fit an integer: torch's own error comes out, not the tale of a dead rank."""
    with pytest.raises(RankError) as caught:
        run_ranks(own_fault, 2)
    assert "cannot be converted" in str(caught.value.exceptions[0])
    assert "lost a peer" not in str(caught.value.exceptions[0])


def compiled_by_its_user() -> tuple[list[float], list[float]]:
    group = mesh_for("data=1,domain=2")["domain"].get_group()

    def wider(x: torch.Tensor) -> torch.Tensor:
        return fetch(x * 2, 0, ((0, 4), (4, 8)), ((0, 5), (3, 8)), group) + 1

    x = (torch.arange(4.0) + 4 * group.rank()).requires_grad_()
    y = torch.compile(wider, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert x.grad is not None
    return y.tolist(), x.grad.tolist()


@pytest.mark.slow
def test_it_is_part_of_a_graph_that_its_user_compiles() -> None:
    first, second = run_ranks(compiled_by_its_user, 2, timeout_s=200)
    assert first == ([1.0, 3.0, 5.0, 7.0, 9.0], [2.0, 2.0, 2.0, 4.0])
    assert second == ([7.0, 9.0, 11.0, 13.0, 15.0], [4.0, 2.0, 2.0, 2.0])
