"""quantize_mxfp8 on the GPU: one program per 32x128 elements, four blocks to a row."""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_rules import BF16, FP32, INTERPRET, to_e4m3, widen

WARPS = 4
_ROWS = tl.constexpr(32)
_COLS = tl.constexpr(128)
_BLOCKS = tl.constexpr(4)
_RECIPROCAL_448 = tl.constexpr(1 / 448)


def launch(weight_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See mxfp8.quantize_mxfp8."""
    rows, cols = weight_MK.shape
    grid_k = -(-cols // 32)
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=weight_MK.device)
    scales = torch.empty(rows, grid_k, dtype=torch.uint8, device=weight_MK.device)
    if codes.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(cols, 128))
        with torch.cuda.device_of(weight_MK):
            _mxfp8_kernel[grid](
                weight_MK, weight_MK.stride(0), codes, scales, rows, cols, grid_k,
                INTERPRET=INTERPRET, num_warps=WARPS,
            )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _mxfp8_kernel(
    weight_ptr, stride, codes_ptr, scales_ptr, rows, cols, grid_k, INTERPRET: tl.constexpr
):  # fmt: skip
    i_row = (tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)).to(tl.int64)
    i_col = (tl.program_id(1) * _COLS + tl.arange(0, _COLS)).to(tl.int64)
    i_block = tl.program_id(1) * _BLOCKS + tl.arange(0, _BLOCKS)
    inside = (i_row < rows)[:, None] & (i_col < cols)[None, :]
    x = tl.load(weight_ptr + i_row[:, None] * stride + i_col[None, :], mask=inside, other=0.0)
    x = widen(x, BF16 if x.dtype == tl.bfloat16 else FP32, INTERPRET)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(magnitude > 0x7F800000, 0, magnitude)  # a NaN does not count
    amax = tl.max(tl.reshape(magnitude, (_ROWS, _BLOCKS, 32)), axis=2).to(tl.float32, bitcast=True)
    bits = (amax * _RECIPROCAL_448).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    rounds_up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x00400000))
    exponent = tl.minimum(exponent + rounds_up.to(tl.int32), 0xFE)
    factor = tl.where(exponent == 0, 127 << 23, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (_ROWS, _BLOCKS, 32)), (_ROWS, _COLS))
    tl.store(codes_ptr + i_row[:, None] * cols + i_col[None, :], to_e4m3(x * factor, INTERPRET), mask=inside)
    in_grid = (i_row < rows)[:, None] & (i_block < grid_k)[None, :]
    tl.store(scales_ptr + i_row[:, None] * grid_k + i_block[None, :], exponent.to(tl.uint8), mask=in_grid)
