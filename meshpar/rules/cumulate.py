"""Running sums and products along a sharded dim: each rank's own, after the total of the ranks before it.

Invariant: only totals are sent, one row a rank, to the ranks behind. The rest is what autograd knows of a sum and a
product, so that gradients are right where a product meets zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshpar import pieces
from meshpar.gathering import gather_call
from meshpar.registry import functions, name_of, rule
from meshpar.rules.along import let_torch_refuse, wrapped
from meshpar.rules.pointwise import write_into
from meshpar.rules.reduce import wide
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims
from meshpar.spmd import call


def running(x: DTensor, dim: int, dtype: torch.dtype | None, op: str, *, product: bool) -> DTensor:
    """Give running sums or products along a dim.

    Args:
        x: activation.
        dim: dim (not negative).
        dtype: dtype to cast to before, as in torch.
        op: name of the op, for the record.
        product: whether to multiply.

    Returns:
        Activation of the same shape and placements.

    Communication:
        Along a sharded dim, this rank's total to every rank behind it; as much back in the backward.
    """
    run, total = (torch.cumprod, torch.prod) if product else (torch.cumsum, torch.sum)
    x = settle(x, range(x.dim()), op, nested=[d for d in range(x.dim()) if d != dim])
    piece = pieces.local(x)
    spread = sharded_dims(x)
    if dim not in spread:
        return pieces.whole(run(piece, dim, dtype=dtype), x.device_mesh, x.placements, x.shape)
    axis, mesh = spread[dim], x.device_mesh
    p = mesh.size(axis)
    result = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    piece = piece.to(result).to(wide(result))
    own = total(piece, dim, keepdim=True)
    have = [(r, r + 1) for r in range(p)]
    # The last rank's total is nobody's business, and a rank without rows has none that counts.
    before = fetch_rows(own, dim, p, [(0, r) for r in range(p)], mesh, axis, op, have=have)
    offset = total(before, dim, keepdim=True)
    out = run(piece, dim) * offset if product else run(piece, dim) + offset
    return pieces.whole(out.to(result), mesh, x.placements, x.shape)


def _handler(func: Callable[..., Any], *, product: bool) -> Callable[..., Any]:
    op = name_of(func)

    def handler(input: Any, dim: int, *, dtype: torch.dtype | None = None, out: Any = None) -> Any:
        if not isinstance(input, DTensor):
            return gather_call(func, (input, dim), {"dtype": dtype, "out": out}, why="its input is plain")
        let_torch_refuse(func, input, (dim,), {"dtype": dtype})
        result = running(input, wrapped(dim, input), dtype, op, product=product)
        return result if out is None else write_into(out, result, op)

    return handler


def _in_place(func: Callable[..., Any], *, product: bool) -> Callable[..., Any]:
    op = name_of(func)

    def handler(x: DTensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        let_torch_refuse(func, x, (dim,), {"dtype": dtype})
        source = call(torch.clone, (x,), {}) if torch.is_grad_enabled() else x
        return write_into(x, running(source, wrapped(dim, x), dtype, op, product=product), op)

    return handler


for _name in ("cumsum", "cumprod"):
    for _function in functions(_name):
        rule(_function)(_handler(_function, product=_name == "cumprod"))
    for _function in functions(f"{_name}_"):
        rule(_function)(_in_place(_function, product=_name == "cumprod"))
