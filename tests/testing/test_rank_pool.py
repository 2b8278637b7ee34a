"""The pool keeps ranks that are in step, ends those that are not, and says which rank did what."""

import functools
import os
import pickle
import random
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshpar.testing import RankError, pool, run_ranks, shutdown_pool


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def scaled_sum(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    y = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return y


def setting() -> tuple[str, int, int, str]:
    return dist.get_backend(), dist.get_world_size(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def drawn(more: bool) -> tuple[float, float, float]:
    if more and dist.get_rank():
        drawn(more=False)
    return float(torch.rand(())), random.random(), float(np.random.rand())


def raise_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        msg = f"not on rank {dist.get_rank()}"
        raise ValueError(msg)
    return os.getpid()


def raise_before_all_reduce(rank: int) -> None:
    raise_on((rank,))
    dist.all_reduce(torch.ones(1))


def die_before_all_reduce(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def sleep_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def return_lambda() -> object:
    return lambda: None


def leave_the_group() -> None:
    dist.destroy_process_group()


def read_new_path() -> str:
    return sys.path[0]


def same(value: object) -> object:
    return value


def make_mesh() -> int:
    init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("data", "domain", "tensor"))
    return os.getpid()


def pids(num_ranks: int) -> list[int]:
    return [pid for _, pid in run_ranks(rank_and_pid, num_ranks)]


def assert_gone(gone: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in gone):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def _no_pool_left():
    yield
    shutdown_pool()
    shutdown_pool()  # once more does nothing


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_in_rank_order(num_ranks):
    assert [rank for rank, _ in run_ranks(rank_and_pid, num_ranks)] == list(range(num_ranks))


def test_ranks_run_one_thread_under_gloo():
    assert run_ranks(setting, 2) == [("gloo", 2, 1, "1")] * 2


def test_all_reduce_of_a_tensor_with_partial_and_keywords():
    x = torch.arange(3.0, dtype=torch.float64)
    for fn, kwargs in ((scaled_sum, {"scale": 2.0}), (functools.partial(scaled_sum, scale=2.0), {})):
        results = run_ranks(fn, 3, x, **kwargs)
        assert all(torch.equal(y, x * 12) for y in results)
        assert not any(y.is_shared() for y in results)


def test_large_tensors_travel():
    x = torch.ones(3_000_000)
    assert all(torch.equal(y, x * 3) for y in run_ranks(scaled_sum, 2, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)])
def test_tensors_come_back_the_same(dtype, shape):
    x = (torch.randn(shape) * 3).to(dtype)
    for y in run_ranks(same, 2, x):
        assert y.dtype == dtype
        assert y.shape == x.shape
        assert torch.equal(x, y)
        y.clone().zero_()


def test_strides_views_and_requires_grad_come_back_the_same():
    grid = torch.arange(24.0).view(1, 2, 3, 4)
    rows = grid[:, :, 1:]
    values = [
        grid.to(memory_format=torch.channels_last),
        rows,
        grid,
        grid.clone().requires_grad_(),
        grid.conj(),
    ]
    values += [torch.nn.Parameter(grid.clone()), torch.complex(grid, grid).conj()]
    for results in run_ranks(same, 2, values):
        for x, y in zip(values, results, strict=True):
            assert torch.equal(x, y)
            assert (x.stride(), x.requires_grad, type(x)) == (y.stride(), y.requires_grad, type(y))


def test_a_rank_full_of_open_groups_starts_anew():
    made = [tuple(run_ranks(make_mesh, 2)) for _ in range(60)]
    assert 1 < len(set(made)) < 10


def test_processes_are_reused_and_differ_by_world_size():
    assert pids(2) == pids(2)
    assert not set(pids(2)) & set(pids(3))


def test_a_call_costs_milliseconds():
    pids(4)
    start = time.perf_counter()
    for _ in range(50):
        run_ranks(rank_and_pid, 4)
    assert (time.perf_counter() - start) / 50 < 0.02


def test_the_caller_s_path_reaches_the_ranks(tmp_path, monkeypatch):
    pids(2)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_ranks(read_new_path, 2) == [str(tmp_path)] * 2
    monkeypatch.undo()
    assert run_ranks(read_new_path, 2) == [sys.path[0]] * 2


def test_all_ranks_raise_and_the_pool_is_kept():
    before = pids(3)
    with pytest.raises(RankError, match="rank 2: raised ValueError: not on rank 2") as caught:
        run_ranks(raise_on, 3, (0, 1, 2))
    assert [str(caught.value.exceptions[rank]) for rank in range(3)] == [f"not on rank {r}" for r in range(3)]
    assert caught.value.__cause__ is caught.value.exceptions[0]
    assert "raise_on" in caught.value.tracebacks[1]
    assert pids(3) == before


def test_one_rank_raises_and_the_pool_starts_anew():
    before = pids(3)
    with pytest.raises(RankError, match="rank 0: returned\n  rank 1: raised ValueError") as caught:
        run_ranks(raise_on, 3, (1,))
    assert list(caught.value.exceptions) == [1]
    assert_gone(before)
    assert not set(pids(3)) & set(before)


def test_one_rank_raises_while_the_others_wait_in_a_collective():
    before = pids(2)
    with pytest.raises(RankError, match="rank 0: had not answered") as caught:
        run_ranks(raise_before_all_reduce, 2, 1)
    assert "in raise_before_all_reduce" in str(caught.value).partition("rank 1:")[0]
    assert isinstance(caught.value.__cause__, ValueError)
    assert_gone(before)
    assert torch.equal(run_ranks(scaled_sum, 2, torch.ones(1))[0], torch.full((1,), 3.0))


def test_a_rank_that_dies_is_named_promptly():
    pids(3)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        run_ranks(die_before_all_reduce, 3, 1)
    assert time.monotonic() - start < 2


def test_a_rank_killed_while_idle_is_named():
    os.kill(pids(2)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=f"rank 1: died with exit code {-signal.SIGKILL}"):
        pids(2)
    assert len(pids(2)) == 2


def test_timeout_names_who_hangs_and_where():
    before = pids(2)
    with pytest.raises(RankError, match="rank 0: returned\n  rank 1: had not answered") as caught:
        run_ranks(sleep_on, 2, 1, timeout_s=0.3)
    assert "in sleep_on" in str(caught.value)
    assert_gone(before)


def test_what_cannot_be_pickled_is_refused_before_it_is_sent(monkeypatch):
    before = pids(2)
    with pytest.raises(TypeError, match=r"run_ranks: fn cannot be sent(.|\n)*fix:"):
        run_ranks(lambda: None, 2)
    with pytest.raises(TypeError, match="run_ranks: argument 0, scale cannot be sent"):
        run_ranks(scaled_sum, 2, lambda: None, scale=lambda: None)
    monkeypatch.setattr(rank_and_pid, "__module__", "__main__")
    with pytest.raises(TypeError, match="__main__"):
        run_ranks(rank_and_pid, 2)
    monkeypatch.undo()
    assert pids(2) == before


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank():
    with pytest.raises(RankError, match="rank 0: raised"):
        run_ranks(return_lambda, 2)


def test_a_function_that_destroys_the_group_costs_the_pool():
    before = pids(2)
    assert run_ranks(leave_the_group, 2) == [None, None]
    assert_gone(before)
    assert not set(pids(2)) & set(before)


def test_every_call_draws_the_same_numbers_on_all_ranks():
    assert len(set(run_ranks(drawn, 2, more=True))) == 2
    first, second = run_ranks(drawn, 2, more=False), run_ranks(drawn, 2, more=False)
    assert first == second
    assert first[0] == first[1]


@pytest.mark.parametrize("num_ranks", [0, 17])
def test_world_size_out_of_range(num_ranks):
    with pytest.raises(ValueError, match="must be 1 to 16"):
        run_ranks(rank_and_pid, num_ranks)


def test_rank_error_pickles():
    assert str(pickle.loads(pickle.dumps(RankError("message")))) == "message"


def test_ranks_end_when_the_server_is_killed():
    before = pids(3)
    pool._SERVERS[os.getpid()].process.kill()
    assert_gone(before)
    assert len(pids(3)) == 3


def test_shutdown_leaves_no_process():
    before = pids(2) + pids(3)
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    assert set(before) < children
    shutdown_pool()  # closes the server's pipe, as the kernel does when the caller is killed
    assert_gone(sorted(children))
