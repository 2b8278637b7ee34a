"""Elementwise functions that write: in place, by `inplace=` and `out=`, into what others see or a backward needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pointwise_cases import BINARY, COMPARISONS, INTEGERS, B, C, H, W
from rule_cases import MESHES, TENSOR, Case, real, run, whole
from torch import Tensor
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.registry import functions
from meshpar.rules.pointwise import IN_PLACE
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks


def _in_place(mesh: str) -> Iterator[Case]:
    """Write into an activation made from the input, use it before and after, through every in-place name."""
    numbers = ["add", "sub", "mul", "div", "pow", "remainder", "fmod", "floor_divide"]
    for name in IN_PLACE:
        plain = name.strip("_").removeprefix("i") if name.startswith("__i") else name.rstrip("_")
        plain = {"truediv": "div", "mod": "remainder", "floordiv": "floor_divide"}.get(plain, plain)
        if not functions(name):
            continue  # not every torch has it
        f = functions(name)[-1]
        low, high = (1.1, 1.9) if "acosh" in name or "arccosh" in name else (0.2, 0.9)
        x = real(B, C, H, W, low=low, high=high)
        y = real(B, C, H, W, salt=1, low=0.2, high=0.9)
        if plain in INTEGERS or plain in ("and", "or", "xor", "lshift", "rshift"):
            n = whole(B, C, H, W)
            args = () if plain == "bitwise_not" else (n[:, :1] + 1,)
            yield Case(name, lambda a, *b, f=f: f(a.clone(), *b), (n, *args), keeps=True, quiet=True)
            continue
        given: list[tuple[Any, ...]] = {
            "clamp": [(0.3, 0.6)],
            "clip": [(0.3, 0.6)],
            "polygamma": [(2,)],
            "clamp_min": [(0.4,)],
            "clamp_max": [(0.4,)],
            "threshold": [(0.4, 2.0)],
            "fill": [(1.5,)],
            "addcmul": [(y, y)],
            "addcdiv": [(y, y)],
            "masked_fill": [(y > 0.5, 2.0)],
            "lerp": [(y, 0.3)],
        }.get(plain, [()])
        if plain in numbers:
            given = [(y,), (2.0,), (y[:1, :, :1],), (y[0, 0, 0, 0],)]
        elif plain in BINARY:
            given = [(y,)]
        for i, rest in enumerate(given):
            tensors = [v for v in rest if isinstance(v, Tensor)]
            grads = plain not in UNSMOOTH and "logical" not in plain

            def fn(x: Tensor, *ts: Tensor, f: Any = f, rest: tuple[Any, ...] = rest) -> Any:
                values = iter(ts)
                h = x * 1.0
                before = h * 2.0
                out = f(h, *[next(values) if isinstance(v, Tensor) else v for v in rest])
                return before, h.sin(), out.cos()

            layouts = [None, *("" if v.dim() == 0 else None for v in tensors)]
            yield Case(f"{name} {i}", fn, (x, *tensors), layouts, keeps=True, gradients=grads)
            if tensors and all(t.is_floating_point() for t in tensors) and grads and len(tensors) == 1:
                yield Case(f"{name} {i} weight", fn, (x,), weights=tensors, keeps=True)


# Not differentiable, or in torch not where they write in place.
UNSMOOTH = [
    "asinh",
    "acosh",
    "atanh",
    "arcsinh",
    "arccosh",
    "arctanh",
    "floor_divide",
    *COMPARISONS,
    "nextafter",
    "heaviside",
]


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_in_place(mesh: str) -> None:
    run(_in_place, mesh, at_least=90)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, TENSOR])
def test_in_place_on_every_mesh(mesh: str) -> None:
    run(_in_place, mesh, at_least=90)


def _activations_in_place(mesh: str) -> Iterator[Case]:
    """`inplace=True` by name and by position, and `out=`."""
    x = real(B, C, H, W)
    for name in ["relu", "relu6", "silu", "mish", "selu", "hardswish", "hardsigmoid"]:
        f = getattr(F, name)
        for label, call in (("named", lambda h, f=f: f(h, inplace=True)), ("third", lambda h, f=f: f(h, True))):

            def fn(x: Tensor, call: Any = call) -> Any:
                h = x * 1.0
                return call(h).sin(), h.cos()

            yield Case(f"{name} {label}", fn, (x,), keeps=True, quiet=True)
    more = {
        "elu": (0.7,),
        "celu": (0.5,),  # torch rounds 1/alpha to float32 in one of its two gradients
        "leaky_relu": (0.2,),
        "hardtanh": (-0.5, 0.5),
        "threshold": (0.1, 0.3),
        "rrelu": (0.1, 0.2, False),
    }
    for name, rest in more.items():

        def fn(x: Tensor, name: str = name, rest: Any = rest) -> Any:
            f, h, k = getattr(F, name), x * 1.0, x * 1.0
            return f(h, *rest, inplace=True).sin(), h.cos(), f(k, *rest, True), k

        yield Case(name, fn, (x,), keeps=True, quiet=True)

    def out(x: Tensor) -> Any:
        room, other = torch.empty_like(x), x.new_empty(x.shape)
        with torch.no_grad():
            torch.add(x, 2.0, out=room)
            torch.atan2(x, x + 3, out=other)
        return room, other

    yield Case("out", out, (x,), keeps=True, quiet=True)


def test_inplace_flags_and_out() -> None:
    run(_activations_in_place, "data=1,domain=4", at_least=20)


def _saved_for_backward() -> None:
    x = shard(real(B, C, H, W), mesh_for("data=1,domain=2")).requires_grad_()
    with spmd(on_gather="error"):
        for write in (lambda y: y.mul_(2), lambda y: F.relu(y, inplace=True), lambda y: y.fill_(1.0)):
            y = x * 1
            z = y.sin()
            write(y)
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                z.sum().backward()


def test_writing_over_what_the_backward_needs_is_an_error() -> None:
    run_ranks(_saved_for_backward, 2)
