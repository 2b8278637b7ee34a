"""What is planned for a rank is what it does: the same entries and collectives, its peak memory within a tenth."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshpar
from meshpar.planning import plan
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("benchmarks", "networks")]


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    import conv_nets
    import transformers_nets

    return {
        "U-Net 2-D": (functools.partial(conv_nets.UNet, 2, 8, 3), (2, 2, 192, 96)),
        "U-Net 3-D": (functools.partial(conv_nets.UNet, 3, 8, 2), (2, 2, 24, 48, 24)),
        "ConvNeXt": (conv_nets.ConvNeXt, (2, 3, 512, 256)),
        "VAE": (functools.partial(conv_nets.VAEDecoder, 8), (2, 3, 32, 16)),
        "Swin": (functools.partial(transformers_nets.Swin, 32, 8), (2, 2, 128, 128)),
    }


MESHES = ("data=1,domain=2", "data=1,domain=4", "data=2,domain=2")


class Collectives(TorchDispatchMode):
    """Count the collectives of torch's own, which `fully_shard` makes, with their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = args[0] if "allgather" in name else args[1]
            self.seen[name, whole.numel() * whole.element_size()] += 1
        return func(*args, **(kwargs or {}))


def step_of(model: nn.Module, x: torch.Tensor) -> None:
    with meshpar.spmd():
        loss = model(x).square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)


def measured(name: str, spec: str) -> tuple[Counter[Any], Counter[Any], int]:
    make, shape = networks()[name]
    model, x = meshpar.parallelize(make(), mesh_for(spec)), torch.randn(shape)
    import memory

    peak = memory.peak_of(lambda: step_of(model, x))
    with meshpar.record() as log, Collectives() as collectives:
        step_of(model, x)
    return told(log.entries), collectives.seen, peak


def told(entries: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for e in entries:
        found[e.where, e.op, e.kind, e.axis, e.backward, e.num_messages] += e.num_bytes
    return found


@pytest.mark.parametrize("spec", MESHES)
@pytest.mark.parametrize("name", list(networks()))
def test_bytes_are_exact_and_the_peak_is_within_a_tenth(name, spec):
    make, shape = networks()[name]
    found = plan(make(), spec, shape)
    real = run_ranks(measured, ranks_of(spec), name, spec, timeout_s=120)
    for rank, expected in found.ranks.items():
        entries, collectives, peak = real[rank]
        assert told(expected.entries) == entries
        print(name, spec, rank, expected.step_bytes, peak, expected.step_bytes / peak)
        for kind, op in (("all-gather", "c10d::_allgather_base_"), ("reduce-scatter", "c10d::_reduce_scatter_base_")):
            p = ranks_of(spec)
            sent = sum(size * (p - 1) // p * n for (o, size), n in collectives.items() if o == op)
            if kind == "all-gather":  # that of the sizes of the batch is one, too, and stands among the entries
                sent -= sum(e.num_bytes for e in expected.entries if e.kind == "batch")
            assert sum(t.num_bytes for t in expected.transfers if t.kind == kind) == sent
        assert abs(expected.step_bytes - peak) <= 0.1 * peak
