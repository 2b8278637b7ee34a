"""What a local op saves for the backward, kept once: fetched rows are put together again from the own piece and halos.

A convolution saves its input, which is a copy of this rank's piece with a halo; the piece itself is saved as well, by
the op that made it or by the next one that reads it. So activations would lie in memory twice.

Invariant: what is unpacked has the same numbers and memory format as what was packed. A piece that was written into
between forward and backward is an error, as in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshpar import private
from meshpar.intervals import Interval, Rows


@dataclass(frozen=True)
class Halo:
    """Hold the rows that one fetch put before and after a part of the piece."""

    dim: int
    before: Tensor
    start: int
    count: int
    after: Tensor


@dataclass(frozen=True)
class Recipe:
    """Hold how a fetched tensor is made from a piece: one halo after the other.

    Args:
        piece: this rank's piece, detached.
        version: its version when it was packed.
        halos: in the order of the fetches.
    """

    piece: Tensor
    version: int
    halos: tuple[Halo, ...]

    def made(self) -> Tensor:
        """Put the tensor together."""
        if private.version_of(self.piece) != self.version:
            msg = (
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of a convolution, a piece of shape {tuple(self.piece.shape)}"
            )
            raise RuntimeError(msg)
        x = self.piece
        for halo in self.halos:
            own = x.narrow(halo.dim, halo.start, halo.count)
            x = torch.cat([halo.before, own, halo.after], halo.dim)
        return x


def own_part(rows: Rows, own: Interval) -> tuple[int, int, int]:
    """Give the longest stretch of fetched rows that are own ones in order: first fetched row, first own row, count.

    Example:
        >>> own_part(((3, 9, 1),), (4, 10))
        (1, 0, 6)
    """
    best, at = (0, 0, 0), 0
    for start, count, step in rows:
        a, b = max(start, own[0]), min(start + count, own[1])
        if step == 1 and start >= 0 and b - a > best[2]:
            best = (at + a - start, a - own[0], b - a)
        at += count
    return best


def halo_of(fetched: Tensor, dim: int, rows: Rows, own: Interval) -> Halo:
    """Copy the rows of a fetched tensor around the own ones."""
    first, start, count = own_part(rows, own)
    last = first + count
    before, after = fetched.narrow(dim, 0, first), fetched.narrow(dim, last, fetched.shape[dim] - last)
    return Halo(dim, before.detach().clone(), start, count, after.detach().clone())


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether one tensor is a view of the other, or both of a third; of tensors without data it is not known."""
    if x is y or not private.is_plain(x):
        return True  # a compiler traces, and decides itself what it keeps
    return private.memory_of(x) == private.memory_of(y) != 0


def _place(x: Tensor) -> tuple[int, int]:
    return private.memory_of(x), int(x.storage_offset())


@contextlib.contextmanager
def kept_once(fetched: Tensor, piece: Tensor, halos: list[Halo]) -> Iterator[None]:
    """Let what is saved of a fetched tensor inside the block be kept as the piece and its halos."""
    # Checkpointing keeps nothing itself, and hooks of others must see the tensors.
    if not halos or not torch.is_grad_enabled() or private.saved_tensors_are_hooked():
        yield
        return
    recipe = Recipe(piece.detach(), private.version_of(piece), tuple(halos))
    where, shape = _place(fetched), fetched.shape

    def pack(x: Tensor) -> Tensor | Recipe:
        return recipe if x.shape == shape and _place(x) == where else x

    def unpack(x: Tensor | Recipe) -> Tensor:
        return x.made() if isinstance(x, Recipe) else x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
