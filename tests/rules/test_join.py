"""Joining and cutting sharded activations against one process."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshpar.batch import shard
from meshpar.intervals import chunks
from meshpar.scope import spmd
from meshpar.testing import RankError, run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for

MESHES = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}


def image(shape: tuple[int, ...], salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(7 + salt)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def join(name: str, dim: int | None, *tensors: Tensor) -> Any:
    return getattr(torch, name)(tensors) if dim is None else getattr(torch, name)(tensors, dim=dim)


def cut(name: str, args: tuple[Any, ...], x: Tensor) -> Any:
    """Weigh the parts differently, so that a swap of two of them shows in the gradients too."""
    return [part * (i + 1) for i, part in enumerate(getattr(torch, name)(x, *args))]


def cut_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Any:
    return list(getattr(x, name)(*args, **kwargs))


def check_join(
    spec: str,
    name: str,
    dim: int | None,
    shapes: list[tuple[int, ...]],
    layouts: list[str | None],
    weights: list[tuple[int, ...]] | None = None,
) -> int:
    """Compare with one process, gradients too; give the bytes that this rank sent forward."""
    inputs = [image(shape, i) for i, shape in enumerate(shapes)]
    plain = [image(shape, 50 + i) for i, shape in enumerate(weights or [])]
    fn = functools.partial(join, name, dim)
    report = assert_same(fn, inputs, mesh=mesh_for(spec), layouts=layouts, weights=plain, tolerance=1e-12)
    return report.log.num_bytes(backward=False)


def check_cut(spec: str, fn: Any, shape: tuple[int, ...], layout: str | None = None, **options: Any) -> int:
    report = assert_same(fn, [image(shape)], mesh=mesh_for(spec), layouts=[layout], tolerance=1e-12, **options)
    return report.log.num_bytes(backward=False)


@pytest.mark.parametrize("name", ["cat", "concat", "concatenate"])
def test_field_22_cat_along_rows(name: str) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_join, p, spec, name, 2, [(3, 2, 5, 3), (3, 2, 1, 3), (3, 2, 6, 3)], [None] * 3)
        run_ranks(check_join, p, spec, name, -2, [(1, 2, 1, 3), (1, 2, 2, 3)], [None] * 2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_along_other_dims(dim: int) -> None:
    shapes = [(3, 2, 5, 4), tuple(n + (d == dim % 4) for d, n in enumerate((3, 2, 5, 4)))]
    for spec, p in MESHES.items():
        sent = run_ranks(check_join, p, spec, "cat", dim, shapes, [None] * 2)
        if dim != 0 or spec.startswith("data=1"):
            assert sum(sent) == 0


def test_bytes_are_those_of_the_rows_that_move() -> None:
    p, sizes = 4, (5, 6)
    sent = run_ranks(check_join, p, "data=1,domain=4", "cat", 2, [(1, 2, n, 3) for n in sizes], [None] * len(sizes))
    least = 0
    for r, (a, b) in enumerate(chunks(sum(sizes), p)):
        for i, n in enumerate(sizes):
            own = chunks(n, p)[r]
            rows = {row - sum(sizes[:i]) for row in range(a, b)} & set(range(n))
            least += len(rows - set(range(*own))) * 2 * 3 * 8
    assert sum(sent) == least


@pytest.mark.parametrize(
    ("name", "dim", "shapes"),
    [
        ("stack", 0, [(2, 3, 5, 4)] * 3),
        ("stack", 2, [(2, 3, 5, 4)] * 2),
        ("stack", -1, [(2, 3, 1, 4)] * 2),
        ("hstack", None, [(2, 3, 5, 4), (2, 1, 5, 4)]),
        ("vstack", None, [(2, 3, 5, 4), (3, 3, 5, 4)]),
        ("dstack", None, [(2, 3, 5, 4), (2, 3, 7, 4)]),
    ],
)
def test_stacks(name: str, dim: int | None, shapes: list[tuple[int, ...]]) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_join, p, spec, name, dim, shapes, [None] * len(shapes))


def test_stacks_of_few_dims() -> None:
    for name in ("hstack", "vstack", "dstack"):
        run_ranks(check_join, 4, "data=2,domain=2", name, None, [(6,), (6,)], ["domain", "domain"])
        run_ranks(check_join, 4, "data=2,domain=2", name, None, [(6, 3), (6, 3)], ["domain _", "domain _"])


@pytest.mark.parametrize("layouts", [["data _ domain _", "_ _ _ _"], ["_ domain _ data", "data _ domain _"]])
def test_operands_that_lie_elsewhere(layouts: list[str | None]) -> None:
    for name, dim in (("cat", 1), ("cat", 2), ("stack", 0)):
        run_ranks(check_join, 4, "data=2,domain=2", name, dim, [(3, 4, 5, 4)] * 2, layouts)


def test_plain_operands() -> None:
    for dim, plain in ((1, (3, 1, 5, 4)), (2, (3, 2, 2, 4)), (0, (1, 2, 5, 4))):
        for spec, p in MESHES.items():
            run_ranks(check_join, p, spec, "cat", dim, [(3, 2, 5, 4)], [None], [plain])


def test_two_sharded_dims() -> None:
    for dim in (2, 3):
        shapes = [(1, 2, 5, 7), tuple(n + (d == dim) * 2 for d, n in enumerate((1, 2, 5, 7)))]
        spec, layout = "data=1,domain=2,tensor=2", "_ _ domain tensor"
        run_ranks(check_join, 4, spec, "cat", dim, shapes, [layout] * 2)
        fn = functools.partial(cut, "split", ([2, 2, 1] if dim == 2 else [3, 1, 3], dim))
        run_ranks(check_cut, 4, spec, fn, (1, 2, 5, 7), layout)


def placements(spec: str) -> list[bool]:
    x = shard(image((3, 2, 5, 4)), mesh_for(spec))
    with spmd(on_gather="error"):
        found = [torch.cat([x, x], 2), *x.chunk(3, 2), *x.split([1, 4], 2), *torch.tensor_split(x, 2)]
        stacked = torch.stack([x, x], 1)
    return [*(y.placements == x.placements for y in found), stacked.placements[1].is_shard(3)]


def test_outputs_stay_sharded() -> None:
    for found in run_ranks(placements, 4, "data=2,domain=2"):
        assert all(found)


def legacy_empty(x: Tensor) -> Tensor:
    return torch.cat([torch.empty(0, dtype=x.dtype), x, x.new_zeros(0)], 1)


def mixed_types(x: Tensor) -> Tensor:
    return torch.cat([x, x.float(), (x > 0).long()], 2)


def grown(x: Tensor) -> Tensor:
    """Concatenate in a loop, as forecasts do."""
    out = x
    for _ in range(2):
        out = torch.cat((out, x), dim=1)
    return torch.cat(tensors=[out, out], dim=-1)


@pytest.mark.parametrize("fn", [mixed_types, grown])
def test_cat_in_other_ways(fn: Any) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_cut, p, spec, fn, (3, 2, 5, 4))


CUTS: list[tuple[str, tuple[Any, ...]]] = [
    ("split", (2, 2)),
    ("split", ([1, 4, 2], 2)),
    ("split", ([0, 7], 2)),
    ("split", (3, 1)),
    ("split", (2,)),
    ("chunk", (3, 2)),
    ("chunk", (9, -2)),
    ("chunk", (2, 3)),
    ("chunk", (2,)),
    ("tensor_split", (3, 2)),
    ("tensor_split", ((1, 4), 2)),
    ("tensor_split", ([2], 1)),
    ("tensor_split", (9, 2)),
    ("split_with_sizes", ([3, 4], 2)),
    ("hsplit", (2,)),
    ("vsplit", ([1, 2],)),
    ("dsplit", ([1, 5],)),
]


@pytest.mark.parametrize(("name", "args"), CUTS)
def test_cuts(name: str, args: tuple[Any, ...]) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_cut, p, spec, functools.partial(cut, name, args), (3, 4, 7, 4))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("split", (2,), {"dim": 2}),
        ("split", ([3, 4],), {"dim": -2}),
        ("chunk", (3,), {"dim": 2}),
        ("chunk", (), {"chunks": 2, "dim": 1}),
        ("tensor_split", (3,), {"dim": 2}),
        ("split_with_sizes", ([3, 4],), {"dim": 2}),
    ],
)
def test_cut_methods(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run_ranks(check_cut, 4, "data=1,domain=4", functools.partial(cut_method, name, args, kwargs), (3, 4, 7, 4))


def test_overlapping_parts_are_gathered() -> None:
    fn = functools.partial(cut, "tensor_split", ((4, 2), 2))
    run_ranks(check_cut, 4, "data=1,domain=4", fn, (3, 4, 7, 4), gathers=True)


def test_a_cut_is_one_exchange() -> None:
    assert sum(run_ranks(check_cut, 4, "data=1,domain=4", functools.partial(cut, "chunk", (2, 1)), (1, 4, 7, 4))) == 0
    n, p, sizes = 7, 4, (3, 4)
    sent = run_ranks(check_cut, p, "data=1,domain=4", functools.partial(cut, "split", (list(sizes), 2)), (1, 2, n, 3))
    least = 0
    for r, own in enumerate(chunks(n, p)):
        wanted = {start + row for start, m in ((0, 3), (3, 4)) for row in range(*chunks(m, p)[r])}
        least += len(wanted - set(range(*own))) * 2 * 3 * 8
    assert sum(sent) == least


def failing(spec: str, fn: Any, shapes: list[tuple[int, ...]]) -> None:
    with spmd():
        fn(*[shard(image(shape), mesh_for(spec)) for shape in shapes])


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (functools.partial(join, "cat", 2), [(1, 2, 3, 4), (1, 3, 3, 4)]),
        (functools.partial(join, "cat", 4), [(1, 2, 3, 4), (1, 2, 3, 4)]),
        (functools.partial(join, "cat", 0), [(1, 2, 3, 4), (1, 3, 4)]),
        (functools.partial(join, "stack", 0), [(1, 2, 3, 4), (1, 2, 4, 4)]),
        (functools.partial(cut, "split", ([1, 1], 2)), [(1, 2, 3, 4)]),
        (functools.partial(cut, "chunk", (0, 2)), [(1, 2, 3, 4)]),
        (functools.partial(cut, "split", (2, 5)), [(1, 2, 3, 4)]),
    ],
)
def test_errors_are_those_of_one_process(fn: Any, shapes: list[tuple[int, ...]]) -> None:
    try:
        fn(*[image(shape) for shape in shapes])
    except Exception as error:
        expected = type(error)
    with pytest.raises(RankError) as caught:
        run_ranks(failing, 2, "data=1,domain=2", fn, shapes)
    assert {type(e) for e in caught.value.exceptions.values()} == {expected}


@st.composite
def joins(draw: st.DrawFn) -> tuple[Any, ...]:
    spec = draw(st.sampled_from(list(MESHES)))
    nd = draw(st.integers(1, 4))
    base = [draw(st.integers(1, 9)) for _ in range(nd)]
    num = draw(st.integers(1, 4))
    name = draw(st.sampled_from(["cat", "cat", "cat", "stack"]))
    dim = draw(st.integers(0, nd - 1))
    shapes = [tuple(base)] * num
    if name == "cat":
        shapes = [tuple(draw(st.integers(0, 9)) if d == dim else n for d, n in enumerate(base)) for _ in range(num)]
        if nd > 1 and any(shape[dim] == 0 for shape in shapes) and sum(shape[dim] for shape in shapes) == 0:
            shapes[0] = tuple(base)
    places = draw(st.permutations(range(nd)))
    tokens = ["_"] * nd
    for axis, place in zip(("domain", "data"), places, strict=False):
        tokens[place] = axis
    layout = " ".join(tokens)
    num_plain = draw(st.integers(0, num - 1))
    return spec, name, dim, shapes[num_plain:], [layout] * (num - num_plain), shapes[:num_plain]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Any, ...]:
    spec = draw(st.sampled_from(list(MESHES)))
    nd = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 11)) for _ in range(nd))
    dim = draw(st.integers(0, nd - 1))
    name = draw(st.sampled_from(["split", "sizes", "chunk", "tensor_split", "indices"]))
    n = shape[dim]
    if name in ("sizes", "indices"):
        ends = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
        if name == "indices":
            fn = functools.partial(cut, "tensor_split", (tuple(ends), dim))
        else:
            sizes = [b - a for a, b in zip([0, *ends], [*ends, n], strict=True)]
            fn = functools.partial(cut, "split", (sizes, dim))
    else:
        fn = functools.partial(cut, name, (draw(st.integers(1, 12)), dim))
    places = draw(st.permutations(range(nd)))
    tokens = ["_"] * nd
    for axis, place in zip(("domain", "data"), places, strict=False):
        tokens[place] = axis
    return spec, fn, shape, " ".join(tokens)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(joins(), cuts())
def test_equals_one_process(a: Any, b: Any) -> None:
    run_ranks(check_join, MESHES[a[0]], *a)
    run_ranks(check_cut, MESHES[b[0]], *b)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(joins(), cuts())
def test_equals_one_process_long(a: Any, b: Any) -> None:
    run_ranks(check_join, MESHES[a[0]], *a)
    run_ranks(check_cut, MESHES[b[0]], *b)
