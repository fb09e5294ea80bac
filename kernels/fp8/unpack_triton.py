"""unpack_scatter on the GPU: one program per 32 KiB of an item, in one launch."""

# Triton reads a kernel's annotations (tl.constexpr), so its run-time arguments carry none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .pack_triton import make_units
from .triton_copy import CHUNK_NBYTES, copy_chunk

if TYPE_CHECKING:
    from .unpack import UnpackTable

WARPS = 8
VECTORS = 1024
_CHUNK_NBYTES = tl.constexpr(CHUNK_NBYTES)
_RECORD = tl.constexpr(5)


class DeviceTable:
    """An UnpackTable's units on its device, and its records on the host until destinations are known."""

    def __init__(self, table: UnpackTable) -> None:
        records, counts = [], []
        for item, dtype in zip(table.items, table.dtypes, strict=True):
            row_nbytes = item.cols * dtype.itemsize
            records.append([0, 0, item.rows, row_nbytes, item.offset])
            counts.append(-(-item.rows * row_nbytes // CHUNK_NBYTES))
        self.device = table.device
        self.records = torch.tensor(records, dtype=torch.int64).view(len(records), 5)
        self.units = make_units(counts, [1] * len(counts)).to(table.device)

    def upload_destinations(self, addresses: list[int], strides: list[int]) -> torch.Tensor:
        """Records with addresses and row strides (bytes) filled in. Returns when they are uploaded."""
        records = self.records.clone()
        records[:, 0] = torch.tensor(addresses, dtype=torch.int64)
        records[:, 1] = torch.tensor(strides, dtype=torch.int64)
        return records.to(self.device)

    def launch(self, records: torch.Tensor, bucket: torch.Tensor) -> None:
        if len(self.units) == 0:
            return
        with torch.cuda.device_of(bucket):
            _unpack_kernel[(len(self.units),)](self.units, records, bucket, VECTORS=VECTORS, num_warps=WARPS)


@triton.jit
def _unpack_kernel(units_ptr, records_ptr, bucket_ptr, VECTORS: tl.constexpr):
    unit_ptr = units_ptr + tl.program_id(0).to(tl.int64) * 4
    record_ptr = records_ptr + tl.load(unit_ptr).to(tl.int64) * _RECORD
    start = tl.load(unit_ptr + 1).to(tl.int64) * _CHUNK_NBYTES
    dst = tl.load(record_ptr)
    dst_stride = tl.load(record_ptr + 1)
    row_nbytes = tl.load(record_ptr + 3)
    nbytes = tl.load(record_ptr + 2) * row_nbytes
    src = bucket_ptr.to(tl.int64) + tl.load(record_ptr + 4)
    # No flag is wanted: tops = 0, and the flag's address is never used.
    copy_chunk(src, row_nbytes, dst, dst_stride, row_nbytes, nbytes, start, units_ptr, 0, 0, 0, VECTORS, True)
