"""A real trainer, small enough for a CPU: Megatron-Core with its optimizer and pipeline schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.errors import ConfigError

from .megatron_cpu import build_model, use_cpu

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    Batch = tuple[torch.Tensor, torch.Tensor]
    Weights = Callable[[str], torch.Tensor]

TINY_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""No size is a multiple of 128, so every matrix has ragged quantization blocks."""

SEQ_LENGTH = 32
MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 4


class DemoTrainer:
    """One per rank of a TP x PP (x VPP) world; the ranks left over are data parallel.

    Needs torch.distributed over gloo; sets up Megatron's `parallel_state` (one trainer at a time in a
    process) and the CPU shims. `step` and `logprobs` are collective: every rank calls them, with the
    same arguments. Everything follows from `seed`.

    chunks: the wrapped model chunks. source: their MegatronSource. hf_config: the model's config.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any] = TINY_QWEN3,
        *,
        tp: int = 2,
        pp: int = 2,
        vpp: int = 1,
        seed: int = 1234,
        lr: float = 3e-3,
        overlap_param_gather: bool = False,
    ) -> None:
        from megatron.core import parallel_state as ps

        world = dist.get_world_size()
        if world % (tp * pp):
            raise ConfigError(f"{world} trainer ranks cannot hold tp {tp} x pp {pp}; start a multiple of it")
        # Megatron-Core recommends its HybridModel at every construction.
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        use_cpu()
        ps.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
        self.hf_config = dict(hf_config)
        # The interleaved schedule wants a multiple of the pipeline size.
        self._micro_batches = -(-MICRO_BATCHES // pp) * pp
        # TP ranks draw the same whole weights and keep their slice; stages must differ.
        torch.manual_seed(seed + 100 * ps.get_pipeline_model_parallel_rank())
        self.chunks, self._optimizer = _wrap(build_model(hf_config, dtype=torch.bfloat16), lr, overlap_param_gather)
        self.source = MegatronSource(self.chunks, hf_config)
        self._data = torch.Generator().manual_seed(seed + 1 + ps.get_data_parallel_rank())
        self._twin: list[GPTModel] | None = None

    def step(self) -> float:
        """One optimizer step on fresh data; the mean loss, the same on every rank."""
        from megatron.core import parallel_state as ps

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        batches = [self._batch() for _ in range(self._micro_batches)]
        losses = _schedule(self.chunks, batches, _next_token_loss, forward_only=False)
        self._optimizer.step()
        loss = _from_last_stage(torch.stack(losses).mean() if losses else torch.zeros(()))
        dist.all_reduce(loss, group=ps.get_data_parallel_group())
        return float(loss / ps.get_data_parallel_world_size())

    def logprobs(self, tokens: list[int], weights: Weights | None = None) -> list[float]:
        """log p(tokens[i + 1] | tokens[: i + 1]) for every i, in fp32, the same on every rank.

        weights: gives the whole HF tensor of a name, such as the dequantized one; None takes the
        trainer's own. The model is an fp32 Megatron twin in the trainer's layout, not transformers'.
        """
        if self._twin is None:
            self._twin = build_model(self.hf_config, dtype=torch.float32)
        if weights is None:
            self.source.before_read()
            _copy_parameters(self.chunks, self._twin)
        else:
            load_hf_tensors(self._twin, self.hf_config, weights)
        ids = torch.tensor(tokens)
        predicted = logits(self._twin, ids, int(self.hf_config["vocab_size"]))[:-1].log_softmax(-1)
        found: list[float] = predicted.gather(-1, ids[1:, None])[:, 0].tolist()
        return found

    def close(self) -> None:
        """Take down Megatron's process groups; torch.distributed stays the caller's."""
        from megatron.core import parallel_state as ps

        ps.destroy_model_parallel()

    def _batch(self) -> Batch:
        """Arithmetic progressions (start and stride from the data seed), wrapped at 64: most of the
        vocabulary never occurs, which is the first thing to learn, and quickly."""
        period = min(64, int(self.hf_config["vocab_size"]))
        shape = (MICRO_BATCH_SIZE, 1)
        start = torch.randint(0, period, shape, generator=self._data)
        stride = torch.randint(1, 4, shape, generator=self._data)
        line = (start + stride * torch.arange(SEQ_LENGTH + 1)) % period
        return line[:, :-1], line[:, 1:]


def load_hf_tensors(chunks: list[GPTModel], hf_config: Mapping[str, Any], weights: Weights) -> None:
    """Fill bare chunks from whole HF tensors: the source's rectangles, read backwards.

    Every rank calls it; `weights` is called once for each tensor that this rank holds a part of.
    """
    source = MegatronSource(chunks, hf_config)
    metas, shards = source.describe()
    places: dict[str, list[Any]] = {meta.name: [] for meta in metas}
    for shard in shards:
        places[shard.tensor].append(shard)
    for meta in metas:
        whole = weights(meta.name).reshape(meta.matrix)
        for shard in places[meta.name]:
            target = source.read(shard.param)[shard.src_row :, shard.src_col :]
            part = whole[shard.dst_row :, shard.dst_col :][: shard.rows, : shard.cols]
            target[: shard.rows, : shard.cols].copy_(part)
    share_embeddings(chunks)


def logits(chunks: list[GPTModel], tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logits [tokens, vocab] of bare chunks for one sequence, on every rank; every rank calls it."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def collect(_: torch.Tensor, slices: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        # Columns past the vocabulary belong to its padding.
        whole: torch.Tensor = gather_from_tensor_model_parallel_region(slices)
        return whole[0, :, :vocab]

    # The interleaved schedule wants a multiple of the pipeline size; the copies are not read.
    copies = ps.get_pipeline_model_parallel_world_size() if len(chunks) > 1 else 1
    with torch.no_grad():
        found = _schedule(chunks, [(tokens[None], tokens[None])] * copies, collect)
    return _from_last_stage(found[0] if found else torch.zeros(len(tokens), vocab))


def share_embeddings(chunks: list[GPTModel]) -> None:
    """Give the last stage its copy of tied embeddings, which is no HF tensor of its own."""
    from megatron.core import parallel_state as ps

    stages = ps.get_pipeline_model_parallel_world_size()
    if stages == 1 or not chunks[0].share_embeddings_and_output_weights:
        return
    for chunk in chunks:
        if chunk.pre_process or chunk.post_process:
            weight = chunk.shared_embedding_or_output_weight().data
            group = ps.get_embedding_group()
            dist.broadcast(weight, src=dist.get_global_rank(group, 0), group=group)


def _copy_parameters(chunks: list[Any], twins: list[GPTModel]) -> None:
    for chunk, twin in zip(chunks, twins, strict=True):
        pairs = zip(chunk.parameters(), twin.parameters(), strict=True)
        for source, target in pairs:
            target.data.copy_(source.data)


def _wrap(models: list[GPTModel], lr: float, overlap: bool) -> tuple[list[Any], Any]:
    """As Megatron's own training does: Float16Module, DDP, distributed Adam with fp32 masters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads as finalize
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = models[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, Float16Module(config, model), disable_bucketing=i > 0)
        for i, model in enumerate(models)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize
    if overlap:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks, optimizer


def _schedule(
    chunks: list[Any], batches: list[Batch], loss: Callable[..., Any], *, forward_only: bool = True
) -> list[Any]:
    """Run the batches through the pipeline; what `loss` made of each, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows, length = batches[0][0].shape
    positions = torch.arange(length)[None]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, labels = next(data)
        wanted = None if forward_only else labels
        return model(tokens, positions, hidden, labels=wanted), partial(loss, labels)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _next_token_loss(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses.float().mean()
    return loss, loss.detach().clone()


def _from_last_stage(value: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state as ps

    value = value.detach().contiguous()
    dist.broadcast(value, src=ps.get_pipeline_model_parallel_last_rank(), group=ps.get_pipeline_model_parallel_group())
    return value
