"""Views of sharded activations against one process."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshpar.batch import shard
from meshpar.errors import ShardingError
from meshpar.intervals import chunks
from meshpar.rules.reshape import groups
from meshpar.scope import spmd
from meshpar.testing import RankError, run_ranks
from meshpar.testing.equivalence import Report, assert_same
from meshpar.testing.meshes import mesh_for

MESHES = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}


def image(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Call:
    """Call one method, or a torch function by its name, with given arguments; can be sent to the ranks."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs

    def __call__(self, x: Tensor) -> Any:
        if self.name in ("T", "mT", "H", "mH"):
            return getattr(x, self.name)
        if self.name.startswith("torch."):
            return getattr(torch, self.name[6:])(x, *self.args, **self.kwargs)
        return getattr(x, self.name)(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{self.name}{self.args}{self.kwargs or ''}"


def compare(spec: str, shape: tuple[int, ...], layout: str | None, fn: Any, **options: Any) -> Report:
    return assert_same(fn, [image(shape)], mesh=mesh_for(spec), layouts=[layout], tolerance=1e-12, **options)


def check(spec: str, shape: tuple[int, ...], layout: str | None, fn: Any, **options: Any) -> int:
    """Compare with one process, gradients too; give the bytes that this rank sent forward."""
    return compare(spec, shape, layout, fn, **options).log.num_bytes(backward=False)


def check_gathers(spec: str, shape: tuple[int, ...], layout: str | None, fn: Any) -> int:
    return len(compare(spec, shape, layout, fn, gathers=True).log.gathers())


def placements(spec: str, shape: tuple[int, ...], layout: str | None, fn: Any) -> str:
    x = shard(image(shape), mesh_for(spec), layout)
    with spmd(on_gather="error"):
        y = fn(x)
    names = y.device_mesh.mesh_dim_names
    return " ".join(
        next(
            (n for n, p in zip(names, y.placements, strict=True) if p.is_shard(d) and y.device_mesh[n].size() > 1), "_"
        )
        for d in range(y.dim())
    )


IMAGE = (3, 4, 5, 6)
PERMUTATIONS = [
    Call("permute", 0, 2, 3, 1),
    Call("permute", (3, 2, 1, 0)),
    Call("torch.permute", (0, 2, 3, 1)),
    Call("transpose", 1, 2),
    Call("torch.transpose", -1, 0),
    Call("swapaxes", 2, 3),
    Call("swapdims", dim0=0, dim1=2),
    Call("moveaxis", 2, 0),
    Call("torch.movedim", (0, 1), (3, 2)),
    Call("mT"),
    Call("mH"),
    Call("torch.adjoint"),
]
SAME_SHARDS = [
    Call("unsqueeze", 2),
    Call("torch.unsqueeze", dim=-1),
    Call("reshape", 3, 2, 2, 5, 6),
    Call("view", (3, 4, 5, 2, 3)),
    Call("view", -1, 4, 5, 6),
    Call("reshape", 3, 4, 1, 5, 1, 6),
    Call("unflatten", 1, (2, -1)),
    Call("torch.unflatten", 3, (3, 2)),
    Call("expand", 2, -1, -1, -1, -1),
    Call("expand", (3, 4, 5, 6)),
    Call("repeat", 1, 2, 1, 3),
    Call("tile", 2),
    Call("torch.squeeze"),
]


@pytest.mark.parametrize("fn", [*PERMUTATIONS, *SAME_SHARDS], ids=str)
def test_local_views_send_nothing(fn: Call) -> None:
    for spec, p in MESHES.items():
        assert sum(run_ranks(check, p, spec, IMAGE, None, fn)) == 0


@pytest.mark.parametrize(
    ("shape", "layout", "fn", "after"),
    [
        (IMAGE, None, Call("permute", 0, 2, 3, 1), "data domain _ _"),
        (IMAGE, None, Call("mT"), "data _ _ domain"),
        (IMAGE, None, Call("reshape", 3, 2, 2, 5, 6), "data _ _ domain _"),
        (IMAGE, None, Call("reshape", 3, 4, -1), "data _ domain"),
        (IMAGE, None, Call("flatten", 2), "data _ domain"),
        ((2, 30, 3), "data domain _", Call("unflatten", 1, (5, 6)), "data domain _ _"),
        ((2, 1, 4, 3), "data domain _ _", Call("expand", 2, 9, 4, 3), "data domain _ _"),
        ((2, 3, 4, 3), None, Call("repeat", 1, 1, 3, 1), "data _ domain _"),
    ],
    ids=str,
)
def test_output_stays_sharded(shape: tuple[int, ...], layout: str | None, fn: Call, after: str) -> None:
    assert set(run_ranks(placements, 4, "data=2,domain=2", shape, layout, fn)) == {after}


@pytest.mark.parametrize(
    ("shape", "layout", "fn"),
    [
        ((2, 3, 5, 4), None, Call("flatten", 2)),
        ((2, 3, 7, 4), None, Call("reshape", 2, 3, 28)),
        ((2, 28, 3), "_ domain _", Call("reshape", 2, 7, 4, 3)),
        ((2, 12, 3), "_ domain _", Call("reshape", 2, 4, 9)),
        ((2, 12), "_ domain", Call("view", 2, 3, 4)),
        ((12, 5), "domain _", Call("ravel")),
        ((6, 1, 4), "domain _ _", Call("reshape", 1, 24)),
        ((3, 4, 5), "domain _ _", Call("reshape", 6, 10)),
    ],
    ids=str,
)
def test_leading_sharded_dims_are_rechunked(shape: tuple[int, ...], layout: str | None, fn: Call) -> None:
    for spec in ("data=1,domain=4", "data=1,domain=3", "data=1,domain=2"):
        run_ranks(check, MESHES[spec], spec, shape, layout, fn)


def test_bytes_of_a_rechunk_are_the_rows_that_move() -> None:
    n, inner, p = 5, 6, 4
    sent = run_ranks(check, p, "data=1,domain=4", (2, n, inner), "_ domain _", Call("flatten", 1))
    least = 0
    for (a, b), (c, d) in zip(chunks(n * inner, p), chunks(n, p), strict=True):
        least += len(set(range(a, b)) - set(range(c * inner, d * inner))) * 2 * 8
    assert sum(sent) == least


def test_two_axes() -> None:
    spec, layout = "data=1,domain=2,tensor=2", "_ domain tensor _"
    for fn in (
        Call("permute", 2, 0, 1, 3),
        Call("reshape", 2, 5, 3, 2, 4),
        Call("reshape", 2, 5, 6, 2, 2),
        Call("reshape", 2, 5, 24),
        Call("repeat", 1, 2, 3, 1),
    ):
        run_ranks(check, 4, spec, (2, 5, 6, 4), layout, fn)
    both = Call("reshape", 15, 2, 3, 8)  # both sharded dims lead a group that changes
    run_ranks(check, 4, spec, (5, 6, 6, 4), "domain _ tensor _", both)


def test_a_dim_inside_of_a_merge_stays_sharded() -> None:
    for fn in (nn.Flatten(), Call("reshape", 2, -1), Call("flatten", 1, 2)):
        for spec, p in MESHES.items():
            run_ranks(check, p, spec, (2, 3, 5, 4), None, fn)


def test_size_one_dims() -> None:
    for fn in (
        Call("squeeze"),
        Call("squeeze", 2),
        Call("squeeze", (0, 2)),
        Call("torch.squeeze", dim=0),
        Call("reshape", 3, 4),
        Call("expand", 5, 3, 9, 4),
        Call("reshape", 1, 3, 4, 1),
        Call("reshape", 1, 3, 2, 2),
    ):
        for spec, p in MESHES.items():
            run_ranks(check, p, spec, (1, 3, 1, 4), None, fn)


def test_a_local_row_is_not_squeezed() -> None:
    for spec, p in MESHES.items():
        run_ranks(check, p, spec, (4, 1, 4, 3), None, Call("squeeze"))


def test_matrices() -> None:
    for fn in (Call("t"), Call("T"), Call("H"), Call("torch.t"), Call("mT"), Call("ravel")):
        for layout in ("domain _", "data _"):
            run_ranks(check, 4, "data=2,domain=2", (5, 3), layout, fn)


def expand_as(x: Tensor, y: Tensor) -> Tensor:
    return x.expand_as(y) * y


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x, y)
    return a * b + torch.broadcast_to(x, y.shape)


def reshape_as(x: Tensor, y: Tensor) -> Tensor:
    return y.reshape_as(y.view_as(y)) + x


def check_two(spec: str, fn: Any, a: tuple[int, ...], b: tuple[int, ...], layouts: list[str]) -> None:
    assert_same(fn, [image(a), image(b)], mesh=mesh_for(spec), layouts=layouts, tolerance=1e-12)


@pytest.mark.parametrize("fn", [expand_as, broadcast, reshape_as])
def test_views_to_the_shape_of_another(fn: Any) -> None:
    for spec, p in MESHES.items():
        run_ranks(check_two, p, spec, fn, (1, 2, 1, 3), (4, 2, 5, 3), ["data _ domain _"] * 2)
        run_ranks(check_two, p, spec, fn, (2, 1, 3), (4, 2, 5, 3), ["_ _ _", "data _ domain _"])


def as_other_dtype(x: Tensor) -> Any:
    return x.detach().view(torch.int64), x.detach().view(torch.int32), x.detach().view(dtype=torch.float64)


def test_view_as_dtype() -> None:
    run_ranks(check, 4, "data=1,domain=4", IMAGE, None, as_other_dtype, gradients=False)


def test_layers() -> None:
    for spec, p in MESHES.items():
        run_ranks(check, p, spec, (4, 6, 5, 4), None, nn.Unflatten(1, (2, 3)))
        run_ranks(check, p, spec, (4, 6, 5, 4), None, nn.Flatten(2))
    run_ranks(check, 4, "data=4", (4, 6, 5, 4), None, nn.Flatten())


def written_through(spec: str) -> None:
    x = shard(image(IMAGE), mesh_for(spec))
    with spmd(on_gather="error"):
        x.permute(0, 2, 3, 1).add_(1.0)
        x.view(3, 2, 2, 5, 6).mul_(2.0)
    torch.testing.assert_close(x.full_tensor(), (image(IMAGE) + 1) * 2)


def test_local_views_share_memory() -> None:
    run_ranks(written_through, 4, "data=2,domain=2")


def squeezed_in_place(spec: str) -> None:
    x = shard(image((1, 3, 4, 4)), mesh_for(spec))
    with spmd():
        x.squeeze_(0)


def call(spec: str, fn: Call, shape: tuple[int, ...] = IMAGE) -> None:
    with spmd():
        fn(shard(image(shape), mesh_for(spec)))


def test_in_place_is_refused() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(squeezed_in_place, 2, "data=1,domain=2")
    assert {type(e) for e in caught.value.exceptions.values()} == {ShardingError}


@pytest.mark.parametrize(
    "fn",
    [
        Call("reshape", 7, -1),
        Call("view", 3, 4, 5, 7),
        Call("reshape", -1, -1),
        Call("permute", 0, 1, 2),
        Call("transpose", 0, 4),
        Call("squeeze", 4),
        Call("unsqueeze", 6),
        Call("expand", 3, 4, 10, 6),
        Call("repeat", 2, 2),
        Call("unflatten", 2, (2, 2)),
        Call("flatten", 3, 1),
    ],
    ids=str,
)
def test_errors_are_those_of_one_process(fn: Call) -> None:
    try:
        fn(image(IMAGE))
    except Exception as error:
        expected = type(error)
    with pytest.raises(RankError) as caught:
        run_ranks(call, 2, "data=1,domain=2", fn)
    assert {type(e) for e in caught.value.exceptions.values()} == {expected}


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes of one product, by splitting and merging its factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=6))

    def merge() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1))) if len(factors) > 1 else [])
        ends = [0, *cuts, len(factors)]
        shape = [math.prod(factors[a:b]) for a, b in itertools.pairwise(ends)]
        for _ in range(draw(st.integers(0, 1))):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        return tuple(shape)

    return merge(), merge()


@settings(max_examples=300, deadline=None)
@given(reshapes())
def test_groups(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    before, after = case
    found = groups(before, after)
    assert [d for group in found for d in group[0]] == list(range(len(before)))
    assert [d for group in found for d in group[1]] == list(range(len(after)))
    for a, b in found:
        assert math.prod(before[d] for d in a) == math.prod(after[d] for d in b)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], str, Call, bool]:
    spec = draw(st.sampled_from(list(MESHES)))
    kind = draw(st.sampled_from(["reshape", "reshape", "reshape", "permute", "repeat", "expand", "squeeze"]))
    before, after = draw(reshapes())
    if kind == "reshape":
        fn = Call("reshape", *after)
    elif kind == "permute":
        fn = Call("permute", *draw(st.permutations(range(len(before)))))
    elif kind == "squeeze":
        fn = Call("squeeze")
    else:
        more = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        if kind == "repeat":
            fn = Call("repeat", *more, *(draw(st.integers(1, 3)) for _ in before))
        else:
            fn = Call("expand", *more, *(draw(st.integers(1, 7)) if n == 1 else n for n in before))
    dims = draw(st.permutations(range(len(before))))
    tokens = ["_"] * len(before)
    for axis, dim in zip(("domain", "data"), dims, strict=False):
        tokens[dim] = axis
    return spec, before, " ".join(tokens), fn, kind == "reshape"


def _run(case: tuple[str, tuple[int, ...], str, Call, bool]) -> None:
    spec, shape, layout, fn, may_gather = case
    run_ranks(check, MESHES[spec], spec, shape, layout, fn, gathers=may_gather)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process(case: Any) -> None:
    _run(case)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_one_process_long(case: Any) -> None:
    _run(case)
