"""Triton device functions: the rounding rules of rules.py, and the cast to e4m3.

`INTERPRET` is True under Triton's interpreter. Its casts to e4m3 and bf16 lose a carry out of the mantissa
(125.02 becomes 64 instead of 128), it misreads subnormal bf16, and its fma rounds twice, so these are
written differently there; the results are the same bits.
"""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)

_INF = tl.constexpr(float("inf"))
_BF16_MAX = tl.constexpr(3.3895313892515355e38)
_FP16_MAX = tl.constexpr(65504.0)
_FP32_MAX = tl.constexpr(3.4028234663852886e38)

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)


@triton.jit
def magnitude_bits(x, DTYPE: tl.constexpr):
    """The bits of |x| as int32: ordered like |x|, Inf above every finite number, NaN above Inf."""
    if DTYPE == FP32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def infinity_bits(DTYPE: tl.constexpr):
    if DTYPE == FP32:
        return 0x7F800000
    elif DTYPE == FP16:
        return 0x7C00
    else:
        return 0x7F80


@triton.jit
def bits_to_fp32(bits, DTYPE: tl.constexpr):
    if DTYPE == FP32:
        return bits.to(tl.float32, bitcast=True)
    elif DTYPE == FP16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def widen(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """The same values in fp32."""
    if INTERPRET and DTYPE == BF16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def block_scale(amax, RULE: tl.constexpr, DTYPE: tl.constexpr):
    """(factor, scale_inv) of blocks with this amax (fp32, NaN-free, any shape); see rules.block_scales."""
    infinite = amax == _INF
    if RULE == "te" or RULE == "te_pow2":
        factor = tl.div_rn(448.0, amax)
        if DTYPE == FP32:
            factor = tl.where(factor == _INF, _FP32_MAX, factor)
        elif DTYPE == FP16:
            factor = tl.where(factor == _INF, _FP16_MAX, factor)
        else:
            factor = tl.where(factor == _INF, _BF16_MAX, factor)
        if RULE == "te_pow2":
            factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where((amax == 0.0) | infinite, 1.0, factor)
        return factor, tl.div_rn(1.0, factor)
    else:
        floor = 1e-4 if RULE == "ue8m0" else 1e-10
        scale = tl.div_rn(tl.maximum(amax, floor), 448.0)
        if RULE == "ue8m0":
            bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
            scale = bits.to(tl.float32, bitcast=True)
        scale = tl.where(infinite, 1.0, scale)
        if RULE == "ue8m0":
            return tl.div_rn(1.0, scale), scale
        else:
            return scale, scale


@triton.jit
def apply_factor(x, factor, RULE: tl.constexpr, SHORT: tl.constexpr):
    """x (fp32 [R, C]) times or divided by its factor (scalar or [R, 1]).

    With SHORT, division takes a third of div.rn's instructions (0.65 -> 0.9 and more of copy bandwidth on
    an H200): Markstein's correction of x * (1/s). It is right for sources of 16 bits without Inf:
    tests/kernels/test_pack_gpu.py compares it with division for every bf16 and fp16 mantissa over every
    fp32 mantissa of s. There is no such proof for fp32 sources.
    """
    if RULE != "sglang":
        return x * factor
    elif SHORT:
        reciprocal = tl.div_rn(1.0, factor)
        estimate = x * reciprocal
        excess = tl.fma(estimate, factor, -x)  # the negated remainder: with x minus it, -0 would become +0
        return tl.fma(excess, -reciprocal, estimate)
    else:
        return tl.div_rn(x, factor)


@triton.jit
def to_e4m3(x, INTERPRET: tl.constexpr):
    """fp32 -> e4m3fn codes as uint8: round to nearest even, saturate to +-448, NaN -> 0x7F.

    On the GPU this is one cvt.rn.satfinite.e4m3x2.f32 per two elements; PTX has no other form of it.
    """
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal codes: rebias the exponent, round the mantissa to 3 bits; a carry moves the exponent.
        normal = ((magnitude + 0x0007FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Subnormal codes are multiples of 2^-9: adding 2^14 leaves the rounded multiple in the low bits.
        shifted = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True)
        code = tl.where(magnitude < 0x3C800000, shifted - 0x46800000, normal)
        code = tl.where(magnitude >= 0x43E00000, 0x7E, code)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
        return code.to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 -> fp32, bf16 or fp16, to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
