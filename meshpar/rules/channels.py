"""Layers whose channels are shared out over `tensor`: what a rank reads, what it computes, what is added up.

A weight is split by its output channels (column-wise: the output is sharded), by its input channels (row-wise: the
outputs are parts of a sum), or by groups of channels that have nothing to do with each other. A weight that all ranks
hold whole follows the activation: where its channels are sharded, each rank uses the weight's share of them.

Invariant: what every rank holds follows from global sizes alone; gradients obey the convention of `pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshpar import packed, pieces
from meshpar.intervals import Interval, chunks
from meshpar.rules.spatial import settle


@dataclass(frozen=True)
class Share:
    """Say how the ranks of an axis share out the channels of one layer.

    Args:
        mesh: mesh of the activation.
        axis: position of the axis.
        channel: dim of the channels, in the input and in the output.
        kind: "out" for columns, "in" for rows of the weight, "groups" for groups of channels.
        num_in: input channels in all.
        parts: equal parts of the output channels (see `meshpar.packed`).
        held: whether the input's channels are sharded by the axis; else they are whole on each of its ranks.
        weight_dims: dims of the output and of the input channels in the weight.
    """

    mesh: DeviceMesh
    axis: int
    channel: int
    kind: str
    num_in: int
    parts: int
    held: bool
    weight_dims: tuple[int, int] = (0, 1)

    @property
    def reads(self) -> Interval:
        """Give the input channels that this rank reads."""
        return (0, self.num_in) if self.kind == "out" else pieces.my_chunk(self.mesh, self.axis, self.num_in)

    @property
    def placement(self) -> Placement:
        """Give the placement of the output along the axis."""
        return Replicate() if self.kind == "in" else packed.placement(self.channel, self.parts)

    def computing(self, placements: Sequence[Placement]) -> list[Placement]:
        """Give placements that say of each axis whether its ranks compute different things."""
        return [Shard(self.channel) if axis == self.axis else p for axis, p in enumerate(placements)]


def split_dim(w: object, axis: int) -> int | None:
    """Give the dim along which a weight is split over a mesh axis, if it is."""
    if not isinstance(w, DTensor) or w.device_mesh.size(axis) == 1:
        return None
    placement = w.placements[axis]
    return placement.dim if isinstance(placement, Shard) else None


def share_of(
    x: DTensor, weight: Tensor, channel: int, groups: int = 1, weight_dims: tuple[int, int] = (0, 1)
) -> Share | None:
    """Find how the channels of a layer are shared out over `tensor`; None where they are not, or cannot be.

    Args:
        x: input, global shape (..., channels in dim `channel`, ...).
        weight: global shape (out channels, in channels / groups, ...): plain, or split over `tensor`.
        channel: dim of the channels of x.
        groups: groups of channels; dim 0 of the weight has all of them, dim 1 the channels of one.
        weight_dims: dims of the output and of the input channels in the weight.
    """
    mesh = x.device_mesh
    axis = pieces.axes_of(mesh).index("tensor")
    ranks = mesh.size(axis)
    if ranks == 1 or (isinstance(weight, DTensor) and any(split_dim(weight, i) is not None for i in range(axis))):
        return None
    dim, parts = split_dim(weight, axis), packed.parts_of(weight)
    held = pieces.shard_axes(x, channel) == [axis]
    if dim is None and not held:
        return None
    num_out, num_in = (weight.shape[d] * (groups if d == 1 else 1) for d in weight_dims)
    if dim not in (None, 0, 1) or num_in != x.shape[channel]:
        return None
    if groups == 1:
        kind = "out" if dim == weight_dims[0] else "in"
    elif parts == 1 and dim != 1 and _groups_stay_together(num_out, num_in, groups, ranks):
        kind = "groups"
    else:
        return None
    return Share(mesh, axis, channel, kind, num_in, parts, held and kind != "out", weight_dims)


def _groups_stay_together(num_out: int, num_in: int, groups: int, ranks: int) -> bool:
    each_in, each_out = num_in // groups, num_out // groups
    pairs = zip(chunks(num_in, ranks), chunks(num_out, ranks), strict=True)
    return all(
        border % size == 0 for (a, b), (c, d) in pairs for border, size in ((a, each_in), (b, each_in), (c, each_out))
    ) and all(
        a // each_in == c // each_out and b // each_in == d // each_out
        for (a, b), (c, d) in zip(chunks(num_in, ranks), chunks(num_out, ranks), strict=True)
    )


def brought(x: DTensor, share: Share, op: str) -> DTensor:
    """Bring the input to where the layer wants it along the axis: its channels sharded, or whole.

    Communication:
        None where it lies so; else, before a layer split by columns, the channels are collected over the axis.
    """
    if share.held or x.placements[share.axis].is_replicate():
        return x
    target = [Replicate() if axis == share.axis else p for axis, p in enumerate(x.placements)]
    return pieces.moved(x, target, op)


def read(x: DTensor, share: Share) -> Tensor:
    """Give this rank's piece of the channels that it reads, of an input that `brought` gave."""
    grad = [Partial() if axis == share.axis and not share.held else p for axis, p in enumerate(x.placements)]
    piece = pieces.local(x, grad)
    a, b = share.reads
    return piece if share.held or (a, b) == (0, share.num_in) else piece.narrow(share.channel, a, b - a)


def own_weight(w: Tensor, share: Share, placements: Sequence[Placement], op: str) -> Tensor:
    """Give this rank's share of a weight, (out, in / groups, ...), or of a bias, (out,), which has no input channels.

    Args:
        w: plain, or split over the axis.
        share: how channels are shared out.
        placements: of the input.
        op: name of the op, for the record.

    Communication:
        None, but for a fused weight: its rows change their ranks. The gradient of a plain weight is completed over
        the axis.
    """
    dim = 0 if w.dim() == 1 or share.kind == "groups" else share.weight_dims[1 if share.kind == "in" else 0]
    computing = share.computing(placements)
    if split_dim(w, share.axis) == dim:
        assert isinstance(w, DTensor)
        differs = [Partial() if isinstance(p, Shard) else Replicate() for p in computing]
        same = [axis == share.axis or share.mesh.size(axis) == 1 for axis in range(share.mesh.ndim)]
        piece = pieces.local(w, [w.placements[axis] if same[axis] else p for axis, p in enumerate(differs)])
        # The parts of the layer: a bias that the model makes (queries and values alone have one) is not marked.
        return packed.own_rows(piece, dim, w.shape[dim], share.parts, share.mesh, share.axis, f"{op} (fused weight)")
    full: Tensor = pieces.companion(w, share.mesh, computing)
    if share.parts > 1:
        a, b = pieces.my_chunk(share.mesh, share.axis, full.shape[dim] // share.parts)
        by_part: Tensor = full.unflatten(dim, (share.parts, -1)).narrow(dim + 1, a, b - a)
        return by_part.flatten(dim, dim + 1)
    a, b = pieces.my_chunk(share.mesh, share.axis, full.shape[dim])
    return full.narrow(dim, a, b - a)


def added_up(out: Tensor, bias: Tensor | None, share: Share, placements: Sequence[Placement], op: str) -> Tensor:
    """Complete what the ranks of a layer split by rows computed, and add the bias, once.

    Communication:
        An all-reduce of the output over the axis.
    """
    out = pieces.psum(out, share.mesh, [share.axis], op)
    if bias is None:
        return out
    computed = [Replicate() if axis == share.axis else p for axis, p in enumerate(placements)]
    b = pieces.companion(bias, share.mesh, computed)
    return out + b.view(-1, *[1] * (out.dim() - 1 - share.channel)).to(out.dtype)


@dataclass(frozen=True)
class Convolution:
    """Hold what a rank convolves, as far as channels go.

    Args:
        x: input, with dims that may stay sharded and no others.
        piece: this rank's piece of the channels that it reads.
        weight: this rank's share of the weight.
        bias: to be added by the local convolution.
        groups: groups of this rank's channels.
        placements: of the output.
        share: how channels are shared out over `tensor`, if they are.
        bias_of_sum: to be added once parts are added up.
    """

    x: DTensor
    piece: Tensor
    weight: Tensor
    bias: Tensor | None
    groups: int
    placements: tuple[Placement, ...]
    share: Share | None
    bias_of_sum: Tensor | None

    def finished(self, result: Tensor, shape: Sequence[int], op: str) -> DTensor:
        """Make the output of what this rank convolved."""
        if self.share is not None and self.share.kind == "in":
            result = added_up(result, self.bias_of_sum, self.share, self.x.placements, op)
        return pieces.whole(result, self.x.device_mesh, self.placements, shape)


def convolution(
    x: DTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    num_dims: int,
    op: str,
    *,
    weight_dims: tuple[int, int] = (0, 1),
) -> Convolution:
    """Bring the channels of a convolution to where it wants them.

    Communication:
        None, but where channels lie otherwise over `tensor` (see `brought`, `own_weight`), or are sharded by another
        axis: then they are gathered, and said.
    """
    first = x.dim() - num_dims
    share = share_of(x, weight, first - 1, groups, weight_dims)
    num_kept = first if share is not None and share.held else first - 1
    x = x if share is None else brought(x, share, op)
    x = settle(x, [*range(num_kept), *range(first, x.dim())], op, nested=range(first - 1))
    placements = list(x.placements)
    if share is None:
        own = pieces.companion(weight, x.device_mesh, placements)
        own_bias = None if bias is None else pieces.companion(bias, x.device_mesh, placements)
        return Convolution(x, pieces.local(x), own, own_bias, groups, tuple(placements), None, None)
    piece, own, own_bias = read(x, share), own_weight(weight, share, placements, op), None
    if bias is not None and share.kind != "in":
        own_bias = own_weight(bias, share, placements, op)
    if share.kind == "groups":
        groups = own.shape[0] * groups // weight.shape[0]
    placements[share.axis] = share.placement
    return Convolution(x, piece, own, own_bias, groups, tuple(placements), share, bias)
