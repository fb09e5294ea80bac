"""Matrices to a bucket of wire bytes: quantize and copy straight to the final offsets.

Two slots, made once and used in turn: bucket n + 1 is packed while bucket n is on the wire.
"""

from __future__ import annotations

import torch

from .errors import NonFiniteError
from .kernels import ChecksumTable, PackItem, PackTable, checksum, quantize_pack
from .layout import SCALE_SUFFIX
from .plan import Bucket, Entry, Item, Plan
from .protocols import PackedBucket
from .staging import unsigned

SLOTS = 2


class Packer:
    """Packs the buckets that this rank owns. Not thread-safe."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._items = plan.items_by_bucket()
        self._largest = max((b.nbytes for b in plan.manifest.buckets if b.owner == rank), default=0)
        self._slots: list[torch.Tensor] = []
        self._tables: dict[int, tuple[PackTable, ChecksumTable]] = {}

    @property
    def extra_nbytes(self) -> int:
        """Memory of the two slots."""
        return sum(s.numel() for s in self._slots)

    def memory(self, bucket: Bucket, slot: int, device: torch.device) -> torch.Tensor:
        """Flat uint8 memory for `bucket` in slot `slot`, of its size. It may be written again once the
        transport has waited for the bucket that stood there."""
        while len(self._slots) <= slot:
            self._slots.append(torch.empty(self._largest, dtype=torch.uint8, device=device))
        return self._slots[slot][: bucket.nbytes]

    def pack(self, bucket: Bucket, memory: torch.Tensor, matrices: list[torch.Tensor | None]) -> PackedBucket:
        """Fill `memory`; matrices[i] is that of the bucket's i-th item, None where its bytes are there.

        Raises NonFiniteError naming the tensor if a value is NaN or Inf.
        """
        items = [i for i, m in zip(self._items[bucket.index], matrices, strict=True) if m is not None]
        table, sums = self._table(bucket, items, memory.device)
        sources = [self._cast(i, m) for i, m in zip(items, (m for m in matrices if m is not None), strict=True)]
        flags = quantize_pack(table, sources, memory)
        checksums = unsigned(checksum(sums, memory))
        for item, flag in zip(items, flags.tolist(), strict=True):
            if flag:
                raise NonFiniteError(
                    f"{item.meta.name} has NaN or Inf values", tensor=item.meta.name, bucket=bucket.index
                )
        return PackedBucket(bucket, memory, tuple(checksums))

    def _cast(self, item: Item, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(getattr(torch, self._plan.layout.dtype)) if item.action == "cast" else matrix

    def _table(self, bucket: Bucket, items: list[Item], device: torch.device) -> tuple[PackTable, ChecksumTable]:
        if bucket.index not in self._tables:
            entries = {e.name: e for e in bucket.entries}
            rule, block = self._plan.rule or "sglang", self._plan.layout.block or (128, 128)
            pack_items = [self._pack_item(item, entries) for item in items]
            spans = [(e.offset, e.nbytes) for e in entries.values()]
            self._tables[bucket.index] = (
                PackTable.build(pack_items, rule=rule, block=block, device=device),
                ChecksumTable.build(spans, device=device),
            )
        return self._tables[bucket.index]

    def _pack_item(self, item: Item, entries: dict[str, Entry]) -> PackItem:
        rows, cols = item.meta.matrix
        offset = entries[item.meta.name].offset
        if item.action == "quantize":
            scale_offset = entries[item.meta.name + SCALE_SUFFIX].offset
            return PackItem(rows, cols, item.meta.dtype, offset, scale_offset)
        return PackItem(rows, cols, entries[item.meta.name].dtype, offset, None)
