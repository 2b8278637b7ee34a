"""Pieces and DTensors: our crossing against torch's own, in values, gradients and what else a caller can see."""

import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshpar
from meshpar import pieces, private
from meshpar.testing import mesh_for, run_ranks

LAYOUTS = {
    "rows": (Replicate(), Shard(0), Replicate()),
    "whole": (Replicate(), Replicate(), Replicate()),
    "partial": (Replicate(), Partial(), Replicate()),
}


def ours(piece, mesh, placements, shape):
    spec = private.spec_of(mesh, placements, shape, private.global_stride(piece, shape), piece.dtype)
    return private.enter(piece, spec)


def torchs(piece, mesh, placements, shape):
    stride = private.global_stride(piece, shape)
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def outcome(enter, leave, placements, grad_placements, order):
    """Go in and out again, and differentiate once or twice."""
    mesh = mesh_for("data=1,domain=2")
    rows = 3 if placements[1] != Shard(0) else (2 if mesh.get_coordinate()[1] == 0 else 1)
    piece = torch.arange(1.0, 4 * rows + 1, dtype=torch.float64).view(rows, 4).requires_grad_()
    inside = enter(piece * 2, mesh, placements, (3, 4))
    outside = leave(inside, grad_placements)
    seed = torch.full_like(outside, 3.0) + mesh.get_coordinate()[1]
    (first,) = torch.autograd.grad((outside**3 * seed).sum(), piece, create_graph=order == 2)
    found = [inside.to_local().detach().clone(), outside.detach().clone(), first.detach().clone()]
    if order == 2:
        (second,) = torch.autograd.grad(first.sum(), piece)
        found.append(second)
    return found, (inside.placements, inside.stride(), inside.dtype, inside.requires_grad, outside.requires_grad)


def check_like_torch(name, order):
    placements = LAYOUTS[name]
    grads = [None, (Replicate(), Partial(), Replicate())] if name == "whole" and order == 1 else [None]
    for grad in grads:
        mine = outcome(ours, private.leave, placements, grad, order)
        theirs = outcome(torchs, lambda x, g: x.to_local(grad_placements=g), placements, grad, order)
        assert mine[1] == theirs[1]
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True)), (name, grad)


# Not the second order of "partial": torch itself does not differentiate the redistribution in its backward.
@pytest.mark.parametrize(("name", "order"), [("rows", 1), ("rows", 2), ("whole", 1), ("whole", 2), ("partial", 1)])
def test_values_and_gradients_are_those_of_from_local_and_to_local(name, order):
    run_ranks(check_like_torch, 2, name, order)


def check_without_grad():
    mesh = mesh_for("data=1,domain=2")
    piece = torch.ones(2, 4, requires_grad=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        x = pieces.whole(piece, mesh, LAYOUTS["rows"], (4, 4))
        assert not x.requires_grad
        assert pieces.local(x).data_ptr() == piece.data_ptr()
    parameter = nn.Parameter(pieces.whole(torch.ones(2, 4), mesh, LAYOUTS["rows"], (4, 4)))
    assert isinstance(pieces.local(parameter), nn.Parameter) == isinstance(parameter.to_local(), nn.Parameter)


def test_nothing_is_tracked_and_nothing_warned_without_gradients():
    run_ranks(check_without_grad, 2)


def check_calls():
    mode = importlib.import_module("meshpar.spmd").Spmd
    seen, kept = [], mode.__torch_function__

    def counting(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return kept(self, func, types, args, kwargs)

    mesh = mesh_for("data=1,domain=2")
    model = meshpar.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), mesh, data="ddp")
    x = meshpar.shard(torch.randn(1, 2, 6, 5), mesh)
    mode.__torch_function__ = counting
    try:
        model(x)
    finally:
        mode.__torch_function__ = kept
    names = [getattr(func, "__name__", str(func)) for func in seen]
    assert "conv2d" not in names
    assert len(names) <= 4, names


def test_the_rule_of_a_convolution_runs_outside_of_the_mode():
    run_ranks(check_calls, 2)
