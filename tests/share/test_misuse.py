"""Calls as they should not be made: each is an error on all ranks alike, and the next call is none the worse for it."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.share import channel, gathers
from meshpar.testing import run_ranks


def report(call, *args, **kwargs):
    """Give the kind and text of an error, or the number of things that came."""
    try:
        with call(*args, **kwargs) as got:
            return "", len(got)
    except BaseException as error:
        return type(error).__name__, str(error)


def works():
    return report(meshpar.get_tensors_parallel, torch.ones(2), [0, 1])


RANKS = {
    "bool": [0, True],
    "float": [0, 1.0],
    "text": "01",
    "a number": 3,
    "none": None,
    "tensors twice": [torch.tensor(0), torch.tensor(1), torch.tensor(1)],
    "negative": [0, -1],
}


def pass_odd_ranks(kind):
    return report(meshpar.get_tensors_parallel, torch.ones(2), RANKS[kind]), works()


@pytest.mark.parametrize("kind", RANKS)
def test_ranks_that_are_none(kind):
    (first, after), (second, after_too) = run_ranks(pass_odd_ranks, 2, kind)
    assert first == second
    assert first[0] == "SpecError"
    assert ("twice" if kind == "tensors twice" else "not a rank of this job of 2") in first[1]
    assert (after, after_too) == (("", 2), ("", 0))


def pass_integers():
    kinds = [np.array([0, 1]), torch.tensor([0, 1]), range(2), (r for r in (0, 1)), [np.int8(0), torch.tensor(1)]]
    return [report(meshpar.get_tensors_parallel, torch.ones(2), ranks) for ranks in kinds]


def test_ranks_of_any_kind_of_integer():
    assert run_ranks(pass_integers, 2) == [[("", 2)] * 5, [("", 0)] * 5]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), None, "60"])
def test_a_time_that_is_none(timeout_s):
    with (
        pytest.raises(meshpar.SpecError, match="timeout_s="),
        meshpar.get_tensors_parallel(torch.ones(1), [0], timeout_s=timeout_s),
    ):
        pass


def pass_by_a_group(others_call):
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 2 and not others_call:
        return None
    return report(
        meshpar.get_tensors_parallel, torch.ones(2), [0, 1] if rank < 2 or others_call != "in" else [1, 2], group
    )


def test_a_rank_that_the_group_was_not_made_of_may_call_or_not():
    assert run_ranks(pass_by_a_group, 3, "") == [("", 2), ("", 0), None]
    assert run_ranks(pass_by_a_group, 3, "out") == [("", 2), ("", 0), ("", 0)]
    name, text = run_ranks(pass_by_a_group, 3, "in")[2]
    assert (name, "2: not in the group" in text) == ("SpecError", True)


ODD = {
    "expanded": lambda: torch.ones(1, 3).expand(1000, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "no numbers": lambda: torch.ones(0, 3)[:, ::2],
    "in a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "an array": lambda: np.ones(3),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore:.*quantiz")
def pass_odd_tensor(kind):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about kinds of tensors that are not ready
        mine = ODD[kind]() if dist.get_rank() else torch.ones(1)
    said = report(meshpar.get_tensors_parallel, mine, [0, 1])
    return said, works()


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_come_whole_or_are_refused_on_all(kind):
    (first, after), (second, _) = run_ranks(pass_odd_tensor, 2, kind)
    if kind in ("expanded", "transposed", "no numbers", "in a graph"):
        assert (first, second) == (("", 2), ("", 0))
    else:
        assert first == second
        assert first[0] == "SpecError"
        assert "a dense torch.Tensor" in first[1]
    assert after == ("", 2)


def interrupt(where, number):
    """Ctrl-C on one rank, in a part of the call; the process goes on, as a notebook does."""
    rank, start = dist.get_rank(), time.monotonic()

    def ctrl_c(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == number:
            patch.setattr(gathers, {"pack": "pack", "write": "write_segment", "read": "read_segment"}[where], ctrl_c)
        said = report(meshpar.get_tensors_parallel, torch.ones(2), [0, 1, 2])
    return said, time.monotonic() - start, works() if rank < 2 else None


@pytest.mark.parametrize(("where", "number"), [("pack", 0), ("pack", 2), ("write", 1), ("read", 0)])
def test_an_interrupt_on_one_rank_is_an_error_on_the_others_at_once(where, number):
    for rank, (said, seconds, after) in enumerate(run_ranks(interrupt, 3, where, number)):
        assert said[0] == ("KeyboardInterrupt" if rank == number else "ShareError")
        assert rank == number or f"rank {number}: KeyboardInterrupt" in said[1]
        assert seconds < 60
        assert after == (None if rank == 2 else ("", 0 if rank else 2))


def pass_from_two_threads():
    """Which of two threads comes first may differ between ranks: their data would change places without a word."""
    seen, ready = [], threading.Event()

    def second():
        ready.wait()
        seen.append(report(meshpar.get_tensors_parallel, torch.ones(2), [0, 1]))

    other = threading.Thread(target=second)
    other.start()
    with contextlib.suppress(meshpar.MeshparError), meshpar.get_tensors_parallel(torch.ones(2), [0, 1]):
        ready.set()
        other.join()
    return seen, works()


def test_calls_of_two_threads_are_refused():
    for rank, (seen, after) in enumerate(run_ranks(pass_from_two_threads, 2)):
        assert [name for name, _ in seen] == ["SpecError"]
        assert "another thread" in seen[0][1]
        assert after == ("", 0 if rank else 2)


def fork_in_the_block(how):
    """A child of the reader leaves the block, well or not; it is no rank, and has nothing to say."""
    pid, code = 0, None
    with contextlib.suppress(KeyError), meshpar.get_tensors_parallel(torch.ones(2), [0, 1]) as got:
        total = sum(float(x.sum()) for x in got)
        pid = os.fork()
        if pid == 0 and how == "raises":
            raise KeyError
        assert pid == 0 or total == (0 if dist.get_rank() else 4)
        if pid:
            _, code = os.waitpid(pid, 0)
    if pid == 0:
        os._exit(0)
    return code, works()


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_fork_in_the_block_has_no_part_in_it(how):
    assert run_ranks(fork_in_the_block, 2, how) == [(0, ("", 2)), (0, ("", 0))]


def pass_odd_folder(path):
    return report(meshpar.get_configs_parallel, {"a": 1}, [0, 1], None, path if dist.get_rank() else None), works()


@pytest.mark.parametrize("path", [5, b"/tmp", "", "/tmp/" + "é" * 3000, "/tmp/a\0b", "/tmp/\udcff"])
def test_a_folder_that_is_none_on_one_rank_is_an_error_on_both(path):
    (first, after), (second, _) = run_ranks(pass_odd_folder, 2, path)
    assert first == second
    assert first[0] == "SpecError"
    assert after == ("", 2)


def pass_large_configs():
    rank = dist.get_rank()
    deep = {}
    for _ in range(5000):
        deep = {"d": deep}
    wide = {f"name {i}": [i, float(i), (str(i),)] for i in range(20_000)}
    loop = []
    loop.append(loop)
    said = [report(meshpar.get_configs_parallel, what if rank else None, [0, 1]) for what in (wide, deep, loop)]
    odd = {"é\n\0" * 2000: object()}
    return [*said, report(meshpar.get_configs_parallel, odd if rank else None, [0, 1]), works()]


def test_huge_deep_endless_and_odd_configs():
    first, second = run_ranks(pass_large_configs, 2)
    assert (first[0], second[0]) == (("", 2), ("", 0))
    for a, b in zip(first[1:4], second[1:4], strict=True):
        assert a == b
        assert a[0] in ("ShareError", "SpecError")
    assert first[4] == ("", 2)


def test_a_note_of_many_ranks_fits():
    many = channel.Note(facts=gathers._shortened(str(list(range(100_000)))))
    assert len(many["facts"]) < 600
    assert gathers._shortened("x" * 600) != gathers._shortened("x" * 601)
