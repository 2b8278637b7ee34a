"""Reports from the field (shared/cases/FIELD.md) that no single rule answers for; the others stand with their rules.

`grep -ri "field.4\\b" tests` finds the test of report 4; `test_every_report_has_a_test` keeps that true.
"""

import functools
import itertools
import re
import unittest.mock as mock
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import meshpar
from meshpar.messages import exchange
from meshpar.testing import assert_equivalent, assert_same, mesh_for, run_ranks

TESTS = Path(__file__).resolve().parents[1]


def shapes_with_uneven_rows() -> list[tuple[int, ...]]:
    mesh = mesh_for("data=1,domain=4")
    x = torch.randn(1, 2, 10, 3)
    layer = meshpar.rewrite(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(1)))
    y = layer(meshpar.shard(x, mesh))
    local = meshpar.shard_batch(y.to_local().detach(), mesh, rows="local")
    return [tuple(y.shape), tuple(local.shape), tuple(y.to_local().shape[2:3])]


def test_field_4_every_rank_has_the_same_global_shape():
    """3, 3, 3, 1 rows over 4 ranks."""
    answers = run_ranks(shapes_with_uneven_rows, 4)
    assert [a[:2] for a in answers] == [[(1, 2, 10, 3)] * 2] * 4
    assert [a[2] for a in answers] == [(3,), (3,), (3,), (1,)]


def dropped(spec: str, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_for(spec)
    torch.manual_seed(7)
    x = meshpar.shard(torch.ones(4, 2, 8, 8), mesh, layout)
    layer = meshpar.rewrite(nn.Dropout(0.5))
    y = layer(x)
    return y.to_local(), y.full_tensor()


def test_field_5_dropout_differs_over_data_and_domain_and_agrees_over_tensor():
    masks = [piece for piece, _ in run_ranks(dropped, 4, "data=2,domain=2", "data _ domain _")]
    assert len({tuple(m.flatten().tolist()) for m in masks}) == 4
    pairs = run_ranks(dropped, 4, "data=1,domain=2,tensor=2", "data _ domain _")
    masks = [piece for piece, _ in pairs]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
    assert 0.3 < float((pairs[0][1] == 0).float().mean()) < 0.7


def read_out() -> tuple[float, float, float, bool]:
    mesh = mesh_for("data=1,domain=4")
    t = meshpar.shard(torch.arange(40.0).view(1, 1, 10, 4), mesh)
    with meshpar.spmd():
        return t.mean().item(), float(t.sum()), float(f"{t.max():.1f}"), bool(t.sum() > 700)


def test_field_7_numbers_read_out_are_global():
    assert run_ranks(read_out, 4) == [(19.5, 780.0, 39.0, True)] * 4


def posting_order(spec: str) -> list[str]:
    mesh = mesh_for(spec)
    seen: list[str] = []
    post = dist.batch_isend_irecv

    def watch(ops):
        seen.extend(op.op.__name__ for op in ops)
        return post(ops)

    x = meshpar.shard(torch.randn(2, 2, 9, 4), mesh).requires_grad_()
    with mock.patch.object(dist, "batch_isend_irecv", watch), meshpar.spmd():
        meshpar.rewrite(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"))(x).sum().backward()
    return seen


def test_field_11_sends_and_receives_are_not_posted_in_turns():
    for posted in run_ranks(posting_order, 3, "data=1,domain=3"):
        rounds = [name for name, _ in itertools.groupby(posted)]
        assert rounds == ["irecv", "isend"] * 2, "one exchange forward, one backward; gloo takes receives first"
        assert len(posted) == 8, "two neighbours"


def batch_of_an_accelerator() -> list[list[str]]:
    seen: list[list[str]] = []
    pieces = [(peer, torch.empty(3, device="meta")) for peer in range(3) if peer != dist.get_rank()]
    with mock.patch.object(dist, "batch_isend_irecv", lambda ops: seen.append([op.op.__name__ for op in ops]) or []):
        given = {"kind": "halo", "backward": False, "meanwhile": lambda: None}
        exchange(pieces, pieces, mesh_for("data=1,domain=3")["domain"].get_group(), "domain", "|test", **given)
    return seen


def test_field_11_all_sends_are_posted_before_all_receives_in_one_batch_for_nccl():
    assert run_ranks(batch_of_an_accelerator, 3) == [[["isend", "isend", "irecv", "irecv"]]] * 3


def check_field_29() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    w, b = torch.randn(2, 3, 1, 1, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    assert_same(torch.nn.functional.conv2d, [x], weights=[w, b], mesh=mesh_for("data=1,domain=2,tensor=2"))


def test_field_29_a_weight_counts_once_where_its_input_is_replicated():
    run_ranks(check_field_29, 4)
    assert_equivalent(functools.partial(nn.Conv2d, 3, 2, 1), [torch.randn(2, 3, 5, 4)], "data=1,domain=2,tensor=2")


def summed_gradient(spec: str) -> float:
    mesh = mesh_for(spec)
    torch.manual_seed(0)
    model = meshpar.parallelize(nn.Conv2d(1, 1, 1, bias=False), mesh)
    num = meshpar.axis_size(mesh, "data")
    with meshpar.spmd():
        model(torch.ones(4 // num, 1, 6, 5)).sum().backward()
    (weight,) = model.parameters()
    return float(meshpar.gather(weight.grad).sum())


def test_field_30_a_sum_is_not_divided_by_the_ranks():
    for spec in ("data=4,domain=1", "data=2,domain=2", "data=1,domain=4"):
        assert run_ranks(summed_gradient, 4, spec) == [120.0] * 4


def test_field_33_length_three_over_two_ranks():
    sequence = functools.partial(nn.Conv1d, 2, 2, 3, padding=1)
    report = assert_equivalent(sequence, [torch.randn(2, 2, 3)], "data=1,domain=2", layouts=["data _ domain"])
    assert report.log.num_bytes(kind="halo") > 0


def test_every_report_has_a_test():
    """Reports 1 to 56."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    named = {int(n) for n in re.findall(r"field_(\d+)", text)}
    for mention in re.findall(r"FIELD[ \d,and]+", text, flags=re.I):
        named |= {int(n) for n in re.findall(r"\d+", mention)}
    for mention in re.findall(r"field_((?:\d+_)+(?:and_)?)", text):
        named |= {int(n) for n in re.findall(r"\d+", mention)}
    for path in TESTS.rglob("catalogue.py"):
        for mention in re.findall(r"FIELD (\d+)", path.read_text()):
            named.add(int(mention))
    assert sorted({*range(1, 57)} - named) == []
