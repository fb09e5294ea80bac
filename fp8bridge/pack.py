"""Matrices to a bucket of wire bytes: quantize and copy straight to the final offsets.

Two slots, made once and used in turn: bucket n + 1 is packed while bucket n is on the wire.
"""

from __future__ import annotations

import torch

from .errors import NonFiniteError
from .kernels import ChecksumTable, PackItem, PackTable, checksum, quantize_pack
from .plan import Entry, Item, Plan
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

    def pack(self, index: int, slot: int, matrices: list[torch.Tensor]) -> PackedBucket:
        """Fill slot `slot` with bucket `index`; matrices[i] is that of the bucket's i-th item.

        The caller owns the slot again once the bucket's transport has waited for it. Raises
        NonFiniteError naming the tensor if a value is NaN or Inf.
        """
        bucket = self._plan.manifest.buckets[index]
        items = self._items[index]
        device = matrices[0].device
        table, sums = self._table(index, device)
        memory = self._slot(slot, device)[: bucket.nbytes]
        flags = quantize_pack(table, [self._cast(i, m) for i, m in zip(items, matrices, strict=True)], memory)
        checksums = unsigned(checksum(sums, memory))
        for item, flag in zip(items, flags.tolist(), strict=True):
            if flag:
                raise NonFiniteError(f"{item.meta.name} has NaN or Inf values", tensor=item.meta.name, bucket=index)
        return PackedBucket(bucket, memory, tuple(checksums))

    def _cast(self, item: Item, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(getattr(torch, self._plan.layout.dtype)) if item.action == "cast" else matrix

    def _slot(self, slot: int, device: torch.device) -> torch.Tensor:
        while len(self._slots) <= slot:
            self._slots.append(torch.empty(self._largest, dtype=torch.uint8, device=device))
        return self._slots[slot]

    def _table(self, index: int, device: torch.device) -> tuple[PackTable, ChecksumTable]:
        if index not in self._tables:
            entries = {e.name: e for e in self._plan.manifest.buckets[index].entries}
            rule, block = self._plan.rule or "sglang", self._plan.layout.block or (128, 128)
            pack_items = [self._pack_item(item, entries) for item in self._items[index]]
            spans = [(e.offset, e.nbytes) for e in entries.values()]
            self._tables[index] = (
                PackTable.build(pack_items, rule=rule, block=block, device=device),
                ChecksumTable.build(spans, device=device),
            )
        return self._tables[index]

    def _pack_item(self, item: Item, entries: dict[str, Entry]) -> PackItem:
        rows, cols = item.meta.matrix
        offset = entries[item.meta.name].offset
        if item.action == "quantize":
            scale_offset = entries[f"{item.meta.name}_scale_inv"].offset
            return PackItem(rows, cols, item.meta.dtype, offset, scale_offset)
        return PackItem(rows, cols, entries[item.meta.name].dtype, offset, None)
