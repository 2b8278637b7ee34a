"""`get_tensors_parallel` against one memcpy and `gather_object`: `python tests/benchmarks/share.py`.

4 ranks hold 256 MiB each. In every round each way runs once, one after the other, between barriers, timed on the first
rank: from the call until it has the tensors, and until it has read every byte of them as well. The copies are of as
many bytes as all tensors have, in one process, into memory that is new (as a gather's is) or was written before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import meshpar
from meshpar.testing import run_ranks

NUM_RANKS = 4
GOAL = 0.7


def read_all(tensors: list[Tensor]) -> float:
    """Read every byte."""
    return sum(float(x.sum()) for x in tensors)


def measure(num_bytes: int, num_rounds: int) -> dict[str, list[float]]:
    """Give the seconds of every way and round, as the first rank saw them."""
    ranks, rank = list(range(NUM_RANKS)), dist.get_rank()
    mine = torch.full((num_bytes // 4,), float(rank + 1))
    everything = torch.ones(NUM_RANKS * num_bytes // 4) if rank == 0 else mine[:0]
    room = torch.ones_like(everything)
    expected = sum(range(1, NUM_RANKS + 1)) * (num_bytes // 4)

    def copy_new() -> None:
        everything.clone()

    def copy_old() -> None:
        room.copy_(everything)

    def share() -> None:
        with meshpar.get_tensors_parallel(mine, ranks):
            pass

    def share_and_read() -> None:
        with meshpar.get_tensors_parallel(mine, ranks) as got:
            assert rank or read_all(got) == expected

    def gather() -> None:
        got = [None] * NUM_RANKS if rank == 0 else None
        dist.gather_object(mine, got)

    ways: dict[str, Callable[[], None]] = {
        "memcpy, new memory": copy_new,
        "memcpy, old memory": copy_old,
        "get_tensors_parallel": share,
        "... and read it all": share_and_read,
        "gather_object": gather,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(num_rounds + 1):  # the first one makes groups and warms up
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Print the table and give the median seconds of every way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    seconds = run_ranks(measure, NUM_RANKS, args.mib << 20, args.rounds, timeout_s=600)[0]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    new, old, gather = (medians[name] for name in ("memcpy, new memory", "memcpy, old memory", "gather_object"))
    print(f"{NUM_RANKS} x {args.mib} MiB, medians of {args.rounds} rounds; goal {GOAL} of the speed of one memcpy")
    print(
        f"{'way':<22} {'median s':>9} {'best s':>8} {'x memcpy new':>13} {'x memcpy old':>13} {'x gather_object':>16}"
    )
    for name, s in medians.items():
        best = min(seconds[name])
        print(f"{name:<22} {s:>9.3f} {best:>8.3f} {new / s:>13.2f} {old / s:>13.2f} {gather / s:>16.2f}")
    return medians


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import share  # the ranks import it by this name

    share.main()
