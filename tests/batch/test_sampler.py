"""DataSampler: the global batches of one process on any mesh, resumed anywhere, and loops that no rank leaves alone."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks, shutdown_pool
from meshpar.testing.meshes import ranks_of

MESHES = ("data=2,domain=2", "data=4,domain=1", "data=3,domain=1")


class Fields(Dataset):
    """A dataset of small fields, each known by its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if not 0 <= index < self.length:
            raise IndexError(index)
        x = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True).sin(), "index": index, "name": f"sample {index}"}


def sampler_of(spec: str, length: int, batch_size: int, **options):
    return meshpar.DataSampler(Fields(length), mesh_for(spec), batch_size=batch_size, **options)


def orders(spec: str, length: int, batch_size: int, **options):
    """Two epochs: this rank's parts, the global batches, and the coordinate along data."""
    sampler = sampler_of(spec, length, batch_size, **options)
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found.append((list(sampler), list(sampler.global_batches()), len(sampler)))
    return meshpar.coordinate(mesh_for(spec), "data"), found


@pytest.mark.parametrize("spec", MESHES)
@pytest.mark.parametrize(("length", "batch_size"), [(24, 12), (31, 12), (40, 16)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_two_epochs_are_the_global_batches_of_one_process(spec, length, batch_size, shuffle):
    ((_, alone),) = run_ranks(orders, 1, "data=1", length, batch_size, shuffle=shuffle)
    answers = run_ranks(orders, ranks_of(spec), spec, length, batch_size, shuffle=shuffle)
    for epoch in range(2):
        expected = alone[epoch][0]
        assert sorted(itertools.chain(*expected)) == list(range(length))
        parts = {}
        for data, found in answers:
            own, batches, count = found[epoch]
            assert batches == expected
            assert count == len(own) == len(expected)
            assert parts.setdefault(data, own) == own  # all ranks of one data coordinate
        for i, batch in enumerate(expected):
            assert [index for data in sorted(parts) for index in parts[data][i]] == batch
    assert (alone[0][0] != alone[1][0]) == shuffle


def resumed(spec: str, state, batch_size: int, num_workers: int):
    """Take what is left of two epochs from a state; or take three batches, and give the state then."""
    sampler = sampler_of(spec, 30, batch_size, seed=1 if state else 5)
    if state:
        sampler.load_state_dict(state)
    loader = DataLoader(Fields(30), batch_sampler=sampler, num_workers=num_workers)
    seen = []
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        assert len(loader) == len(sampler)
        for batch in sampler.follow(loader):
            seen.append((epoch, batch["index"].tolist()))
            if not state and len(seen) == 3:
                return seen, sampler.state_dict()
    return seen, sampler.state_dict()


def merged(answers, spec: str):
    """Put the parts of the data ranks together again."""
    step = ranks_of(spec) // len({tuple(map(str, a[0])) for a in answers})
    rows = [answer[0] for answer in answers][:: max(step, 1)]
    return [(steps[0][0], [i for _, part in steps for i in part]) for steps in zip(*rows, strict=True)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_in_the_middle_of_an_epoch_on_other_data_ranks(num_workers):
    first, state = (
        merged(saved := run_ranks(resumed, 4, "data=2,domain=2", None, 6, num_workers), "data=2,domain=2"),
        saved[0][1],
    )
    assert state["position"] == 18
    assert all(answer[1] == state for answer in saved)
    ((whole, _),) = run_ranks(resumed, 1, "data=1", {**state, "position": 0}, 6, 0)
    for spec in ("data=3,domain=1", "data=1,domain=2"):
        answers = run_ranks(resumed, ranks_of(spec), spec, state, 6, num_workers)
        assert first + merged(answers, spec) == whole
        assert {(a[1]["epoch"], a[1]["position"]) for a in answers} == {(2, 0)}


def test_a_state_goes_on_with_another_batch_size():
    ((rest, _),) = run_ranks(
        resumed, 1, "data=1", {"epoch": 1, "position": 18, "length": 30, "seed": 5, "shuffle": True}, 4, 0
    )
    ((whole, _),) = run_ranks(
        resumed, 1, "data=1", {"epoch": 1, "position": 0, "length": 30, "seed": 5, "shuffle": True}, 6, 0
    )
    assert list(itertools.chain(*[b for _, b in rest])) == list(itertools.chain(*[b for _, b in whole]))[18:]


def uncounted() -> list[str]:
    sampler = sampler_of("data=2", 30, 6)
    told = []
    next(iter(DataLoader(Fields(30), batch_sampler=sampler)))
    calls = [
        sampler.state_dict,
        lambda: next(sampler.follow(DataLoader(Fields(30), batch_size=3))),
        lambda: sampler.load_state_dict({"epoch": 0, "position": 0, "length": 31, "seed": 0, "shuffle": True}),
        lambda: list(sampler.follow([1, 2])),
        lambda: list(sampler.follow(range(9))),
        lambda: sampler_of("data=2", 30, 0),
        lambda: meshpar.DataSampler(iter([1]), mesh_for("data=2"), batch_size=2),
        lambda: sampler_of("data=2", 30 + dist.get_rank(), 6),
        lambda: sampler_of("data=2", 30, 6, seed=dist.get_rank()),
    ]
    for call in calls:
        with pytest.raises(meshpar.SpecError) as caught:
            call()
        told.append(str(caught.value))
    sampler.set_epoch(1)
    assert sampler.state_dict()["epoch"] == 1
    return told


def test_what_cannot_be_right_is_refused_on_all_ranks():
    parts = (
        "nobody counted",
        "another sampler",
        "length 31",
        "2 batches",
        "more than 3",
        "batch_size=0",
        "without a length",
    )
    for told in run_ranks(uncounted, 2):
        for text, part in zip(told, [*parts, "dataset length=31 on rank 1", "seed=1 on rank 1"], strict=True):
            assert part in text
            assert all(word in text for word in ("got:", "needs:", "fix:"))


# ---- the last batch


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 1, 3, padding=1),
    ]
    return nn.Sequential(*layers).double()


def loss_curve(spec: str, length: int, batch_size: int, num_workers: int = 0, **options) -> list[float]:
    """Train through a DataLoader for two epochs."""
    sampler = sampler_of(spec, length, batch_size, **options)
    model = meshpar.parallelize(net(), sampler.mesh, check_inputs=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Fields(length)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=meshpar.collate_or_empty(data), num_workers=num_workers)
    losses = []
    for _ in range(2):
        for batch in sampler.follow(loader):
            assert len(batch["name"]) == len(batch["index"]) == len(batch["x"])
            placed = meshpar.shard_batch(batch, sampler.mesh)
            with meshpar.spmd():
                loss = F.mse_loss(model(batch["x"]), placed["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with meshpar.spmd():
                losses.append(loss.item())
    return losses


@pytest.mark.parametrize("spec", MESHES)
@pytest.mark.parametrize(("length", "batch_size"), [(23, 8), (17, 5), (13, 12)])
def test_loss_curve_with_a_smaller_last_batch_equals_one_process(spec, length, batch_size):
    """Last batches of 7, 2 and 1 samples, and batches of 5 over 4 ranks: smaller parts, and empty ones."""
    (alone,) = run_ranks(loss_curve, 1, "data=1", length, batch_size)
    answers = run_ranks(loss_curve, ranks_of(spec), spec, length, batch_size, empty_parts="yield")
    assert len(alone) == 2 * -(-length // batch_size)
    for losses in answers:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-10, atol=1e-12)


def test_loss_curve_with_workers_equals_one_process():
    (alone,) = run_ranks(loss_curve, 1, "data=1", 11, 4)
    for losses in run_ranks(loss_curve, 2, "data=2", 11, 4, 2):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "length", "batch_size", "parts"),
    [
        ("data=4", 17, 8, "1 samples over data ranks: \\[1, 0, 0, 0\\]"),
        ("data=4", 20, 5, "5 samples over data ranks: \\[2, 2, 1, 0\\]"),
        ("data=3", 9, 8, "\\[1, 0, 0\\]"),
        ("data=2,domain=2", 9, 8, "\\[1, 0\\]"),
    ],
)
def test_a_batch_that_leaves_a_rank_without_samples_is_refused_on_all(spec, length, batch_size, parts):
    with pytest.raises(RankError, match=parts) as caught:
        run_ranks(sampler_of, ranks_of(spec), spec, length, batch_size)
    assert len(caught.value.exceptions) == ranks_of(spec)


def test_drop_last_leaves_out_the_smaller_batch():
    for _, found in run_ranks(orders, 4, "data=4", 17, 8, drop_last=True):
        assert [len(part) for part in found[0][0]] == [2, 2]


def wrong_parts(sizes: tuple[int, ...], where: str) -> None:
    """Train with parts that no sampler of ours gives."""
    mesh = mesh_for(where)
    model = meshpar.parallelize(net(), mesh)
    x = torch.zeros(sizes[dist.get_rank()], 2, 5, 4, dtype=torch.float64)
    model(x)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("data=4,domain=1", (2, 2, 0, 1)),
        ("data=3,domain=1", (1, 2, 2)),
        ("data=2,domain=2", (2, 2, 1, 2)),  # ranks of one data coordinate have other numbers
        ("data=2,domain=2", (2, 1, 2, 2)),
    ],
)
def test_parts_that_make_no_batch_are_refused_on_all_ranks(spec, sizes):
    with pytest.raises(RankError, match="parts do not make one batch") as caught:
        run_ranks(wrong_parts, ranks_of(spec), sizes, spec)
    assert len(caught.value.exceptions) == ranks_of(spec)
    assert all(isinstance(error, meshpar.SpecError) for error in caught.value.exceptions.values())


# ---- loops that end at different times


def one_runs_out(spec: str, kind: str):
    mesh = mesh_for(spec)
    short = meshpar.coordinate(mesh, "data") == 1

    def batches():
        for i in range(3):
            if short and i == 2 and kind == "fails":
                text = "unreadable"
                raise OSError(text)
            if not (short and i == 2):
                yield i

    taken = []
    try:
        for i in meshpar.in_step(batches(), mesh):
            taken.append(i)
    except (meshpar.SpecError, meshpar.PeerError, OSError) as error:
        return taken, type(error).__name__, str(error)
    return taken, "", ""


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=3"])
def test_a_rank_that_runs_out_of_batches_is_an_error_on_all_ranks(spec):
    short = [2, 3] if "domain" in spec else [1]
    for taken, kind, text in run_ranks(one_runs_out, ranks_of(spec), spec, "ends"):
        assert (taken, kind) == ([0, 1], "SpecError")
        assert f"after 2 batches rank(s) {short} had none left" in text


def test_a_loader_that_fails_on_one_rank_is_an_error_on_all_ranks():
    answers = run_ranks(one_runs_out, 3, "data=3", "fails")
    assert [(taken, kind) for taken, kind, _ in answers] == [
        ([0, 1], "PeerError"),
        ([0, 1], "OSError"),
        ([0, 1], "PeerError"),
    ]
    assert "rank(s) [1]" in answers[0][2]


def never_comes(spec: str):
    """One rank ends its loop early, without `in_step`; the others wait in a group with a short timeout."""
    mesh = meshpar.make_mesh(spec, "cpu")
    group = mesh.get_group("data_domain")
    group._get_backend(torch.device("cpu"))._set_default_timeout(
        torch.distributed.distributed_c10d.timedelta(seconds=1)
    )
    begin = time.monotonic()
    try:
        for _ in range(3 - (dist.get_rank() == 1)):
            meshpar.shard_batch(torch.zeros(1, 1, 2, 2), mesh)
        time.sleep(3)
    except meshpar.PeerError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group():
    try:
        (text, seconds), (ended, _) = run_ranks(never_comes, 2, "data=2")
    finally:
        shutdown_pool()  # its groups have another timeout now
    assert "not all ranks came" in text
    assert "in_step" in text
    assert seconds < 20
    assert ended == ""
