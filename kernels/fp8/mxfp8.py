"""MXFP8 (OCP Microscaling): blocks of 1x32 along a row, one E8M0 scale byte each.

The arithmetic is Transformer Engine's (common/util/ptx.cuh, float_to_e8m0 and exp2f_rcp), the same on
every architecture it supports:

    v = amax * rn(1/448)                       # fp32; NaN elements are left out of amax
    e = biased exponent of v rounded *up* to a power of two; 0 for v <= 2^-127, 0xFE for Inf
    code = e4m3(x * 2^(127 - e));  for e = 0 the factor is 1, for e = 0xFE it is 0
    dequantized = code * 2^(e - 127);  e = 0xFF is NaN

Scales are compact [M, ceil(K/32)]: neither padded to 128x4 nor swizzled for a GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8bridge.errors import ConfigError

from . import checks, cpu, rules

BLOCK = 32


def quantize_mxfp8(weight_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] bf16, fp16 or fp32 -> (codes e4m3fn [M, K], scales uint8 E8M0 [M, ceil(K/32)]).

    The column stride must be 1; a short last block uses its valid elements only. NaN becomes 0x7F.

    Raises:
        ConfigError: another dtype, or not a matrix with contiguous rows.
    """
    if weight_MK.dim() != 2 or weight_MK.dtype not in rules.QUANTIZABLE.values():
        raise ConfigError(
            f"quantize_mxfp8 takes a bf16, fp16 or fp32 matrix, not {weight_MK.dtype} {list(weight_MK.shape)}"
        )
    if weight_MK.shape[1] > 1 and weight_MK.stride(1) != 1:
        raise ConfigError(f"column stride is {weight_MK.stride(1)}; a row must be contiguous: pass .contiguous()")
    if checks.uses_triton(weight_MK.device):
        from . import mxfp8_triton

        return mxfp8_triton.launch(weight_MK.detach())
    return _quantize_on_cpu(weight_MK.detach())


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """code * 2^(scale - 127) in fp32, then one rounding to `dtype`; any device."""
    expected = (codes.shape[0], -(-codes.shape[1] // BLOCK))
    if tuple(scales.shape) != expected or scales.dtype != torch.uint8:
        raise ConfigError(
            f"scales are {scales.dtype} {list(scales.shape)}; codes {list(codes.shape)} need uint8 {list(expected)}: "
            "slice off padding and undo any swizzle first"
        )
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
    bits = torch.where(exponent == 0xFF, 0x7FC00000, bits)
    factor = bits.view(torch.float32).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * factor).to(dtype)


def _quantize_on_cpu(weight_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = weight_MK.shape
    grid_k = -(-cols // BLOCK)
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(rows, grid_k, dtype=torch.uint8)
    step = max(1, cpu.CHUNK_ELEMENTS // max(cols, 1))
    for start in range(0, rows if cols else 0, step):
        chunk = weight_MK[start : start + step].to(torch.float32)
        blocks = F.pad(chunk, (0, grid_k * BLOCK - cols)).view(-1, grid_k, BLOCK)
        amax, nonfinite = cpu.finite_amax(blocks, (2,))
        exponent = _e8m0(amax)
        factor_bits = torch.where(exponent == 0, 127 << 23, (254 - exponent) << 23).to(torch.int32)
        scaled = (blocks * factor_bits.view(torch.float32)[..., None]).view(-1, grid_k * BLOCK)[:, :cols]
        cpu.encode(scaled, codes[start : start + step], nonfinite=nonfinite)
        scales[start : start + step] = exponent.to(torch.uint8)
    return codes.view(torch.float8_e4m3fn), scales


def _e8m0(amax: torch.Tensor) -> torch.Tensor:
    """Biased exponent (int32) of amax / 448, rounded up."""
    bits = (amax * torch.tensor(1 / 448, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x007FFFFF
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x00400000))
    return torch.clamp(exponent + rounds_up.to(torch.int32), max=0xFE)
