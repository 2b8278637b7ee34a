"""`data="fsdp" | "ddp" | "hsdp" | "none"`: where parameters lie, and that training is that of one process."""

import warnings

import nets
import pytest
import tensor_nets
import torch
import torch.nn.functional as F
from test_compile import Transformer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshpar
from meshpar.data import fully_shard_over, parameter_mesh
from meshpar.mesh import replicas
from meshpar.registry import Policy
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

TOKENS = "data domain _"


class Odd(nn.Module):
    """A 0-d parameter, one of another dtype, one that is frozen, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nets.Block(2, 4), nets.Block(4, 4)])
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(4, 1, 1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.out = nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(4, 4, 1)
        self.head.weight = self.out.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.head(self.out(x * self.gain) + self.shift.to(x.dtype))
        return x[:, :1] * self.frozen.sum()


def odd() -> nn.Module:
    net = Odd().double()
    net.shift.data = net.shift.data.float()
    return net


def unet() -> nn.Module:
    return nets.UNet().double()


def transformer() -> nn.Module:
    return Transformer().double()


def batches(layout: str | None, num: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((4, 5, 2), (4, 5, 1)) if layout else ((4, 2, 9, 6), (4, 1, 9, 6))
    return [tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes) for _ in range(num)]


def train(model, pairs, loss_of, *, foreach: bool | None = None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=foreach)
    return nets.curve_of(model, optimizer, pairs, loss_of)


def own_part(pairs, mesh):
    num, index = meshpar.axis_size(mesh, "data"), meshpar.coordinate(mesh, "data")
    return [tuple(t.chunk(num)[index] for t in pair) for pair in pairs]


def mesh_loss(mesh, layout):
    def loss_of(y, target):
        with meshpar.spmd():
            return F.mse_loss(y, meshpar.shard_batch(target, mesh, layout))

    return loss_of


def trained(spec: str, data: str, make, layout: str | None, compiled: bool = False):
    """Train on the mesh and on one process; give the largest difference and the bits of the parameters."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    reference = make()
    model = meshpar.parallelize(reference, mesh, data=data, on_gather="error", inputs=layout)
    if compiled:
        torch.compiler.reset()
        model.compile(fullgraph=True, backend="aot_eager")
    pairs = batches(layout)
    expected = train(reference, pairs, F.mse_loss)
    found = train(model, own_part(pairs, mesh), mesh_loss(mesh, layout))
    state = meshpar.gather(model.state_dict())
    assert list(state) == list(reference.state_dict())
    errors = [float((state[k] - v).abs().max()) for k, v in reference.state_dict().items()]
    errors += [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return max(errors), {k: v.numpy().tobytes() for k, v in state.items()}


MESHES = {
    "fsdp": ("data=2,domain=2", "data=1,domain=4", "data=4,domain=1"),
    "ddp": ("data=2,domain=2", "data=1,domain=4", "data=4,domain=1"),
    "hsdp": ("replica=2,data=1,domain=2", "replica=2,data=2,domain=1", "replica=4,data=1,domain=1"),
    "none": ("data=1,domain=4", "data=1,domain=2"),
}


@pytest.mark.parametrize(("make", "layout"), [(unet, None), (transformer, TOKENS)])
@pytest.mark.parametrize(("data", "spec"), [(data, spec) for data, specs in MESHES.items() for spec in specs])
def test_training_equals_one_process(data, spec, make, layout):
    """Three steps of AdamW; copies have the same bits after them."""
    answers = run_ranks(trained, ranks_of(spec), spec, data, make, layout)
    assert max(error for error, _ in answers) < 1e-8
    assert all(bits == answers[0][1] for _, bits in answers)


@pytest.mark.parametrize(("data", "spec"), [(data, specs[0]) for data, specs in MESHES.items()])
def test_training_of_odd_parameters_equals_one_process(data, spec):
    answers = run_ranks(trained, ranks_of(spec), spec, data, odd, None)
    assert max(error for error, _ in answers) < 1e-6  # one of them is float32, and its steps are rounded
    assert all(bits == answers[0][1] for _, bits in answers)


@pytest.mark.parametrize(("data", "spec"), [("ddp", "data=2,domain=2"), ("hsdp", "replica=2,data=1,domain=2")])
def test_compiled_training_equals_one_process(data, spec):
    """The hooks of `fully_shard` stay out of graphs, which gather from shards and add up over shards and copies."""
    answers = run_ranks(trained, 4, spec, data, odd, None, compiled=True, timeout_s=600.0)
    assert max(error for error, _ in answers) < 1e-6
    assert all(bits == answers[0][1] for _, bits in answers)


def lie(spec: str, data: str) -> list[tuple]:
    model = meshpar.parallelize(odd(), mesh_for(spec), data=data)
    names = {"head.bias", "gain", "shift", "blocks.0.conv.weight"}
    return [
        (name, tuple(p.device_mesh.shape), str(p.placements), tuple(p.to_local().shape))
        for name, p in model.named_parameters()
        if name in names
    ]


def test_where_parameters_lie():
    """One copy over all ranks; one a rank; one a replica, the ranks of a replica next to each other."""
    whole = {"gain": (), "shift": (4, 1, 1), "head.bias": (4,), "blocks.0.conv.weight": (4, 2, 3, 3)}
    for name, sizes, placements, shape in run_ranks(lie, 4, "data=2,domain=2", "ddp")[0]:
        assert sizes == (4, 1), name
        assert placements.startswith("(Replicate(), ")
        assert shape == whole[name]
    for name, sizes, placements, shape in run_ranks(lie, 4, "replica=2,data=1,domain=2", "hsdp")[0]:
        assert sizes == (2, 2), name
        kept = name in ("gain", "shift")
        assert placements == ("(Replicate(), Replicate())" if kept else "(Replicate(), Shard(dim=0))")
        assert shape == (whole[name] if kept else (whole[name][0] // 2, *whole[name][1:]))
    assert {sizes for _, sizes, *_ in run_ranks(lie, 4, "data=2,domain=2", "fsdp")[0]} == {(4,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {sizes for _, sizes, *_ in run_ranks(quiet_lie, 4)[0]} == {(2, 1)}


def quiet_lie() -> list[tuple]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lie("data=2,domain=2", "none")


def replica_ranks() -> list[list[int]]:
    mesh = mesh_for("replica=2,data=1,domain=2")
    lies, _ = parameter_mesh(mesh, "hsdp")
    assert meshpar.axis_size(mesh, "data") == 2
    assert replicas(mesh) == 2
    assert replicas(mesh_for("data=2,domain=2")) == 1
    assert parameter_mesh(mesh, "hsdp")[0] is lies  # groups are made once
    return lies.mesh.tolist()


def test_the_ranks_of_a_replica_stand_next_to_each_other():
    assert run_ranks(replica_ranks, 4) == [[[0, 1], [2, 3]]] * 4


def none_over_data() -> tuple[list[str], float, float]:
    mesh = mesh_for("data=2,domain=2")
    torch.manual_seed(0)
    net = unet()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = meshpar.parallelize(net, mesh, data="none")
    (pair,) = batches(None, 1)
    loss = mesh_loss(mesh, None)(model(own_part([pair], mesh)[0][0]), own_part([pair], mesh)[0][1])
    loss.backward()
    F.mse_loss(net(pair[0]), pair[1]).backward()
    apart = added = 0.0
    for p, ref in zip(model.parameters(), net.parameters(), strict=True):
        g = p.grad.full_tensor()
        apart = max(apart, float((g - ref.grad).abs().max()))
        torch.distributed.all_reduce(g, group=mesh.get_group("data"))
        added = max(added, float((g - ref.grad).abs().max()))
    return [f"{w.filename}: {w.message}" for w in said], apart, added


def test_none_adds_up_over_domain_alone_and_warns_once():
    for said, apart, added in run_ranks(none_over_data, 4):
        assert len(said) == 1
        assert "test_data_modes.py" in said[0]  # at the line of the call
        assert 'data="none" does not add up gradients over data' in said[0]
        assert "2 data ranks" in said[0]
        assert apart > 1e-3
        assert added < 1e-12


def loaded(spec: str, data: str) -> tuple[float, float]:
    """Load a plain one-process file into the whole model and into a part of it; call it with other values."""
    mesh = mesh_for(spec)
    torch.manual_seed(7)
    other = odd()
    torch.manual_seed(0)
    net = odd()
    model = meshpar.parallelize(net, mesh, data=data)
    (x, y), *_ = batches(None, 1)
    part = own_part([(x, y)], mesh)[0]
    values = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in other.state_dict().items()}
    values["head.weight"] = values["out.weight"]
    found = torch.func.functional_call(model, values, (part[0],))
    loss = mesh_loss(mesh, None)(found, part[1])
    names = [n for n, p in other.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, [values[n] for n in names])
    expected = F.mse_loss(other(x), y)
    wanted = torch.autograd.grad(expected, [dict(other.named_parameters())[n] for n in names], retain_graph=True)
    called = max(float((a - b).abs().max()) for a, b in zip(grads, wanted, strict=True))
    model.blocks[1].load_state_dict(other.blocks[1].state_dict())
    assert torch.equal(model.blocks[1].conv.weight.full_tensor(), other.blocks[1].conv.weight)
    assert not torch.equal(model.blocks[0].conv.weight.full_tensor(), other.blocks[0].conv.weight)
    model.load_state_dict(other.state_dict())
    state = meshpar.gather(model.state_dict())
    assert all(torch.equal(state[k], v) for k, v in other.state_dict().items())
    assert not any(isinstance(v, DTensor) for v in state.values())
    loss = mesh_loss(mesh, None)(model(part[0]), part[1])
    loss.backward()
    expected.backward()
    error = abs(loss.item() - expected.item())
    for p, ref in zip(model.parameters(), other.parameters(), strict=True):
        if ref.grad is not None:
            error = max(error, float((meshpar.gather(p.grad) - ref.grad).abs().max()))
    return called, error


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        *(("fsdp", "data=2,domain=2"), ("ddp", "data=2,domain=2"), ("hsdp", "replica=2,data=1,domain=2")),
        ("none", "data=1,domain=2"),
    ],
)
def test_plain_files_load_and_other_values_can_be_called(data, spec):
    for called, error in run_ranks(loaded, ranks_of(spec), spec, data):
        assert called < 1e-6  # `shift` is float32
        assert error < 1e-6


class Split(nn.Module):
    """Two parameters that are DTensors over the tensor axis, and a plain one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rows, 4, dtype=torch.float64))
        self.across = nn.Parameter(torch.randn(rows, 4, dtype=torch.float64))
        self.plain = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.gain = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        def whole(w):
            return w.full_tensor() if isinstance(w, DTensor) else w

        return ((whole(self.down) * whole(self.across)) ** 2).sum() * whole(self.gain) * x + (self.plain * x).sum()


def over_tensor(spec: str, data: str, rows: int) -> tuple[bool, list[str], float]:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    net, reference = Split(rows), Split(rows)
    reference.load_state_dict(net.state_dict())
    over = mesh["tensor"]
    net.down = nn.Parameter(distribute_tensor(net.down.detach(), over, [Shard(0)]))
    net.across = nn.Parameter(distribute_tensor(net.across.detach(), over, [Shard(1)]))
    net = meshpar.rewrite(net, policy=Policy(mesh=mesh))
    fully_shard_over(net, mesh, data=data)
    assert isinstance(net, FSDPModule)
    whole = all(
        torch.equal(p.full_tensor(), ref) for p, ref in zip(net.parameters(), reference.parameters(), strict=True)
    )
    summed = parameter_mesh(mesh, data)[1]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (net, reference)]
    for step in range(3):
        # Each rank of data x domain has a part of the sum that one process computes.
        for m, parts in ((net, [summed.get_local_rank() + 1.0 + step]), (reference, range(summed.size()))):
            for part in parts:
                value = part if m is net else part + 1.0 + step
                m(torch.tensor(value, dtype=torch.float64, requires_grad=True)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    error = max(float((p.full_tensor() - ref).abs().max()) for p, ref in pairs)
    other = {k: v + 1 for k, v in reference.state_dict().items()}
    net.load_state_dict(other)
    whole = whole and all(torch.equal(meshpar.gather(v), other[k]) for k, v in net.state_dict().items())
    return whole, [str(tuple(p.device_mesh.mesh_dim_names)) for p in net.parameters()], error


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize(
    ("data", "spec"),
    [
        *(("fsdp", "data=2,tensor=2"), ("ddp", "data=2,tensor=2"), ("hsdp", "replica=2,data=1,tensor=2")),
        ("none", "data=1,domain=2,tensor=2"),
    ],
)
def test_parameters_split_over_tensor_lie_over_data_as_well(data, spec, rows):
    """FIELD 37: copies of DTensors too. Rows that do not divide are shared out as they come."""
    for whole, axes, error in run_ranks(over_tensor, 4, spec, data, rows):
        assert whole
        assert axes[0] == axes[1]
        assert axes[0].endswith("'tensor')")
        assert error < 1e-12


def trained_over_tensor(spec: str, data: str) -> tuple[float, dict[str, bytes]]:
    """Train a transformer that a plan splits over tensor; a weight of it is read while its unit does not run."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    reference = tensor_nets.Transformer().double()
    plan = tensor_nets.TRANSFORMER_PLAN
    options = {"data": data, "tensor_plan": plan, "on_gather": "allow", "inputs": "data domain"}
    model = meshpar.parallelize(reference, mesh, shard_modules=["blocks.*"], **options)
    tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, foreach=False) for m in (model, reference)]
    for _ in range(3):
        with meshpar.spmd():
            (
                model(tokens.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]) ** 2
            ).mean().backward()
        (reference(tokens) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = meshpar.gather(model.state_dict())
    errors = [float((state[k] - v).abs().max()) for k, v in reference.state_dict().items()]
    return max(errors), {k: v.numpy().tobytes() for k, v in state.items()}


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        *(("fsdp", "data=2,tensor=2"), ("ddp", "data=1,domain=2,tensor=2"), ("ddp", "data=2,tensor=2")),
        *(("hsdp", "replica=2,data=1,tensor=2"), ("none", "data=1,domain=2,tensor=2")),
    ],
)
def test_training_over_tensor_equals_one_process(data, spec):
    answers = run_ranks(trained_over_tensor, 4, spec, data)
    assert max(error for error, _ in answers) < 1e-8
    assert all(bits == answers[0][1] for _, bits in answers)


def channels_last(data: str) -> float:
    mesh = mesh_for("data=1,domain=2")
    torch.manual_seed(0)
    net = unet().to(memory_format=torch.channels_last)
    model = meshpar.parallelize(net, mesh, data=data)
    (pair,) = batches(None, 1)
    error = float((meshpar.gather(model(pair[0])) - net(pair[0])).abs().max().detach())
    state = meshpar.gather(model.state_dict())
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    return error


@pytest.mark.parametrize("data", ["fsdp", "ddp"])
def test_a_model_in_channels_last_is_laid_over_the_ranks(data):
    assert max(run_ranks(channels_last, 2, data)) < 1e-12


def wrong_modes() -> list[str]:
    net = nn.Conv2d(1, 1, 1)
    cases = [
        lambda: meshpar.parallelize(net, mesh_for("data=4"), data="zero"),
        lambda: meshpar.parallelize(net, mesh_for("data=4"), data="hsdp"),
        lambda: meshpar.parallelize(net, mesh_for("replica=2,data=2")),
        lambda: meshpar.parallelize(net, mesh_for("replica=2,data=2"), data="ddp"),
        lambda: meshpar.parallelize(net, mesh_for("data=4"), offload="disk"),
        lambda: meshpar.parallelize(net, mesh_for("data=4"), precision="int8"),
        lambda: meshpar.parallelize(net, mesh_for("data=4"), shard_modules="stages.*"),
    ]
    said = []
    for case in cases:
        with pytest.raises(meshpar.SpecError) as caught:
            case()
        said.append(str(caught.value))
    return said


def test_modes_that_cannot_be_are_errors_that_say_what_to_write():
    answers = run_ranks(wrong_modes, 4)
    assert answers.count(answers[0]) == 4
    parts = ["'zero'", '"replica=2,data=2', 'data="hsdp"', 'data="hsdp"', "'disk'", "'int8'", "'stages.*'"]
    for text, part in zip(answers[0], parts, strict=True):
        assert part in text
        assert "fix:" in text


def alone() -> list[bool]:
    """On one rank every mode is the model itself."""
    made = [meshpar.parallelize(nn.Conv2d(1, 1, 1), mesh_for("data=1"), data=data) for data in MESHES]
    return [isinstance(p, DTensor) for m in made for p in m.parameters()]


def test_on_one_rank_parameters_stay_plain_in_every_mode():
    assert run_ranks(alone, 1) == [[False] * 8]
