"""Between DTensors and local pieces, under the one gradient convention.

Invariant: the local gradient of a plain tensor (a parameter, a buffer, anything made from them) is this rank's *part*
of the true gradient, and the parts add up over data x domain. The gradient of an activation is a DTensor that means
what its placements say. Every rule crosses the border with `local`, `companion`, `lift`, `whole` and `psum` alone,
so that this file is the only place where a gradient could be counted twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshpar import private, record
from meshpar.alltoall import all_to_all
from meshpar.collect import collect
from meshpar.collectives import all_gather, all_reduce
from meshpar.intervals import Interval, chunks
from meshpar.mesh import SPACE, SUMMED, axes_in, axis_size, coordinate

Placements = tuple[Placement, ...]


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Name the axes of a mesh."""
    return tuple(mesh.mesh_dim_names or ())


def is_plain_shard(placement: Placement) -> bool:
    """Tell whether a placement is a shard in the canonical layout (strided shards are not)."""
    return type(placement) is Shard


def shard_axes(x: DTensor, dim: int) -> list[int]:
    """List the mesh axes (by position) that shard a dim and have more than one rank."""
    dim %= x.dim()
    return [
        i
        for i, placement in enumerate(x.placements)
        if isinstance(placement, Shard) and placement.dim == dim and x.device_mesh.size(i) > 1
    ]


def axis_chunks(mesh: DeviceMesh, axis: int, n: int) -> tuple[Interval, ...]:
    """Give the canonical layout of n rows along a mesh axis (by position)."""
    return chunks(n, mesh.size(axis))


def my_chunk(mesh: DeviceMesh, axis: int, n: int) -> Interval:
    """Give the interval of this rank in the canonical layout of n rows along a mesh axis."""
    return axis_chunks(mesh, axis, n)[coordinate(mesh, axes_of(mesh)[axis])]


def local_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Give the shape of this rank's piece of a tensor of a global shape."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            a, b = my_chunk(mesh, axis, sizes[placement.dim])
            sizes[placement.dim] = b - a
        elif isinstance(placement, private.StridedShard):
            a, b = my_chunk(mesh, axis, sizes[placement.dim] // int(placement.split_factor))
            sizes[placement.dim] = (b - a) * int(placement.split_factor)
    return tuple(sizes)


_SHAPES: dict[tuple[object, ...], tuple[tuple[int, ...], DeviceMesh]] = {}


def _expected(shape: tuple[int, ...], mesh: DeviceMesh, placements: Placements) -> tuple[int, ...]:
    """Give `local_shape`, worked out once for each mesh: equal ones of other ranks have other pieces."""
    key = (id(mesh), shape, placements)
    found = _SHAPES.get(key)
    if found is None:
        found = local_shape(shape, mesh, placements), mesh  # the mesh is held, so that its id stays its own
        if len(_SHAPES) >= 65536:
            _SHAPES.clear()
        _SHAPES[key] = found
    return found[0]


def local(x: DTensor, grad: Sequence[Placement] | None = None) -> Tensor:
    """Give this rank's piece.

    Args:
        x: DTensor.
        grad: placements of the gradient that the local computation will return; those of `x` by default. Where `x`
            is replicated and the ranks compute different things from it, the gradient is `Partial`.
    """
    return private.leave(x, tuple(grad) if grad is not None else None)


def whole(piece: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Make a DTensor of this rank's piece; `shape` is the global shape, which is never guessed."""
    shape, placements = tuple(shape), tuple(placements)
    expected = _expected(shape, mesh, placements)
    assert tuple(piece.shape) == expected, f"piece {tuple(piece.shape)} of {shape} should be {expected}"
    stride = private.global_stride(piece, shape)
    if torch.compiler.is_compiling():
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return private.enter(piece, private.spec_of(mesh, placements, shape, stride, piece.dtype))


def overwrite(x: DTensor, value: DTensor, *, alone: bool = False) -> DTensor:
    """Write values into an activation, of the same shape, dtype and placements.

    `alone` says that nothing else sees the memory of x, or of the values.

    Autograd counts what is written into the DTensor; what rules have saved for the backward are pieces, so that they
    are told too: a gradient that would need the old numbers is an error then, as in torch.
    """
    if alone:
        # Nobody can tell whether the numbers came into this memory or the memory was exchanged, and nothing is copied.
        with private.adopting():
            x.copy_(value)
        return x
    x.copy_(value)
    private.count_write(x)
    return x


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.factor, None


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Give x itself, with a gradient that is multiplied by a factor."""
    return x if factor == 1 or not x.requires_grad else _ScaleGrad.apply(x, factor)


def part_factor(mesh: DeviceMesh, placements: Sequence[Placement]) -> float:
    """Give the share of the true gradient that this rank's local gradient stands for.

    On a summed axis where the computation is the same on all p ranks, each rank's gradient counts 1/p.
    """
    same = 1
    for axis, placement in enumerate(placements):
        if axes_of(mesh)[axis] != "tensor" and placement.is_replicate():
            same *= mesh.size(axis)
    return 1.0 / same


class _SumGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, axis, label):  # type: ignore[no-untyped-def]
        ctx.request = mesh, axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        mesh, axis, label = ctx.request
        for group, name in groups_over(mesh, (axis,)):
            g = all_reduce(g, group, name, label, backward=True)
        return g, None, None, None


def as_part(w: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Give a plain tensor for a computation that lies in `placements`; its gradient obeys the convention.

    Communication:
        None forward. Where the tensor axis shards the computation, an all-reduce of the gradient over it: nobody
        else adds up the parts there.
    """
    w = scale_grad(w, part_factor(mesh, placements))
    axis = axes_of(mesh).index("tensor")
    if not w.requires_grad or mesh.size(axis) == 1 or placements[axis].is_replicate():
        return w
    return _SumGrad.apply(w, mesh, axis, record.here("companion"))  # type: ignore[no-any-return]


def companion(w: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Give the whole of a weight for a local computation whose other input lies in `placements`.

    Args:
        w: a plain tensor, equal on all ranks, or a DTensor.
        mesh: mesh of the computation.
        placements: placements of the input that decides who computes what (no `Partial`).

    Returns:
        Plain local tensor with the global shape of `w`; its gradient obeys the convention.

    Communication:
        None for plain tensors but on the tensor axis, see `as_part`; an all-gather for a sharded DTensor.
    """
    if not isinstance(w, DTensor):
        return as_part(w, mesh, placements)
    grad = [Partial() if isinstance(p, Shard) else Replicate() for p in placements]
    return local(moved(w, [Replicate()] * mesh.ndim, "companion"), grad)


def moved(x: DTensor, placements: Sequence[Placement], op: str, kind: str = "redistribute", why: str = "") -> DTensor:
    """Redistribute, and put it in the record."""
    target = tuple(placements)
    if tuple(x.placements) == target:
        return x
    x = _unnested(x, op, kind)
    outer = _outer(target)
    x = _transposed(x, outer, op)
    label = record.here(op)
    for axis, (old, new) in enumerate(zip(x.placements, outer, strict=True)):
        if old != new and not old.is_replicate() and x.device_mesh.size(axis) > 1:
            record.note(label, kind, axes_of(x.device_mesh)[axis], _moved_bytes(x, axis, old, new), why=why)
    if tuple(x.placements) != outer:
        x = x.redistribute(placements=outer)
    return x if outer == target else _nested(x, target)


def _outer(placements: Sequence[Placement]) -> Placements:
    """Leave to each dim the first of the axes that shard it."""
    out: list[Placement] = []
    for axis, placement in enumerate(placements):
        again = is_plain_shard(placement) and placement in placements[:axis]
        out.append(Replicate() if again else placement)
    return tuple(out)


def _unnested(x: DTensor, op: str, kind: str) -> DTensor:
    """Collect the rows of dims that several axes shard, from the inside, unless they stay as they are.

    DTensor's own way gives wrong rows for some uneven sizes (torch 2.13: 5 rows over 2 x 2).
    """
    outer = _outer(x.placements)
    if outer == tuple(x.placements):
        return x
    mesh = x.device_mesh
    for axis in reversed(range(mesh.ndim)):
        if outer[axis] == x.placements[axis]:
            continue
        dim = x.placements[axis].dim  # type: ignore[attr-defined]
        rest = [Replicate() if i == axis else p for i, p in enumerate(x.placements)]
        rows = local_shape(x.shape, mesh, rest)[dim]
        piece = local(x)
        if mesh.size(axis) > 1:
            piece = collect(piece, dim, rows, mesh.get_group(axis), axes_of(mesh)[axis], record.here(op), kind)
        x = whole(piece, mesh, rest, x.shape)
    return x


def _transposed(x: DTensor, target: Placements, op: str) -> DTensor:
    """Let shards change their dim by an all-to-all, where the dim that they go to is free.

    DTensor's own way on gloo is an all-gather.
    """
    mesh = x.device_mesh
    for axis, (old, new) in enumerate(zip(x.placements, target, strict=True)):
        if not (is_plain_shard(old) and is_plain_shard(new)) or old == new:
            continue
        before, after = old.dim, new.dim  # type: ignore[attr-defined]
        if shard_axes(x, after) or len(shard_axes(x, before)) > 1:
            continue
        piece = local(x)
        if mesh.size(axis) > 1:
            rows, name = x.shape[before], axes_of(mesh)[axis]
            piece = all_to_all(piece, before, after, rows, mesh.get_group(axis), axis=name, label=record.here(op))
        x = whole(piece, mesh, [new if i == axis else p for i, p in enumerate(x.placements)], x.shape)
    return x


def _nested(x: DTensor, target: Placements) -> DTensor:
    """Cut what is replicated on inner axes; no communication, but the gradient is completed over them."""
    mesh = x.device_mesh
    inner = [axis for axis, (p, t) in enumerate(zip(x.placements, target, strict=True)) if p != t]
    grad = [Partial() if axis in inner else p for axis, p in enumerate(x.placements)]
    piece = local(x, grad)
    for axis in inner:
        dim = target[axis].dim  # type: ignore[attr-defined]
        a, b = my_chunk(mesh, axis, piece.shape[dim])
        piece = piece.narrow(dim, a, b - a)
    return whole(piece, mesh, target, x.shape)


def is_constant(x: DTensor) -> bool:
    """Tell whether a tensor is the same on all ranks but those of `tensor`, and no gradient is wanted of it."""
    named = zip(axes_of(x.device_mesh), x.placements, strict=True)
    same = all(
        p.is_replicate() or (is_plain_shard(p) and (name == "tensor" or axis_size(x.device_mesh, name) == 1))
        for name, p in named
    )
    return same and not (x.requires_grad and torch.is_grad_enabled())


def full(x: DTensor, op: str) -> Tensor:
    """Give the whole of an activation, plain, on every rank; the gradient of it must be the same on all of them."""
    return local(moved(x, replicated(x.device_mesh), op))


def _moved_bytes(x: DTensor, axis: int, old: Placement, new: Placement) -> int:
    """Count what this rank sends: a ring all-gather, all-to-all, reduce-scatter or all-reduce of its piece."""
    p = x.device_mesh.size(axis)
    shape = local_shape(x.shape, x.device_mesh, x.placements)
    num_bytes = int(torch.Size(shape).numel()) * x.element_size()
    if old.is_partial():
        return num_bytes * (p - 1) // p * (2 if new.is_replicate() else 1)
    return num_bytes * (p - 1) if new.is_replicate() else num_bytes * (p - 1) // p


class _Lift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, mesh, placements):  # type: ignore[no-untyped-def]
        ctx.mesh, ctx.shape = mesh, w.shape
        return whole(cut(w, mesh, placements), mesh, placements, w.shape)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return part_of_gradient(g), None, None


def cut(w: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Cut this rank's piece out of a tensor that every rank holds whole; no communication."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            a, b = my_chunk(mesh, axis, w.shape[placement.dim])
            w = w.narrow(placement.dim, a, b - a)
    return w


def cut_out(w: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Cut this rank's piece out as a tensor of its own: one memory without gaps, and the whole can be freed."""
    piece = cut(w, mesh, placements)
    return piece if piece.numel() == w.numel() else piece.clone()


def part_of_gradient(g: DTensor) -> Tensor:
    """Turn the DTensor gradient of a tensor that all ranks hold whole into this rank's part of it."""
    tensor = axes_of(g.device_mesh).index("tensor")
    if not g.placements[tensor].is_replicate():
        g = g.redistribute(placements=[*g.placements[:tensor], Replicate(), *g.placements[tensor + 1 :]])
    return _part(g, tensor)


def part_of_split_gradient(g: DTensor, dim: int) -> Tensor:
    """Turn the DTensor gradient of a tensor of which every rank of `tensor` holds some rows into the part of those."""
    tensor = axes_of(g.device_mesh).index("tensor")
    g = moved(g, [*g.placements[:tensor], Shard(dim), *g.placements[tensor + 1 :]], "split weight")
    return _part(g, tensor)


def _part(g: DTensor, tensor: int) -> Tensor:
    """Scale the piece of a gradient where ranks counted the same, and pad it to all rows, but for those over tensor."""
    mesh = g.device_mesh
    factor = part_factor(mesh, g.placements)
    piece = g.to_local() * factor if factor != 1 else g.to_local()
    sizes = list(g.shape)
    spans: list[tuple[int, Interval, int]] = []
    for axis, placement in enumerate(g.placements):
        if isinstance(placement, Shard):
            a, b = my_chunk(mesh, axis, sizes[placement.dim])
            if axis != tensor:
                spans.append((placement.dim, (a, b), sizes[placement.dim]))
            sizes[placement.dim] = b - a
    for dim, (a, b), n in reversed(spans):
        pads = [0, 0] * (piece.dim() - 1 - dim) + [a, n - b]
        piece = torch.nn.functional.pad(piece, pads)
    return piece


def lift(w: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
    """Make a DTensor of a plain tensor that all ranks hold whole, a parameter say; replicated, or cut as told.

    Communication:
        None forward. Backward none but on the tensor axis, where a gradient that is not replicated is completed.
    """
    return _Lift.apply(w, mesh, tuple(placements or [Replicate()] * mesh.ndim))  # type: ignore[no-any-return]


def replicated(mesh: DeviceMesh) -> Placements:
    """Give the placements of a tensor that every rank holds whole."""
    return (Replicate(),) * mesh.ndim


def groups_over(mesh: DeviceMesh, axes: Sequence[int]) -> list[tuple[dist.ProcessGroup, str]]:
    """Give the groups that together span some mesh axes: a flattened one that spans them all, else one an axis."""
    names = {axes_of(mesh)[axis] for axis in axes if mesh.size(axis) > 1}
    for name in (SPACE, SUMMED) if len(names) > 1 else ():
        if names == {axis for axis in axes_in(mesh, name) if axis_size(mesh, axis) > 1}:
            return [(mesh.get_group(name), name)]
    return [(mesh.get_group(name), name) for name in axes_of(mesh) if name in names]


@functools.lru_cache(maxsize=256)
def spans_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """List the sets of axes (by position, of more than one rank) that have a group in common."""
    found = []
    for name in (SPACE, SUMMED):
        found.append(tuple(i for i, a in enumerate(axes_of(mesh)) if a in axes_in(mesh, name) and mesh.size(i) > 1))
    return tuple(found)


class _Psum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, axes, label, kind):  # type: ignore[no-untyped-def]
        for group, name in groups_over(mesh, axes):
            x = all_reduce(x, group, name, label, kind=kind)
        return x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g, *[None] * 4


def psum(x: Tensor, mesh: DeviceMesh, axes: Sequence[int], op: str, *, kind: str = "reduction") -> Tensor:
    """Add up local tensors over mesh axes; the result, and its gradient, are the same on all ranks of the axes.

    Communication:
        One all-reduce forward (one a group where the axes have no common one); none backward.
    """
    if all(mesh.size(axis) == 1 for axis in axes):
        return x
    return _Psum.apply(x, mesh, tuple(axes), record.here(op), kind)  # type: ignore[no-any-return]


def all_gather_parts(x: Tensor, mesh: DeviceMesh, axis: int, op: str, *, kind: str = "reduction") -> Tensor:
    """Give the tensors of all ranks of an axis, one below the other in a new first dim; not differentiable.

    Communication:
        One all-gather of equal pieces.
    """
    return all_gather(x.detach(), mesh.get_group(axis), axes_of(mesh)[axis], record.here(op), kind=kind)
