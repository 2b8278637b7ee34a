"""The private names of torch that meshpar stands on, each with the public name that will replace it.

Invariant: no other module names anything of torch that begins with an underscore.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
import torch.utils.checkpoint
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch._C._dynamo import eval_frame
from torch._library.effects import EffectType
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor, Placement, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshpar import pretend

pytree = _pytree
"""Trees of tensors: map, flatten, unflatten (public when `torch.utils.pytree` comes)."""


def map_output(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of what a forward returned; what it changes nothing in stays the same object.

    A shape stays a `torch.Size`, which pytree loses. Public when `torch.utils.pytree` comes.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))
    mapped = [function(x) for x in leaves]
    same = all(a is b for a, b in zip(leaves, mapped, strict=True))
    return tree if same else pytree.tree_unflatten(mapped, spec)


DispatchMode = TorchDispatchMode
"""A mode that sees every op (public in all but the name of its module)."""

DYNAMO = "torch._dynamo"
"""The module that DTensor imports at its first op (its public face, `torch.compiler`, does not load it)."""

NESTED_FROM_MASK = torch._nested_tensor_from_mask_left_aligned
"""What nn.TransformerEncoder asks before its nested-tensor path (no public name is planned)."""

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The aten op by which `torch.amp.GradScaler` unscales gradients (public when the scaler has a hook for its check)."""

StridedShard = _StridedShard
"""A shard of each of the equal parts of a dim, as a placement (public when DTensor settles on a name)."""

ITEM = torch.ops.aten._local_scalar_dense.default
"""The aten op behind `item()` (the op has no public name)."""


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten some axes into a one-dimensional mesh (public when `DeviceMesh.flatten` comes)."""
    return mesh[axes]._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Give a mesh of one axis several (public when `DeviceMesh.unflatten` comes); the same one at every call."""
    made: dict[Any, DeviceMesh] = mesh._get_root_mesh().__dict__.setdefault("_meshpar_unflattened", {})
    key = mesh.mesh_dim_names, sizes, names
    if key not in made:
        made[key] = mesh._unflatten(0, sizes, names)
    return made[key]


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Put meshes that were cut from one into one, their axes in order (public when `DeviceMesh.concatenate` comes)."""
    return DeviceMesh._concatenate(list(meshes))


def group_by_name(name: str) -> dist.ProcessGroup:
    """Find a process group by its `group_name` (public when custom ops take groups as arguments)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def function_modes() -> list[TorchFunctionMode]:
    """List the torch-function modes in force (no public name is planned)."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


def set_dtensor_handler(op: Any, handler: Callable[..., Any]) -> None:
    """Route one aten op of DTensor to a handler (public when DTensor takes op strategies that refuse)."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def dtensor_handler(op: Any) -> Callable[..., Any] | None:
    """Give the handler that DTensor has for an aten op, if any."""
    return DTensor._op_dispatcher._custom_op_handlers.get(op)


def list_ops(names: Sequence[str]) -> list[Any]:
    """List the aten ops on lists of tensors of some names, and the fused steps (public when `torch.foreach` comes)."""
    wanted = [f"_foreach_{name}{ending}" for name in names for ending in ("", "_")]
    wanted += [f"_fused_{name}_" for name in ("sgd", "adagrad", "adam", "adamw")]
    packets = [getattr(torch.ops.aten, name) for name in wanted if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if "out" not in overload]


def piece_of(x: DTensor) -> torch.Tensor:
    """Give the piece itself, for a handler below autograd (`to_local` makes a view, above it)."""
    return x._local_tensor


def like(x: DTensor, piece: torch.Tensor) -> DTensor:
    """Make a DTensor that lies as x, for a handler below autograd (`from_local` works above it)."""
    spec, held = x._spec, x._local_tensor
    if piece.dtype != held.dtype or piece.stride() != held.stride():
        held_strides = piece.stride()
        order = sorted(range(piece.dim()), key=lambda d: (-held_strides[d], d))
        strides, step = [1] * piece.dim(), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(x.shape[d], 1)
        meta = TensorMeta(x.shape, tuple(strides), piece.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(piece, spec, requires_grad=piece.requires_grad)


def is_sole_owner(x: DTensor) -> bool:
    """Tell whether nothing else sees the memory of a piece: no view, no saved tensor (no public name is planned)."""
    piece = x._local_tensor
    strides = zip(piece.stride(), piece.shape, strict=True)
    if not is_plain(piece) or any(s == 0 and n > 1 for s, n in strides):
        return False
    # The piece, the storage object just made, and what `from_local` made the piece a view of.
    least = 2 + (piece._base is not None)
    return torch._C._storage_Use_Count(piece.untyped_storage()._cdata) <= least


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Let `copy_` into a DTensor that is the sole owner of its memory take over the memory of its source."""
    _ADOPTING.append(True)
    try:
        yield
    finally:
        _ADOPTING.pop()


_ADOPTING: list[bool] = []


def adopt(x: DTensor, source: torch.Tensor) -> bool:
    """Take over the memory of a source, where `adopting` is in force."""
    if not _ADOPTING or not isinstance(source, DTensor):
        return False
    old, new = x._local_tensor, source._local_tensor
    if old.stride() != new.stride():
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(new)
    x._local_tensor = new
    return True


def count_write(x: DTensor) -> None:
    """Count a write into the piece of a DTensor (public: `increment_version`, but for DTensors it counts the outer)."""
    torch.autograd.graph.increment_version(x._local_tensor)
    if torch.compiler.is_compiling():
        # AOTAutograd asks pieces for their history, which a view, as `from_local` makes them, would build anew.
        x._local_tensor = x._local_tensor.detach()


def saved_tensors_are_hooked() -> bool:
    """Tell whether somebody looks after saved tensors, activation checkpointing say (no public name is planned)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: FBT003


def version_of(x: torch.Tensor) -> int:
    """Count the writes into a tensor (public when `Tensor.version` comes)."""
    return x._version


def lay(x: DTensor, piece: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Let a DTensor lie otherwise from now on, with this rank's piece given (no public name is planned)."""
    meta = TensorMeta(x.shape, x.stride(), piece.dtype)
    x._local_tensor, x._spec = piece, DTensorSpec(x.device_mesh, tuple(placements), tensor_meta=meta)


@contextlib.contextmanager
def without_dtensor_handler(op: Any) -> Iterator[None]:
    """Let an aten op of DTensor go its ordinary way inside the block."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    held = handlers.pop(op)
    try:
        yield
    finally:
        handlers[op] = held


def rebound_hook(hook: Any, module: torch.nn.Module) -> Any:
    """Give a state-dict hook that was registered with its module for a copy of the module (no public name)."""
    if not getattr(hook, "with_module", False):
        return hook
    twin = copy.copy(hook)
    twin.module = weakref.ref(module)
    return twin


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather equal pieces (torch 2.13 renamed the function; the old name is what 2.11 has)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


@functools.cache
def wrap_checkpointed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Pass every function given to `torch.utils.checkpoint` through `wrap` first, from now on in this process.

    Public when `checkpoint` keeps the function modes for the recomputation, or takes a hook for all calls.
    """
    module = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator
    apply = module.CheckpointFunction.apply

    @functools.wraps(generator)
    def wrapped_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(fn), *args, **kwargs)

    class Reentrant:
        """Stand where `torch.utils.checkpoint` looks for its autograd function."""

        @staticmethod
        def apply(fn: Callable[..., Any], *args: Any) -> Any:
            return apply(wrap(fn), *args)

    module._checkpoint_without_reentrant_generator = wrapped_generator
    module.CheckpointFunction = Reentrant  # type: ignore[misc, assignment]


def reduce_scatter(out: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up and scatter equal pieces (renamed in torch 2.13, as `all_gather` was)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, given, group=group)


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo run a function for real while it traces, and take the result as a constant.

    This is what `torch._dynamo.assume_constant_result` does, without the second that the import of Dynamo takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be one node of Dynamo's graphs: `torch.compiler.allow_in_graph`, which is public."""
    allowed: Callable[..., Any] = torch.compiler.allow_in_graph(function)
    return allowed


def overridable() -> list[Callable[..., Any]]:
    """List the torch functions that modes see, but for the getters of attributes."""
    return [f for f in torch.overrides.get_testing_overrides() if not isinstance(f, types.MethodWrapperType)]


def for_real(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of plain numbers that works with tensors inside, on real ones even in a trace or a plan.

    Public when `torch.compiler` can leave the modes by which it traces.
    """
    if not (torch.compiler.is_compiling() or pretend.is_on()):
        return function(*args)
    with _disable_current_modes():
        return function(*args)


def constant(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give a real tensor, made with `for_real`, to a computation that a compiler may be tracing."""
    if not torch.compiler.is_compiling():
        return x.to(device)
    return torch.tensor(for_real(x.tolist), dtype=x.dtype, device=device)


def run_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the frame of a function run as it is under `torch.compile`; what it calls is compiled.

    Public when `torch.compiler.disable(recursive=False)` does not import Dynamo.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@run_as_it_is
def compiles(module: torch.nn.Module) -> bool:
    """Tell whether a call of a module is being compiled, or runs compiled: by either way to ask for it."""
    return (
        torch.compiler.is_compiling()
        or module._compiled_call_impl is not None
        or eval_frame.get_eval_frame_callback() is not None
    )


@run_as_it_is
def outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without Dynamo looking at its frames."""
    callback = eval_frame.set_eval_frame(None)
    try:
        return function(*args)
    finally:
        eval_frame.set_eval_frame(callback)


def keep_static(x: torch.Tensor) -> None:
    """Let the sizes of an input be constants of its graph."""
    torch._dynamo.mark_static(x)


def new_hooks(
    module: torch.nn.Module,
    make: Callable[[], Any],
    before: Callable[[Callable[..., Any]], Callable[..., Any]],
    after: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap the hooks before and after the forward that `make` registers on a module."""
    tables = ((module._forward_pre_hooks, before), (module._forward_hooks, after))
    old = [set(table) for table, _ in tables]
    make()
    for (table, wrap), known in zip(tables, old, strict=True):
        for key in set(table) - known:
            table[key] = wrap(table[key])


def pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """List what runs before the forward of a module (no public name is planned)."""
    return list(module._forward_pre_hooks.values())


PART_SETTERS = tuple(getattr(torch.Tensor, part).__set__ for part in ("real", "imag"))
"""What `x.real = y` and `x.imag = y` stand for."""


@functools.cache
def show_written_parts() -> None:
    """Let the modes see `x.real = y` and `x.imag = y` on DTensors, which torch writes without asking them.

    Public when these setters ask, as those of the other attributes do.
    """
    for write in PART_SETTERS:
        part = write.__self__

        def asking(x: DTensor, value: Any, write: Any = write) -> None:
            if function_modes():
                torch.overrides.handle_torch_function(write, (x,), x, value)
            else:
                write(x, value)

        setattr(DTensor, part.__name__, property(part.__get__, asking))


@functools.cache
def keep_missing_gradients() -> None:
    """Let the hooks of `fully_shard` pass on that an input of a unit has no gradient, from now on in this process.

    They make zeros of it, plain ones, which nothing can add to the gradients of an activation (torch 2.13). Public when
    they do not.
    """
    hooked = _fsdp_param_group.RegisterPostBackwardFunction
    name = "setup_context" if "setup_context" in vars(hooked) else "forward"
    told = getattr(hooked, name)

    @functools.wraps(told)
    def wrapped(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return told(ctx, *args)

    setattr(hooked, name, staticmethod(wrapped))


@functools.cache
def name_failures_of_fully_shard(
    naming: Callable[[Sequence[dist.ProcessGroup], str, str], contextlib.AbstractContextManager[None]],
) -> None:
    """Run each collective of `fully_shard` inside `naming(groups, axes, label)`, from now on in this process.

    Public as `set_custom_all_gather` and `set_custom_reduce_scatter` for two of them; whole when the sum over copies
    can be given, too.
    """
    ops = {
        "foreach_all_gather": (("group",), "all-gather of parameters"),
        "foreach_all_gather_copy_out": (("group",), "all-gather of parameters"),
        "foreach_reduce": (("reduce_scatter_group", "all_reduce_group"), "sum of gradients"),
    }

    def wrapped(function: Callable[..., Any], given: tuple[str, ...], op: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            told = signature.bind(*args, **kwargs).arguments
            param = next(iter(told["fsdp_params"]), None)
            if param is None:
                return function(*args, **kwargs)
            mesh, path = param.mesh_info.mesh, (getattr(param, "_param_fqn", None) or "").rpartition(".")[0]
            groups = [g for g in (told.get(name) for name in given) if g is not None and g.size() > 1]
            axes = [axis for axis in mesh.mesh_dim_names or () if mesh.get_group(axis) in groups]
            with naming(groups, " or ".join(axes), f"{path}|fully_shard ({op})"):
                return function(*args, **kwargs)

        return inside

    for name, (given, op) in ops.items():
        setattr(_fsdp_param_group, name, wrapped(getattr(_fsdp_param_group, name), given, op))


@functools.cache
def name_failures_of_dtensor(
    naming: Callable[[Sequence[dist.ProcessGroup], str, str], contextlib.AbstractContextManager[None]],
) -> None:
    """Run what DTensor sends by itself inside `naming(groups, axes, label)`, from now on in this process.

    Public when DTensor's collectives can be given, or hooked.
    """
    redistribute = _redistribute.redistribute_local_tensor

    @functools.wraps(redistribute)
    def inside(piece: Any, old: DTensorSpec, new: DTensorSpec, **kwargs: Any) -> Any:
        pairs = enumerate(zip(old.placements, new.placements, strict=True))
        moved = [i for i, (a, b) in pairs if a != b and old.mesh.size(i) > 1]
        if torch.compiler.is_compiling() or not moved:
            return redistribute(piece, old, new, **kwargs)
        axes = [(old.mesh.mesh_dim_names or [str(j) for j in range(old.mesh.ndim)])[i] for i in moved]
        with naming([old.mesh.get_group(i) for i in moved], " or ".join(axes), "|redistribute of a DTensor"):
            return redistribute(piece, old, new, **kwargs)

    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = inside  # type: ignore[attr-defined]


def replaced_parameters(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """List what stands where `fully_shard` keeps the parameters of a unit, and is not of its making."""
    found = []
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        for param in group.fsdp_params:
            info = param._module_info
            held = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for owner, name in held:
                value = owner._parameters.get(name)
                if (
                    value is not None
                    and value is not param.sharded_param
                    and value is not getattr(param, "_unsharded_param", None)
                ):
                    found.append((owner, name, value))
    return found


def refresh_shards(module: torch.nn.Module) -> None:
    """Let the units of `fully_shard` take over parameters that were put in the place of theirs.

    Public as a side effect of `to_empty` and of `load_state_dict(assign=True)`, which break ties.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.reset_sharded_param()


def kept_on_cpu(module: torch.nn.Module) -> set[int]:
    """Give the ids of the parameters that units of `fully_shard` keep on the CPU (no public name is planned)."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return {id(param.sharded_param) for group in groups for param in group.fsdp_params if param.offload_to_cpu}


def recipe_for_all_below(module: torch.nn.Module) -> Callable[[], None] | None:
    """Give what sets initial values in a module of torch and in those below it (public as `reset_parameters`, else)."""
    if isinstance(module, torch.nn.MultiheadAttention | torch.nn.Transformer):
        return module._reset_parameters
    return None


def replaced(
    held: Sequence[tuple[torch.nn.Module, str, torch.Tensor]],
) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """List what stands where modules held parameters, if it is something else."""
    now = [(module, name, module._parameters.get(name), p) for module, name, p in held]
    return [(module, name, value) for module, name, value, p in now if value is not None and value is not p]


def holds_parameter(module: torch.nn.Module, name: str) -> bool:
    """Tell whether a module has a parameter of its own of a name, without asking for it."""
    return name in module._parameters


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Give where a module keeps its parameters by name (no public name is planned)."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """Give where a module keeps its buffers by name (no public name is planned)."""
    return module._buffers


def wrap_pre_hooks(module: torch.nn.Module, wrap: Callable[..., Any]) -> None:
    """Put other functions in the place of the hooks that run before a forward (no public name is planned)."""
    hooks = module._forward_pre_hooks
    hooks.update({key: wrap(hook) for key, hook in hooks.items()})


def put_parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter, as `torch.func.functional_call` does for a call."""
    module._parameters[name] = value  # type: ignore[assignment]


def keep_order(namespace: str) -> None:
    """Let the ops of a namespace run in the order of the program in compiled code, all of them.

    They send: what a rank left out because it needs no result of it, or did in another order, would be a hang. Public
    when `torch.library` lets an op name its effects.
    """
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            torch.library._register_effectful_op(name.partition(".")[0], EffectType.ORDERED)


def abort_groups() -> None:
    """End all process groups without waiting for a peer (public when `abort_process_group` comes)."""
    dist.distributed_c10d._abort_process_group()


def gloo_group(name: str, ranks: Sequence[int], timeout: Any) -> Any:
    """Make a gloo group of ranks that alone take part; peers and tags are given by rank of the group.

    `new_group(use_local_synchronization=True)` names a group by how many each rank has, so ranks with different numbers
    of groups wait for each other in vain (torch 2.13). Public when the default store or such a name is.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, list(ranks).index(dist.get_rank()), len(ranks), timeout)


def fake_mode() -> Any:
    """Give the mode in which tensors have shapes and no values (public when `torch.compiler` names it)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: torch.Tensor) -> bool:
    """Tell whether a tensor has no values (no public name is planned)."""
    return isinstance(x, FakeTensor)


def is_plain(x: torch.Tensor) -> bool:
    """Tell whether a tensor is torch's own, not of a subclass; a plan's is, without its values."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) or (pretend.is_on() and is_fake(x))


def memory_of(x: torch.Tensor) -> int:
    """Give what two tensors have in common that are views of one memory, also where it is a fake.

    Public when storages can be compared.
    """
    storage = x.untyped_storage()
    return storage._cdata if is_fake(x) else storage.data_ptr()


def run_kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel of an op of ours as it is, where fake tensors would only ask it for a shape.

    Public when `torch.library` can say so.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def start_fake_group(rank: int, num_ranks: int) -> None:
    """Start a process group of which this process is the only one that is there: its collectives give own values.

    The backend is public by its name alone.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    importlib.import_module("torch.distributed._tools.fake_collectives")
    dist.init_process_group(dist.Backend.FAKE, store=dist.HashStore(), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]


@contextlib.contextmanager
def world_set_aside() -> Iterator[None]:
    """Be without the process groups of this process inside the block (public when torch has several worlds)."""
    world, first = _c10d._world, _c10d._world.default_pg
    if first is None:
        yield
        return
    named = (
        *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
        *("pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    )
    tables = {name: dict(getattr(world, name)) for name in named}
    count = world.group_count
    for name in named:
        getattr(world, name).clear()
    world.group_count = 0
    _c10d._update_default_pg(None)
    _unregister_all_process_groups()
    try:
        yield
    finally:
        for name, table in tables.items():
            getattr(world, name).update(table)
        world.group_count = count
        for group, name in tables["pg_names"].items():
            _register_process_group(name, group)
        _c10d._update_default_pg(first)


@contextlib.contextmanager
def shapes_unseen() -> Iterator[None]:
    """Let DTensor work out global shapes out of sight of the modes of the caller (no public name is planned)."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    found = propagator._propagate_tensor_meta_non_cached

    def unseen(schema: Any) -> Any:
        with _disable_current_modes():
            return found(schema)

    setattr(propagator, "_propagate_tensor_meta_non_cached", unseen)  # noqa: B010 - mypy knows it as a method
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


def fill_hollow(model: torch.nn.Module) -> None:
    """Give memory without values to what a model has on the meta device, in place (`to_empty` would empty all)."""
    model._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x)


@contextlib.contextmanager
def quick_chunks() -> Iterator[None]:
    """Let `fully_shard` cut hollow parameters for thousands of ranks with one empty piece, not one a rank.

    Public when `fully_shard` keeps this rank's piece alone.
    """
    name = "_chunk_with_empty"
    found = getattr(_fsdp_param, name)

    def quick(x: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        chunks = list(torch.chunk(x, num_chunks, dim=dim))
        return chunks + [x.new_empty(0)] * (num_chunks - len(chunks))

    setattr(_fsdp_param, name, quick)
    try:
        yield
    finally:
        setattr(_fsdp_param, name, found)
