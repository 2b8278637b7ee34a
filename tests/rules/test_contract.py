"""matmul, einsum and their kin: operands sharded along batch, free and summed dims, one or both, evenly or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, real, run, whole
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from meshpar import pieces
from meshpar.batch import shard
from meshpar.record import record
from meshpar.rules.contract import Operand, make_plan
from meshpar.scattering import all_rows, scattered
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

# explicit cases


def _einsum(equation: str) -> Callable[..., Tensor]:
    return partial(torch.einsum, equation)


def _matmul_cases(mesh: str) -> Iterator[Case]:
    a, b = real(3, 5, 6), real(3, 6, 7, salt=1)
    for left in ("data domain _", "data _ domain", "domain _ _", "_ domain _", "_ _ domain", "_ _ _"):
        for right in ("data domain _", "data _ domain", "_ domain _", "_ _ domain", "domain _ _"):
            yield Case(f"{left} @ {right}", torch.matmul, (a, b), (left, right))
        yield Case(f"{left} @ weight", lambda x, w: x @ w, (a,), (left,), (b[0],))
        yield Case(f"weight @ {left}", lambda x, w: w @ x, (a,), (left,), (real(4, 5, salt=2),))
        yield Case(f"{left} @ vector", torch.matmul, (a,), (left,), (real(6, salt=3),))
        yield Case(f"vector @ {left}", lambda x, v: v.matmul(x), (a,), (left,), (real(5, salt=3),))
        yield Case(f"{left} bmm", torch.bmm, (a, b), (left, "data _ domain"))
        yield Case(f"{left} itself", lambda x: x @ x.transpose(1, 2), (a,), (left,))
    yield Case("broadcast batch", torch.matmul, (real(4, 1, 5, 6), real(3, 6, 2)), ("data _ domain _", "domain _ _"))
    yield Case("batch of one", torch.matmul, (real(1, 5, 6), b), ("domain _ _", "data _ _"))
    yield Case("batch of one, rows", torch.matmul, (real(1, 5, 6), b), ("_ domain _", "domain _ _"))
    yield Case("linear attention", _linear_attention, (real(2, 2, 24, 3), real(2, 2, 24, 3)), ("data _ domain _",) * 2)
    yield Case("rmatmul", lambda x, w: x.__rmatmul__(w), (a,), ("data domain _",), (real(2, 5),))
    yield Case("attention", _attention, (real(2, 2, 9, 4), real(2, 2, 5, 4, salt=4)), ("data _ domain _",) * 2)


def _linear_attention(q: Tensor, k: Tensor) -> Tensor:
    return q @ (k.transpose(-1, -2) @ k)


def _attention(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ k


def _small_cases(mesh: str) -> Iterator[Case]:
    m, n, v, u = real(5, 6), real(6, 7, salt=1), real(6, salt=2), real(5, salt=3)
    for rows in ("domain _", "_ domain", "data domain", "domain data"):
        yield Case(f"mm {rows}", torch.mm, (m, n), (rows, "_ domain"))
        yield Case(f"mm named {rows}", lambda x, w: torch.mm(input=x, mat2=w), (m,), (rows,), (n,))
        yield Case(f"mv {rows}", torch.mv, (m, v), (rows, "domain"))
        yield Case(f"inner {rows}", torch.inner, (m, n.T.contiguous()), (rows, "domain _"))
        yield Case(f"kron {rows}", torch.kron, (m, real(2, 3)), (rows, "_ _"))
        yield Case(f"addmm {rows}", partial(torch.addmm, beta=0.5, alpha=2.0), (real(7), m, n), ("_", rows, "domain _"))
        yield Case(f"addmm weights {rows}", lambda x, b, w: b.addmm(x, w), (m,), (rows,), (real(7), n))
        yield Case(f"addmm beta 0 {rows}", lambda x, b, w: torch.addmm(b, x, w, beta=0), (m,), (rows,), (real(7), n))
        yield Case(f"addmv {rows}", torch.addmv, (u, m, v), ("domain", rows, "domain"))
        yield Case(f"addr {rows}", torch.addr, (m, u, v), (rows, "domain", "_"))
        yield Case(f"tensordot {rows}", partial(torch.tensordot, dims=1), (m, n), (rows, "domain _"))
        yield Case(f"tensordot lists {rows}", partial(torch.tensordot, dims=([1, 0], [0, 1])), (m, m.T), (rows, rows))
        yield Case(f"multi_dot {rows}", lambda *x: torch.linalg.multi_dot(x), (u, m, n, n.T), ("_", rows, rows, rows))
        yield Case(f"chain_matmul {rows}", _chain, (m, n), (rows, "_ domain"), (real(7, 2),))
        yield Case(f"vecdot {rows}", torch.linalg.vecdot, (m, v), (rows, "domain"))
        yield Case(f"vecdot 0 {rows}", partial(torch.linalg.vecdot, dim=0), (m, m + 1), (rows, "_ domain"))
    for where in ("domain", "data", "_"):
        yield Case(f"dot {where}", torch.dot, (v, v + 1), (where, "domain"))
        yield Case(f"vdot {where}", torch.vdot, (torch.complex(v, v + 1), torch.complex(v, v - 1)), (where, "domain"))
        yield Case(f"outer {where}", torch.outer, (u, v), (where, "domain"))
        yield Case(f"ger {where}", lambda x, w: x.ger(w), (u,), (where,), (v,))
        yield Case(f"inner of a scalar {where}", torch.inner, (u,), (where,), (real()[()],))
    batch, other = real(3, 4, 5), real(3, 5, 2, salt=5)
    for left in ("data domain _", "domain _ _", "_ _ domain"):
        yield Case(f"addbmm {left}", torch.addbmm, (real(4, 2), batch, other), ("domain _", left, "_ _ domain"))
        yield Case(f"baddbmm {left}", torch.baddbmm, (real(3, 4, 2), batch, other), ("_ domain _", left, "domain _ _"))


def _chain(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.chain_matmul(x, y, w)


def _einsum_cases(mesh: str) -> Iterator[Case]:
    x, y = real(2, 3, 5, 6), real(2, 3, 5, 4, salt=1)
    layouts = ("data _ domain _", "data domain _ _", "data _ _ domain", "_ _ domain data")
    for left in layouts:
        yield Case(f"legendre {left}", _einsum("bchw,hlm->bclm"), (x,), (left,), (real(5, 4, 3),))
        yield Case(f"longitude {left}", _einsum("bchw,wm->bchm"), (x,), (left,), (real(6, 5),))
        yield Case(f"channels {left}", _einsum("bchw,oc->bohw"), (x,), (left,), (real(4, 3),))
        yield Case(f"all of it {left}", _einsum("bchw,bchw->"), (x, x + 1), (left, left))
        yield Case(f"ellipsis {left}", _einsum("...w,wk->...k"), (x,), (left,), (real(6, 3),))
        yield Case(f"implicit {left}", _einsum("bchw,wk"), (x,), (left,), (real(6, 3),))
        yield Case(f"alone {left}", _einsum("bchw->wb"), (x,), (left,))
        yield Case(f"permuted {left}", _einsum("b...w->w...b"), (x,), (left,))
        yield Case(f"three {left}", _einsum("bchw,hi,wj->bcij"), (x,), (left,), (real(5, 4), real(6, 3)))
        yield Case(f"weights first {left}", _weights_first, (x,), (left,), (real(5, 4), real(6, 3)))
        yield Case(f"sublists {left}", _sublists, (x,), (left,), (real(6, 3),))
        yield Case(f"broadcast {left}", _einsum("bchw,bcxw->bhx"), (x, real(2, 1, 4, 1)), (left, "data _ domain _"))
        for right in layouts:
            yield Case(f"{left}, {right}", _einsum("bchw,bchv->bwv"), (x, y), (left, right))
            yield Case(f"batch {left}, {right}", _einsum("bchw,bchv->bchwv"), (x, y), (left, right))
    square = real(5, 5, 3)
    yield Case("diagonal", _einsum("iij->ij"), (square,), ("_ _ domain",))
    yield Case("diagonal weight", _einsum("ij,jj->ij"), (real(4, 5),), ("data domain",), (real(5, 5),))
    z, w = torch.complex(real(2, 3, 5, 4), real(2, 3, 5, 4, salt=1)), torch.complex(real(3, 6, 5, 4), real(3, 6, 5, 4))
    for left in layouts:
        yield Case(f"fno {left}", _einsum("bixy,ioxy->boxy"), (z,), (left,), (w,))
    yield Case(
        "sht complex",
        _einsum("bchm,mlh->bclm"),
        (z,),
        ("data _ domain _",),
        (torch.complex(real(4, 6, 5), real(4, 6, 5)),),
    )
    yield Case("none left", _einsum("bchw,hlm->bclm"), (real(2, 3, 0, 6),), ("data _ domain _",), (real(0, 4, 3),))


def _weights_first(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hi,wj,bchw->bcij", u, v, x)


def _sublists(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum(x, [..., 3], w, [3, 7], [..., 7])


def _other_cases(mesh: str) -> Iterator[Case]:
    p, q = real(2, 5, 3), real(2, 7, 3, salt=1)
    for left in ("data domain _", "_ _ domain", "domain _ _"):
        for right in ("data domain _", "_ _ domain"):
            for norm in (1.0, 2.0, 3.0, math.inf):
                yield Case(f"cdist {left} {right} {norm}", partial(torch.cdist, p=norm), (p, q), (left, right))
        yield Case(f"cdist of many {left}", torch.cdist, (real(2, 30, 3), q), (left, "data domain _"), tolerance=1e-9)
        yield Case(f"cdist weight {left}", torch.cdist, (p,), (left,), (q[0],))
        w, b = real(4, 3, 6), real(4)
        for right in ("data domain _", "_ _ domain", "_ _ _"):
            yield Case(f"bilinear {left} {right}", F.bilinear, (p, real(2, 5, 6)), (left, right), (w, b))
        yield Case(
            f"bilinear, one plain {left}", lambda x, y, w: F.bilinear(x, y, w), (p,), (left,), (real(2, 5, 6), w)
        )
    for left in ("data _ domain", "_ _ domain", "_ domain data", "domain _ data"):
        x, w, b = real(2, 5, 6), real(7, 6), real(7)
        yield Case(f"linear {left}", F.linear, (x,), (left,), (w, b))
        yield Case(f"linear, one feature {left}", F.linear, (x,), (left,), (w[0],))
        yield Case(f"linear, sharded weight {left}", F.linear, (x, w, b), (left, "domain _", "domain"))
        yield Case(f"linear, plain input {left}", lambda w, x: F.linear(x, w), (w,), ("domain _",), (x,))


GROUPS = {
    "matmul": (_matmul_cases, 60),
    "small": (_small_cases, 60),
    "einsum": (_einsum_cases, 80),
    "other": (_other_cases, 50),
}


@pytest.mark.parametrize("group", GROUPS)
def test_products(group: str) -> None:
    build, at_least = GROUPS[group]
    run(build, "data=1,domain=3" if group == "small" else "data=2,domain=2", at_least=at_least)


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_products_on_every_mesh(group: str, mesh: str) -> None:
    build, at_least = GROUPS[group]
    run(build, mesh, at_least=at_least)


def _trace(mesh: str) -> Iterator[Case]:
    yield Case("trace", _einsum("iij->j"), (real(5, 5, 3),), ("domain _ _",), gathers=True)


def test_a_sharded_diagonal_is_gathered_and_right() -> None:
    run(_trace, "data=1,domain=2")


# what is sent, and where the result lies


def _sent(
    func: Callable[..., Tensor], *operands: Any, mesh: str = "data=1,domain=4"
) -> tuple[Any, list[Any], list[Any]]:
    """Run on activations (tensor and layout) and weights; give the output, and kind and numbers sent each way."""
    the_mesh = mesh_for(mesh)
    args = [
        shard(x[0], the_mesh, x[1]).requires_grad_() if isinstance(x, tuple) else x.clone().requires_grad_()
        for x in operands
    ]
    with record() as log, spmd(on_gather="error"):
        out = func(*args)
        out.sum().backward()
    found = [
        [(e.kind, e.num_bytes / 8) for e in log.select(backward=way) if e.op != "Tensor.sum" and e.op != "sum"]
        for way in (False, True)
    ]
    return out, found[0], found[1]


def _spherical_harmonics() -> None:
    """Field: a contraction over latitude ends scattered over the degrees, as in torch-harmonics."""
    legendre = _einsum("bchw,hl->bclw")
    # With channels enough, they are sharded in between: there and back, 48 numbers each, where sums would need 192.
    out, forward, backward = _sent(legendre, (real(1, 8, 8, 4), "_ _ domain _"), real(8, 8))
    assert out.placements[1] == Shard(2)
    assert forward == backward == [("redistribute", 48.0)] * 2
    # With few, the parts of the sum are scattered: of 48 numbers, 36 go to others, and 3 x 12 come back.
    out, forward, backward = _sent(legendre, (real(1, 3, 8, 2), "_ _ domain _"), real(8, 8))
    assert out.placements[1] == Shard(2)
    assert forward == backward == [("reduction", 36.0)]
    out, forward, _ = _sent(torch.matmul, (real(3, 1, 8), "_ _ domain"), real(8, 8))
    assert out.placements[1] == Shard(2)
    assert forward == [("reduction", 18.0)]
    out, forward, _ = _sent(F.linear, (real(3, 1, 8), "_ _ domain"), real(8, 8), real(8))
    assert out.placements[1] == Shard(2)
    assert forward == [("reduction", 18.0)]


def test_a_sum_over_latitude_ends_scattered() -> None:
    run_ranks(_spherical_harmonics, 4)


def _ways() -> None:
    # Nothing is sent where operands lie alike, nor for weights, cut or whole.
    for func, operands in (
        (torch.matmul, ((real(8, 3, 5), "domain _ _"), (real(8, 5, 2), "domain _ _"))),
        (_einsum("bixy,ioxy->boxy"), ((real(2, 3, 8, 5), "_ _ domain _"), real(3, 4, 8, 5))),
        (torch.matmul, ((real(2, 8, 5), "_ domain _"), real(5, 3))),
        (torch.outer, ((real(8), "domain"), real(5))),
    ):
        out, forward, backward = _sent(func, *operands)
        assert any(p.is_shard() for p in out.placements)
        assert forward == backward == []
    # Rows that meet all rows: the smaller operand goes round, and its gradient comes home.
    scores = _einsum("nqd,nkd->nqk")
    out, forward, backward = _sent(scores, (real(1, 16, 3), "_ domain _"), (real(1, 8, 3), "_ domain _"))
    assert out.placements[1] == Shard(1)
    assert forward == backward == [("redistribute", 3 * 6.0)]
    out, forward, backward = _sent(scores, (real(1, 8, 3), "_ domain _"), (real(1, 16, 3), "_ domain _"))
    assert out.placements[1] == Shard(2)
    assert forward == backward == [("redistribute", 3 * 6.0)]
    # Operands that lie differently: one is transposed.
    out, forward, backward = _sent(torch.bmm, (real(4, 4, 9), "domain _ _"), (real(4, 9, 4), "_ domain _"))
    assert out.placements[1] == Shard(0)
    assert [(kind, round(num)) for kind, num in forward] == [("redistribute", _blocks(9, 4, 4))]
    # A small state stays whole: one all-reduce, none backward.
    out, forward, backward = _sent(_einsum("nd,ne->de"), (real(256, 2), "domain _"), (real(256, 2), "domain _"))
    assert out.placements[1].is_replicate()
    assert forward == [("reduction", 6.0)]
    assert backward == []


def _blocks(rows: int, others: int, p: int) -> int:
    """Count what this rank sends of (others, rows, others) whose rows change for another dim, of `others` rows."""
    each = -(-rows // p)
    mine = min(each, max(rows - each * torch.distributed.get_rank(), 0))
    return mine * others * (others - -(-others // p))


def test_what_is_sent_is_the_least() -> None:
    run_ranks(_ways, 4)


def _one_rank() -> None:
    for layout in ("data domain _", "data _ domain"):
        out, forward, backward = _sent(torch.matmul, (real(2, 3, 5), layout), real(5, 4), mesh="data=1")
        assert forward == backward == []
        assert out.placements[0] == Shard(0)


def test_axes_of_one_rank_send_nothing() -> None:
    run_ranks(_one_rank, 1)


def _plans() -> None:
    x = Operand(("b", "h"), (2, 16), (None, 1), 8)
    plan = make_plan((1, 4), (False, True), x, Operand(("h", "l"), (16, 16), (None, None), 8), ("b", "l"))
    assert plan.sums == ("", "whole")  # the tensor axis: channels end whole


def test_plans_are_pure() -> None:
    _plans()


# the two custom ops


def _both_ways(rows: int) -> None:
    mesh = mesh_for("data=1,domain=4")
    rank = mesh.get_local_rank("domain")
    parts = [real(2, rows, 3, salt=r) for r in range(4)]
    a, b = shard(parts[0], mesh, "_ domain _").to_local().shape[1], 0
    x = parts[rank].clone().requires_grad_()
    with record() as log:
        mine = scattered(x, mesh, 1, 1, "op")
        full = all_rows(mine * mine, mesh, 1, 1, rows, "op")
        (g,) = torch.autograd.grad((full * full).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert mine.shape[1] == a + b
    torch.testing.assert_close(full, total**2, rtol=0, atol=1e-12)
    # Each of the 4 ranks sums what it has of the same rows.
    torch.testing.assert_close(g, 4 * 4 * total**3, rtol=0, atol=1e-9)
    torch.testing.assert_close(h, 4 * 48 * total**2, rtol=0, atol=1e-9)
    widths = [min(-(-rows // 4), max(rows - r * -(-rows // 4), 0)) for r in range(4)]
    sent = 8 * 6 * (rows - widths[rank])
    assert log.select(kind="reduction", backward=False)[0].num_bytes == sent
    assert log.select(kind="redistribute", backward=False)[0].num_bytes == 8 * 6 * 3 * widths[rank]
    for dtype in (torch.bfloat16, torch.complex64, torch.int32):
        piece = scattered(torch.ones(rows, dtype=dtype), mesh, 1, 0, "op")
        assert piece.dtype == dtype
        assert piece.tolist() == [4] * widths[rank]
    assert torch.equal(scattered(parts[rank], mesh, 1, 1, "op"), mine)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_scattered_sums_and_their_transpose(rows: int) -> None:
    run_ranks(_both_ways, 4, rows)


# errors, in-place and out=, types, layouts that one string cannot say


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, v = shard(real(3, 5, 6), mesh, "data domain _"), shard(real(6), mesh, "domain")
    m = shard(real(5, 6), mesh, "domain _")
    ones = partial(torch.ones, dtype=torch.float64)  # random numbers would be broadcast in the mode
    wrong: list[Callable[[], Any]] = [
        lambda: x @ ones(5, 2),
        lambda: torch.mm(x, ones(6, 2)),
        lambda: torch.bmm(x, ones(2, 6, 2)),
        lambda: torch.dot(v, ones(5)),
        lambda: torch.mv(m, ones(5)),
        lambda: torch.einsum("abc,cd->abe", x, ones(6, 2)),
        lambda: torch.einsum("abc,cd->abd", x, ones(5, 2)),
        lambda: torch.einsum("ab,cd->abd", x, ones(5, 2)),
        lambda: torch.tensordot(x, ones(5, 2), 1),
        lambda: torch.addmm(ones(3), m, ones(6, 2)),
        lambda: m.addmm_(m, ones(6, 2)),
        lambda: torch.cdist(x, ones(3, 5, 5)),
        lambda: F.bilinear(x, ones(3, 5, 2), ones(4, 6, 3)),
        lambda: x @ ones(6, 2).float(),
        lambda: torch.linalg.multi_dot([m, ones(5, 2)]),
    ]
    with record() as log, spmd(on_gather="error"):
        for call in wrong:
            with pytest.raises(RuntimeError):
                call()
    assert log.entries == [], log.summary()


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _in_place(mesh: str) -> Iterator[Case]:
    m, n, v, u = real(5, 6), real(6, 6, salt=1), real(6, salt=2), real(5, salt=3)
    b = real(3, 5, 6)
    for rows in ("domain _", "_ domain", "data domain"):
        yield Case(f"addmm_ {rows}", lambda x, y, w: (x * 1).addmm_(y, w, alpha=2.0), (m, m), (rows, "domain _"), (n,))
        yield Case(f"addr_ {rows}", lambda x, y, w: (x * 1).addr_(y, w, beta=0.5), (m, u), (rows, "domain"), (v,))
        yield Case(f"addmv_ {rows}", lambda x, y, w: (x * 1).addmv_(y, w), (u, m), ("domain", rows), (v,))
        for func in (torch.mm, torch.matmul):
            yield Case(f"out {rows}", partial(_into, func), (m, n), (rows, "domain _"), gradients=False)
        yield Case(f"einsum then += {rows}", _accumulated, (m,), (rows,), (n,))
    yield Case(
        "baddbmm_", lambda x, y, w: (x * 1).baddbmm_(y, w), (b, b), ("domain _ _", "_ domain _"), (real(3, 6, 6),)
    )
    yield Case("addbmm_", lambda x, y, w: (x * 1).addbmm_(y, w), (m, b), ("domain _", "_ domain _"), (real(3, 6, 6),))
    yield Case("out dot", partial(_into, torch.dot), (v, v), ("domain", "_"), gradients=False)
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        few = whole(4, 5, low=-3, high=3, dtype=kind)
        yield Case(f"{kind}", torch.matmul, (few, few.T.contiguous()), ("_ domain", "domain _"), gradients=False)


def _into(func: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    out = x.new_zeros(func(x, y).shape)
    result = func(x, y, out=out)
    assert result is out
    return out


def _accumulated(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y += torch.einsum("ij,jk->ik", x, w)
    return y


def test_in_place_out_and_types() -> None:
    run(_in_place, "data=1,domain=3", at_least=20)


def _lies_right(x: Any, expected: Tensor) -> None:
    # DTensor's own gather gives wrong rows for uneven ones on two axes (torch 2.13).
    piece = pieces.cut(expected.detach(), x.device_mesh, x.placements)
    torch.testing.assert_close(x.to_local().detach(), piece, rtol=0, atol=1e-12)


def _nested_case(rows: int) -> None:
    """Rows that two axes share out, as merged windows are."""
    mesh = mesh_for("data=2,domain=2")
    x, w, y = real(rows, 4, 6), real(6, 3, salt=1), real(rows, 6, 2, salt=2)
    two = (Shard(0), Shard(0), *shard(x, mesh, "_ _ _").placements[2:])
    piece = x.chunk(2)[mesh.get_local_rank("data")] if rows > 1 else x[: 1 - mesh.get_local_rank("data")]
    half = -(-piece.shape[0] // 2)
    piece = piece[half * mesh.get_local_rank("domain") :][:half].clone()
    act = DTensor.from_local(piece, mesh, two, run_check=False, shape=x.shape, stride=x.stride())
    own = w.clone().requires_grad_()
    ref = w.clone().requires_grad_()
    with record() as log, spmd(on_gather="error"):
        out = act @ own
        after = torch.einsum("bij,bjk->bik", act, shard(y, mesh, "data _ _"))
        scores = torch.einsum("bij,cij->bc", act, act)
        summed = torch.einsum("bij,bik->jk", act, act)
    torch.autograd.backward(out, out.detach())
    expected = x @ ref
    expected.backward(expected.detach())
    _lies_right(out, expected)
    _lies_right(after, x @ y)
    _lies_right(scores, torch.einsum("bij,cij->bc", x, x))
    _lies_right(summed, torch.einsum("bij,bik->jk", x, x))
    assert out.placements == two
    assert not log.gathers()
    torch.distributed.all_reduce(own.grad)
    torch.testing.assert_close(own.grad, ref.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", [8, 6])
def test_rows_on_two_axes(rows: int) -> None:
    run_ranks(_nested_case, 4, rows)


def _second_derivative() -> None:
    mesh = mesh_for("data=1,domain=3")
    x, w = real(2, 1, 5), real(5, 4)

    def penalty(a: Tensor, b: Tensor) -> Tensor:
        y = torch.einsum("bch,hl->bcl", a, b)
        return (y * y * y).sum()

    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    (g,) = torch.autograd.grad(penalty(a, b), a, create_graph=True)
    (g * g).sum().backward()
    act, own = shard(x, mesh, "_ _ domain").requires_grad_(), w.clone().requires_grad_()
    with spmd(on_gather="error"):
        (g,) = torch.autograd.grad(penalty(act, own), act, create_graph=True)
        (g * g).sum().backward()
    assert act.grad is not None
    torch.testing.assert_close(act.grad.full_tensor(), a.grad, rtol=0, atol=1e-10)


def test_second_derivative() -> None:
    run_ranks(_second_derivative, 3)


def _autocast() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, w, b = (t.float() for t in (real(2, 4, 6), real(5, 6), real(5)))
    for layout in ("data domain _", "data _ domain"):
        act = shard(x, mesh, layout)
        for func in (
            lambda a: F.linear(a, w, b),
            lambda a: a @ w.T,
            lambda a: torch.einsum("bij,kj->bik", a, w),
            lambda a: torch.addmm(b, a.reshape(8, 6), w.T),
            lambda a: torch.dot(a.reshape(-1), a.reshape(-1)),
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = func(x)
                with spmd(on_gather="allow"):
                    found = func(act)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.full_tensor(), expected, rtol=2e-2, atol=2e-2)


def test_autocast_gives_the_types_of_torch() -> None:
    run_ranks(_autocast, 2)


# drawn cases

AXES = ("data", "domain", "tensor")


@st.composite
def _layouts(draw: st.DrawFn, num_dims: int) -> str:
    tokens = ["_"] * num_dims
    for axis in AXES:
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0 and tokens[dim] == "_":
            tokens[dim] = axis
    return " ".join(tokens)


@st.composite
def _equations(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw letters and sizes of two or three operands, which of them are plain, and where the others lie."""
    sizes = {letter: draw(st.integers(1, 7)) for letter in "abcde"}
    if draw(st.integers(0, 9)) == 0:
        sizes["a"] = 0
    num = draw(st.sampled_from((2, 2, 2, 3)))
    terms = [draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)) for _ in range(num)]
    used = sorted({letter for term in terms for letter in term})
    out = draw(st.lists(st.sampled_from(used), max_size=4, unique=True))
    shapes = [tuple(1 if draw(st.integers(0, 11)) == 0 else sizes[letter] for letter in term) for term in terms]
    layouts = [draw(_layouts(len(term))) for term in terms]
    plain = [i > 0 and draw(st.booleans()) for i in range(num)]
    kind = draw(st.sampled_from((torch.float64, torch.float64, torch.complex128)))
    return ",".join("".join(term) for term in terms) + "->" + "".join(out), shapes, layouts, plain, kind


@st.composite
def _matmuls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw two operands of `matmul`, of 1 to 4 dims, whose batch dims broadcast."""
    sizes = [draw(st.integers(1, 7)) for _ in range(5)]
    dims = [draw(st.integers(1, 4)) for _ in range(2)]
    shapes = []
    for i, n in enumerate(dims):
        batch = [1 if draw(st.integers(0, 3)) == 0 else size for size in sizes[:2]]
        ends = (sizes[2], sizes[3]) if i == 0 else (sizes[3], sizes[4])
        shapes.append((sizes[3],) if n == 1 else (*batch[4 - n :], *ends))
    plain = [False, draw(st.booleans())]
    return "matmul", shapes, [draw(_layouts(n)) for n in dims], plain, torch.float64


@st.composite
def _others(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw the operands of `F.linear` and `cdist`."""
    name = draw(st.sampled_from(("linear", "cdist")))
    rows, other, features = (draw(st.integers(1, 7)) for _ in range(3))
    batch = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 2)))]
    shapes = [(*batch, rows, features), (other, features)]
    plain = [False, draw(st.booleans())]
    return name, shapes, [draw(_layouts(len(shape))) for shape in shapes], plain, torch.float64


def _function(name: str, order: tuple[int, ...]) -> Callable[..., Tensor]:
    known: dict[str, Callable[..., Tensor]] = {"matmul": torch.matmul, "linear": F.linear, "cdist": torch.cdist}
    return partial(_reordered, known.get(name) or _einsum(name), order)


def _reordered(func: Callable[..., Tensor], order: tuple[int, ...], *args: Tensor) -> Tensor:
    """Call with inputs and weights in the order of the operands."""
    return func(*[args[order.index(i)] for i in range(len(order))])


def _drawn(specs: list[tuple[Any, ...]], mesh: str) -> Iterator[Case]:
    for name, shapes, layouts, plain, dtype in specs:
        tensors = [real(*shape, salt=i) for i, shape in enumerate(shapes)]
        if dtype.is_complex:
            tensors = [torch.complex(x, x.flip(0) if x.dim() else x) for x in tensors]
        order = tuple(sorted(range(len(shapes)), key=lambda i: plain[i]))
        inputs = [tensors[i] for i in order if not plain[i]]
        weights = [tensors[i] for i in order if plain[i]]
        label = f"{name} {shapes} {layouts} {plain}"
        own = [layouts[i] for i in order if not plain[i]]
        yield Case(label, _function(name, order), inputs, own, weights, tolerance=1e-11)


@given(specs=st.lists(st.one_of(_equations(), _matmuls(), _others()), min_size=6, max_size=10), at=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_drawn_products_property(specs: list[tuple[Any, ...]], at: int) -> None:
    mesh = (*MESHES, TENSOR)[at]
    run(partial(_drawn, specs), mesh)


@pytest.mark.long
@given(specs=st.lists(st.one_of(_equations(), _matmuls(), _others()), min_size=10, max_size=20), at=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_many_drawn_products_property(specs: list[tuple[Any, ...]], at: int) -> None:
    mesh = (*MESHES, TENSOR)[at]
    run(partial(_drawn, specs), mesh)
