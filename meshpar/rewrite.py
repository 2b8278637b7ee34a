"""From module to module: the structure is copied, known layers get placement-aware classes, the rest enters the mode.

Invariant: the module given is not touched; parameters, buffers, their ties and their names are those of it. A copy
still runs on plain tensors. Only exact types are swapped: a user's subclass with a forward of its own keeps it, and
its calls meet the rules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from meshpar import packed, pieces, private, record
from meshpar.errors import SpecError, explain
from meshpar.layouts import layouts
from meshpar.registry import Policy
from meshpar.spmd import Spmd, is_on, rules_alone
from meshpar.traced import Traced, as_node, number_of

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
    state = state_of(module)
    if state is None:  # the model makes modules of the class of its own ones while it runs
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_traced(state, forward, args, kwargs)
    with record.inside(state.path):
        if state.entry is not None:
            args, kwargs = state.entry(args, kwargs)
        with contextlib.nullcontext() if is_on() else Spmd(state.policy):
            out = forward(*args, **kwargs)
        return out if state.entry is None else private.map_output(functools.partial(_left, state.policy), out)


def _left(told: Policy, x: Any) -> Any:
    """Give an output of the root as it is known outside: no packed layout, and no plain tensor made of parameters.

    The gradient of a plain one would be this rank's part, which nobody outside is to know.
    """
    if told.packed and packed.is_packed(x):
        return packed.dealt_out(x)
    if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.requires_grad and told.mesh is not None:
        return pieces.lift(x, told.mesh)
    return x


def _run_traced(state: State, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward while Dynamo traces it."""
    with record.inside(state.path):
        if any(isinstance(mode, Traced) for mode in private.function_modes()):
            return forward(*args, **kwargs)
        with Traced(number_of(state.policy)):
            return forward(*args, **kwargs)


class _Conv:
    """Convolve in one exchange of rows, whatever the padding mode."""

    def forward(self, input: Tensor) -> Tensor:
        conv: Any = self
        if not isinstance(input, DTensor):
            return super().forward(input)  # type: ignore[misc,no-any-return]
        from meshpar.rules.conv import convolve

        run_it: Callable[..., Tensor] = convolve
        if torch.compiler.is_compiling():
            run_it = functools.partial(as_node, convolve, conv.__dict__[STATE].policy)
        elif record.is_open():
            given = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")}
            record.note_call(f"F.conv{len(conv.kernel_size)}d", "rule", (), given)
        weight, bias = conv.weight, conv.bias  # parametrizations and tensor plans make them, in the mode
        with rules_alone():
            result = run_it(
                input,
                weight,
                bias,
                stride=conv.stride,
                padding=conv.padding,
                dilation=conv.dilation,
                groups=conv.groups,
                padding_mode=conv.padding_mode,
                op=f"conv{len(conv.kernel_size)}d",
            )
        if record.is_open() and not torch.compiler.is_compiling():
            record.note_step(f"F.conv{len(conv.kernel_size)}d", "rule", layouts(input), layouts(result))
        return result

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
        twin = copy.copy(value)  # the method `copy` of subclasses may lose their attributes
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
    bases = (*(() if mixin is None else (mixin,)), *quietly(cls))
    inner = cls.forward if mixin is None else getattr(mixin, "forward", cls.forward)
    names: dict[str, Any] = {
        "_meshpar_aware": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: type[nn.Module] = type(cls.__name__ if mixin is None else f"Domain{cls.__name__}", bases, names)
    if has_forward(cls):

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, super(made, self).forward, args, kwargs)  # type: ignore[misc]

        made.forward = forward
    return made


class _Unannounced:
    """Keep from a user's class that we subclass it: its `__init_subclass__` may want arguments, or register."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def quietly(cls: type[nn.Module]) -> tuple[type, ...]:
    """Give the bases of a subclass of which a user's class is not told."""
    told = any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1] if base is not _Unannounced)
    return (_Unannounced, cls) if told and not issubclass(cls, _Unannounced) else (cls,)


def has_forward(cls: type[nn.Module]) -> bool:
    """Tell whether modules of a class are called; the containers of torch without a forward are not."""
    return cls.forward is not nn.Module.forward and not issubclass(cls, nn.ModuleList | nn.ModuleDict)


def with_entry(module: nn.Module, entry: Any, policy: Policy) -> None:
    """Tell the root of a model what to do with the arguments of a call from outside."""
    state: State = module.__dict__[STATE]
    module.__dict__[STATE] = replace(state, entry=entry, policy=policy)
    module.__class__ = _root_class(type(module))


def _root_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a root: under `torch.compile` its arguments are cut before the graph begins."""
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__call__": _called,
    }
    return type(cls.__name__, (cls,), {"_meshpar_aware": True, **names})


@private.run_as_it_is
def _called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a root: as any module, but for what a graph cannot hold, the exchange of the sizes of a batch."""
    if not private.compiles(self):
        return nn.Module.__call__(self, *args, **kwargs)
    if torch.compiler.is_compiling():
        _refuse_plain(args, kwargs)
    else:
        state: State = self.__dict__[STATE]
        args, kwargs = private.outside_graphs(_enter, state, args, kwargs)
    return _within(self, args, kwargs)


def _within(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a root with activations: here begins the graph."""
    return nn.Module.__call__(self, *args, **kwargs)


def _enter(state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make activations of the arguments; every shape of them has a graph of its own."""
    assert state.entry is not None
    args, kwargs = state.entry(args, kwargs)
    for x in private.pytree.tree_leaves((args, kwargs)):
        if isinstance(x, DTensor):
            private.keep_static(x)
    return args, kwargs


def _refuse_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and not isinstance(x, DTensor):
            raise SpecError(
                explain(
                    "a parallel model inside of a compiled function: its inputs are plain tensors.",
                    got=f"a tensor {tuple(x.shape)}",
                    needs="activations: the sizes of a batch are exchanged between ranks, which no graph can do",
                    fix="x = shard_batch(x, mesh_of(model)) before the compiled function; or compile the model itself",
                )
            )
