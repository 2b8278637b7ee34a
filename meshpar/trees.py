"""Trees of tensors: dicts, lists, tuples, dataclasses and their kin, walked and built anew.

Invariant: every tensor of a tree is seen, or the tree is refused. What holds no tensor comes back as the very same
object; what does is built anew, and the one that was given keeps its values.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshpar.errors import SpecError, explain
from meshpar.private import pytree

Layout = str | Mapping[str, Any] | Sequence[Any] | None
"""A layout string for all tensors of a tree, or a tree of them."""

_DEPTH = 4
"""How far into an object that cannot be taken apart tensors are looked for."""


def map_tensors(apply: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to the tensors of a tree; all else stays as it is.

    Raises:
        SpecError: an object that holds tensors where no one can see them: they would stay as they are, silently.
    """
    return walk(tree, None, lambda x, _layout, _path: apply(x))


def map_layouts(tree: Any, layout: Layout, apply: Callable[[Tensor, str | None], Any]) -> Any:
    """Apply a function of (tensor, layout string or None) to the tensors of a tree; all else stays as it is."""
    return walk(tree, layout, lambda x, text, _path: apply(x, text))


def walk(
    tree: Any,
    layout: Layout,
    apply: Callable[[Tensor, str | None, str], Any],
    *,
    look: Callable[[Any, str], None] | None = None,
    path: str = "",
) -> Any:
    """Apply a function of (tensor, layout string or None, path) to the tensors of a tree; all else stays as it is.

    Args:
        tree: tensors in dicts and other mappings, lists, tuples, named tuples, deques, dataclasses, and whatever is
            registered with torch's pytree.
        layout: a string for all tensors, or a dict, list or tuple of the structure of the tree; None where unsaid.
        apply: gives what stands in the place of a tensor.
        look: is shown everything else, nodes too, each with its path, and may refuse it.
        path: where the tree stands, for errors.

    Raises:
        SpecError: a layout that does not fit the tree, or an object that hides tensors.
    """
    if isinstance(tree, Tensor):
        if layout is not None and not isinstance(layout, str):
            raise SpecError(_unfit(tree, layout, path))
        return apply(tree, layout, path)
    if look is not None:
        look(tree, path)
    parts = children(tree)
    if parts is None:
        _refuse_hidden(tree, path)
        return tree
    layouts = _layouts_of(tree, layout, [key for key, _ in parts], path)
    new = [
        walk(value, text, apply, look=look, path=f"{path}[{key!r}]")
        for (key, value), text in zip(parts, layouts, strict=True)
    ]
    if all(a is b for a, (_, b) in zip(new, parts, strict=True)):
        return tree
    return rebuilt(tree, [key for key, _ in parts], new, path)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Go over the tensors of a tree and everything else in it, each with its path."""
    parts = None if isinstance(tree, Tensor) else children(tree)
    if parts is None:
        yield path, tree
    else:
        for key, value in parts:
            yield from leaves(value, f"{path}[{key!r}]")


def _layouts_of(tree: Any, layout: Layout, keys: list[Any], path: str) -> list[Layout]:
    """Give the layout of each child."""
    if layout is None or isinstance(layout, str):
        return [layout] * len(keys)
    if isinstance(layout, Mapping):
        named = isinstance(tree, Mapping) or dataclasses.is_dataclass(tree) or hasattr(tree, "_fields")
        names = list(tree._fields) if hasattr(tree, "_fields") else keys
        unknown = [key for key in layout if key not in names]
        if named and unknown:
            text = explain("layout: names nothing.", got=f"{unknown}", needs=f"keys out of {names}", fix="drop them")
            raise SpecError(text)
        if named:
            return [layout.get(name) for name in names]
    elif isinstance(layout, Sequence) and not isinstance(tree, Mapping) and len(layout) == len(keys):
        return list(layout)
    raise SpecError(_unfit(tree, layout, path))


def _unfit(tree: Any, layout: Layout, path: str) -> str:
    return explain(
        f"layout{f' of {path}' if path else ''}: does not fit what it lays out.",
        got=f"a {type(layout).__name__} of layouts for a {type(tree).__name__}",
        needs="one string for all tensors, or a dict or tuple of the same structure",
        fix='e.g. "data _ domain _"',
    )


def children(x: Any) -> list[tuple[Any, Any]] | None:
    """Give the keys and values of a node of a tree, None for a leaf."""
    if isinstance(x, str | bytes | bytearray | int | float | complex | type(None)):
        return None
    if isinstance(x, Mapping) and not _is_registered(x):
        return list(x.items())
    if _is_registered(x):
        values = _one_level(x)[0]
        keys = list(x) if isinstance(x, Mapping) and len(x) == len(values) else range(len(values))
        return list(zip(keys, values, strict=True))
    if isinstance(x, list | tuple | collections.deque):
        return list(enumerate(x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type | nn.Module):
        return [(item.name, getattr(x, item.name)) for item in dataclasses.fields(x) if hasattr(x, item.name)]
    return None


def _one_level(x: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(x, is_leaf=lambda y: y is not x)


def _is_registered(x: Any) -> bool:
    """Tell whether torch's pytree knows how to take an object apart."""
    values = _one_level(x)[0]
    return not (len(values) == 1 and values[0] is x)


def rebuilt(x: Any, keys: list[Any], values: list[Any], path: str = "") -> Any:
    """Build a node anew with other values.

    Raises:
        SpecError: a mapping or sequence of a kind that cannot be built from its values.
    """
    if _is_registered(x):
        return pytree.tree_unflatten(values, _one_level(x)[1])
    twin: Any
    try:
        if isinstance(x, dict | collections.UserDict):
            twin = copy.copy(x)
            for key, value in zip(keys, values, strict=True):
                twin[key] = value
        elif isinstance(x, Mapping):
            twin = type(x)(dict(zip(keys, values, strict=True)))  # type: ignore[call-arg]
        elif isinstance(x, list):
            twin = copy.copy(x)
            twin[:] = values
        elif isinstance(x, tuple):
            twin = x._make(values) if hasattr(x, "_make") else type(x)(values)
        elif isinstance(x, collections.deque):
            twin = type(x)(values)
        else:
            twin = copy.copy(x)
            for key, value in zip(keys, values, strict=True):
                object.__setattr__(twin, key, value)
    except TypeError as error:
        raise SpecError(_opaque_text(x, f"that cannot be built from its values ({error})", path)) from error
    return twin


def _opaque_text(x: Any, got: str, path: str) -> str:
    return explain(
        f"batch{path}: tensors inside of an object that cannot be taken apart.",
        got=f"a {type(x).__name__} {got}",
        needs="tensors, or dicts, lists, tuples and dataclasses of them",
        fix="give its tensors one by one, or make it a dataclass or register it with torch.utils.pytree",
    )


def _refuse_hidden(x: Any, path: str) -> None:
    """Refuse an object that no one takes apart and that holds tensors; models and classes may hold what they like."""
    if isinstance(x, type | nn.Module | str | bytes | int | float | complex | type(None)):
        return
    hidden = _tensors_inside(x)
    if hidden:
        raise SpecError(_opaque_text(x, f"that holds {hidden[:5]}", path))
    if isinstance(x, Generator | map | zip | filter):
        raise SpecError(_opaque_text(x, "that gives its items only once", path))


def _tensors_inside(x: object) -> list[str]:
    if isinstance(x, set | frozenset):
        return ["a tensor"] if any(_holds_tensor(item, _DEPTH) for item in x) else []
    return [name for name, value in _attributes(x).items() if _holds_tensor(value, _DEPTH)]


def _attributes(x: object) -> dict[str, Any]:
    named = getattr(x, "__dict__", {})
    found = dict(named) if isinstance(named, dict) else {}
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(name, str) and name not in ("__dict__", "__weakref__"):
                found[name] = getattr(x, name, None)
    return found


def _holds_tensor(x: object, depth: int) -> bool:
    if isinstance(x, Tensor):
        return True
    if depth == 0 or isinstance(x, str | bytes):
        return False
    if isinstance(x, Mapping):
        return any(_holds_tensor(value, depth - 1) for value in x.values())
    if isinstance(x, list | tuple | set | frozenset | collections.deque):
        return any(_holds_tensor(value, depth - 1) for value in x)
    return False
