"""Dense Megatron-Core GPT models on the CPU over gloo: the shims that takes, and a builder.

Megatron is written for CUDA. Dense models build, train and pipeline on the CPU once the few calls
that name CUDA land elsewhere; `use_cpu` redirects exactly those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fp8bridge.adapters.megatron_families import family_of
from fp8bridge.adapters.megatron_names import ModelDims, dims_of
from fp8bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

VOCAB_MULTIPLE = 128
"""Megatron's default `make_vocab_size_divisible_by`; the vocabulary is padded to this times TP."""


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Literal device="cuda" becomes the CPU: schedules, gradient clipping and optimizers use it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


_mode: Any = None


def use_cpu() -> None:
    """Let Megatron-Core run on the CPU, in this process and (for the last shim) this thread.

    Call once in every trainer process, before models are built and in the thread that trains. It
    changes torch globally, so call it in processes that are only that. A second call does nothing.
    """
    global _mode
    if _mode is not None:
        return
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    # Buffers of TP gathers and pipeline receives are made on "the current device".
    cuda.current_device = lambda: torch.device("cpu")
    # Tied embeddings call .cuda() before their first all-reduce.
    tensor.cuda = lambda self, *_args, **_kwargs: self
    # Pipeline receives wait for the device.
    cuda.synchronize = lambda *_args, **_kwargs: None
    # Gradient reduction looks the stream up, to wait for CUDA graphs, which there are none of.
    cuda.current_stream = lambda *_args, **_kwargs: None
    # Optimizers tell parameters apart by the string of their type, and know CUDA's only.
    type_of = tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        # Under the function mode below the call passes here twice.
        rename = isinstance(answer, str) and not answer.startswith("torch.cuda.")
        return answer.replace("torch.", "torch.cuda.", 1) if rename else answer

    tensor.type = cuda_type
    # Attention dropout (0 here) forks the CUDA random state.
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *_args, **_kwargs: contextlib.nullcontext()
    _mode = _CudaMeansCpu()
    _mode.__enter__()


def build_model(hf_config: Mapping[str, Any], *, dtype: torch.dtype) -> list[GPTModel]:
    """This rank's chunks (one per virtual pipeline stage) of the model an HF config describes.

    Needs an initialized `parallel_state`. Weights are drawn from torch's default CPU generator. The
    arithmetic is that of the transformers model: same rope base, epsilons and head size, no dropout.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dims = dims_of(hf_config, family_of(hf_config))
    tp, pp = ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()
    stage, vpp = ps.get_pipeline_model_parallel_rank(), ps.get_virtual_pipeline_model_parallel_world_size()
    config = _transformer_config(hf_config, dims, dtype, tp=tp, pp=pp, vpp=vpp)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    step = VOCAB_MULTIPLE * tp
    chunks = []
    for chunk in range(vpp or 1):
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-dims.vocab // step) * step,
            max_sequence_length=int(hf_config.get("max_position_embeddings", 2048)),
            pre_process=stage == chunk == 0,
            post_process=stage == pp - 1 and chunk == (vpp or 1) - 1,
            share_embeddings_and_output_weights=dims.tied,
            position_embedding_type="rope",
            rotary_base=_rope_theta(hf_config),
            vp_stage=chunk if vpp else None,
        )
        # Torch norms are made in fp32 whatever params_dtype says.
        chunks.append(model.to(dtype))
    return chunks


def _transformer_config(
    hf_config: Mapping[str, Any], dims: ModelDims, dtype: torch.dtype, *, tp: int, pp: int, vpp: int | None
) -> TransformerConfig:
    from megatron.core.transformer import TransformerConfig

    if hf_config.get("hidden_act", "silu") != "silu" or dims.mlp_bias:
        raise ConfigError("the demo builds models with silu and without MLP biases; change hf_config")
    model_type = family_of(hf_config).model_type
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_dim,
        qk_layernorm=model_type == "qwen3",
        add_qkv_bias=model_type == "qwen2",
        normalization="RMSNorm",
        layernorm_epsilon=float(hf_config.get("rms_norm_eps", 1e-6)),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # With two interleaved stages both neighbours are the same rank: batched p2p mixes them up.
        batch_p2p_comm=vpp is None,
        overlap_p2p_comm=vpp is not None,
        # What follows is what the CPU needs: no CUDA kernels, parameters made on the CPU.
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """The rope base, from `rope_parameters` (transformers 5) or `rope_theta`; no scaled rope."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"the demo builds models with plain rope, not {kind!r}; change hf_config")
    return float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)
