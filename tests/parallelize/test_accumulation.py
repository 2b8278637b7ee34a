"""Gradient accumulation: k small batches give the gradients of a large one, and only the last one communicates them."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import meshpar
from meshpar.testing import RankError, mesh_for, run_ranks

MESHES = ("data=2,domain=2", "data=1,domain=4")


class Net(nn.Module):
    """Sharded parameters, a 0-d one, one of another dtype, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1).double() for _ in range(2)])
        self.shift = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float32))
        self.gate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.rare = nn.Conv2d(4, 4, 1).double()

    def forward(self, x: Tensor, *, rare: bool = False) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale + self.shift.double()
        return self.rare(x) * self.gate if rare else x


def setup(spec: str, num_steps: int = 1, **options):
    mesh = mesh_for(spec)
    torch.manual_seed(dist.get_rank())
    net = Net()
    model = meshpar.parallelize(net, mesh, on_gather="error", **options)
    reference = Net()
    reference.load_state_dict(meshpar.gather(model.state_dict()))
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(4, 4, 7, 5, generator=generator, dtype=torch.float64) for _ in range(3 * num_steps)]
    own = [x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")] for x in batches]
    return model, reference, batches, own


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            tolerance = 1e-5 if q.dtype is torch.float32 else 1e-11
            torch.testing.assert_close(meshpar.gather(p.grad), q.grad, rtol=tolerance, atol=tolerance, msg=name)


def backward(model: nn.Module, x: Tensor, **options) -> None:
    with meshpar.spmd():
        loss = model(x, **options).square().mean() / 3
    loss.backward()


def accumulated(spec: str, way: str, rare: tuple[bool, bool, bool], **options) -> list[dict[str, int]]:
    """Run two steps of three small batches; give the collectives of each backward that are not between rows."""
    model, reference, batches, own = setup(spec, 2, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    counts: list[dict[str, int]] = []
    for step in range(2):
        with contextlib.ExitStack() as stack:
            if way == "one block":
                stack.enter_context(meshpar.no_sync(model))
            for i in range(3):
                if i == 2:
                    stack.close()
                with contextlib.ExitStack() as inner:
                    for _ in range({"one block": 0, "nested": 2}.get(way, 1) if i < 2 else 0):
                        inner.enter_context(meshpar.no_sync(model))
                    with meshpar.spmd():
                        loss = model(own[3 * step + i], rare=rare[i]).square().mean() / 3
                    if way == "forward inside":
                        inner.close()
                    with CommDebugMode() as comm, meshpar.record() as log:
                        loss.backward()
                backward(reference, batches[3 * step + i], rare=rare[i])
                found = {str(k): n for k, n in comm.get_comm_counts().items() if "gather" not in str(k)}
                counts.append({**found, "ours": len(log.select(kind="parameters", backward=True))})
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = meshpar.gather(model.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5 if value.dtype is torch.float32 else 1e-8, atol=1e-8)
    return counts


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("way", ["one block", "a block each", "nested"])
def test_property_of_all_ways(mesh, way):
    check_counts(mesh, way)


def test_three_small_batches_are_one_large_one_and_the_last_communicates():
    check_counts("data=2,domain=2", "one block")


def check_counts(mesh: str, way: str) -> None:
    for counts in run_ranks(accumulated, 4, mesh, way, (True, True, True)):
        for step in (counts[:3], counts[3:]):
            for waiting in step[:2]:
                assert "c10d._reduce_scatter_base_" not in waiting
                assert waiting["ours"] == 0
            assert step[2]["c10d._reduce_scatter_base_"] == 3  # two blocks and the root
            assert step[2]["ours"] == 5  # scale and shift in each block, gate


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,domain=2", {"data": "ddp"}),
        ("replica=2,data=2", {"data": "hsdp"}),
        ("data=2,domain=1,tensor=2", {"tensor_plan": {"blocks.0": "colwise", "blocks.1": "rowwise"}}),
    ],
)
def test_property_in_every_data_mode_and_over_tensor(mesh, options):
    for counts in run_ranks(accumulated, 4, mesh, "a block each", (True, False, True), **options):
        for step in (counts[:3], counts[3:]):
            assert [c["ours"] > 0 for c in step] == [False, False, True]
            assert all(not {"c10d._reduce_scatter_base_"} & set(c) for c in step[:2])
            assert sum(step[0].values()) == sum(step[1].values()) < sum(step[2].values())


@pytest.mark.parametrize("rare", [(True, False, False)])
def test_parameters_that_the_last_batch_leaves_out_are_summed_too(rare):
    for counts in run_ranks(accumulated, 4, "data=2,domain=2", "a block each", rare):
        assert counts[0]["ours"] == counts[1]["ours"] == 0


def test_a_backward_outside_of_the_block_sums_what_its_forward_inside_left():
    run_ranks(accumulated, 4, "data=2,domain=2", "forward inside", (True, True, True))


def every_batch_communicates() -> None:
    model, reference, batches, own = setup("data=2,domain=2")
    for x, y in zip(batches, own, strict=True):
        backward(reference, x, rare=True)
        backward(model, y, rare=True)
    assert_same_gradients(model, reference)
    with meshpar.no_sync(model), torch.no_grad():  # an evaluation in between
        model(own[0])
    backward(model, own[0])
    backward(reference, batches[0])
    assert_same_gradients(model, reference)


def test_property_without_the_block_each_backward_adds_its_sum():
    run_ranks(every_batch_communicates, 4)


def with_checkpointing() -> None:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    reference = Net()
    model = meshpar.parallelize(reference, mesh, checkpoint=lambda m: isinstance(m, nn.Conv2d))
    x = torch.randn(4, 4, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = x.chunk(2)[meshpar.coordinate(mesh, "data")]
    for last in (False, True):
        with contextlib.nullcontext() if last else meshpar.no_sync(model):
            backward(model, own, rare=True)
        backward(reference, x, rare=True)
    assert_same_gradients(model, reference)


def test_property_it_goes_with_checkpointing():
    run_ranks(with_checkpointing, 4)


def on_one_rank() -> None:
    model, reference, batches, _ = setup("data=1")
    for i, x in enumerate(batches):
        with contextlib.nullcontext() if i == 2 else meshpar.no_sync(model):
            backward(model, x, rare=True)
        backward(reference, x, rare=True)
    assert_same_gradients(model, reference)


def test_on_one_rank():
    run_ranks(on_one_rank, 1)


def refused() -> None:
    with meshpar.no_sync(nn.Linear(1, 1)):
        pass


def test_a_model_that_is_not_parallel_is_refused():
    with pytest.raises(RankError, match="got:    a Linear") as caught:
        run_ranks(refused, 2)
    assert all(isinstance(e, meshpar.SpecError) for e in caught.value.exceptions.values())
