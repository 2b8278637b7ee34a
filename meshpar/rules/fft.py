"""Fourier transforms, whole dims or sharded ones.

Invariant: a transform of several dims is made one dim at a time, in torch's order: the real one of `rfftn` and `ihfftn`
first, that of `irfftn` and `hfftn` last. Dims that every rank holds whole are done where they lie. Of a sharded one the
shards step aside to another dim, by an all-to-all, and come back after it: two all-to-alls for `rfft2` with rows
sharded, which is the least where the output lies as the input does. The output is sharded along the same dims, in
canonical layout of the new sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces, private
from meshpar.gathering import gather_call
from meshpar.registry import rule
from meshpar.rules.aside import along, compute
from meshpar.rules.index import roll
from meshpar.rules.pointwise import write_into
from meshpar.rules.spatial import settle, sharded_dims


@dataclass(frozen=True)
class Kind:
    """Say how a family of transforms is put together.

    Args:
        name: name in `torch.fft` of the transform of one dim.
        others: name of the one that its kin of several dims make of all dims but the last.
        first: whether the last dim must be transformed before the others, because it is real before.
        final: whether it must be transformed after the others, because it is real afterwards.
    """

    name: str
    others: str
    first: bool = False
    final: bool = False


KINDS = (
    Kind("fft", "fft"),
    Kind("ifft", "ifft"),
    Kind("rfft", "fft", first=True),
    Kind("ihfft", "ifft", first=True),
    Kind("irfft", "ifft", final=True),
    Kind("hfft", "fft", final=True),
)

_SEVERAL = "s dim norm".split()  # noqa: SIM905
_SINGLE = "n dim norm".split()  # noqa: SIM905


@private.asked_once
def _shape_after(func: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, request: Any) -> tuple[int, ...]:
    """Give the global shape of the output, or raise torch's own error."""
    return tuple(func(torch.empty(shape, dtype=dtype, device="meta"), *request).shape)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple | torch.Size) else value


def _dims(request: Sequence[Any], num_dims: int) -> list[int]:
    """List the dims to transform, not negative, in order."""
    size, dim, _ = request
    if isinstance(dim, int):
        return [dim % num_dims]
    if dim is None:
        return list(range(num_dims - (num_dims if size is None else len(size)), num_dims))
    return [d % num_dims for d in dim]


def _local(x: DTensor, name: str, dims: Sequence[int], size_of: dict[int, int], norm: str | None) -> DTensor:
    """Transform dims that every rank holds whole."""
    if not dims:
        return x
    func = getattr(torch.fft, f"{name}n")
    sizes = [size_of[d] for d in dims]
    out: DTensor = compute(x, lambda piece: func(piece, s=sizes, dim=list(dims), norm=norm), dims)
    return out


def _single(x: DTensor, name: str, dim: int, size_of: dict[int, int], norm: str | None, op: str) -> DTensor:
    """Transform one dim, its shards stepping aside."""
    func = getattr(torch.fft, name)
    out: DTensor = along(x, lambda piece: func(piece, n=size_of[dim], dim=dim, norm=norm), [dim], op)
    return out


def transform(
    x: DTensor, kind: Kind, dims: Sequence[int], size_of: dict[int, int], norm: str | None, op: str
) -> DTensor:
    """Transform dims of an activation.

    Args:
        x: activation.
        kind: what the transform is made of.
        dims: dims (not negative) in the order in which torch was given them.
        size_of: size of each after padding or trimming; of the output, where the last one comes out real.
        norm: as in torch.
        op: name of the op, for the record.

    Communication:
        Two all-to-alls for each of the dims that is sharded, and as many in the backward.
    """
    x = settle(x, range(x.dim()), op, nested=[d for d in range(x.dim()) if d not in dims])
    spread = sharded_dims(x)
    *others, last = dims
    alone = last in spread
    local = [d for d in others if d not in spread]
    if kind.first:
        x = (
            _single(x, kind.name, last, size_of, norm, op)
            if alone
            else _local(x, kind.name, [*local, last], size_of, norm)
        )
        x = _local(x, kind.others, local, size_of, norm) if alone else x
    elif not (kind.final and not alone):
        x = _local(x, kind.others, local if kind.final or alone else [*local, last], size_of, norm)
    for d in others:
        if d in spread:
            x = _single(x, kind.others, d, size_of, norm, op)
    if kind.final and not alone:
        x = _local(x, kind.name, [*local, last], size_of, norm)
    elif alone and not kind.first:
        x = _single(x, kind.name, last, size_of, norm, op)
    return x


def _handler(func: Callable[..., Any], kind: Kind, suffix: str) -> Callable[..., Any]:
    names = _SEVERAL if suffix else _SINGLE
    default = {"": -1, "2": (-2, -1), "n": None}[suffix]
    op = f"fft.{kind.name}{suffix}"

    def handler(input: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if not isinstance(input, DTensor):
            return gather_call(func, (input, *args), {**kwargs, "out": out}, why="the input is plain")
        given = {"dim": default, **dict(zip(names, args, strict=False)), **kwargs}
        request = tuple(_fixed(given.get(name)) for name in names)
        shape = _shape_after(func, tuple(input.shape), input.dtype, request)
        dims = _dims(request, input.dim())
        if not dims:
            result = pieces.whole(func(pieces.local(input), *request), input.device_mesh, input.placements, shape)
        else:
            size_of = _sizes(input, kind, dims, request[0], shape)
            result = transform(input, kind, dims, size_of, request[2], op)
        return result if out is None else write_into(out, result, op)

    return handler


def _sizes(x: Tensor, kind: Kind, dims: Sequence[int], given: Any, shape: Sequence[int]) -> dict[int, int]:
    """Give for each dim the n or s that torch was told, or would have taken."""
    told = [given] * len(dims) if given is None or isinstance(given, int) else list(given)
    sizes = {d: x.shape[d] if n in (None, -1) else int(n) for d, n in zip(dims, told, strict=True)}
    if kind.final:
        sizes[dims[-1]] = shape[dims[-1]]
    return sizes


for _kind in KINDS:
    for _suffix in ("", "2", "n"):
        _function = getattr(torch.fft, _kind.name + _suffix)
        rule(_function)(_handler(_function, _kind, _suffix))


def _shift(func: Callable[..., Any], *, inverse: bool) -> Callable[..., Any]:
    def handler(input: DTensor, dim: Any = None) -> Any:
        func(torch.zeros([1] * input.dim()), dim)  # torch's errors
        dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
        shifts = [(input.shape[d] + 1) // 2 if inverse else input.shape[d] // 2 for d in dims]
        return roll(input, shifts, list(dims))

    return handler


rule(torch.fft.fftshift)(_shift(torch.fft.fftshift, inverse=False))
rule(torch.fft.ifftshift)(_shift(torch.fft.ifftshift, inverse=True))
