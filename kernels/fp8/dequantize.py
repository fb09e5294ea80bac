"""dequantize: codes times their block's scale."""

from __future__ import annotations

import torch

from fp8bridge.errors import ConfigError

from . import checks, cpu, rules


def dequantize(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """code * scale_inv in fp32, then one rounding to `dtype`; same device, fresh tensor [M, K].

    Args:
        codes: float8_e4m3fn [M, K], any strides.
        scale_inv: [ceil(M/bm), ceil(K/bk)] in any float dtype; widened to fp32 before the product.
        block: (bm, bk), or (0, 0) for one scale.

    Raises:
        ConfigError: codes that are not e4m3fn, or scales of another shape.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise ConfigError(
            f"dequantize takes a float8_e4m3fn matrix, not {codes.dtype} {list(codes.shape)}; "
            "view raw bytes with .view(torch.float8_e4m3fn)"
        )
    expected = rules.grid_shape(codes.shape[0], codes.shape[1], block)
    if tuple(scale_inv.shape) != expected:
        raise ConfigError(
            f"scales are {list(scale_inv.shape)}, but codes {list(codes.shape)} in blocks of {block} need "
            f"{list(expected)}: trim padded scales first"
        )
    if checks.uses_triton(codes.device):
        from . import dequantize_triton

        return dequantize_triton.launch(
            codes, scale_inv, rules.resolve_block(codes.shape[0], codes.shape[1], block), dtype
        )
    return cpu.dequantize(codes, scale_inv, block, dtype)
