"""Which part of a parameter a rank holds, whatever its placements; to cut that part out, and to put parts together.

Invariant: pure integers decide. Along each dim a share is one interval, also where `fully_shard` cuts again what the
tensor axis has cut (DTensor writes that as a strided shard, from left to right; here the cuts are taken in the order in
which they were made). Shares that are not replicas of each other do not overlap, and cover the tensor. Nothing here
asks DTensor to redistribute: it is wrong about nested uneven shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from meshpar import private
from meshpar.collectives import all_gather
from meshpar.errors import ShardingError, explain
from meshpar.intervals import Interval, chunks


@dataclass(frozen=True)
class Share:
    """Hold the part of a tensor that a rank has: along each dim, rows [offset, offset + size)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Cut:
    """Hold one cut of a dim: the mesh dim over which, and the interval that was cut."""

    mesh_dim: int
    span: Interval


def cuts_of(placements: Sequence[Placement], mesh_sizes: Sequence[int], dim: int) -> list[int]:
    """List the mesh dims that cut a dim, in the order of the cuts: a strided shard cuts after those on its right.

    Raises:
        ShardingError: a strided shard that does not come from a cut of the ones on its right.
    """
    first: list[int] = []
    later: list[int] = []
    for i, placement in enumerate(placements):
        if isinstance(placement, private.StridedShard) and placement.dim == dim:
            right = [j for j in range(i + 1, len(placements)) if getattr(placements[j], "dim", None) == dim]
            parts = 1
            for j in right:
                parts *= mesh_sizes[j]
            if parts != placement.split_factor:
                raise ShardingError(
                    explain(
                        "a tensor whose share is not one block of rows.",
                        got=f"placements {tuple(placements)} over sizes {tuple(mesh_sizes)}",
                        needs="a strided shard that stands for a cut after those on its right",
                        fix="bring it into the canonical layout first",
                    )
                )
            later.append(i)
        elif isinstance(placement, Shard) and placement.dim == dim:
            first.append(i)
    return first + later[::-1]


def _cuts(
    shape: Sequence[int], mesh_sizes: Sequence[int], placements: Sequence[Placement], where: Sequence[int]
) -> list[tuple[list[_Cut], Interval]]:
    """Give, for each dim, its cuts and the interval that is left at coordinates of the mesh."""
    found = []
    for dim, n in enumerate(shape):
        a, b = 0, n
        cuts = []
        for i in cuts_of(placements, mesh_sizes, dim):
            cuts.append(_Cut(i, (a, b)))
            lo, hi = chunks(b - a, mesh_sizes[i])[where[i]]
            a, b = a + lo, a + hi
        found.append((cuts, (a, b)))
    return found


def share_at(
    shape: Sequence[int], mesh_sizes: Sequence[int], placements: Sequence[Placement], where: Sequence[int]
) -> Share:
    """Give the share of the rank at some coordinates of a mesh.

    Example:
        >>> share_at((7, 3), (2, 2), (private.StridedShard(0, split_factor=2), Shard(0)), (1, 0))
        Share(offsets=(2, 0), sizes=(2, 3))
    """
    spans = [span for _, span in _cuts(shape, mesh_sizes, placements, where)]
    return Share(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def share_of(x: Tensor) -> Share:
    """Give the share of a tensor that this rank holds: all of a plain one."""
    if not isinstance(x, DTensor):
        return Share((0,) * x.dim(), tuple(x.shape))
    held = tuple(private.piece_of(x).shape)
    if x.numel() == 0:  # `fully_shard` gives every rank nothing of any shape
        return Share((0,) * x.dim(), held)
    share = share_at(x.shape, x.device_mesh.shape, x.placements, _coordinates(x.device_mesh))
    if 0 in share.sizes and 0 in held:  # the same where a tensor axis leaves it nothing to cut
        return Share(share.offsets, held)
    assert held == share.sizes, f"{tuple(x.shape)} in {x.placements}: holds {held}, not {share.sizes}"
    return share


def _coordinates(mesh: DeviceMesh) -> list[int]:
    where = mesh.get_coordinate()
    assert where is not None, "this process is not on the mesh of a tensor that it holds"
    return list(where)


def narrowed(whole: Tensor, share: Share) -> Tensor:
    """Give a view of a share of a whole tensor."""
    for dim, (a, n) in enumerate(zip(share.offsets, share.sizes, strict=True)):
        whole = whole.narrow(dim, min(a, whole.shape[dim] - n), n)
    return whole


def laid_as(x: DTensor, piece: Tensor) -> DTensor:
    """Make a DTensor of this rank's piece that lies as x does."""
    return DTensor.from_local(piece, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def cut_as(whole: Tensor, x: DTensor) -> DTensor:
    """Cut a plain tensor that every rank has so that it lies as x does; only this rank's rows are copied.

    Communication:
        None.
    """
    piece = narrowed(whole.detach(), share_of(x))
    return laid_as(x, piece.to(x.device, copy=True, memory_format=torch.contiguous_format))


def rows_of_all(piece: Tensor, dim: int, rows: int, group: dist.ProcessGroup, axis: str, label: str) -> Tensor:
    """Give all rows of a dim, of which each rank of a group has its chunk; not differentiable.

    Communication:
        One all-gather of pieces that are padded to one size.
    """
    even = F.pad(piece, [0, 0] * (piece.dim() - 1 - dim) + [0, -(-rows // group.size()) - piece.shape[dim]])
    pieces = all_gather(even.movedim(dim, 0).contiguous(), group, axis, label, kind="parameters")
    # Only the last piece with rows can be short, so that what is cut off at the end is all of the padding.
    return pieces.flatten(0, 1).narrow(0, 0, rows).movedim(0, dim)


@torch.no_grad()
def whole_of(x: Tensor) -> Tensor:
    """Give all of a tensor, plain, on every rank.

    Communication:
        An all-gather along each mesh dim that cuts it, on all ranks of its mesh.
    """
    if not isinstance(x, DTensor):
        return x.detach()
    mesh, piece = x.device_mesh, private.piece_of(x).detach()
    if x.numel() == 0:
        return piece.new_empty(x.shape)
    found = _cuts(x.shape, mesh.shape, x.placements, _coordinates(mesh))
    piece = piece.to(mesh.device_type).reshape([b - a for _, (a, b) in found])
    for dim, (cuts, _) in enumerate(found):
        for cut in reversed(cuts):
            if mesh.size(cut.mesh_dim) > 1:
                axis, n = (mesh.mesh_dim_names or ())[cut.mesh_dim], cut.span[1] - cut.span[0]
                piece = rows_of_all(piece, dim, n, mesh.get_group(cut.mesh_dim), axis, "|whole_of")
    return piece.contiguous()
