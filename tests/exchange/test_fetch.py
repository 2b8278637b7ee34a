"""`fetch` and its transpose on 1 to 4 real ranks, against indexing of the whole tensor.

All numbers are small integers, so that sums are exact in every dtype and every comparison is an equality.
"""

import contextlib
import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from meshpar.errors import ShardingError
from meshpar.exchange import fetch
from meshpar.intervals import FILL, chunks, expand, flipped, padded, rolled, take
from meshpar.plans import encode
from meshpar.record import record
from meshpar.testing import RankError, run_ranks
from meshpar.testing.meshes import mesh_for

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
FORMS = ("plain", "channels_last", "transposed", "strided", "conj", "neg")
MODES = ("grad", "no_grad", "inference")
ROWS = 12


@dataclass(frozen=True)
class Case:
    """Hold one request; the tensor has `shape`, whose `dim` has ROWS rows in all."""

    have: tuple
    want: tuple
    shape: tuple
    dim: int
    dtype: torch.dtype
    form: str
    mode: str
    fill: float = 0.0
    seed: int = 0


# The two sides


def numbers(shape, dtype, seed):
    """Draw small integers, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(-2, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(real.double(), torch.randint(-2, 3, shape, generator=generator).double()).to(dtype)
    return (real.abs() if dtype == torch.uint8 else real).to(dtype)


def dressed(x, form):
    """Give x with other strides or a lazy conjugation, of equal value."""
    if form == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if form == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "strided":
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    if form == "conj" and x.is_complex():
        return x.conj().resolve_conj().conj()
    if form == "neg" and x.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    return x


def picked(whole, dim, rows, fill):
    """Index the whole: the obvious form of `fetch`."""
    index = torch.tensor(expand(rows), dtype=torch.int64)
    out = whole.index_select(dim, index.clamp(min=0))
    pads = [slice(None)] * dim + [index == FILL]
    out[tuple(pads)] = torch.tensor(fill).to(out.dtype)
    return out


def spread(grads, dim, want, shape):
    """Add the gradients of all ranks to the rows they came from: the obvious form of the transpose."""
    total = torch.zeros(shape, dtype=grads[0].dtype)
    for g, rows in zip(grads, want, strict=True):
        for at, row in enumerate(expand(rows)):
            if row != FILL:
                total.select(dim, row).add_(g.select(dim, at))
    return total


def traffic(have, want, me):
    """Count the rows that this rank must send forward and backward, and the peers that it sends to."""

    def from_to(owner, asker):
        return len({row for row in expand(want[asker]) if have[owner][0] <= row < have[owner][1]})

    others = [rank for rank in range(len(have)) if rank != me]
    out = [from_to(me, other) for other in others]
    back = [from_to(other, me) for other in others]
    return sum(out), sum(n > 0 for n in out), sum(back), sum(n > 0 for n in back)


def check_case(case, group, salt=0):
    """Run one case on this rank; `salt` gives every group its own numbers."""
    me, p = group.rank(), group.size()
    whole = numbers(case.shape, case.dtype, case.seed + salt)
    a, b = case.have[me]
    x = dressed(whole.narrow(case.dim, a, b - a).clone(), case.form)
    differentiable = case.mode == "grad" and case.dtype in FLOATS
    mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(case.mode, contextlib.nullcontext)
    if differentiable:
        # a leaf cannot be a lazy view: make the leaf, then the view
        leaf = whole.narrow(case.dim, a, b - a).clone().requires_grad_()
        x = dressed(leaf, case.form)
    with record() as log, mode():
        y = fetch(x, case.dim - len(case.shape), case.have, case.want, group, axis="space", fill=case.fill, op="probe")
    expected = picked(whole, case.dim, case.want[me], case.fill)
    assert y.dtype == case.dtype
    assert torch.equal(y, expected), f"rows of rank {me}"
    if case.form == "channels_last" and x.dim() in (4, 5) and x.numel() and x.shape[1] > 1 and x.shape[-1] > 1:
        form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        assert y.is_contiguous(memory_format=form), "the memory format is lost"
    sent, messages, sent_back, messages_back = traffic(case.have, case.want, me)
    row_bytes = whole.narrow(case.dim, 0, 1).numel() * whole.element_size()
    assert log.num_bytes() == sent * row_bytes
    assert sum(entry.num_messages for entry in log.entries) == (messages if row_bytes else 0)
    assert {(e.op, e.axis, e.kind, e.backward) for e in log.entries} <= {("probe", "space", "halo", False)}
    if not differentiable:
        assert not y.requires_grad
        return
    grads = [
        numbers(picked(whole, case.dim, rows, 0.0).shape, case.dtype, 100 + rank) for rank, rows in enumerate(case.want)
    ]
    g = dressed(grads[me], case.form).detach().requires_grad_()
    with record() as log:
        (gx,) = torch.autograd.grad(y, leaf, g, create_graph=True)
    total = spread([v.detach() for v in grads], case.dim, case.want, case.shape)
    assert torch.equal(gx, total.narrow(case.dim, a, b - a)), f"gradient of rank {me}"
    assert log.num_bytes(backward=True) == log.num_bytes() == sent_back * row_bytes
    assert sum(entry.num_messages for entry in log.entries) == (messages_back if row_bytes else 0)
    directions = numbers(case.shape, case.dtype, 200)
    v = directions.narrow(case.dim, a, b - a).clone().requires_grad_()
    with record() as log:
        (gg,) = torch.autograd.grad(gx, g, v, create_graph=True)
    assert torch.equal(gg, picked(directions, case.dim, case.want[me], 0.0)), f"second derivative of rank {me}"
    assert log.num_bytes(backward=True) == log.num_bytes() == sent * row_bytes
    (ggv,) = torch.autograd.grad(gg, v, g.detach())
    assert torch.equal(ggv, total.narrow(case.dim, a, b - a)), f"third derivative of rank {me}"
    # the dot product of the two sides, over all ranks: <fetch x, g> = <x, transpose g>
    dots = torch.stack([(picked(whole, case.dim, case.want[me], 0.0).conj() * g).sum(), (x.conj() * gx).sum()])
    dots = torch.view_as_real(dots.to(torch.complex128).detach())
    dist.all_reduce(dots, group=group)
    assert torch.equal(dots[0], dots[1])
    assert p == len(case.have)


def check_cases(cases, where):
    if where == "world":
        group, salt = dist.group.WORLD, 0
    else:
        mesh = mesh_for("data=2,domain=2")
        group, salt = mesh.get_group(where), 10 * mesh.get_local_rank({"data": "domain", "domain": "data"}[where])
    for case in cases:
        try:
            check_case(case, group, salt)
        except AssertionError as error:
            msg = f"{error}\nof {case}"
            raise AssertionError(msg) from error


# What is drawn


@st.composite
def haves(draw, p):
    """Draw who has what: canonical, or disjoint pieces in any order, some empty, some rows nobody's."""
    if draw(st.booleans()):
        return chunks(draw(st.integers(0, ROWS)), p)
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=2 * p, max_size=2 * p)))
    return tuple(draw(st.permutations([(cuts[2 * i], cuts[2 * i + 1]) for i in range(p)])))


@st.composite
def wants(draw, have):
    """Draw the rows of one rank: runs of any direction and step, repeated rows, padding, wrap-around."""
    owned = sorted(row for piece in have for row in range(*piece))
    kind = draw(st.sampled_from(("runs", "runs", "interval", "wrap", "nothing")))
    n = len(owned)
    if kind == "nothing":
        return ()
    if kind != "runs" and owned == list(range(n)) and n:
        a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        return take(rolled(n, draw(st.integers(0, n))), a, b) if kind == "wrap" else take(((0, n, 1),), a, b)
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        num, step = draw(st.integers(1, 6)), draw(st.integers(-3, 3))
        if not owned or draw(st.integers(0, 5)) == 0:
            rows.append((FILL, num, 0))
            continue
        first = draw(st.sampled_from(owned))
        while any(first + i * step not in owned for i in range(num)):
            num -= 1
        rows.append((first, num, step))
    return tuple(rows)


@st.composite
def cases(draw, p):
    have = draw(haves(p))
    num_dims = draw(st.sampled_from((1, 2, 3, 4, 4, 5)))
    dim = draw(st.integers(0, num_dims - 1))
    shape = [draw(st.sampled_from((1, 2, 3, 2, 3, 0))) for _ in range(num_dims)]
    shape[dim] = ROWS
    dtype = draw(st.sampled_from(DTYPES))
    fill = float(draw(st.integers(0, 1)))
    return Case(
        have,
        tuple(draw(wants(have)) for _ in range(p)),
        tuple(shape),
        dim,
        dtype,
        draw(st.sampled_from(FORMS)),
        draw(st.sampled_from(MODES)) if dtype not in FLOATS else draw(st.sampled_from(("grad", "grad", *MODES))),
        fill,
        draw(st.integers(0, 9)),
    )


PLACES = (("world", 1, 1), ("world", 2, 2), ("world", 3, 3), ("world", 4, 4), ("data", 4, 2), ("domain", 4, 2))


@st.composite
def batches(draw):
    where, world, p = draw(st.sampled_from(PLACES))
    return where, world, draw(st.lists(cases(p), min_size=1, max_size=8))


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
