"""Small models with experts, MLA and multi-token prediction: configs, a builder, one set of weights, an oracle.

Imported by the processes of `moe_worlds`: no pytest here.
"""

import functools
import zlib

import torch

from fp8bridge.demo.megatron_cpu import VOCAB_MULTIPLE

GARBAGE = 7.0
VOCAB = 503

_BASE = {
    "hidden_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_hidden_layers": 4,
    "intermediate_size": 208,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}
QWEN3_MOE = _BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
QWEN2_MOE = _BASE | {
    "model_type": "qwen2_moe",
    "head_dim": 40,  # the transformers class has no head_dim of its own
    "num_experts": 4,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 112,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
}
MIXTRAL = _BASE | {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 192}
GLM4_MOE = _BASE | {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK = _BASE | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 16,  # what transformers calls the rotary part
    "q_lora_rank": 96,
    "kv_lora_rank": 72,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
}
MOONLIGHT = DEEPSEEK | {"q_lora_rank": None, "num_nextn_predict_layers": 0}
GLM4 = _BASE | {
    "model_type": "glm4",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
}
WIDE = QWEN3_MOE | {
    "hidden_size": 896,
    "head_dim": 96,
    "num_hidden_layers": 2,
    "num_experts": 2,
    "moe_intermediate_size": 384,
    "intermediate_size": 768,
    "vocab_size": 32003,
    "tie_word_embeddings": True,
}
WIDE_MLA = DEEPSEEK | {
    "hidden_size": 896,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "intermediate_size": 384,
    "num_nextn_predict_layers": 0,
}
"""Sizes of real models that are no multiples of 128: hidden 896, 96-wide heads, kv_a 576, vocabulary 32,003."""
CONFIGS = {
    "wide": WIDE,
    "wide_mla": WIDE_MLA,
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE,
    "mixtral": MIXTRAL,
    "glm4_moe": GLM4_MOE,
    "deepseek_v3": DEEPSEEK,
    "moonlight": MOONLIGHT,
    "glm4": GLM4,
}


def sparse_layers(config):
    """1 for each layer with experts, as the class of each family decides it."""
    kind, count = config["model_type"], config["num_hidden_layers"]
    if kind == "mixtral":
        return [1] * count
    if kind.startswith("qwen"):
        only = config.get("mlp_only_layers", [])
        return [int(i not in only and (i + 1) % config["decoder_sparse_step"] == 0) for i in range(count)]
    return [int(i >= config["first_k_dense_replace"]) for i in range(count)] if kind != "glm4" else [0] * count


class SdpaCore(torch.nn.Module):
    """The local spec's attention core refuses MLA's head sizes; this one takes them."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **kwargs):
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)


def transformer_config(hf, *, mtp, dtype, **sizes):
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind, mla = hf["model_type"], "kv_lora_rank" in hf
    own = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": kind == "qwen3_moe" or bool(hf.get("q_lora_rank")) or hf.get("use_qk_norm", False),
        "add_qkv_bias": kind == "qwen2_moe" or (not mla and hf.get("attention_bias", False)),
        "mtp_num_layers": hf["num_nextn_predict_layers"] if mtp else None,
    }
    if any(sparse_layers(hf)):
        deepseek = "n_routed_experts" in hf
        own |= {
            "num_moe_experts": hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts"),
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
            "moe_layer_freq": sparse_layers(hf),
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_pre_softmax": kind == "qwen2_moe",
            "moe_router_score_function": "sigmoid" if deepseek else "softmax",
            "moe_router_enable_expert_bias": deepseek,
            "moe_router_topk_scaling_factor": hf["routed_scaling_factor"] if deepseek else None,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_shared_expert_gate": kind == "qwen2_moe",
            "moe_shared_expert_intermediate_size": shared_ffn(hf) or None,
        }
    if mla:
        own |= {
            "multi_latent_attention": True,
            "q_lora_rank": hf["q_lora_rank"],
            "kv_lora_rank": hf["kv_lora_rank"],
            "qk_head_dim": hf["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
            "v_head_dim": hf["v_head_dim"],
            "rope_type": "rope",
            "rotary_base": hf["rope_theta"],
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
        }
    else:
        own |= {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf["head_dim"]}
    cls = MLATransformerConfig if mla else TransformerConfig
    return cls(
        **own,
        **sizes,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def shared_ffn(hf):
    shared = hf.get("n_shared_experts", 0) * hf.get("moe_intermediate_size", 0)
    return hf.get("shared_expert_intermediate_size") or shared


def build(hf, *, mtp=False, dtype=torch.bfloat16, pg_collection=None, **overrides):
    """This rank's chunks under the current `parallel_state`, local spec."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    LocalSpecProvider.core_attention = lambda self: SdpaCore
    vpp = ps.get_virtual_pipeline_model_parallel_world_size()
    tp, pp = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    config = transformer_config(
        hf,
        mtp=mtp,
        dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ps.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=ps.get_expert_tensor_parallel_world_size(),
        context_parallel_size=ps.get_context_parallel_world_size(),
        **overrides,
    )
    chunks, stage = [], ps.get_pipeline_model_parallel_rank()
    for number in range(vpp or 1):
        vp_stage = number if vpp else None
        local = {"use_transformer_engine": False, "vp_stage": vp_stage}
        spec = get_gpt_decoder_block_spec(config, normalization="RMSNorm", **local)
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-hf["vocab_size"] // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=stage == number == 0,
            post_process=stage == pp - 1 and number == (vpp or 1) - 1,
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf["rope_theta"],
            rotary_percent=hf.get("partial_rotary_factor", 1.0),
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **local) if mtp else None,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        if hf["model_type"] == "glm4":
            add_sandwich_norms(model)
        if hf.get("q_lora_rank", 0) is None:
            add_kv_norm(model, hf["kv_lora_rank"])
        chunks.append(model.to(dtype))
        for router in (m for m in model.modules() if getattr(m, "expert_bias", None) is not None):
            router.expert_bias = router.expert_bias.float()
    return chunks


def add_sandwich_norms(model):
    """GLM4's norms after attention and MLP, which trainers add to Megatron's layer under HF's names."""
    for layer in model.decoder.layers:
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            layer.add_module(name, torch.nn.RMSNorm(model.config.hidden_size))


def add_kv_norm(model, rank):
    """megatron-core 0.19 has the norm of the compressed keys and values only together with one of queries."""
    for layer in model.decoder.layers:
        layer.self_attention.kv_layernorm = torch.nn.RMSNorm(rank, eps=model.config.layernorm_epsilon)


def weights(chunks, ep_rank=0, ep=1):
    """(name with the numbers of layers and experts in the model, parameter or expert bias)."""
    for chunk in chunks:
        numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
        buffers = [(n, b) for n, b in chunk.named_buffers() if n.endswith("expert_bias")]
        for name, tensor in (*chunk.named_parameters(), *buffers):
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = numbers[parts[2]]
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(int(parts[at]) + ep_rank * (chunk.config.num_moe_experts // ep))
            yield chunk, ".".join(parts), tensor


def draw(chunks, vocab, salt=""):
    """The same model whatever the layout, cut by Megatron's own initializer; padding and copies are garbage."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

    ep = (ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size())
    for chunk, name, param in weights(chunks, *ep):
        expert = ".experts." in name
        size = ps.get_expert_tensor_parallel_world_size() if expert else ps.get_tensor_model_parallel_world_size()
        rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
        torch.manual_seed(zlib.crc32((name + salt).encode()))
        matrix = param.data if param.dim() == 2 else param.data[:, None]
        init = functools.partial(torch.nn.init.normal_, std=0.1)
        if getattr(param, "tensor_model_parallel", False):
            shape, dim = list(matrix.shape), param.partition_dim
            mine, shape[dim] = shape[dim], shape[dim] * size
            _initialize_affine_weight_cpu(
                matrix, *shape, mine, dim, init, stride=param.partition_stride, params_dtype=matrix.dtype,
                rank=rank, world_size=size, skip_set_tensor_parallel_attributes=True,
            )  # fmt: skip
        else:
            matrix.copy_(init(torch.empty(matrix.shape)))
        if "word_embeddings" in name or "output_layer" in name:
            matrix[max(0, vocab - rank * len(matrix)) :] = GARBAGE
        if not chunk.pre_process and ("word_embeddings" in name or getattr(param, "shared_embedding", False)):
            matrix.fill_(GARBAGE)


def naive_export(hf, chunks):
    """The HF tensors of a one-process model, taken apart by hand, without the tables."""
    p = {name: tensor.detach() for _, name, tensor in weights(chunks)}
    out = {
        "model.embed_tokens.weight": p.pop("embedding.word_embeddings.weight")[: hf["vocab_size"]],
        "model.norm.weight": p.pop("decoder.final_layernorm.weight"),
    }
    if not hf["tie_word_embeddings"]:
        out["lm_head.weight"] = p.pop("output_layer.weight")[: hf["vocab_size"]]
    for layer in range(hf["num_hidden_layers"]):
        _layer(hf, p, f"decoder.layers.{layer}.", f"model.layers.{layer}.", out)
    for k in range(hf.get("num_nextn_predict_layers", 0)):
        if not any(name.startswith(f"mtp.layers.{k}.") for name in p):
            continue
        there = f"model.layers.{hf['num_hidden_layers'] + k}."
        for mine, theirs in (
            ("enorm",) * 2,
            ("hnorm",) * 2,
            ("eh_proj",) * 2,
            ("final_layernorm", "shared_head.norm"),
        ):
            out[f"{there}{theirs}.weight"] = p.pop(f"mtp.layers.{k}.{mine}.weight")
        _layer(hf, p, f"mtp.layers.{k}.mtp_model_layer.", there, out)
    assert not p, sorted(p)
    return {name: tensor.clone() for name, tensor in out.items()}


def _layer(hf, p, here, there, out):
    out[there + "input_layernorm.weight"] = p.pop(here + "input_layernorm.weight")
    out[there + "post_attention_layernorm.weight"] = p.pop(here + "pre_mlp_layernorm.weight")
    for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
        if here + name in p:
            out[there + name] = p.pop(here + name)
    attention, ours = here + "self_attention.", there + "self_attn."
    out[ours + "o_proj.weight"] = p.pop(attention + "linear_proj.weight")
    renamed = {
        "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj",
    }  # fmt: skip
    mla = "kv_lora_rank" in hf
    renamed |= (
        {"q_layernorm": "q_a_layernorm", "kv_layernorm": "kv_a_layernorm"}
        if mla
        else {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    )
    for mine, theirs in renamed.items():
        if f"{attention}{mine}.weight" in p:
            out[f"{ours}{theirs}.weight"] = p.pop(f"{attention}{mine}.weight")
    for kind in ("weight", "bias"):
        if (fused := p.pop(f"{attention}linear_qkv.{kind}", None)) is None:
            continue
        groups, heads, rest = hf["num_key_value_heads"], hf["num_attention_heads"], fused.shape[1:]
        grouped = fused.view(groups, heads // groups + 2, hf["head_dim"], *rest)
        for x, part in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
            out[f"{ours}{x}_proj.{kind}"] = part.reshape(-1, *rest)
    _mlp(hf, p, here + "mlp.", there, out)


def _mlp(hf, p, here, there, out):
    mixtral = hf["model_type"] == "mixtral"
    block = there + ("block_sparse_moe." if mixtral else "mlp.")
    if here + "linear_fc1.weight" in p:
        return _gated(p, here, block, out, fused=hf["model_type"] == "glm4")
    out[block + "gate.weight"] = p.pop(here + "router.weight")
    if here + "router.expert_bias" in p:
        out[block + "gate.e_score_correction_bias"] = p.pop(here + "router.expert_bias")
    expert = 0
    while f"{here}experts.local_experts.{expert}.linear_fc1.weight" in p:
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        _gated(p, f"{here}experts.local_experts.{expert}.", f"{block}experts.{expert}.", out, names=names)
        expert += 1
    if shared_ffn(hf):
        name = "shared_expert" if hf["model_type"] == "qwen2_moe" else "shared_experts"
        _gated(p, here + "shared_experts.", f"{block}{name}.", out)
    if here + "shared_experts.gate_weight" in p:
        out[block + "shared_expert_gate.weight"] = p.pop(here + "shared_experts.gate_weight")


def _gated(p, here, there, out, *, names=("gate_proj", "up_proj", "down_proj"), fused=False):
    both = p.pop(here + "linear_fc1.weight")
    if fused:
        out[there + "gate_up_proj.weight"] = both
    else:
        gate, up = both.chunk(2)
        out |= {f"{there}{names[0]}.weight": gate, f"{there}{names[1]}.weight": up}
    out[f"{there}{names[2]}.weight"] = p.pop(here + "linear_fc2.weight")
