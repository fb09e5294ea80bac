"""Writing into a live Megatron model: its parameters, Transformer Engine's buffers, tied copies, masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8bridge.errors import ConfigError

_HOOKS = ("get_high_precision_init_val", "clear_high_precision_init_val")


def live_parameters(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """By the adapter's keys: "{chunk}:{name without the wrappers' `module.`}"."""
    found = {}
    for index, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            found[f"{index}:{name}"] = param
    return found


def write_fp8(param: Any, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes e4m3fn [N, K] and scales fp32 [ceil(N/128), ceil(K/128)] into every buffer the parameter has.

    In place: a data-parallel wrapper's bucket may own the memory. Padding columns of scales become 1.
    """
    raw = codes.view(torch.uint8)
    for kind, data, scale in (("_rowwise", raw, scales), ("_columnwise", raw.t(), scales.t())):
        held = getattr(param, f"{kind}_data")
        if held is None:
            continue
        held.copy_(data)
        padded = getattr(param, f"{kind}_scale_inv")
        padded.fill_(1.0)
        padded[: scale.shape[0], : scale.shape[1]].copy_(scale)


def settle_init_value(param: Any, loaded: torch.Tensor | None) -> None:
    """Transformer Engine keeps each FP8 parameter's value of before its quantization, on the CPU, for the
    optimizer's masters. It is now of another model: put `loaded` there, or remove it, and the masters
    start from the FP8 weights. (A parameter without one never had it, or an optimizer took it.)"""
    if not hasattr(param, _HOOKS[0]):
        return
    param.clear_high_precision_init_val()
    if loaded is not None:
        param._high_precision_init_val = loaded.cpu()
        return
    for hook in _HOOKS:
        delattr(param, hook)  # Megatron takes its presence for a value


def share_embeddings(chunks: Sequence[Any]) -> None:
    """Give the last pipeline stage its copy of tied embeddings, which is no tensor of its own in the files.

    Collective over the first and last stage."""
    from megatron.core import parallel_state as ps

    if not ps.is_initialized() or ps.get_pipeline_model_parallel_world_size() == 1:
        return
    for chunk in map(_inside, chunks):
        if chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process):
            weight = chunk.shared_embedding_or_output_weight().data
            group = ps.get_embedding_group()
            torch.distributed.broadcast(weight, src=torch.distributed.get_global_rank(group, 0), group=group)


def reload_masters(optimizer: Any) -> None:
    """Masters from the loaded weights; ConfigError where Megatron cannot."""
    if optimizer is None:
        return
    for each in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        states = getattr(getattr(each, "optimizer", None), "state", {})
        if any("master_param" in state for state in states.values()):
            raise ConfigError(
                "the optimizer has stepped, and holds its masters itself (precision-aware, FP16), where Megatron cannot "
                "reload them; load the weights before the first step"
            )
    optimizer.reload_model_params()


def _inside(chunk: Any) -> Any:
    while not hasattr(chunk, "pre_process") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
