"""FP8EngineConfig: every value that excludes another, or would be ignored, is one clear error."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from fp8bridge import ServerLayout
from fp8bridge.engine import PRESETS, FP8EngineConfig, bytes_per_parameter, check_checkpoint, check_server
from fp8bridge.engine.memory import total
from fp8bridge.errors import ConfigError

QUANT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TYPE_CHECKED = [f.name for f in fields(FP8EngineConfig)]


def make(**given):
    return FP8EngineConfig(**given)


def test_frozen_and_keyword_only():
    config = FP8EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.margin = 1
    with pytest.raises(TypeError):
        FP8EngineConfig("e4m3")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_a_dict(name):
    config = FP8EngineConfig.preset(name)
    assert FP8EngineConfig.from_dict(config.as_dict()) == config
    assert FP8EngineConfig.from_dict({"preset": name}) == config


@pytest.mark.parametrize("field", TYPE_CHECKED)
def test_every_field_refuses_a_value_of_another_kind(field):
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        make(**{field: "nonsense"})


@pytest.mark.parametrize(("field", "value"), [("margin", -1), ("amax_history_len", 0), ("token_multiple", True)])
def test_numbers_have_a_least_value(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be a whole number"):
        make(**{field: value})


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize(
    "ignored",
    [
        {"margin": 1},
        {"amax_history_len": 16},
        {"amax_compute_algo": "max"},
        {"wgrad": False},
        {"multi_head_attention": True},
    ],
    ids=lambda d: next(iter(d)),
)
def test_what_only_delayed_uses_is_refused_for_the_others(recipe, ignored):
    (name,) = ignored
    with pytest.raises(
        ConfigError, match=f"{name}=.* with recipe '{recipe}': belongs to recipe 'delayed'; set {name}="
    ):
        make(recipe=recipe, **ignored)
    attention = {"dot_product_attention": True} if name == "multi_head_attention" else {}
    assert make(recipe="delayed", **ignored, **attention)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dot_product_attention": True}, "dot_product_attention=True with recipe 'blockwise'.*no FP8 attention"),
        ({"recipe": "mxfp8", "block_scales": "float32"}, "block_scales='float32' with recipe 'mxfp8'.*'blockwise'"),
        ({"recipe": "delayed", "bf16_layers_at_start": 1}, "bf16_layers_at_start=1 with recipe 'delayed'.*all layers"),
        ({"recipe": "delayed", "bf16_layers_at_end": 1}, "bf16_layers_at_end=1 with recipe 'delayed'.*all layers"),
        ({"recipe": "delayed", "multi_head_attention": True}, "needs FP8 attention: set dot_product_attention=True"),
        ({"tp_only_amax_reduction": True}, "reduces nothing over that group.*set tp_only_amax_reduction=False"),
        ({"fp8_params": True, "master_dtype": "float16"}, "set master_dtype='float32', or fp8_params=False"),
        ({"recipe": "blokwise"}, "got 'blokwise' \\(did you mean 'blockwise'\\?\\)"),
    ],
)
def test_conflicts(given, says):
    with pytest.raises(ConfigError, match=says):
        make(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": "tensorwise", "dot_product_attention": True, "tp_only_amax_reduction": True},
        {"recipe": "delayed", "tp_only_amax_reduction": True},
        {"recipe": "delayed", "fp8_params": True, "master_dtype": "float16"},
        {"recipe": "mxfp8", "bf16_layers_at_start": 2, "bf16_layers_at_end": 1},
        {"block_scales": "float32", "fp8_params": True},
    ],
)
def test_what_is_no_conflict(given):
    assert replace(FP8EngineConfig(), **given) == make(**given)


def test_unknown_keys_are_refused_and_near_names_suggested():
    with pytest.raises(
        ConfigError, match="unknown field 'recpie' \\(did you mean 'recipe'\\?\\); known: mode, recipe"
    ):
        FP8EngineConfig.from_dict({"recpie": "blockwise"})
    with pytest.raises(ConfigError, match="no preset 'hoper_blockwise' \\(did you mean 'hopper_blockwise'\\?\\)"):
        FP8EngineConfig.from_dict({"preset": "hoper_blockwise"})
    with pytest.raises(ConfigError, match="a mapping of fields, not list"):
        FP8EngineConfig.from_dict(["blockwise"])


def test_a_preset_in_a_file_can_be_changed(tmp_path):
    path = tmp_path / "fp8.yaml"
    path.write_text("lr: 1.0e-3\nfp8_engine:\n  preset: hopper_blockwise\n  bf16_layers_at_start: 2\n")
    config = FP8EngineConfig.from_yaml(path)
    assert config == replace(FP8EngineConfig.hopper_blockwise(), bf16_layers_at_start=2)
    path.write_text("recipe: tensorwise\n")
    assert FP8EngineConfig.from_yaml(path) == FP8EngineConfig(recipe="tensorwise")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recipe: [unclosed", "is not YAML"),
        ("margin: many", "fp8.yaml: margin must be a whole number"),
        ("- recipe", "mapping of fields, not list"),
        ("fp8_engine: {recpie: mxfp8}", "did you mean 'recipe'"),
        ("hello", "mapping of fields, not str"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path, text, says):
    path = tmp_path / "fp8.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        FP8EngineConfig.from_yaml(path)
    with pytest.raises(ConfigError, match="cannot read .*missing.yaml"):
        FP8EngineConfig.from_yaml(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("preset", "linear", "other"),
    [
        (None, 18, 18),
        ("hopper_blockwise", 18 + 8 / 16384, 18),
        ("blackwell_mxfp8", 18 + 2 / 32, 18),
        ("fp8lm_o1", 20 + 8 / 16384, 18),
        ("fp8lm_o2", 14 + 8 / 16384, 12),
        ("fp8lm_o3", 14 + 8 / 16384, 14),
    ],
)
def test_bytes_per_parameter(preset, linear, other):
    config = FP8EngineConfig.preset(preset) if preset else None
    assert total(bytes_per_parameter(config)) == linear
    assert total(bytes_per_parameter(config, linear=False)) == other


def test_bf16_gradients_save_less_where_megatron_copies_them():
    """Masters that Megatron holds want fp32 gradients, for each rank's share; Transformer Engine's do not."""
    for name, saved in (("hopper_blockwise", -2), ("fp8lm_o2", 2)):
        sizes = [
            total(bytes_per_parameter(FP8EngineConfig.from_dict({"preset": name, "grad_dtype": dtype})))
            for dtype in ("float32", "bfloat16")
        ]
        assert sizes[0] - sizes[1] == saved
    shared = FP8EngineConfig.from_dict({"preset": "hopper_blockwise", "grad_dtype": "bfloat16"})
    assert total(bytes_per_parameter(shared, dp=8)) == 1 + 1 + 8 / 16384 + 2 + 4 * 4 / 8


def test_blackwell_keeps_nothing_with_one_scale_transposed():
    for config in (FP8EngineConfig.fp8lm_o2(), FP8EngineConfig(recipe="tensorwise", fp8_params=True)):
        sizes = {gpu: total(bytes_per_parameter(config, gpu=gpu)) for gpu in ("hopper", "blackwell")}
        assert sizes["hopper"] - sizes["blackwell"] == 1


def test_optimizer_states_are_shared_by_data_parallel_ranks():
    parts = bytes_per_parameter(FP8EngineConfig.hopper_blockwise(), dp=4)
    assert total(parts) == 1 + 1 + 8 / 16384 + 4 + 3
    assert [p.what for p in parts if p.sharded] == ["master", "first moment", "second moment"]


@pytest.mark.parametrize(
    ("quant", "config", "says"),
    [
        (None, {}, "not FP8.*fp8bridge convert SRC DST --to fp8"),
        (QUANT | {"weight_block_size": [64, 64]}, {}, "weight_block_size \\[64, 64\\].*\\[128, 128\\]"),
        (QUANT | {"weight_block_size": None}, {}, "the base checkpoint: .*per-tensor FP8"),
        (QUANT | {"scale_fmt": "ue8m0"}, {"block_scales": "float32"}, "set block_scales='power_of_two'"),
        (QUANT, {}, None),
        (QUANT | {"scale_fmt": "ue8m0"}, {}, None),
    ],
)
def test_the_base_checkpoint_must_be_what_is_trained(quant, config, says):
    hf_config = {"quantization_config": quant} if quant else {}
    if says is None:
        check_checkpoint(make(**config), hf_config)
        return
    with pytest.raises(ConfigError, match=says):
        check_checkpoint(make(**config), hf_config)


@pytest.mark.parametrize(
    ("layout", "config", "says"),
    [
        ({"block": (128, 128), "scale_format": "ue8m0"}, {"block_scales": "float32"}, "scale_fmt ue8m0"),
        (
            {"block": (128, 128)},
            {"recipe": "mxfp8", "fp8_params": True},
            "use recipe 'blockwise', or fp8_params=False",
        ),
        ({"block": None}, {"fp8_params": True}, "servers are unquantized bfloat16"),
        ({"block": (1, 128)}, {"fp8_params": True}, "scale blocks of \\[1, 128\\]"),
        ({"block": None}, {}, None),
        ({"block": (1, 128)}, {"recipe": "tensorwise"}, None),
        ({"block": (128, 128)}, {"fp8_params": True, "block_scales": "float32"}, None),
    ],
)
def test_servers_must_be_able_to_take_what_is_trained(layout, config, says):
    if says is None:
        check_server(make(**config), ServerLayout(**layout))
        return
    with pytest.raises(ConfigError, match=says):
        check_server(make(**config), ServerLayout(**layout))
