"""Shares of parameters: against cutting for real, and put together again, for every layout that occurs."""

import itertools

import pytest
import runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshpar
from meshpar import private
from meshpar.errors import ShardingError
from meshpar.shares import cut_as, share_at, share_of, whole_of
from meshpar.testing import mesh_for, run_ranks


def strided(dim, parts):
    return private.StridedShard(dim, split_factor=parts)


@st.composite
def layouts(draw):
    """Draw a shape, mesh sizes, placements, and the cuts in the order in which they are made."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["fsdp", "hsdp", "tensor", "tensor, other dim", "nested"]))
    if kind == "fsdp":
        return shape, sizes, (Shard(0), Replicate(), Replicate()), [(0, 0)]
    if kind == "hsdp":
        return shape, sizes, (Replicate(), Shard(0), Replicate()), [(1, 0)]
    if kind == "tensor":
        return shape, sizes, (Replicate(), strided(0, sizes[2]), Shard(0)), [(2, 0), (1, 0)]
    if kind == "tensor, other dim":
        cuts = [(2, dim), (1, 0)]
        return shape, sizes, (Replicate(), Shard(0) if dim else strided(0, sizes[2]), Shard(dim)), cuts
    return shape, sizes, (Shard(dim), Shard(dim), Shard(dim)), [(0, dim), (1, dim), (2, dim)]


def really_cut(whole, sizes, cuts, where):
    """Cut by slices, row by row: the slow and obvious way."""
    for axis, dim in cuts:
        rows = -(-whole.shape[dim] // sizes[axis])
        picked = [i for i in range(whole.shape[dim]) if rows and i // rows == where[axis]]
        whole = whole.index_select(dim, torch.tensor(picked, dtype=torch.int64))
    return whole


@given(layouts())
def test_shares_are_the_rows_of_real_cuts_and_cover_the_tensor(layout):
    shape, sizes, placements, cuts = layout
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for where in itertools.product(*map(range, sizes)):
        share = share_at(shape, sizes, placements, where)
        expected = really_cut(whole, sizes, cuts, where)
        assert share.sizes == tuple(expected.shape)
        block = tuple(slice(a, a + n) for a, n in zip(share.offsets, share.sizes, strict=True))
        assert torch.equal(whole[block], expected)
        seen[block] += 1
    copies = 1
    for axis, size in enumerate(sizes):
        copies *= 1 if axis in dict(cuts) else size
    assert bool((seen == copies).all())


def test_a_packed_activation_is_no_share():
    with pytest.raises(ShardingError, match="not one block of rows"):
        share_at((12,), (2, 2), (Shard(0), strided(0, 3)), (0, 0))


def put_together(spec):
    torch.manual_seed(0)
    net = runs.Parts()
    model = runs.split(spec, net)
    strange = 0
    for name, p in model.named_parameters():
        whole = dict(net.named_parameters())[name].detach()
        assert torch.equal(whole_of(p), whole), name
        if isinstance(p, DTensor):
            again = cut_as(whole, p)
            assert again.placements == p.placements
            assert torch.equal(private.piece_of(again), private.piece_of(p).detach()), name
            assert tuple(private.piece_of(p).shape) == share_of(p).sizes
            strange += any(not isinstance(q, Shard | Replicate) for q in p.placements)
    for dtype in (torch.bool, torch.complex64, torch.bfloat16, torch.int16):
        p = model.get_parameter("first.weight")
        whole = torch.arange(55).view(11, 5).to(dtype)
        assert torch.equal(whole_of(cut_as(whole, p) if isinstance(p, DTensor) else whole), whole)
    return strange


@pytest.mark.parametrize(
    ("spec", "num_strange"), [("data=2,tensor=2", 6), ("data=1,tensor=4", 0), ("data=4", 0), ("data=2,domain=2", 0)]
)
def test_parameters_cut_twice_are_put_together(spec, num_strange):
    """FIELD 38: 7 channels over 2 x 2; 3 rows over 4; also what tensor and data cut along the same dim."""
    assert run_ranks(put_together, 4, spec) == [num_strange] * 4


def cut_by_others(shape, style, folder):
    """Cut a small weight as `fully_shard` after `parallelize_module` does, which leaves some ranks nothing at all."""
    mesh = mesh_for("data=2,tensor=2")
    net = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)).double()
    whole = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).view(shape)
    with torch.no_grad():
        net[0].weight.copy_(whole)
    parallelize_module(net, mesh["tensor"], {"0": style()})
    fully_shard(net, mesh=mesh["data"])
    weight = net[0].weight
    assert torch.equal(whole_of(weight), whole)
    assert torch.equal(cut_as(whole, weight).to_local(), weight.to_local().detach())
    assert torch.equal(meshpar.full_state_dict(net)["0.weight"], whole)
    meshpar.save_checkpoint(folder, net, step=1)
    with torch.no_grad():
        weight.zero_()
    meshpar.load_checkpoint(folder, net)
    assert torch.equal(whole_of(net[0].weight), whole)
    return tuple(weight.to_local().shape)


@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (3, 5), (1, 5)])
def test_a_rank_that_two_cuts_leave_nothing(shape, style, tmp_path):
    found = run_ranks(cut_by_others, 4, shape, style, str(tmp_path))
    assert sum(torch.Size(local).numel() for local in found) == torch.Size(shape).numel()


def test_field_43_a_full_state_dict_holds_plain_tensors():
    run_ranks(full_state, 4, "data=2,tensor=2")
    run_ranks(full_state, 4, "data=4")


def full_state(spec):
    torch.manual_seed(0)
    net = runs.Parts()
    model = runs.split(spec, net)
    expected = net.state_dict()
    found = meshpar.full_state_dict(model)
    assert list(found) == list(expected)
    assert all(type(v) is torch.Tensor and v.device.type == "cpu" for v in found.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert meshpar.full_state_dict(model, ranks="first").keys() == (
        expected.keys() if torch.distributed.get_rank() == 0 else {}.keys()
    )
    # and back: a plain state dict of one process is cut to the shares, strided ones too
    other = {name: torch.randn(value.shape) for name, value in expected.items()}
    torch.distributed.broadcast_object_list(box := [other], src=0)
    model.load_state_dict(box[0])
    again = meshpar.full_state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in box[0].items())
    with pytest.raises(meshpar.CheckpointError, match="unknown ranks"):
        meshpar.full_state_dict(model, ranks="some")


def full_state_of_a_run(spec):
    run = runs.Run(spec, "sgd")
    run.train(1)
    found = meshpar.full_state_dict(run.model)
    assert found["blocks.2.0.weight"] is found["blocks.0.0.weight"]  # a tie is one
    alone = runs.Run("", "sgd")
    alone.train(1)
    expected = alone.model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert found[name].dtype == value.dtype
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-13), name
    alone.model.load_state_dict(found)


def test_the_full_state_of_a_run_is_that_of_one_process():
    run_ranks(full_state_of_a_run, 4, "data=2,domain=2")
    run_ranks(full_state_of_a_run, 1, "")
