"""`precision=` and `offload=`: the same policy by hand on one process, and where the numbers lie.

By hand: parameters and inputs are rounded (`.to(dtype)`), the forward and backward run in that dtype, gradients are
added up in the dtype of `reduce`. Ranks add the same products in another order, and each rounds its part of a gradient
once; so the error is a few roundings of the dtype: 2**-24 for float32 and 2**-8 for bfloat16, of the largest number.
With small integers nothing is rounded at all, and the bits must be those of the hand.
"""

import copy
import dataclasses
import types

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

import meshpar
from meshpar import data as data_module
from meshpar.precision import Precision, cast
from meshpar.testing import mesh_for, run_ranks
from meshpar.testing.meshes import ranks_of

NARROW = Precision(params=torch.float32, reduce=torch.float64, output=torch.float64)
"""The policy on float64 models: everything is as with bfloat16 and float32, but the error can be told from a bug."""

FEW_ROUNDINGS = 64 * 2.0**-24

MESHES = [("fsdp", "data=2,domain=2"), ("ddp", "data=1,domain=4"), ("hsdp", "replica=2,data=1,domain=2")]


def by_hand(net: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run a network whose computed weights are computed unrounded; the graph leads back to its own parameters."""
    if isinstance(net, nn.Sequential):
        for layer in net:
            x = layer_by_hand(layer, x.to(dtype), dtype)
        return x
    params = {name: p.to(dtype) for name, p in net.named_parameters()}
    return torch.func.functional_call(net, params, (x.to(dtype),))


def layer_by_hand(layer: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(layer, nn.Conv2d):
        return layer(x)
    for hook in layer._forward_pre_hooks.values():
        hook(layer, (x,))
    bias = layer.bias.to(dtype)
    return F.conv2d(x, layer.weight.to(dtype), bias, layer.stride, layer.padding, layer.dilation)


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 2, 9, 6, generator=generator, dtype=dtype), torch.randn(4, 1, generator=generator).to(dtype)


def part_of(x: torch.Tensor, mesh) -> torch.Tensor:
    return x.chunk(meshpar.axis_size(mesh, "data"))[meshpar.coordinate(mesh, "data")]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1.0)


def compared(spec: str, data: str, make, told, dtype, compiled: bool = False) -> dict[str, float]:
    """Give the largest relative errors of output, gradients and buffers; check dtypes, and that numbers are rounded."""
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    net = make().to(dtype)
    model = meshpar.parallelize(net, mesh, data=data, precision=told, on_gather="error")
    if compiled:
        torch.compiler.reset()
        model.compile(fullgraph=True, backend="aot_eager")
    x, _ = batch(dtype)
    precision = Precision.read(told)
    unrounded = copy.deepcopy(net)(x)
    y = by_hand(net, x, precision.params)
    y = y if precision.output is None else y.to(precision.output)
    found = model(part_of(x, mesh))
    assert found.dtype == y.dtype
    weights = torch.linspace(0.5, 1.5, y.numel()).view_as(y).to(y.dtype)
    (y * weights).sum().backward()
    with meshpar.spmd():
        (found * meshpar.shard(weights, mesh)).sum().backward()
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in net.parameters()]
    assert largest(meshpar.gather(found).to(dtype), unrounded) > 2.0**-40
    errors = {"output": largest(meshpar.gather(found), y)}
    pairs = zip(model.named_parameters(), net.named_parameters(), strict=True)
    for (name, p), (_, ref) in pairs:
        assert p.grad.dtype == p.dtype
        errors[name] = largest(meshpar.gather(p.grad), ref.grad)
    for name, b in net.named_buffers():
        now = model.get_buffer(name)
        assert now.dtype == b.dtype
        errors[f"buffer {name}"] = largest(meshpar.gather(now), b)
    return errors


@pytest.mark.parametrize(("data", "spec"), MESHES)
def test_a_unet_equals_the_policy_by_hand(data, spec):
    for errors in run_ranks(compared, 4, spec, data, nets.UNet, NARROW, torch.float64):
        assert max(errors.values()) < FEW_ROUNDINGS, errors


def spectral_old() -> nn.Module:
    return nets.spectral(old=True)


def spectral_new() -> nn.Module:
    return nets.spectral(old=False)


def weight_norm_old() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Conv2d(2, 3, 3, padding=1)), nn.SiLU(), nn.Conv2d(3, 2, 3))


@pytest.mark.parametrize("make", [spectral_old, spectral_new, nets.weight_normed, weight_norm_old])
@pytest.mark.parametrize(("data", "spec"), MESHES)
def test_computed_weights_are_computed_unrounded(make, data, spec):
    """The vectors of the power iteration have no rounding of float32 in them."""
    for errors in run_ranks(compared, 4, spec, data, make, NARROW, torch.float64):
        buffers = [error for name, error in errors.items() if name.startswith("buffer")]
        assert max(errors.values()) < FEW_ROUNDINGS, errors
        assert max(buffers, default=0.0) < 1e-14
        assert (len(buffers) > 0) == ("spectral" in make.__name__)


@pytest.mark.parametrize("make", [nets.UNet, spectral_old, spectral_new])
def test_bfloat16_equals_the_policy_by_hand(make):
    """A few roundings of 2**-8: gradients of first layers have gone through a dozen."""
    for errors in run_ranks(compared, 4, "data=2,domain=2", "fsdp", make, "bf16", torch.float32):
        assert max(errors.values()) < 16 * 2.0**-8, errors
        assert max((e for name, e in errors.items() if name.startswith("buffer")), default=0.0) < 1e-6


class Small(nn.Module):
    """A block that is a unit, a spectral norm of either kind, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nets.Block(2, 4)])
        self.head = nn.Conv2d(4, 1, 1)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


@pytest.mark.parametrize(("make", "spec"), [(Small, "data=2,domain=1"), (spectral_new, "data=1,domain=2")])
def test_compiled_equals_the_policy_by_hand(make, spec):
    """In a graph parameters are gathered and cast by nodes of it."""
    answers = run_ranks(compared, 2, spec, "fsdp", make, NARROW, torch.float64, compiled=True, timeout_s=600.0)
    for errors in answers:
        assert max(errors.values()) < FEW_ROUNDINGS, errors


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))


def batch_norm(spec: str, data: str) -> tuple[list[float], list[torch.dtype]]:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    net = norm_net()
    model = meshpar.parallelize(net, mesh, data=data, precision="bf16", on_gather="error")
    hand = copy.deepcopy(net).bfloat16()
    hand[1].float()
    x, _ = batch(torch.float32)
    for _ in range(3):
        y, ref = model(part_of(x, mesh)), hand(x.bfloat16())
    errors = [largest(meshpar.gather(y).float(), ref.float())]
    errors += [largest(b, r) for b, r in zip(model[1].buffers(), hand[1].buffers(), strict=True)]
    model.eval()
    hand.eval()
    errors.append(largest(meshpar.gather(model(part_of(x, mesh))).float(), hand(x.bfloat16()).float()))
    return errors, [b.dtype for b in model[1].buffers()] + [p.dtype for p in model.parameters()]


@pytest.mark.parametrize(("data", "spec"), [*MESHES, ("fsdp", "data=1")])
def test_running_statistics_stay_float32_and_right(data, spec):
    """torch's kernels want the weights of a batch norm in the dtype of its statistics: they are not rounded."""
    for errors, dtypes in run_ranks(batch_norm, ranks_of(spec), spec, data):
        output, mean, var, count, evaluated = errors
        # Convolutions round alike but for ties; means over 216 numbers, each rounded to 2**-8 of itself, differ less.
        assert max(mean, var) < 2.0**-10
        assert count == 0
        assert max(output, evaluated) < 4 * 2.0**-8
        assert set(dtypes) == {torch.float32, torch.int64}


def integers(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in net.parameters():
        p.data = torch.randint(-1, 2, p.shape, generator=generator).float()
    return net


def exact(spec: str, data: str, told, offload) -> tuple[bool, bool, torch.dtype]:
    """Integers below 256 are bfloat16 numbers: no order of sums rounds anything."""
    mesh = mesh_for(spec)
    net = integers(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1)))
    model = meshpar.parallelize(net, mesh, data=data, precision=told, offload=offload)
    x = torch.randint(-1, 2, (4, 1, 4, 4), generator=torch.Generator().manual_seed(2)).float()
    y = model(part_of(x, mesh))
    hand = copy.deepcopy(net).bfloat16()
    expected = hand(x.bfloat16())
    with meshpar.spmd():
        y.sum().backward()
    expected.sum().backward()
    same = all(
        torch.equal(meshpar.gather(p.grad), r.grad.float())
        for p, r in zip(model.parameters(), hand.parameters(), strict=True)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    optimizer.step()
    kept = all(
        torch.equal(meshpar.gather(p), r - 2.0**-12 * h.grad.float())
        for p, r, h in zip(model.parameters(), net.parameters(), hand.parameters(), strict=True)
    )
    return torch.equal(meshpar.gather(y), expected) and same, kept, y.dtype


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(("data", "spec"), [*MESHES, ("none", "data=1,domain=2"), ("fsdp", "data=1")])
def test_small_integers_have_the_bits_of_the_hand(data, spec, offload):
    """The optimizer steps by less than bfloat16 can tell: it has the parameters in float32."""
    for same, kept, dtype in run_ranks(exact, ranks_of(spec), spec, data, "bf16", offload):
        assert same
        assert kept
        assert dtype == torch.bfloat16


def reduced(told) -> list[float]:
    """Ranks have gradients of 256 and 1: their sum is no bfloat16 number."""
    mesh = mesh_for("data=2,domain=1")
    model = meshpar.parallelize(nn.Linear(1, 1, bias=False), mesh, precision=told)
    value = (256.0, 1.0)[meshpar.coordinate(mesh, "data")]
    with meshpar.spmd():
        model(torch.full((1, 1), value)).sum().backward()
    return meshpar.gather(model.weight.grad).flatten().tolist()


def test_parts_are_added_up_in_the_dtype_of_reduce():
    assert run_ranks(reduced, 2, "bf16") == [[257.0]] * 2
    assert run_ranks(reduced, 2, Precision(reduce=torch.bfloat16)) == [[256.0]] * 2
    assert run_ranks(reduced, 2, Precision(reduce=None)) == [[256.0]] * 2


@dataclasses.dataclass
class Inputs:
    image: torch.Tensor
    index: torch.Tensor


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Inputs, *, scale: torch.Tensor):
        self.seen[:] = [inputs.image.dtype, inputs.index.dtype, scale.dtype, self.conv.weight.dtype]
        return self.conv(inputs.image) * scale


def seen() -> tuple[list[torch.dtype], torch.dtype, torch.dtype]:
    model = meshpar.parallelize(Asking(), mesh_for("data=2"), precision=Precision(torch.float16, output=torch.float32))
    y = model(Inputs(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64)), scale=torch.ones(1, 1, 1, 1))
    return model.seen, y.dtype, model.conv.weight.dtype


def test_floating_inputs_are_cast_wherever_they_are():
    half, whole = torch.float16, torch.float32
    assert run_ranks(seen, 2) == [([half, torch.int64, half, half], whole, whole)] * 2


def test_a_precision_names_floating_dtypes():
    assert Precision.read("fp16") == Precision(params=torch.float16)
    assert Precision.read(None) is None
    for wrong in ("half", 16, torch.bfloat16):
        with pytest.raises(meshpar.SpecError, match="one of"):
            Precision.read(wrong)
    for wrong in ({"params": torch.int8}, {"params": None}, {"reduce": torch.int64}, {"output": "bf16"}):
        with pytest.raises(meshpar.SpecError, match=next(iter(wrong))):
            Precision(**wrong)
    tree = cast({"a": torch.zeros(1), "b": [torch.zeros(1, dtype=torch.complex64), 3]}, torch.float64)
    assert tree["a"].dtype == torch.float64
    assert tree["b"][0].dtype == torch.complex64


def tied_spectral() -> str:
    net = nn.Sequential(*(parametrizations.spectral_norm(nn.Conv2d(1, 1, 1)) for _ in range(2)))
    net[1].parametrizations.weight.original = net[0].parametrizations.weight.original
    old = nn.Sequential(old_spectral_norm(nn.Conv2d(1, 1, 1)), nn.Conv2d(1, 1, 1))
    old[1].bias = old[0].bias
    said = []
    for wrong in (net, old):
        with pytest.raises(meshpar.SpecError) as caught:
            meshpar.parallelize(wrong, mesh_for("data=2"), precision="bf16")
        said.append(str(caught.value))
    return said


def test_a_computed_weight_that_is_shared_is_refused():
    for new, old in run_ranks(tied_spectral, 2):
        assert "0.parametrizations.weight" in new
        assert "got:    0" in old


def on_one_rank(offload) -> tuple[float, bool]:
    torch.manual_seed(0)
    net = nets.UNet()
    model = meshpar.parallelize(net, mesh_for("data=1"), precision="bf16", offload=offload)
    hand = copy.deepcopy(net).bfloat16()
    x, _ = batch(torch.float32)
    y, expected = model(x), hand(x.bfloat16())
    assert y.dtype == torch.bfloat16
    error = largest(meshpar.gather(y).float(), expected.float())
    return error, all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_one_rank_rounds_as_well(offload):
    ((error, sharded),) = run_ranks(on_one_rank, 1, offload)
    assert error < 4 * 2.0**-8
    assert sharded


def test_offload_pins_memory_for_devices_alone():
    """No device here: what is asked of `fully_shard` is looked at."""
    for device_type in ("cpu", "cuda"):
        policy = data_module._offload_policy("cpu", types.SimpleNamespace(device_type=device_type))
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory == (device_type == "cuda")
