"""Ranks of one data coordinate must hold the same samples, and an error on all ranks says where they do not."""

import datetime

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of


def batch_of(spec: str) -> dict:
    """Make a batch of everything, the same on the ranks of one data coordinate and on no others."""
    data = meshpar.coordinate(mesh_for(spec), "data")
    x = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(data))
    x[0, 0, 0, 0] = float("nan")
    return {
        "x": x,
        "turned": x.transpose(2, 3),
        "half": x.bfloat16(),
        "complex": torch.complex(x, x).conj(),
        "mask": x > 0,
        "wide": torch.tensor(float(data)).expand(2, 3),
        "none": torch.zeros(0, 3),
        "scale": torch.tensor(1.5),
        "sparse": torch.eye(2).to_sparse(),
        "array": np.arange(3) + data,
        "times": np.array(["2099-01-01", "NaT"], dtype="datetime64[s]"),
        "more": [data, "text", None, datetime.datetime(2099, 1, 1 + data), object()],
    }


def same(spec: str) -> None:
    meshpar.check_same_samples(batch_of(spec), mesh_for(spec))


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=2,tensor=2", "data=4", "data=1"])
def test_the_same_samples_pass(spec):
    run_ranks(same, ranks_of(spec), spec)


CHANGES = {
    "a bit": lambda b: b["x"][1, 0, 4, 3].neg_(),
    "a dtype": lambda b: b.update(x=b["x"].double()),
    "a shape": lambda b: b.update(x=b["x"][:1]),
    "an order": lambda b: b.update(x=b["x"].flip(0)),
    "a string": lambda b: b["more"].__setitem__(1, "other"),
    "a date": lambda b: b["more"].__setitem__(3, datetime.datetime(2000, 1, 1)),
    "a number": lambda b: b.update(array=b["array"] + 1),
    "a time": lambda b: b.update(times=b["times"][::-1]),
    "a sign": lambda b: b.update(complex=b["complex"].resolve_conj().conj()),
    "a kind": lambda b: b.update(scale=1.5),
    "one less": lambda b: b.pop("mask"),
    "one more": lambda b: b.update(extra=torch.zeros(1)),
}


def changed(spec: str, change: str) -> list[str]:
    """Change one thing on the last rank; every rank tells what it hears."""
    batch = batch_of(spec)
    if dist.get_rank() == dist.get_world_size() - 1:
        CHANGES[change](batch)
    with pytest.raises(meshpar.SpecError) as caught:
        meshpar.check_same_samples(batch, mesh_for(spec))
    return [str(caught.value)]


TOLD = {
    "a bit": "data 1, ['x']: rank 3 has other values than rank 2 (Tensor (2, 1, 5, 4) torch.float32)",
    "a dtype": "rank 3 has Tensor (2, 1, 5, 4) torch.float64, rank 2 has Tensor (2, 1, 5, 4) torch.float32",
    "a shape": "rank 3 has Tensor (1, 1, 5, 4) torch.float32, rank 2 has Tensor (2, 1, 5, 4) torch.float32",
    "a string": "data 1, ['more'][1]: rank 3 has other values than rank 2 (str)",
    "a kind": "data 1, ['scale']: rank 3 has float, rank 2 has Tensor () torch.float32",
    "one less": "data 1, ['mask']: rank 3 has none, rank 2 has",
    "one more": "data 1, ['extra']: rank 2 has none, rank 3 has",
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_batch_on_one_rank_is_an_error_on_all_that_names_it(change):
    answers = run_ranks(changed, 4, "data=2,domain=2", change)
    assert len({tuple(a) for a in answers}) == 1
    assert TOLD.get(change, "rank 3 has") in answers[0][0]


def test_ranks_of_the_tensor_axis_are_compared_too():
    for (text,) in run_ranks(changed, 4, "data=1,domain=2,tensor=2", "a bit"):
        assert "data 0, ['x']: rank 3 has other values than rank 0" in text


def seeded_by_rank(check: str) -> None:
    """The mistake that the check is for: noise drawn from a seed of each rank's own."""
    mesh = mesh_for("data=2,domain=2")
    model = meshpar.parallelize(nn.Conv2d(1, 1, 3, padding=1), mesh, check_inputs=check == "inputs")
    x = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    if check == "inputs":
        model(input=x)
    else:
        meshpar.shard_batch((x, "name"), mesh, check=True)


@pytest.mark.parametrize("check", ["inputs", "shard_batch"])
def test_the_check_is_an_option_of_shard_batch_and_parallelize(check):
    with pytest.raises(RankError) as caught:
        run_ranks(seeded_by_rank, 4, check)
    assert len(caught.value.exceptions) == 4
    name = "input" if check == "inputs" else "[0]"
    for error in caught.value.exceptions.values():
        assert f"data 0, {name}: rank 1 has other values than rank 0" in str(error)
        assert f"data 1, {name}: rank 3 has other values than rank 2" in str(error)


def checked_rows(spec: str, kind: str) -> list[int]:
    """With local rows each rank of the domain has its own; what has no rows must be the same."""
    mesh = mesh_for(spec)
    domain = meshpar.coordinate(mesh, "domain")
    x = torch.full((1, 1, 3 - domain, 4), float(domain))
    labels = torch.full((1, 3), float(domain if kind == "wrong" else 7))
    constant = torch.full((3,), float(dist.get_rank() if kind == "constant" else 7))
    layouts = ("data _ domain _", "data _", "_")
    placed = meshpar.shard_batch((x, labels, constant), mesh, layouts, rows="local", check=True)
    return [tuple(p.shape) for p in placed]


def test_local_rows_may_differ_and_nothing_else():
    assert run_ranks(checked_rows, 4, "data=2,domain=2", "right") == [[(2, 1, 5, 4), (2, 3), (3,)]] * 4
    with pytest.raises(RankError, match=r"data 0, \[1\]: rank 1 has other values than rank 0"):
        run_ranks(checked_rows, 4, "data=2,domain=2", "wrong")
    with pytest.raises(RankError, match=r"mesh, \[2\]: rank 1 has other values than rank 0"):
        run_ranks(checked_rows, 4, "data=2,domain=2", "constant")


def no_message_without_the_check(spec: str) -> int:
    mesh = mesh_for(spec)
    with meshpar.record() as log:
        meshpar.shard_batch(batch_of(spec)["x"], mesh)
    return log.num_bytes(kind="batch")


def test_without_the_check_nothing_more_is_sent():
    assert run_ranks(no_message_without_the_check, 2, "data=1,domain=2") == [0, 0]
    assert run_ranks(no_message_without_the_check, 2, "data=2,domain=1") == [256, 256]
