"""`F.pad`: sharded dims by one fetch each, the others by torch.

Invariant: padding touches the ends of the global tensor only. A rank fetches the rows of its own part of the padded
output; rows of constant padding come from nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces, private
from meshpar.gathering import gather_call
from meshpar.intervals import Rows, chunks, compose, count, padded, take
from meshpar.registry import rule
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims

_OP = "F.pad"


@rule(F.pad)
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Pad, or crop where the padding is negative; the layers `nn.*Pad*` come here too.

    Communication:
        Along each sharded dim that is padded: the rows that move to another rank in the output's canonical layout,
        and those that the mode copies.
    """
    amounts = tuple(int(v) for v in pad)
    if not isinstance(input, DTensor) or isinstance(value, DTensor):
        return gather_call(F.pad, (input, amounts, mode, value), {}, why="the value is an activation")
    shape = _out_shape(tuple(input.shape), amounts, mode, value is not None)
    by_dim = {input.dim() - 1 - i: amounts[2 * i : 2 * i + 2] for i in range(len(amounts) // 2)}
    x = settle(input, range(input.dim()), _OP, nested=[d for d in range(input.dim()) if not any(by_dim.get(d, ()))])
    mesh, start = x.device_mesh, pieces.local(x)
    piece, left = start, list(amounts)
    for dim, axis in sharded_dims(x).items():
        lo, hi = by_dim.get(dim, (0, 0))
        if (lo, hi) == (0, 0):
            continue
        rows = padded_rows(x.shape[dim], lo, hi, mode)
        want = [take(rows, a, b) for a, b in chunks(shape[dim], mesh.size(axis))]
        fill = 0.0 if value is None else value
        piece = fetch_rows(piece, dim, x.shape[dim], want, mesh, axis, _OP, fill=fill)
        at = 2 * (x.dim() - 1 - dim)
        left[at : at + 2] = [0, 0]
    target = pieces.local_shape(shape, mesh, x.placements)
    if 0 in target and piece.numel() == 0:
        # torch refuses to reflect nothing; a rank without rows has nothing to pad, whatever the other dims.
        piece = piece.reshape(target)
    elif any(left):
        piece = F.pad(piece, left, mode, value)
    # Padding gives a new tensor: one that shares memory with the input would be written through.
    return pieces.whole(piece.clone() if piece is start else piece, mesh, x.placements, shape)


@private.asked_once
def _out_shape(shape: tuple[int, ...], amounts: tuple[int, ...], mode: str, valued: bool) -> tuple[int, ...]:  # noqa: FBT001
    """Ask torch for the output shape, and for its errors, without data."""
    image = torch.empty(shape, device="meta")
    return tuple(F.pad(image, amounts, mode, 0.0 if valued else None).shape)


def padded_rows(n: int, lo: int, hi: int, mode: str) -> Rows:
    """Give the rows of the padded output in terms of the n input rows.

    torch crops before it wraps around, but reflects and repeats what the crop leaves out.

    Example:
        >>> padded_rows(5, -1, 2, "circular")
        ((1, 4, 1), (1, 2, 1))
    """
    if mode != "circular":
        return padded(n, lo, hi, mode)
    cropped = padded(n, min(lo, 0), min(hi, 0))
    return compose(padded(count(cropped), max(lo, 0), max(hi, 0), mode), cropped)
