"""Views that keep their dims: permutations, squeezes, expands and repeats (`reshape` merges and splits dims).

Invariant: sizes are global, -1 too, and every output is in canonical layout. A dim keeps its shards, and the view is
local; a repeated dim fetches its rows. Results may share memory with the input where torch's do, but not where rows
have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.errors import ShardingError, explain
from meshpar.gathering import gather_call
from meshpar.intervals import Rows, chunks, take
from meshpar.registry import functions, name_of, rule
from meshpar.rules.reshape import numbers
from meshpar.rules.spatial import fetch_rows, remapped, settle, sharded_dims, whole_along


def _ghost(shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Make a tensor of a global shape without data: torch answers questions about shapes with it."""
    return torch.empty_strided(tuple(shape), tuple(strides or [1] * len(shape)), device="meta")


@rule(*functions("squeeze"))
def squeeze(input: DTensor, *dim: Any, **named: Any) -> Any:
    """Drop dims of global size 1; a dim that has one row on this rank alone stays."""
    dims = dim or tuple(named.values())
    given = numbers(dims) if dims else tuple(range(input.dim()))
    shape = input.shape
    gone = {_wrapped(d, input.dim()) for d in given if input.dim() and shape[_wrapped(d, input.dim())] == 1}
    x = settle(input, range(input.dim()), "squeeze", nested=range(input.dim()))
    x = whole_along(x, [axis for d in sorted(gone) for axis in pieces.shard_axes(x, d)], "squeeze")
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
    x = settle(input, range(input.dim()), "unsqueeze", nested=range(input.dim()))
    shape = [*x.shape[:at], 1, *x.shape[at:]]
    to = {d: d + (d >= at) for d in range(x.dim())}
    return pieces.whole(pieces.local(x).unsqueeze(at), x.device_mesh, remapped(x.placements, to), shape)


@rule(torch.view_as_real)
def view_as_real(input: DTensor) -> Any:
    """Give real and imaginary parts along a new last dim."""
    shape = torch.view_as_real(torch.empty(input.shape, dtype=input.dtype, device="meta")).shape
    x = settle(input, range(input.dim()), "view_as_real", nested=range(input.dim()))
    piece = torch.view_as_real(pieces.local(x).resolve_conj())
    return pieces.whole(piece, x.device_mesh, x.placements, tuple(shape))


@rule(torch.view_as_complex)
def view_as_complex(input: DTensor) -> Any:
    """Join pairs of numbers along the last dim, which every rank holds whole."""
    shape = torch.view_as_complex(torch.empty(input.shape, dtype=input.dtype, device="meta")).shape
    keep = range(input.dim() - 1)
    x = settle(input, keep, "view_as_complex", nested=keep)
    piece = torch.view_as_complex(pieces.local(x).contiguous())
    return pieces.whole(piece, x.device_mesh, x.placements, tuple(shape))


# permutations


def _permuting(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func).replace(".__get__", "")

    def handler(x: DTensor, *args: Any, **named: Any) -> Any:
        # Strides tell apart the dims of a tensor without data: torch itself says where each has gone.
        ghost = _ghost(x.shape, range(2, 2 + x.dim()))
        after = func(ghost, *args, **named)
        to = {stride - 2: i for i, stride in enumerate(after.stride())}
        x = settle(x, range(x.dim()), op, nested=range(x.dim()))
        piece = func(pieces.local(x), *args, **named)
        return pieces.whole(piece.resolve_conj(), x.device_mesh, remapped(x.placements, to), after.shape)

    return handler


for _function in functions("permute", "transpose", "swapaxes", "swapdims", "moveaxis", "movedim", "t", "adjoint"):
    rule(_function)(_permuting(_function))
for _property in ("T", "mT", "H", "mH"):
    _function = getattr(torch.Tensor, _property).__get__
    rule(_function)(_permuting(_function))


# expands and repeats


def _unchanged(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """List the dims of a shape that keep their size when new dims are put before them."""
    new = len(after) - len(before)
    return [d for d, n in enumerate(before) if after[d + new] == n]


def expanded(x: DTensor, sizes: Sequence[int], op: str) -> DTensor:
    """Repeat dims of size 1 without copies; a sharded one sends its row to all ranks and stays sharded."""
    shape = tuple(torch.empty(x.shape, device="meta").expand(tuple(sizes)).shape)
    x = settle(x, range(x.dim()), op, nested=_unchanged(x.shape, shape))
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
    return expanded(input, numbers(size or tuple(named.values())), "expand")


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
    x = settle(x, range(x.dim()), op, nested=_unchanged(x.shape, shape))
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
    return repeated(x, numbers(repeats or tuple(named.values())), "repeat")


@rule(*functions("tile"))
def tile(input: DTensor, *dims: Any, **named: Any) -> Any:
    """Repeat, with times of 1 put before where there are fewer than dims."""
    times = numbers(dims or tuple(named.values()))
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
