"""Which Hugging Face tensors a Megatron-Core parameter holds: one table row (`Rule`) per parameter.

Data only: the words of the tables, and the sizes they refer to. The tables themselves are in
`megatron_families`; `megatron_layout` turns rows into rectangles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Split:
    """How the TP ranks share a parameter.

    axis: the one that is cut into equal slices (0 rows, 1 columns), None if every rank holds all.
    whole: some module classes keep it whole on every rank instead; the parameter's shape tells.
    parts: the number of interleaved parts: "one", "groups" (query groups) or "tp" (TP size).
    padded: the trainer rounds the rows up (vocabulary); the rows past the tensor's end are garbage.
    """

    axis: int | None
    parts: str = "one"
    padded: bool = False
    whole: bool = False


REPLICATED = Split(None)
COLUMN = Split(0)
ROW = Split(1)
VOCAB = Split(0, padded=True)
QKV = Split(0, parts="groups")
GATE_UP = Split(0, parts="tp")
COLUMN_OR_WHOLE = Split(0, whole=True)


@dataclass(frozen=True, slots=True)
class Target:
    """An HF tensor: its name and its shape, as names of `ModelDims` members. `half`: which half of its
    rows this is (0 or 1), where HF too keeps two matrices as one; None: all of it."""

    name: str
    shape: tuple[str, ...]
    half: int | None = None


def to(name: str, *shape: str, half: int | None = None) -> Target:
    return Target(name, shape, half)


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter (or buffer). `param` is its name in the Transformer Engine spec, `local` in the local
    spec where that differs; `when` names the `ModelDims` flag without which the model has none of it.
    expert: there is one for each expert on the rank; `{}` in the names is the expert's number, local in
    Megatron's and of the whole model in the Hugging Face name. dtype: kept as it is, not the model's."""

    param: str
    split: Split
    targets: tuple[Target, ...]
    local: str = ""
    when: str = ""
    expert: bool = False
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The sizes of a model, from its HF config; `Target.shape` and `Rule.when` name members."""

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
    qk_norm: bool = False
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    sparse: frozenset[int] = frozenset()
    """Layers with experts, by number in the model."""
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_dim: int = 0
    mtp_layers: int = 0

    one = 1

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.groups * self.head_dim

    @property
    def untied(self) -> bool:
        return not self.tied

    @property
    def shared(self) -> bool:
        return self.shared_ffn > 0

    @property
    def compressed_q(self) -> bool:
        return self.q_lora > 0

    @property
    def plain_q(self) -> bool:
        return self.q_lora == 0

    @property
    def mla_q(self) -> int:
        return self.heads * (self.qk_nope + self.qk_rope)

    @property
    def mla_kv(self) -> int:
        return self.heads * (self.qk_nope + self.v_dim)

    @property
    def mla_o(self) -> int:
        return self.heads * self.v_dim

    @property
    def kv_a(self) -> int:
        return self.kv_lora + self.qk_rope

    @property
    def two_ffn(self) -> int:
        return 2 * self.ffn

    @property
    def two_hidden(self) -> int:
        return 2 * self.hidden


@dataclass(frozen=True, slots=True)
class Family:
    """A table. `layer`, `dense` and `moe` rules are relative to the layer (those of every layer, of its
    MLP without and with experts); `first` and `last` belong to those stages; `mtp` to a layer that
    predicts further tokens, around the rules of its inner layer.

    head_dim: what the HF class takes when the config names none (None: hidden / heads).
    fields: ModelDims member -> the config's field, where that is not the usual one.
    """

    model_type: str
    architectures: tuple[str, ...]
    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    moe: tuple[Rule, ...] = ()
    first: tuple[Rule, ...] = ()
    last: tuple[Rule, ...] = ()
    mtp: tuple[Rule, ...] = ()
    head_dim: int | None = None
    fields: tuple[tuple[str, str], ...] = ()
    other_types: tuple[str, ...] = ()
    """Further `model_type`s of the same layout."""


MEGATRON_LAYER = "decoder.layers.{}."
MEGATRON_MTP = "mtp.layers.{}."
HF_LAYER = "model.layers.{}."
OUTPUT_LAYER = "output_layer.weight"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def dims_of(hf_config: Mapping[str, Any], family: Family) -> ModelDims:
    """The sizes an HF config gives; ConfigError names the field that is missing or does not fit."""
    fields = dict(family.fields)

    def size(member: str, field: str, default: int | None = None, least: int = 1) -> int:
        field = fields.get(member, field)
        value = hf_config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"hf_config: {field} is {value!r}; an integer of at least {least} is needed")
        return value

    hidden, heads = size("hidden", "hidden_size"), size("heads", "num_attention_heads")
    layers = size("layers", "num_hidden_layers")
    dims = ModelDims(
        layers=layers,
        hidden=hidden,
        ffn=size("ffn", "intermediate_size"),
        heads=heads,
        groups=size("groups", "num_key_value_heads", heads),
        head_dim=size("head_dim", "head_dim", family.head_dim or hidden // heads),
        vocab=size("vocab", "vocab_size"),
        tied=bool(hf_config.get("tie_word_embeddings")),
        attention_bias=bool(hf_config.get("attention_bias")),
        mlp_bias=bool(hf_config.get("mlp_bias")),
        qk_norm=bool(hf_config.get("use_qk_norm")),
        **(_moe_sizes(hf_config, size, layers) if family.moe else {}),
        **(_mla_sizes(size) if any("kv_lora" in t.shape for r in family.layer for t in r.targets) else {}),
    )
    if heads % dims.groups:
        raise ConfigError(
            f"hf_config: num_attention_heads {heads} is no multiple of num_key_value_heads {dims.groups}"
        )
    return dims


def _moe_sizes(hf_config: Mapping[str, Any], size: Callable[..., int], layers: int) -> dict[str, Any]:
    """Experts, and which layers have them, by any of the ways configs say that."""
    if hf_config.get("moe_layer_freq") not in (None, 1):
        raise ConfigError(f"hf_config: moe_layer_freq is {hf_config['moe_layer_freq']}; only 1 is known")
    moe_ffn = size("moe_ffn", "moe_intermediate_size")
    shared = size("shared_ffn", "shared_expert_intermediate_size", 0, 0)
    shared = shared or moe_ffn * size("shared_experts", "n_shared_experts", 0, 0)
    mtp = size("mtp_layers", "num_nextn_predict_layers", 0, 0)
    # Where this field exists, classes have different defaults for it.
    dense_first = size("", "first_k_dense_replace", None if "n_routed_experts" in hf_config else 0, 0)
    dense = {*(hf_config.get("mlp_only_layers") or ()), *range(dense_first)}
    step = size("", "decoder_sparse_step", 1)
    sparse = {i for i in range(layers) if i not in dense and (i + 1) % step == 0}
    return {
        "experts": size("experts", "num_experts"),
        "moe_ffn": moe_ffn,
        "shared_ffn": shared,
        "sparse": frozenset(sparse | set(range(layers, layers + mtp))),
        "mtp_layers": mtp,
    }


def _mla_sizes(size: Callable[..., int]) -> dict[str, Any]:
    return {
        "q_lora": size("", "q_lora_rank", 0, 0),
        "kv_lora": size("", "kv_lora_rank"),
        "qk_nope": size("", "qk_nope_head_dim"),
        "qk_rope": size("", "qk_rope_head_dim"),
        "v_dim": size("", "v_head_dim"),
    }
