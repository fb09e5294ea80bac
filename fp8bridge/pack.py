"""Matrices to a bucket of wire bytes: quantize and copy straight to the final offsets.

Two slots, made once and used in turn: bucket n + 1 is packed while bucket n is on the wire. A third is made
where a tensor is larger than a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import NonFiniteError
from .kernels import ChecksumTable, PackItem, PackTable, checksum, quantize_pack
from .layout import SCALE_SUFFIX
from .plan import Bucket, Entry, Item, Plan
from .protocols import Matrices, PackedBucket
from .staging import as_bytes
from .types import ITEMSIZE, Shard

SLOTS = 2
OVERSIZED = SLOTS
"""The slot of buckets that are one tensor larger than a bucket may be: two such are rarely neighbours, and memory
stays at two buckets and the largest tensor."""
_ALIGN = 256


def _slot_sizes(nbytes: Sequence[int], bucket_nbytes: int) -> tuple[int, ...]:
    """Of SLOTS slots and OVERSIZED, as far as buckets of these sizes need them."""
    ordinary = sorted(n for n in nbytes if n <= bucket_nbytes)
    large = max((n for n in nbytes if n > bucket_nbytes), default=0)
    found = [max(ordinary) if i < len(ordinary) else 0 for i in range(SLOTS)]
    return tuple(-(-n // _ALIGN) * _ALIGN for n in (*found, large))


class Packer:
    """Packs the buckets that this rank owns. Not thread-safe."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._items = plan.items_by_bucket()
        self._sizes = _slot_sizes([b.nbytes for b in plan.manifest.buckets if b.owner == rank], plan.bucket_nbytes)
        self._storage: torch.Tensor | None = None
        self._occupants: dict[int, int] = {}
        self._placed = 0
        self._tables: dict[int, tuple[list[Item], PackTable, ChecksumTable]] = {}
        self._stamps: dict[int, object] = {}
        """Bucket -> the stamp of the matrices whose addresses its table has."""

    @property
    def extra_nbytes(self) -> int:
        """Memory of the slots."""
        return 0 if self._storage is None else self._storage.numel()

    def begin(self) -> None:
        """A new update: every slot is free."""
        self._occupants = {}
        self._placed = 0

    def reserve(self, bucket: Bucket) -> tuple[int, int | None]:
        """(slot for `bucket`, the bucket in it that must have been acknowledged before it is written again)."""
        slot = OVERSIZED
        if bucket.nbytes <= self._plan.bucket_nbytes:
            slot = self._placed % SLOTS
            self._placed += 1
        before, self._occupants[slot] = self._occupants.get(slot), bucket.index
        return slot, before

    def memory(self, bucket: Bucket, slot: int, device: torch.device) -> torch.Tensor:
        """Flat uint8 memory of `bucket` in its slot, of its size. All slots are parts of one storage, so that it can
        be shared with another process at once."""
        if self._storage is None:
            self._storage = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        return self._storage.narrow(0, sum(self._sizes[:slot]), bucket.nbytes)

    def pack(self, bucket: Bucket, memory: torch.Tensor, matrices: Matrices) -> PackedBucket:
        """Fill `memory` with what `matrices` says is left to pack.

        Raises NonFiniteError naming the tensor if a value is NaN or Inf.
        """
        items, table, sums = self._table(bucket, memory.device)
        if table.remembers and self._stamps.get(bucket.index) == matrices.stamp is not None:
            flags = table.launch_again(memory)
        else:
            sources = [self._cast(i, m) for i, m in zip(items, matrices.make(), strict=True)]
            flags = quantize_pack(table, sources, memory)
            copied = any(i.action == "cast" for i in items)
            self._stamps[bucket.index] = None if copied else matrices.stamp
        checksums = as_bytes(checksum(sums, memory))
        if bool(flags.any()):
            name = items[int(flags.nonzero()[0])].meta.name
            raise NonFiniteError(f"{name} has NaN or Inf values", tensor=name, bucket=bucket.index)
        return PackedBucket(bucket, memory, checksums)

    def _cast(self, item: Item, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(getattr(torch, self._plan.layout.dtype)) if item.action == "cast" else matrix

    def _table(self, bucket: Bucket, device: torch.device) -> tuple[list[Item], PackTable, ChecksumTable]:
        """The item of each matrix that is packed here, and the bucket's tables."""
        if bucket.index not in self._tables:
            entries = {e.name: e for e in bucket.entries}
            rule, block = self._plan.rule or "sglang", self._plan.layout.block or (128, 128)
            pieces = [
                (item, self._pack_item(item, shard, entries))
                for item in self._items[bucket.index]
                for shard in self._pieces(item)
            ]
            spans = [(e.offset, e.nbytes) for e in entries.values()]
            self._tables[bucket.index] = (
                [item for item, _ in pieces],
                PackTable.build([piece for _, piece in pieces], rule=rule, block=block, device=device),
                ChecksumTable.build(spans, device=device),
            )
        return self._tables[bucket.index]

    def _pieces(self, item: Item) -> Sequence[Shard | None]:
        """See `Matrices.make`; None is the whole item."""
        if item.at_source:
            return ()
        return item.shards if item.in_bands(self._plan.layout.block) else (None,)

    def _pack_item(self, item: Item, shard: Shard | None, entries: dict[str, Entry]) -> PackItem:
        rows, cols = item.meta.matrix
        first, rows = (0, rows) if shard is None else (shard.dst_row, shard.rows)
        entry = entries[item.meta.name]
        offset = entry.offset + first * cols * ITEMSIZE[entry.dtype]
        block = self._plan.layout.block
        if item.action != "quantize" or block is None:
            return PackItem(rows, cols, entry.dtype, offset, None)
        scales = entries[item.meta.name + SCALE_SUFFIX]
        scale_offset = scales.offset + 4 * (first // block[0]) * scales.shape[1]
        return PackItem(rows, cols, item.meta.dtype, offset, scale_offset)
