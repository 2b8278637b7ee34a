"""The suite must notice: each test breaks the library in one place and expects the checkers to fail."""

import unittest.mock as mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshpar import data, exchange, initial, intervals, pieces, plans
from meshpar.intervals import FILL
from meshpar.rules import conv as rules_conv
from meshpar.rules import overlap, reduce
from meshpar.testing import Difference, assert_equivalent, assert_same, mesh_for, run_ranks


def conv(x, w):
    return F.conv2d(x, w, padding=1)


def forget() -> None:
    """Drop the plans that are kept."""
    plans.make_plan.cache_clear()
    rules_conv._overlap.cache_clear()
    rules_conv._READY.clear()


def caught(check, *patches) -> str:
    """Run a check on this rank with the patches in force; tell the difference that it saw, or "nothing"."""
    forget()
    try:
        for patch in patches:
            patch.start()
        check()
    except Difference as error:
        return str(error)
    finally:
        for patch in reversed(patches):
            patch.stop()
        forget()
    return "nothing"


def check_conv() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 2, 8, 5, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    assert_same(conv, [x], weights=[w], mesh=mesh_for("data=1,domain=4"))


def check_pool() -> None:
    x = torch.randn(2, 2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_same(lambda x: F.avg_pool2d(x, 3, 1, 1), [x], mesh=mesh_for("data=1,domain=4"))


def check_mean() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 2, 8, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert_same(lambda x, w: (x * w).mean(dim=(-2, -1)) * w[0], [x], weights=[w], mesh=mesh_for("data=1,domain=4"))


def check_model() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3))
    assert_equivalent(net, [torch.randn(2, 2, 8, 5)], mesh_for("data=2,domain=2"))


def intact() -> list[str]:
    return [caught(check) for check in (check_conv, check_pool, check_mean, check_model)]


def one_row_dropped(have, want, me, make=plans.make_plan):
    """Read padding where the last rank's first row should be."""
    first, *rest = want[-1]
    left = [(first[0] + 1, first[1] - 1, first[2])] if first[1] > 1 else []
    return make(have, (*want[:-1], ((FILL, 1, 0), *left, *rest)), me)


def halo_row_dropped() -> str:
    return caught(check_conv, mock.patch.object(overlap, "make_plan", one_row_dropped))


def fetched_row_dropped() -> str:
    return caught(check_pool, mock.patch.object(exchange, "make_plan", one_row_dropped))


def edges_left_out() -> str:
    """Leave the outputs at the edge as they are without their halo."""
    edges = overlap._edges

    def broken(*args):
        found = edges(*args)
        return None if found is None else (found[0], found[1], found[2][:-1])

    overlap._edges_of_all.cache_clear()
    try:
        return caught(check_conv, mock.patch.object(overlap, "_edges", broken))
    finally:
        overlap._edges_of_all.cache_clear()


def ranks_swapped() -> str:
    """Take the piece of the next rank for one's own."""

    def broken(mesh, axis, n):
        p = mesh.size(axis)
        return intervals.chunks(n, p)[(mesh.get_local_rank(axis) + 1) % p]

    return caught(check_conv, mock.patch.object(pieces, "my_chunk", broken))


def gradient_counted_twice() -> str:
    """Count the gradient of a weight on every rank that replicates the activation."""
    return caught(check_mean, mock.patch.object(pieces, "part_factor", return_value=1.0))


def lied_about_replicate() -> str:
    """Call a rank's own part of a mean the mean."""
    return caught(check_mean, mock.patch.object(reduce.pieces, "psum", lambda x, *args, **kwargs: x))


def gradients_averaged() -> str:
    """Let fully_shard average over the ranks, as it does by default."""
    shard = data.fully_shard

    def broken(module, **kwargs):
        made = shard(module, **kwargs)
        type(made).set_gradient_divide_factor = lambda self, factor: None
        return made

    return caught(check_model, mock.patch.object(data, "fully_shard", broken))


def weights_left_unequal() -> str:
    def check() -> None:
        torch.manual_seed(dist.get_rank())
        net = nn.Conv2d(2, 3, 3)
        torch.manual_seed(0)
        assert_equivalent(net, [torch.randn(2, 2, 8, 5)], mesh_for("data=2,domain=2"))

    return caught(check, mock.patch.object(initial, "_broadcast", return_value=None))


def model_changed() -> str:
    """Let parallelize work on the very tensors that it was given."""
    from meshpar import parallelize

    def broken(module) -> None:
        with torch.no_grad():
            next(module.parameters()).add_(1)
        initial.own_tensors(module)

    return caught(check_model, mock.patch.object(parallelize_module(), "own_tensors", broken)) if parallelize else ""


def parallelize_module():
    import sys

    return sys.modules["meshpar.parallelize"]


def test_the_checks_pass_when_nothing_is_broken():
    assert run_ranks(intact, 4) == [["nothing"] * 4] * 4


@pytest.mark.parametrize(
    "sabotage",
    [
        halo_row_dropped,
        fetched_row_dropped,
        edges_left_out,
        ranks_swapped,
        gradient_counted_twice,
        lied_about_replicate,
        gradients_averaged,
        weights_left_unequal,
        model_changed,
    ],
)
def test_sabotage_is_seen(sabotage):
    said = run_ranks(sabotage, 4)
    assert any(text != "nothing" for text in said), said
