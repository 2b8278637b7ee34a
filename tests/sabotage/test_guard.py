"""The guard at the door of DTensor: each op that it stops, where it lets through, and why it is on the list.

One probe for each op. Without the guard the probe shows what DTensor does on its own: numbers that are not those of one
process, or different numbers on ranks that should agree. Were torch to mend an op, `test_without_the_guard` fails, and
the op leaves the list.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshpar import guard, private
from meshpar.errors import ShardingError
from meshpar.intervals import chunks
from meshpar.testing import run_ranks
from meshpar.testing.meshes import mesh_for

ATEN = torch.ops.aten


def image(rows=5):
    """Give a tensor whose 5 rows are 3 and 2 on two ranks."""
    return torch.randn(2, 4, rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def other(rows=5):
    """Give numbers from 0 to 1 of the shape of the image."""
    return torch.rand(2, 4, rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def laid(x, like):
    """Give a plain tensor replicated beside a DTensor, and as it is beside a plain one."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def convolved(x, _):
    return whole(F.conv2d(x, laid(torch.ones(3, 4, 3, 3, dtype=x.dtype), x), padding=1))


def shuffled(x, _):
    """Tell whether the piece has the rows that its placements promise: gathering it would crash the ranks."""
    y = F.pixel_shuffle(x, 2)
    if not isinstance(y, DTensor):
        return True
    promised = list(y.shape)
    for axis, placement in enumerate(y.placements):
        if placement.is_shard():
            a, b = chunks(promised[placement.dim], y.device_mesh.size(axis))[y.device_mesh.get_local_rank(axis)]
            promised[placement.dim] = b - a
    return list(y.to_local().shape) == promised


def loss(function):
    """Make a probe of a loss and its gradient."""

    def probe(x, target):
        x = x.detach()
        x = (x.sigmoid() if function is F.binary_cross_entropy else x).requires_grad_()
        value = function(x, target)
        value.backward()
        return whole(value.detach()), whole(x.grad)

    return probe


def noise(draw):
    """Make a probe of a random op: do the two halves of the rows get the same numbers?"""

    def probe(x, _):
        torch.manual_seed(7)  # as users do on every rank
        drawn = whole(draw(x.detach().clone()))[:, :, :4]
        return drawn[:, :, :2].equal(drawn[:, :, 2:])

    return probe


PROBES = {
    ATEN.convolution.default: convolved,
    ATEN.pixel_shuffle.default: shuffled,
    ATEN.mse_loss.default: loss(F.mse_loss),
    ATEN.smooth_l1_loss.default: loss(F.smooth_l1_loss),
    ATEN.huber_loss.default: loss(F.huber_loss),
    ATEN.soft_margin_loss.default: loss(F.soft_margin_loss),
    ATEN.binary_cross_entropy.default: loss(F.binary_cross_entropy),
    ATEN.binary_cross_entropy_with_logits.default: loss(F.binary_cross_entropy_with_logits),
    ATEN.native_dropout.default: noise(lambda x: torch.native_dropout(x * 0 + 1, 0.5, True)[0]),
    ATEN.bernoulli_.float: noise(lambda x: x.bernoulli_(0.5)),
    ATEN.bernoulli.default: noise(lambda x: torch.bernoulli(x * 0 + 0.5)),
    ATEN.normal_.default: noise(lambda x: x.normal_()),
    ATEN.uniform_.default: noise(lambda x: x.uniform_()),
    ATEN.rand_like.default: noise(torch.rand_like),
    ATEN.randn_like.default: noise(torch.randn_like),
    ATEN.randint_like.default: noise(lambda x: torch.randint_like(x, 1000)),
    ATEN.randint_like.low_dtype: noise(lambda x: torch.randint_like(x, 5, 1000)),
    ATEN._local_scalar_dense.default: lambda x, _: x.sum().item(),
}
RANDOM = [op for op in PROBES if "noise" in PROBES[op].__qualname__]
IDS = {str(op): op for op in guard.WRONG_OUTSIDE}


@contextlib.contextmanager
def unguarded(op):
    """Let DTensor do as it did before the guard."""
    ours = private.dtensor_handler(op)
    assert isinstance(ours, guard.Guarded)
    if ours.before is None:
        with private.without_dtensor_handler(op):
            yield
    else:
        private.set_dtensor_handler(op, ours.before)
        try:
            yield
        finally:
            private.set_dtensor_handler(op, ours)


@functools.cache
def foreign_mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))


def inputs(op, mesh, placements):
    rows = 4 if op in RANDOM else 5  # equal pieces, so that equal streams show as equal halves
    return [distribute_tensor(x, mesh, placements) for x in (image(rows), other(rows))]


def plain(op):
    rows = 4 if op in RANDOM else 5
    return PROBES[op](image(rows), other(rows))


def same(a, b):
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    return abs(a - b) <= 1e-12 * max(abs(b), 1)


def sharded(name):
    op = IDS[name]
    texts = []
    for spec, placements in (
        ("data=1,domain=2", (Replicate(), Shard(2), Replicate())),
        ("data=2,domain=1", (Shard(0), Replicate(), Replicate())),
        ("data=1,domain=1,tensor=2", (Replicate(), Replicate(), Shard(1))),
    ):
        x, y = inputs(op, mesh_for(spec), placements)
        with pytest.raises(ShardingError) as caught:
            PROBES[op](x, y)
        texts.append(str(caught.value))
    dist.barrier()
    return texts


@pytest.mark.parametrize("name", IDS)
def test_sharded_activations_are_stopped(name):
    for texts in run_ranks(sharded, 2, name):
        assert all(f"{name}: called on sharded activations" in text for text in texts)
        assert all("meshpar.spmd()" in text for text in texts)


def partial():
    """Read a number that is still a sum in parts, and one that is a keyword."""
    mesh = mesh_for("data=1,domain=2")
    x = DTensor.from_local(torch.ones(()), mesh, [Replicate(), Partial(), Replicate()], run_check=False)
    with pytest.raises(ShardingError):
        x.item()
    a, b = inputs(ATEN.mse_loss.default, mesh, (Replicate(), Shard(2), Replicate()))
    with pytest.raises(ShardingError):
        F.mse_loss(laid(other(), a), target=b)
    with pytest.raises(ShardingError):
        ATEN.mse_loss.default(self=a, target=b)


def test_parts_and_keywords_are_seen():
    run_ranks(partial, 2)


def let_through(name):
    """On whole tensors, and where an axis of one rank shards, all is as it was: the numbers of one process."""
    op = IDS[name]
    expected = plain(op)
    for spec, placements in (
        ("data=1,domain=2", (Replicate(),) * 3),
        ("data=1,domain=2", (Shard(0), Replicate(), Shard(1))),
    ):
        found = PROBES[op](*inputs(op, mesh_for(spec), placements))
        assert same(found, expected), f"{spec} {placements}"


@pytest.mark.parametrize("name", IDS)
def test_whole_activations_go_their_way(name):
    run_ranks(let_through, 2, name)


def outcome(op, x, y):
    try:
        return PROBES[op](x, y)
    except (RuntimeError, NotImplementedError) as error:  # not the guard's, which is a ValueError
        return type(error).__name__


def elsewhere(name):
    """On a mesh that is not of `make_mesh`, the shards of `fully_shard` say, nothing changes, right or wrong."""
    op = IDS[name]
    mesh_for("data=1,domain=2")
    guarded = outcome(op, *inputs(op, foreign_mesh(), (Shard(2),)))
    with unguarded(op):
        bare = outcome(op, *inputs(op, foreign_mesh(), (Shard(2),)))
    assert guarded == bare if isinstance(bare, str) else same(guarded, bare)


@pytest.mark.parametrize("name", IDS)
def test_other_meshes_go_their_way(name):
    run_ranks(elsewhere, 2, name)


def bare(name):
    op = IDS[name]
    with unguarded(op):
        found = PROBES[op](*inputs(op, mesh_for("data=1,domain=2"), (Replicate(), Shard(2), Replicate())))
    return same(found, plain(op))


@pytest.mark.parametrize("name", IDS)
def test_without_the_guard_it_is_wrong(name):
    """The list is justified: no error, and on some rank not what one process has."""
    assert not all(run_ranks(bare, 2, name))


def test_every_op_has_a_probe():
    assert set(PROBES) == set(guard.WRONG_OUTSIDE)
    assert not any(plain(op) for op in RANDOM)
