"""Tables of the models with experts: they tile every tensor, and unknown forms are refused by name."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.adapters.megatron_families import FAMILIES, family_of
from fp8bridge.adapters.megatron_layout import Place, megatron_shards, places
from fp8bridge.errors import ConfigError, UnsupportedModelError

from .moe_models import CONFIGS, DEEPSEEK, GLM4, MIXTRAL, QWEN3_MOE
from .test_sources import Chunk


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([None, 1, 2]),
    spec=st.sampled_from(["te", "local"]),
    mtp=st.booleans(),
)
def test_shards_tile_every_tensor_and_replicas_are_equal(name, tp, pp, dp, ep, etp, spec, mtp):
    try:
        metas, shards = megatron_shards(CONFIGS[name], tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, spec=spec, mtp=mtp)
    except ConfigError:
        assume(False)
    cover = {meta.name: np.zeros(meta.matrix, int) for meta in metas}
    for tensor, row, col, rows, cols in {(s.tensor, *s.box) for s in shards}:
        cover[tensor][row : row + rows, col : col + cols] += 1
    assert [tensor for tensor, counts in cover.items() if not (counts == 1).all()] == []
    # Every rank of a stage that holds the same experts holds the same of them.
    copies = tp * dp // (ep * (tp if etp is None else etp))
    for tensor, box in {(s.tensor, s.box) for s in shards if ".experts." in s.tensor}:
        assert len({s.rank for s in shards if (s.tensor, s.box) == (tensor, box)}) == copies
        break


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_every_family_is_found_by_either_name_and_has_a_test_model(family):
    assert {family_of({"model_type": t}).model_type for t in (family.model_type, *family.other_types)} == {
        family.model_type
    }
    assert family_of({"architectures": list(family.architectures)}) is family
    dense = {"llama", "qwen2", "qwen3"}  # test_megatron_layout and test_megatron_live
    assert family.model_type in {config["model_type"] for config in CONFIGS.values()} | dense


def test_kimi_and_moonlight_are_deepseek():
    kimi = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert family_of(kimi).model_type == family_of({"model_type": "kimi_k2"}).model_type == "deepseek_v3"


def test_places_are_megatrons_default_order():
    assert [(p.tp_rank, p.etp_rank, p.ep_rank) for p in places(tp=2, dp=2, ep=2, etp=1)] == [
        (0, 0, 0),
        (1, 0, 1),
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert [(p.tp_rank, p.etp_rank, p.ep_rank) for p in places(tp=2, dp=2, ep=2)] == [
        (0, 0, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 1, 1),
    ]
    assert Place(ep_rank=1, ep=2).experts(8) == range(4, 8)


def test_gate_and_up_of_glm4_fill_one_tensor():
    metas, shards = megatron_shards(GLM4, tp=2)
    name, ffn = "model.layers.0.mlp.gate_up_proj.weight", GLM4["intermediate_size"]
    assert [meta.shape for meta in metas if meta.name == name] == [(2 * ffn, GLM4["hidden_size"])]
    half = ffn // 2
    assert [(s.rank, s.src_row, s.dst_row, s.rows) for s in shards if s.tensor == name] == [
        (0, 0, 0, half),
        (0, half, ffn, half),
        (1, 0, half, half),
        (1, half, ffn + half, half),
    ]


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (QWEN3_MOE, {"tp": 1, "dp": 3, "ep": 3}, "8 experts cannot be split evenly over ep 3"),
        (QWEN3_MOE, {"tp": 2, "ep": 4}, r"2 ranks of a stage \(tp 2 x dp 1\) cannot be split into etp 2 x ep 4"),
        (QWEN3_MOE, {"tp": 1, "ep": 0}, "ep is 0"),
        (QWEN3_MOE, {"tp": 1, "pp": 2, "layers": [1, 2]}, r"layers is \[1, 2\]; it needs 2 numbers .* add up to 4"),
        (QWEN3_MOE, {"tp": 1, "pp": 3}, "say how many each chunk has"),
        (QWEN3_MOE | {"num_experts": None}, {"tp": 1}, "num_experts is None"),
        (MIXTRAL | {"num_local_experts": 0}, {"tp": 1}, "num_local_experts is 0"),
        (DEEPSEEK | {"moe_layer_freq": 2}, {"tp": 1}, "moe_layer_freq is 2"),
        (DEEPSEEK | {"first_k_dense_replace": None}, {"tp": 1}, "first_k_dense_replace is None"),
        (DEEPSEEK | {"kv_lora_rank": None}, {"tp": 1}, "kv_lora_rank is None"),
        (DEEPSEEK, {"tp": 8}, "4 attention heads cannot be split over tp 8"),
        (DEEPSEEK, {"tp": 1, "dp": 5, "etp": 5}, r"experts.linear_fc1.weight0 .* cut into 5 equal slices"),
    ],
)
def test_sizes_that_do_not_fit_are_named(config, sizes, message):
    with pytest.raises(ConfigError, match=message):
        megatron_shards(config, **sizes)


def test_a_place_outside_its_group_is_refused():
    with pytest.raises(ConfigError, match="etp_rank is 2"):
        Place(etp_rank=2, etp=2)


def test_gpt_oss_is_refused_with_the_way_that_works():
    with pytest.raises(UnsupportedModelError, match=r"gpt_oss.*transposed.*ExportSource"):
        family_of({"model_type": "gpt_oss"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("decoder.layers.0.mlp.experts.weight1", "legacy GroupedMLP keeps experts transposed"),
        ("decoder.layers.0.self_attention.linear_qkv_down_proj.weight", "mla_down_proj_fusion=False"),
    ],
)
def test_other_forms_of_a_layer_are_refused_with_what_to_build_instead(name, hint):
    chunk = Chunk()
    chunk.add(name, 4, 4)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{hint}"):
        MegatronSource(chunk, chunk.config, place=Place()).describe()
