"""Writes in place through views, in both directions, with values and gradients of one process."""

import pytest
import torch
import torch.nn.functional as F

import meshpar
from meshpar.testing import RankError, assert_same, mesh_for, run_ranks


def into_rows(x, w):
    y = x * 2
    y[:, :, :3].mul_(w)
    return y


def into_one_row(x, w):
    y = x * 2
    y[:, :, 1].add_(w)
    y[:, 0].sub_(1)
    return y


def into_narrow(x, w):
    y = x * 2
    y.narrow(2, 1, 3).mul_(w)
    y.narrow(-2, -2, 1).zero_()
    y.select(3, 0).add_(1)
    return y


def into_a_view_of_a_view(x, w):
    y = x * 2
    part = y[:, :, 1:]
    part[:, :, :2].mul_(w)
    return y, part


def into_the_base(x, w):
    y = x * 2
    part = y[:, :, 2:]
    y.mul_(w)
    return part * 3, y


def into_a_reshape(x, w):
    y = x * 2
    y.flatten(0, 1).mul_(w)
    y.unsqueeze(1).add_(1)
    return y


def into_a_permutation(x, w):
    y = x * 2
    y.permute(0, 2, 3, 1).add_(1)
    y.transpose(1, 3).mul_(w[:, None, None])
    return y


def into_what_nobody_holds(x, w):
    y = (x * 2)[:, :, 1:]
    return F.relu(y, inplace=True) * w


def into_columns_that_share_memory(x, w):
    y = x * 2
    y[..., :2].mul_(w[:2])
    F.leaky_relu(y[:, :1], 0.1, True)
    return y.sin()


def into_a_slice_of_a_reshape(x, w):
    """What lies between is held by nobody."""
    y = x * 2
    y.flatten(2)[:, :, 3:9].mul_(3)
    y.swapaxes(1, 2)[:, 0].add_(w)
    y[:1].squeeze(0)[..., 0].zero_()
    return y


def into_the_base_of_a_slice_of_a_reshape(x, w):
    y = x * 2
    far = y.transpose(1, 2)[1:, :, :2]
    near = y[:, :, 1:]
    farther = near[:, 1:].transpose(2, 3)[..., 1]
    y.mul_(w)
    return far * 3, near, farther


def into_nothing(x, w):
    """Whether a gradient is wanted is not a number."""
    y = x * 2
    z = y[:, :, 1:].detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad((z * w).sin().sum(), z)
    return y * 3, g


CASES = [
    into_rows,
    into_one_row,
    into_narrow,
    into_a_view_of_a_view,
    into_the_base,
    into_a_reshape,
    into_a_permutation,
    into_what_nobody_holds,
    into_columns_that_share_memory,
    into_nothing,
    into_a_slice_of_a_reshape,
    into_the_base_of_a_slice_of_a_reshape,
]


def check(spec: str, number: int, gradients: bool) -> None:
    torch.manual_seed(1)
    x, w = torch.randn(2, 3, 7, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    if not gradients:
        with torch.no_grad():
            assert_same(CASES[number], [x], weights=[w], mesh=mesh_for(spec), gathers=True, gradients=False)
    else:
        assert_same(CASES[number], [x], weights=[w], mesh=mesh_for(spec), gathers=True)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_views_stay_in_step(number, spec, gradients):
    run_ranks(check, 4, spec, number, gradients)


def into_a_chunk() -> None:
    x = meshpar.shard(torch.ones(2, 4, 6, 2), mesh_for("data=1,domain=2"))
    with meshpar.spmd():
        y = x * 2
        y.chunk(2, dim=2)[0].mul_(3)
        y.sum()


def test_a_write_that_cannot_be_carried_back_is_an_error():
    with pytest.raises(RankError, match="cannot be carried back") as caught:
        run_ranks(into_a_chunk, 2)
    assert len(caught.value.exceptions) == 2
