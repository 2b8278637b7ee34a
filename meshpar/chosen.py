"""Which modules are checkpointed: what `checkpoint=` chooses in a model.

Invariant: of two chosen modules none holds the other: the outer one would run the inner one a third time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from meshpar.errors import SpecError, explain
from meshpar.rewrite import has_forward


def _classes_of(*modules: Any) -> tuple[type[nn.Module], ...]:
    """List the module classes that modules of torch define."""
    found = [c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    return tuple(c for c in found if issubclass(c, nn.Module))


_CHEAP = (
    *_classes_of(nn.modules.dropout, nn.modules.batchnorm, nn.modules.instancenorm, nn.modules.normalization),
    *(c for c in _classes_of(nn.modules.activation) if c is not nn.MultiheadAttention),
    *_classes_of(nn.modules.pooling, nn.modules.sparse),
    *(nn.Identity, nn.Flatten, nn.Unflatten),
)

_KEEP_INPUT = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Layers that keep their input and nothing else: alone, they would keep as much when checkpointed."""


def should_not_checkpoint(module: nn.Module) -> bool:
    """Tell whether checkpointing a module is of no use: it is cheap to run again, or has no state.

    True for dropouts, norms, activations, poolings, embeddings, identity and flatten; also for a user's own module
    without children whose class is named after a norm or a dropout (`DropPath`, `RMSNorm2d`).

    Example:
        >>> should_not_checkpoint(nn.GELU()), should_not_checkpoint(nn.Conv2d(1, 1, 3))
        (True, False)
    """
    if isinstance(module, _CHEAP):
        return True
    name = type(module).__name__.lower().rstrip("123d")
    return (name.endswith("norm") or name.startswith("drop")) and next(module.children(), None) is None


def modules_to_checkpoint(model: nn.Module, what: Any) -> list[nn.Module]:
    """Choose the modules of a model that are checkpointed.

    Args:
        model: any module.
        what: None for none. "blocks" for the repeated parts: the members of a `ModuleList`, and those of an
            `nn.Sequential` in which a class with modules inside comes more than once. "all" for every part of the
            model, as small as it makes sense: the smallest modules that hold others (a convolution with its norm and
            activation, an attention, an MLP), and single layers outside of those, but for those that
            `should_not_checkpoint` names and those that keep their input alone. A class or a list of classes for the
            modules of those; a predicate for the modules for which it is true.

    Returns:
        The modules, each once, in the order of the model; of nested ones the inner ones.

    Raises:
        SpecError: `what` cannot be used, or chooses nothing.
    """
    if what is None:
        return []
    found = [m for m in _matching(model, what) if has_forward(type(m))]
    unique = list({id(m): m for m in found}.values())
    outer = {id(m) for m in unique for part in m.modules() if part is not m and any(part is other for other in unique)}
    kept = [m for m in unique if id(m) not in outer]
    if not kept:
        raise SpecError(
            explain(
                "checkpoint: nothing is chosen.",
                got=f"checkpoint={_shown(what)} for a {type(model).__name__}",
                needs="at least one module with a forward of its own",
                fix='checkpoint="all", the class of a block, or None',
            )
        )
    return kept


def _shown(what: Any) -> str:
    many = isinstance(what, Sequence) and not isinstance(what, str)
    return ", ".join(getattr(item, "__name__", repr(item)) for item in (what if many else [what]))


def _matching(model: nn.Module, what: Any) -> Iterable[nn.Module]:
    if isinstance(what, str) and what in ("blocks", "all"):
        return _blocks(model) if what == "blocks" else _smallest(model)[0]
    classes = [what] if isinstance(what, type) else what
    if isinstance(classes, list | tuple) and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        return [m for m in model.modules() if isinstance(m, tuple(classes))]
    if callable(what) and not isinstance(what, type | nn.Module):
        return [m for m in model.modules() if what(m)]
    near = difflib.get_close_matches(what, ["blocks", "all"], n=1, cutoff=0.5) if isinstance(what, str) else []
    raise SpecError(
        explain(
            "checkpoint: cannot be used.",
            got=f"checkpoint={what!r}",
            needs='None, "blocks", "all", a module class, a list of classes, or a predicate',
            fix=f'checkpoint="{near[0] if near else "blocks"}"',
        )
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for m in model.modules():
        members = list(m.children())
        if isinstance(m, nn.ModuleList):
            found += [b for b in members if not _is_useless(b) and next(b.parameters(), None) is not None]
        elif isinstance(m, nn.Sequential):
            classes = [type(b) for b in members if _parts(b)]
            found += [b for b in members if classes.count(type(b)) > 1]
    return found


def _is_useless(module: nn.Module) -> bool:
    return should_not_checkpoint(module) or (isinstance(module, _KEEP_INPUT) and not _parts(module))


def _parts(module: nn.Module) -> list[nn.Module]:
    """List the children that take part in the forward as modules."""
    if isinstance(module, nn.MultiheadAttention):
        return []  # it uses the weights of its child alone
    own = "parametrizations" if parametrize.is_parametrized(module) else None
    return [child for name, child in module.named_children() if name != own]


def _smallest(module: nn.Module) -> tuple[list[nn.Module], bool]:
    """Choose inside of a module, and tell whether a module that holds others is among them."""
    parts = _parts(module)
    if not parts:
        return ([] if _is_useless(module) else [module]), False
    inside = [_smallest(part) for part in parts]
    computes = any(not should_not_checkpoint(m) for part in parts for m in part.modules() if not _parts(m))
    if not any(holds for _, holds in inside) and computes and has_forward(type(module)):
        return [module], True
    return [m for found, _ in inside for m in found], any(holds for _, holds in inside)
