"""What a rank holds of a tensor, as a value that leaves the rank.

Invariant: a piece knows nothing of process groups; it can be looked at where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.intervals import Interval
from meshpar.layouts import told
from meshpar.shares import share_of
from meshpar.trees import map_tensors

_NAMES = {"data": "samples", "domain": "rows", "domain_w": "columns", "domain_d": "levels"}


@dataclass(frozen=True, eq=False)
class Piece:
    """Hold what one rank has of a tensor that is shared out.

    Args:
        rank: its number.
        shape: global shape (B, C, H, W).
        layout: global shape in words, each dim with the axes that shard it: `"1 x 3 x 37/domain x 49"`.
        part: for each dim the interval [start, stop) that the rank holds.
        values: its numbers, a plain tensor of local shape (B/data, C, H/domain, W).
    """

    rank: int
    shape: tuple[int, ...]
    layout: str
    part: tuple[Interval, ...]
    values: Tensor = field(repr=False)

    @property
    def rows(self) -> Interval:
        """Give the interval of dim -2 that the rank holds; of the only dim where there is one."""
        return self.part[max(len(self.part) - 2, 0)]

    def lines(self) -> str:
        """Say which part of the dims that are cut the rank holds.

        Example:
            >>> import torch
            >>> Piece(1, (1, 1, 5, 8), "1 x 1 x 5/domain x 8", ((0, 1), (0, 1), (2, 4), (0, 8)), torch.zeros(1)).lines()
            'rows 2 to 3'
        """
        found = []
        for dim, (a, b) in enumerate(self.part):
            axes = self.layout.split(" x ")[dim].partition("/")[2]
            name = _NAMES.get(axes, f"dim {dim}:")
            if axes:
                found.append(f"{name} {a} to {b - 1}" if b > a else f"no {name.rstrip(':')}")
        return ", ".join(found) or "all"

    def __repr__(self) -> str:
        return f"Piece(rank {self.rank}: {self.lines()} of {self.layout}, {self.values.dtype})"


def piece_of(x: DTensor) -> Piece:
    """Copy what this rank holds of a DTensor."""
    share = share_of(x)
    part = tuple((a, a + n) for a, n in zip(share.offsets, share.sizes, strict=True))
    return Piece(dist.get_rank(), tuple(x.shape), told(x), part, private.piece_of(x).detach().clone())


def whole_piece(x: Tensor) -> Piece:
    """Make the piece of a plain tensor, of which this rank holds all."""
    shape = tuple(x.shape)
    layout = " x ".join(map(str, shape)) or "scalar"
    return Piece(dist.get_rank(), shape, layout, tuple((0, n) for n in shape), x.detach().clone())


def pieces_in(tree: Any) -> Any:
    """Put pieces in the place of the DTensors of a tree; plain tensors lose their gradients' history."""
    return map_tensors(lambda x: piece_of(x) if isinstance(x, DTensor) else x.detach(), tree)


def all_pieces(tree: Any) -> Any:
    """Put pieces in the place of all tensors of a tree."""
    return map_tensors(lambda x: piece_of(x) if isinstance(x, DTensor) else whole_piece(x), tree)
