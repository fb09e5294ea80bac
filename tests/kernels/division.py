"""Exhaustive comparison of triton_rules.apply_factor with IEEE division, on the GPU."""

import torch
import triton
import triton.language as tl

from fp8bridge.kernels.triton_rules import apply_factor

BLOCK = 4096
MANTISSAS = 1 << 23


@triton.jit
def _compare(numerators_ptr, count, wrong_ptr, BLOCK: tl.constexpr):
    """Divide every numerator by the BLOCK scales 1.m of this program."""
    mantissa = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = (mantissa | 0x3F800000).to(tl.float32, bitcast=True)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for i in range(count):
        x = tl.load(numerators_ptr + i).to(tl.float32) + tl.zeros((BLOCK,), tl.float32)
        exact = tl.div_rn(x, scale).to(tl.int32, bitcast=True)
        short = apply_factor(x, scale, "sglang", True).to(tl.int32, bitcast=True)
        wrong += (exact != short).to(tl.int32)
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int64)))


def count_wrong_quotients(numerators):
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    _compare[(MANTISSAS // BLOCK,)](numerators, numerators.numel(), wrong, BLOCK=BLOCK)
    return wrong.item()
