"""Which tensors are quantized, and which configs are refused."""

import pytest

from fp8bridge import ServerLayout, TensorMeta
from fp8bridge.errors import LayoutError

from .support import FP8_LAYOUT, QUANT


def action(name, shape=(256, 256), dtype="bfloat16", layout=FP8_LAYOUT):
    return layout.decide(TensorMeta(name, shape, dtype)).action


def layout_with(**quant):
    return ServerLayout.from_hf_config({"torch_dtype": "bfloat16", "quantization_config": QUANT | quant})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (256, 128), "quantize"),
        ("model.layers.0.mlp.gate_proj.weight", (256, 128), "quantize"),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (64, 128), "quantize"),
        ("model.layers.0.self_attn.q_proj.bias", (256,), "copy"),
        ("model.layers.0.mlp.gate.weight", (8, 128), "copy"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 128), "copy"),
        ("model.layers.0.input_layernorm.weight", (128,), "copy"),
        ("model.layers.0.self_attn.q_norm.weight", (64,), "copy"),
        ("model.embed_tokens.weight", (1000, 128), "copy"),
        ("lm_head.weight", (1000, 128), "copy"),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), "copy"),
        ("model.layers.0.self_attn.k_scale", (1,), "copy"),
    ],
)
def test_the_action_of_each_kind_of_tensor(name, shape, expected):
    assert action(name, shape) == expected


def test_without_quantization_config_everything_is_copied():
    plain = ServerLayout.from_hf_config({"torch_dtype": "bfloat16"})
    assert action("model.layers.0.mlp.up_proj.weight", layout=plain) == "copy"
    assert action("model.layers.0.mlp.up_proj.weight", dtype="float32", layout=plain) == "cast"


def test_an_unquantized_tensor_of_another_dtype_is_a_cast_and_says_which():
    decision = FP8_LAYOUT.decide(TensorMeta("model.norm.weight", (128,), "float32"))
    assert decision.action == "cast"
    assert "float32 -> bfloat16" in decision.reason


@pytest.mark.parametrize("entry", ["model.layers.1", "layers.1", "model.language_model.layers.1"])
def test_ignored_modules_match_with_or_without_wrapper_prefix(entry):
    layout = layout_with(modules_to_not_convert=[entry])
    assert action("model.layers.1.mlp.up_proj.weight", layout=layout) == "copy"
    assert action("model.language_model.layers.1.mlp.up_proj.weight", layout=layout) == "copy"
    assert action("model.layers.10.mlp.up_proj.weight", layout=layout) == "quantize", "dotted boundaries"


def test_ignored_layers_is_read_before_modules_to_not_convert():
    layout = layout_with(ignored_layers=["layers.0"], modules_to_not_convert=["layers.1"])
    assert layout.ignored == ("layers.0",)


def test_an_ignore_that_matches_nothing_is_reported():
    layout = layout_with(modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"])
    assert layout.unused_ignores(["model.layers.0.mlp.gate.weight"]) == ["lm_head"]


def test_ignoring_part_of_a_fused_layer_is_refused():
    layout = layout_with(modules_to_not_convert=["layers.0.self_attn.k_proj"])
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    with pytest.raises(LayoutError, match=r"ignores only layers\.0\.self_attn\.k_proj"):
        layout.check_siblings(names)
    layout_with(modules_to_not_convert=["layers.0.self_attn"]).check_siblings(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"weight_block_size": None}, "no weight_block_size"),
        ({"weight_block_size": [128]}, "two positive integers"),
        ({"weight_block_size": [128, 0]}, "two positive integers"),
        ({"activation_scheme": "static"}, "only 'dynamic'"),
        ({"scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_field(change, message):
    with pytest.raises(LayoutError, match=message):
        layout_with(**change)


def test_scale_shape_is_ceil_divided():
    assert FP8_LAYOUT.scale_shape((576, 7168)) == (5, 56)
    assert FP8_LAYOUT.scale_shape((1, 1)) == (1, 1)


def test_an_fp8_weight_without_scale_is_an_error_not_a_cast():
    with pytest.raises(LayoutError, match="with no scale"):
        FP8_LAYOUT.decide(TensorMeta("model.layers.0.mlp.up_proj.weight", (128, 128), "float8_e4m3fn"))


def test_differences_name_the_fields_and_the_round_trip_keeps_everything():
    other = layout_with(weight_block_size=[64, 128], scale_fmt="ue8m0", ignored_layers=["layers.3"])
    assert ServerLayout.from_hf_config(other.as_hf_config()) == other
    assert [d.split(":")[0] for d in FP8_LAYOUT.differences(other)] == ["block", "ignored", "scale_format"]
