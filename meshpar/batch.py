"""Layout strings, and the way of batches onto the mesh and back.

Invariant: nothing here changes a number. `shard_batch` takes what this data rank loaded and cuts it; `shard` takes a
tensor that all ranks hold whole; `gather` gives plain tensors back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshpar import pieces, private, record
from meshpar.errors import SpecError, explain
from meshpar.intervals import chunks
from meshpar.mesh import AXES, DOMAIN, axis_group, axis_size, coordinate, is_ours
from meshpar.private import pytree

Tree = TypeVar("Tree")
Layout = str | Mapping[str, Any] | Sequence[Any] | None


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


def map_tensors(apply: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to the tensors of a tree, those in dataclasses too; all else stays as it is.

    Raises:
        SpecError: an object that holds tensors where no one can see them: they would stay as they are, silently.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return apply(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            twin = copy.copy(x)
            for item in dataclasses.fields(x):
                if hasattr(x, item.name):
                    object.__setattr__(twin, item.name, map_tensors(apply, getattr(x, item.name)))
            return twin
        hidden = [] if isinstance(x, type | nn.Module) else _tensors_inside(x)
        if hidden:
            raise SpecError(
                explain(
                    "batch: tensors inside of an object that cannot be taken apart.",
                    got=f"a {type(x).__name__} that holds {hidden[:5]}",
                    needs="tensors, or dicts, lists, tuples and dataclasses of them",
                    fix="give its tensors one by one, or make it a dataclass or register it with torch.utils.pytree",
                )
            )
        return x

    return pytree.tree_map(leaf, tree)


def _tensors_inside(x: object) -> list[str]:
    if isinstance(x, set | frozenset):
        return ["a tensor"] if any(isinstance(item, Tensor) for item in x) else []
    named = getattr(x, "__dict__", {})
    return [name for name, value in named.items() if isinstance(value, Tensor)] if isinstance(named, dict) else []


def map_layouts(tree: Any, layout: Layout, apply: Any) -> Any:
    """Apply a function of (tensor, layout string or None) to the tensors of a tree; all else stays as it is."""
    if isinstance(tree, Tensor):
        return apply(tree, layout)
    if isinstance(layout, str) or layout is None:
        return map_tensors(lambda x: apply(x, layout), tree)
    if isinstance(tree, Mapping) and isinstance(layout, Mapping):
        unknown = [key for key in layout if key not in tree]
        if unknown:
            raise SpecError(
                explain("layout: names nothing.", got=f"{unknown}", needs=f"keys out of {list(tree)}", fix="drop them")
            )
        pairs = {key: map_layouts(value, layout.get(key), apply) for key, value in tree.items()}
        return pairs if type(tree) is dict else type(tree)(pairs)  # type: ignore[call-arg]
    if isinstance(tree, list | tuple) and isinstance(layout, list | tuple) and len(tree) == len(layout):
        parts = [map_layouts(value, part, apply) for value, part in zip(tree, layout, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    raise SpecError(
        explain(
            "layout: does not fit what it lays out.",
            got=f"a {type(layout).__name__} of layouts for a {type(tree).__name__}",
            needs="one string for all tensors, or a dict or tuple of the same structure",
            fix='e.g. "data _ domain _"',
        )
    )


def shard_batch(tree: Tree, mesh: DeviceMesh, layout: Layout = None, *, rows: str = "full") -> Tree:
    """Make DTensors of what this data rank loaded.

    Args:
        tree: tensors, or dicts, lists and tuples of them; anything else is passed through. A tensor is this data
            rank's part of the batch, local shape (B/data, C, H, W); all ranks of one data coordinate hold the same.
            DTensors are passed through.
        mesh: mesh of `make_mesh`.
        layout: layout string, or a tree of them; see `default_layout`.
        rows: "full" when each rank holds all rows of its samples, "local" when it holds its own in canonical layout,
            local shape (B/data, C, H/domain, W).

    Returns:
        The tree with DTensors of global shape (B, C, H, W).

    Communication:
        The sizes of the parts of the batch, 8 bytes a tensor over `data`; for `rows="local"` those over `domain` too.
        The backward of a plain tensor that requires a gradient gathers it over `domain`.

    Raises:
        SpecError: a layout that does not fit, or parts whose sizes are not those of the canonical layout; on all
            ranks.
    """
    if rows not in ("full", "local"):
        raise SpecError(
            explain("shard_batch: unknown rows.", got=repr(rows), needs='"full" or "local"', fix="rows='full'")
        )

    _check_mesh("shard_batch", mesh)

    def enter(x: Tensor, text: str | None) -> Tensor:
        if isinstance(x, DTensor):
            return x
        placements = placements_of(text, mesh, x.dim())
        given = [
            _is_given(axis, rows) and isinstance(p, Shard)
            for axis, p in zip(pieces.axes_of(mesh), placements, strict=True)
        ]
        shape = list(x.shape)
        for axis, placement in reversed(list(enumerate(placements))):
            if given[axis] and isinstance(placement, Shard):
                shape[placement.dim] = _global_size(shape[placement.dim], mesh, pieces.axes_of(mesh)[axis])
        start = [p if g else Replicate() for p, g in zip(placements, given, strict=True)]
        if not x.requires_grad:
            return pieces.whole(_cut_rest(x, mesh, placements, given), mesh, placements, shape)
        return pieces.whole(x, mesh, start, shape).redistribute(placements=placements)

    return map_layouts(tree, layout, enter)  # type: ignore[no-any-return]


def _check_mesh(verb: str, mesh: object) -> None:
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
    return axis == "data" or (axis in DOMAIN and rows == "local")


def _cut_rest(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], given: Sequence[bool]) -> Tensor:
    rest = [Replicate() if g else p for p, g in zip(placements, given, strict=True)]
    return pieces.cut(x, mesh, rest)


def _global_size(n: int, mesh: DeviceMesh, axis: str) -> int:
    """Add up the sizes of the parts along an axis, and check that they are the canonical ones."""
    p = axis_size(mesh, axis)
    if p == 1:
        return n
    device = "cpu" if mesh.device_type == "cpu" else mesh.device_type
    mine = torch.tensor([n], dtype=torch.int64, device=device)
    sizes = torch.empty(p, dtype=torch.int64, device=device)
    private.all_gather(sizes, mine, axis_group(mesh, axis))
    record.note(record.here("shard_batch"), "batch", axis, 8 * (p - 1))
    found = [int(size) for size in sizes.tolist()]
    total = sum(found)
    expected = [b - a for a, b in chunks(total, p)]
    if found != expected:
        raise SpecError(
            explain(
                "shard_batch: the parts do not make one batch.",
                got=f"sizes {found} over axis {axis}, {total} in all; this rank is {coordinate(mesh, axis)}",
                needs=f"the canonical layout of {total}, which is {expected}",
                fix="give every rank the same number, or drop the last batch where it is smaller (drop_last=True)",
            )
        )
    return total


def shard(x: Tensor, mesh: DeviceMesh, layout: str | None = None) -> DTensor:
    """Make a DTensor of a tensor that every rank holds whole, by cutting; no communication.

    Args:
        x: global shape (B, C, H, W), equal on all ranks.
        mesh: mesh of `make_mesh`.
        layout: layout string; see `default_layout`.
    """
    _check_mesh("shard", mesh)
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
    return pieces.whole(pieces.cut(x.detach(), mesh, placements), mesh, placements, x.shape)


def gather(tree: Tree) -> Tree:
    """Give plain tensors of global shape for all DTensors in a tree, on every rank.

    Communication:
        An all-gather of each sharded tensor; the backward cuts the gradient.
    """
    return map_tensors(lambda x: _full(x) if isinstance(x, DTensor) else x, tree)  # type: ignore[no-any-return]


def _full(x: DTensor) -> Tensor:
    nested = any(len(pieces.shard_axes(x, dim)) > 1 for dim in range(x.dim()))
    return pieces.full(x, "gather") if nested and is_ours(x.device_mesh) else x.full_tensor()
