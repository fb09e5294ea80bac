"""A real Megatron-Core trainer on one GPU with real Transformer Engine, in BF16 or by an FP8 engine config.

For the example and the benchmark; needs torch.distributed's place taken by nobody else in the process.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8bridge.adapters.hf_config import load_hf_config
from fp8bridge.engine import FP8EngineConfig, apply_to_megatron, set_environment

if TYPE_CHECKING:
    from fp8bridge.engine.checkpoint import Loaded

VOCAB_MULTIPLE = 128

SMALL_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@contextlib.contextmanager
def one_gpu(*, seed: int = 1234) -> Iterator[None]:
    """torch.distributed and Megatron's groups for a single rank on GPU 0, taken down afterwards."""
    set_environment(FP8EngineConfig())
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    ps.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        ps.destroy_model_parallel()
        dist.destroy_process_group()


class GpuTrainer:
    """A dense Qwen3-like model with DistributedDataParallel and the distributed Adam, inside `one_gpu`.

    engine: None trains in BF16. weights: a Hugging Face folder to start from, else a random start from
    `seed`. ddp: the wrapped model. loaded: what became of the files' tensors.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any] | str | Path,
        engine: FP8EngineConfig | None,
        *,
        lr: float = 1e-3,
        seed: int = 1234,
        weights: str | Path | None = None,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from fp8bridge.engine.checkpoint import load_checkpoint

        self.hf_config = load_hf_config(hf_config)
        torch.manual_seed(seed)
        config = _transformer_config(self.hf_config)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        optimizer_config = OptimizerConfig(
            optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )  # fmt: skip
        self.changes = []
        if engine is not None:
            self.changes = apply_to_megatron(engine, config, ddp_config, optimizer_config)
        self.model = _model(config, self.hf_config)
        self.ddp = DistributedDataParallel(config, ddp_config, self.model)
        self.loaded: Loaded | None = None
        if weights is not None:
            self.loaded = load_checkpoint(self.ddp, weights, hf_config=self.hf_config)
        self.nbytes_before_optimizer = torch.cuda.memory_allocated()
        self.optimizer: Any = get_megatron_optimizer(optimizer_config, [self.ddp])

    def step(self, tokens: torch.Tensor) -> float:
        """One optimizer step on [rows, length + 1] tokens; the mean loss before it."""
        loss = self.backward(tokens)
        self.optimizer.step()
        return loss

    def backward(self, tokens: torch.Tensor) -> float:
        """Gradients of the mean loss, in the parameters' `main_grad`."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward(tokens[:, :-1], tokens[:, 1:]).float().mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        return float(loss)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, length, vocabulary], fp32."""
        whole: torch.Tensor = self._forward(tokens, None)
        return whole[..., : int(self.hf_config["vocab_size"])].float()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of what `backward` left, by parameter name."""
        named: Any = self.model.named_parameters()
        return {name: param.main_grad.detach().float().clone() for name, param in named}

    def _forward(self, tokens: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        # Megatron's schedules do this: without it the layers would go on with the last step's FP8 weights.
        self.model.set_is_first_microbatch()
        rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)[None].expand(rows, -1)
        found: torch.Tensor = self.ddp(tokens, positions, None, labels=labels)
        return found


def arithmetic_batch(generator: torch.Generator, *, rows: int, length: int, vocab: int) -> torch.Tensor:
    """[rows, length + 1] tokens on the GPU: progressions modulo the vocabulary, start and stride drawn.

    A model that has understood predicts all but the second token of each: its loss is `arithmetic_floor`.
    """
    start = torch.randint(0, vocab, (rows, 1), generator=generator)
    stride = torch.randint(1, vocab // 8 + 1, (rows, 1), generator=generator)
    return ((start + stride * torch.arange(length + 1)) % vocab).cuda()


def arithmetic_floor(*, length: int, vocab: int) -> float:
    """The lowest mean loss: the stride, once a sequence."""
    return math.log(vocab // 8) / length


def _transformer_config(hf_config: Mapping[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        ffn_hidden_size=hf_config["intermediate_size"],
        layernorm_epsilon=hf_config["rms_norm_eps"],
        params_dtype=torch.bfloat16,
        bf16=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )


def _model(config: Any, hf_config: Mapping[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True),
        vocab_size=-(-hf_config["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        max_sequence_length=hf_config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(hf_config["rope_theta"]),
        share_embeddings_and_output_weights=False,
    ).cuda()
