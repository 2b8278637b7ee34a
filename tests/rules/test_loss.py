"""Losses over sharded batches and rows: the global mean and its gradient, as on one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshpar.batch import shard
from meshpar.errors import GatherError
from meshpar.record import record
from meshpar.scope import spmd
from meshpar.testing import run_ranks
from meshpar.testing.equivalence import assert_same
from meshpar.testing.meshes import mesh_for

RANKS = {"data=1,domain=4": 4, "data=2,domain=2": 4, "data=4": 4, "data=1,domain=3": 3, "data=1,domain=2": 2}
CROSSED = "data=1,domain=2,tensor=2"
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}

POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "logits": F.binary_cross_entropy_with_logits,
    "kl": F.kl_div,
    "poisson": F.poisson_nll_loss,
    "gaussian": F.gaussian_nll_loss,
}
OPTIONS = {
    "smooth_l1": [{"beta": 0.5}, {"beta": 0.0}, {}],
    "huber": [{"delta": 0.7}, {}],
    "kl": [{"log_target": True}, {}],
    "poisson": [{"log_input": False}, {"full": True}, {}],
    "gaussian": [{"full": True}, {"eps": 0.5}, {}],
}


def numbers(shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def positive(shape, seed=0):
    return numbers(shape, seed).sigmoid()


def classes(shape, num, seed=0):
    return torch.randint(0, num, shape, generator=torch.Generator().manual_seed(seed))


def check_pointwise(mesh, name, shape, seed, option, reduction, form, weight_dims, layouts):
    """Compare one loss with one process; the target, and a weight for each trailing dim, in different forms."""
    unit = name in ("bce", "kl", "poisson")
    x = positive(shape, seed) if unit else numbers(shape, seed)
    target = (positive if name in ("bce", "logits", "kl", "poisson") else numbers)(shape, seed + 1)
    if form == "broadcast" and name not in ("bce", "logits"):
        target = target[:1]
    kwargs = {**option, "reduction": reduction}
    weights = []
    if weight_dims is not None and name in ("mse", "l1", "huber"):
        weights = [positive(shape, seed + 2)]
    elif weight_dims is not None and name in ("bce", "logits"):
        weights = [positive(shape[weight_dims:], seed + 2)]
    elif name == "gaussian":
        kwargs["var"] = None
        weights = [positive((*shape[:-1], 1) if weight_dims is None else shape, seed + 2) + 0.3]

    def fn(x, target, *weights):
        given = dict(kwargs)
        if name == "gaussian":
            given["var"] = weights[0]
        elif weights and (name != "logits" or seed % 2):
            given["weight"] = weights[0].detach() if name in ("bce", "logits") else weights[0]
        elif weights:
            given["pos_weight"] = weights[0].detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return POINTWISE[name](x, target, **given)

    if form == "plain":  # a target that every rank holds whole, as a weight would be
        assert_same(lambda x, *w: fn(x, w[0], *w[1:]), [x], mesh=mesh, layouts=layouts[:1], weights=[target, *weights])
    else:
        assert_same(fn, [x, target], mesh=mesh, layouts=layouts, weights=weights)


def check_classes(mesh, shape, seed, kind, reduction, weighted, ignore, smoothing, layouts):
    num = shape[1]
    x = numbers(shape, seed)
    weights = positive((num,), seed + 2) if weighted else None
    given = {"weight": weights, "reduction": reduction}
    if kind == "probabilities":
        target = numbers(shape, seed + 1).softmax(1)
        layouts = [layouts[0], layouts[0]]
        given["label_smoothing"] = smoothing
    else:
        target = classes((shape[0], *shape[2:]), num, seed + 1)
        given["ignore_index"] = ignore
        if kind == "classes":
            given["label_smoothing"] = smoothing
    func = F.nll_loss if kind == "nll" else F.cross_entropy
    assert_same(lambda x, t: func(x, t, **given), [x, target], mesh=mesh, layouts=layouts)


@st.composite
def cases(draw, spec, largest):
    num_dims = draw(st.sampled_from([4, 4, 3, 5])) if spec != CROSSED else 4
    shape = [
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        *(draw(st.integers(1, largest)) for _ in range(num_dims - 2)),
    ]
    rows = {3: "data _ domain", 4: "data _ domain _", 5: "data _ domain _ _"}[num_dims]
    rows = "_ _ domain tensor" if spec == CROSSED else rows
    other = draw(st.sampled_from([rows, rows, " ".join("_" * num_dims)]))
    seed = draw(st.integers(0, 99))
    reduction = draw(st.sampled_from(["mean", "mean", "sum", "none"]))
    if draw(st.integers(0, 2)):
        name = draw(st.sampled_from(list(POINTWISE)))
        option = draw(st.sampled_from(OPTIONS.get(name, [{}])))
        if name == "kl" and draw(st.booleans()):
            reduction = "batchmean"
        form = draw(st.sampled_from(["alike", "plain", "broadcast"]))
        weight_dims = draw(st.sampled_from([None, 0, 1, 2, 3][: num_dims + 1]))
        return check_pointwise, name, shape, seed, option, reduction, form, weight_dims, [rows, other]
    kind = draw(st.sampled_from(["classes", "probabilities", "nll"]))
    target_rows = " ".join(t for i, t in enumerate(other.split()) if i != 1)
    ignore = draw(st.sampled_from([-100, 0, 1]))
    smoothing = draw(st.sampled_from([0.0, 0.2]))
    return check_classes, shape, seed, kind, reduction, draw(st.booleans()), ignore, smoothing, [rows, target_rows]


@st.composite
def batches(draw, num, largest):
    spec = draw(st.sampled_from([*RANKS, CROSSED]))
    return spec, draw(st.lists(cases(spec, largest), min_size=1, max_size=num))


def check_losses(spec, drawn):
    for check, *case in drawn:
        try:
            check(mesh_for(spec), *case)
        except BaseException as error:
            error.add_note(f"in the case {check.__name__} {case}")
            raise


def run_batch(batch):
    run_ranks(check_losses, RANKS.get(batch[0], 4), *batch)


@settings(max_examples=20, **ANY)
@given(batches(12, largest=6))
def test_any_loss(batch):
    run_batch(batch)


@pytest.mark.long
@settings(max_examples=150, **ANY)
@given(batches(20, largest=30))
def test_any_loss_long(batch):
    run_batch(batch)


def check_field_2(spec, name):
    mesh = mesh_for(spec)
    x, t = numbers((3, 2, 5, 4)), numbers((3, 2, 5, 4), 1)
    report = assert_same(lambda x, t: POINTWISE[name](x, t), [x, t], mesh=mesh, tolerance=1e-12)
    (entry,) = report.log.entries
    num_ranks = mesh.size() if spec != "data=1,domain=3" else 3
    assert (entry.kind, entry.backward, entry.num_bytes) == ("reduction", False, 2 * 8 * (num_ranks - 1) // num_ranks)


@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber", "l1"])
@pytest.mark.parametrize("spec", list(RANKS))
def test_field_2_mean_and_gradient_of_two_sharded_tensors(spec, name):
    """One all-reduce of one number, and no more: the count is known, the gradient is local."""
    run_ranks(check_field_2, RANKS[spec], spec, name)


def check_field_3(shape):
    mesh = mesh_for("data=1,domain=2")
    for name in ("mse", "l1", "huber"):
        x, t = numbers(shape), numbers(shape, 1)
        assert_same(
            lambda x, t, f=POINTWISE[name]: f(x, t), [x, t], mesh=mesh, layouts=["domain _"] * 2, tolerance=1e-12
        )
    target = classes(shape[:1], shape[1])
    assert_same(F.cross_entropy, [numbers(shape), target], mesh=mesh, layouts=["domain _", "domain"])


@pytest.mark.parametrize("shape", [(3, 4), (1, 4)])
def test_field_3_uneven_and_empty_ranks(shape):
    run_ranks(check_field_3, 2, shape)


def check_field_28(spec):
    mesh = mesh_for(spec)
    rows = positive((5, 1), 2)  # one weight for each latitude of the globe
    x, t = numbers((3, 2, 5, 4)), positive((3, 2, 5, 4), 1)
    logits = F.binary_cross_entropy_with_logits
    assert_same(lambda x, t: logits(x, t, rows, pos_weight=rows + 1), [x, t], mesh=mesh)
    assert_same(lambda x, t, w: F.mse_loss(x, t, weight=w), [x, t], mesh=mesh, weights=[rows.expand(x.shape)])
    assert_same(lambda x, v: F.gaussian_nll_loss(x, x * 2, v), [x], mesh=mesh, weights=[rows.expand(x.shape) + 0.1])


@pytest.mark.parametrize("spec", ["data=1,domain=4", "data=2,domain=2"])
def test_field_28_weights_by_latitude_follow_the_shards(spec):
    run_ranks(check_field_28, 4, spec)


def check_layouts():
    mesh = mesh_for("data=2,domain=2")
    x, t = numbers((3, 2, 5, 4)), numbers((3, 2, 5, 4), 1)
    texts = ["data _ domain _", "_ _ _ _", "_ domain _ data", "data _ _ domain"]
    for a in texts:
        for b in texts:
            assert_same(F.mse_loss, [x, t], mesh=mesh, layouts=[a, b])
    with record() as log, spmd():
        loss = F.mse_loss(shard(x, mesh), shard(t, mesh), reduction="none")
    assert loss.placements == shard(x, mesh).placements
    assert not log.entries


def test_targets_that_lie_elsewhere():
    run_ranks(check_layouts, 4)


def check_legacy_and_warnings():
    mesh = mesh_for("data=1,domain=4")
    x, t = (shard(numbers((2, 3, 5, 4), i), mesh) for i in range(2))
    with spmd(on_gather="error"):
        with pytest.warns(UserWarning, match="size_average and reduce args"):
            total = F.mse_loss(x, t, size_average=False)
        with pytest.warns(UserWarning, match="different to the input size"):
            F.mse_loss(x, shard(numbers((1, 3, 5, 4)), mesh))
        with pytest.warns(UserWarning, match="batchmean"):
            F.kl_div(x, t)
        torch.testing.assert_close(total.to_local(), F.mse_loss(x, t, reduction="sum").to_local())


def test_legacy_arguments_and_warnings_are_those_of_torch():
    run_ranks(check_legacy_and_warnings, 4)


def check_refused():
    mesh = mesh_for("data=1,domain=4")
    x, t = numbers((2, 3, 5, 4)), numbers((2, 3, 5, 4), 1)
    calls = [
        lambda x, t: F.mse_loss(x, t, reduction="median"),
        lambda x, t: F.mse_loss(x, t[:, :2]),
        lambda x, t: F.binary_cross_entropy(x, t[:1]),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t[:1]),
        lambda x, t: F.huber_loss(x, t, delta=-1.0),
        lambda x, t: F.mse_loss(x, t, weight=torch.ones(3)),
        lambda x, t: F.gaussian_nll_loss(x, t, torch.ones(3)),
        lambda x, t: F.cross_entropy(x, torch.zeros(2, 5, 3, dtype=torch.int64)),
    ]
    for fn in calls:
        with pytest.raises((ValueError, RuntimeError)) as found:
            fn(x, t)
        with record() as log, spmd(on_gather="error"), pytest.raises(found.type):
            fn(shard(x, mesh), t)
        assert not log.entries


def test_refused_before_any_communication():
    run_ranks(check_refused, 4)


def check_refused_values():
    mesh = mesh_for("data=1,domain=4")
    x, target = numbers((2, 3, 5, 4)), classes((2, 5, 4), 3)
    target[0, 4, 0] = 7  # on the rank with the last row alone
    with spmd(on_gather="error"):
        with pytest.raises(IndexError):
            F.cross_entropy(shard(x, mesh), shard(target, mesh, "_ domain _"))
        with pytest.raises(RuntimeError):
            F.binary_cross_entropy(shard(x, mesh), shard(x.sigmoid(), mesh))
        with pytest.raises(ValueError, match=r"negative|another rank"):
            F.gaussian_nll_loss(shard(x, mesh), shard(x, mesh), shard(x, mesh))


def test_values_that_one_rank_refuses_are_an_error_on_all():
    run_ranks(check_refused_values, 4)


def check_ignored():
    mesh = mesh_for("data=1,domain=4")
    x = numbers((2, 3, 5, 4))
    target = torch.full((2, 5, 4), -100)
    target[:, 0, 0] = 1  # all but the first rank hold nothing that counts
    assert_same(F.cross_entropy, [x, target], mesh=mesh, layouts=["_ _ domain _", "_ domain _"])
    with spmd():
        nothing = F.cross_entropy(shard(x, mesh), shard(torch.full((2, 5, 4), -100), mesh, "_ domain _"))
    assert nothing.to_local().isnan()  # as one process gives


def test_ranks_where_everything_is_ignored():
    run_ranks(check_ignored, 4)


def check_unusual():
    mesh = mesh_for("data=1,domain=2,tensor=2")
    assert_same(F.cross_entropy, [numbers((4,)), torch.tensor(2)], mesh=mesh, layouts=["_", ""])
    assert_same(F.cross_entropy, [numbers((5, 4)), classes((5,), 4)], mesh=mesh, layouts=["domain _", "domain"])
    # a replicated prediction is cut where the target lies
    report = assert_same(F.nll_loss, [numbers((5, 4)), classes((5,), 4)], mesh=mesh, layouts=["_ _", "domain"])
    assert {entry.kind for entry in report.log.entries} == {"reduction"}
    # sharded classes are gathered, and said
    x = numbers((5, 4))
    assert_same(F.cross_entropy, [x, classes((5,), 4)], mesh=mesh, layouts=["_ tensor", "_"], gathers=True)
    with pytest.raises(GatherError, match="gathers"):
        assert_same(F.cross_entropy, [x, classes((5,), 4)], mesh=mesh, layouts=["_ tensor", "_"])


def test_unusual_shapes_of_class_losses():
    run_ranks(check_unusual, 4)


def check_plain_prediction():
    mesh = mesh_for("data=2,domain=2")
    x, t = numbers((3, 2, 5, 4)), numbers((3, 2, 5, 4), 1)
    assert_same(lambda t, x: F.mse_loss(x, t), [t], mesh=mesh, weights=[x])
    assert_same(
        lambda t, x: F.cross_entropy(x, t), [classes((3, 5, 4), 2)], mesh=mesh, layouts=["data domain _"], weights=[x]
    )
    assert_same(lambda x: F.gaussian_nll_loss(x, x * 2, 0.5), [x], mesh=mesh)
    assert_same(lambda x, v: F.gaussian_nll_loss(x, x * 2, v), [x], mesh=mesh, weights=[positive((3, 2, 5), 1) + 0.1])


def test_plain_predictions_are_cut():
    run_ranks(check_plain_prediction, 4)


def check_narrow(dtype):
    mesh = mesh_for("data=1,domain=4")
    x, t = (100 * numbers((1, 2, 64, 64), i).to(dtype) for i in range(2))
    for fn in (F.mse_loss, F.l1_loss, F.huber_loss):
        assert_same(fn, [x / 4, t / 4], mesh=mesh, tolerance=4 * torch.finfo(dtype).eps)
    target = classes((1, 64, 64), 2)
    with spmd(on_gather="error"):
        found = F.cross_entropy(shard(x, mesh), shard(target, mesh, "_ domain _"))
    assert found.dtype == dtype
    # torch's own sum of float16 losses overflows: the truth is that of float32
    torch.testing.assert_close(found.to_local(), F.cross_entropy(x.float(), target).to(dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_dtypes_do_not_overflow(dtype):
    """The squares of float16 add up to 10^7 here: the mean is small all the same."""
    run_ranks(check_narrow, 4, dtype)


def check_one_rank():
    x, t = numbers((3, 2, 5, 4)), numbers((3, 2, 5, 4), 1)
    assert not assert_same(F.mse_loss, [x, t], mesh=mesh_for("data=1")).log.entries


def test_one_rank_sends_nothing():
    run_ranks(check_one_rank, 1)
