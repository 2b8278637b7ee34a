"""Which numbers a forward computes with, where they are not those that the optimizer keeps.

Invariant: parameters, and what the optimizer holds, keep their dtype; buffers keep theirs. A weight that is computed
from others (spectral norm, any parametrization) is computed in the dtype of its parameters, and then rounded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from meshpar import private
from meshpar.errors import SpecError, explain
from meshpar.private import pytree

_HOOKS: dict[type, tuple[str, ...]] = {
    SpectralNorm: ("orig",),
    WeightNorm: ("g", "v"),
}
"""The hooks of torch that compute a weight before each forward, and the endings of what they compute it from."""

_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose weights torch wants in the dtype of their running statistics."""


@dataclass(frozen=True)
class Precision:
    """Name the dtypes of a forward and of the sums of gradients.

    Args:
        params: what parameters and the floating-point inputs of the model (and of each unit of `shard_modules`) are
            rounded to for a forward and backward. The optimizer keeps the parameters as they are.
        reduce: in which the parts of a gradient are added up over the ranks; None for the dtype of the parts.
        output: what the floating-point outputs of the model are cast to; None leaves them.

    Raises:
        SpecError: one that is not a floating-point dtype.

    Example:
        >>> Precision.read("bf16")
        Precision(params=torch.bfloat16, reduce=torch.float32, output=None)
    """

    params: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = torch.float32
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        told = {"params": self.params, "reduce": self.reduce, "output": self.output}
        wrong = [
            f"{name}={value!r}"
            for name, value in told.items()
            if not (isinstance(value, torch.dtype) and value.is_floating_point) and (name == "params" or value)
        ]
        if wrong:
            raise SpecError(_text(wrong))

    @classmethod
    def read(cls, told: Precision | str | None) -> Precision | None:
        """Read `"bf16"`, `"fp16"`, a `Precision`, or None for the dtypes of the model.

        Raises:
            SpecError: anything else.
        """
        if told is None or isinstance(told, Precision):
            return told
        if isinstance(told, str) and told in SHORT:
            return cls(params=SHORT[told])
        raise SpecError(_text([repr(told)]))


SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The short names of precisions; their gradients are added up in float32."""


def _text(got: list[str]) -> str:
    return explain(
        "precision: cannot be used.",
        got=got,
        needs=f"None, one of {tuple(SHORT)}, or a Precision of floating-point dtypes",
        fix='precision="bf16", or Precision(params=torch.bfloat16, reduce=torch.float32)',
    )


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of a tree, those in dataclasses too; all else stays as it is."""
    if dtype is None:
        return tree

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            twin = copy.copy(x)
            for item in dataclasses.fields(x):
                if hasattr(x, item.name):
                    object.__setattr__(twin, item.name, cast(getattr(x, item.name), dtype))
            return twin
        return x

    return pytree.tree_map(leaf, tree)


def computed_weights(module: nn.Module) -> list[str]:
    """Name the weights that hooks of a module compute before its forward."""
    return [hook.name for hook in _computing(module)]


def _computing(module: nn.Module) -> Iterator[Any]:
    return (hook for hook in private.pre_hooks(module) if type(hook) in _HOOKS)


def computes_weights(module: nn.Module) -> bool:
    """Tell whether a module computes weights from its parameters: they are gathered unrounded for it."""
    if isinstance(module, parametrize.ParametrizationList):
        return next(module.parameters(), None) is not None
    return bool(computed_weights(module))


def round_computed(module: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights that hooks of a module compute, from its next forward on."""
    names = computed_weights(module)

    def rounded(module: nn.Module, _: Any) -> None:
        for name in names:
            setattr(module, name, getattr(module, name).to(dtype))

    if names:
        module.register_forward_pre_hook(rounded)


def unrounded(root: nn.Module) -> dict[int, set[str]]:
    """Name, for modules by their id, the parameters of their own that a forward uses as they are.

    Those from which weights are computed, and the weights of layers with running statistics, whose kernels want them
    in the dtype of these.
    """
    found: dict[int, set[str]] = {}
    for module in root.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for inner in module.modules():
                found.setdefault(id(inner), set()).update(name for name, _ in inner.named_parameters(recurse=False))
        elif isinstance(module, _WITH_STATISTICS):
            found.setdefault(id(module), set()).update(name for name, _ in module.named_parameters(recurse=False))
        for hook in _computing(module):
            found.setdefault(id(module), set()).update(f"{hook.name}_{end}" for end in _HOOKS[type(hook)])
    return found


def kept_whole(root: nn.Module) -> set[int]:
    """Give the ids of parameters too small to be worth a unit of their own that are used unrounded: those of norms."""
    norms = [m for m in root.modules() if isinstance(m, _WITH_STATISTICS)]
    return {id(p) for m in norms for p in m.parameters(recurse=False)}
