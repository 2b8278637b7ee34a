"""Drawn attentions: sizes, layouts, masks, ways; each equals one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import Case, check, real
from test_attention import SAMPLES, TOKENS, forced, with_mask
from torch.nn import functional as F

from meshpar.rules.tokens import GATHERED, HEADS, RING
from meshpar.testing import run_ranks

sdpa = F.scaled_dot_product_attention


@st.composite
def _drawn(draw: st.DrawFn) -> dict[str, Any]:
    num = st.integers(1, 9)
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    group = draw(st.sampled_from([1, 1, 2]))
    length, keys, batch = draw(num), draw(num), draw(st.integers(1, 3))
    mask = draw(st.sampled_from(["none", "none", "bool", "float", "causal"]))
    size = [draw(st.sampled_from([1, n])) for n in (batch, heads * group, length, keys)][
        draw(st.sampled_from([0, 2])) :
    ]
    if group > 1:
        size = size[-2:]
    return {
        "way": draw(st.sampled_from([None, GATHERED, RING, HEADS])),
        "sizes": (batch, heads, group, length, keys, draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        "mask": mask,
        "size": size,
        "here": draw(st.booleans()),
        "where": draw(st.sampled_from(["tokens", "tokens", "tokens", "keys", "rows"])),
        "flat": draw(st.booleans()) and group == 1,
        "scale": draw(st.sampled_from([None, 0.7])),
    }


def _draw_one(mesh: str, drawn: list[dict[str, Any]]) -> None:
    for one in drawn:
        check(_case_of(mesh, one), mesh)


def _case_of(mesh: str, one: dict[str, Any]) -> Case:
    batch, heads, group, length, keys, e, f = one["sizes"]
    q = real(batch, heads * group, length, e)
    k, v = real(batch, heads, keys, e, salt=1), real(batch, heads, keys, f, salt=2)
    told = {"is_causal": one["mask"] == "causal", "scale": one["scale"], "enable_gqa": group > 1}
    by_rows = {"tokens": (TOKENS,) * 3, "keys": (SAMPLES, TOKENS, TOKENS), "rows": (TOKENS, SAMPLES, SAMPLES)}
    layouts: tuple[str, ...] = by_rows[one["where"]]
    x, size = [q, k, v], list(one["size"])
    if one["flat"]:
        x = [t.flatten(0, 1) for t in x]
        layouts = tuple(layout.replace("_ ", "", 1) for layout in layouts)
        size = size[-2:]
    ranks = int(mesh.rpartition("domain=")[2]) if "domain" in mesh else 1
    divides = heads % ranks == 0 or (one["flat"] and batch * heads % ranks == 0 and "data=1" in mesh)
    way = one["way"] if one["way"] != HEADS or divides else None
    if one["mask"] not in ("bool", "float"):
        return Case(str(one), forced(way, functools.partial(sdpa, **told)), x, layouts, tolerance=1e-9, keeps=True)
    m = real(*size, salt=3)
    m = m > -0.7 if one["mask"] == "bool" else m
    fn = forced(way, functools.partial(with_mask, **told))
    if one["here"]:
        tail = "domain _" if size[-2] > 1 else "_ _"
        return Case(str(one), fn, (*x, m), (*layouts, "_ " * (len(size) - 2) + tail), tolerance=1e-9, keeps=True)
    return Case(str(one), fn, x, layouts, (m,), tolerance=1e-9, keeps=True)


_ANY_MESH = st.sampled_from(
    [("data=1,domain=4", 4), ("data=2,domain=2", 4), ("data=1,domain=3", 3), ("data=1,domain=2", 2)]
)


@settings(max_examples=12, deadline=None)
@given(_ANY_MESH, st.lists(_drawn(), min_size=1, max_size=6))
def test_attention_equals_one_process(mesh: tuple[str, int], drawn: list[dict[str, Any]]) -> None:
    run_ranks(_draw_one, mesh[1], mesh[0], drawn, timeout_s=300.0)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(_ANY_MESH, st.lists(_drawn(), min_size=1, max_size=6))
def test_many_attentions_equal_one_process(mesh: tuple[str, int], drawn: list[dict[str, Any]]) -> None:
    run_ranks(_draw_one, mesh[1], mesh[0], drawn, timeout_s=300.0)
