"""Random numbers: the same where all ranks hold the same, different where they hold pieces, reproducible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rule_cases import real
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshpar.batch import gather, shard
from meshpar.record import record
from meshpar.rewrite import rewrite
from meshpar.scope import spmd
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

MESHES = ("data=2,domain=2", "data=1,domain=4", "data=1,domain=2,tensor=2")


def _same_everywhere(x: Tensor) -> bool:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    return all(torch.equal(every[0], other) for other in every)


FACTORIES: dict[str, Callable[..., Any]] = {
    "rand": lambda g: torch.rand(3, 4, generator=g),
    "randn": lambda g: torch.randn(3, 4, generator=g),
    "randint": lambda g: torch.randint(0, 99, (3, 4), generator=g),
    "randperm": lambda g: torch.randperm(12, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (3, 4), generator=g),
    "normal of tensors": lambda g: torch.normal(torch.zeros(5), torch.ones(5), generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((12,), 0.5), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(9), 5, generator=g),
    "poisson": lambda g: torch.poisson(torch.full((12,), 3.0), generator=g),
    "uniform_": lambda g: torch.empty(12).uniform_(generator=g),
    "normal_": lambda g: torch.empty(12).normal_(generator=g),
    "bernoulli_": lambda g: torch.empty(12).bernoulli_(0.5, generator=g),
    "exponential_": lambda g: torch.empty(12).exponential_(generator=g),
    "random_": lambda g: torch.empty(12).random_(0, 99, generator=g),
}
IMPLICIT: dict[str, Callable[..., Any]] = {
    "rand_like": lambda: torch.rand_like(torch.zeros(12)),
    "randn_like": lambda: torch.randn_like(torch.zeros(12)),
    "dropout": lambda: F.dropout(torch.ones(40)),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 9, 2, 2)),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(3, 4)),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(12)),
}


def _factories() -> None:
    mesh = mesh_for("data=2,domain=2")
    rank = dist.get_rank()
    for name, fn in [*FACTORIES.items(), *IMPLICIT.items()]:
        torch.manual_seed(0)
        expected = fn(None) if name in FACTORIES else fn()
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        with spmd(mesh=mesh):
            found = fn(None) if name in FACTORIES else fn()
        assert torch.equal(gather(found), expected), name
        # Rank 0 has gone on as one process would; the others are where they were.
        assert torch.equal(torch.get_rng_state(), before) == (rank != 0), name
    for name, fn in FACTORIES.items():
        expected = fn(torch.Generator().manual_seed(5))
        own = torch.Generator().manual_seed(5 + rank)
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        with spmd(mesh=mesh):
            found = fn(own)
        assert torch.equal(gather(found), expected), name
        assert torch.equal(torch.get_rng_state(), before), name
    with spmd():
        a, b = torch.randn(4), torch.randn(4)
    assert not torch.equal(a, b)


def test_factories_give_the_numbers_of_rank_0() -> None:
    run_ranks(_factories, 4)


def _like_activations() -> None:
    mesh = mesh_for("data=2,domain=2")
    full = real(2, 3, 5, 4)
    fills = ["normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"]
    args = {"geometric_": (0.3,), "bernoulli_": (0.4,)}
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rand_like": torch.rand_like,
        "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
        "randint_like": lambda x: torch.randint_like(x, 0, 50),
        **{name: lambda x, name=name: getattr(x.clone(), name)(*args.get(name, ())) for name in fills},
    }
    for name, fn in calls.items():
        torch.manual_seed(0)
        expected = fn(full)
        torch.manual_seed(dist.get_rank())
        with spmd(on_gather="error"):
            found = fn(shard(full, mesh))
        assert isinstance(found, DTensor), name
        assert found.placements == shard(full, mesh).placements, name
        assert torch.equal(found.full_tensor(), expected), name
    x = shard(full, mesh).requires_grad_()
    with spmd(on_gather="error"):
        y = x * 2
        before = y.exp()
        y.normal_()
        (before.sum() + y.sum()).backward()
    assert x.grad is not None
    assert torch.allclose(x.grad.full_tensor(), 2 * torch.exp(2 * full))
    for init in (nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.xavier_normal_, nn.init.ones_):
        torch.manual_seed(0)
        expected = init(full.clone())
        torch.manual_seed(dist.get_rank())
        with spmd(on_gather="error"):
            assert torch.equal(init(shard(full, mesh)).full_tensor(), expected)


def test_numbers_like_an_activation_are_those_of_one_process() -> None:
    run_ranks(_like_activations, 4)


DROPOUTS: dict[str, Callable[..., Any]] = {
    "F": lambda x, p: F.dropout(x, p, True),
    "torch": lambda x, p: torch.dropout(x, p, True),
    "named": lambda x, p: torch.dropout(x, p=p, train=True),
    "inplace": lambda x, p: F.dropout(x * 1, p, True, True),
    "underscore": lambda x, p: torch.dropout_(x * 1, p, True),
}


def _dropout(text: str) -> None:
    """Over axes that shard masks differ; over axes that replicate they agree; the seed decides."""
    mesh = mesh_for(text)
    full = torch.ones(4, 8, 64, 16, dtype=torch.float64)
    for name, drop in DROPOUTS.items():
        for p in (0.25, 0.5):
            torch.manual_seed(10 + dist.get_rank() // 2 if name == "F" else 10)
            masks = []
            with record() as log, spmd(on_gather="error"):
                x = shard(full, mesh).requires_grad_()
                y = drop(x, p)
                y.backward(torch.ones_like(y))
                masks.append(y.full_tensor())
            assert x.grad is not None
            assert torch.equal(x.grad.full_tensor(), masks[0]), name  # the mask, scaled, forward and backward
            kept = masks[0] != 0
            assert torch.allclose(masks[0][kept], torch.tensor(1 / (1 - p), dtype=torch.float64))
            assert abs(float(kept.double().mean()) - (1 - p)) < 0.02
            assert _same_everywhere(masks[0]), name
            rows = [masks[0][:, :, i * 16 : (i + 1) * 16] for i in range(4)]
            assert not any(torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i)), name
            assert not torch.equal(masks[0][:2], masks[0][2:])
            if mesh.size(2) > 1:
                piece = y.detach().to_local()
                other = piece.clone()
                dist.broadcast(other, group=mesh.get_group("tensor"), group_src=0)
                assert torch.equal(piece, other)
            assert not [e for e in log.entries if e.kind not in ("random", "redistribute")]


@pytest.mark.parametrize("mesh", MESHES)
def test_field_5_dropout_masks(mesh: str) -> None:
    run_ranks(_dropout, ranks_of(mesh), mesh)


def _follows_the_seed() -> None:
    mesh = mesh_for("data=2,domain=2")
    x = shard(torch.ones(2, 3, 9, 4), mesh)
    with spmd(on_gather="error"):

        def draw(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return torch.stack([F.dropout(x, 0.5).full_tensor() for _ in range(2)])

        one, again, other = draw(1), draw(1), draw(2)
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert not torch.equal(one[0], one[1])
        assert torch.equal(F.dropout(x, 0.5, False).full_tensor(), x.full_tensor())
        assert torch.equal(F.dropout(x, 0.0).full_tensor(), x.full_tensor())
        assert float(F.dropout(x, 1.0).full_tensor().abs().sum()) == 0
        for p in (-0.1, 1.1):
            with pytest.raises(ValueError, match="probability"):
                F.dropout(x, p)


def test_dropout_follows_the_seed() -> None:
    run_ranks(_follows_the_seed, 4)


def _channels() -> None:
    for text in ("data=2,domain=2", "data=1,domain=4"):
        mesh = mesh_for(text)
        for drop, shape, layout in (
            (F.dropout1d, (4, 30, 9), "data _ domain"),
            (F.dropout2d, (4, 30, 5, 4), None),
            (F.dropout3d, (4, 30, 5, 3, 2), "data _ domain _ _"),
            (F.dropout1d, (60, 9), "_ domain"),
            (F.dropout3d, (60, 5, 3, 2), "_ domain _ _"),
            (torch.feature_dropout, (4, 30, 5, 4), None),
        ):
            torch.manual_seed(dist.get_rank())
            with spmd(on_gather="error"):
                y = drop(shard(torch.ones(shape), mesh, layout), 0.5, True).full_tensor()
            num = 1 if drop in (F.dropout1d, F.dropout3d) and shape[0] == 60 else 2
            channels = y.flatten(num)
            assert torch.equal(channels, channels[..., :1].expand_as(channels)), f"{drop} {text}"
            assert 0.2 < float((channels[..., 0] != 0).float().mean()) < 0.8
            if num == 2 and "data=2" in text:
                assert not torch.equal(channels[:2], channels[2:])
        torch.manual_seed(dist.get_rank())
        with spmd(on_gather="error"):
            a = F.feature_alpha_dropout(shard(torch.ones(4, 30, 5, 4), mesh), 0.5, True).full_tensor().flatten(2)
            b = F.alpha_dropout(shard(torch.randn(4, 30, 64, 8), mesh), 0.3, True).full_tensor()
        assert torch.equal(a, a[..., :1].expand_as(a))
        assert abs(float(b.mean())) < 0.05
        assert abs(float(b.std()) - 1) < 0.05


def test_whole_channels_are_dropped_over_domain() -> None:
    run_ranks(_channels, 4)


def _others() -> None:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(3 + dist.get_rank())
    p = shard(torch.full((4, 8, 32, 16), 0.25), mesh)
    x = shard(-torch.ones(4, 8, 32, 16), mesh)
    with spmd(on_gather="error"):
        hits = torch.bernoulli(p).full_tensor()
        named = torch.bernoulli(p, generator=torch.Generator().manual_seed(1)).full_tensor()
        slopes = F.rrelu(x, 0.1, 0.3, True).full_tensor()
        mean = F.rrelu(x, 0.1, 0.3, False).full_tensor()
        chosen = F.gumbel_softmax(x, hard=True, dim=1).full_tensor()
    for y in (hits, named):
        assert set(y.unique().tolist()) == {0.0, 1.0}
        assert abs(float(y.mean()) - 0.25) < 0.02
        assert not torch.equal(y[:, :, :16], y[:, :, 16:])
        assert not torch.equal(y[:2], y[2:])
    assert float(slopes.max()) <= -0.1
    assert float(slopes.min()) >= -0.3
    assert torch.allclose(mean, torch.tensor(-0.2))
    assert torch.equal(chosen.sum(1), torch.ones(4, 32, 16))
    assert not torch.equal(chosen[:, :, :16], chosen[:, :, 16:])
    for y in (hits, slopes, chosen):
        assert _same_everywhere(y)


def test_bernoulli_rrelu_and_gumbel() -> None:
    run_ranks(_others, 4)


def _gathered() -> None:
    """What has no rule draws rank 0's numbers too."""
    mesh = mesh_for("data=1,domain=4")
    full = real(2, 3, 8, 4, low=0.5)
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: torch.normal(x, 1.0),
        torch.poisson,
        lambda x: torch.multinomial(x.sum((0, 1, 3)), 3),
        lambda x: F.gumbel_softmax(x, dim=2),
        lambda x: torch.normal(mean=x, std=x),
    ]
    for fn in calls:
        torch.manual_seed(0)
        expected = fn(full)
        torch.manual_seed(dist.get_rank())
        with spmd(on_gather="allow"):
            found = fn(shard(full, mesh))
        assert torch.equal(found.full_tensor(), expected)


def test_gathered_draws_are_those_of_rank_0() -> None:
    run_ranks(_gathered, 4)


def _recomputed(text: str, *, reentrant: bool) -> None:
    mesh = mesh_for(text)
    body = rewrite(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.4), nn.GELU(), nn.Dropout2d(0.4)).double())
    for parameter in body.parameters():
        dist.broadcast(parameter.data, 0)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(7 + dist.get_rank())
        x = shard(real(2, 3, 9, 4), mesh).requires_grad_()
        body.zero_grad()
        y = checkpoint(body, x, use_reentrant=reentrant) if checkpointed else body(x)
        with spmd():
            (y * y).sum().backward()
        assert x.grad is not None
        grads.append([x.grad.to_local(), *(p.grad.clone() for p in body.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
        assert float(a.abs().sum()) > 0 or a.numel() == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=2,tensor=2"])
def test_checkpoints_recompute_the_same_mask(mesh: str, reentrant: bool) -> None:
    run_ranks(_recomputed, 4, mesh, reentrant=reentrant)
