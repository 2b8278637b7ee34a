"""Ranks of `simulate` on many meshes, and when they die, hang, are closed or left."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar.simulating.ranks import COPIES, RANK_BYTES
from meshpar.testing import shutdown_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 5, padding=2)
        self.norm = nn.GroupNorm(2, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, scale):
        y = torch.relu(self.norm(self.conv(x)))
        tokens = y.flatten(2).transpose(1, 2)
        tokens = self.attend(tokens, tokens, tokens)[0] * scale["scale"]
        return {"y": tokens.transpose(1, 2).reshape(y.shape), "mean": y.mean()}


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("data=1", {}),
        ("domain=4", {}),
        ("data=2,domain=2", {}),
        ("domain=2,domain_w=2", {}),
        ("data=3", {"data": "ddp"}),
        ("replica=2,data=1,domain=2", {"data": "hsdp"}),
        ("data=2,tensor=2", {"tensor_plan": "auto"}),
        ("domain=3", {"checkpoint": "all"}),
        ("data=1,domain=10", {}),
    ],
)
def test_any_mesh_and_option_is_one_process(spec, options):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 7, 6, dtype=torch.float64).requires_grad_()
    run = meshpar.simulate(
        spec, Net().double(), x, {"scale": torch.tensor(2.0).double()}, layouts=[None, ""], **options
    )
    assert run.difference < 1e-12
    assert run.output["y"].shape == (3, 4, 7, 6)
    assert set(run.errors) >= {"output 0", "output 1", "loss", "gradient of input 0", "gradient of conv.weight"}
    assert len(run.ranks) == len(run.rank_table()) - 1
    assert "one process" in str(run)
    assert ("most sent" in str(run)) == (len(run.ranks) > 8)
    assert run.input_gradients[0].shape == x.shape


def test_precision_is_said_as_a_difference_and_backward_can_be_left_out():
    net, x = nn.Conv2d(2, 2, 3, padding=1), torch.randn(1, 2, 7, 6)
    rounded = meshpar.simulate("domain=2", net, x, precision="bf16")
    assert 1e-4 < rounded.difference < 3e-2
    forward = meshpar.simulate("domain=2", net, x, backward=False)
    assert forward.gradients == {}
    assert set(forward.errors) == {"loss", "output"}


def pid(mesh):
    return os.getpid()


def own_and_peak_bytes(mesh):
    return psutil.Process().memory_full_info().uss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_step_takes_no_more_memory_than_is_counted_for_it():
    ranks = meshpar.simulate("domain=2")
    ranks.close()
    meshpar.simulate("domain=2", nn.Conv2d(2, 2, 3), torch.ones(1, 2, 9, 9))
    before = ranks.run(own_and_peak_bytes)
    assert all(RANK_BYTES / 4 < own < RANK_BYTES for own, _ in before)
    meshpar.simulate("domain=2", nn.Linear(1000, 10_000), torch.ones(2, 1000))  # 40 MB
    after = ranks.run(own_and_peak_bytes)
    more = sum(b - a for (_, a), (_, b) in zip(before, after, strict=True))
    counted = (2 + 1) * COPIES * 40_040_000
    assert counted / 2 < more < counted


def assert_gone(pids):
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(p) for p in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.01)


def test_one_rank_that_raises_dies_or_hangs_is_named_and_the_next_call_works():
    ranks = meshpar.simulate("domain=3", timeout_s=5)

    def fail(mesh, how):
        if dist.get_rank() == 1:
            if how == "die":
                os._exit(7)
            while how == "hang":
                time.sleep(0.1)
            msg = "not here"
            raise ValueError(msg)
        dist.barrier()

    for how, says in (
        ("raise", "rank 1: raised ValueError: not here"),
        ("die", "rank 1: died with exit code 7"),
        ("hang", "rank 1: had not answered; it was at"),
    ):
        before = ranks.run(pid)
        with pytest.raises(meshpar.RankError, match=says):
            ranks.run(fail, how)
        assert_gone(before)
    assert len(set(ranks.run(pid))) == 3


def test_an_interrupt_while_ranks_start_leaves_nothing_behind():
    """The reply of the server to the first request must not be taken for that to the second."""
    shutdown_pool()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs behind a shell ignores it
    try:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            meshpar.simulate("domain=2").run(pid)
    finally:
        signal.signal(signal.SIGINT, before)
    assert psutil.Process().children() == []
    three = meshpar.simulate("domain=3").run(pid)
    assert set(three) < {p.pid for p in psutil.Process().children(recursive=True)}
    assert len(set(three)) == 3
    meshpar.simulate("domain=3").close()  # the last ones: the server that forks them ends, too
    assert psutil.Process().children() == []


def test_ranks_are_kept_until_closed_and_others_stay():
    with meshpar.simulate("domain=2") as two:
        three = meshpar.simulate("domain=3")
        of_two, of_three = two.run(pid), three.run(pid)
        assert meshpar.simulate("data=2").run(pid) == of_two
    assert_gone(of_two)
    assert len(set(two.run(pid))) == 2
    two.close()
    assert three.run(pid) == of_three
    three.close()
    three.close()
    assert_gone(of_three)
