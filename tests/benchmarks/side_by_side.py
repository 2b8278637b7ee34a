"""Ways to do the same, measured in turn in the same processes, and the lines of a table of their ratios."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

Ways = Mapping[str, Callable[[], Mapping[str, float]]]
"""For each way a function that runs it once and gives the seconds of each of its phases."""

Times = dict[tuple[str, str], list[float]]
"""Way and phase: seconds of each round."""


@dataclass(frozen=True)
class Row:
    """Hold one line of the table: what against what, and the bound that we want the ratio under.

    Args:
        what: what is compared.
        ours: seconds of each round.
        other: likewise, of the rounds beside them.
        bound: what the ratio should be at the most; NaN for a row that says how the machine is.
        limit: likewise, of what does only what has to be done; empty where nothing stands between.
    """

    what: str
    ours: list[float]
    other: list[float]
    bound: float = math.nan
    limit: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Give how many times as long ours takes."""
        return _ratio(self.ours, self.other)

    def __str__(self) -> str:
        told = f"{self.what:<46} {statistics.median(self.ours) * 1e3:>9.2f} {statistics.median(self.other) * 1e3:>9.2f}"
        told += f" {self.ratio:>6.2f} {'' if math.isnan(self.bound) else f'{self.bound:.2f}':>6}"
        return told + (f" {_ratio(self.limit, self.other):>6.2f}" if self.limit else "")


def _ratio(ours: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def alternate(ways: Ways, rounds: int) -> Times:
    """Run the ways in turn, once to warm up and then for some rounds; all ranks begin each of them together."""
    found: Times = {}
    for number in range(rounds + 2):
        for name, run in ways.items():
            gc.collect()
            dist.barrier()
            for phase, seconds in run().items():
                if number >= 2:
                    found.setdefault((name, phase), []).append(seconds)
    return found


def slowest(ranks: list[Times]) -> Times:
    """Give what the slowest rank of each round took."""
    return {key: list(map(max, zip(*(times[key] for times in ranks), strict=True))) for key in ranks[0]}
