"""The tables: one `Family` per Hugging Face architecture. To support another model, add one to `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8bridge.errors import UnsupportedModelError

from .megatron_names import (
    COLUMN,
    COLUMN_OR_WHOLE,
    GATE_UP,
    OUTPUT_LAYER,
    QKV,
    REPLICATED,
    ROW,
    VOCAB,
    WORD_EMBEDDINGS,
    Family,
    Rule,
    to,
)

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
EMBEDDING = (Rule(WORD_EMBEDDINGS, VOCAB, (to("model.embed_tokens.weight", "vocab", "hidden"),)),)
HEAD = (
    Rule("decoder.final_layernorm.weight", REPLICATED, (to("model.norm.weight", "hidden"),)),
    Rule(OUTPUT_LAYER, VOCAB, (to("lm_head.weight", "vocab", "hidden"),), when="untied"),
)
ATTENTION = (
    Rule(
        "self_attention.linear_qkv.layer_norm_weight",
        REPLICATED,
        (to("input_layernorm.weight", "hidden"),),
        local="input_layernorm.weight",
    ),
    Rule(
        "self_attention.linear_qkv.weight",
        QKV,
        (
            to("self_attn.q_proj.weight", "q", "hidden"),
            to("self_attn.k_proj.weight", "kv", "hidden"),
            to("self_attn.v_proj.weight", "kv", "hidden"),
        ),
    ),
    Rule("self_attention.linear_proj.weight", ROW, (to("self_attn.o_proj.weight", "hidden", "q"),)),
)


def gated(mlp: str, hf: str, ffn: str, *, names: tuple[str, str, str] = GATE_UP_DOWN, **more: Any) -> tuple[Rule, ...]:
    """A gated MLP: Megatron's two matrices, HF's three. more: further fields of both rules."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    local = more.pop("local", mlp)
    numbered = "{}" if more.get("expert") else ""
    return tuple(
        Rule(f"{mlp}.{linear}.weight{numbered}", split, targets, local=f"{local}.{linear}.weight", **more)
        for linear, split, targets in (
            ("linear_fc1", GATE_UP, (to(gate, ffn, "hidden"), to(up, ffn, "hidden"))),
            ("linear_fc2", ROW, (to(down, "hidden", ffn),)),
        )
    )


MLP_NORM = (
    Rule(
        "mlp.linear_fc1.layer_norm_weight",
        REPLICATED,
        (to("post_attention_layernorm.weight", "hidden"),),
        local="pre_mlp_layernorm.weight",
    ),
)
MLP = MLP_NORM + gated("mlp", "mlp", "ffn")
MLP_BIAS = (
    Rule(
        "mlp.linear_fc1.bias",
        GATE_UP,
        (to("mlp.gate_proj.bias", "ffn"), to("mlp.up_proj.bias", "ffn")),
        when="mlp_bias",
    ),
    Rule("mlp.linear_fc2.bias", REPLICATED, (to("mlp.down_proj.bias", "hidden"),), when="mlp_bias"),
)
PROJ_BIAS = (
    Rule(
        "self_attention.linear_proj.bias",
        REPLICATED,
        (to("self_attn.o_proj.bias", "hidden"),),
        when="attention_bias",
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", REPLICATED, (to("self_attn.q_norm.weight", "head_dim"),)),
    Rule("self_attention.k_layernorm.weight", REPLICATED, (to("self_attn.k_norm.weight", "head_dim"),)),
)


def qkv_bias(when: str = "") -> tuple[Rule, ...]:
    targets = (
        to("self_attn.q_proj.bias", "q"),
        to("self_attn.k_proj.bias", "kv"),
        to("self_attn.v_proj.bias", "kv"),
    )
    return (Rule("self_attention.linear_qkv.bias", QKV, targets, when=when),)


MOE_NORM = (Rule("pre_mlp_layernorm.weight", REPLICATED, (to("post_attention_layernorm.weight", "hidden"),)),)


def experts(block: str = "mlp", names: tuple[str, str, str] = GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Router and experts. TEGroupedMLP numbers weights, SequentialMLP modules."""
    router = Rule("mlp.router.weight", REPLICATED, (to(f"{block}.gate.weight", "experts", "hidden"),))
    local = "mlp.experts.local_experts.{}"
    return (router, *gated("mlp.experts", block + ".experts.{}", "moe_ffn", names=names, local=local, expert=True))


def shared_expert(name: str) -> tuple[Rule, ...]:
    """An expert that sees every token, cut by the TP of attention."""
    return gated("mlp.shared_experts", f"mlp.{name}", "shared_ffn", when="shared")


SHARED_GATE = (
    Rule(
        "mlp.shared_experts.gate_weight",
        REPLICATED,
        (to("mlp.shared_expert_gate.weight", "one", "hidden"),),
        when="shared",
    ),
)
EXPERT_BIAS = (
    Rule("mlp.router.expert_bias", REPLICATED, (to("mlp.gate.e_score_correction_bias", "experts"),), dtype="float32"),
)
MLA = (
    Rule("input_layernorm.weight", REPLICATED, (to("input_layernorm.weight", "hidden"),)),
    Rule(
        "self_attention.linear_q_proj.weight",
        COLUMN,
        (to("self_attn.q_proj.weight", "mla_q", "hidden"),),
        when="plain_q",
    ),
    Rule(
        "self_attention.linear_q_down_proj.weight",
        COLUMN_OR_WHOLE,
        (to("self_attn.q_a_proj.weight", "q_lora", "hidden"),),
        when="compressed_q",
    ),
    Rule(
        "self_attention.linear_q_up_proj.layer_norm_weight",
        REPLICATED,
        (to("self_attn.q_a_layernorm.weight", "q_lora"),),
        local="self_attention.q_layernorm.weight",
        when="compressed_q",
    ),
    Rule(
        "self_attention.linear_q_up_proj.weight",
        COLUMN,
        (to("self_attn.q_b_proj.weight", "mla_q", "q_lora"),),
        when="compressed_q",
    ),
    Rule(
        "self_attention.linear_kv_down_proj.weight",
        COLUMN_OR_WHOLE,
        (to("self_attn.kv_a_proj_with_mqa.weight", "kv_a", "hidden"),),
    ),
    Rule(
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        REPLICATED,
        (to("self_attn.kv_a_layernorm.weight", "kv_lora"),),
        local="self_attention.kv_layernorm.weight",
    ),
    Rule("self_attention.linear_kv_up_proj.weight", COLUMN, (to("self_attn.kv_b_proj.weight", "mla_kv", "kv_lora"),)),
    Rule("self_attention.linear_proj.weight", ROW, (to("self_attn.o_proj.weight", "hidden", "mla_o"),)),
)
MTP = (
    Rule("enorm.weight", REPLICATED, (to("enorm.weight", "hidden"),)),
    Rule("hnorm.weight", REPLICATED, (to("hnorm.weight", "hidden"),)),
    Rule("eh_proj.weight", COLUMN, (to("eh_proj.weight", "hidden", "two_hidden"),)),
    Rule("final_layernorm.weight", REPLICATED, (to("shared_head.norm.weight", "hidden"),)),
)
QK_NORM_IF_USED = tuple(Rule(r.param, r.split, r.targets, when="qk_norm") for r in QK_NORM)

SANDWICH_NORMS = (
    Rule("post_self_attn_layernorm.weight", REPLICATED, (to("post_self_attn_layernorm.weight", "hidden"),)),
    Rule("post_mlp_layernorm.weight", REPLICATED, (to("post_mlp_layernorm.weight", "hidden"),)),
)
FUSED_GATE_UP = (
    Rule(
        "mlp.linear_fc1.weight",
        GATE_UP,
        (
            to("mlp.gate_up_proj.weight", "two_ffn", "hidden", half=0),
            to("mlp.gate_up_proj.weight", "two_ffn", "hidden", half=1),
        ),
    ),
)

FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        layer=ATTENTION + qkv_bias("attention_bias") + PROJ_BIAS,
        dense=MLP + MLP_BIAS,
        first=EMBEDDING,
        last=HEAD,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), layer=ATTENTION + qkv_bias(), dense=MLP, first=EMBEDDING, last=HEAD),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        layer=ATTENTION + qkv_bias("attention_bias") + PROJ_BIAS + QK_NORM,
        dense=MLP,
        first=EMBEDDING,
        last=HEAD,
        head_dim=128,
    ),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        layer=ATTENTION + qkv_bias("attention_bias") + PROJ_BIAS + QK_NORM,
        dense=MLP,
        moe=MOE_NORM + experts(),
        first=EMBEDDING,
        last=HEAD,
    ),
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        layer=ATTENTION + qkv_bias(),
        dense=MLP,
        moe=MOE_NORM + experts() + shared_expert("shared_expert") + SHARED_GATE,
        first=EMBEDDING,
        last=HEAD,
    ),
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        layer=ATTENTION,
        dense=(),
        moe=MOE_NORM + experts("block_sparse_moe", ("w1", "w3", "w2")),
        first=EMBEDDING,
        last=HEAD,
        fields=(("experts", "num_local_experts"), ("moe_ffn", "intermediate_size")),
    ),
    Family(
        "glm4",
        ("Glm4ForCausalLM",),
        layer=ATTENTION + qkv_bias("attention_bias") + SANDWICH_NORMS,
        dense=tuple(rule for rule in MLP if rule.split is not GATE_UP) + FUSED_GATE_UP,
        first=EMBEDDING,
        last=HEAD,
        head_dim=128,
    ),
    Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        layer=ATTENTION + qkv_bias("attention_bias") + QK_NORM_IF_USED,
        dense=MLP,
        moe=MOE_NORM + experts() + EXPERT_BIAS + shared_expert("shared_experts"),
        first=EMBEDDING,
        last=HEAD,
        mtp=MTP,
        fields=(("experts", "n_routed_experts"),),
    ),
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        layer=MLA,
        dense=MLP,
        moe=MOE_NORM + experts() + EXPERT_BIAS + shared_expert("shared_experts"),
        first=EMBEDDING,
        last=HEAD,
        mtp=MTP,
        fields=(("experts", "n_routed_experts"),),
        other_types=("kimi_k2",),
    ),
)

_REFUSED = {
    "gpt_oss": (
        "its experts lie transposed and interleaved in the checkpoint, and its 64-wide heads end inside 128-row "
        "blocks. Send it to an unquantized server from Megatron-Bridge's export, with ExportSource"
    ),
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The table for a model: by `architectures` where the config has them, else by `model_type`."""
    model_type = hf_config.get("model_type")
    architectures = hf_config.get("architectures") or ()
    for family in FAMILIES:
        if architectures and set(architectures) <= set(family.architectures):
            return family
        if not architectures and model_type in (family.model_type, *family.other_types):
            return family
    if why := _REFUSED.get(str(model_type)):
        raise UnsupportedModelError(f"model_type {model_type!r} has no Megatron table: {why}")
    known = ", ".join(f"{f.model_type} ({', '.join(f.architectures)})" for f in FAMILIES)
    raise UnsupportedModelError(
        f"no Megatron table for model_type {model_type!r}, architectures {list(architectures)}; "
        f"known: {known}. To add one, add a Family to FAMILIES in fp8bridge/adapters/megatron_families.py"
    )
