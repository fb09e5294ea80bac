"""quantize_pack on the GPU: one program per 128x128 tile or 32 KiB of copy, in one launch.

A program looks up its unit (item, tile row, tile column), then the item's record, and works:

1. It reads the whole tile once for the amax, as integer magnitudes: their maximum also shows NaN and Inf.
2. It reads the tile again in slices of 32 rows, now from cache, scales and stores.

Holding the tile in registers across the reduction takes 90 to 170 registers a thread, and far more under
`sglang`; this takes 48, so five programs share a multiprocessor and keep 160 KB of reads in flight.
docs/kernels.md has the numbers.

A block of 1x128 needs one pass (each row has its own amax); one scale per tensor needs two launches, the
first only for the amax.
"""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# A condition on a tl.constexpr stands alone, to be decided when the kernel is compiled; a branch on a
# run-time value skips work, which an expression would not.
# ruff: noqa: ANN001, ANN202, SIM102, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from . import rules
from .triton_copy import CHUNK_NBYTES, copy_chunk, store_int32_bytes
from .triton_rules import (
    BF16,
    FP16,
    FP32,
    INTERPRET,
    apply_factor,
    bits_to_fp32,
    block_scale,
    infinity_bits,
    magnitude_bits,
    to_e4m3,
    widen,
)

if TYPE_CHECKING:
    from .pack import PackItem, PackTable

TILE = 128
WARPS, MAX_REGISTERS = 8, 48
"""Five programs share a multiprocessor; left alone the compiler takes 64 registers, which costs 5 to 10 %.
Tables of fp32 sources are left alone: they would spill."""
DIVISION_WARPS, DIVISION_MAX_REGISTERS = 4, 96
"""The same for `sglang`, whose division gains from more work per thread (0.93 against 0.87)."""
_TILE = tl.constexpr(TILE)
_CHUNK_NBYTES = tl.constexpr(CHUNK_NBYTES)
_SLICE = tl.constexpr(32)
_THIN_SLICE = tl.constexpr(8)
"""Rows handled at a time, in aligned tiles and in others: element-wise addresses take more registers."""
_COPY_VECTORS = tl.constexpr(512)
"""Two 16-byte loads a thread at a time, so that a copy needs no more registers than a tile."""
_RECORD = tl.constexpr(10)

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Record kind of a quantized item: BF16, FP16, FP32 of triton_rules. A copy is kind 3."""
COPY_KIND = 3
_COPY_KIND = tl.constexpr(COPY_KIND)

_FLOAT16_LANES = (0x00010001, 0x80008000)
NONFINITE_MASKS = {
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x01010101, 0x80808080),
    torch.bfloat16: (0x7F807F80, *_FLOAT16_LANES),
    torch.float16: (0x7C007C00, *_FLOAT16_LANES),
    torch.float32: (0x7F800000, 1, 0x80000000),
}
"""(exponent bits, lowest bit, highest bit) of each lane of a 32-bit word; see triton_copy.has_nonfinite."""


class DeviceTable:
    """A PackTable's units on its device, and its records on the host until sources are known."""

    def __init__(self, table: PackTable) -> None:
        records, counts, widths = [], [], []
        for item, dtype in zip(table.items, table.dtypes, strict=True):
            record, count, width = _describe(item, dtype)
            records.append(record)
            counts.append(count)
            widths.append(width)
        self.device = table.device
        self.records = torch.tensor(records, dtype=torch.int64).view(len(records), 10)
        self.units = make_units(counts, widths).to(table.device)
        self.whole = table.block == rules.WHOLE
        kinds = {KINDS[d] for i, d in zip(table.items, table.dtypes, strict=True) if i.scale_offset is not None}
        self.options: dict[str, Any] = {
            "RULE": table.rule,
            "BY_ROW": table.block == (1, TILE),
            "DTYPES": sum(1 << kind for kind in kinds) if len(kinds) < 2 else 7,
            "INTERPRET": INTERPRET,
            **_tuning(table.rule, kinds),
        }

    def upload_sources(self, addresses: list[int], strides: list[int]) -> torch.Tensor:
        """Records with addresses and row strides (elements) filled in. Returns when they are uploaded."""
        records = self.records.clone()
        records[:, 0] = torch.tensor(addresses, dtype=torch.int64)
        records[:, 1] = torch.tensor(strides, dtype=torch.int64)
        return records.to(self.device)

    def launch(self, records: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        flags = torch.zeros(len(records), dtype=torch.int32, device=bucket.device)
        if len(self.units) == 0:
            return flags
        with torch.cuda.device_of(bucket):
            if self.whole:
                amax_bits = torch.zeros_like(flags)
                self._run(records, bucket, flags, amax_bits, "amax")
                self._run(records, bucket, flags, amax_bits, "given")
            else:
                self._run(records, bucket, flags, flags, "both")
        return flags

    def look(self, records: torch.Tensor) -> torch.Tensor:
        """The flags of `launch` for a table of copies, without writing anything."""
        flags = torch.zeros(len(records), dtype=torch.int32, device=records.device)
        if len(self.units):
            with torch.cuda.device_of(records):
                self._run(records, flags, flags, flags, "look")
        return flags

    def _run(
        self, records: torch.Tensor, bucket: torch.Tensor, flags: torch.Tensor, amax: torch.Tensor, phase: str
    ) -> None:
        grid = (len(self.units),)
        _pack_kernel[grid](self.units, records, bucket, flags, amax, PHASE=phase, **self.options)


def _tuning(rule: str, kinds: set[int]) -> dict[str, int | None]:
    if kinds == {KINDS[torch.float32]}:
        return {"num_warps": WARPS, "maxnreg": None}
    if rule == "sglang":
        return {"num_warps": DIVISION_WARPS, "maxnreg": DIVISION_MAX_REGISTERS}
    return {"num_warps": WARPS, "maxnreg": MAX_REGISTERS}


def _describe(item: PackItem, dtype: torch.dtype) -> tuple[list[int], int, int]:
    """(record, number of units, units in a row) of an item; a record's first two fields come later."""
    empty = item.rows == 0 or item.cols == 0
    if item.scale_offset is not None:
        grid_m, grid_k = -(-item.rows // TILE), -(-item.cols // TILE)
        record = [0, 0, item.rows, item.cols, item.offset, KINDS[dtype], item.scale_offset, 0, 0, 0]
        return record, 0 if empty else grid_m * grid_k, max(grid_k, 1)
    row_nbytes = item.cols * dtype.itemsize
    masks = NONFINITE_MASKS.get(dtype, (0, 0, 0))
    record = [0, 0, item.rows, row_nbytes, item.offset, COPY_KIND, *masks, dtype.itemsize]
    return record, 0 if empty else -(-item.rows * row_nbytes // CHUNK_NBYTES), 1


def make_units(counts: list[int], widths: list[int]) -> torch.Tensor:
    """int32 [sum(counts), 4] of (item, index // width, index % width, 0), items in order."""
    counts_n, widths_n = torch.tensor(counts, dtype=torch.int64), torch.tensor(widths, dtype=torch.int64)
    item = torch.repeat_interleave(torch.arange(len(counts)), counts_n)
    index = torch.arange(len(item)) - (counts_n.cumsum(0) - counts_n)[item]
    width = widths_n[item]
    columns = [item, index // width, index % width, torch.zeros_like(item)]
    return torch.stack(columns, 1).to(torch.int32)


@triton.jit
def _pack_kernel(
    units_ptr,
    records_ptr,
    bucket_ptr,
    flags_ptr,
    amax_ptr,
    RULE: tl.constexpr,
    BY_ROW: tl.constexpr,
    DTYPES: tl.constexpr,
    INTERPRET: tl.constexpr,
    PHASE: tl.constexpr,
):
    unit_ptr = units_ptr + tl.program_id(0).to(tl.int64) * 4
    item = tl.load(unit_ptr).to(tl.int64)
    i_m = tl.load(unit_ptr + 1).to(tl.int64)
    i_k = tl.load(unit_ptr + 2).to(tl.int64)
    record_ptr = records_ptr + item * _RECORD
    src = tl.load(record_ptr)
    stride = tl.load(record_ptr + 1)
    rows = tl.load(record_ptr + 2)
    cols = tl.load(record_ptr + 3)
    bucket = bucket_ptr.to(tl.int64)
    dst = bucket + tl.load(record_ptr + 4)
    kind = tl.load(record_ptr + 5)
    tail = tl.load(record_ptr + 6)
    flag_ptr = flags_ptr + item
    if kind == _COPY_KIND:
        if PHASE != "amax":
            ones = tl.load(record_ptr + 7).to(tl.int32)
            tops = tl.load(record_ptr + 8).to(tl.int32)
            itemsize = tl.load(record_ptr + 9)
            copy_chunk(
                src, stride * itemsize, dst, cols, cols, rows * cols, i_m * _CHUNK_NBYTES,
                flag_ptr, tail.to(tl.int32), ones, tops, _COPY_VECTORS, PHASE != "look",
            )  # fmt: skip
    scales = bucket + tail
    if DTYPES & 1:
        if kind == BF16:
            _pack_tile(src, stride, rows, cols, dst, scales, i_m, i_k, flag_ptr, amax_ptr + item,
                       RULE, BY_ROW, PHASE, INTERPRET, BF16)  # fmt: skip
    if DTYPES & 2:
        if kind == FP16:
            _pack_tile(src, stride, rows, cols, dst, scales, i_m, i_k, flag_ptr, amax_ptr + item,
                       RULE, BY_ROW, PHASE, INTERPRET, FP16)  # fmt: skip
    if DTYPES & 4:
        if kind == FP32:
            _pack_tile(src, stride, rows, cols, dst, scales, i_m, i_k, flag_ptr, amax_ptr + item,
                       RULE, BY_ROW, PHASE, INTERPRET, FP32)  # fmt: skip


@triton.jit
def _pack_tile(
    src, stride, rows, cols, dst, scales, i_m, i_k, flag_ptr, amax_ptr,
    RULE: tl.constexpr, BY_ROW: tl.constexpr, PHASE: tl.constexpr, INTERPRET: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pick the aligned or the general form of one 128x128 tile at (i_m, i_k)."""
    ITEMSIZE: tl.constexpr = 4 if DTYPE == FP32 else 2
    row, col = i_m * _TILE, i_k * _TILE
    src += (row * stride + col) * ITEMSIZE
    dst += row * cols + col
    grid_k = tl.cdiv(cols, _TILE)
    scales += 4 * ((row if BY_ROW else i_m) * grid_k + i_k)
    height = tl.minimum(rows - row, _TILE).to(tl.int32)
    width = tl.minimum(cols - col, _TILE).to(tl.int32)
    aligned = (((src | (stride * ITEMSIZE) | dst | cols) & 15) == 0) & (width == _TILE)
    if aligned:
        _pack_block(src, stride, height, width, dst, cols, scales, grid_k, flag_ptr, amax_ptr, i_m + i_k,
                    RULE, BY_ROW, PHASE, INTERPRET, DTYPE, True)  # fmt: skip
    else:
        _pack_block(src, stride, height, width, dst, cols, scales, grid_k, flag_ptr, amax_ptr, i_m + i_k,
                    RULE, BY_ROW, PHASE, INTERPRET, DTYPE, False)  # fmt: skip


@triton.jit
def _pack_block(
    src, stride, height, width, dst, cols, scales, grid_k, flag_ptr, amax_ptr, is_first,
    RULE: tl.constexpr, BY_ROW: tl.constexpr, PHASE: tl.constexpr, INTERPRET: tl.constexpr, DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    INFINITY: tl.constexpr = infinity_bits(DTYPE)
    ROWS: tl.constexpr = _SLICE if ALIGNED else _THIN_SLICE
    SHORT: tl.constexpr = RULE == "sglang" and DTYPE != FP32 and not INTERPRET
    if BY_ROW:
        for row in tl.range(0, height, ROWS):
            x = _load_rows(src, stride, row, height, width, ROWS, DTYPE, ALIGNED, "")
            bits = magnitude_bits(x, DTYPE)
            top = tl.max(bits, axis=1)
            bad = tl.max(top) >= INFINITY
            if bad:
                tl.atomic_or(flag_ptr, 1)
                top = tl.max(tl.where(bits > INFINITY, 0, bits), axis=1)
            factor, scale_inv = block_scale(bits_to_fp32(top, DTYPE), RULE, DTYPE)
            x = widen(x, DTYPE, INTERPRET)
            if bad:
                q = apply_factor(x, factor[:, None], RULE, False)
            else:
                q = apply_factor(x, factor[:, None], RULE, SHORT)
            _store_rows(dst, cols, row, height, width, to_e4m3(q, INTERPRET), ROWS, ALIGNED)
            i_row = row + tl.arange(0, ROWS)
            store_int32_bytes(
                (scales + i_row.to(tl.int64) * (4 * grid_k))[:, None],
                scale_inv.to(tl.int32, bitcast=True)[:, None],
                (i_row < height)[:, None],
            )
    else:
        if PHASE == "given":
            top = tl.load(amax_ptr)
        else:
            top = _tile_top(src, stride, height, width, DTYPE, ALIGNED, False)
            if top >= INFINITY:
                tl.atomic_or(flag_ptr, 1)
                if top > INFINITY:
                    top = _tile_top(src, stride, height, width, DTYPE, ALIGNED, True)
        if PHASE == "amax":
            tl.atomic_max(amax_ptr, top)
        else:
            factor, scale_inv = block_scale(bits_to_fp32(top, DTYPE), RULE, DTYPE)
            if PHASE == "both" or is_first == 0:
                address = scales + tl.zeros((1, 1), tl.int64)
                value = scale_inv.to(tl.int32, bitcast=True) + tl.zeros((1, 1), tl.int32)
                store_int32_bytes(address, value, value == value)
            if SHORT:
                if top == INFINITY:
                    _write_tile(src, stride, height, width, dst, cols, factor,
                                RULE, INTERPRET, DTYPE, ALIGNED, ROWS, False)  # fmt: skip
                else:
                    _write_tile(src, stride, height, width, dst, cols, factor,
                                RULE, INTERPRET, DTYPE, ALIGNED, ROWS, True)  # fmt: skip
            else:
                _write_tile(src, stride, height, width, dst, cols, factor,
                            RULE, INTERPRET, DTYPE, ALIGNED, ROWS, False)  # fmt: skip


@triton.jit
def _write_tile(
    src, stride, height, width, dst, cols, factor,
    RULE: tl.constexpr, INTERPRET: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Scale and store a tile with one factor."""
    for row in tl.range(0, height, ROWS):
        x = _load_rows(src, stride, row, height, width, ROWS, DTYPE, ALIGNED, "evict_first")
        q = apply_factor(widen(x, DTYPE, INTERPRET), factor, RULE, SHORT)
        _store_rows(dst, cols, row, height, width, to_e4m3(q, INTERPRET), ROWS, ALIGNED)


@triton.jit
def _tile_top(
    src, stride, height, width, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SKIP_NAN: tl.constexpr
):  # fmt: skip
    """Largest magnitude of a tile, as integer bits."""
    if ALIGNED and not SKIP_NAN:
        x = _load_rows(src, stride, 0, height, width, _TILE, DTYPE, ALIGNED, "evict_last")
        return tl.max(magnitude_bits(x, DTYPE))
    else:
        top = 0
        for row in tl.range(0, height, _THIN_SLICE):
            x = _load_rows(src, stride, row, height, width, _THIN_SLICE, DTYPE, ALIGNED, "evict_last")
            bits = magnitude_bits(x, DTYPE)
            if SKIP_NAN:
                bits = tl.where(bits > infinity_bits(DTYPE), 0, bits)
            top = tl.maximum(top, tl.max(bits))
        return top


@triton.jit
def _load_rows(
    src, stride, row, height, width, ROWS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """[ROWS, 128] elements from `row` on, zero outside; in 16-byte loads if ALIGNED."""
    i_row = row + tl.arange(0, ROWS)
    i_col = tl.arange(0, _TILE)
    inside = (i_row < height)[:, None]
    if DTYPE == FP32:
        pointer = src.to(tl.pointer_type(tl.float32))
        step = stride // 4 * 4 if ALIGNED else stride
    else:
        pointer = src.to(tl.pointer_type(tl.float16 if DTYPE == FP16 else tl.bfloat16))
        step = stride // 8 * 8 if ALIGNED else stride
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    else:
        inside = inside & (i_col < width)[None, :]
    pointer = pointer + i_row.to(tl.int64)[:, None] * step + i_col[None, :]
    return tl.load(pointer, mask=inside, other=0.0, eviction_policy=KEEP)


@triton.jit
def _store_rows(dst, cols, row, height, width, codes, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    i_row = row + tl.arange(0, ROWS)
    i_col = tl.arange(0, _TILE)
    inside = (i_row < height)[:, None]
    pointer = dst.to(tl.pointer_type(tl.uint8))
    step = cols
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        step = cols // 16 * 16
    else:
        inside = inside & (i_col < width)[None, :]
    tl.store(pointer + i_row.to(tl.int64)[:, None] * step + i_col[None, :], codes, mask=inside)
