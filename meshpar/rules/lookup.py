"""Lookups: `gather`, `take_along_dim`, `take`, embeddings, `one_hot`, `isin` and `bincount`.

Invariant: what is looked up is whole along the dim of the lookup, on every rank; along all other dims operands are
sharded alike. Where the dim itself is sharded, another one takes its place by an all-to-all, and the output goes back
the same way. An index may be sharded anywhere: then so is what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from meshpar import pieces
from meshpar.errors import ShardingError, explain
from meshpar.gathering import gather_call, is_split
from meshpar.registry import functions, rule
from meshpar.rules.channels import split_dim
from meshpar.rules.index import narrow
from meshpar.rules.pointwise import align, broadcast_placements, write_into
from meshpar.rules.reshape import reshaped
from meshpar.rules.spatial import remapped, settle, sharded_dims, whole_along
from meshpar.rules.view import expanded
from meshpar.rules.windows import Spec, output_shape
from meshpar.spmd import call
from meshpar.transpose import transposed


@dataclass(frozen=True)
class Agreement:
    """Tell where operands of a lookup along a dim lie.

    Args:
        mesh: their mesh.
        placements: those of all operands, the looked-up dim being whole but on the axes `spread`.
        turned: axes on which another dim takes the place of the looked-up one.
        spread: axes along which only the index is cut, along the looked-up dim itself.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    turned: tuple[int, ...]
    spread: tuple[int, ...]


def agreed(source: Tensor, others: Sequence[Tensor], dim: int, shape: Sequence[int]) -> Agreement | None:
    """Choose placements for operands that must be sharded alike along all dims but one.

    Args:
        source: what is looked up or written into; its placements weigh most.
        others: index, and values.
        dim: dim of the lookup, not negative.
        shape: sizes that all have in common; that of `dim` does not matter.

    Returns:
        The agreement, or None where no dim can take the place of `dim`.
    """
    activations = [x for x in (source, *others) if isinstance(x, DTensor)]
    mesh = activations[0].device_mesh
    chosen: dict[int, Placement] = {}
    used: set[int] = set()
    along: list[int] = []
    spread: list[int] = []
    for axis in range(mesh.ndim):
        found = [p for x in activations if isinstance(p := x.placements[axis], Shard)]
        if mesh.size(axis) == 1:
            chosen[axis] = found[0] if found else Replicate()
            continue
        dims = [p.dim for p in found if p.dim != dim and p.dim not in used]
        if dims:
            chosen[axis] = Shard(dims[0])
            used.add(dims[0])
        elif found and not (isinstance(source, DTensor) and source.placements[axis].is_shard()):
            spread.append(axis)
            chosen[axis] = Replicate()
        else:
            chosen[axis] = Replicate()
            along += [axis] * bool(found)
    for axis in along:
        free = [d for d in range(len(shape)) if d != dim and d not in used and shape[d] > 1]
        if not free:
            return None
        ranks = mesh.size(axis)
        best = max(free, key=lambda d: (shape[d] % ranks == 0, min(shape[d], ranks), shape[d]))
        chosen[axis] = Shard(best)
        used.add(best)
    placements = tuple(chosen[axis] for axis in range(mesh.ndim))
    return Agreement(mesh, placements, tuple(along), tuple(spread))


def brought(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], op: str) -> DTensor:
    """Bring an operand into placements: a plain one is cut, a sharded one changes its dims by all-to-alls."""
    if not isinstance(x, DTensor):
        return pieces.lift(x, mesh, placements)
    for axis, (old, new) in enumerate(zip(x.placements, placements, strict=True)):
        turns = isinstance(old, Shard) and isinstance(new, Shard) and old != new
        if turns and mesh.size(axis) > 1 and not pieces.shard_axes(x, new.dim):  # type: ignore[attr-defined]
            x = transposed(x, axis, new.dim, op)  # type: ignore[attr-defined]
    return pieces.moved(x, placements, op)


def turned_back(x: DTensor, axes: Sequence[int], dim: int, op: str) -> DTensor:
    """Shard the dim of a lookup again along the axes that gave it up; a single row is left where it is."""
    if x.shape[dim] > 1:
        for axis in axes:
            x = transposed(x, axis, dim, op) if not pieces.shard_axes(x, dim) else x
    return x


def settled(x: Tensor, op: str) -> Tensor:
    """Bring an activation into plain shards; leave a plain tensor."""
    return settle(x, range(x.dim()), op) if isinstance(x, DTensor) else x


def narrowed(x: Tensor, dim: int, length: int) -> Tensor:
    """Give the first rows of a tensor, an activation or plain."""
    if x.shape[dim] == length:
        return x
    return narrow(x, dim, 0, length) if isinstance(x, DTensor) else x.narrow(dim, 0, length)


def _spec(x: Tensor) -> Spec:
    return Spec(tuple(x.shape), x.dtype)


@rule(*functions("gather"))
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Any = None) -> Any:
    """Look up, along a dim, the rows that an index names element by element; `sparse_grad` gives a dense gradient.

    Communication:
        None where the dim is whole and both are sharded alike. Where the dim is sharded: an all-to-all of input, index
        and output over its axis. In the backward of an index sharded along the dim: a sum of the input's gradient.
    """
    op = "gather"
    shape = output_shape(torch.gather, "meta", _spec(input), dim, _spec(index))
    if out is not None:
        return write_into(out, gather(input, dim, index), op, cast=False)
    if input.dim() == 0 or index.dim() == 0:
        return gather_call(torch.gather, (input, dim, index), {}, why="it has no dims")
    dim %= input.dim()
    x, idx = settled(input, op), settled(index, op)
    for d in range(idx.dim()):
        x = x if d == dim else narrowed(x, d, idx.shape[d])
    how = agreed(x, (idx,), dim, idx.shape)
    if how is None:
        return gather_call(torch.gather, (input, dim, index), {}, why=f"it works along dim {dim}, which is sharded")
    lies = [Shard(dim) if axis in how.spread else p for axis, p in enumerate(how.placements)]
    grad = [Partial() if axis in how.spread else p for axis, p in enumerate(how.placements)]
    source = pieces.local(brought(x, how.mesh, how.placements, op), grad)
    part = torch.gather(source, dim, pieces.local(brought(idx, how.mesh, lies, op)))
    return turned_back(pieces.whole(part, how.mesh, lies, shape), how.turned, dim, op)


@rule(*functions("take_along_dim"))
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, *, out: Any = None) -> Any:
    """Look up along a dim, with the other dims broadcast; without a dim, in the flattened input."""
    if out is not None:
        return write_into(out, take_along_dim(input, indices, dim), "take_along_dim", cast=False)
    output_shape(torch.take_along_dim, "meta", _spec(input), _spec(indices), dim)  # torch's errors
    if dim is None:
        return gather(_flat(input), 0, _flat(indices))
    dim %= input.dim()
    one = torch.broadcast_shapes(_one_row(input.shape, dim), _one_row(indices.shape, dim))
    both = [_expanded(x, [*one[:dim], x.shape[dim], *one[dim + 1 :]]) for x in (input, indices)]
    return gather(both[0], dim, both[1])


def _one_row(shape: Sequence[int], dim: int) -> list[int]:
    return [1 if d == dim else n for d, n in enumerate(shape)]


def _flat(x: Tensor) -> Tensor:
    return reshaped(x, (-1,), "take_along_dim") if isinstance(x, DTensor) else x.reshape(-1)


def _expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(x.shape) == tuple(shape):
        return x
    return expanded(x, shape, "take_along_dim") if isinstance(x, DTensor) else x.expand(tuple(shape))


@rule(*functions("take"))
def take(input: Tensor, index: Tensor, *, out: Any = None) -> Any:
    """Look up in the flattened input; a sharded input is gathered."""
    if out is not None:
        return write_into(out, take(input, index), "take", cast=False)
    if not isinstance(index, DTensor) or (isinstance(input, DTensor) and is_split(input)):
        return gather_call(torch.take, (input, index), {}, why="positions count over the whole input")
    idx = settle(index, range(index.dim()), "take")
    source = pieces.companion(input, idx.device_mesh, idx.placements)
    return pieces.whole(torch.take(source, pieces.local(idx)), idx.device_mesh, idx.placements, idx.shape)


# embeddings


def _refuse(op: str, **given: Any) -> None:
    wrong = [f"{name}={value!r}" for name, value in given.items() if value is not None and value is not False]
    if wrong:
        raise ShardingError(
            explain(
                f"{op}: cannot run sharded.",
                got=wrong,
                needs="a dense gradient, and a weight that its lookup does not change: the ranks would change it apart",
                fix="sparse=False; max_norm=None, and a norm taken of the weight in the forward instead",
            )
        )


def _split_axes(x: DTensor) -> list[int]:
    return [axis for axis, p in enumerate(x.placements) if p.is_shard() and x.device_mesh.size(axis) > 1]


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.saved_tensors[0], None


@rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    sparse: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Look up rows of a weight; the index may be sharded anywhere.

    Communication:
        None; with `scale_grad_by_freq` an all-reduce of the counts of the indices. With a weight whose rows are split
        over `tensor`, an all-reduce of what was found.

    Raises:
        ShardingError: `sparse`, or `max_norm`, which changes the weight.
    """
    op = "F.embedding"
    _refuse(op, max_norm=max_norm, sparse=sparse)
    if not isinstance(input, DTensor):
        args = (input, weight, padding_idx, None, norm_type, scale_grad_by_freq)
        return gather_call(F.embedding, args, {}, why="its weight is an activation, its index is not")
    stand_in = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    shape = F.embedding(torch.empty(input.shape, dtype=input.dtype, device="meta"), stand_in, padding_idx).shape
    idx = settle(input, range(input.dim()), op, nested=range(input.dim()))
    mesh = idx.device_mesh
    tensor = pieces.axes_of(mesh).index("tensor")
    split = split_dim(weight, tensor)
    if split is not None:
        idx = pieces.moved(idx, [Replicate() if i == tensor else p for i, p in enumerate(idx.placements)], op)
    piece, placements = pieces.local(idx), list(idx.placements)
    if split is None:
        found = F.embedding(piece, pieces.companion(weight, mesh, placements), padding_idx)
    else:
        assert isinstance(weight, DTensor)
        differs = [Partial() if isinstance(p, Shard) else Replicate() for p in placements]
        own = pieces.local(
            weight, [weight.placements[i] if i == tensor or mesh.size(i) == 1 else p for i, p in enumerate(differs)]
        )
        found = _looked_up(piece, own, padding_idx, pieces.my_chunk(mesh, tensor, weight.shape[0]), split)
        if split == 1:
            placements[tensor] = Shard(input.dim())
    if scale_grad_by_freq:
        counts = piece.flatten().bincount(minlength=weight.shape[0])
        counts = pieces.psum(counts, mesh, _split_axes(idx), op)
        factor = 1.0 / counts[piece].to(found.dtype)
        found = _ScaleRows.apply(found, factor.unsqueeze(-1))
    if split == 0:
        found = pieces.psum(found, mesh, [tensor], op)
    return pieces.whole(found, mesh, placements, shape)


def _looked_up(idx: Tensor, weight: Tensor, padding: int | None, rows: tuple[int, int], split: int) -> Tensor:
    """Look up in a rank's share of a weight: some columns, or some rows (and zeros for what other ranks hold)."""
    if split == 1:
        return F.embedding(idx, weight, padding)
    a, b = rows
    here = (idx >= a) & (idx < b)
    own = padding - a if padding is not None and a <= padding < b else None
    found = F.embedding((idx - a).masked_fill(~here, 0), weight, own)
    return found.masked_fill(~here.unsqueeze(-1), 0)


@rule(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,  # noqa: FBT001, FBT002
    mode: str = "mean",
    sparse: bool = False,  # noqa: FBT001, FBT002
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,  # noqa: FBT001, FBT002
    padding_idx: int | None = None,
) -> Any:
    """Look up bags of rows and reduce each; bags of one size stay on their ranks, others are gathered."""
    op = "F.embedding_bag"
    _refuse(op, max_norm=max_norm, sparse=sparse)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset}
    if not isinstance(input, DTensor) or input.dim() != 2 or offsets is not None or scale_grad_by_freq:
        given = {"per_sample_weights": per_sample_weights, "scale_grad_by_freq": scale_grad_by_freq, **options}
        return gather_call(F.embedding_bag, (input, weight, offsets), given, why="its bags are no rows of a table")
    idx = settle(input, (0, 1), op)
    if 1 in (spread := sharded_dims(idx)):
        # Indices are few numbers beside the rows that they name: where bags cannot be shared out, every rank gets them.
        alone = 0 not in spread and idx.shape[0] > 1
        idx = transposed(idx, spread[1], 0, op) if alone else whole_along(idx, [spread[1]], op)
    mesh = idx.device_mesh
    own = None if per_sample_weights is None else pieces.local(brought(per_sample_weights, mesh, idx.placements, op))
    table = pieces.companion(weight, mesh, idx.placements)
    found = F.embedding_bag(pieces.local(idx), table, per_sample_weights=own, **options)
    return pieces.whole(found, mesh, remapped(idx.placements, {0: 0}), (input.shape[0], weight.shape[1]))


# classes and sets


@rule(F.one_hot)
def one_hot(input: DTensor, num_classes: int = -1) -> Any:
    """Give classes as vectors of zeros and one 1, in a new last dim."""
    idx = settle(input, range(input.dim()), "F.one_hot", nested=range(input.dim()))
    if num_classes == -1:
        if idx.numel() == 0:
            F.one_hot(torch.empty(0, dtype=torch.int64))  # torch's error
        num_classes = int(call(torch.amax, (idx,), {})) + 1
    part = F.one_hot(pieces.local(idx), num_classes)
    return pieces.whole(part, idx.device_mesh, idx.placements, (*idx.shape, num_classes))


@rule(torch.isin)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """Tell which elements are among others, which every rank then holds whole."""
    mesh = next(x.device_mesh for x in (elements, test_elements) if isinstance(x, DTensor))
    whole, activation = pieces.replicated(mesh), isinstance(elements, DTensor)
    if isinstance(test_elements, DTensor):
        test_elements = pieces.local(pieces.moved(test_elements, whole, "isin"))
    x = settle(elements, range(elements.dim()), "isin", nested=range(elements.dim())) if activation else elements
    piece = pieces.local(x) if isinstance(x, DTensor) else x
    found = torch.isin(piece, test_elements, assume_unique=False, invert=invert)
    # Unique on the whole is unique on a piece; torch is not told, since a piece may be empty.
    del assume_unique
    return pieces.whole(found, mesh, x.placements, x.shape) if isinstance(x, DTensor) else pieces.lift(found, mesh)


@rule(*functions("bincount"))
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Count how often each number comes; weights count for theirs.

    Communication:
        The largest number, and the counts, by all-reduces.
    """
    op = "bincount"
    operands = [input] if weights is None else [input, weights]
    if input.dim() != 1 or input.numel() == 0 or (weights is not None and weights.shape != input.shape):
        given = {"weights": weights, "minlength": minlength}
        return gather_call(torch.bincount, (input,), given, why="it is empty, or no vector")
    mesh, placements = broadcast_placements(operands, input.shape)
    lying = brought(input, mesh, placements, op)
    most = max(int(call(torch.amax, (lying,), {})) + 1, minlength)
    own = None if weights is None else align(weights, mesh, placements, input.shape, op).detach()
    counts = torch.bincount(pieces.local(lying), own, most)
    if own is not None:  # torch counts nothing in integers, whatever the weights
        counts = counts.to(torch.bincount(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=own.dtype)).dtype)
    counts = pieces.psum(counts, mesh, list(sharded_dims(lying).values()), op)
    return pieces.whole(counts, mesh, pieces.replicated(mesh), counts.shape)
