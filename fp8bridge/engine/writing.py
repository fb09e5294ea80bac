"""Writing into a live Megatron model: its parameters, Transformer Engine's buffers, tied copies, masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8bridge.errors import ConfigError

_HOOKS = ("get_high_precision_init_val", "clear_high_precision_init_val")


def live_tensors(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Parameters and buffers by the adapter's keys: "{chunk}:{name without the wrappers' `module.`}"."""
    found = {}
    for index, chunk in enumerate(chunks):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            while name.startswith("module."):
                name = name.removeprefix("module.")
            found[f"{index}:{name}"] = tensor
    return found


def plain_matrix(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The live tensor as the matrix that the adapter describes, to write into; its dtype becomes `dtype`
    (Megatron moves expert biases to fp32 itself, but in the first forward only)."""
    wanted = getattr(torch, dtype)
    if tensor.dtype != wanted:
        tensor.data = tensor.data.to(wanted)
    matrix = tensor.detach()
    return matrix.unsqueeze(1) if matrix.dim() == 1 else matrix


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


def share_embeddings(chunks: Sequence[nn.Module]) -> None:
    """Give the last pipeline stage its copy of the embeddings (for a tied head or multi-token prediction),
    which is no tensor of its own in the files. Collective over the stages that have one."""
    for weight in (p for chunk in chunks for p in chunk.parameters() if getattr(p, "shared_embedding", False)):
        from megatron.core import parallel_state as ps

        group = ps.get_embedding_group()
        torch.distributed.broadcast(weight.data, src=torch.distributed.get_global_rank(group, 0), group=group)


def reload_masters(optimizer: Any) -> None:
    """Masters from the loaded weights; ConfigError where Megatron cannot."""
    if optimizer is None:
        return
    for each in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        states = getattr(getattr(each, "optimizer", None), "state", {})
        if any("master_param" in state for state in states.values()):
            raise ConfigError(
                "the optimizer has stepped, and holds FP16 masters where Megatron cannot reload them; load before the "
                "first step"
            )
    optimizer.reload_model_params()
