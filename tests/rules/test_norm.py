"""Norms over sharded rows: every one equals the norm of the whole tensor on one process."""

import pytest
import torch
import torch.nn.functional as F
from norm_cases import RANKS, bit_equal, check_norm, numbers
from torch import nn

from meshpar import pieces
from meshpar.batch import shard
from meshpar.record import record
from meshpar.registry import Policy
from meshpar.rules.statistics import combined, shares
from meshpar.scope import spmd
from meshpar.spmd import Spmd
from meshpar.testing import run_ranks
from meshpar.testing.equivalence import assert_same, compare_trees, plain
from meshpar.testing.meshes import mesh_for

GROUP = {"groups": 2, "eps": 1e-5}
TRAINING = {"eps": 1e-5, "tracked": True, "training": True, "momentum": 0.1}


@pytest.mark.parametrize(
    ("kind", "given", "shape", "spec", "axis", "pairs"),
    [
        ("group", GROUP, (2, 4, 5, 6), "data=1,domain=4", "domain", 4),
        ("group", GROUP, (2, 4, 1, 6), "data=1,domain=4", "domain", 4),
        ("group", GROUP, (4, 4, 5, 6), "data=2,domain=2", "domain", 4),
        ("instance", {**TRAINING, "tracked": False}, (2, 4, 5, 6), "data=1,domain=4", "domain", 8),
        ("batch", TRAINING, (4, 3, 5, 6), "data=2,domain=2", "data_domain", 3),
        ("batch", TRAINING, (5, 3, 7, 6), "data=4", "data", 3),
        ("layer", {"dims": 3, "eps": 1e-5}, (2, 3, 5, 6), "data=1,domain=4", "domain", 2),
    ],
)
def test_one_exchange_of_moments_each_way(kind, given, shape, spec, axis, pairs):
    """An all-gather of (mean, variance) forward and an all-reduce of two sums backward; nothing else moves."""
    for log in run_ranks(check_norm, RANKS[spec], spec, kind, shape, given, None, 2, 0):
        p = 2 if spec == "data=2,domain=2" and axis == "domain" else 4
        num_bytes = 2 * pairs * 8
        assert log == [
            ("statistics", axis, num_bytes * (p - 1), False),
            ("statistics", axis, 2 * num_bytes * (p - 1) // p, True),
        ]


@pytest.mark.parametrize(
    ("kind", "given", "spec"),
    [
        ("group", GROUP, "data=4"),
        ("layer", {"dims": 1, "eps": 1e-5}, "data=1,domain=4"),
        ("rms", {"dims": 1, "eps": None}, "data=2,domain=2"),
        ("batch", {**TRAINING, "training": False}, "data=2,domain=2"),
    ],
)
def test_nothing_moves_where_no_sharded_dim_is_normalised(kind, given, spec):
    assert run_ranks(check_norm, 4, spec, kind, (5, 4, 5, 6), given, None, 1, 0) == [[]] * 4


def check_no_rows():
    assert_same(lambda x: F.group_norm(x, 2), [torch.zeros(2, 4, 0, 6).double()], mesh=mesh_for("data=1,domain=2"))
    assert_same(F.instance_norm, [torch.zeros(2, 4, 0, 6).double()], mesh=mesh_for("data=1,domain=2"))


def test_an_image_of_no_rows_has_no_statistics():
    run_ranks(check_no_rows, 2)


def test_axes_of_one_rank_run_the_plain_kernel():
    assert run_ranks(check_norm, 1, "data=1", "group", (2, 4, 5, 6), GROUP, None, 2, 0) == [[]]
    assert run_ranks(check_norm, 1, "data=1", "batch", (2, 4, 5, 6), TRAINING, None, 2, 0) == [[]]


def check_field_22(spec):
    mesh = mesh_for(spec)
    x = shard(numbers((4, 4, 5, 6)), mesh)
    with spmd(on_gather="error"):
        for y in (
            F.group_norm(x, 2),
            F.instance_norm(x),
            F.batch_norm(x, None, None, training=True),
            F.layer_norm(x, (5, 6)),
            F.rms_norm(x, (4, 5, 6)),
            torch.group_norm(x, 2),
            torch.layer_norm(x, (5, 6)),
            torch.rms_norm(x, (5, 6)),
            torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
            torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        ):
            assert y.placements == x.placements
            assert y.to_local().shape == x.to_local().shape


@pytest.mark.parametrize("spec", ["data=1,domain=4", "data=2,domain=2"])
def test_field_22_norms_stay_sharded(spec):
    run_ranks(check_field_22, 4, spec)


@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=4", "data=1,domain=3"])
def test_field_24_group_norm_backward_batch_sharded(spec):
    run_ranks(check_norm, RANKS[spec], spec, "group", (3, 4, 5, 6), GROUP, None, 2, 0)


def check_batch_norm_module(momentum, spec):
    mesh = mesh_for(spec)
    one, many = (nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64) for _ in range(2))
    for step, size in enumerate([4, 3, 5]):
        x = numbers((size, 3, 5, 4), step, mean=step)
        with spmd(on_gather="error"):
            found = many(shard(x, mesh))
        compare_trees("output", found, one(x), 1e-12)
    assert many.num_batches_tracked == 3
    for name in ("running_mean", "running_var"):
        compare_trees(name, getattr(many, name), getattr(one, name), 1e-12)
        assert bit_equal(getattr(many, name))
    one.eval()
    many.eval()
    with spmd(on_gather="error"):
        found = many(shard(x, mesh))
    compare_trees("output", found, one(x), 1e-12)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("spec", ["data=2,domain=2", "data=1,domain=4"])
def test_field_27_batch_norm_with_unequal_rows(momentum, spec):
    """Five rows over two and four ranks, batches that change: the statistics are those of the whole batch."""
    run_ranks(check_batch_norm_module, 4, momentum, spec)


def check_data_local():
    mesh = mesh_for("data=2,domain=2")
    x = numbers((4, 3, 5, 4))
    mine = x[2:] if mesh.get_local_rank("data") else x[:2]
    own, ref = ([torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)] for _ in range(2))
    with Spmd(Policy(on_gather="error", batch_statistics="data-local")), record() as log:
        y = F.batch_norm(shard(x, mesh), *own, training=True)
    expected = F.batch_norm(mine, *ref, training=True)
    a, b = pieces.my_chunk(mesh, 1, 5)
    torch.testing.assert_close(y.to_local(), expected[:, :, a:b])
    torch.testing.assert_close(own, ref)
    assert {e.axis for e in log.entries} == {"domain"}
    with Spmd(Policy(batch_statistics="data-local")), pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(shard(numbers((2, 3, 1, 1)), mesh), None, None, training=True)


def test_statistics_of_the_data_rank_alone():
    run_ranks(check_data_local, 4)


def check_field_28(spec):
    mesh = mesh_for(spec)
    by_latitude = numbers((5, 6), 3)  # one row for each latitude of the globe

    def fn(x, w):
        return F.layer_norm(x, (5, 6), w, w + 1)

    assert_same(fn, [numbers((3, 2, 5, 6))], mesh=mesh, weights=[by_latitude])


@pytest.mark.parametrize("spec", ["data=1,domain=4", "data=2,domain=2"])
def test_field_28_weights_by_latitude_follow_the_shards(spec):
    run_ranks(check_field_28, 4, spec)


def check_large_mean(form, mean):
    """Compare errors against float64: the sharded norm may not be worse than torch's own by more than rounding."""
    mesh = mesh_for("data=1,domain=4")
    x = numbers((2, 4, 9, 16), mean=mean).float()
    x = x.contiguous(memory_format=form)
    g = numbers((2, 4, 9, 16), 5).float()
    errors = []
    exact = x.double().requires_grad_()
    want = F.group_norm(exact, 2)
    want.backward(g.double())
    for sharded in (False, True):
        leaf = (shard(x, mesh) if sharded else x.clone()).requires_grad_()
        with spmd(on_gather="error"):
            y = F.group_norm(leaf, 2)
        y.backward(shard(g, mesh) if sharded else g)
        errors.append([float((plain(a, "") - b).abs().max()) for a, b in ((y, want), (leaf.grad, exact.grad))])
    (one_y, one_g), (own_y, own_g) = errors
    unit = mean * torch.finfo(torch.float32).eps
    assert own_y <= max(2 * one_y, 4 * unit), errors
    assert own_g <= max(2 * one_g, 8 * unit), errors


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean", [1.0, 1e3, 1e5])
def test_mean_much_larger_than_deviation(form, mean):
    run_ranks(check_large_mean, 4, form, mean)


def check_narrow(dtype, spec):
    mesh = mesh_for(spec)
    x, w = numbers((2, 4, 5, 6), mean=3).to(dtype), numbers((4,), 1).to(dtype)
    rows = numbers((5, 6), 2).to(dtype)
    for fn in (
        lambda x: F.group_norm(x, 2, w, w),
        lambda x: F.batch_norm(x, None, None, w, w, training=True),
        lambda x: F.instance_norm(x, weight=w),
        lambda x: F.layer_norm(x, (5, 6), rows, rows),
        lambda x: F.rms_norm(x, (5, 6), rows),
        lambda x: F.rms_norm(x * 1e-3, (5, 6)),
    ):
        assert_same(fn, [x], mesh=mesh, tolerance=3 * torch.finfo(dtype).eps)
    huge = torch.full((1, 2, 64, 64), 200.0, dtype=dtype) + numbers((1, 2, 64, 64)).to(dtype)
    assert_same(lambda x: F.group_norm(x, 1), [huge], mesh=mesh, tolerance=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_have_wide_statistics(dtype):
    """The squares of the last input add up to 10^8: far beyond float16."""
    run_ranks(check_narrow, 4, dtype, "data=2,domain=2")


def check_autocast():
    mesh = mesh_for("data=1,domain=4")
    x = numbers((2, 4, 5, 6)).bfloat16()
    w, rows = torch.ones(4), torch.ones(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        for fn in (lambda x: F.group_norm(x, 2, w, w), lambda x: F.layer_norm(x, (5, 6), rows, rows)):
            with spmd(on_gather="error"):
                found = fn(shard(x, mesh))
            assert found.dtype == fn(x).dtype


def test_autocast_gives_the_dtype_of_torch():
    run_ranks(check_autocast, 4)


def check_format(form, shape):
    mesh = mesh_for("data=1,domain=4")
    x = shard(numbers(shape).contiguous(memory_format=form), mesh).requires_grad_()
    with spmd(on_gather="error"):
        y = F.group_norm(x, 2)
        y.backward(torch.ones_like(y))
    assert y.to_local().is_contiguous(memory_format=form)
    assert x.grad.to_local().is_contiguous(memory_format=form)


def check_one_row():
    """A piece of one row keeps the strides of the whole: torch's batch_norm gives a wrong gradient for those."""
    x = numbers((1, 2, 4, 3)).contiguous(memory_format=torch.channels_last)
    g = shard(numbers((1, 2, 4, 3), 1), mesh_for("data=1,domain=4"))
    leaf = shard(x, mesh_for("data=1,domain=4")).requires_grad_()
    var = numbers((2,), 2).abs()
    with spmd(on_gather="error"):
        F.batch_norm(leaf, torch.zeros(2, dtype=torch.float64), var).backward(g)
    torch.testing.assert_close(leaf.grad.to_local(), g.to_local() * torch.rsqrt(var + 1e-5).view(1, 2, 1, 1))


def test_one_row_of_a_channels_last_image():
    run_ranks(check_one_row, 4)


def test_channels_last_is_kept():
    run_ranks(check_format, 4, torch.channels_last, (2, 4, 8, 6))
    run_ranks(check_format, 4, torch.channels_last_3d, (2, 4, 3, 8, 6))


def check_twice(kind):
    mesh = mesh_for("data=2,domain=2")

    def norm(x, w):
        match kind:
            case "group":
                return F.group_norm(x, 2, w, w)
            case "batch":
                return F.batch_norm(x, None, None, w, None, training=True)
            case "layer":
                return F.layer_norm(x, (4, 5, 6))
        return F.rms_norm(x, (4, 5, 6))

    x, w = numbers((3, 4, 5, 6)), numbers((4,), 1)
    found = []
    for sharded in (False, True):
        leaf = (shard(x, mesh) if sharded else x.clone()).requires_grad_()
        weight = w.clone().requires_grad_()
        with spmd(on_gather="error"):
            y = norm(leaf, weight)
            y = pieces.local(y) if sharded else y
        (g,) = torch.autograd.grad(y.square(), leaf, torch.ones_like(y), create_graph=True)
        g = pieces.local(g) if sharded else g
        g.square().sum().backward()
        found.append((leaf.grad, weight.grad))
    (ref, ref_w), (own, own_w) = found
    compare_trees("second gradient", own, ref, 1e-9)
    if ref_w is not None:
        torch.distributed.all_reduce(own_w)
        compare_trees("second gradient of the weight", own_w, ref_w, 1e-9)


@pytest.mark.parametrize("kind", ["group", "batch", "layer", "rms"])
def test_twice_differentiable(kind):
    run_ranks(check_twice, 4, kind)


def check_constant():
    mesh = mesh_for("data=1,domain=4")
    for value in (0.0, 3.0, 1e6):
        for dtype in (torch.float32, torch.float64):
            x = torch.full((2, 4, 5, 6), value, dtype=dtype)
            rounding = 100 * max(value, 1.0) * torch.finfo(dtype).eps * 1e-5**-0.5
            assert_same(lambda x: F.group_norm(x, 2), [x], mesh=mesh, tolerance=rounding)
    by_rank = torch.arange(4.0, dtype=torch.float64).view(1, 1, 4, 1).expand(2, 4, 4, 6)  # constant on each rank
    assert_same(lambda x: F.group_norm(x, 2), [by_rank], mesh=mesh)


def test_constant_pieces_are_no_nan():
    run_ranks(check_constant, 4)


def check_without_grad():
    mesh = mesh_for("data=1,domain=4")
    x = numbers((2, 4, 5, 6))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(lambda x: F.group_norm(x, 2), [x], mesh=mesh, gradients=False)
    frozen = numbers((4,), 1)
    leaf = frozen.clone().requires_grad_()
    with record() as log, spmd():
        F.group_norm(shard(x, mesh), 2, leaf, leaf).backward(shard(x, mesh))
    assert not log.select(backward=True)  # only the weight wants a gradient: nothing has to travel


def test_without_gradients():
    run_ranks(check_without_grad, 4)


def check_refused():
    mesh = mesh_for("data=2,domain=2")
    for shape in ((1, 4, 1, 1), (1, 4, 2, 1)):
        x = numbers(shape)
        for fn in (
            lambda x: F.batch_norm(x, None, None, training=True),
            F.instance_norm,
            lambda x: F.group_norm(x, 4),
            lambda x: F.group_norm(x, 3),
            lambda x: F.layer_norm(x, (7,)),
            lambda x: F.batch_norm(x, None, None),
            lambda x: F.batch_norm(x, torch.zeros(5), torch.ones(5)),
        ):
            with record() as log, spmd(on_gather="error"):
                try:
                    fn(x)
                except (ValueError, RuntimeError) as error:
                    with pytest.raises(type(error), match=r"[Ee]xpected|running"):
                        fn(shard(x, mesh))
                    assert not log.entries
                else:
                    fn(shard(x, mesh))


def test_refused_by_global_sizes_before_any_communication():
    """One value a rank is enough where the whole has several."""
    run_ranks(check_refused, 4)


def test_shares_and_merging_of_moments():
    assert shares(((2, 2), (3, 1))) == (0.375, 0.125, 0.375, 0.125)
    x = numbers((10, 3), mean=1e6)
    parts = [x[:4], x[4:9], x[9:], x[:0]]
    means = torch.stack([p.mean(0) if len(p) else p.new_zeros(3) for p in parts])
    variances = torch.stack([p.var(0, correction=0) if len(p) else p.new_zeros(3) for p in parts])
    mean, var = combined(means, variances, shares(((4, 5, 1, 0),)))
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(var, x.var(0, correction=0), rtol=1e-9, atol=0)
