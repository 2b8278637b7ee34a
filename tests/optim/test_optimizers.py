"""Optimizers in all their forms, schedulers, the gradient scaler and averages are those of one process."""

from __future__ import annotations

import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks

FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
OPTIMIZERS = {
    "AdamW": {"amsgrad": True},
    "Adam": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
}
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")


class Net(nn.Module):
    """A 0-d parameter, which stays whole on every rank, stands first; then shards, empty ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)  # before a norm its gradient is mere rounding
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))) * self.scale)


def pair(spec: str, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    reference = Net().to(dtype)
    mesh = mesh_for(spec)
    model = meshpar.parallelize(reference, mesh)
    x = torch.randn(4, 2, 7, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return model, reference, x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")], x


def losses(model: nn.Module, reference: nn.Module, own: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    with meshpar.spmd():
        ours = model(own).square().mean()
    return ours, reference(x).square().mean()


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-9) -> None:
    ours = meshpar.gather(model.state_dict())
    for name, value in reference.state_dict().items():
        if "num_batches" in name:
            continue  # torch averages and truncates it; we copy it
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)


def trained(spec: str, name: str, form: str) -> None:
    model, reference, own, x = pair(spec)
    make = functools.partial(getattr(torch.optim, name), lr=1e-2, **OPTIMIZERS[name], **FORMS[form])
    optimizers = [make(m.parameters()) for m in (model, reference)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=6, cycle_momentum=False) for o in optimizers]
    for step in range(5):
        if step == 3:  # the state goes through a file of this rank and comes back
            file = io.BytesIO()
            torch.save([schedulers[0].state_dict(), [p.detach().clone() for p in model.parameters()]], file)
            file.seek(0)
            schedulers[0].load_state_dict(torch.load(file, weights_only=False)[0])
            optimizers[0].load_state_dict(optimizers[0].state_dict())
        for optimizer, loss in zip(optimizers, losses(model, reference, own, x), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(model, reference)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("name", "form"), [(n, f) for n in OPTIMIZERS for f in FORMS if f != "fused" or n in FUSED], ids=str
)
def test_property_every_optimizer_in_every_form(name, form):
    run_ranks(trained, 4, "data=2,domain=2", name, form)


@pytest.mark.parametrize(("name", "form"), [("AdamW", "foreach"), ("SGD", "fused")])
def test_foreach_and_fused(name, form):
    run_ranks(trained, 4, "data=1,domain=4", name, form)


@functools.cache
def plane() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def on_mixed_meshes(name: str, form: str) -> None:
    """Plain parameters, and DTensors on one and two axes and on a part of the ranks, in one group of one optimizer."""
    two = plane()
    lies = [None, (two["a"], [Shard(0)]), (two, [Shard(0), Shard(1)]), None, (two, [Replicate(), Shard(0)])]
    lies += [(two, [Replicate(), Replicate()]), (two["b"], [Shard(1)])]
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in lies]
    theirs = [nn.Parameter(v.clone()) for v in values]
    ours = [nn.Parameter(v if lie is None else laid(v, lie)) for v, lie in zip(values, lies, strict=True)]
    make = functools.partial(getattr(torch.optim, name), lr=1e-2, **OPTIMIZERS[name], **FORMS[form])
    optimizers = [make(ours), make(theirs)]
    for _ in range(3):
        for p, q, lie in zip(ours, theirs, lies, strict=True):
            q.grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
            p.grad = q.grad.clone() if lie is None else laid(q.grad, lie)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole.detach(), q.detach(), rtol=1e-12, atol=1e-12)


def laid(value: Tensor, lie) -> DTensor:
    return distribute_tensor(value, *lie, src_data_rank=None)


def mixed(names: list[str]) -> None:
    mesh_for("data=2,domain=2")
    for name in names:
        for form in FORMS:
            on_mixed_meshes(name, form)


def test_one_optimizer_for_parameters_on_mixed_meshes_and_plain_ones():
    run_ranks(mixed, 4, list(FUSED))


def scaled(spec: str, form: str, bad: int | None) -> tuple[float, bool]:
    """Take a step with a scaler; on one rank one number of a gradient overflows. Give the new scale; did it step?"""
    model, reference, own, x = pair(spec, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **FORMS[form])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    other, other_scaler = (
        torch.optim.AdamW(reference.parameters(), lr=1e-2),
        torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )
    ours, theirs = losses(model, reference, own, x)
    scaler.scale(ours).backward()
    other_scaler.scale(theirs).backward()
    if dist.get_rank() == bad:
        piece = model.conv.weight.grad.to_local()
        assert piece.numel()
        piece.view(-1)[-1] = float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    meshpar.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        other_scaler.step(other)
        assert_same(model, reference, 1e-5)
    same = [torch.equal(a.to_local(), b.detach().to_local()) for a, b in zip(before, model.parameters(), strict=True)]
    return scaler.get_scale(), not all(same)


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_an_overflow_on_one_rank_is_one_on_all(form):
    """The first gradient is whole on every rank: torch would look at that one to find out whom to ask."""
    for bad in (0, 2):
        assert run_ranks(scaled, 4, "data=2,domain=2", form, bad) == [(512.0, False)] * 4
    assert run_ranks(scaled, 4, "data=2,domain=2", form, None) == [(1024.0, True)] * 4


def overflow_in_a_mix(bad: int) -> float:
    """A plain parameter, one along each of two axes: an overflow along one of them is known along the other."""
    mesh_for("data=2,domain=2")
    two = plane()
    held = [nn.Parameter(torch.zeros(2))]
    held += [nn.Parameter(laid(torch.zeros(2), (two[a], [Shard(0)]))) for a in "ab"]
    for p in held:
        p.grad = torch.ones_like(p)
    if dist.get_rank() == bad:
        held[1].grad.to_local().fill_(float("nan"))
    optimizer = torch.optim.SGD(held, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_an_overflow_in_a_mix_of_meshes_is_agreed():
    for bad in (0, 3):
        assert run_ranks(overflow_in_a_mix, 4, bad) == [2.0] * 4


def averaged(spec: str, *, use_buffers: bool) -> None:
    model, reference, own, x = pair(spec)
    ema = meshpar.EMA(model, 0.8, use_buffers=use_buffers)
    by_hand = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    theirs = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=use_buffers)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for _ in range(4):
        for optimizer, loss in zip(optimizers, losses(model, reference, own, x), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ema.update()
        theirs.update_parameters(reference)
        with torch.no_grad():
            for n, p in model.named_parameters():
                by_hand[n].mul_(0.5).add_(p, alpha=0.5)
                by_hand[n].lerp_(p, 0.1)
            for n, p in reference.named_parameters():
                start[n].mul_(0.5).add_(p, alpha=0.5)
                start[n].lerp_(p, 0.1)
    for n, value in start.items():
        torch.testing.assert_close(by_hand[n].full_tensor(), value, rtol=1e-9, atol=1e-9)
    trained_values = {n: meshpar.gather(p.detach()).clone() for n, p in model.named_parameters()}
    with ema.applied():
        assert_same(model, theirs.module)
        model.eval()
        theirs.module.eval()
        found = meshpar.gather(model(own)).detach()
    torch.testing.assert_close(found, theirs(x).detach(), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(meshpar.gather(p.detach()), trained_values[n]) for n, p in model.named_parameters())

    fresh = meshpar.EMA(model, 0.8)
    for state in (ema.state_dict(), meshpar.gather(ema.state_dict())):
        fresh.load_state_dict(state)
        assert fresh.num_updates == 4
        assert all(torch.equal(a, fresh.averages[n]) for n, a in ema.averages.items())
    assert list(ema.state_dict()["averages"]) == [
        n for n, _ in [*reference.named_parameters(), *reference.named_buffers()]
    ]


@pytest.mark.parametrize("use_buffers", [True, False])
def test_the_moving_average_is_that_of_one_process(use_buffers):
    run_ranks(averaged, 4, "data=2,domain=2", use_buffers=use_buffers)


def wrong_average(case: str) -> None:
    if case == "decay":
        meshpar.EMA(nn.Linear(1, 1), 1.5)
    ema = meshpar.EMA(nn.Linear(1, 1))
    state = ema.state_dict()
    state["averages"] = {"weight": torch.zeros(2, 1), "gain": torch.zeros(1)}
    ema.load_state_dict(state)


def test_what_does_not_fit_an_average_is_named():
    for case, text in (
        ("decay", "decay=1.5"),
        ("names", r"bias: missing\n.*gain: not in the model\n.*\(2, 1\) for \(1, 1\)"),
    ):
        with pytest.raises(RankError, match=text):
            run_ranks(wrong_average, 1, case)
