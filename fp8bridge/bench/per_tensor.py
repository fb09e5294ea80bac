"""One quantize launch per tensor, as frameworks do it: two allocations and a launch, nothing prepared."""

from __future__ import annotations

import torch

from ..kernels import quantize


def quantize_one(weight: torch.Tensor, rule: str, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes e4m3fn, scale_inv fp32) of a matrix, with the bits of `kernels.quantize`."""
    if weight.device.type != "cuda" or block != (128, 128) or weight.dtype != torch.bfloat16:
        return quantize(weight, rule, block)
    from .per_tensor_triton import launch

    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale_inv = torch.empty(
        -(-weight.shape[0] // 128), -(-weight.shape[1] // 128), dtype=torch.float32, device=weight.device
    )
    launch(weight, codes, scale_inv, rule)
    return codes.view(torch.float8_e4m3fn), scale_inv
