"""What else a run has: the newest N, saves in the background, generators, a sampler, further values."""

import random
import threading

import numpy as np
import pytest
import runs
import torch
from test_hostile import Position
from torch import nn

import meshpar
from meshpar.checkpoint import folders
from meshpar.testing import mesh_for, run_ranks

SPEC = "data=2,domain=2"


def test_names_and_numbers(tmp_path):
    net = nn.Linear(2, 1)
    for step in (10, 20, 30):
        saving = meshpar.save_checkpoint(tmp_path, net, step=step)
        assert saving.done()
    assert saving.result() == tmp_path / "000003-step-30"
    # Who goes back and trains on keeps what was saved last, not what has the highest step; and a step twice.
    meshpar.save_checkpoint(tmp_path, net, step=11, keep=2)
    assert [(s.number, s.step) for s in meshpar.list_checkpoints(tmp_path)] == [(3, 30), (4, 11)]
    meshpar.save_checkpoint(tmp_path, net, step=11, keep=2)
    assert [(s.number, s.step) for s in meshpar.list_checkpoints(tmp_path)] == [(4, 11), (5, 11)]
    assert meshpar.latest_checkpoint(tmp_path).path.name == "000005-step-11"
    assert meshpar.latest_checkpoint(tmp_path / "nowhere") is None
    assert meshpar.load_checkpoint(str(tmp_path), net, step=11).path.name == "000005-step-11"
    # What others have put there stays; what killed saves have left goes.
    (tmp_path / "notes").mkdir()
    (tmp_path / ".saving-000009-step-1").mkdir()
    (tmp_path / ".removing-000001-step-1").mkdir()
    meshpar.save_checkpoint(tmp_path, net, step=12, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000010-step-12", "notes"]


def test_old_ones_go_only_once_the_new_one_is_complete(tmp_path, monkeypatch):
    net = nn.Linear(2, 1)
    meshpar.save_checkpoint(tmp_path, net, step=1, keep=1)
    seen = []
    prune, commit = folders.prune, folders.commit
    monkeypatch.setattr(
        folders, "commit", lambda *a: (seen.append(meshpar.latest_checkpoint(tmp_path).step), commit(*a))
    )
    monkeypatch.setattr(folders, "prune", lambda *a: (seen.append(meshpar.latest_checkpoint(tmp_path).step), prune(*a)))
    meshpar.save_checkpoint(tmp_path, net, step=2, keep=1)
    assert seen == [1, 2]
    assert [s.step for s in meshpar.list_checkpoints(tmp_path)] == [2]


def in_the_background(folder: str) -> None:
    """The disk is slow; training goes on, and what is saved is what there was."""
    from meshpar.checkpoint import save

    may_write = threading.Event()

    class Slow(save.FileSystemWriter):
        def write_data(self, plan, planner):
            assert may_write.wait(20)
            return super().write_data(plan, planner)

    run = runs.Run(SPEC)
    run.train(2)
    expected = meshpar.full_state_dict(run.model)
    moments = {n: meshpar.shares.whole_of(run.optimizer.state[p]["exp_avg"]).clone() for n, p in _trained(run)}
    extra = {"values": torch.zeros(3), "list": [1]}
    well, save.FileSystemWriter = save.FileSystemWriter, Slow
    try:
        saving = run.save(folder, asynchronous=True, extra=extra)
        assert not saving.done()
        assert meshpar.latest_checkpoint(folder) is None
        run.train(2)
        extra["values"] += 1
        extra["list"].append(2)
        run.scheduler.step()
        assert not saving.done()
        may_write.set()
        assert saving.result().name == "000001-step-2"
    finally:
        may_write.set()
        save.FileSystemWriter = well
    other = runs.Run(SPEC, seed=5)
    loaded = other.load(folder)
    assert torch.equal(loaded.extra["values"], torch.zeros(3))
    assert loaded.extra["list"] == [1]
    found = meshpar.full_state_dict(other.model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for name, p in _trained(other):
        assert torch.equal(meshpar.shares.whole_of(other.optimizer.state[p]["exp_avg"]), moments[name])
    assert other.scheduler.last_epoch == 2
    # The next save waits for this one; so does a load.
    other.save(folder, asynchronous=True)
    other.train(1)
    other.save(folder, asynchronous=True)
    assert other.load(folder).step == 3


def _trained(run: runs.Run):
    return [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]


def test_a_save_in_the_background_does_not_see_later_updates(tmp_path):
    run_ranks(in_the_background, 4, str(tmp_path))


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def seed_by(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def save_generators(spec: str, folder: str, per_rank: bool) -> tuple:
    mesh = mesh_for(spec)
    rank = torch.distributed.get_rank()
    seed_by(rank if per_rank else meshpar.coordinate(mesh, "data"))
    model = meshpar.parallelize(nn.Linear(2, 2), mesh)
    meshpar.save_checkpoint(folder, model, sampler=Position(7), extra={"x": 1.5})
    return draws()


def load_generators(spec: str, folder: str, rng: bool = True) -> tuple:
    seed_by(1234)
    model = meshpar.parallelize(nn.Linear(2, 2), mesh_for(spec)) if spec else nn.Linear(2, 2)
    seed_by(1234)
    position = Position(0)
    loaded = meshpar.load_checkpoint(folder, model, sampler=position, rng=rng)
    assert position.at == 7
    assert loaded.extra == {"x": 1.5}
    return draws()


def test_generators_go_on_on_the_same_mesh_and_follow_data_on_others(tmp_path):
    folder = str(tmp_path / "ranks")
    saved = run_ranks(save_generators, 4, SPEC, folder, True)
    assert len(set(saved)) == 4
    assert run_ranks(load_generators, 4, SPEC, folder) == saved  # every rank its own
    assert len(set(run_ranks(load_generators, 4, SPEC, folder, rng=False))) == 1  # left alone
    folder = str(tmp_path / "data")
    saved = run_ranks(save_generators, 4, SPEC, folder, False)
    assert saved[0] == saved[1] != saved[2] == saved[3]
    # Two data coordinates, as before, over fewer ranks; one; and more than there were.
    assert run_ranks(load_generators, 2, "data=2", folder) == [saved[0], saved[2]]
    assert run_ranks(load_generators, 1, "", folder) == [saved[0]]
    assert run_ranks(load_generators, 3, "data=1,domain=3", folder) == [saved[0]] * 3
    wider = run_ranks(load_generators, 4, "data=4", folder)
    assert wider[:2] == [saved[0], saved[2]]
    assert len(set(wider)) == 4
    assert run_ranks(load_generators, 4, "data=4", folder) == wider


class Average:
    """An average of the parameters, in shards, as an exponential one would be."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.count = 0

    def update(self, value: float) -> None:
        for average in self.values.values():
            average += value
        self.count += 1

    def state_dict(self):
        return {"values": self.values, "more": [self.count, (torch.ones(3) * self.count, "x")]}

    def load_state_dict(self, state):
        for name, value in state["values"].items():
            self.values[name].copy_(value)
        self.count, (self.ones, told) = state["more"]
        assert told == "x"


def average_of(spec: str, folder: str, value: float, asynchronous: bool) -> dict[str, torch.Tensor]:
    run = runs.Run(spec)
    average = Average(run.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if meshpar.latest_checkpoint(folder):
        run.load(folder, objects={"average": average, "scaler": scaler})
        assert torch.equal(average.ones, torch.ones(3) * average.count)
        assert scaler.get_scale() == 4.0
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    average.update(value)
    saving = run.save(folder, objects={"average": average, "scaler": scaler}, asynchronous=asynchronous)
    average.update(100.0)
    saving.result()
    average.update(-100.0)
    with pytest.raises(meshpar.CheckpointError, match="no other was saved"):
        run.load(folder, objects={"other": average})
    return {name: meshpar.shares.whole_of(v) for name, v in average.values.items()}


def test_further_objects_reshard_too(tmp_path):
    first = run_ranks(average_of, 4, SPEC, str(tmp_path), 1.0, True)[0]
    second = run_ranks(average_of, 1, "", str(tmp_path), 2.0, False)[0]
    third = run_ranks(average_of, 2, "data=1,tensor=2", str(tmp_path), 3.0, True)[1]
    for name, value in first.items():
        assert torch.allclose(second[name], value + 2.0, rtol=0, atol=1e-12)
        assert torch.allclose(third[name], value + 5.0, rtol=0, atol=1e-12)


class Remembers(nn.Module):
    """Has extra state, and a hook that counts loads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.told = {"mood": "good"}
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "loads", module.loads + 1))

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


def extra_state(folder: str) -> None:
    mesh = mesh_for(SPEC)
    model = meshpar.parallelize(Remembers(), mesh)
    model.told = {"mood": "better"}
    meshpar.save_checkpoint(folder, model)
    other = meshpar.parallelize(Remembers(), mesh)
    meshpar.load_checkpoint(folder, other)
    assert other.told == {"mood": "better"}
    assert other.loads == 1
    assert meshpar.full_state_dict(other)["_extra_state"] == {"mood": "better"}


def test_extra_state_and_hooks_of_modules(tmp_path):
    run_ranks(extra_state, 4, str(tmp_path))


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on(kind, tmp_path):
    def made():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        return net, optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer, scheduler, num):
        found = []
        for _ in range(num):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    net, optimizer, scheduler = made()
    first = rates(optimizer, scheduler, 2)
    meshpar.save_checkpoint(tmp_path, net, optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 5)
    net, optimizer, scheduler = made()
    meshpar.load_checkpoint(tmp_path, net, optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler, 5) == expected
    assert first != expected
