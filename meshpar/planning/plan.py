"""`plan`: what a training step of a model will hold, send and compute on each rank of a mesh that is not there.

Invariant: the step that is planned is the step that runs: the same rewriting, rules and `fully_shard`, on tensors that
have shapes and no values, in one process that takes the place of one rank after the other.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar import private
from meshpar.data import parameter_mesh
from meshpar.errors import GatherWarning, SpecError, explain
from meshpar.mesh import axes_in, make_mesh, space_mesh, summed_mesh
from meshpar.parallelize import parallelize
from meshpar.planning.loss import mean_square
from meshpar.planning.rates import Rates
from meshpar.planning.report import Plan, RankPlan, Transfer
from meshpar.planning.watch import Watch
from meshpar.planning.worlds import being, differing, mesh_sizes, rank_of, resolved
from meshpar.record import Entry, record
from meshpar.scope import spmd
from meshpar.spec import MeshSpec

Shapes = Any
"""What a model is given: a shape, a tensor, a sequence of those (by position) or a mapping (by name)."""


def plan(
    model: nn.Module,
    spec: str | Mapping[str, int] | MeshSpec,
    input_shapes: Shapes,
    *,
    world: int | None = None,
    optimizer: str | Callable[[list[Tensor]], torch.optim.Optimizer] | None = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    rates: Rates | None = None,
    **options: Any,
) -> Plan:
    """Say what a training step will hold, send and compute on each rank of a mesh, without the mesh.

    Args:
        model: any module, also on the meta device; it is not touched, and no values of it are copied.
        spec: mesh, e.g. `"data=128,domain=8"`.
        input_shapes: what one rank gives to the model in a call, as `parallelize` takes it: this data rank's part of
            the batch with all rows, (B/data, C, H, W). A shape, a sequence of shapes by position, or a mapping by name;
            in the place of a shape a tensor (also a meta one) says the dtype, too.
        world: number of ranks, up to 4,096; by default the product of the sizes.
        optimizer: name of a class of `torch.optim`, a function from a list of parameters to an optimizer, or None for
            inference.
        loss: from what the model gives to a scalar; by default the mean square of all floating outputs.
        rates: how fast the machine is, for the estimate of time.
        **options: as of `parallelize`: data, shard_modules, precision, checkpoint, tensor_plan, inputs, ...

    Returns:
        A `Plan`: ranks that differ, with their memory by kind, communication by axis and kind, FLOPs, an estimate of
        time, and the layers that gather. Ranks that differ along `data` alone differ in their parameters alone.

    Communication:
        None.

    Raises:
        SpecError: a mesh, shapes or options that cannot work; a process that has a process group.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
        >>> found = plan(net, "data=2,domain=4", (1, 3, 721, 1440))
        >>> found.world, sorted(found.ranks)
        (8, [0, 2, 3, 4])
    """
    the_spec, num_ranks = resolved(spec, world)
    settings = Settings(optimizer, loss, rates or Rates(), options)
    return plan_at(model, the_spec, num_ranks, differing(the_spec), input_shapes, settings)


@dataclass(frozen=True)
class Settings:
    """Hold what is asked of a plan beside the model, the mesh and the inputs; see `plan`."""

    optimizer: str | Callable[[list[Tensor]], torch.optim.Optimizer] | None
    loss: Callable[[Any], Tensor] | None
    rates: Rates
    options: dict[str, Any]


def plan_at(
    model: nn.Module,
    spec: MeshSpec,
    num_ranks: int,
    places: Sequence[dict[str, int]],
    input_shapes: Shapes,
    settings: Settings,
) -> Plan:
    """Plan for the ranks at some coordinates of a mesh; those not named in a place are 0."""
    given = _arguments(input_shapes)
    ranks: dict[int, RankPlan] = {}
    for where in places:
        rank = rank_of(spec, where)
        with being(rank, num_ranks), warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)  # told in the plan
            mesh = make_mesh(spec, "cpu")
            parallel = parallelize(hollow_twin(model), mesh, **settings.options)
            place = {axis: where.get(axis, 0) for axis, size in mesh_sizes(spec).items() if size > 1}
            if "data" in where and 0 in ranks:
                ranks[rank] = _alike(ranks[0], rank, place, parallel, settings.optimizer)
            else:
                ranks[rank] = _step(rank, place, parallel, mesh, given, settings)
    return Plan(spec, num_ranks, dict(sorted(ranks.items())), settings.rates)


def hollow_twin(model: nn.Module) -> nn.Module:
    """Copy a model without its values: parameters on the meta device, buffers and all else as they are."""
    twins: dict[int, Any] = {}
    for p in model.parameters():
        if type(p) is nn.Parameter:
            twins[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, twins)


def _arguments(shapes: Shapes) -> tuple[list[Tensor], dict[str, Tensor]]:
    if isinstance(shapes, Mapping):
        return [], {name: _hollow(name, shape) for name, shape in shapes.items()}
    if isinstance(shapes, Tensor) or _is_shape(shapes):
        return [_hollow("input", shapes)], {}
    if isinstance(shapes, Sequence) and not isinstance(shapes, str) and not any(isinstance(n, int) for n in shapes):
        return [_hollow(f"input {i}", shape) for i, shape in enumerate(shapes)], {}
    raise _bad_shape(shapes)


def _is_shape(shape: Any) -> bool:
    numbers = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) > 0
    return numbers and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)


def _hollow(name: str, shape: Any) -> Tensor:
    if isinstance(shape, Tensor):
        return torch.empty_like(shape, device="meta")
    if not _is_shape(shape):
        raise _bad_shape(shape, name)
    return torch.empty(tuple(shape), device="meta")


def _bad_shape(shape: Any, name: str = "input_shapes") -> SpecError:
    needs = "a shape, a tensor, a sequence of those, or a mapping from names to those"
    return SpecError(explain(f"plan: {name}.", got=repr(shape)[:200], needs=needs, fix="(1, 70, 721, 1440)"))


def _step(
    rank: int,
    place: dict[str, int],
    model: nn.Module,
    mesh: DeviceMesh,
    given: tuple[list[Tensor], dict[str, Tensor]],
    settings: Settings,
) -> RankPlan:
    """Run a step of one rank on fake tensors, and see what it takes."""
    optimizer, rates = settings.optimizer, settings.rates
    watch = Watch(rates)
    with private.fake_mode(), private.shapes_unseen(), watch:
        with watch.making("parameters"):
            private.fill_hollow(model)
        with watch.making("inputs"):
            args = [torch.empty_like(x, device="cpu") for x in given[0]]
            kwargs = {name: torch.empty_like(x, device="cpu") for name, x in given[1].items()}
        parameters = watch.now["parameters"]
        watch.restart()
        before = watch.held_bytes()
        with record() as log:
            if optimizer is None:
                with torch.no_grad():
                    model(*args, **kwargs)
            else:
                with spmd():
                    total = (settings.loss or mean_square)(model(*args, **kwargs))
                total.backward()
                del total
        gradients = sum(_size(p.grad) for p in model.parameters() if p.grad is not None)
        watch_peak, activations, gathered = watch.peak_bytes, watch.peak["activations"], watch.peak["gathered"]
        flops, moved, compute_s, collectives = watch.flops, watch.moved_bytes, watch.compute_s, watch.collectives.copy()
        state = _optimizer_bytes(_held(model), optimizer)
    transfers = _transfers(mesh, settings.options.get("data", "fsdp"), log.entries, collectives)
    return RankPlan(
        rank=rank,
        place=place,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        activations_bytes=activations,
        gathered_bytes=gathered,
        step_bytes=watch_peak - before,
        peak_bytes=watch_peak + state,
        transfers=transfers,
        entries=tuple(log.entries),
        flops=flops,
        moved_bytes=moved,
        compute_s=compute_s,
        sending_s=sum(rates.sending_s(t.num_bytes, t.num_messages) for t in transfers),
    )


def _held(model: nn.Module) -> list[Tensor]:
    """Give this rank's pieces of the parameters that are trained."""
    with torch.no_grad():
        return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad]


def _size(x: Tensor) -> int:
    piece = x.to_local() if isinstance(x, DTensor) else x
    return piece.numel() * piece.element_size()


def _optimizer_bytes(pieces: list[Tensor], optimizer: Any) -> int:
    """Count what an optimizer keeps, by a step of it on these pieces."""
    if optimizer is None or not pieces:
        return 0
    if isinstance(optimizer, str):  # those of torch keep the same for pieces that are alike
        alike = Counter((p.shape, p.dtype) for p in pieces)
        one = {(p.shape, p.dtype): p for p in pieces}
        return sum(count * _states_bytes([one[key]], optimizer) for key, count in alike.items())
    return _states_bytes(pieces, optimizer)


def _states_bytes(pieces: list[Tensor], optimizer: Any) -> int:
    twins: list[Tensor] = [nn.Parameter(torch.empty_like(p, device="cpu")) for p in pieces]
    for p in twins:
        p.grad = torch.empty_like(p)
    made = _optimizer(optimizer, twins)
    made.step()
    states = [x for state in made.state.values() for x in state.values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in states)


def _optimizer(optimizer: Any, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if not isinstance(optimizer, str):
        made: torch.optim.Optimizer = optimizer(parameters)
        return made
    known = {name.lower(): cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    if optimizer.lower() not in known or optimizer.lower() in ("optimizer", "lbfgs"):
        got, needs = f"optimizer={optimizer!r}", "the name of a class of torch.optim, or a function of the parameters"
        raise SpecError(explain("plan: no such optimizer.", got=got, needs=needs, fix='optimizer="adamw"'))
    return known[optimizer.lower()](parameters, lr=1e-3)  # type: ignore[no-any-return]


def _alike(twin: RankPlan, rank: int, place: dict[str, int], model: nn.Module, optimizer: Any) -> RankPlan:
    """Give the plan of a rank that differs from another in the shares of its parameters alone."""
    with private.fake_mode():
        private.fill_hollow(model)
        parameters = sum(map(_size, [*model.parameters(), *model.buffers()]))
        pieces = _held(model)
        gradients = sum(map(_size, pieces)) if optimizer is not None else 0
        state = _optimizer_bytes(pieces, optimizer)
    return twin.with_shares(rank, place, parameters, gradients, state)


def _transfers(
    mesh: DeviceMesh, data: str, entries: Sequence[Entry], collectives: Counter[tuple[str, str, int]]
) -> list[Transfer]:
    """Add up what this rank sends, by axis and kind."""
    found: dict[tuple[str, str], list[int]] = {}

    def add(name: str, kind: str, num_bytes: int, num_messages: int) -> None:
        row = found.setdefault((" x ".join(axes_in(mesh, name)), kind), [0, 0])
        row[0] += num_bytes
        row[1] += num_messages

    for entry in entries:
        add(entry.axis, entry.kind, entry.num_bytes, entry.num_messages)
    names: dict[str, str] = {}
    for each in (mesh, summed_mesh(mesh), space_mesh(mesh), parameter_mesh(mesh, data)[0]):
        for axis in each.mesh_dim_names or ():
            names.setdefault(str(each.get_group(axis).group_name), axis)
    for (kind, group, whole), count in collectives.items():
        size = private.group_by_name(group).size()
        sent = whole * (size - 1) // size * (2 if kind == "all-reduce" else 1)
        add(names[group], kind, sent * count, count)
    return [Transfer(axis, kind, *row) for (axis, kind), row in found.items()]
