"""What a plan holds, and how it is told: in a terminal, and in a notebook.

Invariant: values; bytes are exact counts of what is sent and held, seconds are estimates and say so.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshpar.planning.rates import Rates
from meshpar.record import Entry
from meshpar.spec import MeshSpec
from meshpar.tables import aligned, html_table, parse_bytes, tell_bytes


@dataclass(frozen=True)
class Transfer:
    """Hold what a rank sends in a step on one axis for one purpose.

    Args:
        axis: mesh axis; several for parameters, which lie over data x domain.
        kind: "halo", "statistics", ... as in `meshpar.Record`; "all-gather" of parameters, "reduce-scatter" or
            "all-reduce" of their gradients.
        num_bytes: bytes that the rank sends.
        num_messages: messages that it sends; a collective counts as one.
    """

    axis: str
    kind: str
    num_bytes: int
    num_messages: int


@dataclass(frozen=True)
class RankPlan:
    """Hold what a training step takes on one rank.

    Args:
        rank: global rank.
        place: its coordinates along the axes of more than one rank.
        parameters_bytes: its shares of the parameters, and the buffers.
        gradients_bytes: gradients of those shares.
        optimizer_bytes: what the optimizer keeps.
        activations_bytes: the most at any time of what the forward keeps, gradients of activations and temporary
            buffers.
        gathered_bytes: the most at any time of whole parameters and the messages of `fully_shard`.
        step_bytes: the peak of a step above what is held before it (parameters, inputs).
        peak_bytes: the peak of everything, from the second step on.
        transfers: what it sends, by axis and kind.
        entries: what it sends for activations, op by op.
        flops: floating point operations of matrix products, convolutions and attention, forward and backward.
        moved_bytes: what all ops read and write.
        compute_s: an estimate: each op takes the longer of its arithmetic and its reads and writes.
        sending_s: an estimate: messages one after the other, none behind computation.
    """

    rank: int
    place: dict[str, int]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    gathered_bytes: int
    step_bytes: int
    peak_bytes: int
    transfers: list[Transfer]
    entries: tuple[Entry, ...]
    flops: int
    moved_bytes: int
    compute_s: float
    sending_s: float

    def with_shares(
        self, rank: int, place: dict[str, int], parameters_bytes: int, gradients_bytes: int, optimizer_bytes: int
    ) -> RankPlan:
        """Give the plan of a rank that differs in its shares of the parameters alone."""
        more = parameters_bytes - self.parameters_bytes + optimizer_bytes - self.optimizer_bytes
        more += gradients_bytes - self.gradients_bytes
        return replace(
            self,
            rank=rank,
            place=place,
            parameters_bytes=parameters_bytes,
            gradients_bytes=gradients_bytes,
            optimizer_bytes=optimizer_bytes,
            peak_bytes=self.peak_bytes + more,
        )


@dataclass(frozen=True)
class Plan:
    """Hold the plan of a training step; `print` it, or show it in a notebook.

    Args:
        spec: the mesh, all sizes resolved.
        world: number of ranks.
        ranks: the ranks that differ: first, middle and last along each axis.
        rates: what the estimates of time stand on.
    """

    spec: MeshSpec
    world: int
    ranks: dict[int, RankPlan]
    rates: Rates

    @property
    def peak_bytes(self) -> int:
        """Give the peak memory of the rank that needs the most."""
        return max(r.peak_bytes for r in self.ranks.values())

    @property
    def step_s(self) -> float:
        """Estimate the seconds of a step of the slowest rank: its computation, then its messages."""
        return max(r.compute_s + r.sending_s for r in self.ranks.values())

    def num_bytes(self, *, kind: str | None = None, axis: str | None = None) -> int:
        """Give the bytes that the rank that sends the most sends in a step, of a kind, on an axis."""
        return max(
            sum(t.num_bytes for t in r.transfers if kind in (None, t.kind) and axis in (None, t.axis))
            for r in self.ranks.values()
        )

    def gathers(self) -> list[Entry]:
        """List the ops that have no rule for this model on this mesh, and gather."""
        seen = {(e.where, e.op, e.note): e for r in self.ranks.values() for e in r.entries if e.kind == "gather"}
        return list(seen.values())

    def fits(self, memory: str | int) -> bool:
        """Tell whether every rank has enough memory, e.g. "80GB" or "80GiB" or bytes."""
        return self.peak_bytes <= parse_bytes(memory)

    def tables(self) -> list[tuple[str, list[Sequence[str]]]]:
        """Give the titles and rows, the head first, of what is shown."""
        rows: list[Sequence[str]] = [
            ("rank", "at", "parameters", "gradients", "optimizer", "activations", "gathered", "peak", "TFLOP", "sent")
        ]
        rows += [
            (
                str(r.rank),
                " ".join(f"{axis}={i}" for axis, i in r.place.items()) or "alone",
                *map(
                    tell_bytes,
                    (
                        r.parameters_bytes,
                        r.gradients_bytes,
                        r.optimizer_bytes,
                        r.activations_bytes,
                        r.gathered_bytes,
                        r.peak_bytes,
                    ),
                ),
                f"{r.flops / 1e12:.3g}",
                tell_bytes(sum(t.num_bytes for t in r.transfers)),
            )
            for r in self.ranks.values()
        ]
        keys = dict.fromkeys((t.axis, t.kind) for r in self.ranks.values() for t in r.transfers)
        sent: list[Sequence[str]] = [("axis", "kind", "bytes a step", "messages")]
        for axis, kind in keys:
            found = [t for r in self.ranks.values() for t in r.transfers if (t.axis, t.kind) == (axis, kind)]
            most = max(found, key=lambda t: (t.num_bytes, t.num_messages))
            sent.append((axis, kind, tell_bytes(most.num_bytes), str(most.num_messages)))
        return [("memory of the ranks that differ", rows), ("sent by the rank that sends the most", sent)]

    def notes(self) -> list[str]:
        """Give the lines that follow the tables."""
        slowest = max(self.ranks.values(), key=lambda r: r.compute_s + r.sending_s)
        told = (
            f"estimate of a step: {self.step_s * 1e3:.3g} ms, of which {slowest.sending_s * 1e3:.3g} ms messages, at "
            f"{self.rates.flops_per_s / 1e12:g} TFLOP/s, {self.rates.memory_bytes_per_s / 1e9:g} GB/s of memory, "
            f"{self.rates.link_bytes_per_s / 1e9:g} GB/s and {self.rates.latency_s * 1e6:g} microseconds a link"
        )
        gathers = [f"gathers: {e.where or 'root'}: {e.op} on {e.axis} {e.note}".rstrip() for e in self.gathers()]
        return [told, *(gathers or ["no layer gathers"])]

    def __str__(self) -> str:
        """Give the tables as text."""
        lines = [f"{self.spec} on {self.world} ranks"]
        for title, rows in self.tables():
            lines += ["", title, *aligned(rows)]
        return "\n".join([*lines, "", *self.notes()])

    def _repr_html_(self) -> str:
        """Give the tables for a notebook."""
        parts = [f"<b>{html.escape(str(self.spec))} on {self.world} ranks</b>"]
        parts += [html_table(rows, caption=title) for title, rows in self.tables()]
        return "".join([*parts, *(f"<p>{html.escape(note)}</p>" for note in self.notes())])
