"""From module to module: the structure is copied, known layers get placement-aware classes, the rest enters the mode.

Invariant: the module given is not touched; parameters, buffers, their ties and their names are those of it. A copy
still runs on plain tensors. Only exact types are swapped: a user's subclass with a forward of its own keeps it, and
its calls meet the rules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from meshpar import private, record
from meshpar.errors import SpecError, explain
from meshpar.spmd import Policy, Spmd, is_on

STATE = "_meshpar"
"""Name of the attribute in which a rewritten module keeps its `State`."""


@dataclass(frozen=True)
class State:
    """Hold what a rewritten module knows of its place.

    Args:
        path: its name in the model, "" for the root.
        policy: what the mode is told when this module has to enter it.
        entry: maps the arguments of a call from outside to activations; the root has one.
    """

    path: str
    policy: Policy
    entry: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None


def state_of(module: nn.Module) -> State | None:
    """Give the state of a rewritten module, None for any other."""
    return module.__dict__.get(STATE)


def run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward under the mode, which is entered where it is not on: in a recomputation it never is."""
    state: State = module.__dict__[STATE]
    with record.inside(state.path):
        if state.entry is not None:
            args, kwargs = state.entry(args, kwargs)
        if is_on():
            return forward(*args, **kwargs)
        with Spmd(state.policy):
            return forward(*args, **kwargs)


class _Conv:
    """Convolve in one exchange of rows, whatever the padding mode."""

    def forward(self, input: Tensor) -> Tensor:
        conv: Any = self
        if not isinstance(input, DTensor):
            return super().forward(input)  # type: ignore[misc,no-any-return]
        from meshpar.rules.conv import convolve

        return convolve(
            input,
            conv.weight,
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            padding_mode=conv.padding_mode,
            op=f"conv{len(conv.kernel_size)}d",
        )

    def extra_repr(self) -> str:
        conv: Any = self
        at = -2 if len(conv.kernel_size) > 1 else -1
        k, d = conv.kernel_size[at], conv.dilation[at]
        lo = (k - 1) * d // 2 if conv.padding == "same" else 0 if isinstance(conv.padding, str) else conv.padding[at]
        return f"{super().extra_repr()}, rows={lo}+{max((k - 1) * d - lo, 0)} on domain"  # type: ignore[misc]


class _Norm:
    """Say that the statistics are global."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, statistics over domain"  # type: ignore[misc]


class _BatchNorm:
    """Say over which axes the statistics go."""

    def extra_repr(self) -> str:
        state: State = self.__dict__[STATE]
        axes = "data, domain" if state.policy.batch_statistics == "global" else "domain"
        return f"{super().extra_repr()}, statistics over {axes}"  # type: ignore[misc]


class _SyncBatchNorm(_BatchNorm):
    """Take the statistics of the whole batch by the rule of batch norm, on any device."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, input)  # type: ignore[arg-type]


AWARE: Mapping[type[nn.Module], type] = {
    nn.Conv1d: _Conv,
    nn.Conv2d: _Conv,
    nn.Conv3d: _Conv,
    nn.GroupNorm: _Norm,
    nn.InstanceNorm1d: _Norm,
    nn.InstanceNorm2d: _Norm,
    nn.InstanceNorm3d: _Norm,
    nn.BatchNorm1d: _BatchNorm,
    nn.BatchNorm2d: _BatchNorm,
    nn.BatchNorm3d: _BatchNorm,
    nn.SyncBatchNorm: _SyncBatchNorm,
}
"""What is mixed into the class of known layers."""


def rewrite(module: nn.Module, *, policy: Policy | None = None) -> nn.Module:
    """Copy a module so that its layers know about placements.

    Args:
        module: any module; it is not touched.
        policy: what the mode is told where the copy enters it.

    Returns:
        A module with the same parameters and buffers (the very same tensors), names, ties, hooks and
        parametrizations, of subclasses of the same classes.

    Raises:
        SpecError: a compiled (`torch.jit`) module, whose operations no rule can see.

    Example:
        >>> print(rewrite(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1))))
        Sequential(
          (0): DomainConv2d(1, 1, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), rows=1+1 on domain)
        )
    """
    scripted = [name or "the root" for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise SpecError(
            explain(
                "rewrite: compiled modules cannot be made parallel.",
                got=f"torch.jit modules: {', '.join(scripted)}",
                needs="modules whose forward runs in Python",
                fix="give the module that was scripted or traced",
            )
        )
    told = policy or Policy()
    memo: dict[int, nn.Module] = {}
    for name, old in module.named_modules():
        memo[id(old)] = _copy(old, name, told)
    for old in module.modules():
        _rewire(memo[id(old)], memo)
    return memo[id(module)]


def _copy(old: nn.Module, path: str, policy: Policy) -> nn.Module:
    cls = aware_class(old)
    new: nn.Module = object.__new__(cls)
    new.__dict__ = dict(old.__dict__)
    new.__dict__[STATE] = State(path, policy)
    return new


def _rewire(new: nn.Module, memo: dict[int, nn.Module]) -> None:
    """Give a copy containers of its own, and let them hold copies of modules."""
    for name, value in list(new.__dict__.items()):
        if "hooks" in name and isinstance(value, dict):
            twin = type(value)()
            twin.update({key: private.rebound_hook(hook, new) for key, hook in value.items()})
            new.__dict__[name] = twin
        elif name != STATE:
            new.__dict__[name] = _replaced(value, memo)


def _replaced(value: Any, memo: dict[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if type(value) in (list, tuple, set):
        return type(value)(_replaced(item, memo) for item in value)
    if isinstance(value, dict) and hasattr(value, "copy"):
        twin = value.copy()
        for key, item in value.items():
            twin[key] = _replaced(item, memo)
        return twin
    return value


def aware_class(module: nn.Module) -> type[nn.Module]:
    """Give the subclass that a copy of a module gets."""
    cls = type(module)
    if parametrize.is_parametrized(module):
        # torch makes a class for each parametrized module: do not keep it alive in a cache.
        return _make_class(cls, AWARE.get(cls.__mro__[1]))
    return _cached_class(cls)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _cached_class(cls: type[nn.Module]) -> type[nn.Module]:
    return _make_class(cls, AWARE.get(cls))


def _make_class(cls: type[nn.Module], mixin: type | None) -> type[nn.Module]:
    if cls.__dict__.get("_meshpar_aware"):
        return cls
    bases = (cls,) if mixin is None else (mixin, cls)
    inner = cls.forward if mixin is None else getattr(mixin, "forward", cls.forward)
    names: dict[str, Any] = {
        "_meshpar_aware": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: type[nn.Module] = type(cls.__name__ if mixin is None else f"Domain{cls.__name__}", bases, names)
    if _has_forward(cls):

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, super(made, self).forward, args, kwargs)  # type: ignore[misc]

        made.forward = forward
    return made


def _has_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward and not issubclass(cls, nn.ModuleList | nn.ModuleDict)


def with_entry(module: nn.Module, entry: Any, policy: Policy) -> None:
    """Tell the root of a model what to do with the arguments of a call from outside."""
    state: State = module.__dict__[STATE]
    module.__dict__[STATE] = replace(state, entry=entry, policy=policy)
