"""Products: what is sent and where the result lies, the custom ops behind, errors, in-place forms, types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from rule_cases import Case, einsum, real, run, whole
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
    legendre = einsum("bchw,hl->bclw")
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
        (einsum("bixy,ioxy->boxy"), ((real(2, 3, 8, 5), "_ _ domain _"), real(3, 4, 8, 5))),
        (torch.matmul, ((real(2, 8, 5), "_ domain _"), real(5, 3))),
        (torch.outer, ((real(8), "domain"), real(5))),
    ):
        out, forward, backward = _sent(func, *operands)
        assert any(p.is_shard() for p in out.placements)
        assert forward == backward == []
    # Rows that meet all rows: the smaller operand goes round, and its gradient comes home.
    scores = einsum("nqd,nkd->nqk")
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
    out, forward, backward = _sent(einsum("nd,ne->de"), (real(256, 2), "domain _"), (real(256, 2), "domain _"))
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
