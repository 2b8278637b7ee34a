"""Which modules are gathered and freed as one: pure functions of a module tree.

Invariant: every parameter belongs to one unit, and whatever two parts of a model share belongs to the root.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshpar.errors import SpecError, explain

UNIT_BYTES = 256 * 2**20
"""The most that "auto" lets one unit gather, unless a single layer has more."""


def units(module: nn.Module, shard_modules: Any, limit_bytes: int | None = None) -> list[nn.Module]:
    """Choose the modules whose parameters are gathered and freed together; the root takes what is left.

    A module that shares a parameter or a module with another part of the model is left to the root, which alone can
    gather it for both.

    Args:
        module: the root.
        shard_modules: "auto" for the repeated blocks (members of a `ModuleList`), and, wherever a unit would gather
            more than 256 MiB of parameters (`UNIT_BYTES`, counted in the dtype that they are kept in), the largest
            modules within it, until it does not. None for the root alone. Else a module class, a glob on module names
            ("decoder.*", where `*` also stands for dots), a list of classes and globs, or a predicate.
        limit_bytes: another number in place of `UNIT_BYTES`.

    Returns:
        The units without the root, inner ones first.

    Raises:
        SpecError: a glob that no module has, or a container that has no forward at which it could be gathered.
    """
    family = _Family(module)
    if shard_modules == "auto":
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        blocks = [child for m in lists for child in m if not _is_container(child)]
        found = {id(m): m for m in blocks if family.stands_alone(m)}
        _split(module, found, family, UNIT_BYTES if limit_bytes is None else limit_bytes)
    else:
        picked = _picked(module, shard_modules)
        _check_containers(module, picked)
        found = {id(m): m for m in picked if family.stands_alone(m)}
    return inner_first(module, found.values())


def inner_first(module: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Put modules in an order in which each comes before those that contain it."""
    order = {id(m): i for i, m in enumerate(module.modules())}
    return sorted({id(m): m for m in chosen}.values(), key=lambda m: -order[id(m)])


class _Family:
    """Know who holds which module and which parameter.

    Args:
        root: the whole model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.owners: dict[int, set[int]] = {}
        self.parents: dict[int, set[int]] = {}
        for m in root.modules():
            for _, p in m.named_parameters(recurse=False, remove_duplicate=False):
                self.owners.setdefault(id(p), set()).add(id(m))
            for child in m.children():
                self.parents.setdefault(id(child), set()).add(id(m))

    def stands_alone(self, m: nn.Module) -> bool:
        """Tell whether a module has parameters, and nothing below it is held by another part of the model."""
        below = list(m.modules())
        inside = {id(n) for n in below}
        own = list(m.parameters())
        if m is self.root or not own or _is_container(m):
            return False
        return all(self.owners[id(p)] <= inside for p in own) and all(self.parents[id(n)] <= inside for n in below[1:])


def _is_container(m: nn.Module) -> bool:
    return type(m).forward is nn.Module.forward


def _picked(module: nn.Module, shard_modules: Any) -> list[nn.Module]:
    """Give the modules that a user named, in any of the ways to do so."""
    if shard_modules is None:
        return []
    told = list(shard_modules) if isinstance(shard_modules, list | tuple | set) else [shard_modules]
    if all(isinstance(item, str | type) for item in told):
        named = dict(module.named_modules())
        names = [name for item in told if isinstance(item, str) for name in _matching(item, list(named))]
        classes = tuple(item for item in told if isinstance(item, type))
        return [m for name, m in named.items() if name in names or isinstance(m, classes)]
    if callable(shard_modules) and not isinstance(shard_modules, nn.Module):
        return [m for m in module.modules() if shard_modules(m)]
    raise SpecError(
        explain(
            "shard_modules: cannot be used.",
            got=repr(shard_modules),
            needs='"auto", None, a module class, a glob on module names, a list of classes and globs, or a predicate',
            fix='shard_modules="auto"',
        )
    )


def _matching(glob: str, names: Sequence[str]) -> list[str]:
    found = [name for name in names if name and fnmatch.fnmatchcase(name, glob)]
    if not found:
        near = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or [name for name in names if name][:3]
        raise SpecError(
            explain(
                "shard_modules: a glob that names nothing.",
                got=f"{glob!r}; near names are {near}" if near else f"{glob!r}; the model has no modules below it",
                needs="names of modules of the model, as named_modules gives them",
                fix=f"shard_modules={near[0]!r}" if near else 'shard_modules="auto"',
            )
        )
    return found


def _check_containers(module: nn.Module, picked: Sequence[nn.Module]) -> None:
    """Refuse containers without a forward: nothing would tell when to gather them."""
    wrong = [name for name, m in module.named_modules() if any(m is p for p in picked) and _is_container(m)]
    if wrong:
        raise SpecError(
            explain(
                "shard_modules: containers that are never called.",
                got=[f"{name}: a {type(module.get_submodule(name)).__name__}" for name in wrong],
                needs="modules with a forward",
                fix=f'name their members, e.g. "{wrong[0]}.*"',
            )
        )


def _split(root: nn.Module, found: dict[int, nn.Module], family: _Family, limit_bytes: int) -> None:
    """Add units, the largest first, until none gathers more than a number of bytes that could gather less."""
    seen: set[int] = set()

    def visit(m: nn.Module) -> None:
        if id(m) in seen:
            return
        seen.add(id(m))
        for child in m.children():
            visit(child)
        if m is not root and not family.stands_alone(m):
            return
        while _left_bytes(m, found) > limit_bytes:
            able = [(_left_bytes(n, found), n) for n in _heads(m, found, family.stands_alone)]
            size, largest = max(able, key=lambda item: item[0], default=(0, m))
            if not size:
                return
            found[id(largest)] = largest

    visit(root)


def _heads(m: nn.Module, found: dict[int, nn.Module], able: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """List the modules nearest below one that could be units and are not."""
    heads: list[nn.Module] = []
    for child in m.children():
        if id(child) not in found:
            heads += [child] if able(child) else _heads(child, found, able)
    return heads


def _left_bytes(m: nn.Module, found: dict[int, nn.Module]) -> int:
    """Count the bytes of the parameters below a module that no unit within it takes."""
    sizes: dict[int, int] = {}

    def add(n: nn.Module) -> None:
        for p in n.parameters(recurse=False):
            if not nn.parameter.is_lazy(p):
                held = p.to_local() if isinstance(p, DTensor) else p
                sizes[id(p)] = held.numel() * held.element_size()
        for child in n.children():
            if id(child) not in found:
                add(child)

    add(m)
    return sum(sizes.values())
