"""A step of a model on ranks and on one process, and what is shown of it.

Invariant: both steps begin with the same values, inputs and random state; the ranks' one runs as under torchrun.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.batch import gather, shard
from meshpar.mesh import coordinate
from meshpar.parallelize import parallelize
from meshpar.planning.loss import mean_square
from meshpar.planning.search import short
from meshpar.private import pytree
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.shares import whole_of
from meshpar.showing import Explanation, Picture, show
from meshpar.showing.cells import sizes_of
from meshpar.showing.explain import rows_of
from meshpar.showing.picture import tensor_picture
from meshpar.simulating.pieces import Piece, all_pieces
from meshpar.spec import MeshSpec
from meshpar.tables import aligned, html_table, tell_bytes
from meshpar.testing.equivalence import distance
from meshpar.trees import Layout, map_layouts

MAX_COLUMNS = 8
"""Of how many ranks the table of layers tells each one's bytes; of more, the least and the most."""


@dataclass(frozen=True, eq=False)
class OnRank:
    """Hold what one rank had in a step.

    Args:
        rank: its number.
        place: its coordinates along the axes of more than one rank.
        inputs: what it was given, a `Piece` in the place of each tensor.
        output: the piece of the output.
        parameters: its pieces of the parameters, by name.
        gradients: and of their gradients; those that have none are left out.
        explanation: the table of what each layer did, as `explain` gives it, and the record.
    """

    rank: int
    place: dict[str, int]
    inputs: tuple[Any, ...]
    output: Any
    parameters: dict[str, Piece]
    gradients: dict[str, Piece]
    explanation: Explanation

    @property
    def num_bytes(self) -> int:
        """Give the bytes that it sent for activations, forward and backward."""
        return self.explanation.log.num_bytes()


@dataclass(frozen=True, eq=False)
class Simulation:
    """Hold a step of a model on ranks; `print` it, or show it in a notebook.

    Args:
        spec: the mesh.
        output: what the model gave, gathered: plain tensors of global shape (B, C, H, W).
        loss: the loss, of the whole batch and grid.
        gradients: of the parameters, whole, by name.
        input_gradients: of the inputs that require one, whole; None for the others.
        errors: how far the loss, each output and each gradient is from one process, which ran the same step: the
            largest difference, relative to the largest number (or 1 where that is smaller).
        is_random: whether the step drew random numbers. Dropout draws other ones than one process does.
        ranks: what each rank had.
    """

    spec: MeshSpec
    output: Any
    loss: float
    gradients: dict[str, Tensor]
    input_gradients: tuple[Any, ...]
    errors: dict[str, float]
    is_random: bool
    ranks: tuple[OnRank, ...]

    @property
    def difference(self) -> float:
        """Give the largest of all differences from one process."""
        return max(self.errors.values())

    @property
    def picture(self) -> Picture:
        """Draw which rank holds what of the first output that is shared out."""
        for x in pytree.tree_leaves(self.ranks[0].output):
            if isinstance(x, Piece) and len(x.shape) > 1 and "/" in x.layout:
                axes = tuple(tuple(dim.split("/")[1:]) for dim in x.layout.split(" x "))
                return tensor_picture(sizes_of(self.spec), axes, x.shape, 0)
        return show(self.spec)

    def gathers(self) -> list[str]:
        """List the ops that have no rule, and gather: module and op."""
        rows = self.ranks[0].explanation.rows
        return [f"{row.where or '.'}: {row.op}" for row in rows if row.status == "gather"]

    def rank_table(self) -> list[tuple[str, ...]]:
        """Give the table of the ranks, its head first."""
        found: list[tuple[str, ...]] = [("rank", "at", "output", "has", "parameters", "sent forward", "sent backward")]
        for on in self.ranks:
            first = next((x for x in pytree.tree_leaves(on.output) if isinstance(x, Piece)), None)
            log = on.explanation.log
            found.append(
                (
                    str(on.rank),
                    " ".join(f"{axis}={i}" for axis, i in on.place.items()) or "alone",
                    " x ".join(map(str, first.values.shape)) or "scalar" if first else "",
                    first.lines() if first else "",
                    tell_bytes(sum(_num_bytes(p.values) for p in on.parameters.values())),
                    tell_bytes(log.num_bytes(backward=False)),
                    tell_bytes(log.num_bytes(backward=True)),
                )
            )
        return found

    def layer_table(self) -> list[tuple[str, ...]]:
        """Give the table of the ops that send something, or gather: bytes by rank, forward and backward together."""
        sent: dict[tuple[str, str, str], list[int]] = {}
        for on in self.ranks:
            for row in on.explanation.rows:
                entry = sent.setdefault((row.where or ".", row.op, row.status), [0] * len(self.ranks))
                entry[on.rank] += row.forward_bytes + row.backward_bytes
        many = len(self.ranks) > MAX_COLUMNS
        columns = ["least sent", "most sent"] if many else [f"rank {on.rank}" for on in self.ranks]
        found: list[tuple[str, ...]] = [("module", "op", "by", *columns)]
        for key, by_rank in sent.items():
            if any(by_rank) or key[2] == "gather":
                found.append((*key, *map(tell_bytes, [min(by_rank), max(by_rank)] if many else by_rank)))
        return found

    def verdict(self) -> str:
        """Say how far the step is from one process, and what gathers."""
        dtype = next((x.dtype for x in pytree.tree_leaves(self.output) if _is_real(x)), None)
        name, worst = max(self.errors.items(), key=lambda item: item[1])
        lines = [f"{self.difference:.1e} from one process at the most ({name}; {dtype})"]
        if self.is_random:
            lines.append("the model drew random numbers: dropout draws other ones than one process; eval() compares")
        gathers = self.gathers()
        lines.append(f"{len(gathers)} gathers{': ' if gathers else ''}{', '.join(gathers)}")
        assert worst == self.difference
        return "\n".join(lines)

    def __str__(self) -> str:
        layers = self.layer_table()
        tables = [aligned(self.rank_table()), *([aligned(layers)] if len(layers) > 1 else [])]
        return "\n\n".join([f"a step on {short(self.spec)}", *("\n".join(lines) for lines in tables), self.verdict()])

    def _repr_html_(self) -> str:
        layers = self.layer_table()
        parts = [self.picture.svg(), _table(self.rank_table())]
        if len(layers) > 1:
            parts.append(_table(layers))
        return "".join([*parts, f"<p>{html.escape(self.verdict()).replace(chr(10), '<br>')}</p>"])


def step_on_ranks(
    mesh: DeviceMesh,
    model: nn.Module,
    inputs: Sequence[Any],
    layouts: Sequence[Layout],
    loss: Callable[[Any], Tensor] | None,
    backward: bool,  # noqa: FBT001
    options: Mapping[str, Any],
) -> tuple[OnRank, dict[str, Any]]:
    """Run the step on this rank; give what it had and, on rank 0, the fields of the `Simulation`."""
    torch.manual_seed(0)
    told = {"on_gather": "allow", **options}
    parallel = parallelize(model, mesh, **told)
    placed = tuple(
        map_layouts(x, layout, lambda t, text: shard(t, mesh, text).requires_grad_(t.requires_grad))
        for x, layout in zip(inputs, layouts, strict=True)
    )
    torch.manual_seed(0)
    with record() as log, torch.set_grad_enabled(backward):
        with spmd(on_gather=told["on_gather"], mesh=mesh):
            out = parallel(*placed)
            total = (loss or mean_square)(out)
        if backward and total.requires_grad:
            total.backward()
    parameters = dict(parallel.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    place = {axis: coordinate(mesh, axis) for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1}
    explanation = Explanation(rows_of(log), log)
    held = OnRank(
        dist.get_rank(),
        place,
        all_pieces(placed),
        all_pieces(out),
        all_pieces(parameters),
        all_pieces(gradients),
        explanation,
    )
    found = {
        "output": gather(out),
        "loss": float(gather(total.detach())),
        "gradients": {name: whole_of(g) for name, g in gradients.items()},
        "input_gradients": gather(_gradients(placed)),
    }
    if dist.get_rank() != 0:
        return held, {}
    found = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, found)
    return held, found | _compared(found, model, inputs, loss, backward=backward)


def _compared(
    found: dict[str, Any],
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    *,
    backward: bool,
) -> dict[str, Any]:
    """Run the step on this process alone, and say how far the other one is from it."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.set_grad_enabled(backward):
        out = model(*inputs)
        total = (loss or mean_square)(out)
    if backward and total.requires_grad:
        total.backward()
    pairs = {"loss": (torch.tensor(found["loss"], dtype=torch.float64), total.detach().double())}
    outputs = list(zip(pytree.tree_leaves(found["output"]), pytree.tree_leaves(out), strict=True))
    for i, (x, y) in enumerate(outputs):
        if isinstance(y, Tensor):
            pairs["output" if len(outputs) == 1 else f"output {i}"] = (x, y.detach())
    for name, p in model.named_parameters():
        if p.grad is not None:
            pairs[f"gradient of {name}"] = (found["gradients"].get(name, torch.zeros_like(p.grad)), p.grad)
    for i, (x, y) in enumerate(zip(found["input_gradients"], _gradients(inputs), strict=True)):
        for a, b in zip(pytree.tree_leaves(x), pytree.tree_leaves(y), strict=True):
            if b is not None:
                pairs[f"gradient of input {i}"] = (torch.zeros_like(b) if a is None else a, b)
    errors = {name: _distance(x, y) for name, (x, y) in pairs.items()}
    return {"errors": errors, "is_random": not torch.equal(before, torch.get_rng_state())}


def _distance(found: Any, expected: Tensor) -> float:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return float("inf")
    return distance(found.to(expected.dtype), expected)


def _gradients(trees: Sequence[Any]) -> tuple[Any, ...]:
    """Give the gradients of the tensors of trees, None where there is none."""
    return tuple(pytree.tree_map(lambda x: x.grad if isinstance(x, Tensor) else None, tree) for tree in trees)


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Write a table for a notebook, gathers marked."""
    return html_table(rows, marked=[i for i, row in enumerate(rows[1:]) if "gather" in row])
