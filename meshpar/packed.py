"""The packed layout: a dim of equal parts (queries, keys, values; gate, up), each of them shared out over `tensor`.

A fused weight is kept in canonical layout, as every tensor is, so that checkpoints and `fully_shard` know nothing of
it; it is *marked* with its number of parts, and a layer that meets the mark fetches the rows of its own channels of
each part. What the layer gives is a packed activation: functions that take the parts apart (chunk, split, slices, a
reshape to (parts, ...)) do so without communication.

Invariant: nothing but the functions in `_TAKES` ever meets a packed activation; for all others it is dealt out anew
into the canonical layout first, and what they write is brought back. Parts are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F

from meshpar import pieces, private
from meshpar.exchange import fetch
from meshpar.intervals import Interval, chunks
from meshpar.private import pytree
from meshpar.registry import RULES, find, functions, name_of, targets

Caller = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_PARTS = "_meshpar_parts"
"""Name of the attribute by which a weight is marked."""


def mark(w: DTensor, parts: int) -> DTensor:
    """Mark a weight as made of equal parts along the dim that `tensor` shards."""
    if parts > 1:
        w.__dict__[_PARTS] = parts
    return w


def parts_of(w: object) -> int:
    """Give the number of parts of a marked weight, 1 for any other."""
    return int(w.__dict__.get(_PARTS, 1)) if isinstance(w, DTensor) else 1


@functools.lru_cache(maxsize=1024)
def rows_of_parts(n: int, ranks: int, parts: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Give the rows that each rank has of n rows in equal parts: its chunk of each.

    Example:
        >>> rows_of_parts(12, 2, 3)
        (((0, 2, 1), (4, 2, 1), (8, 2, 1)), ((2, 2, 1), (6, 2, 1), (10, 2, 1)))
    """
    each = n // parts
    return tuple(tuple((i * each + a, b - a, 1) for i in range(parts)) for a, b in chunks(each, ranks))


def own_rows(piece: Tensor, dim: int, n: int, parts: int, mesh: DeviceMesh, axis: int, op: str) -> Tensor:
    """Exchange the canonical rows of a fused weight for this rank's rows of each part.

    Communication:
        The rows that other ranks hold, forward; their gradients, backward.
    """
    if parts == 1:
        return piece
    have: tuple[Interval, ...] = chunks(n, mesh.size(axis))
    want = rows_of_parts(n, mesh.size(axis), parts)
    return fetch(piece, dim, have, want, mesh.get_group(axis), axis=pieces.axes_of(mesh)[axis], op=op)


def placement(dim: int, parts: int) -> Placement:
    """Give the placement of a dim in parts; a plain shard where there is one part."""
    return Shard(dim) if parts == 1 else private.StridedShard(dim, split_factor=parts)


def is_packed(x: object) -> bool:
    """Tell whether an activation lies in the packed layout."""
    return isinstance(x, DTensor) and any(type(p) is private.StridedShard for p in x.placements)


def apart(x: DTensor) -> tuple[DTensor, int]:
    """Give a packed activation with a dim of its own for the parts, in canonical layout, and that dim."""
    strided = next(p for p in x.placements if type(p) is private.StridedShard)
    dim, parts = strided.dim, strided.split_factor
    placements: list[Placement] = []
    for p in x.placements:
        if p is strided:
            placements.append(Shard(dim + 1))
        elif isinstance(p, Shard):
            placements.append(Shard(p.dim + (p.dim > dim)))
        else:
            placements.append(Replicate())
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    held = pieces.local_shape(x.shape, x.device_mesh, x.placements)[dim] // parts
    return pieces.whole(pieces.local(x).unflatten(dim, (parts, held)), x.device_mesh, placements, shape), dim


def dealt_out(x: DTensor) -> DTensor:
    """Bring a packed activation into the canonical layout of its dim.

    Communication:
        The rows that change their rank, in one exchange over `tensor`.
    """
    return RULES[torch.Tensor.reshape].handler(apart(x)[0], x.shape)  # type: ignore[no-any-return]


def _packed_like(like: DTensor, x: DTensor, op: str) -> DTensor:
    """Bring an activation into the layout of a packed one, the transpose of `dealt_out`."""
    with_parts, _ = apart(like)
    x = pieces.moved(RULES[torch.Tensor.reshape].handler(x, with_parts.shape), with_parts.placements, op)
    return pieces.whole(
        pieces.local(x).reshape(pieces.local(like).shape), like.device_mesh, like.placements, like.shape
    )


def meets_packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call meets the numbers of a packed activation."""
    if _only_looks(func):
        return False
    found: list[DTensor] = []
    find((*args, *kwargs.values()), found)
    return any(is_packed(x) for x in found)


def call_with_packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Caller) -> Any:
    """Run a torch function that meets a packed activation; `call` runs a function of canonical ones."""
    takes, first = _TAKES.get(func), args[0] if args else None
    others = (*args[1:], *kwargs.values())
    if takes is not None and isinstance(first, DTensor) and not any(is_packed(x) for x in others):
        result = takes(func, first, args[1:], kwargs, call)
        if result is not None:
            return result
    dealt: dict[int, DTensor] = {}

    def enter(x: Any) -> Any:
        if not is_packed(x):
            return x
        return dealt.setdefault(id(x), dealt_out(x))

    written = [x for x in targets(func, args, kwargs) if is_packed(x)]
    result = call(func, *pytree.tree_map(enter, (args, kwargs)))
    for x in written:
        pieces.overwrite(x, _packed_like(x, dealt[id(x)], name_of(func)))
    kept = {id(dealt[id(x)]): x for x in written}
    return pytree.tree_map(lambda x: kept.get(id(x), x), result)


def _only_looks(func: Callable[..., Any]) -> bool:
    """Tell whether a function asks what a tensor is (its shape, say), and not for its numbers."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return True
    return func in RULES and RULES[func].status == "plain"


def _reshape(func: Callable[..., Any], x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any], call: Caller) -> Any:
    """Reshape the activation with a dim for its parts: what the model makes of it is sharded there, as a rule."""
    if any(isinstance(a, torch.dtype) for a in args):
        return None  # view as another dtype
    sizes = [a.shape if isinstance(a, Tensor) else a for a in args]
    shaped = torch.Tensor.reshape if sizes != list(args) else func  # view_as, reshape_as
    stand_in = torch.empty(x.shape, device="meta")
    return call(torch.Tensor.reshape, (apart(x)[0], tuple(shaped(stand_in, *sizes, **kwargs).shape)), {})


def _cut(func: Callable[..., Any], x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any], call: Caller) -> Any:
    """Give parts as they are, where a function cuts at their borders and nowhere else; None where it does not."""
    with_parts, dim = apart(x)
    n, each = x.shape[dim], with_parts.shape[dim + 1]
    if each == 0 or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return None
    sizes = [n if d == dim else 1 for d in range(x.dim())]
    rows = torch.arange(n).view(sizes).expand(x.shape)  # no memory: shows which rows a view has
    found = func(rows, *args, **kwargs)
    several = isinstance(found, tuple | list)
    wanted = (*x.shape[:dim], each, *x.shape[dim + 1 :])
    out = []
    for view in found if several else [found]:
        if tuple(view.shape) != wanted or view.stride(dim) != 1 or 0 in wanted:
            return None
        start = int(view[(0,) * x.dim()])
        if start % each:
            return None
        out.append(_part(with_parts, dim, start // each))
    return type(found)(out) if several else out[0]


def _part(x: DTensor, dim: int, i: int) -> DTensor:
    """Select one of the parts; its dim is whole on every rank."""
    placements = [Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in x.placements]
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return pieces.whole(pieces.local(x).select(dim, i), x.device_mesh, placements, shape)


def _glu(func: Callable[..., Any], x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any], call: Caller) -> Any:
    """Gate one part by the other."""
    halves = _cut(torch.chunk, x, (2, args[0] if args else kwargs.get("dim", -1)), {}, call)
    if halves is None:
        return None
    return call(torch.mul, (halves[0], call(torch.sigmoid, (halves[1],), {})), {})


_TAKES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(functions("reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel"), _reshape),
    torch.Tensor.view: _reshape,
    **dict.fromkeys(functions("chunk", "split", "tensor_split", "split_with_sizes", "narrow", "__getitem__"), _cut),
    F.glu: _glu,
}
"""What takes parts apart without communication; None as a result means that it has to be canonical."""
