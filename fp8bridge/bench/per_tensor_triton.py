"""The baseline's kernel: a program per 128x128 tile of one BF16 matrix."""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels.triton_rules import BF16, apply_factor, bits_to_fp32, block_scale, magnitude_bits, to_e4m3


def launch(weight: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, rule: str) -> None:
    _one_tile[tuple(scale_inv.shape)](
        weight, codes, scale_inv, *weight.shape, weight.stride(0), RULE=rule, ROWS=128, COLS=128, num_warps=8
    )


@triton.jit
def _one_tile(
    weight_ptr, codes_ptr, scales_ptr, rows, cols, stride, RULE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i_col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (i_row < rows) & (i_col < cols)
    x = tl.load(weight_ptr + i_row.to(tl.int64) * stride + i_col, mask=inside, other=0.0)
    amax = bits_to_fp32(tl.max(magnitude_bits(x, BF16)), BF16)
    factor, scale_inv = block_scale(amax, RULE, BF16)
    q = apply_factor(x.to(tl.float32), factor, RULE, True)
    tl.store(codes_ptr + i_row.to(tl.int64) * cols + i_col, to_e4m3(q, False), mask=inside)
    tl.store(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale_inv)
