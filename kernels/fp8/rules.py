"""The rounding rules: how a block's largest magnitude becomes its scale, vectorised in torch.

All arithmetic is IEEE fp32 with round-to-nearest. `amax` is the largest |x| over the *valid* elements
of a block (NaN elements are left out), FP8 is e4m3fn with largest finite value 448, codes saturate to
+-448 and round to nearest even, and dequantization is `code * scale_inv` under every rule.

| rule      | scale_inv                          | code                  | whose arithmetic                        |
|-----------|------------------------------------|-----------------------|-----------------------------------------|
| `sglang`  | s = max(amax, 1e-10) / 448         | e4m3(x / s)           | SGLang, DeepSeek-V3 block quantization  |
| `te`      | 1 / m, m = 448 / amax              | e4m3(x * m)           | Transformer Engine, fp32 block scales   |
| `te_pow2` | 1 / m, m = 2^floor(log2(448/amax)) | e4m3(x * m)           | Transformer Engine's default            |
| `ue8m0`   | s = 2^ceil(log2(max(amax,1e-4)/448)) | e4m3(x * (1 / s))   | DeepGEMM, SGLang with `scale_fmt=ue8m0` |

`te` and `te_pow2` follow quantize_transpose_square_blockwise.cu and recipe_common.cuh of Transformer
Engine 2.20: an all-zero block has m = 1, and where 448 / amax overflows, m is the largest finite value
of the *source* dtype. Powers of two come from exponent bits, never from log2 or exp2.

A block with an infinite amax has scale 1 under every rule (Transformer Engine's choice, taken for all),
and a NaN becomes the code 0x7F whatever its sign. Both set the tensor's flag, so a caller that honours
the flag never sends them; the bytes are defined only so that every implementation can be compared.
"""

from __future__ import annotations

import torch

RULES = ("sglang", "te", "te_pow2", "ue8m0")
FP8_MAX = 448.0
AMAX_FLOOR = {"sglang": 1e-10, "ue8m0": 1e-4}
"""Smallest amax a rule computes with; the `te` rules have none."""

WHOLE = (0, 0)
"""As a block size: one scale for the whole tensor."""
BLOCKS = ((128, 128), (1, 128), WHOLE)

QUANTIZABLE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def block_scales(amax: torch.Tensor, rule: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of any number of blocks.

    Args:
        amax: fp32, any shape, NaN-free.
        rule: one of `RULES`.
        dtype: the source's dtype; `te` and `te_pow2` depend on it where 448 / amax overflows.

    Returns:
        (factor, scale_inv), fp32, shaped like amax. `factor` is what elements are divided by under
        `sglang` and multiplied with under the other rules.
    """
    # full_like: torch turns `448 / tensor` into a reciprocal, and on CUDA `tensor / 448` as well.
    if rule in ("te", "te_pow2"):
        factor = torch.full_like(amax, FP8_MAX) / amax
        factor = torch.where(torch.isinf(factor), torch.finfo(dtype).max, factor)
        if rule == "te_pow2":
            factor = (factor.view(torch.int32) & ~_MANTISSA_BITS).view(torch.float32)
        factor = torch.where((amax == 0) | torch.isinf(amax), 1.0, factor)
        return factor, 1.0 / factor
    scale = torch.clamp(amax, min=AMAX_FLOOR[rule]) / torch.full_like(amax, FP8_MAX)
    if rule == "ue8m0":
        scale = ((scale.view(torch.int32) + _MANTISSA_BITS) & _EXPONENT_BITS).view(torch.float32)
    scale = torch.where(torch.isinf(amax), 1.0, scale)
    return (scale if rule == "sglang" else 1.0 / scale), scale


def grid_shape(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a [rows, cols] matrix; (0, 0) when it is empty."""
    if rows == 0 or cols == 0:
        return (0, 0)
    block_m, block_k = resolve_block(rows, cols, block)
    return -(-rows // block_m), -(-cols // block_k)


def resolve_block(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    return (rows, cols) if block == WHOLE else block
