"""Which Hugging Face tensors a Megatron-Core parameter holds: one table row (`Rule`) per parameter.

Data only; `megatron_layout` turns rows into rectangles. To support another model, add a `Family` to
`FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Split:
    """How the TP ranks share a parameter.

    axis: the one that is cut into equal slices (0 rows, 1 columns), None if every rank holds all.
    parts: the number of interleaved parts: "one", "groups" (query groups) or "tp" (TP size).
    padded: the trainer rounds the rows up (vocabulary); the rows past the tensor's end are garbage.
    """

    axis: int | None
    parts: str = "one"
    padded: bool = False


REPLICATED = Split(None)
COLUMN = Split(0)
ROW = Split(1)
VOCAB = Split(0, padded=True)
QKV = Split(0, parts="groups")
GATE_UP = Split(0, parts="tp")


@dataclass(frozen=True, slots=True)
class Target:
    """An HF tensor: its name and its shape, as names of `ModelDims` members."""

    name: str
    shape: tuple[str, ...]


def to(name: str, *shape: str) -> Target:
    return Target(name, shape)


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter. `param` is its name in the Transformer Engine spec, `local` in the local spec
    where that differs; `when` names the `ModelDims` flag without which the model has none of it."""

    param: str
    split: Split
    targets: tuple[Target, ...]
    local: str = ""
    when: str = ""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes of a dense model, from its HF config; `Target.shape` and `Rule.when` name members."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.groups * self.head_dim

    @property
    def untied(self) -> bool:
        return not self.tied


@dataclass(frozen=True, slots=True)
class Family:
    """A table. `layer` rules are relative to the layer; `first` and `last` belong to those stages.

    head_dim: what the HF class takes when the config names none (None: hidden / heads).
    """

    model_type: str
    architectures: tuple[str, ...]
    layer: tuple[Rule, ...]
    first: tuple[Rule, ...]
    last: tuple[Rule, ...]
    head_dim: int | None = None


MEGATRON_LAYER = "decoder.layers.{}."
HF_LAYER = "model.layers.{}."
OUTPUT_LAYER = "output_layer.weight"

EMBEDDING = (Rule("embedding.word_embeddings.weight", VOCAB, (to("model.embed_tokens.weight", "vocab", "hidden"),)),)
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
MLP = (
    Rule(
        "mlp.linear_fc1.layer_norm_weight",
        REPLICATED,
        (to("post_attention_layernorm.weight", "hidden"),),
        local="pre_mlp_layernorm.weight",
    ),
    Rule(
        "mlp.linear_fc1.weight",
        GATE_UP,
        (to("mlp.gate_proj.weight", "ffn", "hidden"), to("mlp.up_proj.weight", "ffn", "hidden")),
    ),
    Rule("mlp.linear_fc2.weight", ROW, (to("mlp.down_proj.weight", "hidden", "ffn"),)),
)
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


FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        ATTENTION + qkv_bias("attention_bias") + PROJ_BIAS + MLP + MLP_BIAS,
        EMBEDDING,
        HEAD,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), ATTENTION + qkv_bias() + MLP, EMBEDDING, HEAD),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        ATTENTION + qkv_bias("attention_bias") + PROJ_BIAS + QK_NORM + MLP,
        EMBEDDING,
        HEAD,
        head_dim=128,
    ),
)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The table for a model: by `architectures` where the config has them, else by `model_type`."""
    model_type = hf_config.get("model_type")
    architectures = hf_config.get("architectures") or ()
    for family in FAMILIES:
        if architectures and set(architectures) <= set(family.architectures):
            return family
        if not architectures and model_type == family.model_type:
            return family
    known = ", ".join(f"{f.model_type} ({', '.join(f.architectures)})" for f in FAMILIES)
    raise UnsupportedModelError(
        f"no Megatron table for model_type {model_type!r}, architectures {list(architectures)}; "
        f"known: {known}. To add one, add a Family to FAMILIES in fp8bridge/adapters/megatron_names.py"
    )


def dims_of(hf_config: Mapping[str, Any], family: Family) -> ModelDims:
    """The sizes an HF config gives; ConfigError names the field that is missing or does not fit."""

    def size(field: str, default: int | None = None) -> int:
        value = hf_config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"hf_config: {field} is {value!r}; a positive integer is needed")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    dims = ModelDims(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        ffn=size("intermediate_size"),
        heads=heads,
        groups=size("num_key_value_heads", heads),
        head_dim=size("head_dim", family.head_dim or hidden // heads),
        vocab=size("vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings")),
        attention_bias=bool(hf_config.get("attention_bias")),
        mlp_bias=bool(hf_config.get("mlp_bias")),
    )
    if heads % dims.groups:
        raise ConfigError(
            f"hf_config: num_attention_heads {heads} is no multiple of num_key_value_heads {dims.groups}"
        )
    return dims
