"""Lookups and writes by index against one process: gather, scatter and their kin, embeddings, triangles, diagonals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import MESHES, TENSOR, Case, real, run, whole
from torch import Tensor, nn
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.errors import GatherError, ShardingError
from meshpar.intervals import chunks
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import assert_same, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

LAYOUTS = ("data domain _", "domain _ data", "_ _ domain", "data _ _")


def distinct(rows: int, *shape: int, salt: int = 0) -> Tensor:
    """Draw an index along dim 1 that names no row twice: what a scatter gives is then certain."""
    generator = torch.Generator().manual_seed(salt)
    noise = torch.rand((shape[0], rows, *shape[2:]), generator=generator)
    return noise.argsort(1)[:, : shape[1]]


def _gathers(mesh: str) -> Iterator[Case]:
    for layout in LAYOUTS:
        for shape in ((2, 7, 5), (1, 5, 4)):
            x = real(*shape)
            for dim in range(3):
                n = shape[dim]
                for other in LAYOUTS:
                    idx = whole(*shape, high=n, salt=dim)
                    label = f"{shape} {layout}, {other}, dim {dim}"
                    yield Case(label, lambda x, i, dim=dim: torch.gather(x, dim, i), (x, idx), (layout, other))
                small = whole(*[max(1, m - 1) for m in shape], high=n)
                fn = lambda x, dim=dim, small=small: x.gather(dim, small)  # noqa: E731
                yield Case(f"plain index, {shape} {layout} dim {dim}", fn, (x,), (layout,))
                fn = lambda i, x, dim=dim: torch.gather(input=x, dim=dim, index=i)  # noqa: E731
                yield Case(f"plain input, {shape} {layout} dim {dim}", fn, (small,), (layout,), (x,))
                few = whole(*[1 if d == dim else m for d, m in enumerate(shape)], high=n)
                fn = lambda x, dim=dim, few=few: torch.take_along_dim(x, few, dim)  # noqa: E731
                yield Case(f"along, {shape} {layout} dim {dim}", fn, (x,), (layout,))
            row = whole(shape[1], high=shape[1]).view(1, -1, 1)
            yield Case(f"broadcast {layout}", lambda x, row=row: x.take_along_dim(row, 1), (x,), (layout,))
    scores, labels = real(6, 5), whole(6, high=5)
    picked = lambda x, i: x.log_softmax(-1).gather(-1, i.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    yield Case("labels", picked, (scores, labels), ("data _", "data"))
    yield Case("masked autoencoder", _mae, (real(4, 9, 3), real(4, 9, salt=1)), ("data domain _", "data _"))
    table, place = real(4, 3), whole(6, 5, high=12)
    yield Case("take", lambda i, w: torch.take(w, i), (place,), ("data domain",), (table,))
    yield Case("out", _out, (real(3, 5), whole(3, 5, high=3)), ("domain _", "domain _"), gradients=False)


def _mae(x: Tensor, noise: Tensor) -> Tensor:
    keep = noise.argsort(1)[:, :4]
    return torch.gather(x, 1, keep.unsqueeze(-1).repeat(1, 1, x.shape[2]))


def _out(x: Tensor, index: Tensor) -> Any:
    out = torch.zeros_like(x)
    with torch.no_grad():
        torch.gather(x, 0, index, out=out)
    return out


def test_gather() -> None:
    run(_gathers, MESHES[0], at_least=100)


def _scatters(mesh: str) -> Iterator[Case]:
    for layout in LAYOUTS:
        for shape, less in (((2, 7, 5), (2, 3, 4)), ((3, 4, 2), (1, 4, 2))):
            # torch's own backward refuses values that are more than the index
            x, v, more = real(*shape), real(*less, salt=1), real(*shape, salt=1)
            idx, full = distinct(shape[1], *less), distinct(shape[1], *shape)
            many = whole(*less, high=shape[1])
            label = f"{shape} {layout}"
            for name, index, values in (("less", idx, v), ("full", full, more)):
                two = (layout, "data domain _")
                yield Case(f"scatter {name} {label}", lambda x, v, i=index: torch.scatter(x, 1, i, v), (x, values), two)
                three = (layout, "_ domain data", "data domain _")
                yield Case(f"add {name} {label}", lambda x, i, v: x.scatter_add(1, i, v), (x, index, values), three)
            yield Case(
                f"number {label}", lambda x, i=idx: x.scatter(1, i, 2.5), (x,), (layout,), keeps="domain" in layout
            )
            yield Case(f"number named {label}", lambda x, i=idx: x.scatter(1, i, value=2.5), (x,), (layout,))
            yield Case(f"plain values {label}", lambda x, v, i=idx: x.scatter(1, i, v), (x,), (layout,), (v,))
            yield Case(f"plain target {label}", lambda v, x, i=idx: x.scatter_add(1, i, v), (v,), (layout,), (x,))
            fn = lambda x, v, i=idx: torch.scatter(x, 1, i, v)  # noqa: E731
            yield Case(f"more values {label}", fn, (x, more), (layout, "_ domain _"), gradients=False)
            for how in ("sum", "amax", "mean", "prod"):
                fn = lambda x, v, i=many, how=how: x.scatter_reduce(1, i, v, how, include_self=how != "mean")  # noqa: E731
                yield Case(f"{how} {label}", fn, (x, v), (layout, layout), tolerance=1e-11)
            fn = lambda x, v, i=many: (x * 1).scatter_add_(1, i, v)  # noqa: E731
            yield Case(f"in place {label}", fn, (x, v), (layout, layout), keeps=True)
            fn = lambda x, i=idx: (x * 1).scatter_(1, i, 3.0, reduce="multiply")  # noqa: E731
            yield Case(f"multiply {label}", fn, (x,), (layout,), keeps=True, gradients=False)
    x, i = real(3, 8, 2), whole(3, 8, 2, high=4)
    yield Case(
        "sum into few", lambda x, i: x.new_zeros(3, 4, 2).scatter_add(1, i, x), (x, i), ("_ domain _", "_ domain _")
    )


def test_scatter() -> None:
    run(_scatters, MESHES[0], at_least=100)


def _lists(mesh: str) -> Iterator[Case]:
    rows, unique = torch.tensor([4, 0, 4, 1]), torch.tensor([4, 0, 2])
    for layout in LAYOUTS:
        x = real(2, 6, 5)
        for other in LAYOUTS:
            label = f"{layout}, {other}"
            four, three = real(2, 4, 5, salt=1), real(2, 3, 5, salt=2)
            fn = lambda x, v: torch.index_add(x, 1, rows, v, alpha=2)  # noqa: E731
            yield Case(f"add {label}", fn, (x, four), (layout, other), keeps="domain" in layout and layout == other)
            yield Case(f"copy {label}", lambda x, v: x.index_copy(1, unique, v), (x, three), (layout, other))
            fn = lambda v, x: x.index_add(1, rows, v)  # noqa: E731
            yield Case(f"into plain {label}", fn, (four,), (other,), (x,))
        yield Case(f"plain source {layout}", lambda x, v: x.index_add(1, rows, v), (x,), (layout,), (four,), keeps=True)
        yield Case(f"plain copy {layout}", lambda x, v: x.index_copy(1, unique, v), (x,), (layout,), (three,))
        yield Case(f"fill {layout}", lambda x: x.index_fill(1, unique, 3.0), (x,), (layout,), keeps=True, quiet=True)
        value = lambda x, v: x.index_fill(1, unique, v.sum())  # noqa: E731
        yield Case(f"fill with a weight {layout}", value, (x,), (layout,), (real(3),), keeps=True)
        in_place = lambda x, v: (x * 1).index_add_(1, rows, v)  # noqa: E731
        yield Case(f"in place {layout}", in_place, (x, four), (layout, layout), keeps=True)
        in_place = lambda x, v: (x * 1).index_copy_(1, unique, v).index_fill_(2, unique, 0.5)  # noqa: E731
        yield Case(f"in place {layout}", in_place, (x, three), (layout, layout), keeps=True)
        put = lambda x, v: (x * 1).index_put_((torch.tensor([0, 1]), torch.tensor([3, 2])), v)  # noqa: E731
        if layout == "_ _ domain":
            yield Case(f"put {layout}", put, (x,), (layout,), (real(2, 5),), keeps=True)
    sharded = lambda x, i, v: x.index_add(1, i, v)  # noqa: E731
    yield Case("sharded list", sharded, (x, rows, four), ("data _ domain", "domain", "data domain _"))


def test_lists_of_rows() -> None:
    run(_lists, MESHES[0], at_least=60)


def _embeddings(mesh: str) -> Iterator[Case]:
    w = real(7, 3)
    layouts = ["data domain", "domain data", "_ domain", "_ _", *["tensor domain"] * ("tensor" in mesh)]
    for layout in layouts:
        for shape in ((4, 3), (1, 1)):
            idx = whole(*shape)
            label = f"{shape} {layout}"
            yield Case(label, F.embedding, (idx,), (layout,), (w,), quiet=layout != "tensor domain")
            yield Case(f"padding {label}", lambda i, w: F.embedding(i, w, -1), (idx,), (layout,), (w,))
            counted = lambda i, w: F.embedding(i, w, 2, scale_grad_by_freq=True)  # noqa: E731
            yield Case(f"counted {label}", counted, (idx,), (layout,), (w,))
            yield Case(f"one hot {label}", F.one_hot, (idx,), (layout,))
            yield Case(f"one of 9 {label}", lambda i: F.one_hot(i, 9), (idx,), (layout,), quiet=True)
            for mode in ("sum", "mean", "max"):
                bag = lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode, padding_idx=1)  # noqa: E731
                yield Case(f"bag {mode} {label}", bag, (idx,), (layout,), (w,), gathers=False)
            weighted = lambda i, v, w: F.embedding_bag(i, w, mode="sum", per_sample_weights=v)  # noqa: E731
            yield Case(f"weighted bag {label}", weighted, (idx, real(*shape)), (layout, layout), (w,))
    yield Case("image of classes", lambda i, w: F.embedding(i, w).permute(0, 3, 1, 2), (whole(2, 5, 3),), None, (w,))
    yield Case("modules", nn.Embedding(7, 3, padding_idx=0).double(), (whole(2, 5),), ("data domain",))


def test_embeddings() -> None:
    run(_embeddings, MESHES[0], at_least=30)


def _matrices(mesh: str) -> Iterator[Case]:
    layouts = ["data domain _", "data _ domain", "domain _ _", *["_ domain tensor"] * ("tensor" in mesh)]
    for layout in layouts:
        for shape in ((2, 5, 7), (2, 7, 4), (3, 1, 4)):
            x = real(*shape)
            for k in (-2, 0, 1):
                label = f"{shape} {layout} {k}"
                yield Case(f"tril {label}", lambda x, k=k: torch.tril(x, k), (x,), (layout,), keeps=True, quiet=True)
                yield Case(f"triu {label}", lambda x, k=k: (x * 1).triu_(k), (x,), (layout,), keeps=True, quiet=True)
                both = layout == "_ domain tensor"
                if -shape[1] <= k <= shape[2]:
                    fn = lambda x, k=k: x.diagonal(k, 1, 2)  # noqa: E731
                    yield Case(f"diagonal {label}", fn, (x,), (layout,), gathers=both)
                alone = shape[1] == 1 and layout == "data _ domain" and mesh == MESHES[0]  # no other dim to shard
                fn = lambda x, k=k: torch.diag_embed(x, k, 0, -2)  # noqa: E731
                yield Case(f"embed {label}", fn, (x,), (layout,), gathers=alone)
                yield Case(f"diag {label}", lambda x, k=k: x[0].diag(min(k, 1)), (x,), ("_ domain _",))
    yield Case("vector", lambda x: x[0, 0].diag(1), (real(2, 3, 5),), ("domain _ _",))


def test_triangles_and_diagonals() -> None:
    run(_matrices, MESHES[0], at_least=60)


def _sets(mesh: str) -> Iterator[Case]:
    x, few = whole(4, 7), torch.tensor([1, 5])
    yield Case("isin", lambda x: torch.isin(x, few), (x,), ("data domain",), quiet=True)
    yield Case("isin inverted", lambda x: torch.isin(x, 3, invert=True), (x,), ("data domain",))
    yield Case("isin of shards", torch.isin, (x, whole(3, salt=2)), ("data domain", "domain"))
    yield Case("bincount", lambda x: torch.bincount(x), (whole(9),), ("domain",))
    yield Case("bincount least", lambda x: x.bincount(minlength=11), (whole(9),), ("data",))
    counted = lambda x, v: torch.bincount(x, v)  # noqa: E731
    yield Case("bincount weights", counted, (whole(9), real(9)), ("domain", "data"), gradients=False)
    size = {  # what they give has a size that depends on the data
        "nonzero": lambda x: x.nonzero(),
        "nonzero tuple": lambda x: x.nonzero(as_tuple=True),
        "argwhere": lambda x: torch.argwhere(x > 2),
        "unique": lambda x: torch.unique(x),
        "unique counts": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        "masked_select": lambda x: torch.masked_select(x, x > 2),
        "where": lambda x: torch.where(x > 3),
    }
    for name, fn in size.items():
        yield Case(name, fn, (x,), ("data domain",), gathers=True)
    v, mask = real(4, 7), whole(4, 7, high=2, dtype=torch.bool)
    scattered = lambda x, m, s: x.masked_scatter(m, s)  # noqa: E731
    yield Case("masked_scatter", scattered, (v, mask), ("data domain", "data domain"), (real(30),), gathers=True)
    put = lambda x, s: (x * 1).put_(torch.tensor([3, 20, 5]), s)  # noqa: E731
    yield Case("put_", put, (v,), ("data domain",), (real(3),), gathers=True)
    yield Case("take", lambda x: x.take(torch.tensor([[3, 20], [5, 5]])), (v,), ("data domain",), gathers=True)


def test_sets_and_what_depends_on_the_data() -> None:
    run(_sets, MESHES[0], at_least=12)


BUILDERS = (_gathers, _scatters, _lists, _embeddings, _matrices, _sets)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__.strip("_"))
@pytest.mark.parametrize("mesh", ["data=1,domain=3", "data=1,domain=4", TENSOR])
def test_equals_one_process(mesh: str, build: Any) -> None:
    run(build, mesh)


def _errors() -> None:
    mesh = mesh_for("data=1,domain=2")
    x, i = shard(real(4, 5), mesh, "domain _"), shard(whole(4, 5, high=4), mesh, "domain _")
    w, three, two = real(7, 3), real(3, 5), real(2, 5)
    torch_refuses: list[Callable[[], Any]] = [
        lambda: x.gather(2, i),
        lambda: x.gather(1, i[:, :1].unsqueeze(0)),
        lambda: x.gather(1, i.double()),
        lambda: x.scatter(0, torch.zeros(5, 6, dtype=torch.int64), 1.0),
        lambda: x.index_add(0, torch.tensor([0, 1]), three),
        lambda: x.index_copy(0, torch.tensor([0, 4]), two),
        lambda: x.index_select(0, torch.tensor([-1])),
        lambda: x.tril(0)[:, 7],
        lambda: x.diagonal(0, 1, 1),
        lambda: F.embedding(i, w, 9),
    ]
    with record() as log, spmd(on_gather="error"):
        for attempt in torch_refuses:
            with pytest.raises((RuntimeError, IndexError, AssertionError)) as caught:
                attempt()
            assert not isinstance(caught.value, ShardingError | GatherError), caught.value
        for attempt in (
            lambda: F.embedding(i, w, max_norm=1.0),
            lambda: F.embedding(i, w, sparse=True),
            lambda: F.embedding_bag(i, w, sparse=True),
            lambda: torch.zeros(4, 5).scatter_add_(0, i, x),
        ):
            with pytest.raises(ShardingError):
                attempt()
    assert all(entry.op in ("Tensor.__getitem__",) for entry in log.entries), log.summary()


def test_wrong_arguments_raise_before_any_communication() -> None:
    run_ranks(_errors, 2)


def _sent() -> tuple[int, ...]:
    """Give the bytes that this rank sent for a list of rows, a gather along rows, and a picking of elements."""
    mesh = mesh_for("data=1,domain=4")
    x = shard(real(2, 8, 3), mesh, "data domain _")
    rows, columns = torch.tensor([7, 7, 0, 1, 6, 5]), torch.tensor([0, 1, 2, 0, 1, 2])
    out = []
    for fn in (
        lambda: x[:, rows],
        lambda: x[:, rows, columns],
        lambda: x.index_add(1, rows, x[:, :6]),
        lambda: x.gather(2, torch.zeros(2, 8, 1, dtype=torch.int64)),
    ):
        with record() as log, spmd(on_gather="error"):
            y = fn()
        assert any(p.is_shard() for p in y.placements)
        out.append(sum(e.num_bytes for e in log.entries if e.op != "Tensor.narrow"))
    return tuple(out)


def test_bytes_are_those_of_the_rows_that_are_named() -> None:
    sent = run_ranks(_sent, 4)
    rows, total = [7, 7, 0, 1, 6, 5], [sum(column) for column in zip(*sent, strict=True)]
    wants = [set(rows[a:b]) - set(range(*held)) for (a, b), held in zip(chunks(6, 4), chunks(8, 4), strict=True)]
    assert total[0] == sum(len(want) for want in wants) * 2 * 3 * 8  # a row that is named twice goes once
    moved = sum(
        not c <= rows[k] < d for (a, b), (c, d) in zip(chunks(6, 4), chunks(8, 4), strict=True) for k in range(a, b)
    )
    assert total[1] == moved * 2 * 8  # of each row the one element
    assert total[3] == 0


LOOKUPS = ("gather", "scatter_add", "scatter", "amax", "index_add", "index_copy", "index_fill", "along")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, list[Any]]:
    """Draw a mesh and some calls: of a function by name, on shapes and in layouts of its operands."""
    mesh = draw(st.sampled_from(MESHES))
    calls = []
    for _ in range(4):
        shape = tuple(draw(st.integers(1, 7)) for _ in range(3))
        dim = draw(st.integers(0, 2))
        less = tuple(draw(st.integers(1, n)) for n in shape)
        layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
        calls.append((draw(st.sampled_from(LOOKUPS)), shape, dim, less, layouts, draw(st.booleans()), len(calls)))
    return mesh, calls


def _check_drawn(calls: list[Any], mesh: str) -> None:
    """Check on this rank; operands are gathered only where fewer other dims are long than axes have several ranks."""
    the_mesh = mesh_for(mesh)
    num_axes = sum(n > 1 for n in the_mesh.shape)
    for (_, _, dim, less, *_), case in zip(calls, _drawn(calls, mesh), strict=True):
        options: Any = {"layouts": case.layouts, "tolerance": 1e-11, "gathers": True}
        try:
            report = assert_same(case.fn, case.inputs, mesh=the_mesh, **options)
        except Exception as error:
            error.add_note(case.label)
            raise
        room = sum(n > 1 for d, n in enumerate(less) if d != dim)
        assert room < num_axes or not report.log.gathers(), f"{case.label} gathers"


def _drawn(calls: list[Any], mesh: str) -> Iterator[Case]:
    for name, shape, dim, less, layouts, plain, salt in calls:
        x, v, n = real(*shape), real(*less, salt=1), shape[dim]
        order = torch.rand([n if d == dim else m for d, m in enumerate(less)], generator=_seeded(salt)).argsort(dim)
        unique = order.narrow(dim, 0, less[dim])
        many = whole(*less, high=n, salt=salt)
        index = unique if name == "scatter" else many
        rows = torch.randperm(n, generator=_seeded(salt))[: less[dim]]
        source = real(*[len(rows) if d == dim else m for d, m in enumerate(shape)], salt=2)
        few = whole(*[m if d == dim else 1 for d, m in enumerate(less)], high=n, salt=salt)
        calls_of: dict[str, Any] = {
            "gather": (lambda x, i, dim=dim: torch.gather(x, dim, i), (x, index)),
            "along": (lambda x, i, dim=dim: torch.take_along_dim(x, i, dim), (x, few)),
            "scatter_add": (lambda x, i, v, dim=dim: torch.scatter_add(x, dim, i, v), (x, index, v)),
            "scatter": (lambda x, i, v, dim=dim: torch.scatter(x, dim, i, v), (x, index, v)),
            "amax": (lambda x, i, v, dim=dim: x.scatter_reduce(dim, i, v, "amax"), (x, index, v)),
            "index_add": (lambda x, v, dim=dim, rows=rows: x.index_add(dim, rows, v), (x, source)),
            "index_copy": (lambda x, v, dim=dim, rows=rows: x.index_copy(dim, rows, v), (x, source)),
            "index_fill": (lambda x, dim=dim, rows=rows: x.index_fill(dim, rows, 2.0), (x,)),
        }
        fn, operands = calls_of[name]
        label = f"{name} {shape} {less} dim {dim} {layouts}"
        if plain and len(operands) == 3:
            fixed = lambda x, v, fn=fn, i=operands[1]: fn(x, i, v)  # noqa: E731
            yield Case(f"{label} plain", fixed, (x, v), layouts[:2])
        else:
            yield Case(label, fn, operands, layouts[: len(operands)])


def _seeded(salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(salt)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_lookups_property(example: Any) -> None:
    mesh, calls = example
    run_ranks(_check_drawn, ranks_of(mesh), calls, mesh)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_lookups_property_long(example: Any) -> None:
    mesh, calls = example
    run_ranks(_check_drawn, ranks_of(mesh), calls, mesh)
