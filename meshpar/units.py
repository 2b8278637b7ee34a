"""Which modules are gathered and freed as one: pure functions of a module tree.

Invariant: every parameter belongs to one unit, and whatever two parts of a model share belongs to the root.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from meshpar.errors import SpecError, explain


def units(module: nn.Module, shard_modules: Any) -> list[nn.Module]:
    """Choose the modules whose parameters are gathered and freed together; the root takes what is left.

    "auto" takes the repeated blocks: members of a `ModuleList` or of a nested `Sequential` with parameters. A class or
    a list of classes takes the modules of those, and a predicate those for which it is true. A module that shares a
    parameter with another part of the model is left to the root, which alone can gather it for both.
    """
    if shard_modules == "auto":
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        picked = [child for m in lists for child in m if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    elif shard_modules is None:
        picked = []
    elif isinstance(shard_modules, type):
        picked = [m for m in module.modules() if isinstance(m, shard_modules)]
    elif isinstance(shard_modules, list | tuple) and all(isinstance(c, type) for c in shard_modules):
        picked = [m for m in module.modules() if isinstance(m, tuple(shard_modules))]
    elif callable(shard_modules):
        picked = [m for m in module.modules() if shard_modules(m)]
    else:
        raise SpecError(
            explain(
                "shard_modules: cannot be used.",
                got=repr(shard_modules),
                needs='"auto", None, a module class, a list of classes, or a predicate',
                fix='shard_modules="auto"',
            )
        )
    owners: dict[int, set[int]] = {}
    for m in module.modules():
        for _, p in m.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(p), set()).add(id(m))
    found: dict[int, nn.Module] = {}
    for unit in picked:
        inside = {id(m) for m in unit.modules()}
        own = list(unit.parameters())
        if unit is not module and own and all(owners[id(p)] <= inside for p in own):
            found[id(unit)] = unit
    order = {id(m): i for i, m in enumerate(module.modules())}
    return sorted(found.values(), key=lambda m: -order[id(m)])
