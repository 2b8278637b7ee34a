"""The state dict of a checkpoint: scales of caches, ties of every kind, inference mode, errors alike on all ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
from checks import refused
from quantized import EXPORTED, Attention, Quantizer, Tied, laid_out, placed
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshpar import private
from meshpar.errors import SpecError
from meshpar.export import exported_state
from meshpar.shares import whole_of
from meshpar.testing import mesh_for, run_ranks

CACHE = {"kv_cache_format": "NVFP4", "maxbound": 448.0}


def wholes(model: nn.Module, **told) -> dict[str, torch.Tensor]:
    return {name: whole_of(value) for name, value in exported_state(model, **told).items()}


def test_state_of_quantizers_becomes_what_inference_expects():
    net = Attention()
    found = exported_state(net, **CACHE)
    assert list(found) == EXPORTED
    assert found["q_proj.weight"].data_ptr() == net.q_proj.weight.data_ptr()
    assert torch.equal(found["q_proj.weight_scale"], net.q_proj.weight_scale[0])
    assert torch.equal(found["q_proj.pre_quant_scale"], net.q_proj.input_quantizer._pre_quant_scale)
    assert torch.equal(found["k_proj.k_bias"], net.k_bmm_quantizer._bias_value)
    for name, scale in (("k_proj.k_scale", 0.125), ("v_proj.v_scale", 0.25)):
        assert found[name].shape == ()
        assert found[name].dtype == torch.float32
        assert found[name] == scale


@pytest.mark.parametrize("kv_cache_format", ["FP8", "NVFP4", "NVFP4_AFFINE"])
def test_only_large_scales_of_fp8_warn_and_none_is_clamped(kv_cache_format):
    net = Attention()
    told = {"kv_cache_format": kv_cache_format, "maxbound": 448}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported_state(net, **told)
        net.k_bmm_quantizer._amax.fill_(224.0)
        exported_state(net, **told)  # 0.5 is not above it
    net.k_bmm_quantizer._amax.fill_(4480.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert exported_state(net, **told)["k_proj.k_scale"] == 10.0
    texts = [str(w.message) for w in seen]
    expected = ["1 scales of caches are above 0.5, e.g. k_proj.k_scale: FP8 may lose accuracy there"]
    assert texts == (expected if kv_cache_format == "FP8" else [])


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({}, "k_bmm_quantizer._amax with kv_cache_format=None"),
        ({"kv_cache_format": "INT8", "maxbound": 448}, "with kv_cache_format='INT8'"),
        ({"kv_cache_format": "FP8"}, "maxbound=None"),
        ({"kv_cache_format": "FP8", "maxbound": 0}, "maxbound=0"),
        ({"kv_cache_format": "FP8", "maxbound": -448.0}, "maxbound=-448.0"),
        ({"kv_cache_format": "FP8", "maxbound": float("nan")}, "maxbound=nan"),
    ],
)
def test_caches_without_a_format_or_a_bound(told, text):
    with pytest.raises(ValueError, match="cannot be exported") as caught:
        exported_state(Attention(), **told)
    assert text in str(caught.value)
    assert exported_state(nn.Linear(2, 2), **told).keys() == {"weight", "bias"}  # no cache, no rule


@pytest.mark.parametrize(("amax", "text"), [([], "empty"), ([1.0, float("nan")], "not finite")])
def test_an_amax_that_is_none(amax, text):
    net = Attention()
    net.k_bmm_quantizer._amax = torch.tensor(amax)
    with pytest.raises(SpecError, match=rf"k_bmm_quantizer._amax: {text}"):
        exported_state(net, **CACHE)


def cut_scales() -> None:
    """Amaxes and scales as DTensors: the largest of all ranks, and blocks of one cut along any dim."""
    spec = "data=2,tensor=2"
    net = Attention()
    amax = torch.tensor([3.0, 448.0, 2.0, 1.0, 7.0])
    net.k_bmm_quantizer._amax = placed(amax, spec, [Shard(0), Replicate(), Replicate()])
    whole = torch.arange(1 * 5 * 3.0).view(1, 5, 3)
    layouts = [
        [Shard(0), Replicate(), Replicate()],
        [Shard(0), Replicate(), Shard(0)],
        [Shard(1), Replicate(), Shard(0)],
        [Shard(0), Replicate(), Shard(1)],
        [Shard(0), Replicate(), Shard(2)],
        [Shard(2), Replicate(), Shard(1)],
        [private.StridedShard(1, split_factor=2), Replicate(), Shard(1)],
        [Replicate(), Replicate(), Replicate()],
    ]
    for layout in layouts:
        for dtype in (torch.float32, torch.float8_e4m3fn):
            if dtype == torch.float8_e4m3fn and isinstance(layout[0], private.StridedShard):
                continue  # torch cannot cut it
            net.q_proj.weight_scale = placed(whole.to(dtype), spec, layout)
            found = exported_state(net, **CACHE)
            assert found["k_proj.k_scale"] == 1.0
            scale = found["q_proj.weight_scale"]
            assert isinstance(scale, DTensor)
            assert scale.shape == (5, 3)
            again = whole_of(scale.to(torch.float32) if dtype != torch.float32 else scale)
            assert torch.equal(again, whole[0]), layout
            assert sum(p == Shard(0) for p in layout) == 0 or not all(p.is_replicate() for p in scale.placements)


def test_scales_that_lie_over_ranks():
    run_ranks(cut_scales, 4)


def on_a_submesh() -> None:
    """A scale over the tensor axis alone, of which each data coordinate has its own mesh."""
    net = Attention()
    mesh = mesh_for("data=2,tensor=2")["tensor"]
    whole = torch.arange(6.0).view(1, 3, 2)
    piece = whole[:, : 3 if mesh.get_local_rank() == 0 else 0][: 1 if mesh.get_local_rank() == 0 else 0]
    net.q_proj.weight_scale = DTensor.from_local(
        piece.reshape(-1, 3, 2), mesh, [Shard(0)], shape=torch.Size((1, 3, 2)), stride=(6, 2, 1)
    )
    found = exported_state(net, **CACHE)["q_proj.weight_scale"]
    assert found.device_mesh == mesh
    assert torch.equal(whole_of(found), whole[0])


def test_a_scale_on_a_submesh():
    run_ranks(on_a_submesh, 4)


def test_qlora_leaves_the_base():
    net = nn.Module()
    net.q = nn.Module()
    net.q.base_layer = nn.Linear(2, 2)
    net.q.lora_A = nn.Linear(2, 1)
    net.exploration = nn.Linear(2, 2)
    assert list(exported_state(net, is_modelopt_qlora=True)) == [
        "q.weight",
        "q.bias",
        "exploration.weight",
        "exploration.bias",
    ]


# ---- ties


def test_a_tie_is_kept_under_the_name_that_others_follow_or_the_first():
    assert list(exported_state(Tied())) == ["table.weight", "body.weight", "body.bias"]
    assert list(exported_state(Tied(declared=False))) == ["table.weight", "body.weight", "body.bias"]
    net = Tied()
    net.all_tied_weights_keys = {"table.weight": "head.weight"}
    assert list(exported_state(net)) == ["body.weight", "body.bias", "head.weight"]
    outer = nn.Module()
    outer.inner = net
    assert list(exported_state(outer)) == ["inner.body.weight", "inner.body.bias", "inner.head.weight"]
    net.head.weight = nn.Parameter(net.head.weight.data)  # the same memory under two objects
    net.all_tied_weights_keys = {}
    assert list(exported_state(net)) == ["table.weight", "body.weight", "body.bias"]


def test_scales_of_an_alias_go_with_it_and_must_be_those_of_the_other():
    net = Tied()
    for module in (net.table, net.head):
        module.register_buffer("weight_scale", torch.ones(9))
        module.register_buffer("temperature", torch.ones(1))
    net.head.register_buffer("input_scale", torch.ones(()))
    names = ["table.weight", "table.weight_scale", "table.temperature", "body.weight", "body.bias", "head.temperature"]
    assert list(exported_state(net)) == names
    net.head.weight_scale[3] = 2
    with pytest.raises(SpecError, match=r"head.weight_scale, tied to table.weight_scale: other values, \(9,\)"):
        exported_state(net)


def test_all_or_none_of_a_group():
    net = Tied()
    net.third = nn.Linear(6, 9, bias=False)
    net.third.weight = nn.Parameter(net.table.weight.detach().clone())
    net.all_tied_weights_keys = {"head.weight": "table.weight", "third.weight": "head.weight"}
    assert list(exported_state(net)) == ["table.weight", "body.weight", "body.bias"]
    with torch.no_grad():
        net.third.weight[2, 3] += 1
    with pytest.raises(SpecError, match=r"third.weight, tied to table.weight: other values"):
        exported_state(net)
    # the other name lies elsewhere (a pipeline): nothing that is followed by nobody here goes
    del net.table
    net.all_tied_weights_keys = {"head.weight": "table.weight", "third.weight": "table.weight"}
    assert list(exported_state(net)) == ["body.weight", "body.bias", "head.weight", "third.weight"]


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_ties_are_compared_bit_by_bit(value):
    net = Tied()
    with torch.no_grad():
        net.table.weight.fill_(value)
    net.head.weight = nn.Parameter(net.table.weight.detach().clone())
    assert "head.weight" not in exported_state(net)
    with torch.no_grad():
        net.head.weight.fill_(0.0)
    with pytest.raises(SpecError, match="other values"):
        exported_state(net)
    net.head.weight = nn.Parameter(net.head.weight.detach().bfloat16())
    with pytest.raises(SpecError, match=r"\(9, 6\) of torch.bfloat16, \(9, 6\) of torch.float32"):
        exported_state(net)


def tied_over_ranks(how: str) -> None:
    torch.manual_seed(1)
    net = Tied()
    expected = {name: value.clone() for name, value in net.state_dict().items() if name != "head.weight"}
    model = laid_out(net, how)
    found = wholes(model)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", ["meshpar", "meshpar tensor", "fully_shard", "parallelize_module"])
def test_ties_over_ranks(how):
    run_ranks(tied_over_ranks, 4, how)


LAYOUTS = {
    "rows": [Shard(0), Replicate(), Replicate()],
    "columns": [Shard(1), Replicate(), Replicate()],
    "rows twice": [Shard(0), Replicate(), Shard(0)],
    "both": [Shard(0), Replicate(), Shard(1)],
    "as fully_shard over tensor": [private.StridedShard(0, split_factor=2), Replicate(), Shard(0)],
    "copies": [Replicate(), Replicate(), Replicate()],
}


def tied_apart(first: str, second: str, dtype: torch.dtype, *, spoiled: int | None) -> list[str]:
    """Tie two DTensors of their own by name; `spoiled` changes an element on the way."""
    net = Tied()
    whole = torch.arange(9 * 6).view(9, 6).to(dtype)
    other = whole.clone()
    if spoiled is not None:
        other.view(-1)[spoiled] += 1
    spec = "data=2,tensor=2"
    values = []
    for value, layout in ((whole, first), (other, second)):
        values.append(value if layout == "plain" else placed(value, spec, LAYOUTS[layout]))
    net.table.weight = nn.Parameter(values[0], requires_grad=False)
    net.head.weight = nn.Parameter(values[1], requires_grad=False)
    return list(exported_state(net))


PAIRS = [
    *(("rows", "rows"), ("rows", "columns"), ("rows twice", "as fully_shard over tensor"), ("copies", "both")),
    *(("plain", "rows"), ("both", "plain"), ("columns", "copies"), ("plain", "plain")),
]


def each_pair_of_layouts() -> None:
    for first, second in PAIRS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.uint8):
            assert "head.weight" not in tied_apart(first, second, dtype, spoiled=None), (first, second, dtype)
        for spoiled in (0, 23, 53):
            with pytest.raises(SpecError) as caught:
                tied_apart(first, second, torch.float32, spoiled=spoiled)
            text = "head.weight, tied to table.weight: other values, (9, 6) of torch.float32"
            assert text in str(caught.value), (first, second)


def test_ties_that_lie_apart_are_compared_without_a_gather():
    with torch.no_grad():
        run_ranks(each_pair_of_layouts, 4)


def one_rank_differs() -> None:
    net = Tied()
    value = torch.ones(9, 6)
    net.table.weight = nn.Parameter(placed(value, "data=2,tensor=2", LAYOUTS["rows"]))
    net.head.weight = nn.Parameter(placed(value, "data=2,tensor=2", LAYOUTS["rows"]))
    if dist.get_rank() == 3:
        with torch.no_grad():
            private.piece_of(net.head.weight).view(-1)[0] = 5
    exported_state(net)


def test_a_tie_that_is_broken_on_one_rank_is_an_error_on_all():
    assert "head.weight, tied to table.weight: other values" in refused(SpecError, one_rank_differs, num_ranks=4)


# ---- what cannot be exported, alike on all ranks


def only_on_rank_2(what: str) -> None:
    net = nn.Module()
    net.body = nn.Linear(2, 2)
    mesh = mesh_for("data=4")
    if dist.get_rank() == 2:
        if what == "collision":
            net.k_proj = Quantizer()
            net.k_proj.register_buffer("k_bias", torch.ones(1))
            net.k_bmm_quantizer = Quantizer(bias_value=torch.ones(1))
        elif what == "metadata":
            net.register_buffer("__metadata__", torch.ones(1))
        elif what == "surrogate":
            net.add_module("a\ud800", nn.Linear(2, 2))
        elif what == "meta":
            net.body.to("meta")
        elif what == "partial":
            net.body.weight = nn.Parameter(
                DTensor.from_local(torch.ones(2, 2), mesh, [Partial(), Replicate(), Replicate()], run_check=False)
            )
        elif what == "object":
            net.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(note="text"))
        elif what == "number":
            net.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update({3: torch.ones(1)}))
        elif what == "twice":
            net._orig_mod = nn.Module()
            net._orig_mod.body = nn.Linear(2, 2)
        else:
            net.k_bmm_quantizer = Quantizer(amax=torch.ones(1))
    exported_state(net)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("collision", "k_proj.k_bias: of k_proj.k_bias and of k_bmm_quantizer._bias_value"),
        ("metadata", "'__metadata__': taken by the format"),
        ("surrogate", "'a\\ud800.weight': not text in UTF-8"),
        ("meta", "body.weight: on the meta device"),
        ("partial", "body.weight: partial"),
        ("object", "note: a str"),
        ("number", "3: a int, not a string"),
        ("twice", "body.weight: there twice"),
        ("cache", "k_bmm_quantizer._amax with kv_cache_format=None"),
    ],
)
def test_what_one_rank_cannot_export_is_an_error_on_all(what, text):
    assert text in refused(SpecError, only_on_rank_2, what, num_ranks=4)


def test_all_that_is_wrong_is_said_at_once():
    net = Attention()
    net.register_buffer("__metadata__", torch.ones(1))
    net.bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(SpecError) as caught:
        exported_state(net)
    for text in ("__metadata__", "on the meta device", "kv_cache_format=None", "maxbound=None"):
        assert text in str(caught.value)


def pipeline() -> list[str]:
    """Each rank has layers of its own, and an amax of its own."""
    net = nn.Module()
    net.add_module(f"layer{dist.get_rank()}", Attention())
    return list(exported_state(net, **CACHE))


def test_ranks_may_have_tensors_of_their_own():
    found = run_ranks(pipeline, 4)
    assert found == [[f"layer{rank}.{name}" for name in EXPORTED] for rank in range(4)]


# ---- inference mode


def under_inference_mode(how: str) -> None:
    torch.manual_seed(0)
    net = Tied()
    net.body.register_buffer("weight_scale", torch.rand(1, 6, 3))
    net.k_bmm_quantizer = Quantizer(amax=torch.tensor(44.8))
    expected = wholes(net, **CACHE)
    model = laid_out(net, how)
    with torch.inference_mode():
        if how != "parallelize_module":
            model(torch.arange(4))
        model.get_submodule("body").weight_scale = model.get_submodule("body").weight_scale.clone()
        model.k_bmm_quantizer._amax = model.k_bmm_quantizer._amax * 2 / 2
        found = exported_state(model, **CACHE)
        assert torch.is_inference_mode_enabled()
        assert not found["k_proj.k_scale"].is_inference()
    assert list(found) == list(expected)
    assert all(torch.equal(whole_of(found[name]), value) for name, value in expected.items())


@pytest.mark.parametrize("how", ["none", "meshpar", "fully_shard", "parallelize_module"])
def test_under_inference_mode(how):
    run_ranks(under_inference_mode, 4, how)


def made_under_inference_mode() -> None:
    """Parameters that are inference tensors themselves, sharded and not, and a tie of two."""
    with torch.inference_mode():
        net = Tied()
        net.head.weight = nn.Parameter(net.table.weight.clone())
        net.body.weight = nn.Parameter(placed(torch.ones(6, 6), "data=4", [Shard(0), Replicate(), Replicate()]))
        net.body.weight_scale = placed(torch.ones(1, 5, 6), "data=4", [Shard(0), Replicate(), Replicate()])
        net.body.register_buffer("scale", net.body.weight_scale)
        assert net.table.weight.is_inference()
    found = exported_state(net)
    assert list(found) == ["table.weight", "body.weight", "body.bias", "body.scale"]
    assert torch.equal(whole_of(found["body.scale"]), torch.ones(5, 6))


def test_parameters_that_are_inference_tensors():
    run_ranks(made_under_inference_mode, 4)


# ---- wrappers


def wrapped() -> None:
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    assert list(exported_state(net)) == ["0.weight", "0.bias"]


def test_wrappers_of_torch_leave_no_trace_in_names():
    run_ranks(wrapped, 4)
    assert list(exported_state(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))) == [
        "0.weight",
        "0.bias",
    ]


def test_extra_state_of_none_is_left_out():
    net = nn.Linear(2, 2)
    net.get_extra_state = lambda: None
    net.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(extra=None))
    assert list(exported_state(net)) == ["weight", "bias"]
