"""Tied weights: which names stand for one tensor, and whether those that are said to be tied hold the same values.

Invariant: of a group of ties the name that others are declared to follow is kept, or else the first. Whether values
are equal is found out where they lie: pieces that lie alike are compared bit by bit, pieces that lie otherwise by a sum
over their elements that does not depend on who holds them. No tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.export.runs import Part, part_of

CHUNK = 2**18
"""How many elements are summed at a time."""

_STEP, _MIX, _STIR = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd numbers without a pattern
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Give the ties that a model of transformers, or one inside of this one, declares: {alias: the name it follows}."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        told = getattr(module, "all_tied_weights_keys", None)
        if isinstance(told, Mapping):
            prefix = f"{path}." if path else ""
            found.update({f"{prefix}{alias}": f"{prefix}{name}" for alias, name in told.items()})
    return found


def tied_names(values: Mapping[str, Tensor], declared: Mapping[str, str]) -> dict[str, str]:
    """Find the names that stand for the tensor of another name: {alias: the name that is kept}.

    A declared tie counts where both names are there: nothing is dropped whose other name is kept elsewhere.

    Args:
        values: the tensors by name.
        declared: what `declared_ties` gives.
    """
    follows = {name: _followed(name, declared) for name in declared}
    kept: dict[str, str] = {a: name for a, name in follows.items() if a in values and name in values and a != name}
    groups: dict[Any, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(_identity(value), []).append(name)
    for names in groups.values():
        if len(names) > 1:
            followed = [kept.get(name, name) for name in names]
            first = next((f for f, name in zip(followed, names, strict=True) if f != name), None)
            first = first or next((name for name in names if name in kept.values()), names[0])
            kept.update({name: first for name in names if name != first and name not in kept})
    # who follows a name that itself follows another, through a tensor that both are
    return {name: _followed(name, kept) for name in values if name in kept}


def _followed(name: str, follows: Mapping[str, str]) -> str:
    seen = {name}
    while name in follows and follows[name] not in seen:
        name = follows[name]
        seen.add(name)
    return name


def _identity(x: Tensor) -> Any:
    """Give what tells one tensor from another: the object, or the memory that plain ones show in the same way."""
    if isinstance(x, DTensor) or x.is_meta or x.numel() == 0 or x.layout != torch.strided:
        return id(x)
    return x.device, x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are one."""
    return bool(_identity(a) == _identity(b))


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Tell whether a rank can compare its pieces of two tensors of one shape; the same answer on all ranks."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.device_mesh == b.device_mesh and a.placements == b.placements
    return True


def same_here(a: Tensor, b: Tensor) -> bool:
    """Tell whether the pieces of two tensors that lie alike are equal, bit by bit, on this rank."""
    if not isinstance(a, DTensor):
        a, b = b, a
    if isinstance(a, DTensor) and not isinstance(b, DTensor):
        b = _cut(b.detach(), part_of(a)).to(held(a).device)
    return torch.equal(_words(held(a)), _words(held(b)))


def held(x: Tensor) -> Tensor:
    """Give what this rank holds of a tensor."""
    return private.piece_of(x) if isinstance(x, DTensor) else x


def _words(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(_WORDS[x.element_size()])


def _cut(whole: Tensor, part: Part) -> Tensor:
    for dim, rows in enumerate(part.rows):
        parts = [whole.narrow(dim, a, b - a) for a, b in rows]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def digest(x: DTensor) -> int:
    """Sum up what this rank holds of a tensor, so that the sums of all ranks tell its elements and where they are.

    Of ranks that hold the same, one counts. The sum is one of 64 bits, of numbers that are mixed from the position and
    the bits of an element: equal for equal tensors however they lie, and else different but for a chance of 2^-64.
    """
    where = x.device_mesh.get_coordinate()
    if where is None or any(c and p.is_replicate() for c, p in zip(where, x.placements, strict=True)):
        return 0
    piece = held(x).detach()
    if piece.numel() == 0:
        return 0
    if piece.dim() == 0:
        return _sum_of(_words(piece), torch.zeros(1, dtype=torch.int64, device=piece.device))
    at = torch.zeros(1, 1, dtype=torch.int64, device=piece.device)
    first, *others = (_indices(rows, piece.device) for rows in part_of(x).rows)
    for n, indices in zip(x.shape[1:], others, strict=True):
        at = (at.view(-1, 1) * n + indices).view(1, -1)
    row = x.shape[1:].numel()
    num = max(CHUNK // at.numel(), 1)
    total = 0
    for a in range(0, piece.shape[0], num):
        where_all = first[a : a + num].view(-1, 1) * row + at
        total += _sum_of(_words(piece[a : a + num]), where_all.reshape(-1))
    return total % 2**64


def _indices(rows: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in rows])


def _sum_of(words: Tensor, at: Tensor) -> int:
    parts = words.numel() // at.numel()  # 2 for the numbers of 16 bytes
    if parts > 1:
        at = (at.view(-1, 1) * parts + torch.arange(parts, device=at.device)).reshape(-1)
    x = words.to(torch.int64) * _STIR + (at + 1) * _STEP
    for mix in (_MIX, _STIR):
        x = (x ^ (x >> 31)) * mix
    return int((x ^ (x >> 29)).sum())
