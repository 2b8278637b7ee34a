"""Views: what torch lets share memory stays in step here, where it may be a copy on another rank.

In torch, a write into `x[:, :, :2]` reaches x, and a write into x reaches the slice. Here the slice of a sharded dim is
fetched, a copy; and even where it shares memory, autograd does not know of it. So a view remembers what it is a view
of, weakly, and after a write into one of the two the other is brought in step.

Invariant: after an in-place function on an activation, every view that torch would have changed has changed, with its
gradient, or an error was raised. Tensors that nobody holds any more are left alone; what lies between two that are
held, as in `x.flatten(2)[:, :, 1:3]`, is made again when it is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar import pieces, private
from meshpar.errors import ShardingError, explain

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_VIEW, _VIEWS = "_meshpar_view", "_meshpar_views"

RESHAPES = frozenset(
    "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze ravel detach contiguous".split()  # noqa: SIM905
)
PERMUTES = frozenset(
    "permute transpose t swapaxes swapdims movedim moveaxis adjoint T mT H mH".split()  # noqa: SIM905
)
INDEXES = frozenset(["__getitem__", "narrow", "select"])
OTHERS = frozenset(
    ["split", "split_with_sizes", "chunk", "tensor_split", "unbind", "expand", "expand_as", "broadcast_to", "diagonal"]
)
PARTS = frozenset(["real", "imag"])
TURNED = frozenset(["adjoint", "H", "mH"])
"""Permutations that conjugate as well."""
_NAMES = RESHAPES | PERMUTES | INDEXES | OTHERS | PARTS


@dataclass(frozen=True)
class View:
    """Tell how a tensor was made: `func(base, *args, **kwargs)`, of which it is the `part`-th tensor.

    Args:
        base: weak reference to what it is a view of.
        func: torch function.
        args: its arguments after the first.
        kwargs: its keyword arguments.
        part: position among the tensors that it gave, None where it gave one.
        above: how the base was made, where it is a view itself.
    """

    base: weakref.ref[DTensor]
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int | None
    above: View | None

    def made_of(self, base: DTensor, call: Call) -> DTensor:
        """Make the view again, of a base."""
        found = call(self.func, (base, *self.args), self.kwargs)
        made: DTensor = found if self.part is None else found[self.part]
        return made


def _name(func: Callable[..., Any]) -> str:
    """Name a function, and the getter of an attribute after the attribute."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def gives_views(func: Callable[..., Any]) -> bool:
    """Tell whether torch lets the result of a function share memory with its first argument."""
    return _name(func) in _NAMES


def remember(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Note that `result` came out of a function that gives views."""
    base = args[0] if args else None
    name = getattr(func, "__name__", "")
    if not isinstance(base, DTensor):
        return
    if name == "__getitem__" and not _is_basic(args[1]):
        return  # torch copies here too
    if name == "contiguous" and base.is_contiguous():
        return
    parts = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
    for part, x in parts:
        if isinstance(x, DTensor) and x is not base:
            view: View | None = View(weakref.ref(base), func, args[1:], kwargs, part, base.__dict__.get(_VIEW))
            setattr(x, _VIEW, view)
            while view is not None:
                if (held := view.base()) is not None:
                    alive = [ref for ref in held.__dict__.get(_VIEWS, ()) if ref() is not None]
                    setattr(held, _VIEWS, [*alive, weakref.ref(x)])
                view = view.above


def _is_basic(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in items)


def is_linked(x: Any) -> bool:
    """Tell whether a tensor is a view, or has views."""
    return isinstance(x, DTensor) and (_VIEW in x.__dict__ or _VIEWS in x.__dict__)


def after_write(target: DTensor, call: Call, skip: DTensor | None = None) -> None:
    """Bring in step what shares memory in torch with a tensor that was written into.

    Args:
        target: the tensor written into.
        call: runs a torch function under the rules.
        skip: the tensor from which the write came.

    Communication:
        That of the assignment or of the view that is made again; none where nothing else is held.

    Raises:
        ShardingError: a write into a view of a kind that cannot be carried back to a tensor that is still held.
    """
    base, steps = _lineage(target)
    if base is not None and base is not skip and _differ(base, target):
        between = [base]
        for view in steps[:-1]:
            between.append(view.made_of(between[-1], call))
        value = target
        for holder, view in zip(reversed(between), reversed(steps), strict=True):
            _write_back(holder, view, value, call)
            value = holder
        after_write(base, call, skip=target)
    for x in _views_of(target):
        if x is not skip and _differ(x, target):
            again = target
            for view in _lineage(x)[1]:
                again = view.made_of(again, call)
            _copy(x, again, call)
            after_write(x, call, skip=target)


def _lineage(x: DTensor) -> tuple[DTensor | None, list[View]]:
    """Give the nearest tensor that is still held of those that x is a view of, and the steps from it to x."""
    view: View | None = x.__dict__.get(_VIEW)
    if view is None:
        return None, []
    steps = [view]
    while steps[0].base() is None and steps[0].above is not None:
        steps.insert(0, steps[0].above)
    return steps[0].base(), steps


def _views_of(x: DTensor) -> Iterator[DTensor]:
    """Give the views that are held, but for views of them, which follow them."""
    for ref in list(x.__dict__.get(_VIEWS, ())):
        found = ref()
        if found is not None and _lineage(found)[0] is x:
            yield found


def _differ(a: DTensor, b: DTensor) -> bool:
    """Tell whether a write into one is not in the other already: other memory, or a gradient to be kept."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return True
    places = [private.memory_of(pieces.local(x)) for x in (a, b)]
    return places[0] != places[1] or 0 in places


def _copy(into: DTensor, value: Tensor, call: Call) -> None:
    call(torch.Tensor.copy_, (into, value), {})


def _write_back(base: DTensor, view: View, value: DTensor, call: Call) -> None:
    name = _name(view.func)
    if name in TURNED and base.is_complex():
        value = call(torch.conj_physical, (value,), {})
    if name in PARTS:
        call(getattr(Tensor, name).__set__, (base, value), {})
    elif name in RESHAPES and name != "detach":
        _copy(base, call(torch.Tensor.reshape, (value, tuple(base.shape)), {}), call)
    elif name in PERMUTES:
        order = _order(view, base.dim())
        _copy(base, call(torch.Tensor.permute, (value, tuple(order.index(d) for d in range(base.dim()))), {}), call)
    elif name in INDEXES:
        call(torch.Tensor.__setitem__, (base, _index(view, base), value), {})
    else:
        raise ShardingError(
            explain(
                f"{name}: a write into its result cannot be carried back.",
                got=f"a view {tuple(value.shape)} of a tensor {tuple(base.shape)} that is still in use",
                needs="a write into a slice, or into a tensor that is not a view",
                fix="write x[...] = value, or use the form that returns a new tensor: y = y * 2",
            )
        )


def _order(view: View, num_dims: int) -> list[int]:
    """Give the dims of the base in the order in which a permuting function puts them."""
    probe = torch.empty([d + 2 for d in range(num_dims)], device="meta")
    return [n - 2 for n in view.func(probe, *view.args, **view.kwargs).shape]


def _index(view: View, base: DTensor) -> Any:
    name = getattr(view.func, "__name__", "")
    if name == "__getitem__":
        return view.args[0]
    names = ("dim", "start", "length") if name == "narrow" else ("dim", "index")
    given = {**dict(zip(names, view.args, strict=False)), **view.kwargs}
    dim = given["dim"] % base.dim()
    if name == "select":
        return (*[slice(None)] * dim, given["index"])
    start = int(given["start"]) % max(base.shape[dim], 1) if given["start"] != base.shape[dim] else given["start"]
    return (*[slice(None)] * dim, slice(start, start + given["length"]))
