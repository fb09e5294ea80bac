"""Models by name: their parameter counts are the published ones; shapes of trainers and servers in a word."""

import pytest

from fp8bridge.adapters.megatron_layout import megatron_shards
from fp8bridge.errors import ConfigError
from fp8bridge.models import MODELS, config_of
from fp8bridge.topology import ServerShape, TrainerShape

BILLIONS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "GLM-4.5": 353,  # its 358 are with the layer that predicts a further token
    "DeepSeek-V3": 671,
    "Kimi-K2": 1026,
}
"""Parameters, from the model cards."""


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("Qwen3-235B-A22B", "DeepSeek-V3", "Kimi-K2")])
def test_the_parameters_add_up_to_the_models_size(name):
    metas, _ = megatron_shards(config_of(name), tp=1)
    assert sum(m.numel for m in metas) / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "DeepSeek-V3", "Kimi-K2"])
def test_the_large_models_add_up_by_the_layer(name):
    """The last layer times the layers, and the rest: as exact, and quicker than all 60 to 94 layers."""
    config = config_of(name)
    dense = config.get("first_k_dense_replace", 0)

    def size(layers):
        return sum(m.numel for m in megatron_shards(config_of(name, layers=layers), tp=1)[0])

    sparse = size(dense + 2) - size(dense + 1)
    total = size(dense + 1) + sparse * (config["num_hidden_layers"] - dense - 1)
    assert total / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_every_model_is_counted():
    assert set(BILLIONS) == set(MODELS)


def test_names_have_no_case_and_layers_can_be_cut():
    assert config_of("qwen3-8b") == MODELS["Qwen3-8B"]
    assert config_of("Qwen3-8B", layers=2)["num_hidden_layers"] == 2
    assert MODELS["Qwen3-8B"]["num_hidden_layers"] == 36
    with pytest.raises(ConfigError, match=r"no model 'GPT-5' .* Kimi-K2"):
        config_of("GPT-5")
    with pytest.raises(ConfigError, match="has 36 layers; 37"):
        config_of("Qwen3-8B", layers=37)


@pytest.mark.parametrize(
    ("text", "sizes", "ranks"),
    [
        ("tp8pp4ep8", {"tp": 8, "pp": 4, "ep": 8, "etp": 8, "dp": 8}, 256),
        ("tp8pp4ep8etp1", {"tp": 8, "pp": 4, "ep": 8, "etp": 1, "dp": 1}, 32),
        ("pp8tp8dp4ep32etp1", {"tp": 8, "pp": 8, "ep": 32, "etp": 1, "dp": 4}, 256),
        ("tp2", {"tp": 2, "pp": 1, "ep": 1, "etp": 2, "dp": 1}, 2),
        ("dp4", {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "dp": 4}, 4),
    ],
)
def test_a_trainer_in_a_word(text, sizes, ranks):
    shape = TrainerShape.parse(text)
    assert {name: getattr(shape, name) for name in sizes} == sizes
    assert shape.ranks == ranks


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp8xp2", "8tp", "tp8 pp4", "tp8tp4"])
def test_a_word_that_is_no_trainer(text):
    with pytest.raises(ConfigError, match="trainer"):
        TrainerShape.parse(text)


def test_servers_in_a_word():
    assert ServerShape.parse("16xtp8").gpus == 128
    assert ServerShape.parse("4") == ServerShape(count=4, tp=1)
    for text in ("0", "x8", "16xtp0", "16tp8", ""):
        with pytest.raises(ConfigError, match="16xtp8"):
            ServerShape.parse(text)


def test_layers_that_do_not_divide_go_to_the_first_chunks():
    assert TrainerShape.parse("pp8").chunks(61) == [8] * 5 + [7] * 3
    assert TrainerShape.parse("pp2vpp2").chunks(8) == [2] * 4
