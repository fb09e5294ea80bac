"""The specification: every operation written out naively, block by block.

Slow on purpose. Nothing here is shared with the implementations it specifies, except the names of the
rules; tests and benchmarks compare every other implementation with this file, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .pack import PackItem

FP8 = torch.float8_e4m3fn
F32 = torch.float32


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> e4m3fn: saturate to +-448, round to nearest even, NaN -> 0x7F. Same shape."""
    codes = x.clamp(-448.0, 448.0).to(FP8).view(torch.uint8)
    return torch.where(torch.isnan(x), torch.tensor(0x7F, dtype=torch.uint8), codes).view(FP8)


def block_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest |x|, as an fp32 scalar; NaN elements are left out."""
    return torch.where(torch.isnan(x), 0.0, x.abs()).max()


def quantize_block(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of any shape, in its source dtype -> (codes e4m3fn, scale_inv fp32 scalar)."""
    one = torch.tensor(1.0, dtype=F32)
    w = x.to(F32)
    amax = block_amax(w)
    if rule == "sglang":
        s = torch.maximum(amax, torch.tensor(1e-10, dtype=F32)) / 448.0
        if torch.isinf(amax):
            s = one
        return encode_e4m3(w / s), s
    if rule == "ue8m0":
        s = torch.maximum(amax, torch.tensor(1e-4, dtype=F32)) / 448.0
        if torch.isinf(amax):
            s = one
        else:
            mantissa, exponent = math.frexp(s.item())  # s = mantissa * 2^exponent, mantissa in [0.5, 1)
            s = torch.tensor(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent), dtype=F32)
        return encode_e4m3(w * (1.0 / s)), s
    if amax == 0 or torch.isinf(amax):
        multiplier = one
    else:
        multiplier = torch.tensor(448.0, dtype=F32) / amax
        if torch.isinf(multiplier):
            multiplier = torch.tensor(torch.finfo(x.dtype).max, dtype=F32)
        if rule == "te_pow2":
            multiplier = torch.tensor(2.0 ** (math.frexp(multiplier.item())[1] - 1), dtype=F32)
    return encode_e4m3(w * multiplier), 1.0 / multiplier


def quantize(
    weight: torch.Tensor, rule: str, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> (codes e4m3fn [M, K], scale_inv fp32 [ceil(M/bm), ceil(K/bk)]); block (0, 0): one scale."""
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=FP8)
    if weight.numel() == 0:
        return codes, torch.empty(0, 0, dtype=F32)
    bm, bk = (rows, cols) if block == (0, 0) else block
    scale_inv = torch.empty(-(-rows // bm), -(-cols // bk), dtype=F32)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            tile = (slice(i * bm, (i + 1) * bm), slice(j * bk, (j + 1) * bk))
            codes[tile], scale_inv[i, j] = quantize_block(weight[tile], rule)
    return codes, scale_inv


def dequantize(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = F32,
) -> torch.Tensor:
    """code * scale_inv in fp32, then one rounding to `dtype`."""
    rows, cols = codes.shape
    bm, bk = (rows, cols) if block == (0, 0) else block
    out = torch.empty(rows, cols, dtype=dtype)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            tile = (slice(i * bm, (i + 1) * bm), slice(j * bk, (j + 1) * bk))
            out[tile] = (codes[tile].to(F32) * scale_inv[i, j]).to(dtype)
    return out


def quantize_mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> (codes e4m3fn [M, K], scales uint8 E8M0 [M, ceil(K/32)])."""
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=FP8)
    scales = torch.empty(rows, -(-cols // 32), dtype=torch.uint8)
    for i in range(rows):
        for j in range(scales.shape[1]):
            w = weight[i, 32 * j : 32 * (j + 1)].to(F32)
            v = (block_amax(w) * torch.tensor(1 / 448, dtype=F32)).item()
            if math.isinf(v):
                exponent, factor = 0xFE, 0.0
            elif v <= 2.0**-127:
                exponent, factor = 0, 1.0
            else:
                exponent = 127 + math.ceil(math.log2(v))  # a double: exact enough to be corrected below
                while 2.0 ** (exponent - 127) < v:
                    exponent += 1
                while 2.0 ** (exponent - 128) >= v:
                    exponent -= 1
                factor = 2.0 ** (127 - exponent)
            scales[i, j] = exponent
            codes[i, 32 * j : 32 * (j + 1)] = encode_e4m3(w * torch.tensor(factor, dtype=F32))
    return codes, scales


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = F32) -> torch.Tensor:
    out = torch.empty(codes.shape, dtype=dtype)
    for i in range(codes.shape[0]):
        for j in range(scales.shape[1]):
            exponent = int(scales[i, j])
            factor = torch.tensor(math.nan if exponent == 0xFF else 2.0 ** (exponent - 127), dtype=F32)
            columns = slice(32 * j, 32 * (j + 1))
            out[i, columns] = (codes[i, columns].to(F32) * factor).to(dtype)
    return out


def to_bytes(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())


def has_nonfinite(x: torch.Tensor) -> bool:
    """NaN or Inf; in e4m3fn the two codes 0x7F and 0xFF. Integers have none."""
    if x.dtype == FP8:
        return bool(((x.view(torch.uint8) & 0x7F) == 0x7F).any())
    return x.dtype.is_floating_point and not bool(torch.isfinite(x.to(F32)).all())


def quantize_pack(
    items: Sequence[PackItem], sources: Sequence[torch.Tensor], rule: str, block: tuple[int, int], bucket: bytearray
) -> list[int]:
    """Write every item at its offsets into `bucket`; returns the non-finite flag of each item."""
    flags = []
    for item, source in zip(items, sources, strict=True):
        if item.scale_offset is None:
            payload = to_bytes(source)
        else:
            codes, scale_inv = quantize(source, rule, block)
            payload = to_bytes(codes)
            scale_bytes = to_bytes(scale_inv)
            bucket[item.scale_offset : item.scale_offset + len(scale_bytes)] = scale_bytes
        bucket[item.offset : item.offset + len(payload)] = payload
        flags.append(int(has_nonfinite(source)))
    return flags


def unpack(offset: int, like: torch.Tensor, bucket: bytes) -> torch.Tensor:
    """The contiguous tensor with the shape and dtype of `like` at `offset` of a bucket."""
    nbytes = like.numel() * like.element_size()
    data = torch.tensor(list(bucket[offset : offset + nbytes]), dtype=torch.uint8)
    return data.view(like.dtype).view(like.shape)


MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
TILE_WORDS = 4096


def mix64(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers in which every bit reaches every bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def checksum_key(lane: int) -> int:
    """The odd 64-bit key of a word's position in its tile."""
    return mix64((lane + 1) * GOLDEN & MASK64) | 1


def checksum(data: bytes) -> int:
    """64-bit checksum of a byte string, as an unsigned integer.

    The bytes are read as little-endian *signed* 32-bit words (zero-padded), 4096 to a tile.
    tile = sum(word * key[lane]) mod 2^64;  result = mix64(nbytes + golden) + sum(mix64(tile + index*golden)).
    """
    total = mix64((len(data) + GOLDEN) & MASK64)
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    for index, start in enumerate(range(0, len(words), TILE_WORDS)):
        tile = sum(w * checksum_key(lane) for lane, w in enumerate(words[start : start + TILE_WORDS]))
        total += mix64((tile + (index + 1) * GOLDEN) & MASK64)
    return total & MASK64
