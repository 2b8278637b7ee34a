"""Layout strings, and the way of batches onto the mesh and back.

Invariant: nothing here changes a number. `shard_batch` takes what this data rank loaded and cuts it; `shard` takes a
tensor that all ranks hold whole; `gather` gives plain tensors back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces
from meshpar.agree import SAMPLES, Told, compare, told_of
from meshpar.errors import MeshparError, SpecError, explain
from meshpar.mesh import is_ours
from meshpar.parts import Part, global_shapes, tell_refusal
from meshpar.spec import AXES, DOMAIN
from meshpar.trees import Layout, children, map_layouts, map_tensors, walk

Tree = TypeVar("Tree")

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_INTEGERS = ("int16", "uint16", "uint32", "uint64")
_ODD_DTYPES = tuple(getattr(torch, name) for name in (*_FLOAT8, *_INTEGERS) if hasattr(torch, name))
"""What gloo or NCCL does not gather; as bytes they do."""


def default_layout(num_dims: int, axes: Collection[str] = AXES) -> str:
    """Give the layout of a tensor that none was named for: dim 0 is data, from 4 dims up dim -2 is domain.

    On a mesh with further domain axes, dim -1 is domain_w from 4 dims up, and dim -3 is domain_d from 5 dims up.

    Example:
        >>> default_layout(4), default_layout(2)
        ('data _ domain _', 'data _')
        >>> default_layout(5, ("data", "domain_d", "domain", "domain_w", "tensor"))
        'data _ domain_d domain domain_w'
    """
    tokens = ["_"] * num_dims
    if num_dims:
        tokens[0] = "data"
    for axis, dim in DOMAIN.items():
        if axis in axes and num_dims >= max(4, 2 - dim):
            tokens[dim] = axis
    return " ".join(tokens)


def placements_of(layout: str | None, mesh: DeviceMesh, num_dims: int) -> tuple[Placement, ...]:
    """Read a layout string: for each dim the axis that shards it, or `_`.

    Raises:
        SpecError: another number of dims, an unknown axis, or an axis named twice.
    """
    text = default_layout(num_dims, pieces.axes_of(mesh)) if layout is None else layout
    if not isinstance(text, str):
        raise SpecError(_layout_text(text, f"a {type(text).__name__}", num_dims, mesh))
    tokens = text.split()
    wrong = [f"unknown axis {t!r}" for t in tokens if t != "_" and t not in pieces.axes_of(mesh)]
    wrong += [f"axis {t!r} twice" for t in sorted(set(tokens)) if t != "_" and tokens.count(t) > 1]
    if len(tokens) != num_dims:
        wrong.append(f"{len(tokens)} dims, for a tensor of {num_dims}")
    if wrong:
        raise SpecError(_layout_text(text, "; ".join(wrong), num_dims, mesh))
    return tuple(Shard(tokens.index(a)) if a in tokens else Replicate() for a in pieces.axes_of(mesh))


def _layout_text(layout: object, got: str, num_dims: int, mesh: DeviceMesh) -> str:
    return explain(
        f"layout {layout!r}: cannot be used.",
        got=got,
        needs=f"one of {('_', *pieces.axes_of(mesh))} for each of the {num_dims} dims, each axis once",
        fix=f"e.g. {default_layout(max(num_dims, 1), pieces.axes_of(mesh))!r}",
    )


def shard_batch(
    tree: Tree, mesh: DeviceMesh, layout: Layout = None, *, rows: str = "full", check: bool = False
) -> Tree:
    """Make DTensors of what this data rank loaded.

    Args:
        tree: tensors, or dicts, lists, tuples, dataclasses, ... of them. A tensor is this data rank's part of the
            batch, local shape (B/data, C, H, W); all ranks of one data coordinate hold the same. DTensors are passed
            through, and so are numbers, strings, dates and other objects without tensors: this rank's own.
        mesh: mesh of `make_mesh`.
        layout: layout string, or a tree of them; see `default_layout`.
        rows: "full" when each rank holds all rows of its samples, "local" when it holds its own in canonical layout,
            local shape (B/data, C, H/domain, W).
        check: check first that ranks of one data coordinate hold the same, see `check_same_samples`.

    Returns:
        The tree with DTensors of global shape (B, C, H, W).

    Communication:
        The shapes of all tensors in one message, 256 bytes to all ranks, where data has several ranks or the rows are
        local. The backward of a plain tensor that requires a gradient gathers it over `domain`.

    Raises:
        SpecError: a layout that does not fit, arrays that are no tensors, or parts that are not those of the canonical
            layout of one batch; on all ranks.
        PeerError: not all ranks came with a batch, within the timeout of the group.

    Example:
        >>> import meshpar
        >>> batch = {"x": torch.zeros(2, 1, 5, 8), "time": "2099-01-01"}
        >>> shard_batch(batch, meshpar.make_mesh("data=1"))["x"].placements
        (Shard(dim=0), Shard(dim=2), Replicate())
    """
    check_mesh("shard_batch", mesh)
    (placed,) = shard_trees([("", tree, layout)], mesh, rows=rows, check=check)
    return placed  # type: ignore[no-any-return]


def shard_trees(
    trees: Sequence[tuple[str, Any, Layout]], mesh: DeviceMesh, *, rows: str = "full", check: bool = False
) -> list[Any]:
    """Do what `shard_batch` does for several trees, each with its name and layout, in one message."""
    if rows not in ("full", "local"):
        raise SpecError(
            explain("shard_batch: unknown rows.", got=repr(rows), needs='"full" or "local"', fix="rows='full'")
        )
    parts: list[Part] = []
    told: list[Told] = []

    def see(x: Tensor, text: str | None, path: str) -> Tensor:
        if not isinstance(x, DTensor):
            plain = _plain(x)
            placements = placements_of(_checked_local(text, plain, mesh, rows), mesh, plain.dim())
            given = tuple(
                _is_given(axis, rows) and isinstance(p, Shard)
                for axis, p in zip(pieces.axes_of(mesh), placements, strict=True)
            )
            parts.append(Part(path or "the batch", plain, placements, given))
        return x

    def see_other(x: Any, path: str) -> None:
        _refuse_array(x, path)
        if check and children(x) is None:
            told.append(told_of(path, x, SAMPLES))

    try:
        for name, tree, layout in trees:
            walk(tree, layout, see, look=see_other, path=name)
    except MeshparError:
        if check:
            with contextlib.suppress(MeshparError):
                compare("shard_batch", [Told("", "a batch that was refused there", "", ())], mesh)
        else:
            tell_refusal(mesh, rows_are_local=rows == "local")
        raise
    if check:
        for part in parts:
            cut_by = [axis for axis, given in zip(pieces.axes_of(mesh), part.given, strict=True) if given]
            told.append(told_of(part.path, part.x, cut_by))
        compare("shard_batch", told, mesh)
    shapes = iter(global_shapes(parts, mesh, rows_are_local=rows == "local"))
    waiting = iter(parts)

    def enter(x: Tensor, _layout: str | None) -> Tensor:
        return x if isinstance(x, DTensor) else _placed(next(waiting), mesh, next(shapes))

    return [map_layouts(tree, layout, enter) for _, tree, layout in trees]


def _placed(part: Part, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    x, placements = part.x, part.placements
    if not x.requires_grad:
        rest = [Replicate() if g else p for p, g in zip(placements, part.given, strict=True)]
        return pieces.whole(pieces.cut_out(x, mesh, rest), mesh, placements, shape)
    start = [p if g else Replicate() for p, g in zip(placements, part.given, strict=True)]
    return pieces.whole(x, mesh, start, shape).redistribute(placements=placements)


def check_mesh(verb: str, mesh: object) -> None:
    """Refuse what is no mesh of `make_mesh`."""
    if not isinstance(mesh, DeviceMesh) or not is_ours(mesh):
        raise SpecError(
            explain(
                f"{verb}: not a mesh of make_mesh.",
                got=f"a {type(mesh).__name__}",
                needs="a DeviceMesh with the axes data, domain, tensor",
                fix='mesh = meshpar.make_mesh("data=2,domain=2"), or meshpar.mesh_of(model)',
            )
        )


def _is_given(axis: str, rows: str) -> bool:
    return axis in SAMPLES or (axis in DOMAIN and rows == "local")


def _plain(x: Tensor) -> Tensor:
    """Give a dense tensor of no subclass; refuse what cannot be cut like one."""
    odd = (
        "a nested tensor"
        if x.is_nested
        else "a quantized tensor"
        if x.is_quantized
        else f"a tensor of layout {x.layout}"
        if x.layout != torch.strided
        else "a masked tensor"
        if isinstance(x, torch.masked.MaskedTensor)
        else ""
    )
    if odd:
        raise SpecError(
            explain(
                "batch: a tensor that cannot be cut.",
                got=f"{odd}, {x.dtype}",
                needs="dense tensors",
                fix="x.to_dense(), x.dequantize() or padding, before the batch is given",
            )
        )
    subclass = type(x) not in (Tensor, nn.Parameter)
    return x.as_subclass(Tensor) if subclass and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ else x


def _refuse_array(x: Any, path: str) -> None:
    """Refuse what holds numbers for many samples and is no tensor: no rank would cut it."""
    packed = isinstance(x, nn.utils.rnn.PackedSequence)
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    if packed or (getattr(dtype, "kind", "O") in "biufc" and hasattr(x, "__array__") and len(shape) > 0):
        raise SpecError(
            explain(
                f"batch{path}: an array that is no tensor.",
                got=f"a {type(x).__name__}" + ("" if packed else f" {tuple(shape)} {dtype}"),
                needs="tensors, which are cut over the ranks; single numbers, strings and dates pass as they are",
                fix="pad it" if packed else "torch.as_tensor(x), as torch's default_collate does",
            )
        )


def _checked_local(text: str | None, x: Tensor, mesh: DeviceMesh, rows: str) -> str | None:
    """Refuse to guess which dim of a tensor of 3 dims has the local rows, if any."""
    shared = any(mesh.size(i) > 1 for i, axis in enumerate(pieces.axes_of(mesh)) if axis in DOMAIN)
    if rows == "local" and text is None and x.dim() == 3 and shared:
        raise SpecError(
            explain(
                "shard_batch: which dim of this tensor has the local rows?",
                got=f"shape {tuple(x.shape)}, rows='local' and no layout",
                needs="a layout: three dims can be samples, rows and columns, or have no rows at all",
                fix='layout="data domain _", or "data _ _" where it has no rows',
            )
        )
    return text


def shard(x: Tensor, mesh: DeviceMesh, layout: str | None = None) -> DTensor:
    """Make a DTensor of a tensor that every rank holds whole, by cutting; no communication.

    Args:
        x: global shape (B, C, H, W), equal on all ranks.
        mesh: mesh of `make_mesh`.
        layout: layout string; see `default_layout`.
    """
    check_mesh("shard", mesh)
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        raise SpecError(
            explain(
                "shard: not a plain tensor.",
                got=f"a {type(x).__name__}",
                needs="a tensor that every rank holds whole",
                fix="gather(x) first where it is sharded already; shard_batch for trees of tensors",
            )
        )
    placements = placements_of(layout, mesh, x.dim())
    return pieces.whole(pieces.cut_out(x.detach(), mesh, placements), mesh, placements, x.shape)


def gather(tree: Tree) -> Tree:
    """Give plain tensors of global shape for all DTensors in a tree, on every rank.

    Communication:
        An all-gather of each sharded tensor; the backward cuts the gradient.
    """
    return map_tensors(lambda x: _full(x) if isinstance(x, DTensor) else x, tree)  # type: ignore[no-any-return]


def _full(x: DTensor) -> Tensor:
    if x.dtype in _ODD_DTYPES and is_ours(x.device_mesh):
        piece = x.to_local().contiguous().unsqueeze(-1).view(torch.uint8)
        whole = pieces.whole(piece, x.device_mesh, x.placements, (*x.shape, x.dtype.itemsize))
        return _full(whole).view(x.dtype).squeeze(-1)
    nested = any(len(pieces.shard_axes(x, dim)) > 1 for dim in range(x.dim()))
    return pieces.full(x, "gather") if nested and is_ours(x.device_mesh) else x.full_tensor()
