"""dequantize on the GPU: one program per 32x128 elements."""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_rules import INTERPRET, round_to

WARPS = 4
_ROWS = tl.constexpr(32)
_COLS = tl.constexpr(128)


def launch(codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """See dequantize.dequantize; `block` has no zeros here."""
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(rows, 32), triton.cdiv(cols, 128))
    scales = scale_inv.contiguous()
    with torch.cuda.device_of(codes):
        _dequantize_kernel[grid](
            codes.view(torch.uint8), codes.stride(0), codes.stride(1), scales, scales.shape[1], out,
            rows, cols, block[0], block[1],
            INTERPRET=INTERPRET, num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    codes_ptr, stride_m, stride_k, scales_ptr, grid_k, out_ptr, rows, cols, block_m, block_k,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    i_row = (tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)).to(tl.int64)[:, None]
    i_col = (tl.program_id(1) * _COLS + tl.arange(0, _COLS)).to(tl.int64)[None, :]
    inside = (i_row < rows) & (i_col < cols)
    codes = tl.load(codes_ptr + i_row * stride_m + i_col * stride_k, mask=inside, other=0)
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scale = tl.load(scales_ptr + (i_row // block_m) * grid_k + i_col // block_k, mask=inside, other=0.0)
    product = round_to(value * scale.to(tl.float32), out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + i_row * cols + i_col, product, mask=inside)
