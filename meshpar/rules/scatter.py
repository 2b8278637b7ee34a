"""Writes by index: `scatter`, `scatter_add`, `scatter_reduce`, `index_add`, `index_copy`, `index_fill`, `index_put`.

Invariant: every rank writes into the rows that it owns. Operands are sharded as what is written into; where the dim of
the index is itself sharded, scatters let another dim take its place by an all-to-all, and lists of rows send each row
to the rank that owns its place. Sums into a tensor that every rank holds whole are completed by an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.intervals import Interval, Rows, chunks, intersect, merged
from meshpar.registry import functions, rule
from meshpar.rules.assign import setitem
from meshpar.rules.lookup import Agreement, agreed, brought, narrowed, settled, turned_back
from meshpar.rules.pointwise import write_into
from meshpar.rules.spatial import fetch_rows, sharded_dims
from meshpar.rules.windows import Spec, output_shape


def _stand_in(value: Any) -> Any:
    return Spec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _checked(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """Give the global shape of the output, or raise what torch raises."""
    if not kwargs:
        return output_shape(func, "meta", *(_stand_in(arg) for arg in args))

    def with_names(*given: Any) -> Any:
        return func(*given, **kwargs)

    return output_shape.__wrapped__(with_names, "meta", *(_stand_in(arg) for arg in args))


def _scattered(func: Callable[..., Any], x: Tensor, dim: int, index: Tensor, source: Any, **named: Any) -> Any:
    """Scatter a tensor or number into x along a dim."""
    op = func.__name__
    shape = _checked(func, x, dim, index, source, **named)
    values = isinstance(source, Tensor)
    if x.dim() == 0 or index.dim() == 0 or (values and source.dim() == 0):
        return gather_call(func, (x, dim, index, source), named, why="it has no dims")
    dim %= x.dim()
    into, others = settled(x, op), [settled(index, op)]
    if values:
        given = settled(source, op)
        for d, n in enumerate(index.shape):
            given = narrowed(given, d, n)
        others.append(given)
    how = agreed(into, others, dim, shape)
    adds = func is torch.scatter_add
    if how is not None and how.spread and not adds:
        how = _without_spread(how, dim, shape)
    if how is None:
        why = f"it works along dim {dim}, which is sharded"
        return gather_call(func, (x, dim, index, source), named, why=why)
    own = pieces.local(brought(into, how.mesh, how.placements, op))
    parts = [_aligned(other, how, dim, shape, op) for other in others]
    if not values:
        parts.append(source)
    if how.spread:
        total = func(torch.zeros_like(own), dim, *parts, **named)
        part = own + pieces.psum(total, how.mesh, how.spread, op)
    else:
        part = func(own, dim, *parts, **named)
    return turned_back(pieces.whole(part, how.mesh, how.placements, shape), how.turned, dim, op)


def _without_spread(how: Agreement, dim: int, shape: Sequence[int]) -> Agreement | None:
    """Let other dims be sharded on the axes along which the index is cut along the looked-up dim."""
    placements = list(how.placements)
    for axis in how.spread:
        used = {p.dim for i, p in enumerate(placements) if isinstance(p, Shard) and how.mesh.size(i) > 1}
        free = [d for d in range(len(shape)) if d != dim and d not in used and shape[d] > 1]
        if not free:
            return None
        placements[axis] = Shard(max(free, key=lambda d: shape[d]))
    return Agreement(how.mesh, tuple(placements), how.turned, ())


def _aligned(x: Tensor, how: Agreement, dim: int, shape: Sequence[int], op: str) -> Tensor:
    """Give the rows of an index, or of values, that belong to this rank's rows of what is written into."""
    lies: list[Placement] = [Shard(dim) if axis in how.spread else p for axis, p in enumerate(how.placements)]
    if isinstance(x, DTensor):
        x = brought(x, how.mesh, lies, op)
        piece = pieces.local(x)
    else:
        piece = pieces.as_part(x, how.mesh, lies)
    for axis, placement in enumerate(lies):
        if not isinstance(placement, Shard):
            continue
        d, p, me = placement.dim, how.mesh.size(axis), how.mesh.get_local_rank(axis)
        if p == 1:
            continue
        n = x.shape[d] if axis in how.spread else shape[d]
        want: list[Interval] = [intersect(held, (0, x.shape[d])) for held in chunks(n, p)]
        if not isinstance(x, DTensor):
            piece = piece.narrow(d, want[me][0], want[me][1] - want[me][0])
        elif n != x.shape[d]:
            piece = fetch_rows(piece, d, x.shape[d], want, how.mesh, axis, op)
    return piece


def _in_place(handler: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make the handler that writes into its first argument what another handler gives."""

    def write(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, DTensor):
            return write_into(x, x, f"Tensor.{name}")  # the error of a plain target
        # A copy is read, since the backward may need the numbers as they were.
        before = pieces.whole(pieces.local(x).clone(), x.device_mesh, x.placements, x.shape)
        return write_into(x, handler(before, *args, **kwargs), f"Tensor.{name}", cast=False)

    return write


def _register(name: str, handler: Callable[..., Any]) -> None:
    def given(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        result = handler(*args, **kwargs)
        return result if out is None else write_into(out, result, name, cast=False)

    for function in functions(name):
        rule(function)(given)
    for function in functions(f"{name}_"):
        rule(function)(_in_place(handler, f"{name}_"))


def scatter(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None) -> Any:
    """Write values to the places that an index names along a dim."""
    named = {} if reduce is None else {"reduce": reduce}
    return _scattered(torch.scatter, input, dim, index, value if src is None else src, **named)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """Add values at the places that an index names along a dim."""
    return _scattered(torch.scatter_add, input, dim, index, src)


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Reduce values into the places that an index names along a dim."""
    return _scattered(torch.scatter_reduce, input, dim, index, src, reduce=reduce, include_self=include_self)


# lists of rows


def _rows_written(func: Callable[..., Any], x: Tensor, dim: int, index: Tensor, source: Any, **named: Any) -> Any:
    """Write rows of a source, or a number, to the rows that a list names."""
    op = func.__name__
    shape = _checked(func, x, dim, index, source, **named)
    fills = func is torch.index_fill
    if x.dim() == 0 or index.dim() != 1 or (isinstance(source, Tensor) and source.dim() == 0 and not fills):
        return gather_call(func, (x, dim, index, source), named, why="it has no rows")
    dim %= x.dim()
    places = index
    if isinstance(index, DTensor):
        places = pieces.local(pieces.moved(index, pieces.replicated(index.device_mesh), op))
    into = settled(x, op)
    if fills:
        if not isinstance(into, DTensor):
            return gather_call(func, (x, dim, places, source), named, why="an activation goes into a plain tensor")
        own = pieces.companion(source, into.device_mesh, into.placements) if isinstance(source, Tensor) else source
        lists, axis = _lists(into, dim, places, op)
        part = func(pieces.local(into), dim, _owned(into, dim, places, lists, axis), own, **named)
        return pieces.whole(part, into.device_mesh, into.placements, shape)
    given = settled(source, op)
    operands = [t for t in (into, given) if isinstance(t, DTensor)]
    if not operands:  # the index alone was an activation
        mesh = index.device_mesh  # type: ignore[attr-defined]
        into, operands = pieces.lift(into, mesh), [pieces.lift(into, mesh)]
    mesh = operands[0].device_mesh
    placements = _lying(into, given, dim)
    target = brought(into, mesh, placements, op)
    lists, axis = _lists(target, dim, places, op)
    own, local_places = pieces.local(target), _owned(target, dim, places, lists, axis)
    spread: list[int] = []  # axes that cut the list, where all ranks hold what is added to
    if isinstance(given, DTensor) and axis is None and func is torch.index_add:
        spread = [i for i in pieces.shard_axes(given, dim) if placements[i].is_replicate()]
    lies = [Shard(dim) if i in spread else p for i, p in enumerate(placements)]
    part = _rows_for(given, mesh, lies, dim, lists, axis, op)
    for i in spread:
        a, b = pieces.my_chunk(mesh, i, places.shape[0])
        local_places = local_places[a:b]
    if spread:
        total = func(torch.zeros_like(own), dim, local_places, part, **named)
        result = own + pieces.psum(total, mesh, spread, op)
    else:
        result = func(own, dim, local_places, part, **named)
    return pieces.whole(result, mesh, placements, shape)


def _rows_for(
    given: Tensor, mesh: DeviceMesh, lies: list[Placement], dim: int, lists: list[list[int]], axis: int | None, op: str
) -> Tensor:
    """Give the rows of a source that this rank writes: those that `lists` names where an axis shards the dim."""
    if isinstance(given, DTensor):
        given = brought(given, mesh, lies, op)
        if axis is None:
            return pieces.local(given)
        want: list[Rows] = [merged((k, 1, 1) for k in rows) for rows in lists]
        return fetch_rows(pieces.local(given), dim, given.shape[dim], want, mesh, axis, op)
    part = pieces.as_part(given, mesh, lies)
    if axis is not None:
        part = part.index_select(dim, _tensor(lists[mesh.get_local_rank(axis)], part))
        lies = [Replicate() if i == axis else p for i, p in enumerate(lies)]
    return pieces.cut(part, mesh, lies)


def _lying(into: Tensor, given: Tensor, dim: int) -> tuple[Placement, ...]:
    """Choose placements: those of what is written into, and those of the source along other dims where it is whole."""
    if not isinstance(into, DTensor):
        assert isinstance(given, DTensor)
        return tuple(Replicate() if isinstance(p, Shard) and p.dim == dim else p for p in given.placements)
    used = set(sharded_dims(into))
    out: list[Placement] = []
    for axis, p in enumerate(into.placements):
        other = given.placements[axis] if isinstance(given, DTensor) else Replicate()
        if isinstance(p, Replicate) and isinstance(other, Shard) and other.dim != dim and other.dim not in used:
            p = other
            used.add(other.dim)
        out.append(p)
    return tuple(out)


def _lists(x: DTensor, dim: int, places: Tensor, op: str) -> tuple[list[list[int]], int | None]:
    """Give, for each rank of the axis that shards the dim, the positions in the list whose rows it owns."""
    axis = sharded_dims(x).get(dim)
    if axis is None:
        return [], None
    n = x.shape[dim]
    rows = places.tolist()
    wrong = [i for i in rows if not (-n if op == "index_fill" else 0) <= i < n]
    if wrong:
        msg = f"{op}(): index {wrong[0]} is out of bounds for dimension {dim} with size {n}"
        raise IndexError(msg)
    held = pieces.axis_chunks(x.device_mesh, axis, n)
    return [[k for k, i in enumerate(rows) if a <= i % n < b] for a, b in held], axis


def _owned(x: DTensor, dim: int, places: Tensor, lists: list[list[int]], axis: int | None) -> Tensor:
    """Give the local rows that this rank writes."""
    if axis is None:
        return places
    n, mine = x.shape[dim], lists[x.device_mesh.get_local_rank(axis)]
    own = places.index_select(0, _tensor(mine, places)) % max(n, 1)
    return own - pieces.my_chunk(x.device_mesh, axis, n)[0]


def _tensor(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    """Add rows to the rows that a list names."""
    return _rows_written(torch.index_add, input, dim, index, source, **({} if alpha == 1 else {"alpha": alpha}))


def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Copy rows to the rows that a list names."""
    return _rows_written(torch.index_copy, input, dim, index, source)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """Fill the rows that a list names."""
    return _rows_written(torch.index_fill, input, dim, index, value)


def index_put(input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Write into an index made of tensors; what accumulates is gathered."""
    if accumulate or not isinstance(input, DTensor):
        why = "it adds up" if accumulate else "an activation goes into a plain tensor"
        return gather_call(torch.index_put, (input, tuple(indices), values, accumulate), {}, why=why)
    x = pieces.whole(pieces.local(input).clone(), input.device_mesh, input.placements, input.shape)
    setitem(x, tuple(slice(None) if i is None else i for i in indices), values)
    return x


for _name, _handler in (
    ("scatter", scatter),
    ("scatter_add", scatter_add),
    ("scatter_reduce", scatter_reduce),
    ("index_add", index_add),
    ("index_copy", index_copy),
    ("index_fill", index_fill),
    ("index_put", index_put),
):
    _register(_name, _handler)
