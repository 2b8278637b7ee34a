"""Functions that need a dim whole, to sort it above all: its shards step aside and come back.

Invariant: the results, values and global indices alike, are sharded along the same dims as the input, in canonical
layout of the new sizes; a dim that is reduced leaves them whole along its axis, as every reduction does. `F.normalize`,
`renorm` and the distances are put together from reductions, and send no more than those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from meshpar import pieces, private
from meshpar.gathering import gather_call
from meshpar.registry import functions, name_of, rule
from meshpar.rules.aside import along
from meshpar.rules.pointwise import map_pieces, write_into
from meshpar.rules.spatial import settle, sharded_dims
from meshpar.rules.view import squeeze
from meshpar.spmd import call


@private.asked_once
def _asked(
    func: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, text: str, args: Any, kwargs: Any
) -> None:
    try:
        func(torch.empty(shape, dtype=dtype, device="meta"), *args, **dict(kwargs))
    except NotImplementedError:
        return  # it cannot tell


def let_torch_refuse(func: Callable[..., Any], x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise torch's own error for arguments that do not fit the global shape, on a tensor without data."""
    named = tuple((key, value) for key, value in kwargs.items() if key != "out")
    # The text tells 1 from True and 1.0, which are equal and hash alike.
    _asked(func, tuple(x.shape), x.dtype, repr((args, named)), tuple(args), named)


def wrapped(dim: int, x: Tensor) -> int:
    """Make a dim not negative."""
    return dim % max(x.dim(), 1)


# values in order: sort and its kin

_KEPT = {
    "cummax": "dim",
    "cummin": "dim",
    "logcumsumexp": "dim",
    "sort": "dim descending",
    "argsort": "dim descending",
    "topk": "k dim largest sorted",
    "msort": "",
}
"""The arguments, in order, of functions that keep the dim."""

_DROPPED = {"kthvalue": "k dim keepdim", "median": "dim keepdim", "nanmedian": "dim keepdim", "mode": "dim keepdim"}
"""The arguments, in order, of functions that reduce it."""

_DEFAULT_DIM = {"sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1, "mode": -1, "msort": 0}


def _sorting(func: Callable[..., Any], name: str, order: str, *, drop: bool) -> Callable[..., Any]:
    op = name_of(func)
    names = order.split()

    def handler(input: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if not isinstance(input, DTensor):
            named = kwargs if out is None else {**kwargs, "out": out}
            return gather_call(func, (input, *args), named, why="its input is plain")
        # `sort(stable=True)` takes its further arguments by name alone.
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        dim: Any = given.get("dim", _DEFAULT_DIM.get(name))
        if dim is None:
            result = _of_all(func, input, given, op)
            return result if out is None else write_into(out, result, op)
        let_torch_refuse(func, input, args, kwargs)
        at = wrapped(dim, input)
        keepdim = bool(given.pop("keepdim", False))
        if drop and input.dim():
            given["keepdim"] = True
        result = along(input, lambda piece: func(piece, **given), [at] if input.dim() else [], op, drop=drop)
        if drop and not keepdim and input.dim():
            result = type(result)([squeeze(part, at) for part in result])
        return result if out is None else write_into(out, result, op)

    return handler


def _of_all(func: Callable[..., Any], x: DTensor, given: Mapping[str, Any], op: str) -> Any:
    """Reduce all dims to one number: nothing sorts what does not fit on one rank."""
    x = settle(x, range(x.dim()), op)
    if sharded_dims(x):
        return gather_call(func, (x,), dict(given), why="all elements are sorted as one")
    return pieces.whole(func(pieces.local(x), **given), x.device_mesh, pieces.replicated(x.device_mesh), ())


for _name, _order in (_KEPT | _DROPPED).items():
    for _function in functions(_name):
        rule(_function)(_sorting(_function, _name, _order, drop=_name in _DROPPED))


def _quantiles(func: Callable[..., Any]) -> Callable[..., Any]:
    op = name_of(func)

    def handler(
        input: Any,
        q: Any,
        dim: int | None = None,
        keepdim: bool = False,  # noqa: FBT001, FBT002
        *,
        interpolation: str = "linear",
        out: Any = None,
    ) -> Any:
        named: dict[str, Any] = {"interpolation": interpolation}
        if not isinstance(input, DTensor) or (isinstance(q, DTensor) and any(p.is_shard() for p in q.placements)):
            return gather_call(func, (input, q, dim, keepdim), named, why="its quantiles are sharded")
        plain = pieces.local(q) if isinstance(q, DTensor) else q
        lead = plain.dim() if isinstance(plain, Tensor) else 0
        if dim is None:
            x = settle(input, range(input.dim()), op)
            if sharded_dims(x):
                result = gather_call(func, (x, plain, dim, keepdim), named, why="all elements are sorted as one")
            else:
                mesh = x.device_mesh
                found = func(pieces.local(x), plain, dim, keepdim, **named)
                result = pieces.whole(found, mesh, pieces.replicated(mesh), found.shape)
            return result if out is None else write_into(out, result, op)
        func(torch.ones([1] * input.dim(), dtype=input.dtype), plain.cpu() if lead else plain, dim, **named)  # errors
        at = wrapped(dim, input)

        def local(piece: Tensor) -> Tensor:
            found: Tensor = func(piece, plain, dim, keepdim=True, **named)
            return found

        result = along(input, local, [at], op, drop=True, lead=lead) if input.dim() else _scalar(input, local, lead)
        if not keepdim and input.dim():
            result = squeeze(result, at + lead)
        return result if out is None else write_into(out, result, op)

    return handler


def _scalar(x: DTensor, local: Callable[[Tensor], Tensor], lead: int) -> DTensor:
    found = local(pieces.local(x))
    return pieces.whole(found, x.device_mesh, x.placements, found.shape[:lead])


for _name in ("quantile", "nanquantile"):
    for _function in functions(_name):
        rule(_function)(_quantiles(_function))


# halves and quarter turns


@rule(F.glu)
def glu(input: DTensor, dim: int = -1) -> Any:
    """Give the first half of a dim times the sigmoid of the second.

    Communication:
        Along a sharded dim, the rows that change their rank when each half is laid out over all ranks.
    """
    let_torch_refuse(F.glu, input, (dim,), {})
    at = wrapped(dim, input)
    if not pieces.shard_axes(input, at):
        return along(input, lambda piece: F.glu(piece, at), [at], "F.glu")
    half = input.shape[at] // 2
    a, b = (call(torch.narrow, (input, at, start, half), {}) for start in (0, half))
    return map_pieces(_gated, (a, b), {})


def _gated(a: Tensor, b: Tensor) -> Tensor:
    return a * torch.sigmoid(b)


@rule(*functions("rot90"))
def rot90(input: DTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Turn a plane by quarter turns: a flip and a transposition; shards turn along with their dim."""
    torch.empty(input.shape, device="meta").rot90(k, tuple(dims))  # torch's errors
    a, b = dims
    turns = k % 4
    if turns == 0:
        return call(torch.clone, (input,), {})
    if turns == 2:
        return call(torch.flip, (input, (a, b)), {})
    turned = call(torch.flip, (input, (b if turns == 1 else a,)), {})
    return call(torch.clone, (call(torch.transpose, (turned, a, b), {}),), {})


# values among boundaries


def _constant(x: DTensor) -> Tensor:
    with torch.no_grad():
        return pieces.local(x)


@rule(*functions("bucketize"))
def bucketize(
    input: Any,
    boundaries: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    out: Any = None,
) -> Any:
    """Give for each value its place among sorted boundaries, which every rank holds whole."""
    result = searchsorted(boundaries, input, out_int32=out_int32, right=right)
    return result if out is None else write_into(out, result, "bucketize")


@rule(*functions("searchsorted"))
def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    out: Any = None,
) -> Any:
    """Give for each value its place in a sorted sequence: rows of it, where there are several, lie as the values do.

    Communication:
        None for a plain sequence; a sequence that is sharded otherwise is brought to where the values are.
    """
    op = "searchsorted"
    options: dict[str, Any] = {"out_int32": out_int32, "right": right, "side": side}
    if not isinstance(input, DTensor):
        mesh = next(x for x in (sorted_sequence, sorter, out) if isinstance(x, DTensor)).device_mesh
        input = pieces.lift(torch.as_tensor(input), mesh)
    x = settle(input, range(input.dim()), op)
    rowed = sorted_sequence.dim() > 1
    if rowed and (sorted_sequence.dim() != x.dim() or sorted_sequence.shape[:-1] != x.shape[:-1]):
        ghosts = (torch.empty(t.shape, device="meta") for t in (sorted_sequence, x))
        return torch.searchsorted(*ghosts)  # torch's error
    keep = [p if rowed and isinstance(p, Shard) and p.dim < x.dim() - 1 else Replicate() for p in x.placements]

    def lying(w: Any) -> Any:
        if w is None:
            return None
        with torch.no_grad():
            if isinstance(w, DTensor):
                return pieces.local(pieces.moved(w, keep, op))
            return pieces.cut(w, x.device_mesh, keep)

    found = torch.searchsorted(lying(sorted_sequence), _constant(x).contiguous(), sorter=lying(sorter), **options)
    result = pieces.whole(found, x.device_mesh, x.placements, x.shape)
    return result if out is None else write_into(out, result, op)
