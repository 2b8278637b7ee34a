"""`parallelize` gives the same function, gradients, names and buffers as one process, and refuses what cannot work."""

import functools

import nets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshpar
from meshpar.testing import RankError, assert_equivalent, mesh_for, run_ranks

MESHES = ("data=2,domain=2", "data=1,domain=4", "data=4,domain=1", "data=1,domain=3", "data=1,domain=2")

NETS = {
    "unet": (nets.UNet, (2, 2, 13, 12)),
    "unet, one row on a rank": (nets.UNet, (1, 2, 5, 8)),
    "batch norm": (nets.BatchNormNet, (3, 2, 11, 9)),
    "batch norm, cumulative": (functools.partial(nets.BatchNormNet, None), (3, 2, 11, 9)),
    "ties": (nets.Tied, (3, 2, 5, 6)),
    "spectral norm, hooks": (functools.partial(nets.spectral, old=True), (2, 2, 7, 6)),
    "spectral norm, parametrization": (functools.partial(nets.spectral, old=False), (2, 2, 7, 6)),
    "weight norm": (nets.weight_normed, (2, 2, 7, 6)),
    "a user's periodic convolution": (functools.partial(nets.PeriodicConv2d, 2, 3, 3), (2, 2, 7, 6)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NETS)
def test_same_function_without_a_gather(name, mesh):
    make, shape = NETS[name]
    assert_equivalent(make, [torch.randn(shape, generator=torch.Generator().manual_seed(1))], mesh)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=4"])
def test_recomputation_meets_the_same_rules(mesh, use_reentrant):
    """FIELD 32: the exchanges of the forward come again in the backward, in the same order, and nothing gathers."""
    make = functools.partial(nets.Checkpointed, use_reentrant=use_reentrant)
    report = assert_equivalent(make, [torch.randn(2, 2, 6, 5)], mesh)
    halos = [(e.op, e.num_bytes) for e in report.log.select(kind="halo", backward=False)]
    half = len(halos) // 2
    first, again = halos[:half], halos[half:]
    assert first
    assert sorted(first) == sorted(again)


def trained(spec: str, make, steps: int, optimizer_name: str):
    """Train on the mesh as a user would, and on one process; give both loss curves and the largest parameter error."""
    mesh = mesh_for(spec)
    torch.manual_seed(dist.get_rank())  # weights differ between ranks until parallelize makes them equal
    net = make().double()
    model = meshpar.parallelize(net, mesh, on_gather="error")
    full = {k: v.clone() for k, v in meshpar.gather(model.state_dict()).items()}
    reference = make().double()
    reference.load_state_dict(full)
    optimizers = [getattr(torch.optim, optimizer_name)(m.parameters(), lr=1e-2) for m in (model, reference)]
    curves: tuple[list[float], list[float]] = ([], [])
    generator = torch.Generator().manual_seed(5)
    num, index = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    criterion = meshpar.parallelize(nn.MSELoss(), mesh)
    for step in range(steps):
        x = torch.randn(4, 2, 13, 12, generator=generator, dtype=torch.float64)
        y = torch.randn(4, 1, 13, 12, generator=generator, dtype=torch.float64)
        own = slice(index * 4 // num, (index + 1) * 4 // num)
        if step % 2:
            with meshpar.spmd():
                loss = F.mse_loss(model(x[own]), meshpar.shard_batch(y[own], mesh))
        else:
            loss = criterion(model(x[own]), y[own])  # the training loop as it was
        expected = F.mse_loss(reference(x), y)
        for value, optimizer, curve in zip((loss, expected), optimizers, curves, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(value.item())
    ours = meshpar.gather(model.state_dict())
    error = max(float((ours[k] - v).abs().max()) for k, v in reference.state_dict().items())
    return curves, error


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("mesh", ["data=2,domain=2", "data=1,domain=4", "data=1,domain=3"])
def test_twenty_steps_give_the_loss_curve_of_one_process(mesh, optimizer):
    num_ranks = 3 if mesh.endswith("3") else 4
    answers = run_ranks(trained, num_ranks, mesh, nets.UNet, 20, optimizer)
    for (ours, expected), error in answers:
        assert len(ours) == 20
        assert max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True)) < 1e-10
        assert error < 1e-8
    assert len({tuple(ours) for (ours, _), _ in answers}) == 1  # the same number on every rank


def spectral_trained(spec: str) -> float:
    (ours, expected), error = trained(spec, functools.partial(one_channel, old=True), 3, "SGD")
    return max(error, *(abs(a - b) for a, b in zip(ours, expected, strict=True)))


def one_channel(*, old: bool) -> nn.Module:
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Conv2d(2, 3, 3, padding=1)), nn.SiLU(), nn.Conv2d(3, 1, 3, padding=1))


def test_spectral_norm_follows_over_three_steps():
    """FIELD 19."""
    assert max(run_ranks(spectral_trained, 4, "data=2,domain=2")) < 1e-10


def initial_values(spec: str) -> list[torch.Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    net = nets.BatchNormNet()
    net.norm.running_mean.normal_()
    model = meshpar.parallelize(net, mesh_for(spec))
    return [x.detach().clone() for x in meshpar.gather(model.state_dict()).values()] + [
        net.stem.weight.detach().clone()
    ]


def test_initial_values_are_those_of_rank_0_and_the_originals_stay():
    """FIELD 31."""
    answers = run_ranks(initial_values, 4, "data=2,domain=2")
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0][:-1], other[:-1], strict=True))
        assert not torch.equal(answers[0][-1], other[-1])


def different_models() -> None:
    width = 4 if dist.get_rank() < 3 else 5
    meshpar.parallelize(nn.Conv2d(2, width, 3), mesh_for("domain=4,data=1"))


def uneven_batches() -> None:
    model = meshpar.parallelize(nn.Conv2d(1, 1, 1), mesh_for("data=3"))
    model(torch.zeros((1, 2, 3)[dist.get_rank()], 1, 4, 4))


def smaller_last_batch() -> tuple[tuple[int, ...], float]:
    mesh = mesh_for("data=3")
    model = meshpar.parallelize(nn.Conv2d(1, 1, 1), mesh)
    x = torch.ones((2, 2, 1)[dist.get_rank()], 1, 4, 4)
    with meshpar.spmd():
        y = model(x)
        return tuple(y.shape), (meshpar.shard_batch(x, mesh) * (dist.get_rank() + 1)).mean().item()


@pytest.mark.parametrize(
    ("wrong", "num_ranks", "text"),
    [
        (different_models, 4, "ranks \\[3\\] differ"),
        (uneven_batches, 3, "sizes \\[1, 2, 3\\] over axis data"),
    ],
)
def test_what_cannot_work_raises_on_all_ranks(wrong, num_ranks, text):
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(wrong, num_ranks)
    assert len(caught.value.exceptions) == num_ranks
    assert all(isinstance(e, meshpar.SpecError) for e in caught.value.exceptions.values())


def test_a_last_batch_smaller_on_the_last_rank_counts_what_it_weighs():
    assert run_ranks(smaller_last_batch, 3) == [((5, 1, 4, 4), pytest.approx((2 * 1 + 2 * 2 + 1 * 3) / 5))] * 3


def wrong_arguments() -> list[str]:
    mesh = mesh_for("data=1")
    conv = nn.Conv2d(1, 1, 1)
    cases = [
        lambda: meshpar.parallelize("conv", mesh),
        lambda: meshpar.parallelize(conv, "domain=2,data=1"),
        lambda: meshpar.parallelize(conv, mesh, data="sharded"),
        lambda: meshpar.parallelize(conv, mesh, on_gather="never"),
        lambda: meshpar.parallelize(conv, mesh, batch_statistics="local"),
        lambda: meshpar.parallelize(conv, mesh, shard_modules=3),
        lambda: meshpar.parallelize(conv, mesh, inputs={"image": "data _ domain _"}),
        lambda: meshpar.parallelize(meshpar.parallelize(conv, mesh), mesh),
        lambda: meshpar.parallelize(conv, mesh, inputs="data _ domain")(torch.zeros(1, 1, 2, 2)),
        lambda: meshpar.parallelize(conv, mesh, inputs="data _ longitude _")(torch.zeros(1, 1, 2, 2)),
        lambda: meshpar.mesh_of(conv),
        lambda: meshpar.parallelize(nn.LazyConv2d(1, 1), mesh),
    ]
    said = []
    for case in cases:
        try:
            case()
            said.append("nothing")
        except meshpar.SpecError as error:
            said.append(str(error))
    return said


def test_wrong_arguments_are_named():
    (said,) = run_ranks(wrong_arguments, 1)
    expected = ["a str", "2 ranks", "sharded", "never", "local", "3", "image", "parallel already"]
    expected += ["3 dims, for a tensor of 4", "longitude", "Conv2d", "Uninitialized"]
    for text, part in zip(said, expected, strict=True):
        assert part in text
        assert "needs:" in text
        assert "fix:" in text


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))

    def forward(self, tokens, *, time=None):
        out = tokens + self.mlp(tokens)
        return out if time is None else out * time[:, None, None]


def token_placements(inputs) -> tuple[str, list[int]]:
    model = meshpar.parallelize(Tokens(), mesh_for("data=2,domain=2"), inputs=inputs)
    y = model(torch.randn(2, 5, 6), time=torch.ones(2))
    return str(y.placements), list(y.shape)


@pytest.mark.parametrize("inputs", [{"tokens": "data domain _"}, ["data domain _"], ("data domain _", None)])
def test_inputs_name_the_layouts(inputs):
    for placements, shape in run_ranks(token_placements, 4, inputs):
        assert placements.startswith("(Shard(dim=0), Shard(dim=1)")
        assert shape == [4, 5, 6]


def test_tokens_and_sequences_by_layout():
    x = torch.randn(3, 5, 6)
    assert_equivalent(Tokens, [x], "data=2,domain=2", layouts=["data domain _"])
    sequence = functools.partial(nn.Conv1d, 3, 4, 3, padding=1)
    assert_equivalent(sequence, [torch.randn(2, 3, 7)], "data=1,domain=4", layouts=["data _ domain"])


def plain_entry(spec: str) -> tuple[float, float]:
    """Give plain tensors to the model: they are cut, and their gradients come back whole."""
    mesh = mesh_for(spec)
    torch.manual_seed(3)
    net = nets.UNet().double()
    model = meshpar.parallelize(net, mesh, on_gather="error")
    x = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    num, index = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    own = slice(index * 2 // num, (index + 1) * 2 // num)
    part, whole = x[own].clone().requires_grad_(), x.clone().requires_grad_()
    with meshpar.spmd():
        (model(part) ** 2).sum().backward()
    (net(whole) ** 2).sum().backward()
    model.eval()
    with torch.no_grad():
        y = meshpar.gather(model(x[own]))
    with torch.inference_mode():
        z = meshpar.gather(model(x[own]))
    return float((part.grad - whole.grad[own]).abs().max()), max(float((t - net(x)).abs().max()) for t in (y, z))


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4"])
def test_plain_tensors_are_this_data_ranks_batch(spec):
    for gradient_error, eval_error in run_ranks(plain_entry, 4, spec):
        assert gradient_error < 1e-12
        assert eval_error < 1e-12


def units_of(shard_modules) -> list[str]:
    model = meshpar.parallelize(nets.UNet(), mesh_for("data=2"), shard_modules=shard_modules)
    from torch.distributed.fsdp import FSDPModule

    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]


def test_shard_modules_choose_what_is_gathered_together():
    blocks = ["down.0", "down.1", "middle", "up.0", "up.1"]
    assert run_ranks(units_of, 2, "auto")[0] == ["", "down.0", "down.1", "up.0", "up.1"]
    assert run_ranks(units_of, 2, nets.Block)[0] == ["", *blocks]
    assert run_ranks(units_of, 2, [nets.Block, nn.GroupNorm])[0] == [
        "",
        *(part for block in blocks for part in (block, f"{block}.norm")),
    ]
    assert run_ranks(units_of, 2, None)[0] == [""]


def round_trip() -> bool:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    model = meshpar.parallelize(nets.UNet(), mesh)
    other = {k: torch.randn_like(v) for k, v in nets.UNet().state_dict().items()}
    dist.broadcast_object_list(held := [other], src=0)
    other = held[0]
    model.load_state_dict(other)
    back = meshpar.gather(model.state_dict())
    return list(back) == list(other) and all(
        torch.equal(a, b) for a, b in zip(back.values(), other.values(), strict=True)
    )


def test_a_one_process_state_dict_loads():
    assert all(run_ranks(round_trip, 4))


def data_local_statistics() -> tuple[float, float]:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    net = nets.BatchNormNet().double()
    model = meshpar.parallelize(net, mesh, batch_statistics="data-local")
    x = torch.randn(4, 2, 11, 9, dtype=torch.float64)
    index = meshpar.coordinate(mesh, "data")
    own = x[index * 2 : index * 2 + 2]
    y = meshpar.gather(model(own))[index * 2 : index * 2 + 2]
    error = float((y - net(own)).abs().max().detach())
    return error, float((model.norm.running_mean - net.norm.running_mean).abs().max())


def test_batch_statistics_may_stay_within_a_data_rank():
    for error, buffers in run_ranks(data_local_statistics, 4):
        assert error < 1e-12
        assert buffers < 1e-12


def gradients_asked_for() -> str:
    model = meshpar.parallelize(nets.UNet(), mesh_for("data=2"))
    with meshpar.spmd():
        loss = model(torch.randn(1, 2, 8, 8)).square().mean()
    try:
        torch.autograd.grad(loss, list(model.parameters()))
    except RuntimeError as error:
        return str(error)
    return "silence"


def test_autograd_grad_of_sharded_parameters_is_an_error_not_a_part():
    for said in run_ranks(gradients_asked_for, 2):
        assert "not have been used in the graph" in said


def synced_batch_norm() -> float:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    net = nets.BatchNormNet().double()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(nets.BatchNormNet().double())
    synced.load_state_dict(net.state_dict())
    model = meshpar.parallelize(synced, mesh)
    x = torch.randn(4, 2, 11, 9, dtype=torch.float64)
    own = x.chunk(2)[meshpar.coordinate(mesh, "data")]
    error = float((meshpar.gather(model(own)) - net(x)).abs().max().detach())
    return max(error, float((model.norm.running_var - net.norm.running_var).abs().max()))


def test_sync_batch_norm_is_batch_norm_of_the_whole_batch_on_the_cpu_too():
    """FIELD 27."""
    assert max(run_ranks(synced_batch_norm, 4)) < 1e-12
