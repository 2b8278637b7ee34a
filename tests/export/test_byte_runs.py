"""Which bytes a rank holds, against an oracle that cuts a tensor of numbered bytes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshpar import private
from meshpar.errors import ShardingError
from meshpar.export.runs import (
    Layout,
    Part,
    has_two_readings,
    layout_of,
    part_at,
    part_of,
    readings_of,
    runs,
    shared_out,
)
from meshpar.testing import mesh_for, run_ranks


def left_to_right(whole, layout, where):
    """Cut as DTensor does, by lists of rows: slow and obvious."""
    rows = {d: list(range(n)) for d, n in enumerate(whole.shape)}

    def chunk(items, p):
        c = -(-len(items) // p)
        return [items[i * c : (i + 1) * c] for i in range(p)]

    for size, placement, i in zip(layout.sizes, layout.placements, where, strict=True):
        if isinstance(placement, Replicate):
            continue
        factor = getattr(placement, "split_factor", 1)
        rows[placement.dim] = [r for part in chunk(rows[placement.dim], factor) for r in chunk(part, size)[i]]
    for d, kept in rows.items():
        whole = whole.index_select(d, torch.tensor(kept, dtype=torch.int64))
    return whole


def put_together(pieces, num_bytes):
    """Write the runs of pieces, given as (part, bytes of the piece), where they belong; count each byte."""
    whole, count = torch.full((num_bytes,), -1), torch.zeros(num_bytes, dtype=torch.int64)
    for part, piece, item, start, stop in pieces:
        last = None
        for run in runs(part, item, start, stop):
            assert run.size > 0
            if last is not None:  # ascending, and never two that could be one
                assert run.at > last.at + last.size or run.begin > last.begin + last.size
                assert run.begin >= last.begin + last.size
                assert run.at >= last.at + last.size
            last = run
            whole[run.at : run.at + run.size] = piece[run.begin : run.begin + run.size]
            count[run.at : run.at + run.size] += 1
    return whole, count


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    kinds = [Replicate()]
    for dim in range(len(shape)):
        kinds += [Shard(dim), *(private.StridedShard(dim, split_factor=f) for f in (1, 2, 3, 4))]
    return shape, Layout(sizes, tuple(draw(st.sampled_from(kinds)) for _ in sizes))


@given(layouts(), st.sampled_from([1, 2, 4]))
@settings(max_examples=150)
def test_drawn_layouts_read_from_left_to_right(drawn, item):
    shape, layout = drawn
    num_bytes = math.prod(shape) * item
    numbered = torch.arange(num_bytes).view(*shape, item)
    pieces = []
    for where in itertools.product(*map(range, layout.sizes)):
        part = part_at(shape, layout, where, nested=False)
        piece = left_to_right(numbered, layout, where)
        assert part.sizes == tuple(piece.shape[:-1])
        pieces.append((part, piece.flatten(), item, 0, None))
    whole, count = put_together(pieces, num_bytes)
    assert whole.tolist() == list(range(num_bytes))
    assert set(count.tolist()) <= {layout.replicas}


@given(layouts(), st.integers(0, 30), st.integers(0, 30))
def test_a_cut_out_of_a_piece_is_the_runs_of_its_bytes(drawn, start, more):
    shape, layout = drawn
    for where in itertools.islice(itertools.product(*map(range, layout.sizes)), 4):
        part = part_at(shape, layout, where, nested=False)
        slow = [r.at + i for r in runs(part, 2) for i in range(r.size)][start : start + more]
        assert [r.at + i for r in runs(part, 2, start, start + more) for i in range(r.size)] == slow


@given(layouts())
def test_readings_agree_where_sizes_divide_and_each_covers_the_tensor(drawn):
    shape, layout = drawn
    by_reading = {}
    for nested in (True, False):
        parts = [part_at(shape, layout, w, nested=nested) for w in itertools.product(*map(range, layout.sizes))]
        if None in parts:
            assert nested
            assert has_two_readings(shape, layout)
            return
        counted = [0] * math.prod(shape)
        for part in parts:
            for run in runs(part, 1):
                for i in range(run.size):
                    counted[run.at + i] += 1
        assert set(counted) <= {layout.replicas}
        by_reading[nested] = parts
    if not has_two_readings(shape, layout):
        held = [[list(runs(part, 1)) for part in parts] for parts in by_reading.values()]
        assert held[0] == held[1]


@given(st.integers(0, 10**7), st.integers(1, 5))
def test_replicas_share_out_all_bytes_once(num_bytes, replicas):
    found = [shared_out(num_bytes, replicas, i) for i in range(replicas)]
    assert found[0][0] == 0
    assert found[-1][1] == num_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_replicas_are_numbered_along_the_axes_that_replicate():
    layout = Layout((2, 3, 2), (Replicate(), Shard(0), Replicate()))
    assert layout.replicas == 4
    assert [layout.replica_at(w) for w in [(0, 2, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]] == [0, 1, 2, 3]


def pieces_of_real_ones():
    """Tell runs and values of what torch itself shards: fully_shard over a tensor axis, and distributed ones."""
    mesh = mesh_for("data=3,tensor=2")[("data", "tensor")]
    told = {}
    for n in (6, 7, 2, 1):
        net = nn.Sequential(nn.Linear(n, n, bias=False), nn.Linear(n, n, bias=False))
        for layer in net:
            layer.weight.data = torch.arange(float(n * n)).view(n, n)
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        for i, layer in enumerate(net):
            told[f"fsdp of tensor, {n}, {i}"] = layer.weight
        whole = torch.arange(float(n * 4)).view(n, 4)
        lies = {
            "nested": (Shard(0), Shard(0)),
            "strided": (private.StridedShard(0, split_factor=2), Shard(0)),
            "disjoint": (private.StridedShard(0, split_factor=2), Replicate()),
            "columns": (Shard(1), Shard(0)),
            "both": (Shard(1), Shard(1)),
        }
        for name, placements in lies.items():
            told[f"{name}, {n}"] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    found = {}
    for name, x in told.items():
        where, layout = x.device_mesh.get_coordinate(), layout_of(x)
        parts = {"n": part_at(x.shape, layout, where), "l": part_at(x.shape, layout, where, nested=False)}
        listed = {key: [(r.at, r.size) for r in runs(part, 1)] for key, part in parts.items() if part is not None}
        if len(readings_of(x)) == 1:
            assert part_of(x) == parts[readings_of(x)]
        found[name] = (x.numel(), listed, x.to_local().detach().flatten().tolist(), readings_of(x))
    return found


def test_torchs_own_shards_hold_the_bytes_that_the_runs_say():
    ranks = run_ranks(pieces_of_real_ones, 6)
    seen = set()
    for name in ranks[0]:
        # A piece that fits both readings says nothing: what the pieces of all ranks fit is the reading.
        fitting = [key for key in "nl" if all(key in rank[name][3] for rank in ranks)]
        assert fitting, name
        seen.add("".join(fitting))
        for key in fitting:
            whole = [-1.0] * ranks[0][name][0]
            for _, listed, values, _ in (rank[name] for rank in ranks):
                assert sum(size for _, size in listed[key]) == len(values)
                places = [at + i for at, size in listed[key] for i in range(size)]
                for at, value in zip(places, values, strict=True):
                    whole[at] = value
            assert whole == [float(i) for i in range(len(whole))], (name, key)
    assert seen == {"nl", "n", "l"}


def refused_ones():
    mesh = mesh_for("data=2,tensor=2")[("data", "tensor")]
    with pytest.raises(ShardingError, match="no rank holds a part"):
        part_of(DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False))
    wrong = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0), Replicate()], shape=(5, 2), stride=(2, 1))
    if mesh.get_coordinate()[0] == 1:
        with pytest.raises(ShardingError, match=r"\(3, 2\) on rank . for \(5, 2\)"):
            part_of(wrong)


def test_partials_and_strange_pieces_are_refused():
    run_ranks(refused_ones, 4)


def test_a_plain_tensor_is_all_of_itself():
    assert part_of(torch.zeros(3, 2).t()) == Part((2, 3), (((0, 2),), ((0, 3),)))
    assert list(runs(part_of(torch.zeros(())), 4)) == [(0, 0, 4)]
    assert list(runs(part_of(torch.zeros(0, 3)), 4)) == []
