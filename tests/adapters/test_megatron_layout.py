"""The tables and the arithmetic, against naive constructions of what Megatron stores."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8bridge.adapters.megatron_families import family_of
from fp8bridge.adapters.megatron_layout import megatron_shards
from fp8bridge.adapters.megatron_names import dims_of
from fp8bridge.errors import ConfigError, UnsupportedModelError
from fp8bridge.types import TensorMeta

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "vocab_size": 50,
}


def values(metas):
    """Every tensor filled with numbers that occur nowhere else."""
    ends = np.cumsum([meta.numel for meta in metas])
    return {
        meta.name: np.arange(end - meta.numel, end).reshape(meta.matrix) for meta, end in zip(metas, ends, strict=True)
    }


def stack(hf, prefix, config, tp):
    """qkv by query group, and [gate_r; up_r] by TP rank: as Megatron's docs say, by hand."""
    q, k, v = (hf[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    groups = config["num_key_value_heads"]
    qkv = [part for parts in zip(*(np.split(x, groups) for x in (q, k, v)), strict=True) for part in parts]
    gate, up = (np.split(hf[f"{prefix}mlp.{x}_proj.weight"], tp) for x in ("gate", "up"))
    fc1 = [part for pair in zip(gate, up, strict=True) for part in pair]
    return {"self_attention.linear_qkv.weight": np.concatenate(qkv), "mlp.linear_fc1.weight": np.concatenate(fc1)}


def dense_configs():
    def config(model_type, groups, per_group, head_dim, hidden, ffn, vocab, tied, bias):
        return SMALL | {
            "model_type": model_type,
            "hidden_size": hidden,
            "num_attention_heads": groups * per_group,
            "num_key_value_heads": groups,
            "head_dim": head_dim,
            "intermediate_size": ffn,
            "num_hidden_layers": 2,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "attention_bias": bias,
        }

    sizes = st.integers
    return st.builds(
        config, st.sampled_from(["llama", "qwen2", "qwen3"]), sizes(1, 4), sizes(1, 4), sizes(1, 9),
        sizes(1, 20), sizes(1, 30), sizes(1, 70), st.booleans(), st.booleans(),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(config=dense_configs(), tp=st.sampled_from([1, 2, 3, 4, 6, 8]), multiple=st.integers(1, 9))
def test_shards_tile_every_tensor_and_stay_inside_their_parameter(config, tp, multiple):
    config["intermediate_size"] *= tp
    try:
        metas, shards = megatron_shards(config, tp=tp, vocab_multiple=multiple)
    except ConfigError:
        assume(False)
    cover = {meta.name: np.zeros(meta.matrix, int) for meta in metas}
    for name, row, col, rows, cols in {(s.tensor, *s.box) for s in shards}:
        cover[name][row : row + rows, col : col + cols] += 1
    assert all((counts == 1).all() for counts in cover.values())
    assert all(min(s.rows, s.cols, s.src_row + 1, s.src_col + 1) >= 1 for s in shards)

    hf = values(metas)
    for layer in range(2):
        for name, whole in stack(hf, f"model.layers.{layer}.", config, tp).items():
            found = [s for s in shards if s.param == f"0:decoder.layers.{layer}.{name}"]
            rows = len(whole) // tp
            for rank in range(tp):
                slice_ = np.full((rows, config["hidden_size"]), -1)
                for s in (s for s in found if s.rank == rank):
                    part = hf[s.tensor][s.dst_row : s.dst_row + s.rows, s.dst_col : s.dst_col + s.cols]
                    slice_[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols] = part
                np.testing.assert_array_equal(slice_, whole[rank * rows : (rank + 1) * rows])


def test_ranks_are_numbered_tp_dp_pp_and_layers_interleave_over_virtual_stages():
    _, shards = megatron_shards(SMALL, tp=2, pp=2, vpp=2, dp=2)
    down = "mlp.down_proj.weight"
    where = {
        layer: {(s.rank, s.param[0]) for s in shards if s.tensor == f"model.layers.{layer}.{down}"}
        for layer in range(4)
    }
    first, second = {0, 1, 2, 3}, {4, 5, 6, 7}
    assert where == {
        0: {(r, "0") for r in first},
        1: {(r, "0") for r in second},
        2: {(r, "1") for r in first},
        3: {(r, "1") for r in second},
    }
    assert {s.rank for s in shards if s.tensor == "model.norm.weight"} == second
    columns = {s.rank: s.dst_col for s in shards if s.tensor == f"model.layers.0.{down}"}
    assert columns == {0: 0, 1: 10, 2: 0, 3: 10}


def test_vocabulary_padding_is_nobodys():
    metas, shards = megatron_shards(SMALL, tp=4, vocab_multiple=128)
    rows = {s.rank: s.rows for s in shards if s.tensor == "model.embed_tokens.weight"}
    assert rows == {0: 50}
    assert TensorMeta("model.embed_tokens.weight", (50, 24), "bfloat16") in metas


def test_a_rank_may_hold_part_of_a_query_group():
    _, shards = megatron_shards(SMALL, tp=4)
    rank1 = [s for s in shards if s.rank == 1 and s.param == "0:decoder.layers.0.self_attention.linear_qkv.weight"]
    # 12 q, 6 k and 6 v rows a group, 12 rows a rank: rank 1 has the k and v of group 0.
    assert [(s.tensor.split(".")[-2], s.src_row, s.dst_row, s.rows) for s in rank1] == [
        ("k_proj", 0, 0, 6),
        ("v_proj", 6, 0, 6),
    ]


def test_tied_embeddings_have_no_head():
    metas, shards = megatron_shards(SMALL | {"tie_word_embeddings": True}, tp=2, pp=2)
    assert "lm_head.weight" not in {meta.name for meta in metas}
    assert {s.rank for s in shards if s.tensor == "model.embed_tokens.weight"} == {0}


@pytest.mark.parametrize(
    ("model_type", "extra", "biased"),
    [
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("llama", {"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
        ("qwen2", {}, {"q_proj", "k_proj", "v_proj"}),
        ("qwen3", {}, set()),
    ],
)
def test_families_have_the_tensors_that_transformers_has(model_type, extra, biased):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = SMALL | {"model_type": model_type} | extra
    metas, _ = megatron_shards(config, tp=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert {meta.name: meta.shape for meta in metas} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {meta.name.split(".")[-2] for meta in metas if meta.name.endswith(".bias")} == biased


def test_head_dim_defaults_as_in_transformers():
    config = {k: v for k, v in SMALL.items() if k != "head_dim"}
    assert dims_of(config, family_of(config)).head_dim == 128
    config["model_type"] = "llama"
    assert dims_of(config | {"head_dim": None}, family_of(config)).head_dim == 6


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"gemma3.*llama.*Qwen2ForCausalLM.*qwen3.*add a Family"):
        family_of({"model_type": "gemma3"})
    with pytest.raises(UnsupportedModelError, match="Qwen3ForSequenceClassification"):
        family_of({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]})


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"intermediate_size": None}, {}, "intermediate_size is None"),
        ({"num_hidden_layers": "4"}, {}, "num_hidden_layers is '4'"),
        ({"num_key_value_heads": 3}, {}, "no multiple of num_key_value_heads 3"),
        ({"intermediate_size": 21}, {"tp": 2}, r"mlp.linear_fc1.weight .* 2 equal slices"),
        ({}, {"pp": 3}, "4 layers cannot be split evenly over pp 3 x vpp 1"),
        ({}, {"tp": 3}, "4 attention heads cannot be split over tp 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, sizes, message):
    with pytest.raises(ConfigError, match=message):
        megatron_shards(SMALL | change, **{"tp": 1} | sizes)
