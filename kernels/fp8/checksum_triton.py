"""checksum on the GPU: one program per run of 16 KiB tiles of a span; integer sums, so any order will do."""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import cpu, reference
from .pack_triton import make_units
from .triton_copy import load_int32_bytes

if TYPE_CHECKING:
    from .checksum import ChecksumTable

WARPS = 8
UNIT_TILES = 16
"""Tiles of one program: the 32 KiB of keys it holds in registers are read once for 256 KiB of data."""
BLOCK_TILES = 2
"""Tiles read at a time."""

_TILE_WORDS = tl.constexpr(reference.TILE_WORDS)
_PIECE = tl.constexpr(1024)
_GOLDEN = tl.constexpr(reference.GOLDEN)


class DeviceTable:
    """A ChecksumTable's units, spans and keys on its device."""

    def __init__(self, table: ChecksumTable) -> None:
        unit_nbytes = UNIT_TILES * 4 * reference.TILE_WORDS
        counts = [-(-nbytes // unit_nbytes) for _, nbytes in table.spans]
        start = [cpu.checksum_start(nbytes) for _, nbytes in table.spans]
        self.units = make_units(counts, [1] * len(counts)).to(table.device)
        self.spans = torch.tensor(table.spans, dtype=torch.int64).view(-1, 2).to(table.device)
        self.start = torch.tensor(start, dtype=torch.int64).to(table.device)
        self.keys = cpu.checksum_keys().to(table.device)

    def launch(self, bucket: torch.Tensor) -> torch.Tensor:
        totals = self.start.clone()
        if len(self.units):
            with torch.cuda.device_of(bucket):
                _checksum_kernel[(len(self.units),)](
                    self.units, self.spans, self.keys, bucket, totals,
                    UNIT_TILES=UNIT_TILES, BLOCK_TILES=BLOCK_TILES, num_warps=WARPS,
                )  # fmt: skip
        return totals


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _checksum_kernel(
    units_ptr, spans_ptr, keys_ptr, bucket_ptr, totals_ptr, UNIT_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
):  # fmt: skip
    unit_ptr = units_ptr + tl.program_id(0).to(tl.int64) * 4
    span = tl.load(unit_ptr).to(tl.int64)
    first = tl.load(unit_ptr + 1).to(tl.int64) * UNIT_TILES
    data = bucket_ptr.to(tl.int64) + tl.load(spans_ptr + span * 2)
    nbytes = tl.load(spans_ptr + span * 2 + 1)
    whole = nbytes // (_TILE_WORDS * 4)
    end = tl.minimum(first + UNIT_TILES, tl.cdiv(nbytes, _TILE_WORDS * 4))
    total = tl.zeros((1,), tl.uint64)
    tile = first
    if (data & 15) == 0:
        blocks = tl.maximum(tl.minimum(end, whole) - first, 0) // BLOCK_TILES * BLOCK_TILES
        words_ptr = tl.multiple_of(data.to(tl.pointer_type(tl.int32)), 16)
        lane = tl.arange(0, _TILE_WORDS)[None, :]
        key = tl.load(keys_ptr + lane).to(tl.uint64, bitcast=True)
        for at in tl.range(first, first + blocks, BLOCK_TILES):
            index = at + tl.arange(0, BLOCK_TILES)
            word = tl.load(words_ptr + index[:, None] * _TILE_WORDS + lane)
            sums = tl.sum(word.to(tl.int64).to(tl.uint64, bitcast=True) * key, axis=1)
            total += tl.sum(_mix64(sums + (index + 1).to(tl.uint64) * _GOLDEN), axis=0)
        tile = first + blocks
    for at in tl.range(tile, end):  # a partial tile, or any tile of a span that is not aligned
        sums = tl.zeros((1,), tl.uint64)
        for piece in tl.range(0, _TILE_WORDS, _PIECE):
            lane = piece + tl.arange(0, _PIECE)
            offset = (at * _TILE_WORDS + lane) * 4
            valid = (offset[:, None] + tl.arange(0, 4)[None, :]) < nbytes
            word = load_int32_bytes((data + offset)[:, None], valid)
            key = tl.load(keys_ptr + lane).to(tl.uint64, bitcast=True)
            sums += tl.sum(word.to(tl.int64).to(tl.uint64, bitcast=True) * key, axis=0)
        index = at + tl.arange(0, 1)
        total += _mix64(sums + (index + 1).to(tl.uint64) * _GOLDEN)
    target = totals_ptr + span + tl.zeros((1,), tl.int32)
    tl.atomic_add(target, total.to(tl.int64, bitcast=True))
