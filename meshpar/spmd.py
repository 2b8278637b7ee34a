"""Deny by default: the mode under which torch functions meet DTensors, the rules, and the gather.

Invariant: inside the mode, a torch function that meets an activation does one of three things: it follows a rule of
ours, it is on the list of functions that DTensor was tested to do right, or its inputs are gathered, which is put in
the record and said. Nothing else ever reaches DTensor. The only state here is the registry of rules, filled when the
package is imported, and for each thread the policies of the modes in force.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode, resolve_name

from meshpar import canvas, pieces, private, record, views
from meshpar.errors import GatherError, GatherWarning, ShardingError, SpecError, explain
from meshpar.mesh import is_ours
from meshpar.private import pytree

Handler = TypeVar("Handler", bound=Callable[..., Any])

ON_GATHER = ("warn", "error", "allow")


@dataclass(frozen=True)
class Rule:
    """Hold what is done for one torch function.

    Args:
        handler: called with the arguments of the function.
        status: "rule" or "plain" (reads no data, or runs before any sharding matters).
    """

    handler: Callable[..., Any]
    status: str


RULES: dict[Callable[..., Any], Rule] = {}
"""What is done for each torch function; whatever is missing here is gathered."""

ALWAYS: set[Callable[..., Any]] = set()
"""Functions whose rule is asked also where all arguments are plain: torch hands them on incompletely to modes."""

RANDOM: set[Callable[..., Any]] = set()
"""Functions that draw random numbers from plain arguments: all ranks must draw the same."""


@dataclass(frozen=True)
class Policy:
    """Hold what a mode was asked to do.

    Args:
        on_gather: "warn" once per call site, "error", or "allow".
        mesh: mesh of the model, where one is known.
        batch_statistics: "global", or "data-local" for statistics that stay within a data rank.
    """

    on_gather: str = "warn"
    mesh: DeviceMesh | None = None
    batch_statistics: str = "global"

    def __post_init__(self) -> None:
        if self.on_gather not in ON_GATHER:
            raise SpecError(
                explain(
                    "on_gather: unknown.",
                    got=repr(self.on_gather),
                    needs=f"one of {ON_GATHER}",
                    fix='on_gather="warn"',
                )
            )
        if self.batch_statistics not in ("global", "data-local"):
            raise SpecError(
                explain(
                    "batch_statistics: unknown.",
                    got=repr(self.batch_statistics),
                    needs='"global" or "data-local"',
                    fix='batch_statistics="global"',
                )
            )


_POLICIES = threading.local()


def policy() -> Policy:
    """Give the policy of the innermost mode of this thread, the default one outside of any."""
    stack: list[Policy] = getattr(_POLICIES, "stack", [])
    return stack[-1] if stack else Policy()


@contextlib.contextmanager
def under(told: Policy) -> Iterator[None]:
    """Let a policy be in force inside the block, for rules that run without a mode, in a graph."""
    if not hasattr(_POLICIES, "stack"):
        _POLICIES.stack = []
    _POLICIES.stack.append(told)
    try:
        yield
    finally:
        _POLICIES.stack.pop()


def rule(*functions: Callable[..., Any], status: str = "rule") -> Callable[[Handler], Handler]:
    """Register a handler for torch functions."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            assert function not in RULES, f"two rules for {function}"
            RULES[function] = Rule(handler, status)
        return handler

    return register


def functions(*names: str, spaces: Iterable[Any] = ()) -> list[Callable[..., Any]]:
    """Find the torch functions of some names: in torch, as tensor methods, in torch.nn.functional, torch.special."""
    found: dict[Callable[..., Any], None] = {}
    modules = (torch, torch.nn.functional, torch.special, torch.linalg)
    for name in names:
        # A module has an __eq__ too, of modules.
        for space in (*spaces, torch.Tensor, *(() if name.startswith("__") else modules)):
            function = getattr(space, name, None)
            if callable(function):
                found[function] = None
    return list(found)


class Spmd(TorchFunctionMode):
    """Be the mode in force inside a parallelized model and inside `spmd()`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def __enter__(self) -> Spmd:
        if not hasattr(_POLICIES, "stack"):
            _POLICIES.stack = []
        private.wrap_checkpointed(_under_rules)
        private.show_written_parts()
        _POLICIES.stack.append(self.policy)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _POLICIES.stack.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: list[DTensor] = []
        find(args, found)
        if kwargs:
            find(kwargs.values(), found)
        if not found:
            if func in ALWAYS:
                return RULES[func].handler(*args, **kwargs)
            if func in RANDOM:
                return RULES[same_numbers].handler(func, args, kwargs, self.policy.mesh)
            return func(*args, **kwargs)
        ours = [x for x in found if is_ours(x.device_mesh)]
        if not ours:
            return func(*args, **kwargs)
        if len(ours) != len(found):
            args, kwargs = _adopt((args, kwargs), ours[0].device_mesh)
        if any(x.device_mesh != ours[0].device_mesh for x in ours):
            _refuse_meshes(func, ours)
        return _logged_call(func, args, kwargs) if record.is_open() else call(func, args, kwargs)


def same_numbers(*args: Any, **kwargs: Any) -> Any:
    """Stand in the registry for the handler of random functions on plain arguments (see `rules.random`)."""
    raise NotImplementedError


def lay_canvas(target: DTensor, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Stand in the registry for what lays out a canvas before the first write into it (see `rules.factory`)."""
    raise NotImplementedError


def _logged_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that the model calls, and put it in the record with what became of it."""
    before = record.num_gathers()
    result = call(func, args, kwargs)
    status = "gather" if record.num_gathers() > before else "rule"
    record.note_call(name_of(func), status, args, kwargs)
    return result


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that meets activations: by its rule, else by the gather."""
    result = _laid_call(func, args, kwargs)
    if views.gives_views(func):
        views.remember(func, args, kwargs, result)
    elif args and views.is_linked(args[0]) and _may_write(func, args, kwargs):
        views.after_write(args[0], _laid_call)
    return result


def _may_write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into its first argument: by its name, or by `inplace`, which may be positional."""
    if _writes_in_place(func) or kwargs.get("inplace") or func in private.PART_SETTERS:
        return True
    at = _inplace_position(func) if isinstance(func, FunctionType) else None
    return at is not None and len(args) > at and bool(args[at])


@functools.lru_cache(maxsize=1024)
def _inplace_position(func: FunctionType) -> int | None:
    """Give the position of the argument `inplace`: other arguments may be True for reasons of their own."""
    names = list(inspect.signature(func, follow_wrapped=False).parameters)
    return names.index("inplace") if "inplace" in names else None


def _laid_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function; a canvas that it writes into is laid out first."""
    for target in _targets(func, args, kwargs):
        if canvas.is_free(target):
            RULES[lay_canvas].handler(target, func, args)
    return _call(func, args, kwargs)


def _targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Give the tensors that a call writes into."""
    if kwargs and (out := kwargs.get("out")) is not None:
        return tuple(out) if isinstance(out, tuple | list) else (out,)
    return (args or tuple(kwargs.values()))[:1] if _may_write(func, args, kwargs) else ()


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = RULES.get(func)
    if found is not None:
        if kwargs and not _ALIASES.keys().isdisjoint(kwargs) and not isinstance(func, FunctionType):
            kwargs = {_ALIASES.get(key, key): value for key, value in kwargs.items()}
        return found.handler(*args, **kwargs)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return func(*args, **kwargs)
    return gather_call(func, args, kwargs, why="no rule")


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""The names of numpy that torch takes too."""


def find(items: Iterable[Any], found: list[DTensor]) -> None:
    """Collect the DTensors in arguments, and in lists, tuples and dicts among them."""
    for item in items:
        if isinstance(item, DTensor):
            found.append(item)
        elif type(item) in (list, tuple):
            find(item, found)
        elif type(item) is dict:
            find(item.values(), found)


def _adopt(tree: Any, mesh: DeviceMesh) -> Any:
    """Bring DTensors of other meshes (parameters as the optimizer sees them) onto the mesh of the activations."""

    def bring(x: Any) -> Any:
        if isinstance(x, DTensor) and not is_ours(x.device_mesh):
            full = x.full_tensor()
            return pieces.whole(full, mesh, pieces.replicated(mesh), full.shape)
        return x

    return pytree.tree_map(bring, tree)


def _refuse_meshes(func: Callable[..., Any], ours: list[DTensor]) -> None:
    raise ShardingError(
        explain(
            f"{name_of(func)}: its inputs lie on different meshes.",
            got=[f"{tuple(x.shape)} on mesh {tuple(x.device_mesh.shape)}" for x in ours],
            needs="one mesh for all",
            fix="give the mesh of the model, meshpar.mesh_of(model), to shard_batch",
        )
    )


def name_of(func: Callable[..., Any]) -> str:
    """Name a torch function as users write it."""
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")


def announce_gather(op: str, tensors: Iterable[DTensor], why: str) -> None:
    """Say that an op gathers: an error, a warning once per call site, or nothing, as the policy has it.

    The bytes go into the record when the tensors are moved.
    """
    mode = policy().on_gather
    if mode == "allow":
        return
    sharded = [x for x in tensors if is_split(x)]
    if not sharded:
        return
    num_bytes = sum(int(x.numel()) * x.element_size() for x in sharded)
    where = record.here(op).rpartition("|")[0] or "root"
    text = explain(
        f"{where}: {op} gathers its inputs ({why}).",
        got=[f"{tuple(x.shape)} in {_show(x)}" for x in sharded] + [f"{num_bytes} bytes on every rank"],
        needs="a rule for these placements to run sharded",
        fix='nothing: the numbers are right. on_gather="error" forbids it, "allow" silences this',
    )
    if mode == "error":
        raise GatherError(text)
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, GatherWarning, stacklevel=2)
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    if _action(text, frame) in ("default", "module", "once"):
        # Python's own memory of call sites is lost whenever anybody touches the filters, as torch does now and then.
        site = (file, line, where, op, tuple(warnings.filters))
        if site in _SAID:
            return
        _SAID.add(site)
    warnings.warn_explicit(text, GatherWarning, file, line)


_SAID: set[tuple[Any, ...]] = set()
"""Call sites of gathers that have been warned about."""


def _action(text: str, frame: FrameType) -> str:
    """Find what the filters say about a gather warning from a frame."""
    module = frame.f_globals.get("__name__", "")
    for action, message, category, modules, line in warnings.filters:
        if (
            issubclass(GatherWarning, category)
            and (message is None or message.match(text))
            and (modules is None or modules.match(module))
            and line in (0, frame.f_lineno)
        ):
            return action
    return "default"


def _show(x: DTensor) -> str:
    names = [
        f"{axis}: {placement}"
        for axis, placement in zip(pieces.axes_of(x.device_mesh), x.placements, strict=True)
        if not placement.is_replicate()
    ]
    return ", ".join(names)


def is_split(x: DTensor) -> bool:
    """Tell whether ranks hold different things: axes of one rank do not count."""
    return any(not p.is_replicate() and x.device_mesh.size(axis) > 1 for axis, p in enumerate(x.placements))


def _user_frame() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("meshpar", "torch", "contextlib"):
            return frame
        frame = frame.f_back
    return None


def gather_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, why: str) -> Any:
    """Replicate the inputs, run the function on every rank alike, and put the outputs back in their layout.

    An output keeps a sharded dim that is still there with its size; otherwise it is replicated. In-place functions
    and `out=` write into the tensor that they were given. A function that draws random numbers draws those of rank 0.

    Communication:
        An all-gather of every sharded input; of every gradient of a sharded output in the backward.
    """
    op = name_of(func)
    found: list[DTensor] = []
    find((args, kwargs), found)
    out = kwargs.get("out")
    target = args[0] if args and _writes_in_place(func) else out
    if target is not None:
        _check_targets(target, op)
    announce_gather(op, found, why)
    reference = max(found, key=lambda x: (sum(not p.is_replicate() for p in x.placements), x.numel()))
    mesh = reference.device_mesh
    factor = pieces.part_factor(mesh, pieces.replicated(mesh))

    def enter(x: Any) -> Any:
        if isinstance(x, DTensor):
            return pieces.local(pieces.moved(x, pieces.replicated(mesh), op, "gather", why))
        return pieces.scale_grad(x, factor) if isinstance(x, Tensor) else x

    def leave(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        full = pieces.whole(x, mesh, pieces.replicated(mesh), x.shape)
        return full.redistribute(placements=layout_after(reference, x))

    def write(old: DTensor, new: Tensor) -> DTensor:
        full = pieces.whole(new, mesh, pieces.replicated(mesh), new.shape)
        return pieces.overwrite(old, full.redistribute(placements=old.placements))

    named = {key: value for key, value in kwargs.items() if key != "out"}
    plain_args, plain_kwargs = pytree.tree_map(enter, (args, named))
    if target is not None and target is not out:
        # A copy, since the backward of what made the target may need it as it was.
        plain_args = (plain_args[0].clone(), *plain_args[1:])
    if func in RANDOM:
        result = RULES[same_numbers].handler(func, plain_args, plain_kwargs, mesh)
    else:
        result = func(*plain_args, **plain_kwargs)
    if target is None:
        return pytree.tree_map(leave, result)
    if target is not out:
        return write(target, plain_args[0])
    if isinstance(out, DTensor):
        return write(out, result)
    parts = [write(old, new) for old, new in zip(out, result, strict=True)]
    return type(result)(parts)


def _check_targets(target: Any, op: str) -> None:
    for x in target if isinstance(target, list | tuple) else (target,):
        if not isinstance(x, DTensor):
            raise ShardingError(
                explain(
                    f"{op}: cannot write activations into a plain tensor.",
                    got=f"{type(x).__name__} to write into, DTensors to write",
                    needs="an activation as the target",
                    fix="make it with x.new_zeros(...) or zeros_like(x), or use the form that returns a new tensor",
                )
            )


def _writes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # aten functions have the overload after it
    if name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE):
        return True
    return name.endswith("_") and not name.endswith("__")


_NOT_IN_PLACE = ("__index__", "__int__", "__invert__", "__iter__", "__init__", "__instancecheck__")


def layout_after(reference: DTensor, x: Tensor) -> list[Any]:
    """Choose placements for a tensor that follows from another: a dim of the same size, from the front or the back."""
    out: list[Any] = []
    used: set[int] = set()
    for axis, placement in enumerate(reference.placements):
        keep: Any = Replicate()
        if isinstance(placement, Shard):
            n = reference.shape[placement.dim]
            back = placement.dim - reference.dim() + x.dim()
            for dim in (placement.dim, back):
                if 0 <= dim < x.dim() and x.shape[dim] == n and dim not in used:
                    keep = Shard(dim)
                    break
            if keep.is_shard() and reference.device_mesh.size(axis) > 1:
                used.add(keep.dim)
        out.append(keep)
    return out


def is_on() -> bool:
    """Tell whether the mode is in force right here: it is not inside of a rule, nor in a recomputation."""
    return any(isinstance(mode, Spmd) for mode in private.function_modes())


def _under_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpointed function meet the same rules when autograd runs it again, where no mode is in force."""
    if not is_on():
        return function
    told, label = policy(), record.here("")

    def again(*args: Any, **kwargs: Any) -> Any:
        if is_on():
            return function(*args, **kwargs)
        with record.inside(label.rpartition("|")[0]), Spmd(told):
            return function(*args, **kwargs)

    return again


def traced_mode(on_gather: str, mesh: DeviceMesh | None) -> TorchFunctionMode:
    """Give the mode that stands for this one in a graph; `meshpar.traced` puts its own function in this place."""
    raise NotImplementedError


@contextlib.contextmanager
def spmd(*, on_gather: str = "warn", mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Put torch functions under the rules: for losses, metrics, anything done with activations outside of a model.

    Args:
        on_gather: what to do about an op without a rule: "warn", "error" or "allow".
        mesh: ranks that random numbers must agree on; all of the job by default.

    Example:
        >>> with spmd():
        ...     pass
    """
    if torch.compiler.is_compiling():
        with traced_mode(on_gather, mesh):
            yield
    else:
        with Spmd(Policy(on_gather=on_gather, mesh=mesh)):
            yield
