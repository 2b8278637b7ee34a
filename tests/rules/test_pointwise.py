"""Elementwise functions: every name on the lists, every way in which operands may lie, and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pointwise_cases import (
    BINARY,
    DOMAINS,
    INTEGERS,
    NOT_DIFFERENTIABLE,
    NUMBERS_ONLY,
    POSITIVE_BINARY,
    SPECIAL,
    B,
    C,
    H,
    W,
)
from rule_cases import MESHES, TENSOR, Case, real, run, whole
from torch import Tensor
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.errors import ShardingError
from meshpar.registry import functions
from meshpar.rules.pointwise import ELEMENTWISE
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks


def domain(name: str) -> tuple[float, float]:
    if name in POSITIVE_BINARY:
        return 0.3, 2.0
    for bounds, names in DOMAINS.items():
        if name in names.split():
            return bounds
    return -1.5, 1.5


def forms(name: str) -> list[tuple[str, Any]]:
    """List the functions of a name: `torch.add`, `Tensor.add`, ..."""
    return [(f"{getattr(f, '__module__', '') or 'Tensor'}.{name}#{i}", f) for i, f in enumerate(functions(name))]


def image(name: str, salt: int = 0, shape: tuple[int, ...] = (B, C, H, W)) -> Tensor:
    low, high = domain(name)
    return real(*shape, salt=salt, low=low, high=high)


def unary_cases(mesh: str) -> Iterator[Case]:
    x_int = whole(B, C, H, W, low=1, high=4)
    for name in ELEMENTWISE.split():
        for label, f in forms(name):
            if name in INTEGERS:
                other = whole(B, C, H, W, salt=1, low=1, high=4)
                args = () if name in ("bitwise_not", "__invert__") else (other,)
                yield Case(label, f, (x_int, *args), keeps=True, quiet=True)
                if name not in ("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"):
                    bools = [x > 2 for x in (x_int, *args)]
                    yield Case(f"{label} bool", f, bools, keeps=True, quiet=True)
            elif name in BINARY:
                grad = name not in NOT_DIFFERENTIABLE
                pair = (image(name), image(name, 1))
                yield Case(label, f, pair, keeps=True, quiet=True, gradients=grad)
            elif name in ("complex", "polar"):
                yield Case(label, f, (image(name), image(name, 1)), keeps=True, quiet=True)
            elif name in ("where",):
                mask = whole(B, C, H, W, high=2) > 0
                pair = (mask, image(name), image(name, 1))
                if f is not torch.where:
                    pair = (pair[1], mask, pair[2])
                yield Case(label, f, pair, keeps=True, quiet=True)
            else:
                for given in SPECIAL.get(name, [()]):
                    yield from special_case(label, f, name, given)


def special_case(label: str, f: Any, name: str, given: tuple[Any, ...]) -> Iterator[Case]:
    operands = {
        "same": image(name, 1),
        "high": real(B, C, H, W, salt=2, low=1.0, high=2.0),
        "mask": whole(B, C, H, W, high=2) > 0,
    }
    x = image(name)
    tensors = [operands[a] for a in given if isinstance(a, str)]
    rest = [a for a in given if not isinstance(a, str)]
    if name == "polygamma":
        fn = (lambda x: torch.polygamma(2, x)) if f is not torch.Tensor.polygamma else (lambda x: x.polygamma(2))
        yield Case(label, fn, (x,), keeps=True, quiet=True)
        return

    def fn(*xs: Any) -> Any:
        out = f(*xs, *rest)
        if name == "empty_like":
            return torch.zeros_like(out)
        return out.to(torch.int32) if name == "short" else out  # gloo cannot gather int16 for the checker

    yield Case(label, fn, (x, *tensors), keeps=True, quiet=True, gradients=name != "empty_like")


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_every_name(mesh: str) -> None:
    run(unary_cases, mesh, at_least=300)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_every_name_on_every_mesh(mesh: str) -> None:
    run(unary_cases, mesh, at_least=300)


def operand_cases(mesh: str, names: tuple[str, ...]) -> Iterator[Case]:
    """Cross a function with every way in which its operands may lie and broadcast."""
    for name in names:
        f = functions(name)[-1]
        x = image(name)
        others: dict[str, tuple[tuple[int, ...], str]] = {
            "replicated": ((B, C, H, W), "_ _ _ _"),
            "batch alone": ((B, C, H, W), "data _ _ _"),
            "another dim": ((B, C, H, W), "_ _ data domain"),
            "channels": ((C, 1, 1), "_ _ _"),
            "rows": ((1, 1, H, 1), "_ _ domain _"),
            "rows of a grid": ((H, W), "domain _"),
            "whole grid": ((H, W), "_ _"),
            "size 1": ((B, C, 1, W), "data _ domain _"),
            "one sample": ((1, C, H, W), "data _ domain _"),
            "one number": ((), ""),
        }
        for label, (shape, layout) in others.items():
            y = image(name, 3, shape)
            # Of two that are split elsewhere the first stays.
            yield Case(f"{name} x {label}", f, (x, y), (None, layout), keeps=True)
            keeps = label != "another dim"
            yield Case(f"{name} {label} x", lambda b, a, f=f: f(a, b), (x, y), (None, layout), keeps=keeps)
        for shape in ((C, 1, 1), (1, 1, H, 1), (H, W), (B, C, H, W), (B, 1, 1, 1), ()):
            w = image(name, 4, shape)
            yield Case(f"{name} x weight{shape}", f, (x,), weights=(w,), keeps=True)
            yield Case(f"{name} weight{shape} x", lambda x, w, f=f: f(w, x), (x,), weights=(w,), keeps=True)
        yield Case(f"{name} x 2", lambda x, f=f: f(x, 2), (x,), keeps=True, quiet=True)
        yield Case(f"{name} x 1.5", lambda x, f=f: f(x, 1.5), (x,), keeps=True, quiet=True)
        column = image(name, 5, (1, 1, 1, W))
        grown = image(name, 6, (B, C, H, 1))
        yield Case(f"{name} outer", f, (grown, column), (None, "_ _ _ _"), keeps=True)
        yield Case(f"{name} outer weight", f, (image(name, 7, (B, C, 1, W)),), weights=(grown,), keeps=True)
        yield Case(f"{name} empty", f, (x[:0], x[:0]), keeps=True)


NO_NUMBERS = [
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "logaddexp",
    "logaddexp2",
    "hypot",
    "atan2",
    "arctan2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "isclose",
]


def _operands(mesh: str) -> Iterator[Case]:
    for case in operand_cases(mesh, ("add", "mul", "maximum")):
        if not (case.label.split()[0] in NO_NUMBERS and case.label.endswith(("x 2", "x 1.5"))):
            yield case


def _all_operands(mesh: str) -> Iterator[Case]:
    skip = (*NOT_DIFFERENTIABLE, *NUMBERS_ONLY)
    names = [n for n in BINARY if n not in skip and not n.startswith("__") and n not in NUMBERS_ONLY]
    for case in operand_cases(mesh, tuple(names)):
        if not (case.label.split()[0] in NO_NUMBERS and case.label.endswith(("x 2", "x 1.5"))):
            yield case


@pytest.mark.parametrize("mesh", ["data=2,domain=2", TENSOR])
def test_operands(mesh: str) -> None:
    run(_operands, mesh, at_least=80)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_operands_of_every_function(mesh: str) -> None:
    run(_all_operands, mesh, at_least=800)


def _types(mesh: str) -> Iterator[Case]:
    """The dtype that comes out is torch's."""
    x = real(2, 1, 3, 2)
    kinds = {
        "int": whole(2, 1, 3, 2, low=1),
        "bool": whole(2, 1, 3, 2, high=2) > 0,
        "float": x.float(),
        "half": x.half(),
        "complex": torch.complex(x, x + 1),
    }

    def all_of(u: Tensor, v: Tensor, one: Tensor, w: Tensor) -> Any:
        equal = () if u.is_complex() or v.is_complex() else (torch.eq(u, v), u < v)
        return torch.add(u, v), torch.mul(u, v), torch.div(u, v), u * one, u + one, w * u, *equal

    def with_numbers(u: Tensor) -> Any:
        minus = () if u.dtype == torch.bool else (3 - u, u - 1.5)
        return u + 2, 1.5 * u, u * True, u / 2, *minus, u.to(torch.complex64), u.type_as(u), u.to(u)

    for a, u in kinds.items():
        for b, v in kinds.items():
            if {a, b} == {"half", "complex"}:
                continue  # torch itself has no arithmetic for half a complex number
            one, weight = v[0, 0, 0, 0], v[:1, :, :1, :1]
            yield Case(
                f"{a} {b}", all_of, (u, v, one), (None, None, ""), weights=(weight,), keeps=True, gradients=False
            )
        yield Case(f"{a} numbers", with_numbers, (u,), keeps=True, quiet=True, gradients=False)


@pytest.mark.parametrize("mesh", ["data=1,domain=2"])
def test_types(mesh: str) -> None:
    run(_types, mesh, at_least=25)


def _others(mesh: str) -> Iterator[Case]:
    x, y = real(B, C, H, W), real(B, C, H, W, salt=1)
    mask = y > 0
    row = real(1, 1, H, 1, salt=2)
    z = torch.complex(x, y)
    yield Case("clamp tensors", torch.clamp, (x, y - 1, y + 1), keeps=True, quiet=True)
    yield Case("clamp named", lambda x, lo, hi: x.clamp(min=lo, max=hi), (x,), weights=(row - 1, row + 1), keeps=True)
    yield Case("clamp min alone", lambda x: torch.clamp(x, min=0.1), (x,), keeps=True, quiet=True)
    yield Case("where numbers", lambda m, x: torch.where(m, x, 0.0), (mask, x), keeps=True, quiet=True)
    yield Case("where mask of rows", lambda m, x: torch.where(m, x, -x), (row > 0, x), ("_ _ domain _", None))
    yield Case("where plain mask", lambda x, m: torch.where(m, x, 2.0), (x,), weights=(mask,), keeps=True)
    yield Case("masked_fill rows", lambda x, m: x.masked_fill(m, float("-inf")), (x,), weights=(row > 0,), keeps=True)
    yield Case(
        "masked_fill 0-d", lambda x, m, v: x.masked_fill(m, v), (x, mask, x[0, 0, 0, 0]), (None, None, ""), keeps=True
    )
    yield Case("lerp rows", torch.lerp, (x, y, row), (None, None, "_ _ domain _"), keeps=True)
    yield Case("lerp weights", torch.lerp, (x,), weights=(y, row), keeps=True)
    yield Case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), (x, y), weights=(row,), keeps=True)
    yield Case("add alpha", lambda x, y: torch.add(x, y, alpha=3), (x, y), keeps=True, quiet=True)
    yield Case("sub alpha", lambda x, w: torch.sub(x, w, alpha=3), (x,), weights=(row,), keeps=True)
    yield Case("rounding", lambda x, y: torch.div(x, y, rounding_mode="floor"), (x, y), keeps=True, quiet=True)
    yield Case("decimals", lambda x: torch.round(x, decimals=1), (x,), keeps=True, quiet=True)
    yield Case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), (x,), keeps=True, quiet=True)
    yield Case("softplus", lambda x: F.softplus(x, beta=2, threshold=1), (x,), keeps=True, quiet=True)
    yield Case("nan_to_num", lambda x: torch.nan_to_num(x / 0, nan=1.0, posinf=2.0), (x,), keeps=True, quiet=True)
    yield Case("complex", lambda z: (z.real, z.imag, z.abs(), z.angle(), z.conj() * z, torch.real(z)), (z,), keeps=True)
    yield Case("real of real", lambda x: x.real * 2, (x,), keeps=True, quiet=True)
    yield Case("operators", lambda x, y: (-x, abs(x), x**2, x ** y.abs(), 2**x, 1 / x, x % 1, +x), (x, y), keeps=True)
    yield Case("chain", lambda x, y: (x < y) & ~(x > 0) | (y == x), (x, y), keeps=True, quiet=True)
    yield Case("keyword input", lambda x: torch.exp(input=x) + torch.relu(input=x), (x,), keeps=True, quiet=True)
    yield Case(
        "keyword other",
        lambda x, y: torch.mul(x, other=y) + torch.sub(input=x, other=y),
        (x, y),
        keeps=True,
        quiet=True,
    )
    yield Case(
        "copies",
        lambda x: (x.clone(), x.contiguous(), x.to(torch.float32), x.float().double()),
        (x,),
        keeps=True,
        quiet=True,
    )
    yield Case("channels_last", lambda x: x.to(memory_format=torch.channels_last) * 2, (x,), keeps=True, quiet=True)
    yield Case(
        "new",
        lambda x: (x.new_zeros(x.shape), x.new_full(x.shape, 2.5), x.new_ones(*x.shape)),
        (x,),
        keeps=True,
        quiet=True,
    )
    yield Case(
        "new rows",
        lambda x: (x.new_zeros(B, 7, H, 2), x.new_zeros(size=(B, 1, H, W), dtype=torch.float32)),
        (x,),
        keeps=True,
    )
    yield Case("new other", lambda x: (x.new_zeros(9), x.new_tensor([1.0, 2.0]), x.new_full((), fill_value=3.0)), (x,))
    yield Case(
        "likes", lambda x: (torch.zeros_like(x), torch.full_like(x, 2, dtype=torch.int64)), (x,), keeps=True, quiet=True
    )
    for n in (1, C):
        yield Case(f"prelu {n}", F.prelu, (x,), weights=(real(n, salt=3),), keeps=True)
        yield Case(f"prelu activation {n}", torch.prelu, (x, real(n, salt=3)), (None, "_"), keeps=True)
    yield Case("prelu infinite", F.prelu, (x / torch.zeros(1).double(),), weights=(real(C, salt=3),), keeps=True)
    yield Case("prelu rows", F.prelu, (real(B, C),), weights=(real(C, salt=3),), keeps=True)
    yield Case(
        "copy_",
        lambda x, y, w: (x * 1).copy_(y) + (x * 1).copy_(w) + (x * 2).fill_(w[0, 0, 0, 0]),
        (x, y),
        weights=(row,),
        keeps=True,
    )
    for h in (1, 2, 5, 9):
        yield Case(
            f"uneven {h}",
            lambda x, y: torch.tanh(x) * y + x / (y.abs() + 1),
            (real(2, 2, h, 3), real(2, 2, h, 3)),
            keeps=True,
            quiet=True,
        )


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_others(mesh: str) -> None:
    run(_others, mesh, at_least=40)


def _channels(mesh: str) -> Iterator[Case]:
    """Channels over the tensor axis: a weight of channels is cut, its gradient summed."""
    x, w, layout = real(B, 5, H, W), real(5, 1, 1, salt=1), ("data tensor domain _",)
    for name in ("mul", "add"):
        yield Case(name, getattr(torch, name), (x,), layout, weights=(w,), keeps=True)
        yield Case(f"{name} number", getattr(torch, name), (x,), layout, weights=(w[0, 0, 0],), keeps=True)
    yield Case("prelu", F.prelu, (x,), layout, weights=(w[:, 0, 0],), keeps=True)
    yield Case("rows", torch.mul, (x,), ("data _ domain tensor",), weights=(real(H, W, salt=2),), keeps=True)


def test_tensor_axis() -> None:
    run(_channels, TENSOR, at_least=5)


def _layout_of_gradient() -> None:
    mesh = mesh_for("data=1,domain=4")
    for fn in (lambda x: (x * 2).sum(), lambda x: x.mean(), lambda x: ((x - 1) ** 2).mean(dim=(1, 2, 3)).sum()):
        x = shard(real(B, C, H, W), mesh).requires_grad_()
        with spmd(on_gather="error"):
            fn(x).backward()
        assert x.grad is not None
        assert x.grad.placements == x.placements
        assert x.grad.to_local().shape == x.to_local().shape


def test_field_6_gradients_keep_the_layout() -> None:
    run_ranks(_layout_of_gradient, 4)


def _refusals() -> None:
    mesh = mesh_for("data=1,domain=2")
    x = shard(real(B, C, H, W), mesh)
    y = shard(real(B, C, H, W, salt=1), mesh)
    with spmd(on_gather="error"):
        with pytest.raises(ShardingError, match="plain tensor"):
            torch.zeros(B, C, H, W, dtype=torch.float64).add_(x)
        with pytest.raises(RuntimeError, match="result type"):
            torch.ones_like(x, dtype=torch.int64).add_(torch.ones(C, 1, 1) * 1.5)
        with pytest.raises(RuntimeError, match="broadcast shape"):
            x[:1].add_(torch.cat([y, y], 1)[:, :C])
        with pytest.raises(RuntimeError, match="leaf"):
            x.clone().requires_grad_().mul_(torch.ones(C, 1, 1, dtype=torch.float64))
        with pytest.raises(RuntimeError):
            torch.add(x, torch.ones(7))
        with pytest.raises(RuntimeError):
            F.prelu(x, torch.ones(C + 1))


def test_wrong_arguments_raise_on_all_ranks() -> None:
    run_ranks(_refusals, 2)
