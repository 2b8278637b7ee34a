"""`assert_equivalent`: a whole model against one process, for the tests of this library and of its users."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshpar.batch import Layout, map_layouts, shard
from meshpar.initial import own_tensors
from meshpar.parallelize import parallelize
from meshpar.private import pytree
from meshpar.record import record
from meshpar.registry import Policy
from meshpar.rewrite import rewrite
from meshpar.testing.equivalence import (
    Difference,
    Report,
    check_close,
    compare_gradients,
    compare_trees,
    send_back,
    sum_parts,
)
from meshpar.testing.meshes import mesh_for, ranks_of
from meshpar.testing.pool import run_ranks

Model = nn.Module | Callable[[], nn.Module]


def assert_equivalent(
    model: Model,
    inputs: Sequence[Any],
    mesh: str | DeviceMesh,
    *,
    layouts: Sequence[Layout] | None = None,
    tolerance: float = 1e-9,
    gathers: bool = False,
    dtype: torch.dtype = torch.float64,
    shard_parameters: bool = True,
    options: Mapping[str, Any] | None = None,
    compiled: str | None = None,
) -> Report:
    """Check that a parallelized model is the same function as the model, with the same gradients.

    Called from an ordinary process, it starts ranks of its own (`run_ranks`); called on the ranks of a job, it must
    be called on all of them.

    Args:
        model: the model, or a function that makes it (where it cannot be pickled or copied); converted to `dtype`.
        inputs: arguments of the forward: global tensors, trees of them, or anything else.
        mesh: mesh spec, e.g. "data=2,domain=2".
        layouts: layout of each argument; default layouts where None.
        tolerance: largest difference, relative to the largest number of what is compared.
        gathers: whether ops may gather.
        dtype: floating-point type of the comparison.
        shard_parameters: whether `fully_shard` takes part; without it the model is only rewritten, which is quicker
            and enough for a single layer.
        options: further options for `parallelize`.
        compiled: a backend of `torch.compile`; the model then runs as one graph. Graphs made before are forgotten.

    Returns:
        The errors found, by name, and the record of the step.

    Raises:
        Difference: outputs, gradients of inputs or parameters, buffers, or state-dict keys that are not those of
            one process; a model that was touched; a gather.
    """
    told = dict(options or {})
    job = (model, list(inputs), mesh, layouts, tolerance, gathers, dtype, shard_parameters, told, compiled)
    if isinstance(mesh, DeviceMesh) or dist.is_initialized():
        return _compare(*job)
    reports = run_ranks(_compare, ranks_of(mesh), *job, timeout_s=60.0 if compiled is None else 600.0)
    report: Report = reports[0]
    return report


def _compare(
    model: Model,
    inputs: list[Any],
    mesh: str | DeviceMesh,
    layouts: Sequence[Layout] | None,
    tolerance: float,
    gathers: bool,  # noqa: FBT001
    dtype: torch.dtype,
    shard_parameters: bool,  # noqa: FBT001
    options: dict[str, Any],
    compiled: str | None,
) -> Report:
    the_mesh = mesh if isinstance(mesh, DeviceMesh) else mesh_for(mesh)
    given = _fresh(model, dtype)
    reference = copy.deepcopy(given) if isinstance(model, nn.Module) else _fresh(model, dtype)
    _same_values(given, reference)
    before = {name: value.detach().clone() for name, value in _tensors(given).items()}
    told = {"on_gather": "allow" if gathers else "error", **options}
    if shard_parameters:
        parallel = parallelize(given, the_mesh, **told)
    else:
        parallel = rewrite(given, policy=Policy(mesh=the_mesh, **told))
        own_tensors(parallel)
    if compiled is not None:
        torch.compiler.reset()
        parallel.compile(fullgraph=True, backend=compiled)
    texts = list(layouts) if layouts is not None else [None] * len(inputs)

    plain_in = pytree.tree_map(lambda x: _leaf(x, dtype), inputs)
    mesh_in = [
        map_layouts(x, text, lambda t, layout: shard(t, the_mesh, layout).requires_grad_(t.requires_grad))
        for x, text in zip(plain_in, texts, strict=True)
    ]
    expected = reference(*plain_in)
    with record() as log:
        found = parallel(*mesh_in)
        errors = compare_trees("output", found, expected, tolerance)
        send_back(expected)
        send_back(found)
    if not shard_parameters:
        for p in parallel.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                sum_parts(p.grad, the_mesh)
    pairs = zip(pytree.tree_leaves(mesh_in), pytree.tree_leaves(plain_in), strict=True)
    for i, (x, ref) in enumerate(pairs):
        errors.update(compare_gradients(f"gradient of input {i}", x, ref, tolerance))
    errors.update(_compare_parameters(parallel, reference, tolerance))
    errors.update(_compare_states(parallel, reference, tolerance))
    for name, value in _tensors(given).items():
        if not torch.equal(value, before[name]):
            text = f"{name}: the model given to parallelize was changed"
            raise Difference(text)
    return Report(errors, log)


def _converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert floating-point tensors, and complex ones to the complex type of that width (`Module.to` drops parts)."""

    def convert(x: Tensor) -> Tensor:
        return x.to(dtype.to_complex()) if x.is_complex() else x.to(dtype) if x.is_floating_point() else x

    model._apply(convert)
    return model


def _fresh(model: Model, dtype: torch.dtype) -> nn.Module:
    if isinstance(model, nn.Module):
        return _converted(copy.deepcopy(model), dtype)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _converted(model(), dtype)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Give the tensors of a state dict: what else a model puts there is compared by its key alone."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _same_values(a: nn.Module, b: nn.Module) -> None:
    wrong = [n for (n, x), y in zip(_tensors(a).items(), _tensors(b).values(), strict=True) if not torch.equal(x, y)]
    if wrong:
        text = f"the factory makes other values at its second call: {wrong[:3]}; seed it, or give the model itself"
        raise Difference(text)


def _leaf(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        return x.detach().to(dtype, copy=True).requires_grad_()
    return x.detach().clone()


def _compare_parameters(parallel: nn.Module, reference: nn.Module, tolerance: float) -> dict[str, float]:
    errors: dict[str, float] = {}
    ours, theirs = dict(parallel.named_parameters()), dict(reference.named_parameters())
    if list(ours) != list(theirs):
        text = f"parameter names {sorted(set(ours) ^ set(theirs))} differ"
        raise Difference(text)
    for name, ref in theirs.items():
        grad = ours[name].grad
        if ref.grad is None:
            if grad is not None and float(_full(grad).abs().sum()) != 0:
                text = f"gradient of {name}: one process has none"
                raise Difference(text)
            continue
        total = torch.zeros_like(ref) if grad is None else _full(grad)
        label = f"gradient of {name}"
        errors[label] = check_close(label, total, ref.grad, tolerance)
    return errors


def _compare_states(parallel: nn.Module, reference: nn.Module, tolerance: float) -> dict[str, float]:
    ours, theirs = parallel.state_dict(), reference.state_dict()
    if list(ours) != list(theirs):
        text = f"state-dict keys {sorted(set(ours) ^ set(theirs))} differ, or their order"
        raise Difference(text)
    return {
        f"state {name}": check_close(f"state {name}", _full(ours[name]).detach(), value.detach(), tolerance)
        for name, value in theirs.items()
        if isinstance(value, Tensor)
    }


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
