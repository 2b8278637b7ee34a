"""Views: reshape and its kin, permutations, squeezes, expands and repeats.

Invariant: sizes are global, -1 too, and every output is in canonical layout. A dim that comes out as it went in keeps
its shards, and the view is local. Where a sharded dim leads a group of dims that is merged or split, the elements are
contiguous on both sides and one fetch of flat positions re-chunks them; a sharded dim inside of a merged group
is gathered. Results may share memory with the input where torch's do, but not where rows have moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.errors import ShardingError, explain
from meshpar.intervals import Interval, Rows, chunks, take
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.spmd import announce_gather, functions, gather_call, name_of, rule

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Dims before and dims after that hold the same elements in the same order."""


def remapped(placements: Sequence[Placement], to: Mapping[int, int]) -> list[Placement]:
    """Give placements after dims were renumbered; a shard of a dim that is gone becomes `Replicate`."""
    return [Shard(to[p.dim]) if isinstance(p, Shard) and p.dim in to else Replicate() for p in placements]


def whole_along(x: DTensor, axes: Sequence[int], op: str, why: str = "") -> DTensor:
    """Bring all rows to every rank of some mesh axes: announced as a gather where a reason is given."""
    if not axes:
        return x
    if why:
        announce_gather(op, [x], why)
    target = [Replicate() if i in axes else p for i, p in enumerate(x.placements)]
    return pieces.moved(x, target, op, "gather" if why else "redistribute", why)


def _numbers(args: Sequence[Any]) -> tuple[Any, ...]:
    """Unpack sizes or dims that were given as one sequence, and read out those that are tensors."""
    items = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | torch.Size) else args
    return tuple(int(v) if isinstance(v, Tensor) else v for v in items)


def _ghost(shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Make a tensor of a global shape without data: torch answers questions about shapes with it."""
    return torch.empty_strided(tuple(shape), tuple(strides or [1] * len(shape)), device="meta")


# reshape and its kin


@functools.lru_cache(maxsize=4096)
def _shape_after(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Resolve -1, with torch's errors."""
    return tuple(torch.empty(shape, device="meta").reshape(sizes).shape)


@functools.lru_cache(maxsize=4096)
def groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...]:
    """Split two shapes of one number of elements, not 0, into the smallest groups of dims with equal products.

    Example:
        >>> groups((2, 12, 5), (2, 3, 4, 5))
        (((0,), (0,)), ((1,), (1, 2)), ((2,), (3,)))
    """
    out: list[Group] = []
    i = j = 0
    while i < len(before) or j < len(after):
        n = before[i] if i < len(before) else 0
        m = after[j] if j < len(after) else 0
        if n == m:
            take_before, take_after = 1, 1
        elif n == 1:
            take_before, take_after = 1, 0
        elif m == 1:
            take_before, take_after = 0, 1
        else:
            take_before = take_after = 1
            while n != m:
                if n < m:
                    n *= before[i + take_before]
                    take_before += 1
                else:
                    m *= after[j + take_after]
                    take_after += 1
        out.append((tuple(range(i, i + take_before)), tuple(range(j, j + take_after))))
        i, j = i + take_before, j + take_after
    return tuple(out)


def reshaped(x: DTensor, sizes: Sequence[int], op: str) -> DTensor:
    """Reshape an activation; see the head of the file for what is sent."""
    shape = _shape_after(tuple(x.shape), tuple(sizes))
    x = settle(x, range(x.dim()), op)
    mesh = x.device_mesh
    spread = sharded_dims(x)
    if 0 in shape:
        x = whole_along(x, list(spread.values()), op, "there are no elements" if spread else "")
        return pieces.whole(pieces.local(x).reshape(shape), mesh, pieces.replicated(mesh), shape)
    found = groups(tuple(x.shape), shape)
    to, moves, gone, inside = _destinations(x, shape, found)
    x = whole_along(x, gone, op)  # a dim of size 1 vanishes: one rank has had it all
    x = whole_along(x, inside, op, "a sharded dim is merged into the dims before it")
    piece = pieces.local(x)
    placements = remapped(x.placements, to)
    target = pieces.local_shape(shape, mesh, placements)
    if not moves:
        return pieces.whole(piece.reshape(target), mesh, placements, shape)
    # All groups that move are laid flat; the dims around them are as before or as after, which is the same there.
    for group, axis in moves:
        (first, *_), (lead, *_) = _leading(group, x.shape, shape)
        inner = math.prod(x.shape[d] for d in group[0] if d > first)
        outer = math.prod(shape[d] for d in group[1] if d > lead)
        unit = math.gcd(inner, outer)
        p = mesh.size(axis)
        have = _scaled(chunks(x.shape[first], p), inner // unit)
        want = _scaled(chunks(shape[lead], p), outer // unit)
        if have == want:
            continue
        local_before = list(piece.shape)
        head, tail = local_before[: group[0][0]], local_before[group[0][-1] + 1 :]
        rows = have[mesh.get_local_rank(axis)]
        flat = piece.reshape(*head, rows[1] - rows[0], unit, *tail)
        n = x.shape[first] * (inner // unit)
        flat = fetch_rows(flat, len(head), n, want, mesh, axis, op, have=have)
        # Keep the number of dims of the group, so that the next group is found where it was.
        piece = flat.reshape(*head, *[1] * (len(group[0]) - 1), flat.shape[len(head)] * unit, *tail)
    return pieces.whole(piece.reshape(target), mesh, placements, shape)


def _scaled(layout: Sequence[Interval], factor: int) -> tuple[Interval, ...]:
    return tuple((a * factor, b * factor) for a, b in layout)


def _leading(group: Group, before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """List the dims of a group that are longer than 1, before and after."""
    return [d for d in group[0] if before[d] > 1], [d for d in group[1] if after[d] > 1]


def _destinations(
    x: DTensor, shape: Sequence[int], found: Sequence[Group]
) -> tuple[dict[int, int], list[tuple[Group, int]], list[int], list[int]]:
    """Sort the dims: where each goes, the groups to re-chunk, the axes whose dim vanishes, the axes to gather."""
    spread = sharded_dims(x)
    to: dict[int, int] = {}
    moves: list[tuple[Group, int]] = []
    gone: list[int] = []
    inside: list[int] = []
    for group in found:
        if len(group[0]) == len(group[1]) == 1:
            to[group[0][0]] = group[1][0]
            continue
        first, lead = _leading(group, x.shape, shape)
        for dim in group[0]:
            if dim not in spread:
                continue
            if x.shape[dim] == 1:
                gone.append(spread[dim])
            elif dim == first[0]:
                to[dim] = lead[0]
                moves.append((group, spread[dim]))
            else:
                inside.append(spread[dim])
    return to, moves, gone, inside


@rule(*functions("reshape"))
def reshape(input: DTensor, *shape: Any, **named: Any) -> Any:
    """Give the elements, in row-major order, another shape."""
    return reshaped(input, _numbers(shape or (named["shape"],)), "reshape")


@rule(torch.Tensor.view)
def view(x: DTensor, *size: Any, **named: Any) -> Any:
    """Reshape, or read the memory as another dtype.

    Strides that torch would refuse are accepted: how a piece lies in memory may differ between ranks.
    """
    size = size or tuple(named.values())
    if isinstance(size[0], torch.dtype):
        return _as_dtype(x, size[0])
    return reshaped(x, _numbers(size), "view")


def _as_dtype(x: DTensor, dtype: torch.dtype) -> Any:
    old, new = x.element_size(), torch.empty((), dtype=dtype, device="meta").element_size()
    # Of another size, the elements of the last dim are packed together.
    x = settle(x, range(x.dim() - (old != new)), "view")
    shape = tuple(torch.empty(x.shape, dtype=x.dtype, device="meta").view(dtype).shape)
    return pieces.whole(pieces.local(x).view(dtype), x.device_mesh, x.placements, shape)


@rule(*functions("view_as", "reshape_as"))
def view_as(x: DTensor, other: Tensor) -> Any:
    """Reshape to the shape of another tensor."""
    return reshaped(x, tuple(other.shape), "view_as") if isinstance(x, DTensor) else x.reshape(other.shape)


@rule(*functions("flatten"))
def flatten(input: DTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge neighbouring dims; `nn.Flatten` comes here too."""
    shape = torch.empty(input.shape, device="meta").flatten(start_dim, end_dim).shape
    return reshaped(input, tuple(shape), "flatten")


@rule(*functions("unflatten"))
def unflatten(input: DTensor, dim: int, sizes: Any) -> Any:
    """Split a dim; `nn.Unflatten` comes here too."""
    shape = torch.empty(input.shape, device="meta").unflatten(dim, _numbers((sizes,))).shape
    return reshaped(input, tuple(shape), "unflatten")


@rule(*functions("ravel"))
def ravel(input: DTensor) -> Any:
    """Merge all dims."""
    return reshaped(input, (-1,), "ravel")


@rule(*functions("squeeze"))
def squeeze(input: DTensor, *dim: Any, **named: Any) -> Any:
    """Drop dims of global size 1; a dim that has one row on this rank alone stays."""
    dims = dim or tuple(named.values())
    given = _numbers(dims) if dims else tuple(range(input.dim()))
    shape = input.shape
    gone = {_wrapped(d, input.dim()) for d in given if input.dim() and shape[_wrapped(d, input.dim())] == 1}
    x = settle(input, range(input.dim()), "squeeze")
    x = whole_along(x, [axis for d, axis in sharded_dims(x).items() if d in gone], "squeeze")
    kept = [d for d in range(x.dim()) if d not in gone]
    piece = pieces.local(x)
    piece = piece.squeeze(tuple(gone)) if gone else piece.view_as(piece)
    to = {d: i for i, d in enumerate(kept)}
    return pieces.whole(piece, x.device_mesh, remapped(x.placements, to), [shape[d] for d in kept])


def _wrapped(dim: int, num_dims: int) -> int:
    """Make a dim not negative; torch's error where there is no such dim."""
    least = max(num_dims, 1)
    if not -least <= dim < least:
        msg = f"Dimension out of range (expected to be in range of [{-least}, {least - 1}], but got {dim})"
        raise IndexError(msg)
    return dim % least


@rule(*functions("unsqueeze"))
def unsqueeze(input: DTensor, dim: int) -> Any:
    """Insert a dim of size 1."""
    at = _wrapped(dim, input.dim() + 1)
    x = settle(input, range(input.dim()), "unsqueeze")
    shape = [*x.shape[:at], 1, *x.shape[at:]]
    to = {d: d + (d >= at) for d in range(x.dim())}
    return pieces.whole(pieces.local(x).unsqueeze(at), x.device_mesh, remapped(x.placements, to), shape)


# permutations


def _permuting(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func).replace(".__get__", "")

    def handler(x: DTensor, *args: Any, **named: Any) -> Any:
        # Strides tell apart the dims of a tensor without data: torch itself says where each has gone.
        ghost = _ghost(x.shape, range(2, 2 + x.dim()))
        after = func(ghost, *args, **named)
        to = {stride - 2: i for i, stride in enumerate(after.stride())}
        x = settle(x, range(x.dim()), op)
        piece = func(pieces.local(x), *args, **named)
        return pieces.whole(piece.resolve_conj(), x.device_mesh, remapped(x.placements, to), after.shape)

    return handler


for _function in functions("permute", "transpose", "swapaxes", "swapdims", "moveaxis", "movedim", "t", "adjoint"):
    rule(_function)(_permuting(_function))
for _property in ("T", "mT", "H", "mH"):
    _function = getattr(torch.Tensor, _property).__get__
    rule(_function)(_permuting(_function))


# expands and repeats


def expanded(x: DTensor, sizes: Sequence[int], op: str) -> DTensor:
    """Repeat dims of size 1 without copies; a sharded one sends its row to all ranks and stays sharded."""
    shape = tuple(torch.empty(x.shape, device="meta").expand(tuple(sizes)).shape)
    x = settle(x, range(x.dim()), op)
    mesh, new = x.device_mesh, len(shape) - x.dim()
    piece = pieces.local(x)
    for dim, axis in sharded_dims(x).items():
        m = shape[dim + new]
        if m != x.shape[dim]:
            want: list[Rows] = [((0, b - a, 0),) if b > a else () for a, b in chunks(m, mesh.size(axis))]
            piece = fetch_rows(piece, dim, 1, want, mesh, axis, op)
    placements = remapped(x.placements, {d: d + new for d in range(x.dim())})
    piece = piece.expand(pieces.local_shape(shape, mesh, placements))
    return pieces.whole(piece, mesh, placements, shape)


@rule(*functions("expand", "broadcast_to"))
def expand(input: DTensor, *size: Any, **named: Any) -> Any:
    """Repeat dims of size 1, and put new ones before."""
    named.pop("implicit", None)
    return expanded(input, _numbers(size or tuple(named.values())), "expand")


@rule(*functions("expand_as"))
def expand_as(x: Tensor, other: Tensor) -> Any:
    """Expand to the shape of another tensor."""
    return expanded(x, tuple(other.shape), "expand_as") if isinstance(x, DTensor) else x.expand(other.shape)


@rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Any:
    """Expand tensors to their common shape; plain ones stay plain."""
    given = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    shape = torch.broadcast_shapes(*(x.shape for x in given))
    return tuple(expanded(x, shape, "broadcast_tensors") if isinstance(x, DTensor) else x.expand(shape) for x in given)


def repeated(x: DTensor, times: Sequence[int], op: str) -> DTensor:
    """Copy the whole tensor along its dims."""
    shape = tuple(torch.empty(x.shape, device="meta").repeat(tuple(times)).shape)
    x = settle(x, range(x.dim()), op)
    mesh, new = x.device_mesh, len(shape) - x.dim()
    piece, local_times = pieces.local(x), list(times)
    for dim, axis in sharded_dims(x).items():
        n, again = x.shape[dim], times[dim + new]
        if again != 1:
            rows: Rows = ((0, n, 1),) * again if n else ()
            want = [take(rows, a, b) for a, b in chunks(n * again, mesh.size(axis))]
            piece = fetch_rows(piece, dim, n, want, mesh, axis, op)
            local_times[dim + new] = 1
    placements = remapped(x.placements, {d: d + new for d in range(x.dim())})
    return pieces.whole(piece.repeat(tuple(local_times)), mesh, placements, shape)


@rule(torch.Tensor.repeat)
def repeat(x: DTensor, *repeats: Any, **named: Any) -> Any:
    """Copy the tensor along each dim a number of times."""
    return repeated(x, _numbers(repeats or tuple(named.values())), "repeat")


@rule(*functions("tile"))
def tile(input: DTensor, *dims: Any, **named: Any) -> Any:
    """Repeat, with times of 1 put before where there are fewer than dims."""
    times = _numbers(dims or tuple(named.values()))
    return repeated(input, (1,) * (input.dim() - len(times)) + times, "tile")


# in place


def _refused(func: Callable[..., Any]) -> Callable[..., Any]:
    name = name_of(func)

    def handler(x: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(x, DTensor):
            return gather_call(func, (x, *args), named, why="no rule")
        raise ShardingError(
            explain(
                f"{name}: cannot change the shape of an activation in place.",
                got=f"an activation {tuple(x.shape)} in {x.placements}",
                needs="a function that returns the view",
                fix=f"write x = x.{name.rpartition('.')[2].rstrip('_')}(...)",
            )
        )

    return handler


for _function in functions(
    "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "as_strided_"
):
    rule(_function)(_refused(_function))
