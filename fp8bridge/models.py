"""Well-known models by name: the sizes that their public Hugging Face configs state, and nothing else of them.

For planning and for benchmarks without a download. `config_of` gives what `hf_config` wants.
"""

from __future__ import annotations

from typing import Any

from .errors import ConfigError


def _config(kind: str, architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], "torch_dtype": "bfloat16"} | sizes


def _qwen3(hidden: int, layers: int, heads: int, kv: int, ffn: int, **more: Any) -> dict[str, Any]:
    moe = "num_experts" in more
    return _config(
        "qwen3_moe" if moe else "qwen3",
        "Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=151936,
        tie_word_embeddings=more.pop("tied", False),
        **more,
    )


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return _config(
        "llama",
        "LlamaForCausalLM",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=128256,
        tie_word_embeddings=False,
    )


def _deepseek(kind: str, heads: int, experts: int, dense: int, vocab: int, mtp: int) -> dict[str, Any]:
    return _config(
        kind,
        "DeepseekV3ForCausalLM",
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=heads,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=experts,
        n_shared_experts=1,
        first_k_dense_replace=dense,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=vocab,
        num_nextn_predict_layers=mtp,
        tie_word_embeddings=False,
    )


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-30B-A3B": _qwen3(2048, 48, 32, 4, 6144, num_experts=128, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _qwen3(4096, 94, 64, 4, 12288, num_experts=128, moe_intermediate_size=1536),
    "Llama-3.1-8B": _llama(4096, 32, 32, 14336),
    "Llama-3.1-70B": _llama(8192, 80, 64, 28672),
    "GLM-4.5": _config(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        hidden_size=5120,
        num_hidden_layers=92,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        n_shared_experts=1,
        first_k_dense_replace=3,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=1,
        vocab_size=151552,
        tie_word_embeddings=False,
    ),
    "DeepSeek-V3": _deepseek("deepseek_v3", heads=128, experts=256, dense=3, vocab=129280, mtp=1),
    "Kimi-K2": _deepseek("kimi_k2", heads=64, experts=384, dense=1, vocab=163840, mtp=0),
}


def config_of(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """A copy of the model's config, cut to its first `layers` layers if that is given.

    Names are compared without case. ConfigError lists the known ones, or says how many layers there are.
    """
    known = {each.lower(): config for each, config in MODELS.items()}
    if name.lower() not in known:
        raise ConfigError(f"no model {name!r} is known by name; known: {', '.join(MODELS)}. Give its config.json")
    config = dict(known[name.lower()])
    most = config["num_hidden_layers"]
    if layers is not None:
        if not 0 < layers <= most:
            raise ConfigError(f"{name} has {most} layers; {layers} cannot be taken of them")
        config["num_hidden_layers"] = layers
    return config
