"""Triton device functions: moving bytes between strided rows, 16 bytes at a time where addresses allow.

A copy's rows are numbered as one flat stream of rows * row_nbytes bytes; a program moves one chunk of it.
Alignment is looked at when the kernel runs, never assumed: a bucket may start at any address.
"""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# The inner of two conditions is a reduction, skipped where the outer is false.
# ruff: noqa: ANN001, ANN201, ANN202, SIM102
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_NBYTES = 32768
"""Bytes one program moves: as many as a 128x128 bf16 tile, so that mixed launches stay balanced."""

_CHUNK_NBYTES = tl.constexpr(CHUNK_NBYTES)
_WORDS = tl.constexpr(256)
"""Words moved at a time byte by byte."""


@triton.jit
def has_nonfinite(word, exponents, ones, tops):
    """Whether any lane of an int32 word is NaN or Inf; see pack_triton.NONFINITE_MASKS.

    A lane is non-finite when all its `exponents` bits are set: then it is zero after the flip, and the
    classic zero-lane test (subtract one from every lane, look for a borrow) finds it.
    """
    flipped = (word & exponents) ^ exponents
    return ((flipped - ones) & ~flipped & tops) != 0


@triton.jit
def store_int32_bytes(address, value, valid):
    """Store int32 values little-endian at addresses of any alignment; all three arguments are [N, 1]."""
    lane = tl.arange(0, 4)[None, :]
    pointer = address.to(tl.pointer_type(tl.uint8)) + lane
    tl.store(pointer, ((value >> (8 * lane)) & 0xFF).to(tl.uint8), mask=valid)


@triton.jit
def load_int32_bytes(address, valid):
    """Load little-endian int32 values from any alignment; `valid` [N, 4] masks bytes, absent ones are 0."""
    lane = tl.arange(0, 4)[None, :]
    pointer = address.to(tl.pointer_type(tl.uint8)) + lane
    parts = tl.load(pointer, mask=valid, other=0).to(tl.int32) << (8 * lane)
    return tl.sum(parts, axis=1)


@triton.jit
def copy_chunk(
    src, src_stride, dst, dst_stride, row_nbytes, nbytes, start, flag_ptr, exponents, ones, tops,
    VECTORS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Copy bytes [start, start + CHUNK_NBYTES) of the stream; strides and sizes are int64 bytes.

    `VECTORS` 16-byte pieces are in flight at a time. Sets *flag_ptr where a lane is non-finite; `tops` = 0
    turns that off. Without STORE the bytes are only looked at, and `dst` is no address.
    """
    end = tl.minimum(start + _CHUNK_NBYTES, nbytes)
    aligned = ((src | src_stride | dst | dst_stride | row_nbytes) & 15) == 0
    if aligned & (src_stride == row_nbytes) & (dst_stride == row_nbytes):
        for at in tl.range(start, end, VECTORS * 16):
            i_vector = tl.arange(0, VECTORS)
            inside = (at + i_vector * 16 < end)[:, None]
            _move(src + at, dst + at, i_vector * 16, i_vector * 16, inside, flag_ptr, exponents, ones, tops,
                  STORE)  # fmt: skip
    elif aligned:
        for at in tl.range(start, end, VECTORS * 16):
            stream = at + tl.arange(0, VECTORS).to(tl.int64) * 16
            row = stream // row_nbytes
            column = stream - row * row_nbytes
            _move(src, dst, row * src_stride + column, row * dst_stride + column, (stream < end)[:, None],
                  flag_ptr, exponents, ones, tops, STORE)  # fmt: skip
    else:
        for at in tl.range(start, end, _WORDS * 4):
            _move_bytes(src, src_stride, dst, dst_stride, row_nbytes, at, end, flag_ptr, exponents, ones, tops,
                        STORE)  # fmt: skip


@triton.jit
def _move(
    src, dst, src_at, dst_at, inside, flag_ptr, exponents, ones, tops, STORE: tl.constexpr
):  # fmt: skip
    """16 bytes from src + src_at[i] to dst + dst_at[i], everything a multiple of 16."""
    lane = tl.arange(0, 4)[None, :]
    src_ptr = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), 16)
    dst_ptr = tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), 16)
    value = tl.load(src_ptr + ((src_at // 16 * 4)[:, None] + lane), mask=inside, other=0)
    if STORE:
        tl.store(dst_ptr + ((dst_at // 16 * 4)[:, None] + lane), value, mask=inside)
    if tops != 0:
        if tl.max(has_nonfinite(value, exponents, ones, tops).to(tl.int32)) != 0:
            tl.atomic_or(flag_ptr, 1)


@triton.jit
def _move_bytes(
    src, src_stride, dst, dst_stride, row_nbytes, at, end, flag_ptr, exponents, ones, tops, STORE: tl.constexpr
):  # fmt: skip
    """Byte by byte: any alignment, any row length. Words are formed only to look for non-finite lanes."""
    lane = tl.arange(0, 4)[None, :]
    stream = at + tl.arange(0, _WORDS)[:, None].to(tl.int64) * 4 + lane
    inside = stream < end
    row = stream // row_nbytes
    column = stream - row * row_nbytes
    src_ptr = (src + row * src_stride + column).to(tl.pointer_type(tl.uint8))
    dst_ptr = (dst + row * dst_stride + column).to(tl.pointer_type(tl.uint8))
    value = tl.load(src_ptr, mask=inside, other=0)
    if STORE:
        tl.store(dst_ptr, value, mask=inside)
    if tops != 0:
        word = tl.sum(value.to(tl.int32) << (8 * lane), axis=1)
        if tl.max(has_nonfinite(word, exponents, ones, tops).to(tl.int32)) != 0:
            tl.atomic_or(flag_ptr, 1)
