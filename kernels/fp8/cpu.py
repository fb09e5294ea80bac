"""Every operation on CPU tensors: vectorised torch, bit-equal to reference.py.

Work goes through row chunks of about a million elements, so that temporaries stay in cache and extra
memory does not grow with the tensor. Bytes are written through uint8 views: a bucket may start anywhere,
and nothing here needs an aligned address.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from . import rules
from .reference import GOLDEN, TILE_WORDS, checksum_key

CHUNK_ELEMENTS = 1 << 20
_TILE_NBYTES = 4 * TILE_WORDS
_PART_NBYTES = 64 * _TILE_NBYTES
"""Of a span, what one thread sums up at a time: 1 MiB."""


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Flat uint8 view of a contiguous tensor, or of a contiguous copy of any other."""
    return x.contiguous().view(-1).view(torch.uint8)


def has_nonfinite(x: torch.Tensor) -> bool:
    """NaN or Inf; in e4m3fn the codes 0x7F and 0xFF. Integers have none."""
    if x.dtype == torch.float8_e4m3fn:
        return bool(((x.view(torch.uint8) & 0x7F) == 0x7F).any())
    if not x.dtype.is_floating_point:
        return False
    if x.element_size() == 1:
        x = x.to(torch.float32)
    if x.numel() == 0:
        return False
    low, high = torch.aminmax(x)  # both are NaN if any element is
    return not bool(torch.isfinite(low) & torch.isfinite(high))


def encode(scaled: torch.Tensor, out: torch.Tensor, *, nonfinite: bool) -> None:
    """fp32 -> e4m3 codes in `out` (uint8, same shape). `scaled` is overwritten."""
    nan = torch.isnan(scaled) if nonfinite else None
    out.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-rules.FP8_MAX, rules.FP8_MAX))
    if nan is not None:
        out[nan] = 0x7F  # torch keeps the sign of a NaN, the GPU's cast does not


def finite_amax(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
    """(amax over `dims` with NaN left out, whether x holds NaN or Inf)."""
    magnitude = x.abs()
    amax = _amax(magnitude, dims)
    nonfinite = not bool(torch.isfinite(amax).all())
    if nonfinite:
        amax = _amax(torch.where(torch.isnan(magnitude), 0.0, magnitude), dims)
    return amax, nonfinite


def _amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):  # one dimension at a time: the last is contiguous, hence fast
        x = x.amax(dim)
    return x


def quantize_into(
    source: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, rule: str, block: tuple[int, int]
) -> bool:
    """Quantize [M, K] into `codes` (uint8 [M, K], any row stride) and `scale_inv` (fp32, contiguous).

    Returns whether the source holds NaN or Inf.
    """
    rows, cols = source.shape
    if block == rules.WHOLE:
        return _quantize_whole(source, codes, scale_inv, rule)
    block_m, block_k = block
    grid_k = -(-cols // block_k)
    pad_k = grid_k * block_k - cols
    step = max(1, CHUNK_ELEMENTS // (cols * block_m)) * block_m
    nonfinite = False
    for start in range(0, rows, step):
        chunk = source[start : start + step].to(torch.float32)
        valid = chunk.shape[0]
        chunk = F.pad(chunk, (0, pad_k, 0, -valid % block_m)) if pad_k or valid % block_m else chunk
        tiles = chunk.view(-1, block_m, grid_k, block_k)
        amax, bad = finite_amax(tiles, (1, 3))
        factor, scale_inv[start // block_m :][: amax.shape[0]] = rules.block_scales(amax, rule, source.dtype)
        factor = factor[:, None, :, None]
        scaled = tiles / factor if rule == "sglang" else tiles * factor
        scaled = scaled.view(-1, grid_k * block_k)[:valid, :cols]
        encode(scaled, codes[start : start + step], nonfinite=bad)
        nonfinite |= bad
    return nonfinite


def _quantize_whole(source: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, rule: str) -> bool:
    """Two passes: the one scale needs every element first."""
    step = max(1, CHUNK_ELEMENTS // source.shape[1])
    parts = [finite_amax(part.to(torch.float32), (0, 1)) for part in source.split(step)]
    nonfinite = any(bad for _, bad in parts)
    amax = torch.stack([amax for amax, _ in parts]).max()
    factor, scale = rules.block_scales(amax, rule, source.dtype)
    scale_inv.fill_(scale)
    for part, out in zip(source.split(step), codes.split(step), strict=True):
        x = part.to(torch.float32)
        encode(x / factor if rule == "sglang" else x * factor, out, nonfinite=nonfinite)
    return nonfinite


def dequantize(
    codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    rows, cols = codes.shape
    out = torch.empty(rows, cols, dtype=dtype)
    if out.numel() == 0:
        return out
    block_m, block_k = rules.resolve_block(rows, cols, block)
    step = max(1, CHUNK_ELEMENTS // (cols * block_m)) * block_m
    for start in range(0, rows, step):
        part = codes[start : start + step]
        scales = scale_inv[start // block_m : -(-(start + part.shape[0]) // block_m)].to(torch.float32)
        scales = scales.repeat_interleave(block_m, 0)[: part.shape[0]].repeat_interleave(block_k, 1)[:, :cols]
        out[start : start + step] = (part.to(torch.float32) * scales).to(dtype)
    return out


def to_signed(value: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def mix64(x: torch.Tensor) -> torch.Tensor:
    """reference.mix64 on int64 tensors: products wrap, right shifts are logical."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * to_signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@functools.cache
def checksum_keys() -> torch.Tensor:
    """int64 [TILE_WORDS]: the odd key of each word's position in its tile."""
    return torch.tensor([to_signed(checksum_key(lane)) for lane in range(TILE_WORDS)], dtype=torch.int64)


@functools.lru_cache(maxsize=65536)
def checksum_start(nbytes: int) -> int:
    """What the length contributes, as a signed integer; every tile adds to it."""
    return int(mix64(torch.tensor(to_signed((nbytes + GOLDEN) % (1 << 64)))))


def checksums(data: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int64 [n]: the checksum of the bytes of each (offset, nbytes) of a flat uint8 tensor.

    Threads share tiles, not spans, and what follows the tiles' sums is done for all spans at once: a bucket
    may be a thousand small tensors or one large one.
    """
    raw = data.numpy()
    counts = np.array([-(-nbytes // _TILE_NBYTES) for _, nbytes in spans], dtype=np.int64)
    ends = np.cumsum(counts)
    sums = np.empty(int(ends[-1]) if len(spans) else 0, dtype=np.int64)
    parts = [
        (raw[offset + first : offset + min(first + _PART_NBYTES, nbytes)], sums[end - count + first // _TILE_NBYTES :])
        for (offset, nbytes), count, end in zip(spans, counts.tolist(), ends.tolist(), strict=True)
        for first in range(0, nbytes, _PART_NBYTES)
    ]
    threads = min(torch.get_num_threads(), -(-len(sums) * _TILE_NBYTES // _PART_NBYTES))
    if threads < 2:
        _sum_parts(parts)
    else:
        step = -(-len(parts) // (4 * threads))
        list(_pool(threads).map(_sum_parts, (parts[i : i + step] for i in range(0, len(parts), step))))
    position = torch.arange(1, len(sums) + 1) - torch.from_numpy(np.repeat(ends - counts, counts))
    mixed = mix64(torch.from_numpy(sums) + position * to_signed(GOLDEN))
    upto = torch.cat([torch.zeros(1, dtype=torch.int64), mixed.cumsum(0)])
    start = torch.tensor([checksum_start(nbytes) for _, nbytes in spans], dtype=torch.int64)
    return start + upto[torch.from_numpy(ends)] - upto[torch.from_numpy(ends - counts)]


def _sum_parts(parts: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> None:
    """(bytes, where the sums of their tiles go): sum of words x keys, modulo 2^64. einsum multiplies without
    writing the products, any alignment will do, and it lets other threads run."""
    keys = checksum_keys().numpy()
    for raw, sums in parts:
        whole = len(raw) // _TILE_NBYTES
        words = raw[: whole * _TILE_NBYTES].view("<i4").reshape(whole, TILE_WORDS)
        np.einsum("ij,j->i", words, keys, out=sums[:whole], dtype=np.int64, casting="unsafe")
        if rest := len(raw) - whole * _TILE_NBYTES:
            tail = np.zeros(-(-rest // 4), dtype="<i4")
            tail.view(np.uint8)[:rest] = raw[whole * _TILE_NBYTES :]
            sums[whole] = np.einsum("j,j->", tail, keys[: len(tail)], dtype=np.int64, casting="unsafe")


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fp8bridge-checksum")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a child
