"""Tensor-parallel plans: which weights are split over the ranks of `tensor`, and how.

A plan maps names of modules to styles. It never changes a number: weights become DTensors over `tensor`, which the
rules read as activations, and whatever they do not know how to keep sharded is collected, and is in the record.

Invariant: a weight lies in canonical layout over `tensor`, whatever its style; names and global shapes do not change;
all that cannot be split is refused before anything is made.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from meshpar import packed, private, weights
from meshpar.autoplan import auto_plan
from meshpar.errors import SpecError, explain
from meshpar.intervals import chunks
from meshpar.mesh import axis_size
from meshpar.registry import policy as current_policy
from meshpar.rewrite import STATE, quietly
from meshpar.spmd import Spmd, is_on
from meshpar.traced import as_node, direct, is_tracing

STYLES = ("colwise", "rowwise", "packed", "replicate")
"""colwise splits the output channels of a layer, rowwise its input channels, packed the channels of each of the equal
parts of a fused layer ("packed" for queries, keys and values, "packed:2" for gate and up); replicate splits nothing."""

_SPLITS = "_meshpar_splits"
"""Name of the attribute in which a module keeps how its weights are split."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


@dataclass(frozen=True)
class Split:
    """Say how one weight is split.

    Args:
        dim: dim that the ranks of `tensor` share out.
        parts: equal parts of that dim, each of them shared out when the weight is used.
        style: the style that asked for it.
    """

    dim: int
    parts: int
    style: str


Splits = Mapping[str, Mapping[str, Split]]
"""For each module name, for each parameter name."""


def plan_splits(model: nn.Module, plan: Mapping[str, str], ranks: int) -> Splits:
    """Read a plan: find the modules that its globs name, and how each of their weights is split.

    Args:
        model: any module; only the names, classes and shapes matter.
        plan: from globs over module names to styles; where several match, the last one holds.
        ranks: ranks of `tensor`.

    Returns:
        For each module name, for each parameter name, its split.

    Raises:
        SpecError: an unknown style, a glob that matches nothing, a module that a style does not fit, or channels that
            the ranks cannot share out equally; all of them at once.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> plan_splits(mlp, {"0": "colwise", "2": "rowwise"}, 2)["2"]["weight"]
        Split(dim=1, parts=1, style='rowwise')
    """
    if not isinstance(plan, Mapping):
        raise SpecError(_text([f"a {type(plan).__name__}"]))
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    wrong: list[str] = []
    for glob, style in plan.items():
        found = [name for name in modules if fnmatch.fnmatchcase(name, glob)] if isinstance(glob, str) else []
        if not found:
            near = difflib.get_close_matches(str(glob), list(modules), 2)
            wrong.append(f"{glob!r} matches no module" + (f"; near: {', '.join(near)}" if near else ""))
        styles.update(dict.fromkeys(found, style))
    splits: dict[str, dict[str, Split]] = {}
    for name, style in styles.items():
        try:
            found_here = _splits_of(modules[name], style, ranks)
        except _Unfit as error:
            wrong.append(f"{name or 'the root'}: {error}")
            continue
        for inner, by_name in found_here.items():
            splits.setdefault(".".join(filter(None, (name, inner))), {}).update(by_name)
    wrong += _torn_ties(model, splits)
    if wrong:
        raise SpecError(_text(wrong))
    return splits


class _Unfit(Exception):
    """Say why a style does not fit a module."""


def _text(wrong: list[str]) -> str:
    return explain(
        "tensor_plan: cannot be used.",
        got=wrong,
        needs=f"globs of module names to one of {STYLES} (packed:N for N parts), for Linear, Conv1d to 3d (transposed "
        "too), Embedding and MultiheadAttention, whose channels the ranks of tensor share out equally",
        fix='e.g. {"blocks.*.mlp.fc1": "colwise", "blocks.*.mlp.fc2": "rowwise"}, fewer ranks of tensor, or leave the '
        "layer out",
    )


def _splits_of(module: nn.Module, style: object, ranks: int) -> dict[str, dict[str, Split]]:
    """Give, for a module and those inside of it, the splits that a style asks for."""
    name, _, number = str(style).partition(":")
    if not isinstance(style, str) or name not in STYLES or (number and (name != "packed" or not number.isdigit())):
        msg = f"unknown style {style!r}"
        raise _Unfit(msg)
    if name == "replicate":
        return {}
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, name, ranks)
    if isinstance(module, nn.Linear):
        sizes = {"out": module.out_features, "in": module.in_features}
    elif isinstance(module, _CONVS):
        sizes = {"out": module.out_channels, "in": module.in_channels}
    elif isinstance(module, nn.Embedding):
        sizes = {"out": module.embedding_dim, "in": module.num_embeddings}
    else:
        msg = f"a {type(module).__name__} has no style {style!r}"
        raise _Unfit(msg)
    groups = getattr(module, "groups", 1)
    turned = isinstance(module, nn.Embedding) or (isinstance(module, _TRANSPOSED) and groups == 1)
    dims = (1, 0) if turned else (0, 1)
    parts = _parts(module, number, sizes) if name == "packed" else 1
    if name == "packed" and isinstance(module, nn.Embedding):
        msg = "an Embedding has no parts"
        raise _Unfit(msg)
    if name != "colwise" and groups > 1:
        msg = f"its {groups} groups of channels cannot be split {'by rows' if name == 'rowwise' else 'in parts'}"
        raise _Unfit(msg)
    side = "in" if name == "rowwise" else "out"
    for each in ("in", "out") if groups > 1 else (side,):
        _check_divides(sizes[each], ranks * parts, f"{each} channels", parts)
    dim = dims[1] if name == "rowwise" else dims[0]
    split = Split(dim, parts, style)
    held: dict[str, dict[str, Split]] = {}
    for inner, weight in _weights(module, "weight"):
        held.setdefault(inner, {})[weight] = split
    if name != "rowwise" and getattr(module, "bias", None) is not None:
        for inner, weight in _weights(module, "bias"):
            held.setdefault(inner, {})[weight] = Split(0, parts, style)
    return held


def _attention(module: nn.MultiheadAttention, style: str, ranks: int) -> dict[str, dict[str, Split]]:
    """Split an attention layer by heads: its projections by columns, what joins the heads by rows."""
    if style != "colwise":
        msg = f'a MultiheadAttention is split by heads: "colwise", not {style!r}'
        raise _Unfit(msg)
    _check_divides(module.num_heads, ranks, "heads", 1)
    held = {"": {}, "out_proj": {"weight": Split(1, 1, style)}}  # type: dict[str, dict[str, Split]]
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    for name in names:
        if getattr(module, name) is not None:
            held[""][name] = Split(0, 3 if name.startswith("in_proj") else 1, style)
    return held


def _parts(module: nn.Module, number: str, sizes: Mapping[str, int]) -> int:
    if number:
        return int(number)
    if sizes["out"] == 3 * sizes["in"]:
        return 3
    msg = f"{sizes['out']} channels out of {sizes['in']} do not tell how many parts: write packed:2, say"
    raise _Unfit(msg)


def _check_divides(n: int, pieces_wanted: int, what: str, parts: int) -> None:
    if n % pieces_wanted or not n:
        of = "" if parts == 1 else f" in {parts} parts"
        msg = f"{n} {what}{of} are not shared out equally by {pieces_wanted // parts} ranks of tensor"
        raise _Unfit(msg)


def _weights(module: nn.Module, name: str) -> Iterator[tuple[str, str]]:
    """Find the parameters that make a weight: itself, what a parametrization has of its shape, or what a hook has.

    Parameters of another shape (the length of weight_norm) stay whole.
    """
    if parametrize.is_parametrized(module, name):
        inner: nn.Module = module.parametrizations[name]  # type: ignore[index, assignment]
        shape = _shape(module, name)
        for held_name, w in inner.named_parameters(recurse=False):
            if w.shape == shape:
                yield f"parametrizations.{name}", held_name
        return
    held = dict(module.named_parameters(recurse=False))
    for found in (name, f"{name}_orig", f"{name}_v"):
        if found in held:
            yield "", found
            return
    msg = f"no parameter {name}"
    raise _Unfit(msg)


def _shape(module: Any, name: str) -> tuple[int, ...]:
    """Give the shape of a weight, which is not read: spectral norm takes a step whenever it is."""
    if isinstance(module, nn.Linear):
        shape: tuple[int, ...] = (module.out_features, module.in_features)
    elif isinstance(module, nn.Embedding):
        shape = (module.num_embeddings, module.embedding_dim)
    else:
        ends = (module.out_channels, module.in_channels // module.groups)
        if isinstance(module, _TRANSPOSED):
            ends = (module.in_channels, module.out_channels // module.groups)
        shape = (*ends, *module.kernel_size)
    return shape if name == "weight" else (module.out_channels if hasattr(module, "out_channels") else shape[0],)


def _torn_ties(model: nn.Module, splits: Splits) -> list[str]:
    """Find parameters that several modules share and that these would split in different ways."""
    users: dict[int, dict[str, Split | None]] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(p), {})[f"{path}.{name}".lstrip(".")] = splits.get(path, {}).get(name)
    torn = []
    for by_name in users.values():
        if len({(split.dim, split.parts) if split else None for split in by_name.values()}) > 1:
            torn.append(by_name)
    return [f"one parameter, split in different ways: {', '.join(by_name)}" for by_name in torn]


def splits_for(model: nn.Module, plan: str | Mapping[str, str] | None, mesh: DeviceMesh) -> Splits:
    """Give the splits of a plan, or of the one that is found for a model ("auto"), on a mesh.

    What was found is told to the logger "meshpar" of rank 0, and shown by `print(model)`.

    Raises:
        SpecError: see `plan_splits`.
    """
    ranks = axis_size(mesh, "tensor")
    if plan is None:
        return {}
    if isinstance(plan, str):
        if plan != "auto":
            raise SpecError(_text([f"tensor_plan={plan!r}"]))
        plan = auto_plan(model, ranks)
        if not any(mesh.get_coordinate() or ()):
            chosen = "".join(f"\n  {name}: {style}" for name, style in plan.items()) or " nothing"
            logging.getLogger("meshpar").info('tensor_plan="auto" over %d ranks splits%s', ranks, chosen)
    return plan_splits(model, plan, ranks)


def is_packed_plan(splits: Splits) -> bool:
    """Tell whether activations of a plan may lie in the packed layout."""
    return any(split.parts > 1 for by_name in splits.values() for split in by_name.values())


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, splits: Splits) -> None:
    """Turn the weights that a plan splits into DTensors over `tensor`, in place, before `fully_shard`.

    Args:
        model: what `rewrite` gave; every rank holds the same values.
        mesh: mesh of `make_mesh`.
        splits: what `plan_splits` gave for the number of ranks of `tensor`.

    Communication:
        None.
    """
    if axis_size(mesh, "tensor") == 1:
        return
    modules = dict(model.named_modules())
    memo: dict[int, nn.Parameter] = {}
    for path, by_name in splits.items():
        owner = modules[path]
        for name, split in by_name.items():
            p = owner.get_parameter(name)
            if id(p) not in memo:
                memo[id(p)] = _split(p, mesh, split.dim)
            setattr(owner, name, memo[id(p)])


def read_split(model: nn.Module, mesh: DeviceMesh, splits: Splits) -> None:
    """Let split weights be activations for a forward, in place, after `fully_shard`, which gathers them split."""
    if axis_size(mesh, "tensor") == 1:
        return
    modules = dict(model.named_modules())
    for path, by_name in splits.items():
        owner = modules[path]
        owner.__dict__[_SPLITS] = dict(by_name)
        private.wrap_pre_hooks(owner, functools.partial(_under_rules, owner=owner))
        owner.__class__ = _split_class(type(owner))


def _under_rules(hook: Callable[..., Any], owner: nn.Module) -> Callable[..., Any]:
    """Let a hook that makes a weight (the old spectral norm) meet the rules, at the root too, where no mode is on."""
    if not hasattr(hook, "compute_weight"):
        return hook

    @functools.wraps(hook, updated=())
    def again(*args: Any, **kwargs: Any) -> Any:
        if is_on():
            return hook(*args, **kwargs)
        with Spmd(owner.__dict__[STATE].policy):
            return hook(*args, **kwargs)

    return again


def _split(p: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Cut a parameter to this rank's rows."""
    a, b = chunks(p.shape[dim], axis_size(mesh, "tensor"))[mesh.get_local_rank("tensor")]
    piece = p.detach().narrow(dim, a, b - a).clone(memory_format=torch.contiguous_format)
    value = DTensor.from_local(
        piece, mesh["tensor"], [Shard(dim)], run_check=False, shape=p.shape, stride=p.detach().contiguous().stride()
    )
    twin = nn.Parameter(value, requires_grad=p.requires_grad)
    twin.__dict__.update(p.__dict__)
    return twin


def _split_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a module whose split weights are activations for a forward."""
    if cls.__dict__.get("_meshpar_split"):
        return cls

    def __getattr__(self: nn.Module, name: str) -> Any:
        value: Any = cls.__getattr__(self, name)
        split = self.__dict__[_SPLITS].get(name) if isinstance(value, DTensor) else None
        if split is None:
            return value
        policy = self.__dict__[STATE].policy
        if torch.compiler.is_compiling():
            return as_node(split_weight, policy, value) if is_tracing() else value
        if not is_on() or value.device_mesh.mesh_dim_names != ("tensor",):
            return value
        return packed.mark(weights.entered(value, policy.mesh), split.parts)

    def extra_repr(self: nn.Module) -> str:
        styles = sorted({split.style for split in self.__dict__[_SPLITS].values()})
        return ", ".join(filter(None, (cls.extra_repr(self), f"{' '.join(styles)} over tensor")))

    names = {
        "_meshpar_split": True,
        "_meshpar_aware": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__getattr__": __getattr__,
        "extra_repr": extra_repr,
    }
    return type(cls.__name__, quietly(cls), names)


@direct
def split_weight(w: DTensor) -> DTensor:
    """Give a weight of a graph as an activation; the parts of a fused one are not told apart there, which costs."""
    mesh = current_policy().mesh
    assert mesh is not None
    return weights.entered(w, mesh)
