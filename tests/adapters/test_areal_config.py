"""AReaL's FP8 config in our words: what it does, and what it was told without effect."""

import importlib.util

import pytest

from fp8bridge.adapters.areal_config import convert_fp8_config
from fp8bridge.errors import ConfigError


def test_areals_published_recipe():
    fields, notes = convert_fp8_config({"mode": "hybrid", "recipe": "blockwise", "param": True}, fp8_param_gather=True)
    assert fields == {"mode": "hybrid", "recipe": "blockwise", "fp8_params": True}
    assert notes == []


def test_areals_defaults_are_the_delayed_recipe():
    fields, notes = convert_fp8_config({})
    assert fields == {
        "recipe": "delayed", "margin": 0, "amax_history_len": 1, "amax_compute_algo": "most_recent", "wgrad": True
    }  # fmt: skip
    assert notes == []


def test_what_a_recipe_ignores_is_left_out_and_named():
    told = {"recipe": "blockwise", "margin": 2, "wgrad": False, "dot_product_attention": True}
    told |= {"multi_head_attention": True, "tp_only_amax_red": True, "direct_convert": False}
    fields, notes = convert_fp8_config(told, float32_scales=True)
    assert fields == {"recipe": "blockwise", "block_scales": "float32"}
    assert [note.split("=")[0] for note in notes] == [
        *("margin", "wgrad", "dot_product_attention", "multi_head_attention", "tp_only_amax_red", "direct_convert")
    ]


def test_layers_in_bf16_count_only_with_their_switch():
    layers = {"recipe": "mxfp8", "num_layers_at_start_in_bf16": 2, "dot_product_attention": True}
    assert "bf16_layers_at_start" not in convert_fp8_config(layers)[0]
    fields, _ = convert_fp8_config(layers | {"first_last_layers_bf16": True})
    assert fields == {
        "recipe": "mxfp8", "dot_product_attention": True, "bf16_layers_at_start": 2, "bf16_layers_at_end": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("areal", "options", "says"),
    [
        ({"param": True}, {"fp8_param_gather": False}, "fp8_config.param is True and ddp.fp8_param_gather is False"),
        ({"params": True}, {}, "has no field params; it has"),
        ({"recipe": "mxfp8"}, {"float32_scales": True}, "float32_scales is for recipe 'blockwise'"),
        ([("mode", "e4m3")], {}, "its dataclass or a mapping, not a list"),
    ],
)
def test_contradictions_are_refused(areal, options, says):
    with pytest.raises(ConfigError, match=says):
        convert_fp8_config(areal, **options)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed", "mxfp8"])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("param", [False, True])
def test_ours_takes_what_comes_out(recipe, attention, param):
    if importlib.util.find_spec("fp8bridge.engine") is None:
        pytest.skip("fp8bridge.engine is not in this build")
    from fp8bridge.engine.config import FP8EngineConfig

    told = {"recipe": recipe, "param": param, "dot_product_attention": attention, "margin": 1}
    fields, _ = convert_fp8_config(told | {"tp_only_amax_red": attention})
    config = FP8EngineConfig.from_dict(fields)
    assert (config.recipe, config.fp8_params) == (recipe, param)
