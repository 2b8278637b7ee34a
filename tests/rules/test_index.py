"""Indexing, slices, roll and flip of sharded activations against one process."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import (
    ALL,
    IMAGE,
    LISTS,
    MASK_C,
    MESHES,
    UPPER_2D,
    call,
    check,
    get,
    image,
    num_gathers,
    put_number,
    put_tensor,
    several,
)
from torch import Tensor

from meshpar.batch import shard
from meshpar.intervals import chunks
from meshpar.scope import spmd
from meshpar.testing import RankError, run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for


@pytest.mark.parametrize(
    "index",
    [
        (ALL, ALL, slice(1, 4)),
        (ALL, ALL, slice(None, None, 2)),
        (ALL, ALL, slice(1, None, 3), slice(None, -1)),
        (..., slice(-3, None), ALL),
        (ALL, ALL, slice(4, 2)),
        (slice(1, None), slice(0, 1), slice(2, 3)),
        (..., 0),
        (ALL, ALL, 3),
        (ALL, 1, -1),
        (0,),
        2,
        -1,
        (0, 0, 0, 0),
        None,
        (ALL, None, ALL, None, slice(1, 3)),
        ...,
        (),
        ALL,
        slice(None, 2),
        (ALL, [0, 3, 3]),
        (ALL, torch.tensor([0, -1])),
        (ALL, UPPER_2D),
        (..., [5, 0]),
        (ALL, MASK_C),
        (ALL, [2, 0], ALL, [1, 4]),
        (ALL, [2, 0], slice(1, 3), [1, 4]),
        (ALL, [[0], [1]], ALL, [1, 4]),
        (0, [2, 0], 1),
        (ALL, [2, 0], 0, [1, 4]),
        (ALL, [2, 0], None, ALL, [1, 4]),
        (ALL, torch.tensor(2)),
        (ALL, ALL, torch.tensor(4), 1),
        (ALL, ALL, [4, 0, 2]),
        (ALL, ALL, torch.tensor([0, 0, 1, -1, 3, 2, 2]), slice(None, 2)),
        ([2, 1],),
    ],
    ids=str,
)
def test_field_23_every_index(index: Any) -> None:
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        run_ranks(check, 4, spec, functools.partial(get, index), IMAGE)


def test_every_index_of_a_single_row() -> None:
    indices: list[Any] = [0, (ALL, ALL, 0), (ALL, ALL, slice(0, 1)), (ALL, ALL, slice(1, None)), (..., 1, None)]
    fns = [functools.partial(get, index) for index in indices]
    for spec, p in MESHES.items():
        run_ranks(several, p, spec, fns, (1, 2, 1, 3))


@pytest.mark.parametrize("index", LISTS, ids=str)
def test_lists_and_masks_on_sharded_dims(index: Any) -> None:
    fns = [functools.partial(get, index), functools.partial(put_number, index)]
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        # Two sharded dims, or a row of one, are read with lists, but not written.
        beside = spec.startswith("data=2") and (isinstance(index[0], Tensor) or index[0] == 0)
        run_ranks(several, 4, spec, fns[: 1 if beside else 2], IMAGE)


def test_lists_that_no_rank_boundary_fits_are_gathered_and_said() -> None:
    for index in (([2, 1, 0], ALL, [0, 1, 2]), True):
        found = run_ranks(num_gathers, 4, "data=2,domain=2", functools.partial(get, index), IMAGE)
        assert all(n > 0 for n in found)


def picked(index: Any, x: Tensor, i: Tensor) -> Any:
    return x[tuple(i if item == "i" else item for item in index)]


def check_picked(spec: str, index: Any, layouts: tuple[str, str], *, plain: bool) -> None:
    i = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(3))
    if plain:
        fn = lambda i, x: picked(index, x, i)  # noqa: E731
        assert_same(fn, [i], mesh=mesh_for(spec), layouts=layouts[1:], weights=[image(IMAGE)], tolerance=1e-12)
    else:
        fn = functools.partial(picked, index)
        assert_same(fn, [image(IMAGE), i], mesh=mesh_for(spec), layouts=layouts, tolerance=1e-12)


def test_an_index_that_is_an_activation() -> None:
    cases: list[Any] = [("i",), (ALL, "i"), (ALL, ALL, "i"), (ALL, "i", torch.arange(5)), (1, ALL, ALL, "i")]
    for spec in ("data=1,domain=4", "data=2,domain=2"):
        for index in cases:
            run_ranks(check_picked, 4, spec, index, ("_ _ _ _", "data domain"), plain=True)
            run_ranks(check_picked, 4, spec, index, ("data _ _ domain", "data domain"), plain=False)
            run_ranks(check_picked, 4, spec, index, ("_ domain _ _", "data _"), plain=False)


def test_bytes_are_those_of_the_rows_that_move() -> None:
    n, p = 11, 4
    for start, stop, step in ((2, 10, 1), (0, 11, 2), (3, 5, 1)):
        rows = list(range(n))[start:stop:step]
        sent = run_ranks(
            check, p, "data=1,domain=4", functools.partial(get, (ALL, ALL, slice(start, stop, step))), (1, 2, n, 3)
        )
        least = 0
        for (a, b), own in zip(chunks(len(rows), p), chunks(n, p), strict=True):
            least += len(set(rows[a:b]) - set(range(*own))) * 2 * 3 * 8
        assert sum(sent) == least


def test_a_row_goes_to_the_other_ranks_once() -> None:
    sent = run_ranks(check, 4, "data=1,domain=4", functools.partial(get, (ALL, ALL, 4)), (1, 2, 8, 3))
    assert sent == [0, 0, 3 * 2 * 3 * 8, 0]


def test_unsharded_dims_send_nothing() -> None:
    indices: list[Any] = [(..., 0), (ALL, 1), (ALL, slice(1, 3)), (..., slice(None, None, 2)), (ALL, [1, 0]), None]
    fns = [functools.partial(get, index) for index in indices]
    fns += [functools.partial(call, "roll", (2, 3)), functools.partial(call, "flip", ((1,),))]
    for spec, p in MESHES.items():
        assert sum(run_ranks(several, p, spec, fns, IMAGE)) == 0


def lies(spec: str, index: Any) -> str:
    x = shard(image(IMAGE), mesh_for(spec))
    with spmd(on_gather="error"):
        y = x[index]
    axes = {p.dim: name for name, p in zip(("data", "domain"), y.placements, strict=False) if p.is_shard()}
    return " ".join(axes.get(d, "_") for d in range(y.dim()))


@pytest.mark.parametrize(
    ("index", "after"),
    [
        ((ALL, ALL, slice(1, 4)), "data _ domain _"),
        ((ALL, 0), "data domain _"),
        ((..., 0), "data _ domain"),
        ((ALL, ALL, 0), "data _ _"),
        (0, "_ domain _"),
        ((ALL, None), "data _ _ domain _"),
        ((ALL, [2, 0], ALL, [1, 4]), "_ data domain"),
        ((ALL, UPPER_2D), "data _ _ domain _"),
        ((ALL, ALL, [4, 0]), "data _ domain _"),
    ],
    ids=str,
)
def test_output_stays_sharded(index: Any, after: str) -> None:
    assert set(run_ranks(lies, 4, "data=2,domain=2", index)) == {after}


FUNCTIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("narrow", (2, 1, 3)),
    ("narrow", (-2, -2, 2)),
    ("narrow", (1, 1, 2)),
    ("narrow", (0, 1, 0)),
    ("select", (2, 3)),
    ("select", (1, -1)),
    ("select", (0, 0)),
    ("index_select", (1, torch.tensor([3, 0, 0]))),
    ("index_select", (2, torch.tensor([3, 0, 0, 4]))),
    ("unbind", (1,)),
    ("unbind", (-1,)),
    ("roll", (1, 2)),
    ("roll", ((-2, 3), (2, 3))),
    ("roll", ((7, 1, 1), (2, 0, 2))),
    ("roll", (5, 2)),
    ("flip", ((2,),)),
    ("flip", ((-1, 0, 2),)),
    ("flip", ((1,),)),
    ("repeat_interleave", (3, 2)),
    ("repeat_interleave", (2, -1)),
    ("flipud", ()),
    ("fliplr", ()),
]


@pytest.mark.parametrize(("name", "args"), FUNCTIONS)
def test_field_22_functions(name: str, args: tuple[Any, ...]) -> None:
    fn = functools.partial(call, name, args)
    for spec, p in MESHES.items():
        run_ranks(check, p, spec, fn, IMAGE)


def methods(x: Tensor) -> Any:
    return (
        x.narrow(2, 1, 2),
        x.select(dim=2, index=1),
        x.roll(shifts=2, dims=2),
        x.flip(2, 3),
        x.flip(dims=[2]),
        x.index_select(1, torch.tensor([1])),
        list(x.unbind(1)),
    )


def iterated(x: Tensor) -> Tensor:
    return sum((sample * (i + 1) for i, sample in enumerate(x)), start=x[0])


def test_methods() -> None:
    run_ranks(check, 4, "data=2,domain=2", methods, IMAGE)


def test_iteration() -> None:
    run_ranks(check, 4, "data=1,domain=4", iterated, IMAGE)
    assert run_ranks(num_gathers, 4, "data=2,domain=2", iterated, IMAGE) == [1] * 4


def test_roll_of_everything() -> None:
    run_ranks(check, 4, "data=4", functools.partial(call, "roll", (3,)), (2, 3), "_ _")
    found = run_ranks(num_gathers, 4, "data=1,domain=4", functools.partial(call, "roll", (3,)), IMAGE)
    assert all(n > 0 for n in found)


def test_two_sharded_dims() -> None:
    spec, layout = "data=1,domain=2,tensor=2", "_ _ domain tensor"
    for index in ((..., slice(1, 4), slice(None, None, 2)), (..., 2, slice(1, None)), (..., 1), (..., 1, 1)):
        run_ranks(check, 4, spec, functools.partial(get, index), (1, 2, 5, 7), layout)
    run_ranks(check, 4, spec, functools.partial(call, "roll", ((1, 2), (2, 3))), (1, 2, 5, 7), layout)
    run_ranks(check, 4, spec, functools.partial(call, "flip", ((2, 3),)), (1, 2, 5, 7), layout)


def failing(spec: str, index: Any) -> None:
    with spmd():
        shard(image(IMAGE), mesh_for(spec))[index]


@pytest.mark.parametrize(
    "index",
    [(ALL, ALL, 5), (ALL, ALL, -6), (0, 0, 0, 0, 0), (ALL, [0, 4]), (ALL, ALL, slice(None, None, -1)), "a", 1.5],
    ids=str,
)
def test_errors_are_those_of_one_process(index: Any) -> None:
    try:
        image(IMAGE)[index]
    except Exception as error:
        expected = type(error)
    with pytest.raises(RankError) as caught:
        run_ranks(failing, 2, "data=1,domain=2", index)
    assert {type(e) for e in caught.value.exceptions.values()} == {expected}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    spec = draw(st.sampled_from(list(MESHES)))
    nd = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(nd))
    places = draw(st.permutations(range(nd)))
    tokens = ["_"] * nd
    for axis, place in zip(("domain", "data"), places, strict=False):
        tokens[place] = axis
    kind = draw(st.sampled_from(["index", "index", "index", "put", "roll", "flip"]))
    if kind == "roll":
        dims = tuple(draw(st.sets(st.integers(0, nd - 1), min_size=1)))
        fn = functools.partial(call, "roll", (tuple(draw(st.integers(-12, 12)) for _ in dims), dims))
    elif kind == "flip":
        fn = functools.partial(call, "flip", (tuple(draw(st.sets(st.integers(0, nd - 1)))),))
    else:
        ends = st.one_of(st.none(), st.integers(-10, 10))
        index: list[Any] = []
        lists = 0
        for d, n in enumerate(shape):
            if draw(st.integers(0, 5)) == 0:
                index.append(None)
            choice = draw(st.sampled_from(["all", "slice", "slice", "int", "list"]))
            # Rows and lists together are gathered where a row of a sharded dim is written.
            mixed = lists if choice == "int" else any(isinstance(item, int) for item in index)
            if kind == "put" and mixed and choice in ("int", "list"):
                choice = "slice"
            if choice == "list" and not lists and (tokens[d] == "_" or kind == "index"):
                lists += 1
                index.append(draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=6, unique=kind == "put")))
                if kind == "put":  # a row named twice, as n - 1 and -1, may be written in any order
                    index[-1] = sorted({i % n for i in index[-1]})
            elif choice == "int":
                index.append(draw(st.integers(-n, n - 1)))
            elif choice == "slice":
                index.append(slice(draw(ends), draw(ends), draw(st.one_of(st.none(), st.integers(1, 4)))))
            else:
                index.append(ALL)
        if draw(st.booleans()):
            while index and index[-1] == ALL:
                index.pop()
        fn = functools.partial(put_tensor if kind == "put" else get, tuple(index))
    return spec, fn, shape, " ".join(tokens)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process(case: Any) -> None:
    run_ranks(check, MESHES[case[0]], *case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process_long(case: Any) -> None:
    run_ranks(check, MESHES[case[0]], *case)
