"""`simulate`: a model, or any function, on the ranks of a mesh, from one cell of a notebook.

Invariant: the model and the tensors that are given are not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from torch import Tensor, nn

from meshpar.errors import SpecError, explain
from meshpar.parallelize import parallelize
from meshpar.private import pytree
from meshpar.simulating.ranks import Ranks, ranks_for
from meshpar.simulating.step import Simulation, step_on_ranks
from meshpar.spec import MeshSpec
from meshpar.trees import Layout

Spec = str | Mapping[str, int] | MeshSpec


@overload
def simulate(spec: Spec, *, timeout_s: float = ...) -> Ranks: ...


@overload
def simulate(
    spec: Spec,
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = ...,
    layouts: Sequence[Layout] | None = ...,
    backward: bool = ...,
    timeout_s: float = ...,
    **options: Any,
) -> Simulation: ...


def simulate(
    spec: Spec,
    model: nn.Module | None = None,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    layouts: Sequence[Layout] | None = None,
    backward: bool = True,
    timeout_s: float = 120.0,
    **options: Any,
) -> Ranks | Simulation:
    """Run a step of a model on the ranks of a mesh and on one process; or, without a model, give the ranks.

    The ranks are processes of this machine, on the CPU, one thread each; they are kept for the next call. This process
    gets no process group. What a notebook defines can be used on them with cloudpickle (the extra `notebook`). Modules
    are imported once by a rank: after a change to a file, `simulate(spec).close()`.

    Args:
        spec: mesh of at most 16 ranks; a size that is not said is 1: `"domain=4"`, `"data=2,domain=2"`.
        model: any module on the CPU; it is copied, and keeps its values, gradients and buffers.
        *inputs: what the model is called with: tensors of global shape (B, C, H, W), trees of them, or anything else.
        loss: from what the model gives to a scalar; by default the mean square of all floating outputs. A plain tensor
            in it (a target) has global shape.
        layouts: layout of each input; default layouts where None.
        backward: run the backward, too.
        timeout_s: the most seconds that a call may take.
        **options: as of `parallelize`: data, precision, tensor_plan, checkpoint, ...; `on_gather` is "allow" here.

    Returns:
        A `Simulation`: the output and gradients, gathered; how far they are from one process; for each rank its pieces
        and what it sent by layer. Without a model `Ranks`, whose `run(function, *args)` runs any function on all ranks.

    Communication:
        Among the ranks, that of the step.

    Raises:
        SpecError: a mesh, model, input or option that cannot work; something that cannot be sent; too little memory.
        RankError: a rank raised, died or did not answer in time; it says which one, with its traceback.

    Example:
        >>> import torch
        >>> net = nn.Conv2d(1, 2, 3, padding=1).double()
        >>> run = simulate("domain=2", net, torch.ones(1, 1, 5, 8).double())
        >>> run.ranks[1].output
        Piece(rank 1: rows 3 to 4 of 1 x 2 x 5/domain x 8, torch.float64)
        >>> run.difference < 1e-12
        True
    """
    ranks = ranks_for(spec, timeout_s)
    if model is None:
        said = {"loss": loss, "layouts": layouts, **options}
        needless = [name for name, value in said.items() if value is not None]
        if inputs or needless:
            needs, fix = "a model that they are for", "simulate(spec, model, x), or simulate(spec).run(function, x)"
            got = [*([f"{len(inputs)} inputs"] if inputs else []), *needless]
            raise SpecError(explain("simulate: no model.", got=got, needs=needs, fix=fix))
        return ranks
    _check(model, inputs, layouts, options)
    texts = list(layouts) if layouts is not None else [None] * len(inputs)
    answers = ranks.run(
        step_on_ranks, model=model, inputs=list(inputs), layouts=texts, loss=loss, backward=backward, options=options
    )
    return Simulation(spec=ranks.spec, ranks=tuple(held for held, _ in answers), **answers[0][1])


def _check(model: Any, inputs: Sequence[Any], layouts: Any, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be simulated, before any rank hears of it.

    Raises:
        SpecError: all that is wrong.
    """
    if not isinstance(model, nn.Module):
        got, needs = f"a {type(model).__name__}", "a torch.nn.Module"
        fix = "simulate(spec).run(function, *args) for functions"
        raise SpecError(explain("simulate: not a model.", got=got, needs=needs, fix=fix))
    known = {p.name for p in inspect.signature(parallelize).parameters.values() if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(options) - known)
    if unknown:
        needs, fix = f"of parallelize: {', '.join(sorted(known))}", "the arguments of the model stand behind it"
        raise SpecError(explain("simulate: unknown options.", got=unknown, needs=needs, fix=fix))
    if layouts is not None and (isinstance(layouts, str) or len(layouts) != len(inputs)):
        got = repr(layouts) if isinstance(layouts, str) else f"{len(layouts)} layouts"
        needs, fix = f"a sequence of {len(inputs)}, one for each input", 'layouts=["data _ domain _"]'
        raise SpecError(explain("simulate: layouts that do not fit.", got=got, needs=needs, fix=fix))
    tensors: dict[str, Any] = {f"parameter {name}": p for name, p in model.named_parameters()}
    tensors |= {f"buffer {name}": b for name, b in model.named_buffers()}
    tensors |= {f"input {i}": x for i, tree in enumerate(inputs) for x in pytree.tree_leaves(tree)}
    away = [f"{name} on {x.device}" for name, x in tensors.items() if isinstance(x, Tensor) and x.device.type != "cpu"]
    if away:
        needs, fix = "a model and inputs on the CPU, where the ranks are", "model.cpu(), x.cpu(); meshpar.plan for meta"
        raise SpecError(explain("simulate: not on the CPU.", got=away[:5], needs=needs, fix=fix))
