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
from rule_cases import MESHES, TENSOR, Case, einsum, real, run, whole
from torch import Tensor
from torch.nn import functional as F

# explicit cases


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
    # Backends cannot add up int16, nor gather it for the checker.
    yield Case("short", lambda n: (n.short().mT @ n.short()).int(), (whole(4, 5, 6),), ("data domain _",))
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
        yield Case(f"legendre {left}", einsum("bchw,hlm->bclm"), (x,), (left,), (real(5, 4, 3),))
        yield Case(f"longitude {left}", einsum("bchw,wm->bchm"), (x,), (left,), (real(6, 5),))
        yield Case(f"channels {left}", einsum("bchw,oc->bohw"), (x,), (left,), (real(4, 3),))
        yield Case(f"all of it {left}", einsum("bchw,bchw->"), (x, x + 1), (left, left))
        yield Case(f"ellipsis {left}", einsum("...w,wk->...k"), (x,), (left,), (real(6, 3),))
        yield Case(f"implicit {left}", einsum("bchw,wk"), (x,), (left,), (real(6, 3),))
        yield Case(f"alone {left}", einsum("bchw->wb"), (x,), (left,))
        yield Case(f"permuted {left}", einsum("b...w->w...b"), (x,), (left,))
        yield Case(f"three {left}", einsum("bchw,hi,wj->bcij"), (x,), (left,), (real(5, 4), real(6, 3)))
        yield Case(f"weights first {left}", _weights_first, (x,), (left,), (real(5, 4), real(6, 3)))
        yield Case(f"sublists {left}", _sublists, (x,), (left,), (real(6, 3),))
        yield Case(f"broadcast {left}", einsum("bchw,bcxw->bhx"), (x, real(2, 1, 4, 1)), (left, "data _ domain _"))
        for right in layouts:
            yield Case(f"{left}, {right}", einsum("bchw,bchv->bwv"), (x, y), (left, right))
            yield Case(f"batch {left}, {right}", einsum("bchw,bchv->bchwv"), (x, y), (left, right))
    square = real(5, 5, 3)
    yield Case("diagonal", einsum("iij->ij"), (square,), ("_ _ domain",))
    yield Case("diagonal weight", einsum("ij,jj->ij"), (real(4, 5),), ("data domain",), (real(5, 5),))
    z, w = torch.complex(real(2, 3, 5, 4), real(2, 3, 5, 4, salt=1)), torch.complex(real(3, 6, 5, 4), real(3, 6, 5, 4))
    for left in layouts:
        yield Case(f"fno {left}", einsum("bixy,ioxy->boxy"), (z,), (left,), (w,))
    yield Case(
        "sht complex",
        einsum("bchm,mlh->bclm"),
        (z,),
        ("data _ domain _",),
        (torch.complex(real(4, 6, 5), real(4, 6, 5)),),
    )
    yield Case("none left", einsum("bchw,hlm->bclm"), (real(2, 3, 0, 6),), ("data _ domain _",), (real(0, 4, 3),))


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
    yield Case("trace", einsum("iij->j"), (real(5, 5, 3),), ("domain _ _",), gathers=True)


def test_a_sharded_diagonal_is_gathered_and_right() -> None:
    run(_trace, "data=1,domain=2")


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
    return partial(_reordered, known.get(name) or einsum(name), order)


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
