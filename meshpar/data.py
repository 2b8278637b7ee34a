"""Parameters over the ranks: `fully_shard`, or copies, over data x domain.

Invariant: the gradient of a parameter is the *sum* of the parts of all ranks of data x domain: divide factor 1, and
plain sums, since gloo has no pre-multiplied ones. All modes run through `fully_shard`; they differ in the mesh that it
is given. Copies are shards over a single rank, so that in every mode a model frees its parameters after a forward, and
a gradient that nobody has added up yet is an error and not a number.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrize

from meshpar import private
from meshpar.errors import SpecError, explain
from meshpar.mesh import axis_size, replicas, space_mesh, summed_mesh
from meshpar.parameters import (
    SHARDS,
    Reading,
    Shards,
    kept,
    lies_over_data,
    reading_plain,
    shard_plain_values,
    summed_grad,
)
from meshpar.peers import naming
from meshpar.precision import Precision, cast, computes_weights, kept_whole, round_computed, unrounded
from meshpar.spmd import rules_alone
from meshpar.units import inner_first, units

MODES = ("fsdp", "hsdp", "ddp", "none")
"""How parameters can lie over data x domain; see `check_mode`."""

PARAMETER_AXES = ("replica", "shard")
"""The axes of the mesh of parameters where there are copies."""


def check_mode(mesh: DeviceMesh, data: object) -> None:
    """Check that parameters can lie over a mesh in a mode.

    Args:
        mesh: mesh of `make_mesh`.
        data: "fsdp": each rank of data x domain has a shard, over all of them. "ddp": each has all. "hsdp": there are
            as many copies as the mesh has replicas, each sharded over the other ranks. "none": each has all, and
            gradients are added up over domain alone: a data coordinate trains by itself, on its part of the batch.

    Raises:
        SpecError: an unknown mode, "hsdp" on a mesh without replicas, or replicas in any other mode.
    """
    if data not in MODES:
        text = explain("parallelize: unknown data.", got=f"data={data!r}", needs=f"one of {MODES}", fix='data="fsdp"')
        raise SpecError(text)
    num, size = replicas(mesh), axis_size(mesh, "data")
    if data == "hsdp" and num == 1 and summed_mesh(mesh).size() > 1:
        divisor = next((d for d in range(2, size + 1) if size % d == 0), 2)
        raise SpecError(
            explain(
                'parallelize: data="hsdp" on a mesh without replicas.',
                got=f"{size} data ranks, replica=1",
                needs="the number of copies of the parameters",
                fix=f'"replica={divisor},data={max(size // divisor, 1)},..." for the mesh, which has the ranks of '
                f'data={max(size, 2)}; or data="fsdp" (one copy), "ddp" (a copy a rank)',
            )
        )
    if data != "hsdp" and num > 1:
        raise SpecError(
            explain(
                "parallelize: replicas that nothing keeps.",
                got=f"replica={num} on the mesh, data={data!r}",
                needs='data="hsdp", which alone keeps a copy for each replica',
                fix=f'data="hsdp"; or "data={size},..." for the mesh, without replica',
            )
        )


def check_options(
    module: nn.Module,
    mesh: DeviceMesh,
    shard_modules: Any,
    *,
    data: str,
    precision: Precision | str | None,
    offload: str | None,
) -> None:
    """Check the options of `fully_shard_over`; nothing is sent and nothing is changed.

    Raises:
        SpecError: options that cannot work.
    """
    check_mode(mesh, data)
    _offload_policy(offload, mesh)
    units(module, shard_modules)
    if Precision.read(precision) is not None:
        _unrounded_units(module)


def parameter_mesh(mesh: DeviceMesh, data: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Give the mesh over which parameters lie, and the same ranks along one axis.

    Communication:
        The making of the groups of copies and of shards, once for each mesh and mode; all ranks must take part.
    """
    summed = space_mesh(mesh) if data == "none" else summed_mesh(mesh)
    if data == "fsdp" or summed.size() == 1:
        return summed, summed
    copies = replicas(mesh) if data == "hsdp" else summed.size()
    return private.unflatten(summed, (copies, summed.size() // copies), PARAMETER_AXES), summed


def fully_shard_over(
    module: nn.Module,
    mesh: DeviceMesh,
    shard_modules: Any = "auto",
    *,
    data: str = "fsdp",
    precision: Precision | str | None = None,
    offload: str | None = None,
) -> None:
    """Lay the parameters of a module over data x domain, in place.

    Args:
        module: the root.
        mesh: mesh of `make_mesh`.
        shard_modules: which modules are gathered as one; see `units`.
        data: mode; see `check_mode`.
        precision: dtypes of the forward; see `Precision`.
        offload: "cpu" to keep shards and their gradients in the memory of the host.

    Communication:
        None here but the making of groups. Each unit all-gathers its parameters before its forward and backward, and
        reduce-scatters their gradients after its backward; copies all-reduce them. 0-d parameters, those whose dtype
        is not the one most of their unit has, and under `precision` the weights of batch norms, stay whole on every
        rank; an all-reduce sums their gradients.

    Raises:
        SpecError: options that cannot work.
    """
    check_options(module, mesh, shard_modules, data=data, precision=precision, offload=offload)
    told = Precision.read(precision)
    chosen = units(module, shard_modules)
    for m in module.modules():  # on each module, so that a part of the model can be loaded alone
        m.register_load_state_dict_pre_hook(shard_plain_values)
    if data == "none" and axis_size(mesh, "data") > 1:
        _warn_of_none(mesh)
    lies, summed = parameter_mesh(mesh, data)
    alone = summed.size() == 1 and told is None and offload is None
    if alone or next(module.parameters(), None) is None:
        return
    shards = Shards(lies, summed)
    unrounded_units = _unrounded_units(module) if told else []
    chosen = [u for u in inner_first(module, [*chosen, *unrounded_units]) if u is not module]
    as_they_are = unrounded(module) if told else {}
    left = _replicate_odd(module, chosen, lies, kept_whole(module) if told else set())
    private.keep_missing_gradients()
    private.name_failures_of_fully_shard(naming)
    for unit in [*chosen, module]:
        full = any(unit is u for u in unrounded_units)
        # The root, too, frees its parameters after the forward: were they still there, `torch.autograd.grad` of them
        # would give this rank's parts without a word. So it is an error ("not used in the graph").
        shard = functools.partial(
            fully_shard,
            unit,
            mesh=lies,
            ignored_params=left,
            reshard_after_forward=True,
            mp_policy=_policy(unit, None if full else told, told),
            offload_policy=_offload_policy(offload, mesh),
        )
        inside = [u for u in [*chosen, module] if u in set(unit.modules())]
        own = _held_by(unit, left)
        decides = _Unit(unit, inside, own, shards, told.params if told else None, _output(unit, module, told))
        private.new_hooks(unit, shard, decides.before, decides.after)
    for owner in module.modules():
        if any(isinstance(p, DTensor) for p in owner.parameters(recurse=False)):
            names = frozenset(as_they_are.get(id(owner), ()))
            reading = Reading(told.params, told.reduce, names) if told else Reading()
            owner.__class__ = reading_plain(type(owner), reading)  # type: ignore[arg-type]
            owner.__dict__[SHARDS] = shards
        if told:
            round_computed(owner, told.params)
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)


def _warn_of_none(mesh: DeviceMesh) -> None:
    warnings.warn(
        explain(
            'parallelize: data="none" does not add up gradients over data.',
            got=f"{axis_size(mesh, 'data')} data ranks",
            needs="whoever calls it to bring their parameters together: each has the gradient of its part of the "
            "batch alone, and after a step its own parameters",
            fix='data="ddp" for copies that stay equal; data="none" with data=1',
        ),
        UserWarning,
        stacklevel=4,
    )


def _offload_policy(offload: object, mesh: DeviceMesh) -> OffloadPolicy:
    if offload not in (None, "cpu"):
        got, needs = f"offload={offload!r}", '"cpu", or None'
        raise SpecError(explain("parallelize: unknown offload.", got=got, needs=needs, fix='offload="cpu"'))
    # On a mesh of CPUs shards lie there anyway; pinned memory is what a copy to a device wants.
    return OffloadPolicy() if offload is None else CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def _unrounded_units(root: nn.Module) -> list[nn.Module]:
    """List the modules that are gathered by themselves since they compute weights from unrounded parameters."""
    found = [m for m in root.modules() if computes_weights(m)]
    alone = {id(m) for m in units(root, lambda m: any(m is n for n in found))} | {id(root)}
    names = {id(m): name for name, m in root.named_modules()}
    shared = [names[id(m)] for m in found if id(m) not in alone]
    if shared:
        raise SpecError(
            explain(
                "precision: a computed weight that two parts of the model share.",
                got=shared[:5],
                needs="spectral norms and parametrizations of their own for each layer: they are gathered unrounded",
                fix="precision=None, or untie them",
            )
        )
    return found


def _policy(unit: nn.Module, told: Precision | None, whole: Precision | None) -> MixedPrecisionPolicy:
    """Tell `fully_shard` the dtypes of a unit; inputs and outputs are cast by `_Unit`, in graphs too."""
    main = _main_dtype([p for p in unit.parameters() if not lies_over_data(p)])  # the others are in a unit already
    if whole is None or main is None or not main.is_floating_point:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    params = None if told is None else told.params
    return MixedPrecisionPolicy(param_dtype=params, reduce_dtype=whole.reduce, cast_forward_inputs=False)


def _output(unit: nn.Module, root: nn.Module, told: Precision | None) -> torch.dtype | None:
    if told is None:
        return None
    if isinstance(unit, parametrize.ParametrizationList):
        return told.params
    return told.output if unit is root else None


def _main_dtype(params: Sequence[nn.Parameter]) -> torch.dtype | None:
    sizes: Counter[torch.dtype] = Counter()
    for p in params:
        if p.dim():
            sizes[p.dtype] += p.numel()
    return max(sizes, key=lambda d: sizes[d], default=None)


def _replicate_odd(
    module: nn.Module, chosen: Sequence[nn.Module], mesh: DeviceMesh, also: set[int]
) -> set[nn.Parameter]:
    """Keep whole on every rank what `fully_shard` refuses: 0-d parameters, and the lesser dtypes of a unit.

    They become replicated DTensors, as the optimizer wants beside sharded ones, and are plain tensors under the mode.
    """
    odd: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    for unit in [*chosen, module]:
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        main = _main_dtype([p for p in own if id(p) not in also])
        odd |= {id(p): p for p in own if not p.dim() or p.dtype != main or id(p) in also}
    twins: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in odd:
                if id(p) not in twins:
                    twins[id(p)] = nn.Parameter(_replicated(p, mesh), requires_grad=p.requires_grad)
                    twins[id(p)].__dict__.update(p.__dict__)
                setattr(owner, name, twins[id(p)])
    return set(twins.values())


def _held_by(unit: nn.Module, left: set[nn.Parameter]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """List where a unit holds the parameters that stay whole."""
    return [
        (owner, name, p)
        for owner in unit.modules()
        for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
        if p in left
    ]


def _replicated(p: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    """Give a parameter, which may be split over `tensor`, copies on all ranks of a mesh."""
    copies = [Replicate()] * mesh.ndim
    if not isinstance(p, DTensor):
        return DTensor.from_local(p.detach(), mesh, copies, run_check=False)
    both, placements = private.concatenate([mesh, p.device_mesh]), [*copies, *p.placements]
    piece = p.to_local().detach()
    return DTensor.from_local(piece, both, placements, run_check=False, shape=p.shape, stride=p.stride())


@dataclass(frozen=True)
class _Unit:
    """Decide for one unit, at each of its forwards, whether the hooks of `fully_shard` run.

    They run outside of the mode: what they ask of parameters, in hundreds of calls, is no affair of rules.
    They stay out of graphs, which gather parameters themselves, and of a forward with other values in the place of
    parameters (`torch.func.functional_call`), which they would throw away.

    Args:
        module: the unit.
        units: it and those within it.
        left: where it holds parameters that `fully_shard` was told to leave.
        shards: what it shares with the other units.
        given: dtype that floating-point inputs are cast to.
        output: dtype that floating-point outputs are cast to.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    left: Sequence[tuple[nn.Module, str, nn.Parameter]]
    shards: Shards
    given: torch.dtype | None
    output: torch.dtype | None

    def before(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that gathers parameters."""

        def outside(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.given is not None:
                args, kwargs = cast(args, self.given), cast(kwargs, self.given)
            if torch.compiler.is_compiling():
                return None if self.given is None else (args, kwargs)
            if self.shards.away in (None, self.module):
                found = [item for unit in self.units for item in private.replaced_parameters(unit)]
                found += private.replaced(self.left)
                self.shards.away, self.shards.replaced = self.module if found else None, found
                for owner, name, value in found:
                    if not isinstance(value, DTensor):
                        private.put_parameter(owner, name, summed_grad(value, self.shards.summed))
            if self.shards.away is not None:
                return args, kwargs
            with rules_alone(), self.shards.in_hook():
                return hook(module, args, kwargs)

        return outside

    def after(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the hook that frees parameters."""

        def outside(module: nn.Module, given: Any, output: Any) -> Any:
            if torch.compiler.is_compiling():  # what a hook gives back costs a graph of its own
                return None if self.output is None else cast(output, self.output)
            if self.shards.away is None:
                with rules_alone(), self.shards.in_hook():
                    output = hook(module, given, kept(output, module))
            elif self.shards.away is self.module:
                for owner, name, value in self.shards.replaced:
                    private.put_parameter(owner, name, value)  # functional_call hands them back to its caller
                self.shards.away, self.shards.replaced = None, []
            return cast(output, self.output)

        return outside
