"""`load_hf`: the bits of the file on any layout, its own rows to each rank, one error on all where it does not fit."""

import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from checks import refused, same_bits
from files import numbered, write, write_model
from quantized import Tied, laid_out
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshpar
from meshpar import private
from meshpar.errors import CheckpointError, SpecError
from meshpar.export import filling, load_hf
from meshpar.shares import whole_of
from meshpar.testing import mesh_for, run_ranks


class Net(nn.Module):
    """Sizes that no mesh divides, a convolution, buffers, a 0-d and an empty tensor, several dtypes, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(3, 7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.first, self.second = nn.Linear(6, 14), nn.Linear(14, 6, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def net_of(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean.copy_(torch.randn(7))
    net.mask.copy_(torch.rand(3) > 0.5)
    return net


SPLIT = {"table": 1, "first": 0, "second": 1, "conv": 0}


def spread_out(net: nn.Module, how: str) -> nn.Module:
    """Lay the model over 4 ranks; parameters may be on the meta device."""
    if how == "one process":
        return net
    if how == "meshpar":
        return meshpar.parallelize(net, mesh_for("data=2,domain=2"))
    if how == "meshpar, over tensor":
        plan = {"first": "colwise", "second": "rowwise"}
        return meshpar.parallelize(net, mesh_for("data=2,tensor=2"), tensor_plan=plan)
    if how == "meshpar, copies":
        return meshpar.parallelize(net, mesh_for("data=2,domain=2"), data="ddp")
    both = mesh_for("data=2,tensor=2")
    if "parallelize_module" in how:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel(), "table": ColwiseParallel()}
        parallelize_module(net, both["tensor"], plan)
        net.head.weight = net.table.weight
    if how.startswith("fully_shard"):
        line = private.flatten(mesh_for("data=2,domain=2"), ("data", "domain"), "all_ranks")
        mesh = {"fully_shard": line, "fully_shard, copies": private.unflatten(line, (2, 2), ("replica", "shard"))}
        fully_shard(net, mesh=mesh.get(how, both["data"]), ignored_params={net.gain})  # it refuses 0-d ones
    return net


LAYOUTS = [
    *("one process", "meshpar", "meshpar, over tensor", "meshpar, copies", "fully_shard", "fully_shard, copies"),
    *("parallelize_module", "fully_shard over parallelize_module"),
]


def loaded(how: str, folder: str, *, meta: bool) -> None:
    expected = spread_out(net_of(1), how)
    if meta:
        with torch.device("meta"):
            net = Net()
    else:
        net = net_of(2)
    model = spread_out(net, how)
    names = list(model.state_dict())
    told = load_hf(model, folder, init=fill if meta else None)
    assert (told.missing, told.unexpected) == ((), ())
    assert list(model.state_dict()) == names
    for name, value in expected.state_dict().items():
        found = model.state_dict()[name]
        assert same_bits(found, value), name
        assert not isinstance(value, DTensor) or found.placements == value.placements
    if "parallelize_module" not in how:
        assert model.head.weight is model.table.weight
    assert model.scratch.tolist() == [7.0 if meta else 0.0] * 3
    own = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    held = [private.piece_of(t) if isinstance(t, DTensor) else t for t in own]
    assert told.num_bytes == sum(t.numel() * t.element_size() for t in held)


def fill(module: nn.Module) -> None:
    for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        value.fill_(7)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", LAYOUTS)
def test_the_bits_of_the_file_on_every_layout(how, meta, tmp_path):
    folder = write_model(tmp_path, net_of(1), 1 if meta else 3)
    run_ranks(loaded, 4 if how != "one process" else 1, how, str(folder), meta=meta)


PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(2), private.StridedShard(0, split_factor=2)]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
SHAPES = [(9, 5, 4), (3, 1, 2), (8, 8, 8), (0, 2, 3)]


def two_axes(folder: str, window_bytes: int) -> int:
    """Load every pair of placements on 2 x 2 ranks, over whole bytes of every dtype in turn."""
    kept, filling.WINDOW_BYTES = filling.WINDOW_BYTES, window_bytes
    try:
        return _two_axes(folder)
    finally:
        filling.WINDOW_BYTES = kept


def _two_axes(folder: str) -> int:
    mesh = mesh_for("data=2,tensor=2")["data", "tensor"]
    model, expected = nn.Module(), {}
    cases = [c for c in itertools.product(PLACEMENTS, PLACEMENTS, SHAPES) if can_cut(*c)]
    for i, (first, second, shape) in enumerate(cases):
        dtype = DTYPES[i % len(DTYPES)]
        whole = numbered(shape, dtype)
        words = whole.view(torch.uint8).view(*shape[:-1], shape[-1] * dtype.itemsize)
        cut = distribute_tensor(words, mesh, [first, second], src_data_rank=None)
        piece = private.piece_of(cut)
        target = piece.clone().fill_(99).view(dtype)
        stride = (shape[1] * shape[2], shape[2], 1)
        x = DTensor.from_local(target, mesh, [first, second], run_check=False, shape=torch.Size(shape), stride=stride)
        model.register_buffer(f"t{i}", x)
        expected[f"t{i}"] = whole, piece
    if dist.get_rank() == 0:
        write(folder, {name: whole for name, (whole, _) in expected.items()}, 2)
    dist.barrier()
    load_hf(model, folder)
    for name, (_, piece) in expected.items():
        assert same_bits(getattr(model, name), piece.contiguous().view(getattr(model, name).dtype)), name
    return len(cases)


def can_cut(first, second, shape) -> bool:
    """Leave out the last dim, which these tests cut by bytes, and strided shards that torch itself cannot make."""
    if Shard(2) in (first, second):
        return shape[2] % 4 == 0 and not any(isinstance(p, private.StridedShard) for p in (first, second))
    return not (isinstance(first, private.StridedShard) and isinstance(second, private.StridedShard))


@pytest.mark.parametrize("window_bytes", [4 << 20, 100])
def test_every_pair_of_placements_and_every_dtype(window_bytes, tmp_path):
    found = run_ranks(two_axes, 4, str(tmp_path), window_bytes)
    assert found[0] >= 60


def on_submeshes(folder: str) -> None:
    """Each rank has one of two tensors, on a mesh of two ranks; no rank reads the other's."""
    whole = {f"part{i}": numbered((5, 3), torch.float32) + i for i in range(2)}
    if dist.get_rank() == 0:
        write(folder, whole)
    dist.barrier()
    half = dist.get_rank() // 2
    mesh = mesh_for("data=2,tensor=2")["tensor"]
    model = nn.Module()
    zeros = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None)
    model.register_parameter(f"part{half}", nn.Parameter(zeros))
    told = load_hf(model, folder)
    assert told.unexpected == ()  # what another rank has is not
    value = model.get_parameter(f"part{half}")
    assert torch.equal(whole_of(value), whole[f"part{half}"])
    assert told.num_bytes == private.piece_of(value).numel() * 4


def test_ranks_with_tensors_of_their_own(tmp_path):
    run_ranks(on_submeshes, 4, str(tmp_path))


# ---- how it reads


def counted(folder: str, dim: int, width: int) -> tuple[int, int, int]:
    """Give the calls and the bytes that loading one weight takes, and its bytes on this rank."""
    mesh = mesh_for("data=1,domain=4")
    model = nn.Module()
    whole = torch.arange(64.0 * width).view(64, width)
    if dist.get_rank() == 0:
        write(folder, {"weight": whole})
    dist.barrier()
    layout = [Replicate(), Shard(dim), Replicate()]
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(64, width), mesh, layout, src_data_rank=None))
    seen = []
    real = os.preadv

    def preadv(handle, buffers, at):
        done = real(handle, buffers, at)
        seen.append(done)
        return done

    os.preadv = preadv
    try:
        load_hf(model, folder)
    finally:
        os.preadv = real
    expected = whole.chunk(4, dim)[dist.get_rank()]
    assert torch.equal(private.piece_of(model.weight), expected)
    return len(seen), sum(seen), expected.numel() * 4


def test_rows_side_by_side_are_one_call_and_short_gaps_too(tmp_path):
    for calls, num_bytes, own in run_ranks(counted, 4, str(tmp_path), 0, 40):
        assert (calls, num_bytes) == (1, own)
    for calls, num_bytes, own in run_ranks(counted, 4, str(tmp_path), 1, 40):
        assert (calls, num_bytes) == (1, 4 * own)  # columns of 40 bytes, gaps of 120
    for calls, num_bytes, own in run_ranks(counted, 4, str(tmp_path), 1, 8192):
        assert (calls, num_bytes) == (64, own)  # gaps of 24 KiB: no rank reads what is not its own


def test_calls_that_give_less_and_many_buffers(tmp_path, monkeypatch):
    folder = write(tmp_path, {"weight": torch.randn(700, 30)})
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: real(handle, [buffers[0][:777]], at))
    monkeypatch.setattr(filling, "WINDOW_BYTES", 4000)
    for dtype in (torch.float32, torch.float64):
        model = nn.Linear(30, 700, bias=False, dtype=dtype)
        load_hf(model, folder)
        assert torch.equal(model.weight, load_file(folder / "model.safetensors")["weight"].to(dtype))


def strided(folder: str) -> None:
    """Pieces that do not lie side by side in memory, in every dtype that is rounded, through small windows."""
    whole = torch.randn(24, 10, 6)
    if dist.get_rank() == 0:
        write(folder, {"weight": whole, "other": whole.double()})
    dist.barrier()
    mesh = mesh_for("data=1,domain=2")
    filling.WINDOW_BYTES, kept = 300, filling.WINDOW_BYTES
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            model = nn.Module()
            for name in ("weight", "other"):
                piece = torch.zeros(6, 24, 5, dtype=dtype).permute(1, 2, 0)
                layout = [Replicate(), Shard(1), Replicate()]
                x = DTensor.from_local(piece, mesh, layout, run_check=False, shape=whole.shape, stride=(60, 6, 1))
                model.register_buffer(name, x)
            load_hf(model, folder)
            expected = whole.chunk(2, 1)[dist.get_rank()]
            assert torch.equal(private.piece_of(model.weight), expected.to(dtype))
            assert torch.equal(private.piece_of(model.other), expected.double().to(dtype))
            assert private.piece_of(model.weight).stride() == (5, 1, 120)
    finally:
        filling.WINDOW_BYTES = kept


def test_pieces_with_strides_and_other_dtypes(tmp_path):
    run_ranks(strided, 2, str(tmp_path))


def test_autograd_sees_that_weights_have_changed(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    folder = write_model(tmp_path, copy.deepcopy(model))
    loss = model(torch.randn(2, 3)).sum()
    load_hf(model, folder)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_the_model_run(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3))
    seen = []
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append(float(module[0].bias[0])))
    folder = write(tmp_path, {"0.weight": torch.zeros(3, 3), "0.bias": torch.full((3,), 4.0)})
    load_hf(model, folder)
    assert seen == [4.0]


def after_a_forward(folder: str) -> None:
    """Units that keep their gathered weights after a forward gather them anew."""
    x = torch.arange(4)
    line = private.flatten(mesh_for("data=2,domain=2"), ("data", "domain"), "all_ranks")
    torch.manual_seed(1)
    expected = Tied()(x)
    for model in (fully_shard(Tied(), mesh=line, reshard_after_forward=False), laid_out(Tied(), "meshpar")):
        model(x)
        load_hf(model, folder)
        y = model(x)
        y = meshpar.gather(y)[:4] if isinstance(y, DTensor) else y  # both data ranks give the same four
        assert torch.allclose(y, expected, atol=1e-6)


def test_a_forward_after_loading_has_the_new_values(tmp_path):
    torch.manual_seed(1)
    run_ranks(after_a_forward, 4, str(write_model(tmp_path, Tied())))


def stages(folder: str) -> None:
    """Ranks with modules of their own, on the meta device; one of them has what no checkpoint has."""
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3)}) if dist.get_rank() else nn.ModuleDict({"b": Rotary()})
    load_hf(model, folder, init=fill)


def test_stages_that_would_not_go_on_alike(tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": Rotary()})
    text = refused(CheckpointError, stages, str(write_model(tmp_path, net)), num_ranks=2)
    assert "such tensors on rank 0, none on rank 1" in text


# ---- ties


def tied(how: str, folder: str) -> None:
    model = laid_out(Tied(), how)
    told = load_hf(model, folder)
    assert told.missing == ()
    state = model.state_dict()
    whole = load_file(f"{folder}/model.safetensors")
    value = whole.get("table.weight", whole.get("head.weight"))
    for name in ("table.weight", "head.weight"):
        assert torch.equal(whole_of(state[name]), value), name


@pytest.mark.parametrize("there", [["table.weight"], ["head.weight"], ["table.weight", "head.weight"]])
def test_one_name_of_a_tie_is_enough(there, tmp_path):
    net = Tied()
    folder = write(tmp_path, {n: v for n, v in net.state_dict().items() if n.startswith("body") or n in there})
    for how in ("meshpar", "fully_shard", "parallelize_module"):
        run_ranks(tied, 4, how, str(folder))
    tied("none", str(folder))


def test_ties_that_differ_in_the_file(tmp_path):
    values = Tied().state_dict()
    values["head.weight"] = values["head.weight"].clone()
    values["head.weight"][7, 2] += 1
    folder = str(write(tmp_path, values))
    text = refused(CheckpointError, load_tied, folder, num_ranks=4)
    assert "head.weight, tied to table.weight: other values, (9, 6) of torch.float32" in text
    values["head.weight"] = torch.zeros(9, 5)
    text = refused(CheckpointError, load_tied, str(write(tmp_path, values)), num_ranks=4)
    assert "table.weight and head.weight: tied, and (9, 6) of torch.float32 and (9, 5) of torch.float32" in text


def load_tied(folder: str) -> None:
    model = laid_out(Tied(), "fully_shard")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        load_hf(model, folder)
    finally:
        assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())


# ---- models on the meta device


class Rotary(nn.Module):
    """Has a table that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("angles", torch.linspace(0, 1, 4), persistent=False)


def with_rotary(folder: str, *, helped: bool) -> None:
    with torch.device("meta"):
        net = Rotary()
    model = meshpar.parallelize(net, mesh_for("data=1,domain=2"))

    def init(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.angles.copy_(torch.linspace(0, 1, 4))

    try:
        load_hf(model, folder, init=init if helped else None)
    except Exception:
        assert all(p.is_meta for p in model.parameters())
        assert model.angles.is_meta
        raise
    assert torch.equal(model.angles, torch.linspace(0, 1, 4))
    assert torch.equal(whole_of(model.layer.weight), load_file(f"{folder}/model.safetensors")["layer.weight"])


def test_what_no_checkpoint_holds_needs_an_init_function(tmp_path):
    folder = str(write_model(tmp_path, Rotary()))
    run_ranks(with_rotary, 2, folder, helped=True)
    text = refused(SpecError, with_rotary, folder, helped=False)
    assert "angles, of a Rotary" in text


# ---- inference mode


def under_inference_mode(folder: str) -> None:
    expected = spread_out(net_of(1), "fully_shard")
    with torch.inference_mode():
        model = spread_out(net_of(2), "fully_shard")
        load_hf(model, folder)
        made = nn.Linear(6, 14)  # inference tensors themselves
        made.weight = nn.Parameter(torch.zeros(14, 6).t().contiguous().t())
        wide = nn.Linear(6, 14, dtype=torch.float64)
    for name, value in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], value), name
    for layer in (made, wide):
        assert layer.weight.is_inference()
        load_hf(nn.ModuleDict({"first": layer}), folder, strict=False)
        assert torch.equal(layer.weight, net_of(1).first.weight.to(layer.weight.dtype))


def test_under_inference_mode(tmp_path):
    run_ranks(under_inference_mode, 4, str(write_model(tmp_path, net_of(1))))


def wrapped(folder: str) -> None:
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    compiled = nn.Module()
    compiled._orig_mod = nn.Sequential(nn.Linear(2, 2))
    for model, layer in ((net, net.module[0]), (compiled, compiled._orig_mod[0])):
        assert load_hf(model, folder).missing == ()
        assert torch.equal(layer.weight, load_file(f"{folder}/model.safetensors")["0.weight"])


def test_wrapped_models(tmp_path):
    run_ranks(wrapped, 2, str(write_model(tmp_path, nn.Sequential(nn.Linear(2, 2)))))
