"""Names in a checkpoint: each rule, and what looks like state of a quantizer and is none."""

import pytest

from meshpar.export.names import companions, exported_name, module_name, odd, without_ones

KEPT = {
    "model.layers.0.self_attn.k_bmm_quantizer._amax": "model.layers.0.self_attn.k_proj.k_scale",
    "model.layers.0.self_attn.v_bmm_quantizer._amax": "model.layers.0.self_attn.v_proj.v_scale",
    "model.layers.0.self_attn.k_bmm_quantizer._bias_value": "model.layers.0.self_attn.k_proj.k_bias",
    "v_bmm_quantizer._bias_value": "v_proj.v_bias",
    "fc.input_quantizer._pre_quant_scale": "fc.pre_quant_scale",
    "fc.weight": "fc.weight",
    "fc.weight_scale": "fc.weight_scale",
    "fc.input_scale": "fc.input_scale",
    # looks like it, and is somebody's weight
    "quantizer.vector_quantizer.codebook.embed": "quantizer.vector_quantizer.codebook.embed",
    "input_quantizer.codebook.weight": "input_quantizer.codebook.weight",
    "statistics.data_amax": "statistics.data_amax",
    "pool.my_amaxpool.weight": "pool.my_amaxpool.weight",
    "q.base_layer.weight": "q.base_layer.weight",
    "q.lora_A.weight": "q.lora_A.weight",
    "_orig_mod.blocks.0._checkpoint_wrapped_module.weight": "blocks.0.weight",
}
DROPPED = [
    "attn.q_bmm_quantizer._amax",
    "attn.softmax_quantizer._amax",
    "fc.input_quantizer._amax",
    "fc.output_quantizer._amax",
    "fc.output_quantizer.anything",
    "fc.weight_quantizer._amax",
    "fc.weight_quantizer._scale",
    "fc.weight_quantizer._double_scale",
    "fc.weight_quantizer._scale_zeros",
    "fc.weight_quantizer.0._amax",
    "experts.gate_up_proj_weight_quantizers.3._amax",
    "fc.weight_shape",
    "fc._amax",
    "fc.weight_quantizer_amax",
    "fc._bias_value",
    "fc.weight_quantizer._pre_quant_scale",
]


@pytest.mark.parametrize("name", KEPT)
def test_each_name_that_is_kept(name):
    assert exported_name(name) == KEPT[name]


@pytest.mark.parametrize("name", DROPPED)
def test_each_state_of_quantizers_stays_out(name):
    assert exported_name(name) is None


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("q.base_layer.weight", "q.weight"),
        ("q.base_layer.weight_scale", "q.weight_scale"),
        ("q.base_layer.input_quantizer._pre_quant_scale", "q.pre_quant_scale"),
        ("q.base_layer.weight_quantizer._scale", None),
        ("base_layer.weight", "weight"),
        ("q.base_layer", "q.base_layer"),
        ("q.lora_A.default.weight", None),
        ("q.lora_embedding_B", None),
        ("fc.svdquant_lora_a", None),
        ("lora.weight", None),
        ("exploration_head.weight", "exploration_head.weight"),
        ("floral.weight", "floral.weight"),
    ],
)
def test_qlora_leaves_the_base(name, new):
    assert exported_name(name, qlora=True) == new


def test_a_block_of_scales_loses_its_first_dim():
    assert without_ones("fc.weight_scale", (1, 4, 2)) == (4, 2)
    assert without_ones("fc.pre_quant_scale", (1, 1, 2)) == (1, 2)
    for shape in ((2, 4, 2), (1, 4), (1, 1, 4, 2), (), (0, 4, 2)):
        assert without_ones("fc.weight_scale", shape) == shape
    assert without_ones("fc.weight", (1, 4, 2)) == (1, 4, 2)


def test_scales_of_a_weight():
    names = ["head.weight", "head.weight_scale", "head.weight_scale_2", "head.input_scale", "head.pre_quant_scale"]
    assert companions("head.weight", names) == names[1:]
    assert companions("head.bias", names) == []
    others = ["head.scale", "head.logit_scale", "head.inner.weight_scale", "ahead.weight_scale", "weight_scale"]
    assert companions("head.weight", others) == []
    assert companions("weight", ["weight_scale", "input_scale", "head.weight_scale"]) == ["weight_scale", "input_scale"]
    fused = ["experts.up_weight_scale", "experts.up_input_scale", "experts.up_scale_2", "experts.update_scale"]
    assert companions("experts.up", fused) == fused[:3]


def test_names_that_no_header_can_hold():
    assert [odd(name) is None for name in ("weight", "a b", "ö", "日", "a\nb", 'a"b', "")] == [True] * 6 + [False]
    assert odd("__metadata__") == "taken by the format"
    assert odd("a\ud800") == "not text in UTF-8"
    assert odd(3) == "a int, not a string"


def test_wrappers_leave_no_trace():
    assert module_name("_orig_mod.weight") == "weight"
    assert module_name("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight") == "a.b.weight"
    assert module_name("my_orig_mod.weight") == "my_orig_mod.weight"
