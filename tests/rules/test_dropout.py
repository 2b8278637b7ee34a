"""Dropout of all kinds and drop-path: where masks differ, where they agree, and that they follow the seed."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from rule_cases import TENSOR
from torch import Tensor, nn
from torch.nn import functional as F

from meshpar.batch import shard
from meshpar.rewrite import rewrite
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

# stochastic depth: one number a sample


def _as_in_timm(x: Tensor, keep: float) -> Tensor:
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask.div_(keep)


def _as_in_torchvision(x: Tensor, keep: float) -> Tensor:
    noise = torch.empty([x.shape[0], *[1] * (x.ndim - 1)], dtype=x.dtype, device=x.device)
    return x * noise.bernoulli_(keep).div_(keep)


def _by_rand(x: Tensor, keep: float) -> Tensor:
    return x.div(keep) * torch.floor(keep + torch.rand((x.shape[0], *[1] * (x.ndim - 1)), dtype=x.dtype))


def _by_dropout(x: Tensor, keep: float) -> Tensor:
    return x * F.dropout(x.new_ones(x.shape[0], 1, 1, 1), 1 - keep)


def _drop_path(text: str) -> None:
    """Samples are dropped whole: the ranks of domain and tensor agree, those of data need not."""
    mesh = mesh_for(text)
    full = torch.ones(32, 2, 5, 3, dtype=torch.float64)
    for drop in (_as_in_timm, _as_in_torchvision, _by_rand, _by_dropout):
        found = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            with spmd(on_gather="error"):
                found.append(drop(shard(full, mesh), 0.5).full_tensor())
        samples = found[0].flatten(1)
        assert torch.equal(samples, samples[:, :1].expand_as(samples)), drop.__name__
        assert set(samples.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        parts = samples[:, 0].chunk(max(mesh.size(0), 1))
        assert len(parts) == 1 or not torch.equal(parts[0], parts[1])
        if drop is not _by_dropout:  # drawn as one process would
            torch.manual_seed(5)
            assert torch.equal(found[0], drop(full, 0.5)), drop.__name__


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=4", TENSOR])
def test_drop_path(mesh: str) -> None:
    run_ranks(_drop_path, ranks_of(mesh), mesh)


DROPOUTS = {
    "dropout": (nn.Dropout, "data _ domain _", (4, 8, 12, 6)),
    "alpha": (nn.AlphaDropout, "data _ domain _", (4, 8, 12, 6)),
    "dropout1d": (nn.Dropout1d, "data _ domain", (4, 24, 12)),
    "dropout2d": (nn.Dropout2d, "data _ domain _", (4, 24, 12, 6)),
    "dropout3d": (nn.Dropout3d, "data _ domain _ _", (4, 24, 12, 2, 2)),
    "feature alpha": (nn.FeatureAlphaDropout, "data _ domain _", (4, 24, 12, 6)),
}


def _masks(text: str) -> None:
    """Masks differ over data, and over domain unless whole channels go; they agree over tensor and follow the seed."""
    mesh = mesh_for(text)
    for name, (cls, layout, shape) in DROPOUTS.items():
        layer, whole_channels, drawn = rewrite(cls(0.4)), "d" in name[-1:] or "feature" in name, []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            y = layer(shard(torch.ones(shape), mesh, layout))
            if mesh.size(mesh.mesh_dim_names.index("tensor")) > 1:
                other = y.to_local().clone()
                dist.broadcast(other, group=mesh.get_group("tensor"), group_src=0)
                assert torch.equal(other, y.to_local()), name
            drawn.append(y.full_tensor())
        kept = drawn[0] == drawn[0].max()
        channels = kept.flatten(2)
        assert torch.equal(drawn[0], drawn[1]), name
        assert not torch.equal(drawn[0], drawn[2]), name
        assert 0.3 < float(kept.float().mean()) < 0.9, name
        assert torch.equal(channels, channels[..., :1].expand_as(channels)) == whole_channels, name
        halves = kept.chunk(2, 0)
        assert mesh.size(0) == 1 or not torch.equal(halves[0], halves[1]), name
        if not whole_channels:
            rows = kept.chunk(max(mesh.size(1), 1), 2)
            assert not any(torch.equal(a, b) for a, b in itertools.combinations(rows, 2)), name
        layer.eval()
        assert torch.equal(layer(shard(torch.ones(shape), mesh, layout)).full_tensor(), torch.ones(shape)), name


@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=4", TENSOR])
def test_every_kind_of_dropout(mesh: str) -> None:
    run_ranks(_masks, ranks_of(mesh), mesh)
