"""`parallelize`: the composition of what the other modules do, each step a function that can be called alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.batch import shard_trees
from meshpar.config import read_config
from meshpar.data import check_options, fully_shard_over
from meshpar.errors import SpecError, explain
from meshpar.initial import make_equal, own_tensors
from meshpar.mesh import make_mesh
from meshpar.precision import Precision
from meshpar.recompute import checkpoint_activations
from meshpar.registry import Policy
from meshpar.rewrite import rewrite, state_of, with_entry
from meshpar.runtime import default_device_type, local_device
from meshpar.spec import MeshSpec
from meshpar.tensor import is_packed_plan, read_split, splits_for, tensor_parallel
from meshpar.trees import Layout


def parallelize(
    model: nn.Module,
    mesh: str | Mapping[str, int] | MeshSpec | DeviceMesh,
    *,
    data: str = "fsdp",
    shard_modules: Any = "auto",
    precision: Precision | str | None = None,
    offload: str | None = None,
    on_gather: str = "warn",
    inputs: Layout = None,
    batch_statistics: str = "global",
    checkpoint: Any = None,
    tensor_plan: str | Mapping[str, str] | None = None,
    check_inputs: bool = False,
) -> nn.Module:
    """Make a model run on a mesh: the same function, the same parameter names, its activations and weights sharded.

    Args:
        model: any module; it is not touched. Its values on rank 0 become those of all ranks.
        mesh: `"data=2,domain=4"`, a mapping, a `MeshSpec` or a `DeviceMesh` of `make_mesh`.
        data: how parameters lie over data x domain. "fsdp" shards them, "ddp" keeps a copy on every rank, "hsdp" keeps
            as many copies as the mesh has replicas (`"replica=2,data=4"`) and shards each; "none" keeps copies whose
            gradients are not added up over data.
        shard_modules: which modules are gathered as one; see `meshpar.units.units`.
        precision: dtypes of the forward: "bf16", "fp16" or a `Precision`; None for those of the model.
        offload: "cpu" to keep parameters, their gradients and what the optimizer holds in the memory of the host.
        on_gather: "warn" once per call site about an op that has no rule, "error", or "allow".
        inputs: layouts of the inputs of `forward`: one string for all tensors, a sequence by position, or a mapping
            by name; `default_layout` for those not named.
        checkpoint: which modules keep their inputs alone and run again in the backward: "blocks", "all", a class, a
            list of classes or a predicate; see `meshpar.chosen.modules_to_checkpoint`.
        batch_statistics: "global", or "data-local" for batch norms that keep to their data rank.
        tensor_plan: from globs of module names to how their weights are split over `tensor` (see
            `meshpar.tensor.STYLES`); "auto" finds MLPs and attention (`auto_plan`). Any plan gives the same numbers.
        check_inputs: check at each call that ranks of one data coordinate give the same, see `check_same_samples`.

    Returns:
        A module of the same structure. Plain tensors given to it are this data rank's part of the batch with all
        rows, local shape (B/data, C, H, W), and are cut here; DTensors pass. Its outputs are DTensors of global shape.

    Communication:
        Here: the initial values. In a step: what the rules say, and `fully_shard` over data x domain.

    Raises:
        SpecError: a mesh, layout or option that cannot work; on all ranks, before any communication.

    Example:
        >>> import torch
        >>> model = parallelize(nn.Conv2d(1, 1, 3, padding=1), "data=1")
        >>> model(torch.zeros(1, 1, 5, 8)).shape
        torch.Size([1, 1, 5, 8])
    """
    _check(model)
    the_mesh = make_mesh(mesh)
    check_options(model, the_mesh, shard_modules, data=data, precision=precision, offload=offload)
    splits = splits_for(model, tensor_plan, the_mesh)
    policy = Policy(
        on_gather=on_gather, mesh=the_mesh, batch_statistics=batch_statistics, packed=is_packed_plan(splits)
    )
    entry = _entry(model, the_mesh, inputs, check_inputs=check_inputs)
    parallel = rewrite(model, policy=policy)
    checkpoint_activations(parallel, checkpoint)
    own_tensors(parallel)
    make_equal(parallel, the_mesh)
    tensor_parallel(parallel, the_mesh, splits)
    with_entry(parallel, entry, policy)
    fully_shard_over(parallel, the_mesh, shard_modules, data=data, precision=precision, offload=offload)
    read_split(parallel, the_mesh, splits)
    return parallel


def parallelize_from_config(
    conf: Mapping[str, Any], model: nn.Module, device: torch.device | str | None = None, **options: Any
) -> nn.Module:
    """Make a model run on the mesh that a trainer's configuration asks for.

    Args:
        conf: `trainer: {parallelism: {data: fsdp2, tensor: 1, domain: 4}}`, or the older `trainer: {mode: fsdp}`; see
            `meshpar.config.read_config`.
        model: any module; it is moved to the device, and not touched otherwise.
        device: device of this rank; by default CUDA where there is one, else the CPU.
        **options: further options of `parallelize`.

    Returns:
        What `parallelize` gives.

    Communication:
        That of `parallelize`.

    Raises:
        SpecError: a configuration that cannot be used, or does not fit the number of ranks; on all ranks, before any
            communication.

    Example:
        >>> import torch
        >>> model = parallelize_from_config({"trainer": {"parallelism": {"data": "fsdp2"}}}, nn.Conv2d(1, 1, 3))
        >>> model(torch.zeros(1, 1, 5, 8)).shape
        torch.Size([1, 1, 3, 6])
    """
    twice = sorted({"mesh", "data"} & set(options))
    if twice:
        needs, fix = "the mesh and the data mode from the configuration", "drop them, or call parallelize"
        raise SpecError(explain("parallelize_from_config: said twice.", got=twice, needs=needs, fix=fix))
    choice = read_config(conf)
    place = local_device(default_device_type()) if device is None else torch.device(device)
    _check(model)
    mesh = make_mesh(MeshSpec.from_config(conf), place.type)
    return parallelize(model.to(place), mesh, data=choice.data, **options)


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        text = explain(
            "parallelize: not a module.",
            got=f"a {type(model).__name__}",
            needs="a torch.nn.Module",
            fix="give the model itself",
        )
        raise SpecError(text)
    state = state_of(model)
    if state is not None:
        text = explain(
            "parallelize: this model is parallel already.",
            got="the result of rewrite or parallelize",
            needs="the model as one process would run it",
            fix="keep the original, which parallelize does not touch",
        )
        raise SpecError(text)


def _check_inputs(inputs: object) -> None:
    if inputs is not None and not isinstance(inputs, str | Mapping | Sequence):
        text = explain(
            "parallelize: inputs cannot be used.",
            got=f"a {type(inputs).__name__}",
            needs="a layout string, a sequence of them, or a mapping by argument name",
            fix='e.g. "data _ domain _"',
        )
        raise SpecError(text)


def _entry(model: nn.Module, mesh: DeviceMesh, inputs: Layout, *, check_inputs: bool) -> Callable[..., Any]:
    """Make the function that turns the arguments of a call into activations."""
    _check_inputs(inputs)
    signature = inspect.signature(model.forward)
    names = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if isinstance(inputs, Mapping):
        unknown = sorted(set(inputs) - set(names))
        if unknown and not any_name:
            text = explain(
                "parallelize: inputs names nothing.",
                got=f"inputs for {unknown}",
                needs=f"names of arguments of forward: {names}",
                fix="drop or rename them",
            )
            raise SpecError(text)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        many = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        if len(inputs) > len(names) and not many:
            text = explain(
                "parallelize: more inputs than arguments.",
                got=f"{len(inputs)} layouts",
                needs=f"at most {len(names)}, for {names}",
                fix="drop the last ones",
            )
            raise SpecError(text)

    def layout_of(position: int | None, name: str | None) -> Layout:
        if isinstance(inputs, Mapping):
            return inputs.get(name) if name is not None else None
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            if position is None and name in names:
                position = names.index(name)
            return inputs[position] if position is not None and position < len(inputs) else None
        return inputs

    def entry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        called = [names[i] if i < len(names) else None for i in range(len(args))]
        trees = [(name or f"argument {i}", args[i], layout_of(i, name)) for i, name in enumerate(called)]
        trees += [(name, value, layout_of(None, name)) for name, value in kwargs.items()]
        placed = shard_trees(trees, mesh, check=check_inputs)
        return tuple(placed[: len(args)]), dict(zip(kwargs, placed[len(args) :], strict=True))

    return entry


def mesh_of(model: nn.Module) -> DeviceMesh:
    """Give the mesh of a parallelized model.

    Raises:
        SpecError: the model did not come out of `parallelize`.
    """
    state = state_of(model) if isinstance(model, nn.Module) else None
    if state is None or state.policy.mesh is None:
        raise SpecError(
            explain("mesh_of: no mesh.", got=type(model).__name__, needs="a model of parallelize", fix="parallelize it")
        )
    return state.policy.mesh
