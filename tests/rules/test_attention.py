"""Scaled dot-product attention: every way of it, masks, causal, grouped heads, dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rule_cases import TENSOR, Case, check, real, run
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.errors import ShardingError, SpecError
from meshpar.record import record
from meshpar.rules import ring, tokens
from meshpar.rules.tokens import GATHERED, HEADS, RING, WAYS, using
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks

sdpa = F.scaled_dot_product_attention
TOKENS = "data _ domain _"
SAMPLES = "data _ _ _"


def forced(way: str | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if way is None:
            return fn(*args)
        with using(way):
            return fn(*args)

    return call


def with_mask(q: Tensor, k: Tensor, v: Tensor, m: Tensor, **told: Any) -> Tensor:
    return sdpa(q, k, v, m, **told)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def hide_some(m: Tensor) -> Tensor:
    """Make a mask of booleans in which one query sees nothing."""
    seen = m > -0.5
    seen[..., -1, :] = False
    return seen


def _triple(L: int, S: int, heads: int = 4, keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return real(3, heads, L, 6), real(3, keys, S, 6, salt=1), real(3, keys, S, 5, salt=2)


def _ways(mesh: str) -> Iterator[Case]:
    for length, keys in ((3, 5), (9, 1)) if mesh.endswith("3") else ((7, 7), (1, 6)):
        x = _triple(length, keys)
        for way in (*WAYS, None):
            name = f"{way} {length}x{keys}"
            if way == HEADS and mesh.endswith("domain=3"):
                continue
            yield Case(name, forced(way, sdpa), x, (TOKENS,) * 3, keeps=True)
            yield Case(f"{name} causal", forced(way, causal), x, (TOKENS,) * 3, keeps=True)
            bias = real(length, keys, salt=3)
            yield Case(f"{name} bias", forced(way, with_mask), x, (TOKENS,) * 3, (bias,), keeps=True)
            seen = hide_some(real(3, 1, length, keys, salt=4))
            yield Case(f"{name} bool", forced(way, with_mask), x, (TOKENS,) * 3, (seen,), keeps=True)


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=3"])
def test_every_way(mesh: str) -> None:
    run(_ways, mesh, at_least=24)


def _masks(mesh: str) -> Iterator[Case]:
    x = _triple(7, 6)
    for way in WAYS:
        for size in ((3, 1, 1, 6), (3, 4, 7, 6), (1, 4, 7, 1), (7, 1), (1, 6)):
            m, layout = real(*size, salt=5), TOKENS if len(size) == 4 else "domain _"
            layout = layout if m.shape[-2] > 1 else layout.replace("domain", "_")
            name = f"{way} {size}"
            yield Case(f"{name} plain", forced(way, with_mask), x, (TOKENS,) * 3, (m,), keeps=True)
            yield Case(f"{name} here", forced(way, with_mask), (*x, m), (*(TOKENS,) * 3, layout), keeps=True)
            yield Case(f"{name} bool", forced(way, with_mask), (*x, m > -0.5), (*(TOKENS,) * 3, layout), keeps=True)
        m = real(3, 1, 1, 6, salt=5)
        columns = (*(TOKENS,) * 3, "data _ _ domain")
        yield Case(f"{way} by columns", forced(way, with_mask), (*x, m), columns, keeps=True)
        dead = torch.zeros(7, 6, dtype=torch.float64).masked_fill(~hide_some(real(7, 6)), -math.inf)
        yield Case(f"{way} minus infinity", forced(way, with_mask), x, (TOKENS,) * 3, (dead,), keeps=True)
        # Torch takes a mask and is_causal together on the CPU, where no gradient of the mask is asked for.
        alike = (*x[:2], real(3, 4, 6, 6, salt=2), hide_some(real(7, 6)))
        both = functools.partial(with_mask, is_causal=True)
        yield Case(f"{way} and causal", forced(way, both), alike, (*(TOKENS,) * 3, "domain _"), keeps=True)


def test_masks() -> None:
    run(_masks, "data=1,domain=2", at_least=30)


@pytest.mark.slow
def test_masks_on_four_ranks() -> None:
    run(_masks, "data=2,domain=2", at_least=30)


def _places(mesh: str) -> Iterator[Case]:
    for length, keys in ((7, 7), (2, 5), (5, 2)):
        x, name = _triple(length, keys), f"{length}x{keys}"
        whole_keys, whole_rows = (TOKENS, SAMPLES, SAMPLES), (SAMPLES, TOKENS, TOKENS)
        yield Case(f"{name} whole keys", sdpa, x, whole_keys, keeps=True)
        yield Case(f"{name} whole keys causal", causal, x, whole_keys, keeps=True)
        yield Case(f"{name} whole keys, plain", lambda q, k, v: sdpa(q, k, v), x[:1], (TOKENS,), x[1:], keeps=True)
        yield Case(f"{name} whole rows", sdpa, x, whole_rows, keeps=True)
        yield Case(f"{name} whole rows causal", causal, x, whole_rows, keeps=True)
        yield Case(f"{name} plain rows", lambda k, v, q: sdpa(q, k, v), x[1:], (TOKENS,) * 2, x[:1])
        m = real(3, 1, length, keys, salt=3)
        yield Case(f"{name} whole rows bias", with_mask, x, whole_rows, (m,), keeps=True)
        yield Case(f"{name} whole rows bool", with_mask, x, whole_rows, (hide_some(m),), keeps=True)
        yield Case(f"{name} bias here", with_mask, (*x, m), (*whole_rows, "data _ _ domain"), keeps=True)
        yield Case(f"{name} values whole", sdpa, x, (TOKENS, TOKENS, SAMPLES), keeps=True)
        yield Case(f"{name} keys on samples", sdpa, x, (TOKENS, "domain _ _ _", SAMPLES), keeps=True)
        yield Case(f"{name} samples", sdpa, x, (SAMPLES,) * 3, keeps=True, quiet=True)
        yield Case(f"{name} samples, keys whole", sdpa, x, (SAMPLES, "_ _ _ _", "_ _ _ _"), keeps=True)
        yield Case(f"{name} heads", sdpa, x, ("_ domain _ _",) * 3, keeps=True, quiet=True)
        y = [t[:, 0] for t in x]
        yield Case(f"{name} no heads", sdpa, y, ("data domain _",) * 3, keeps=True)
        yield Case(f"{name} no heads, samples too", sdpa, y, ("_ domain _",) * 3, keeps=True)
        yield Case(f"{name} five dims", sdpa, [t.unsqueeze(1) for t in x], ("data _ _ domain _",) * 3, keeps=True)
    grouped = functools.partial(sdpa, enable_gqa=True, scale=0.4)
    for heads in (1, 2, 4):
        x = _triple(5, 6, 4, heads)
        for way in (*WAYS[1:], None):
            yield Case(f"gqa {heads} {way}", forced(way, grouped), x, (TOKENS,) * 3, keeps=True)
        yield Case(f"gqa {heads} whole rows", grouped, x, (SAMPLES, TOKENS, TOKENS), keeps=True)
        m = functools.partial(with_mask, enable_gqa=True)
        for sizes in ((3, 4, 5, 6), (3, 1, 5, 1), (5, 6)):
            yield Case(f"gqa {heads} {sizes}", forced(RING, m), x, (TOKENS,) * 3, (real(*sizes, salt=3),), keeps=True)
    q, k, v = _triple(5, 6)
    broadcast = (q[:, :1], k[:1], v)
    for way in WAYS[1:]:
        yield Case(f"broadcast {way}", forced(way, sdpa), broadcast, (TOKENS, "_ _ domain _", TOKENS))


@pytest.mark.parametrize("mesh", ["data=2,domain=2"])
def test_wherever_rows_keys_and_heads_lie(mesh: str) -> None:
    run(_places, mesh, at_least=60)


def _with_tensor_axis(mesh: str) -> Iterator[Case]:
    x = _triple(5, 6)
    by_heads = "_ tensor domain _"
    for way in WAYS:
        yield Case(f"{way}", forced(way, sdpa), x, (by_heads,) * 3, keeps=True)
        m = real(1, 4, 5, 6, salt=3)
        yield Case(f"{way} bias", forced(way, with_mask), x, (by_heads,) * 3, (m,), keeps=True)
        yield Case(
            f"{way} bias here", forced(way, with_mask), (*x, m), (*(by_heads,) * 3, "_ tensor domain _"), keeps=True
        )
        y = _triple(5, 6, 8, 4)
        grouped = functools.partial(sdpa, enable_gqa=True)
        yield Case(f"{way} gqa", forced(way, grouped), y, (by_heads,) * 3, keeps=True)
    keys_apart = ("_ _ domain _", "_ _ tensor _", "_ _ tensor _")
    yield Case("rows and keys apart", sdpa, x, keys_apart, keeps=True)
    yield Case("rows and keys apart, bias", with_mask, x, keys_apart, (real(5, 6, salt=3),), keeps=True)
    yield Case("rows and keys apart, causal", causal, x, keys_apart, keeps=True)
    yield Case("nothing on tensor", sdpa, x, ("_ _ domain _",) * 3, keeps=True)
    yield Case(
        "one key head",
        functools.partial(sdpa, enable_gqa=True),
        _triple(5, 6, 4, 1),
        (by_heads, "_ _ domain _", "_ _ domain _"),
        keeps=True,
    )
    odd = _triple(5, 6, 6, 3)
    yield Case(
        "three key heads on two ranks", functools.partial(sdpa, enable_gqa=True), odd, (by_heads,) * 3, gathers=True
    )
    yield Case("features", sdpa, x, ("_ _ domain tensor",) * 3, gathers=True)


def test_with_heads_on_the_tensor_axis() -> None:
    run(_with_tensor_axis, TENSOR, at_least=15)


def _nested(mesh: str) -> Iterator[Case]:
    x = [t.reshape(12, -1, 6 if i < 2 else 5) for i, t in enumerate(_triple(5, 6))]
    yield Case("samples on two axes", _on_two_axes, x, ("data _ _",) * 3)


def _on_two_axes(q: Any, k: Any, v: Any) -> Any:
    if isinstance(q, DTensor):
        q, k, v = (x.redistribute(placements=[Shard(0), Shard(0), x.placements[2]]) for x in (q, k, v))
        out = sdpa(q, k, v)
        assert out.placements[:2] == (Shard(0), Shard(0))
        return out.redistribute(placements=[Shard(0), out.placements[2], out.placements[2]])
    return sdpa(q, k, v)


def test_samples_on_two_axes_are_local() -> None:
    run(_nested, "data=2,domain=2")


def _types(mesh: str) -> Iterator[Case]:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        x = [t.to(dtype) for t in _triple(7, 6)]
        for way in WAYS:
            yield Case(f"{way} {dtype}", forced(way, sdpa), x, (TOKENS,) * 3, tolerance=tolerance, keeps=True)
            m = (*x, real(7, 6, salt=3).to(dtype))
            layouts = (*(TOKENS,) * 3, "domain _")
            yield Case(f"{way} {dtype} bias", forced(way, with_mask), m, layouts, tolerance=tolerance, keeps=True)
        yield Case(f"whole rows {dtype}", sdpa, x, (SAMPLES, TOKENS, TOKENS), tolerance=tolerance, keeps=True)
    x = [t.float() for t in _triple(7, 6)]
    for way in WAYS:
        cast = forced(way, _under_autocast)
        yield Case(f"{way} autocast", cast, x, (TOKENS,) * 3, tolerance=3e-2, keeps=True)


def _under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return sdpa(q, k, v)


def test_types() -> None:
    run(_types, "data=1,domain=2", at_least=10)


def _bytes(mesh: str) -> None:
    """Say which way was taken, and send no more than it needs."""
    the_mesh, item, batch, heads = mesh_for(mesh), 8, 3, 4
    p, me = the_mesh.size(1), the_mesh.get_local_rank(1)
    for length, keys in ((8, 8), (7, 6)):
        x = _triple(length, keys)
        rows = [min(-(-n // p), max(n - me * -(-n // p), 0)) for n in (length, keys)]
        blocks = [min(-(-keys // p), max(keys - r % p * -(-keys // p), 0)) for r in range(2 * p)]
        for way in WAYS:
            with record() as log, spmd(on_gather="error"), using(way):
                y = sdpa(*(shard(t, the_mesh, TOKENS) for t in x))
            assert y.placements[1] == Shard(2)
            ops = {entry.op for entry in log.entries}
            assert ops == {f"sdpa ({way})"}
            assert {entry.kind for entry in log.entries} == {"redistribute"}
            found = log.num_bytes()
            if way == RING:
                passed = [blocks[(me - step) % p] for step in range(p - 1)]
                assert found == sum(passed) * batch * heads * 11 * item
            elif way == HEADS:
                share = heads // p
                there = rows[0] * 6 + rows[1] * 11
                # Of the output, a rank has all rows of its heads, and sends those of the others.
                back = (length - rows[0]) * 5 * share
                assert found == batch * item * (there * (heads - share) + back)
            else:
                assert found == rows[1] * batch * heads * 11 * item * (p - 1)


def test_bytes_are_those_of_the_way_in_the_record() -> None:
    run_ranks(_bytes, 2, "data=1,domain=2")
    run_ranks(_bytes, 4, "data=1,domain=4")


def _chosen() -> None:
    mesh = mesh_for("data=1,domain=4")

    def way(length: int, keys: int, heads: int, limit: int = tokens.GATHER_BYTES) -> str:
        x = [shard(torch.empty(1, heads, n, 8), mesh, TOKENS) for n in (length, keys, keys)]
        parts = tokens.parts_of(*x, [], (1, heads, length, 8), grouped=False)
        tokens.GATHER_BYTES, before = limit, tokens.GATHER_BYTES
        try:
            return tokens.choose(*x, [], parts)
        finally:
            tokens.GATHER_BYTES = before

    assert way(64, 64, 4) == HEADS
    assert way(64, 64, 3) == GATHERED
    assert way(64, 64, 3, limit=64 * 2 * 3 * 8 * 4 - 1) == RING
    assert way(64, 64, 3, limit=64 * 2 * 3 * 8 * 4) == GATHERED
    assert way(1000, 10, 4) == GATHERED  # few keys: to send them to all is less than to move the queries
    assert way(1000, 10, 4, limit=1) == HEADS
    with pytest.raises(SpecError), using("tails"):
        pass
    x = [shard(torch.zeros(1, 3, 8, 8), mesh, TOKENS)] * 3
    with pytest.raises(ShardingError, match="heads cannot be shared out"), spmd(), using(HEADS):
        sdpa(*x)


def test_the_way_is_chosen_by_size() -> None:
    run_ranks(_chosen, 4)


def _tiles() -> None:
    ring.TILE_BYTES, before = 3 * 4 * 2 * 8 * 2, ring.TILE_BYTES
    try:
        x = _triple(11, 7)
        check(Case("tiles", forced(RING, causal), x, (TOKENS,) * 3), "data=1,domain=4")
        layouts = (*(TOKENS,) * 3, "domain _")
        check(Case("tiles bias", forced(RING, with_mask), (*x, real(11, 7)), layouts), "data=1,domain=4")
    finally:
        ring.TILE_BYTES = before
    _twice()


def _twice() -> None:
    x = [shard(t, mesh_for("data=1,domain=4"), TOKENS).requires_grad_() for t in _triple(5, 5)]
    with spmd(), using(RING):
        y = sdpa(*x)
    (g,) = torch.autograd.grad(y.sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(g.sum(), x[1])


def test_the_ring_in_tiles_and_differentiated_twice() -> None:
    run_ranks(_tiles, 4)


def _dropped(mesh: str, layouts: tuple[str, ...], way: str) -> None:
    """Compare with the weights that were left, which values of one-hot rows give away."""
    the_mesh, p = mesh_for(mesh), 0.4
    q, k, v = _triple(6, 8)
    eye = torch.eye(8, dtype=torch.float64).expand(3, 4, 8, 8).contiguous()

    def attend(*x: Tensor) -> Any:
        torch.manual_seed(5 + the_mesh.get_rank())
        pieces_in = [shard(t, the_mesh, layout).requires_grad_() for t, layout in zip(x, layouts, strict=True)]
        with spmd(on_gather="error"), using(way):
            out = sdpa(*pieces_in, dropout_p=p)
        (out.redistribute(placements=out.placements) * 1.0).sum().backward()
        return out, [t.grad.full_tensor() for t in pieces_in]

    left = attend(q, k, eye)[0].full_tensor().detach()
    again = attend(q, k, eye)[0].full_tensor()
    assert torch.equal(left, again)
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(6), -1)
    kept = left != 0
    assert torch.allclose(left, torch.where(kept, weights / (1 - p), 0.0), rtol=0, atol=1e-12)
    assert 0.45 < float(kept.double().mean()) < 0.75
    # Other ranks, other masks: no two blocks that lie on different ranks are alike.
    halves = kept[:2], kept[2:]
    assert not torch.equal(halves[0][0], halves[1][0])
    assert not torch.equal(kept[:, :, :3], kept[:, :, 3:])
    assert not torch.equal(kept[:, 0], kept[:, 2])
    out, grads = attend(q, k, v)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = torch.softmax(leaves[0] @ leaves[1].transpose(-2, -1) / math.sqrt(6), -1)
    expected = torch.where(kept, scores / (1 - p), 0.0) @ leaves[2]
    expected.sum().backward()
    assert torch.allclose(out.full_tensor(), expected, rtol=0, atol=1e-12)
    for found, leaf in zip(grads, leaves, strict=True):
        assert torch.allclose(found, leaf.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_dropout(way: str) -> None:
    run_ranks(_dropped, 4, "data=2,domain=2", (TOKENS,) * 3, way)


def test_dropout_of_split_keys_and_over_tensor() -> None:
    run_ranks(_dropped, 4, "data=2,domain=2", (SAMPLES, TOKENS, TOKENS), GATHERED)
    run_ranks(_dropped, 4, TENSOR, ("_ _ domain _",) * 3, RING)


def _all_dropped(mesh: str) -> Iterator[Case]:
    for way in WAYS:
        all_gone = forced(way, functools.partial(sdpa, dropout_p=1.0))
        yield Case(f"{way}", all_gone, _triple(6, 4), (TOKENS,) * 3)


def test_dropout_of_everything() -> None:
    run(_all_dropped, "data=1,domain=2")


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    q, k, v = (shard(t, mesh, TOKENS) for t in _triple(5, 6))
    with record() as log, spmd(on_gather="error"):
        for call in (
            lambda: sdpa(q, k[..., :5], v),
            lambda: sdpa(q, k, v[:, :, :4]),
            lambda: sdpa(q, k, v, real(4, 6)),
            lambda: sdpa(q, k, v, torch.ones(5, 6, dtype=torch.int64)),
            lambda: sdpa(q, k, v, dropout_p=1.5),
            lambda: sdpa(q, k[:, :3], v[:, :3], enable_gqa=True),
            lambda: sdpa(q[:, 0], k[:, 0], v[:, 0], real(2, 3, 5, 6)),
            lambda: sdpa(q[:, 0], k[:, 0], v[:, 0], real(5, 6), is_causal=True),
            lambda: sdpa(q.float(), k, v),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call()
        log.entries[:] = [e for e in log.entries if "slice" in e.op or "getitem" in e.op]
    assert not [e for e in log.entries if "sdpa" in e.op]


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)
