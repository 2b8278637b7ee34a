"""`explain`: what each layer of a live model does in a step, as a table.

Invariant: the model is as it was afterwards: gradients, buffers and the state of the generators.
"""

from __future__ import annotations

import html
import importlib.util
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshpar.parallelize import mesh_of
from meshpar.planning.loss import mean_square
from meshpar.record import Record, record
from meshpar.scope import spmd
from meshpar.tables import aligned, tell_bytes

HEAD = ("module", "op", "by", "given", "made", "rows", "forward", "backward")
"""The columns: "rows" are those that this rank is sent, "forward" and "backward" the bytes that it sends."""


@dataclass(frozen=True)
class Row:
    """Hold what one op of one module did in a step, all its calls together.

    Args:
        where: path of the module.
        op: torch function.
        status: "rule", or "gather" for an op without one.
        given: shapes and layouts of what it was given, at its first call.
        made: of what it made.
        num_calls: how often it was called.
        num_rows: rows that this rank was sent for it, forward and backward.
        forward_bytes: bytes that this rank sent in the forward.
        backward_bytes: bytes that it sent in the backward.
    """

    where: str
    op: str
    status: str
    given: tuple[str, ...]
    made: tuple[str, ...]
    num_calls: int
    num_rows: int
    forward_bytes: int
    backward_bytes: int

    def cells(self) -> tuple[str, ...]:
        """Give the texts of the columns of `HEAD`."""
        times = f" ({self.num_calls} times)" if self.num_calls > 1 else ""
        return (
            self.where or ".",
            self.op + times,
            self.status,
            ", ".join(self.given),
            ", ".join(self.made) if self.made != self.given else "the same",
            str(self.num_rows or ""),
            tell_bytes(self.forward_bytes) if self.forward_bytes else "",
            tell_bytes(self.backward_bytes) if self.backward_bytes else "",
        )


@dataclass(frozen=True)
class Explanation:
    """Hold the table of a step; `print` it, or show it in a notebook.

    Args:
        rows: in the order in which the ops ran first; ops that only communicate elsewhere (parameters) at the end.
        log: the record that it was made from.
    """

    rows: tuple[Row, ...]
    log: Record

    def total(self) -> str:
        """Give the line under the table."""
        sent = tell_bytes(self.log.num_bytes())
        return f"{len(self.rows)} ops, {sent} sent by this rank, {len(self.log.gathers())} gathers"

    def __str__(self) -> str:
        """Give the table as text."""
        return "\n".join([*aligned([HEAD, *(row.cells() for row in self.rows)]), self.total()])

    def __rich__(self) -> Any:
        """Give the table for `rich.print`, gathers in red."""
        from rich.table import Table

        table = Table(*HEAD, caption=self.total())
        for row in self.rows:
            table.add_row(*row.cells(), style="red" if row.status == "gather" else None)
        return table

    def _repr_html_(self) -> str:
        """Give the table for a notebook, gathers marked."""
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in HEAD)
        body = "".join(
            f"<tr{_MARK if row.status == 'gather' else ''}>"
            + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row.cells())
            + "</tr>"
            for row in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table><p>{html.escape(self.total())}</p>"

    def show(self) -> None:
        """Print the table, by rich where it is installed."""
        if importlib.util.find_spec("rich") is None:
            print(self)
        else:
            import rich

            rich.print(self)


_MARK = ' style="background:#fdd"'


def explain(
    model: nn.Module, *args: Any, loss: Callable[[Any], Tensor] | None = None, backward: bool = True, **kwargs: Any
) -> Explanation:
    """Run a step of a parallelized model and say what each layer does.

    Args:
        model: of `parallelize`; afterwards its gradients, buffers and the random numbers to come are as before.
        *args: what the model is called with.
        loss: from what it gives to a scalar; by default the mean square of all floating outputs.
        backward: run the backward as well.
        **kwargs: what the model is called with.

    Returns:
        An `Explanation`: module, op, by rule or by gather, layouts given and made (a dim with the axes that shard it
        behind a stroke), rows and bytes, as this rank saw them.

    Communication:
        That of the step.

    Raises:
        SpecError: the model did not come out of `parallelize`, or gives nothing that a loss can be made of.

    Example:
        >>> import meshpar
        >>> from torch import nn
        >>> model = meshpar.parallelize(nn.Conv2d(1, 2, 3, padding=1), "data=1")
        >>> explain(model, torch.zeros(1, 1, 5, 8)).rows[0].made
        ('1 x 2 x 5 x 8',)
    """
    mesh_of(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(devices), record() as log, torch.set_grad_enabled(backward):
            with spmd():
                total = (loss or mean_square)(model(*args, **kwargs))
            if backward and total.requires_grad:
                total.backward()
    finally:
        for p, g in gradients:
            p.grad = g
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)
    return Explanation(rows_of(log), log)


def rows_of(log: Record) -> tuple[Row, ...]:
    """Make the rows of the table of a record."""
    entries: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for e in log.entries:
        key = (e.where, e.op.removeprefix("F."))
        entries[key][0] += e.num_rows
        entries[key][2 if e.backward else 1] += e.num_bytes
    calls: dict[tuple[str, str], list[Any]] = {}
    for call in log.trace:
        calls.setdefault((call.where, call.op.removeprefix("F.")), []).append(call)
    rows = []
    for key, made in calls.items():
        status = "gather" if any(c.status == "gather" for c in made) else "rule"
        first, sums = made[0], entries.pop(key, [0, 0, 0])
        if not first.made and status == "rule" and not any(sums):
            continue  # a shape or a dtype that was asked for
        rows.append(Row(first.where, first.op, status, first.given, first.made, len(made), *sums))
    rows += [Row(where, op, "rule", (), (), 1, *sums) for (where, op), sums in entries.items() if any(sums)]
    return tuple(rows)
