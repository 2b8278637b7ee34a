"""The record of what was communicated: entries, the records that are open, and where in the model we are.

Invariant: every byte that meshpar moves between ranks for activations passes through `note`. Bytes are those that
this rank sends. The list of open records and the path of the running module are the only state here; they are kept
for the process, not the thread, because autograd may run the backward in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

KINDS = ("halo", "statistics", "reduction", "redistribute", "gather", "random", "batch", "parameters")
"""halo: rows by `fetch`; statistics: moments of norms; reduction: sums over ranks; redistribute: a change of
placements that a rule asks for; gather: no rule, the input was replicated; random: seeds and generator states;
batch: sizes of the local batches; parameters: those that compiled code gathers, and their gradients."""


@dataclass(frozen=True)
class Entry:
    """Hold one communication of one op on one axis, as this rank saw it.

    Args:
        where: path of the module, "" at the root or outside of a model.
        op: name of the torch function.
        kind: one of `KINDS`.
        axis: mesh axis.
        num_bytes: bytes that this rank sent.
        num_messages: messages that this rank sent; a collective counts as one.
        backward: whether it ran in the backward pass.
        note: why, for a gather.
        num_rows: rows that this rank was sent, for a halo.
    """

    where: str
    op: str
    kind: str
    axis: str
    num_bytes: int
    num_messages: int = 1
    backward: bool = False
    note: str = ""
    num_rows: int = 0


@dataclass(frozen=True)
class Call:
    """Hold one call of a torch function that met activations, forward.

    Args:
        where: path of the module.
        op: name of the torch function.
        status: "rule" or "gather".
        given: shapes and layouts of the activations that it was given.
        made: of those that it gave.
    """

    where: str
    op: str
    status: str
    given: tuple[str, ...]
    made: tuple[str, ...]


@dataclass
class Record:
    """Collect entries while it is open; see `record`.

    Args:
        entries: what was communicated.
        calls: torch functions that met activations, each with "rule" or "gather", and the arguments they were given.
        trace: their calls one by one, in order.
    """

    entries: list[Entry] = field(default_factory=list)
    calls: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    trace: list[Call] = field(default_factory=list)

    def select(self, *, kind: str | None = None, axis: str | None = None, backward: bool | None = None) -> list[Entry]:
        """List the entries of a kind, an axis, a direction."""
        return [
            entry
            for entry in self.entries
            if (kind is None or entry.kind == kind)
            and (axis is None or entry.axis == axis)
            and (backward is None or entry.backward == backward)
        ]

    def gathers(self) -> list[Entry]:
        """List the entries of ops that had no rule."""
        return self.select(kind="gather")

    def num_bytes(self, *, kind: str | None = None, axis: str | None = None, backward: bool | None = None) -> int:
        """Add up the bytes that this rank sent."""
        return sum(e.num_bytes for e in self.select(kind=kind, axis=axis, backward=backward))

    def summary(self) -> str:
        """Give a table: module, op, kind, axis, bytes forward and backward."""
        rows: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for e in self.entries:
            row = rows[(e.where or ".", e.op, e.kind, e.axis)]
            row[1 if e.backward else 0] += e.num_bytes
            row[2] += e.num_messages
        head = ("module", "op", "kind", "axis", "forward B", "backward B", "messages")
        table = [head, *((*key, *map(str, row)) for key, row in rows.items())]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        total = self.num_bytes()
        return "\n".join([*lines, f"{total} bytes sent by this rank, {len(self.gathers())} gathers"])


_OPEN: list[Record] = []
_PATH: list[str] = []


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Record what this rank communicates inside the block, forward and backward.

    Returns:
        The `Record`, which fills while the block runs and stays readable after it.

    Example:
        >>> with record() as log:
        ...     pass
        >>> log.num_bytes()
        0
    """
    log = Record()
    _OPEN.append(log)
    try:
        yield log
    finally:
        _OPEN[:] = [other for other in _OPEN if other is not log]


def is_open() -> bool:
    """Tell whether anybody records."""
    return bool(_OPEN)


def num_gathers() -> int:
    """Count the gathers in the record that was opened first."""
    return len(_OPEN[0].gathers()) if _OPEN else 0


def note_call(op: str, status: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Add a call of a torch function to every open record; of its arguments, those that are no tensors."""
    told = [str(value) for value in args if _is_told(value)]
    told += [f"{name}={value}" for name, value in kwargs.items() if _is_told(value)]
    for log in _OPEN:
        log.calls.setdefault((op, status), set()).add(", ".join(told))


def note_step(op: str, status: str, given: tuple[str, ...], made: tuple[str, ...]) -> None:
    """Add a call, with the layouts of what it was given and gave, to every open record."""
    for log in _OPEN:
        log.trace.append(Call(where(), op, status, given, made))


def _is_told(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_told(item) for item in value)
    return isinstance(value, bool | int | float | complex | str | slice | torch.dtype) and not isinstance(value, Tensor)


def note(
    label: str,
    kind: str,
    axis: str,
    num_bytes: int,
    *,
    num_messages: int = 1,
    backward: bool = False,
    why: str = "",
    num_rows: int = 0,
) -> None:
    """Add an entry to every open record. `label` is what `here` gave in the forward pass.

    Nothing is sent while a compiler traces: what compiled code sends is noted by its ops, when they run.
    """
    if _OPEN and not torch.compiler.is_compiling():
        path, _, op = label.rpartition("|")
        entry = Entry(path, op, kind, axis, num_bytes, num_messages, backward, why, num_rows)
        for log in _OPEN:
            log.entries.append(entry)


def here(op: str) -> str:
    """Give the label of an op that runs now: module path and op name. The backward pass is given it too."""
    return f"{_PATH[-1]}|{op}" if _PATH else f"|{op}"


def is_inside() -> bool:
    """Tell whether the forward of a module runs."""
    return bool(_PATH)


def where() -> str:
    """Give the path of the module that runs now."""
    return _PATH[-1] if _PATH else ""


@contextlib.contextmanager
def inside(path: str) -> Iterator[None]:
    """Name the module that runs inside the block."""
    _PATH.append(path)
    try:
        yield
    finally:
        _PATH.pop()
