"""A case of `fetch`, both ways, against indexing of whole tensors; and how such cases are drawn."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from meshpar.exchange import fetch
from meshpar.intervals import FILL, chunks, expand, rolled, take
from meshpar.record import record
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
