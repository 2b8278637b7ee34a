"""A run goes on as if nothing had happened, on one mesh after the other, and back."""

import itertools

import pytest
import runs
import torch
from torch.distributed.tensor import DTensor

import meshpar
from meshpar import private
from meshpar.shares import whole_of
from meshpar.testing import mesh_for, run_ranks

CHAIN = (
    ("data=2,domain=2", 4, {}),
    ("data=1,domain=4", 4, {}),
    ("data=4,domain=1", 4, {}),
    ("data=1,domain=1,tensor=2", 2, {}),
    ("", 1, {}),
    ("data=2,tensor=2", 4, {}),
    ("data=2,domain=2", 4, {"data": "ddp"}),
    ("replica=2,data=1,domain=2", 4, {"data": "hsdp"}),
    ("data=1,domain=2,tensor=2", 4, {"data": "ddp"}),
    ("data=1,domain=2", 2, {"offload": "cpu"}),
    ("data=2,domain=2", 4, {}),
)


def leg(spec: str, optimizer: str, folder: str, steps: int, asynchronous: bool, told: dict) -> list[float]:
    """Load what there is, train on, save. Weights that were drawn otherwise show that all of them are loaded."""
    run = runs.Run(spec, optimizer, seed=0 if meshpar.latest_checkpoint(folder) is None else 99, **told)
    if meshpar.latest_checkpoint(folder) is not None:
        run.load(folder)
    losses = run.train(steps)
    run.save(folder, keep=2, asynchronous=asynchronous).result()
    return losses


def alone(optimizer: str, steps: int) -> list[float]:
    return runs.Run("", optimizer, seed=0).train(steps)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "adagrad"])
def test_the_loss_curve_goes_on_over_a_chain_of_meshes(optimizer, tmp_path):
    steps = 2
    chain = CHAIN if optimizer == "adamw" else [CHAIN[i] for i in (0, 3, 4)]
    expected = run_ranks(alone, 1, optimizer, steps * len(chain))[0]
    found = []
    for number, (spec, num_ranks, told) in enumerate(chain):
        answers = run_ranks(leg, num_ranks, spec, optimizer, str(tmp_path), steps, number % 2 == 1, told)
        assert all(answer == answers[0] for answer in answers)
        found += answers[0]
    assert len(set(expected)) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) < 1e-9 * abs(b)
    assert [saved.step for saved in meshpar.list_checkpoints(tmp_path)] == [2 * len(chain) - 2, 2 * len(chain)]


def parts_step(spec: str, folder: str, seeds: list[int]) -> dict[str, torch.Tensor]:
    """Steps of AdamW with given gradients, over parameters that the tensor axis splits; save, and tell all numbers."""
    torch.manual_seed(0)
    net = runs.Parts()
    model = runs.split(spec, net) if spec else net
    # foreach ops cannot mix meshes; how clipping and steps do is another matter
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    at = 0
    if meshpar.latest_checkpoint(folder):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        at = meshpar.load_checkpoint(folder, model, optimizer).step
    for seed in seeds:
        runs.set_gradients(model, seed)
        optimizer.step()
    meshpar.save_checkpoint(folder, model, optimizer, step=at + len(seeds))
    found = {name: whole_of(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}.{key}"] = whole_of(value)
            if isinstance(p, DTensor) and key != "step":
                assert isinstance(value, DTensor)
                assert value.placements == p.placements
                assert private.piece_of(value).shape == private.piece_of(p).shape
    return found


def by_themselves(folder: str) -> tuple[float, float]:
    """Each data coordinate trains parameters of its own: those of the first are kept, all of them."""
    with pytest.warns(UserWarning, match="does not add up"):
        run = runs.Run("data=2,domain=2", "sgd", data="none")
    run.train(2)
    mine = {name: whole_of(p).clone() for name, p in run.model.named_parameters()}
    run.save(folder)
    run.load(folder)
    moved = max(float((whole_of(p) - mine[name]).abs().max()) for name, p in run.model.named_parameters())
    return moved, float(sum(whole_of(p).double().square().sum() for p in run.model.parameters()))


def test_parameters_of_one_data_coordinate_are_kept_where_each_has_its_own(tmp_path):
    found = run_ranks(by_themselves, 4, str(tmp_path))
    moved = [one[0] for one in found]
    assert moved[:2] == [0.0, 0.0]
    assert min(moved[2:]) > 0.0
    assert len({one[1] for one in found}) == 1


TENSOR_CHAIN = (("data=2,tensor=2", 4), ("data=1,tensor=4", 4), ("data=4", 4), ("", 1), ("data=1,domain=2,tensor=2", 4))


def test_field_42_weights_and_moments_reshard_over_the_tensor_axis(tmp_path):
    for number, (spec, num_ranks) in enumerate(TENSOR_CHAIN):
        answers = run_ranks(parts_step, num_ranks, spec, str(tmp_path / "run"), [2 * number, 2 * number + 1])
        fresh = str(tmp_path / f"alone{number}")
        expected = run_ranks(parts_step, 1, "", fresh, list(range(2 * number + 2)))[0]
        for answer in answers:
            assert answer.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(answer[name], value, rtol=1e-6, atol=1e-7), (spec, name)


def uneven(spec: str, folder: str, n: int) -> None:
    """Rows that no mesh divides: 1 to 9 over 4 ranks, saved on one mesh and loaded on this one."""
    mesh = mesh_for(spec) if spec else None
    net = torch.nn.ParameterDict(
        {
            f"p{i}": torch.nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))
            for i, shape in enumerate(itertools.product((n,), (0, 1, 3)))
        }
    )
    net["none"] = torch.nn.Parameter(torch.empty(0))
    model = meshpar.parallelize(net, mesh) if mesh is not None else net
    if meshpar.latest_checkpoint(folder):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        meshpar.load_checkpoint(folder, model)
    for i, shape in enumerate(itertools.product((n,), (0, 1, 3))):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        assert torch.equal(whole_of(model.get_parameter(f"p{i}")), whole)
    meshpar.save_checkpoint(folder, model)


@pytest.mark.parametrize("n", [1, 3, 5, 7, 9])
def test_rows_that_do_not_divide_and_empty_tensors(n, tmp_path):
    for spec, num_ranks in (("data=2,domain=2", 4), ("data=1,domain=3", 3), ("", 1), ("data=4", 4)):
        run_ranks(uneven, num_ranks, spec, str(tmp_path), n)


def in_parts(folder: str) -> None:
    """A weight larger than a part is written in several, and each rank reads those that it needs."""
    from meshpar.checkpoint import planner

    before, planner.PART_BYTES = planner.PART_BYTES, 1000
    try:
        net = torch.nn.Linear(37, 53)
        whole = torch.arange(37.0 * 53).view(53, 37)
        model = meshpar.parallelize(net, mesh_for("data=4"))
        model.load_state_dict({"weight": whole, "bias": torch.zeros(53)})
        saved = meshpar.save_checkpoint(folder, model).result()
        told = planner.Reader(saved).read_metadata().state_dict_metadata["model.weight"]
        assert len(told.chunks) == 11  # 6 rows a part: 14 rows in 3 parts, thrice, and 11 rows in 2
        model.load_state_dict({"weight": torch.zeros(53, 37), "bias": torch.zeros(53)})
        meshpar.load_checkpoint(folder, model)
        assert torch.equal(whole_of(model.weight), whole)
    finally:
        planner.PART_BYTES = before


def test_large_weights_are_written_in_parts(tmp_path):
    run_ranks(in_parts, 4, str(tmp_path))
