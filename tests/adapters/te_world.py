"""Real Megatron models with real Transformer Engine FP8 parameters, four gloo processes, one server.

`run` is one rank; rank 0 saves what each scenario's server ended up with, beside the trainer's own bytes.
"""

import datetime

import torch
import torch.distributed as dist

import fp8bridge
from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.demo.megatron_cpu import use_cpu
from tests.adapters import te_stub
from tests.adapters.moe_models import DEEPSEEK, transformer_config
from tests.support import FP8_LAYOUT, ZmqThreadServer

WORLD = 4
ALIGNED = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
HEADS_OF_64 = ALIGNED | {"head_dim": 64}
RAGGED = ALIGNED | {"hidden_size": 192, "intermediate_size": 640}
"""hidden 192: every matrix ends inside a block, which is fine; ffn 640 / tp 2 = 320 is not."""
MOE = DEEPSEEK | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 300,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
}
"""kv_a has 128 + 64 rows: whole on every rank, its last block is half full."""
SCENARIOS = {
    # name: (hf_config, tp, pp, TransformerConfig overrides)
    "aligned_tp2_pp2": (ALIGNED, 2, 2, {}),
    "heads_of_64_tp2": (HEADS_OF_64, 2, 1, {}),
    "ragged_tp2": (RAGGED, 2, 1, {}),
    "ragged_tp1_pp2": (RAGGED, 1, 2, {}),
    "first_last_bf16_pp2": (ALIGNED | {"num_hidden_layers": 4}, 1, 2, {"first_last_layers_bf16": True}),
}


def run(rank, port, path):
    torch.set_num_threads(1)
    te_stub.install()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    use_cpu()
    found = {name: scenario(*args) for name, args in SCENARIOS.items()}
    found["experts"] = expert_scenario()
    found["columnwise only"] = scenario(ALIGNED, 2, 2, {}, columnwise_only=True)
    found["refused"] = refusals(rank)
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


def scenario(hf_config, tp, pp, overrides, columnwise_only=False):
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(tp, pp)
    model = build(hf_config, tp, pp, overrides)
    if columnwise_only:
        drop_rowwise(model)
    source = MegatronSource(model, hf_config)
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(source, [server], bucket_nbytes=400_000, collective_timeout_s=60) as bridge:
        bridge.update_weights(version=1)
        bridge.verify()
        summary = bridge.plan.summary()
    parts = [None] * WORLD
    dist.all_gather_object(parts, raw_parts(model))
    ps.destroy_model_parallel()
    return {"summary": summary, "server": {n: t.clone() for n, t in server.tensors.items()}, "ranks": parts}


def expert_scenario():
    """MLA, grouped experts (each with FP8 codes of its own), a shared expert and expert biases; TP2 x EP2."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    ps.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True, "moe_grouped_gemm": True}
    sizes = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    config = transformer_config(MOE, mtp=False, dtype=torch.bfloat16, **sizes, **fp8)
    torch.manual_seed(1234 + ps.get_expert_model_parallel_rank())
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=512,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    with torch.no_grad():
        # Dense weights are drawn alike on the ranks that share them; only experts follow the seed.
        for name, param in model.named_parameters():
            if ".experts." not in name:
                torch.manual_seed(len(name) + (ps.get_tensor_model_parallel_rank() if cut(param) else 7))
                param.copy_(torch.randn(param.shape, dtype=torch.bfloat16) * 0.05)
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(MegatronSource(model, MOE), [server], bucket_nbytes=400_000) as bridge:
        bridge.update_weights(version=1)
        bridge.verify()
        summary = bridge.plan.summary()
    parts = [None] * WORLD
    dist.all_gather_object(parts, raw_parts(model) | {"ep_rank": ps.get_expert_model_parallel_rank()})
    ps.destroy_model_parallel()
    return {"summary": summary, "server": {n: t.clone() for n, t in server.tensors.items()}, "ranks": parts}


def cut(param):
    return getattr(param, "tensor_model_parallel", False)


def build(hf_config, tp, pp, overrides):
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        ffn_hidden_size=hf_config["intermediate_size"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **{"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True} | overrides,
    )
    torch.manual_seed(1234 + ps.get_pipeline_model_parallel_rank())
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True),
        vocab_size=512,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
    )


def raw_parts(model):
    """Layer number in the model and name -> this rank's own bytes, as Transformer Engine keeps them."""
    from megatron.core import parallel_state as ps

    numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)}
    found = {"tp_rank": ps.get_tensor_model_parallel_rank()}
    for name, param in model.named_parameters():
        pieces = name.split(".")
        if pieces[1] == "layers":
            pieces[2] = numbers[pieces[2]]
        key = ".".join(pieces)
        if hasattr(param, "_rowwise_data"):
            codes, scales = param._rowwise_data, param._rowwise_scale_inv
            if codes is None:
                codes, scales = param._columnwise_data.t(), param._columnwise_scale_inv.t()
            found[key] = (codes.clone(), scales.clone(), param.dequantize(dtype=torch.bfloat16).detach().clone())
        else:
            found[key] = param.detach().clone()
    return found


def drop_rowwise(model):
    """What Megatron's transpose cache settings can leave: only the transposed copy."""
    for param in model.parameters():
        if hasattr(param, "_rowwise_data"):
            codes, scales = param._rowwise_data, param._rowwise_scale_inv
            rows, cols = param.shape
            grid = (-(-rows // 128), -(-cols // 128))
            turned = torch.full((grid[1], -(-grid[0] // 4) * 4), float("nan"))
            turned[:, : grid[0]] = scales[: grid[0], : grid[1]].t()
            param._columnwise_data, param._columnwise_scale_inv = codes.t().contiguous(), turned
            param._rowwise_data = param._rowwise_scale_inv = None


def refusals(rank):
    """The words for FP8 parameters that cannot be sent as they are."""
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(1, 1)
    words = {}
    model = build(ALIGNED, 1, 1, {})
    weight = model.decoder.layers[1].mlp.linear_fc2.weight
    for name, attribute, value in (("1-D", "_is_2D_scaled", False), ("E5M2", "_fp8_dtype", 8)):
        kept = getattr(weight, attribute)
        setattr(weight, attribute, value)
        words[name] = refusal(model)
        setattr(weight, attribute, kept)
    weight._quantizer.force_pow_2_scales = False
    words["mixed recipes"] = refusal(model)
    ps.destroy_model_parallel()
    return words


def refusal(model):
    try:
        MegatronSource(model, ALIGNED).describe()
    except fp8bridge.BridgeError as err:
        return f"{type(err).__name__}: {err}"
    return "not refused"
