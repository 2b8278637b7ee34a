"""Merged and split dims with their shards: windows, tokens, rows in the batch or in the channels, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange, reduce, repeat
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import Case, check, real, run
from torch import Tensor
from torch.nn import functional as F

from meshpar.testing import run_ranks
from meshpar.testing.meshes import ranks_of

SQUARE = "data=1,domain=2,domain_w=2"
ROWS = ("data=2,domain=2", "data=1,domain=4", "data=1,domain=3")


def windows(x: Tensor, w: int) -> Tensor:
    """Cut (B, H, W, C) into (windows, w * w, C), as Swin transformers do."""
    b, h, v, c = x.shape
    x = x.view(b, h // w, w, v // w, w, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, c)


def unwindowed(x: Tensor, w: int, h: int, v: int) -> Tensor:
    b = x.shape[0] // (h * v // w // w)
    x = x.view(b, h // w, v // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, v, -1)


def window_block(x: Tensor, scale: Tensor, w: int) -> Tensor:
    h, v = x.shape[1:3]
    cut = windows(x, w)
    cut = F.layer_norm(F.linear(cut, scale), cut.shape[-1:]).softmax(-1) * cut
    return x + unwindowed(torch.roll(cut, 1, dims=1), w, h, v)


def _cases(mesh: str) -> Iterator[Case]:
    tokens, image = "data domain _ _", "data _ domain _"
    w = real(3, 3)
    for size, (h, v), batch in itertools.product((2, 4), ((8, 4), (4, 8), (12, 8)), (1, 2, 4)):
        x = real(batch, h, v, 3)
        yield Case(f"windows of {size} in {tuple(x.shape)}", lambda x, size=size: windows(x, size), (x,), (tokens,))
        yield Case(
            f"window block of {size} in {tuple(x.shape)}",
            lambda x, w, size=size: window_block(x, w, size),
            (x,),
            (tokens,),
            (w,),
        )
    for shape in ((2, 3, 5, 4), (1, 3, 7, 4), (4, 2, 1, 3), (3, 2, 5, 2)):
        x = real(*shape)
        for name, fn in {
            "tokens": lambda x: rearrange(x, "b c h w -> b (h w) c"),
            "rows to batch": lambda x: rearrange(x, "b c h w -> (b h) c w"),
            "columns to batch": lambda x: rearrange(x, "b c h w -> (b w) c h"),
            "rows to channels": lambda x: rearrange(x, "b c h w -> b (c h) w"),
            "all to one": lambda x: rearrange(x, "b c h w -> (b h w) c"),
            "flat": lambda x: x.flatten(1),
            "mean of rows": lambda x: reduce(x, "b c h w -> b c w", "mean"),
            "repeat": lambda x: repeat(x, "b c h w -> b c (h r) w", r=2),
            "there and back": lambda x: rearrange(
                rearrange(x, "b c h w -> (b h w) c").tanh(), "(b h w) c -> b c h w", h=x.shape[2], w=x.shape[3]
            ),
            "rows there and back": lambda x: rearrange(
                rearrange(x, "b c h w -> (b h) c w").cumsum(-1), "(b h) c w -> b c h w", b=x.shape[0]
            ),
        }.items():
            yield Case(f"{name} {shape}", fn, (x,), (image,))
    x = real(2, 3, 8, 6)
    patches = "b c (h p) (w q) -> b (h w) (c p q)"
    yield Case("patches", lambda x: rearrange(x, patches, p=2, q=3), (x,), (image,))
    yield Case(
        "patches back",
        lambda x: rearrange(rearrange(x, patches, p=2, q=3), "b (h w) (c p q) -> b c (h p) (w q)", h=4, w=2, p=2, q=3),
        (x,),
        (image,),
    )


@pytest.mark.parametrize("mesh", ROWS)
def test_windows_tokens_and_patches(mesh: str) -> None:
    run(_cases, mesh, at_least=50)


def _square(mesh: str) -> Iterator[Case]:
    for batch, (h, v) in itertools.product((1, 2), ((8, 4), (4, 8), (12, 8))):
        x = real(batch, h, v, 3)
        layout = "data domain domain_w _"
        yield Case(f"block {tuple(x.shape)}", lambda x, w: window_block(x, w, 2), (x,), (layout,), (real(3, 3),))
    for shape in ((2, 3, 5, 4), (1, 3, 7, 5), (1, 2, 1, 3)):
        x = real(*shape)
        for pattern in (
            "b c h w -> b (h w) c",
            "b c h w -> (b h w) c",
            "b c h w -> (w h) (b c)",
            "b c h w -> b (c w) h",
        ):
            yield Case(f"{pattern} {shape}", lambda x, p=pattern: rearrange(x, p), (x,), ("data _ domain domain_w",))


def test_rows_and_columns_merge() -> None:
    run(_square, SQUARE, at_least=18)


@dataclass(frozen=True)
class Reshape:
    shape: tuple[int, ...]
    layout: str
    after: tuple[int, ...]
    back: bool

    def __call__(self, x: Tensor) -> Any:
        y = x.reshape(self.after) * 2.0
        return (y, y.reshape(self.shape)) if self.back else y


@st.composite
def reshapes(draw: Callable[..., Any], axes: tuple[str, ...]) -> Reshape:
    """Draw factors, group them twice into dims, and shard any dims of the first grouping."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=2, max_size=6))

    def grouped() -> tuple[int, ...]:
        dims: list[int] = []
        for f in factors:
            if dims and draw(st.booleans()):
                dims[-1] *= f
            else:
                dims.append(f)
        return tuple(dims)

    shape, after = grouped(), grouped()
    tokens = ["_"] * len(shape)
    for axis in axes:
        at = draw(st.integers(-1, len(shape) - 1))
        if at >= 0 and tokens[at] == "_":
            tokens[at] = axis
    return Reshape(shape, " ".join(tokens), after, draw(st.booleans()))


def check_reshapes(cases: list[Reshape], mesh: str) -> int:
    for case in cases:
        check(Case(str(case), case, (real(*case.shape),), (case.layout,)), mesh)
    return len(cases)


def _search(num: int) -> None:
    for mesh, axes in (
        ("data=2,domain=2", ("data", "domain")),
        ("data=1,domain=3", ("domain",)),
        (SQUARE, ("domain", "domain_w")),
        ("data=2,domain=2", ("domain", "data")),
    ):

        @given(cases=st.lists(reshapes(axes), min_size=10, max_size=10), mesh=st.just(mesh))
        @settings(max_examples=num, deadline=None, derandomize=True)
        def search(cases: list[Reshape], mesh: str) -> None:
            assert run_ranks(check_reshapes, ranks_of(mesh), cases, mesh)[0] == len(cases)

        search()


def test_reshape_property() -> None:
    _search(12)


@pytest.mark.long
def test_reshape_property_long() -> None:
    _search(60)
