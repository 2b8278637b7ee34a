"""Convolutions while their halo travels: the integers by brute force, the order of things, what is kept, gradients."""

import copy
import functools
import unittest.mock as mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshpar
from meshpar.batch import shard
from meshpar.intervals import FILL, chunks, expand
from meshpar.record import record
from meshpar.rules import conv as rules_conv
from meshpar.rules import overlap as overlapping
from meshpar.rules.conv import wanted_rows
from meshpar.rules.windows import output_shape
from meshpar.scope import spmd
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for
from meshpar.testing.pool import run_ranks


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_edges_are_the_outputs_that_read_rows_of_others(data):
    p = data.draw(st.integers(2, 5))
    n = data.draw(st.integers(p, 60))
    kernel, stride, dilation = (data.draw(st.integers(1, most)) for most in (7, 3, 2))
    span = (kernel - 1) * dilation + 1
    pad = data.draw(st.integers(0, span // 2))
    out = (n + 2 * pad - span) // stride + 1
    if out < 1:
        return
    rows = wanted_rows(n, p, out, kernel, stride, dilation, pad, pad, "constant")
    for me, (own, outputs) in enumerate(zip(chunks(n, p), chunks(out, p), strict=True)):
        how = overlapping.overlap(rows, n, out, kernel, stride, dilation, me)
        if how is None:
            continue
        firsts = [i * stride - pad for i in range(*outputs)]
        reads = [{first + j * dilation for j in range(kernel)} & set(range(n)) for first in firsts]
        others = [k for k, under in enumerate(reads) if any(not own[0] <= row < own[1] for row in under)]
        edges = [k for edge in how.edges for k in range(*edge.outputs)]
        assert set(others) <= set(edges)
        real = [row for row in expand(how.want[me]) if row != FILL]
        assert set(real) == {row for k in others for row in reads[k]} - set(range(*own))
        for edge in how.edges:
            assert firsts[0] + edge.rows[0] == firsts[edge.outputs[0]]
            assert edge.rows[1] - edge.rows[0] == firsts[edge.outputs[1] - 1] - firsts[edge.outputs[0]] + span
            halo = expand(how.want[me])[edge.start : edge.start + edge.halo[1] - edge.halo[0]]
            assert all(row in (FILL, firsts[0] + i) for row, i in zip(halo, range(*edge.halo), strict=True))


@pytest.mark.parametrize(
    ("n", "p", "kernel", "stride", "pad", "is_open"),
    [
        (721, 8, 3, 1, 1, True),
        (721, 8, 7, 1, 3, True),
        (720, 8, 3, 2, 1, True),
        (16, 4, 5, 1, 2, True),
        (721, 8, 3, 2, 1, False),  # odd rows: ranks own other rows than they make
        (720, 8, 4, 1, 1, False),  # fewer rows come out
        (720, 8, 1, 1, 0, False),  # nothing is read of others
        (9, 8, 3, 1, 1, False),  # some ranks have nothing
    ],
)
def test_the_way_is_open_where_ranks_make_the_rows_that_they_own(n, p, kernel, stride, pad, is_open):
    out = (n + 2 * pad - kernel) // stride + 1
    rows = wanted_rows(n, p, out, kernel, stride, 1, pad, pad, "constant")
    found = [overlapping.overlap(rows, n, out, kernel, stride, 1, me) for me in range(p)]
    assert [how is not None for how in found] == [is_open] * p


class Watched:
    """A message of which it is written down when somebody waits for it."""

    def __init__(self, work, seen):
        self.work, self.seen = work, seen

    def wait(self):
        self.seen.append("wait")
        return self.work.wait()


def in_order():
    seen = []
    post, run, transposed = dist.batch_isend_irecv, overlapping.Conv.run, overlapping.Conv.transposed
    x = shard(torch.randn(2, 3, 12, 6), mesh_for("data=1,domain=2")).requires_grad_()
    with (
        mock.patch.object(
            dist, "batch_isend_irecv", lambda ops: seen.append("post") or [Watched(w, seen) for w in post(ops)]
        ),
        mock.patch.object(overlapping.Conv, "run", lambda *a: seen.append("run") or run(*a)),
        mock.patch.object(overlapping.Conv, "transposed", lambda *a: seen.append("transposed") or transposed(*a)),
        spmd(),
    ):
        y = F.conv2d(x, torch.randn(4, 3, 3, 3, requires_grad=True), padding=1)
        forward, seen[:] = list(seen), []
        y.sum().backward()
    return forward, seen


def test_the_own_rows_are_convolved_while_the_halo_travels():
    for forward, backward in run_ranks(in_order, 2):
        assert forward == ["post", "post", "run", "wait", "wait", "run"], "own rows, then the edge"
        assert backward == ["transposed", "post", "post", "transposed", "wait", "wait"], "the edge, then own rows"


def kept():
    """Give what autograd keeps of a convolution: bytes of tensors that do not share the input's memory, and errors."""
    x = shard(torch.randn(1, 2, 40, 8), mesh_for("data=1,domain=4")).requires_grad_()
    w = torch.randn(2, 2, 3, 3, requires_grad=True)
    saved = []
    with spmd():
        h = x * 1
        own = h.to_local().untyped_storage().data_ptr(), w.untyped_storage().data_ptr()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = F.conv2d(h, w, padding=1)
        beside = sum(t.numel() for t in saved if t.untyped_storage().data_ptr() not in own)
        y = F.conv2d(h, w, padding=1)
        h.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
    return beside


def test_only_the_rows_of_others_are_kept_beside_the_input():
    assert run_ranks(kept, 4) == [2 * 8, 2 * 2 * 8, 2 * 2 * 8, 2 * 8]


def twice(x, w, b):
    y = F.conv2d(x, w, b, padding=2, dilation=2, groups=2)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return y * g[:, :4].square()


def differentiated_twice(spec):
    torch.manual_seed(3)
    x = torch.randn(2, 4, 16, 5, dtype=torch.float64)
    w, b = torch.randn(4, 2, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    return max(assert_same(twice, [x], mesh=mesh_for(spec), weights=[w, b]).errors.values())


@pytest.mark.parametrize("spec", ["data=1,domain=2", "data=2,domain=2", "data=1,domain=4"])
def test_gradients_of_gradients(spec):
    assert max(run_ranks(differentiated_twice, 2 if spec == "data=1,domain=2" else 4, spec)) < 1e-10


def partly_needed():
    """Give the messages of backwards in which the input, or the weight, needs no gradient."""
    torch.manual_seed(3)
    whole, w = torch.randn(2, 3, 12, 6, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    sent, off = [], 0.0
    for of_x, of_w in ((False, True), (True, False)):
        x = shard(whole, mesh_for("data=1,domain=2")).requires_grad_(of_x)
        weight = w.clone().requires_grad_(of_w)
        plain, plain_w = whole.clone().requires_grad_(of_x), w.clone().requires_grad_(of_w)
        with record() as log, spmd():
            F.conv2d(x, weight, padding=1).square().sum().backward()
        F.conv2d(plain, plain_w, padding=1).square().sum().backward()
        sent.append(sum(e.kind == "halo" and e.backward for e in log.entries))
        if of_x:
            off = max(off, float((meshpar.gather(x.grad) - plain.grad).abs().max()))
        else:
            total = weight.grad.clone()
            dist.all_reduce(total)
            off = max(off, float((total - plain_w.grad).abs().max()))
    return sent, off


def test_nothing_is_sent_home_for_an_input_without_a_gradient():
    for sent, off in run_ranks(partly_needed, 2):
        assert sent == [0, 1]
        assert off < 1e-10


def under_autocast():
    torch.manual_seed(3)
    whole, net = torch.randn(2, 8, 24, 16), nn.Conv2d(8, 8, 3, padding=1)
    model = meshpar.rewrite(net)
    x = shard(whole, mesh_for("data=1,domain=2")).requires_grad_()
    with record() as log, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    plain = whole.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        z = net(plain)
    assert y.dtype == z.dtype == torch.bfloat16
    y.to_local().float().square().sum().backward()
    z.float().square().sum().backward()
    off = (meshpar.gather(y).float() - z.float()).abs().max() / z.abs().max()
    off_grad = (meshpar.gather(x.grad) - plain.grad).abs().max() / plain.grad.abs().max()
    return float(off), float(off_grad), sum(e.num_bytes for e in log.entries if e.kind == "halo")


def test_autocast_sends_what_it_convolves():
    for off, off_grad, num_bytes in run_ranks(under_autocast, 2):
        assert off < 2**-7
        assert off_grad < 2**-7
        assert num_bytes == 2 * 8 * 16 * 2, "two samples, 8 channels, a row of 16, in bfloat16"


def checkpointed(policy):
    """Give how far gradients through a checkpointed block are from those of one process."""
    torch.manual_seed(5)
    output_shape.cache_clear()  # a question that is asked in the forward alone must not be counted
    rules_conv._READY.clear()
    whole = torch.randn(2, 3, 16, 6, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)).double()
    given = {"use_reentrant": False}
    if policy is not None:
        given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    plain, model = whole.clone().requires_grad_(), meshpar.rewrite(copy.deepcopy(net))
    net(plain).square().sum().backward()
    x = shard(whole, mesh_for("data=1,domain=2")).requires_grad_()
    with spmd():
        checkpoint(model, x, **given).square().sum().backward()
    return float((meshpar.gather(x.grad) - plain.grad).abs().max())


def keep_convolutions(ctx, op, *args, **kwargs):
    is_one = op in (torch.ops.aten.convolution.default, torch.ops.aten.mkldnn_convolution.default)
    return CheckpointPolicy.MUST_SAVE if is_one else CheckpointPolicy.PREFER_RECOMPUTE


def keep_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


@pytest.mark.parametrize("policy", [None, keep_convolutions, keep_all], ids=["none", "convolutions", "all"])
def test_what_checkpointing_keeps_is_not_written_into(policy):
    assert max(run_ranks(checkpointed, 2, policy)) < 1e-12


def with_complex_numbers():
    torch.manual_seed(5)
    x, w = torch.randn(2, 3, 8, 5, dtype=torch.complex128), torch.randn(4, 3, 3, 3, dtype=torch.complex128)
    with spmd():
        y = F.conv2d(shard(x, mesh_for("data=1,domain=2")), w, padding=1)
    return float((meshpar.gather(y) - F.conv2d(x, w, padding=1)).abs().max())


def test_complex_numbers_are_convolved_by_torch():
    assert max(run_ranks(with_complex_numbers, 2)) < 1e-12


def hooked_once(norm):
    """Give the gradient of a weight whose hook doubles it, of a graph of gradients, beside that without the hook."""
    torch.manual_seed(5)
    whole, found = torch.randn(2, 4, 8, 5, dtype=torch.float64), []
    for hook in (False, True):
        x = shard(whole, mesh_for("data=1,domain=2")).requires_grad_()
        w = torch.ones(4, dtype=torch.float64) if norm else torch.ones(4, 4, 3, 3, dtype=torch.float64)
        w.requires_grad_()
        if hook:
            w.register_hook(lambda g: 2 * g)
        with spmd():
            y = F.group_norm(x, 2, w) if norm else F.conv2d(x, w, padding=1)
            (y * whole.shape[0]).pow(2).sum().backward(create_graph=True)
        found.append(w.grad.detach())
    return float((found[1] - 2 * found[0]).abs().max() / found[0].abs().max())


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "conv"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_hooks_run_once_where_gradients_have_a_graph(norm):
    assert max(run_ranks(hooked_once, 2, norm)) < 1e-12


def of_shapes_alone():
    x = shard(torch.empty(2, 3, 8, 5, device="meta"), mesh_for("data=1,domain=2"))
    with record() as log, spmd():
        y = F.pad(x, (0, 0, 1, 1))
    return tuple(y.shape), y.device.type, len(log.entries)


def test_tensors_without_data_are_not_sent():
    assert run_ranks(of_shapes_alone, 2) == [((2, 3, 10, 5), "meta", 0)] * 2


def bias_written():
    """Write into the bias alone between two backwards of one graph."""
    x = shard(torch.randn(2, 3, 8, 5), mesh_for("data=1,domain=2")).requires_grad_()
    w, b = torch.randn(4, 3, 3, 3), torch.zeros(4, requires_grad=True)
    with spmd():
        loss = F.conv2d(x, w, b, padding=1).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        b += 1
    loss.backward()
    return b.grad.tolist()


def test_a_bias_is_not_kept():
    found = torch.tensor(run_ranks(bias_written, 2)).sum(0)
    assert found.tolist() == [2 * 2 * 8 * 5.0] * 4
