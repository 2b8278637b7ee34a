"""Layers for grids on a sphere: padding that is periodic in longitude and goes on across the poles.

Invariant: the same function on plain tensors and on activations, which stay sharded in rows and columns; each sharded
dim is fetched once, as `F.pad` does it, and the rows beyond a pole once more where columns are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import handle_torch_function, has_torch_function_unary

from meshpar import pieces
from meshpar.errors import SpecError, explain
from meshpar.intervals import Rows, chunks, compose, count, padded, rolled, take
from meshpar.registry import rule
from meshpar.rules.spatial import fetch_rows, settle, sharded_dims

POLES = ("reflect", "symmetric")

_OP = "sphere_pad"
_Read = Callable[[Tensor, int, Rows], Tensor]


def sphere_pad(
    x: Tensor, padding: int | Sequence[int], *, poles: str = "reflect", flips: Sequence[int] | None = None
) -> Tensor:
    """Pad a grid of latitudes and longitudes as the sphere goes on: round in longitude, across the poles in latitude.

    Beyond a pole, the rows come back in reverse order, on the other side of the globe: half a turn of longitude away.

    Args:
        x: global shape (..., H, W); rows are latitudes from pole to pole, columns are all longitudes, W even.
        padding: columns before and after, rows before and after, in the order of `F.pad`; one number for all four.
        poles: "reflect" where the outermost rows lie at the poles, and are not repeated; "symmetric" where the poles
            lie half a row outside of the grid (cell centres), so that they are.
        flips: channels (dim -3) that change their sign across a pole, as both components of a wind do.

    Returns:
        Global shape (..., H + rows, W + columns), placements of x.

    Communication:
        Along each sharded dim, the rows that change their rank in the output's canonical layout and those that are
        padding; where columns are sharded, a second message for the rows beyond the poles, from half a turn away.

    Raises:
        SpecError: W is odd and rows are padded; padding that is negative or wider than the grid; an unknown `poles`;
            flips that are no channels. On all ranks, before any communication.

    Example:
        >>> x = torch.arange(8.0).reshape(1, 1, 2, 4)
        >>> sphere_pad(x, (0, 0, 1, 1), poles="symmetric")[0, 0].tolist()
        [[2.0, 3.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [6.0, 7.0, 4.0, 5.0]]
    """
    if has_torch_function_unary(x):
        return handle_torch_function(sphere_pad, (x,), x, padding, poles=poles, flips=flips)
    return _padded(x, padding, poles=poles, flips=flips)


class SpherePad2d(nn.Module):
    """Pad a grid of latitudes and longitudes as the sphere goes on; see `sphere_pad`.

    Args:
        padding: left, right, top, bottom; one number for all four.
        poles: "reflect" for rows at the poles, "symmetric" for cell centres.
        flips: channels that change their sign across a pole.

    Example:
        >>> SpherePad2d(1)(torch.zeros(1, 3, 4, 8)).shape
        torch.Size([1, 3, 6, 10])
    """

    def __init__(
        self, padding: int | Sequence[int], *, poles: str = "reflect", flips: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.padding = _amounts(padding)
        self.poles = poles
        self.flips = None if flips is None else tuple(flips)
        _check(self.poles, self.padding)

    def forward(self, x: Tensor) -> Tensor:
        """Pad the last two dims."""
        return sphere_pad(x, self.padding, poles=self.poles, flips=self.flips)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"{self.padding}, poles={self.poles!r}" + ("" if self.flips is None else f", flips={self.flips}")


def _refuse(got: str, needs: str, fix: str) -> None:
    raise SpecError(explain("sphere_pad: cannot pad.", got=got, needs=needs, fix=fix))


def _amounts(padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    amounts = (padding,) * 4 if isinstance(padding, int) else tuple(int(n) for n in padding)
    if len(amounts) != 4:
        _refuse(f"padding={padding}", "one number, or left, right, top and bottom", "padding=(1, 1, 1, 1)")
    return amounts  # type: ignore[return-value]


def _check(poles: str, amounts: Sequence[int]) -> None:
    if poles not in POLES:
        _refuse(
            f"poles={poles!r}", f"one of {POLES}", "poles='symmetric' for cell centres, 'reflect' for rows at poles"
        )
    if min(amounts) < 0:
        _refuse(f"padding={tuple(amounts)}", "no negative number", "crop with x[..., rows, columns]")


@dataclass(frozen=True)
class Globe:
    """Hold which rows and columns of the grid the padded one reads.

    Args:
        rows: rows, those beyond the poles in reverse order.
        inner: the positions in `rows` that are not beyond a pole.
        columns: columns of these.
        across: columns of those beyond a pole.
    """

    rows: Rows
    inner: tuple[int, int]
    columns: Rows
    across: Rows


def _globe(shape: Sequence[int], amounts: Sequence[int], poles: str, flips: Sequence[int] | None) -> Globe:
    _check(poles, amounts)
    if len(shape) < 2:
        _refuse(f"{len(shape)} dims", "rows and columns at least", "x of shape (..., H, W)")
    left, right, top, bottom = amounts
    h, w = shape[-2:]
    most = h - 1 if poles == "reflect" else h
    if max(top, bottom) > max(most, 0) or max(left, right) > w:
        needs = f"at most {max(most, 0)} rows beyond a pole (poles={poles!r}) and {w} columns"
        _refuse(f"padding={tuple(amounts)} for {h} rows and {w} columns", needs, "less padding")
    if (top or bottom) and w % 2:
        _refuse(f"{w} columns", "an even number: half a turn must end on a column", "interpolate to an even number")
    if flips is not None and (len(shape) < 3 or any(not -shape[-3] <= c < shape[-3] for c in flips)):
        channels = f"{shape[-3]} channels" if len(shape) > 2 else "no channels"
        _refuse(f"flips={tuple(flips)}, {channels}", "channels of dim -3", "flips=(0, 1) for wind in channels 0 and 1")
    if poles == "reflect":
        rows = padded(h, top, bottom, "reflect")
    else:
        runs = ((top - 1, top, -1), (0, h, 1), (h - 1, bottom, -1))
        rows = tuple(run for run in runs if run[1])
    columns = padded(w, left, right, "circular")
    return Globe(rows, (top, top + h), columns, compose(columns, rolled(w, w // 2)))


@rule(sphere_pad)
def _padded(x: Tensor, padding: int | Sequence[int], *, poles: str, flips: Sequence[int] | None) -> Tensor:
    shape, amounts = tuple(x.shape), _amounts(padding)
    globe = _globe(shape, amounts, poles, flips)
    after = (*shape[:-2], count(globe.rows), count(globe.columns))
    if not isinstance(x, DTensor):
        return _assembled(x, globe, flips, (0, after[-2]), _read, _read) if any(amounts) else x.clone()
    x = settle(x, range(x.dim()), _OP, nested=range(x.dim() - 2))
    mesh, spread = x.device_mesh, sharded_dims(x)

    def reader(dim: int) -> tuple[_Read, tuple[int, int]]:
        axis = spread.get(dim)
        if axis is None:
            return _read, (0, after[dim])

        def fetched(piece: Tensor, dim: int, rows: Rows) -> Tensor:
            want = [take(rows, a, b) for a, b in chunks(after[dim], mesh.size(axis))]
            return fetch_rows(piece, dim, shape[dim], want, mesh, axis, _OP)

        return fetched, pieces.my_chunk(mesh, axis, after[dim])

    by_row, mine = reader(x.dim() - 2)
    by_column, _ = reader(x.dim() - 1)
    sign = None
    if flips is not None:
        lies = [Shard(0) if p == Shard(x.dim() - 3) else Replicate() for p in x.placements]
        sign = pieces.cut(_signs(x, flips), mesh, lies)
    piece = _assembled(pieces.local(x), globe, None, mine, by_row, by_column, sign)
    # Padding gives a new tensor: one that shares memory with the input would be written through.
    return pieces.whole(piece if any(amounts) else piece.clone(), mesh, x.placements, after)


def _signs(x: Tensor, flips: Sequence[int]) -> Tensor:
    signs = [1.0] * x.shape[-3]
    for channel in flips:
        signs[channel] = -1.0
    return torch.tensor(signs, dtype=x.dtype, device=x.device)


def _assembled(
    piece: Tensor,
    globe: Globe,
    flips: Sequence[int] | None,
    mine: tuple[int, int],
    by_row: _Read,
    by_column: _Read,
    sign: Tensor | None = None,
) -> Tensor:
    """Read the rows of a piece of the output, then the columns: one way between the poles, another one beyond them.

    Args:
        piece: local input.
        globe: what is read.
        flips: channels to flip, of a plain input.
        mine: rows of the output that are this rank's.
        by_row: reads rows.
        by_column: reads columns.
        sign: signs of the local channels.
    """
    dim = piece.dim() - 2
    rows = by_row(piece, dim, globe.rows)
    top, bottom = (min(max(end - mine[0], 0), rows.shape[dim]) for end in globe.inner)
    inside = by_column(rows.narrow(dim, top, bottom - top), dim + 1, globe.columns)
    num_beyond = rows.shape[dim] - (bottom - top)
    if not num_beyond:
        return inside
    # Ranks of one line of columns have the same rows: all of them come here, or none.
    beyond = torch.cat([rows.narrow(dim, 0, top), rows.narrow(dim, bottom, rows.shape[dim] - bottom)], dim)
    beyond = by_column(beyond, dim + 1, globe.across)
    sign = _signs(piece, flips) if flips is not None else sign
    if sign is not None:
        beyond = beyond * sign[:, None, None]
    parts = [beyond.narrow(dim, 0, top), inside, beyond.narrow(dim, top, num_beyond - top)]
    return torch.cat(parts, dim)


def _read(x: Tensor, dim: int, rows: Rows) -> Tensor:
    """Read rows of a whole dim."""
    parts = []
    for start, num, step in rows:
        part = x.narrow(dim, min(start, start + (num - 1) * step), num)
        parts.append(part.flip(dim) if step < 0 else part)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else x
