"""The receiving side's memory of an update: named tensors, a staged copy, and an atomic switch.

Nothing that arrives touches `tensors` before `commit`; `abort` drops it. A server therefore holds
either the whole old version or the whole new one. The price is memory for a second copy while an
update runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from .errors import ChecksumError, CommitError, ServerMismatchError, WireError
from .kernels import ChecksumTable, checksum
from .layout import ServerLayout
from .plan import Bucket, Manifest


class StagedWeights:
    """`tensors` by wire name (codes, scales and the rest), replaced as a whole at commit.

    The caller owns `tensors` and the objects in it stay valid after a commit (the old version's
    tensors are released by it, not overwritten). Not thread-safe: one update at a time.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], layout: ServerLayout) -> None:
        self.tensors = tensors
        self.layout = layout
        self._manifest: Manifest | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._received: set[int] = set()
        self._tables: dict[int, tuple[Bucket, ChecksumTable]] = {}

    def differences(self, manifest: Manifest) -> list[str]:
        """What keeps this manifest from being a full update of these tensors; empty if nothing."""
        found = [f"layout {d}" for d in manifest.layout.differences(self.layout)]
        theirs = manifest.entries()
        for name, mine in self.tensors.items():
            entry = theirs.get(name)
            dtype = str(mine.dtype).removeprefix("torch.")
            if entry is None:
                found.append(f"{name} {dtype} {list(mine.shape)} is on the server and not in the update")
            elif (entry.dtype, entry.shape) != (dtype, tuple(mine.shape)):
                found.append(
                    f"{name} is {dtype} {list(mine.shape)} on the server, "
                    f"{entry.dtype} {list(entry.shape)} in the update"
                )
        strangers = [e for name, e in theirs.items() if name not in self.tensors]
        return found + [f"{e.name} {e.dtype} {list(e.shape)} is not on the server" for e in strangers]

    def begin(self, manifest: Manifest) -> None:
        """Expect every bucket of `manifest`. Raises ServerMismatchError, changing nothing."""
        if found := self.differences(manifest):
            raise ServerMismatchError(describe_differences(found))
        self.abort()
        self._manifest = manifest

    def bucket(self, index: int) -> Bucket:
        if self._manifest is None:
            raise WireError("a bucket outside of an update", bucket=index)
        if not 0 <= index < len(self._manifest.buckets):
            raise WireError(f"bucket {index} of {len(self._manifest.buckets)}", bucket=index)
        return self._manifest.buckets[index]

    def stage(self, index: int, payload: torch.Tensor, checksums: bytes) -> None:
        """Keep one bucket. `payload` is flat uint8 and becomes ours: the caller may not write it again."""
        self.check(index, payload, checksums)
        self.keep(index, payload)

    def check(self, index: int, payload: torch.Tensor, checksums: bytes) -> None:
        """Changes nothing; several threads may check a bucket each.

        Raises WireError (twice, wrong size) and ChecksumError naming the tensors that changed.
        """
        bucket = self.bucket(index)
        if index in self._received:
            raise WireError(f"bucket {index} came twice", bucket=index)
        if payload.numel() != bucket.nbytes or len(checksums) != 8 * len(bucket.entries):
            raise WireError(
                f"bucket {index} has {payload.numel()} bytes and {len(checksums) / 8:g} checksums, the plan says "
                f"{bucket.nbytes} and {len(bucket.entries)}",
                bucket=index,
            )
        found = self._checksums(bucket, payload)
        if found != checksums:
            pairs = zip(bucket.entries, unsigned(found), unsigned(checksums), strict=True)
            wrong = [e.name for e, mine, theirs in pairs if mine != theirs]
            raise ChecksumError(
                f"bucket {index} changed on the way: {', '.join(wrong[:5])}" + (" ..." if len(wrong) > 5 else ""),
                bucket=index,
                tensor=wrong[0],
            )

    def keep(self, index: int, payload: torch.Tensor) -> None:
        """After `check`; by one thread at a time."""
        self._staged |= unpack(self.bucket(index), payload)
        self._received.add(index)

    def _checksums(self, bucket: Bucket, payload: torch.Tensor) -> bytes:
        return as_bytes(checksum(self._table(bucket, payload.device), payload))

    def _table(self, bucket: Bucket, device: torch.device) -> ChecksumTable:
        """Kept while the same manifest comes: buckets are the same objects then."""
        known = self._tables.get(bucket.index)
        if known is None or known[0] is not bucket or known[1].device != device:
            table = ChecksumTable.build([(e.offset, e.nbytes) for e in bucket.entries], device=device)
            self._tables[bucket.index] = known = (bucket, table)
        return known[1]

    @property
    def largest_bucket_nbytes(self) -> int:
        """Bound of any payload of the running update; 0 outside of one."""
        return max((b.nbytes for b in self._manifest.buckets), default=0) if self._manifest else 0

    @property
    def longest_list(self) -> int:
        """Of the buckets of the running update, and of the entries of each."""
        buckets = self._manifest.buckets if self._manifest else ()
        return max((len(buckets), *(len(b.entries) for b in buckets)))

    @property
    def missing(self) -> list[int]:
        """Buckets of the running update that have not arrived."""
        if self._manifest is None:
            return []
        return [b.index for b in self._manifest.buckets if b.index not in self._received]

    def commit(self) -> None:
        """Switch to the staged tensors. Raises CommitError, changing nothing, if any is missing."""
        if self._manifest is None:
            raise CommitError("nothing to commit: no update was begun")
        if self.missing:
            raise CommitError(f"cannot commit: buckets {self.missing[:8]} have not arrived")
        self.tensors = {name: self._staged[name] for name in self.tensors}
        self.abort()

    def abort(self) -> None:
        """Drop whatever was staged; the current tensors stay as they are."""
        self._manifest = None
        self._staged = {}
        self._received = set()

    def checksums(self) -> dict[str, int]:
        """Checksum of the bytes of every current tensor (uint64), the value senders compute."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}


class LoadingWeights(StagedWeights):
    """For any engine: every bucket that arrived whole goes to `load_weights([(name, tensor), ...])` at once.

    The tensors are views of the bucket's memory and valid during the call. Nothing is kept, so an update
    that ends early leaves the engine with a part of it: `begin`, pull, and on an error send a whole one again.
    """

    def __init__(self, load_weights: Callable[[list[tuple[str, torch.Tensor]]], object], layout: ServerLayout) -> None:
        super().__init__({}, layout)
        self._load_weights = load_weights

    def differences(self, manifest: Manifest) -> list[str]:
        """Only of the layout: the engine does not tell its tensors."""
        return [f"layout {d}" for d in manifest.layout.differences(self.layout)]

    def keep(self, index: int, payload: torch.Tensor) -> None:
        super().keep(index, payload)
        self._load_weights(list(self._staged.items()))
        self._staged = {}


def unpack(bucket: Bucket, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views into `memory` (flat uint8, this bucket's bytes), by name; no copy."""
    return {
        e.name: memory[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).reshape(e.shape)
        for e in bucket.entries
    }


def bucket_checksums(bucket: Bucket, memory: torch.Tensor) -> bytes:
    """A little-endian uint64 for each entry of the bucket, of its bytes in `memory` (flat uint8)."""
    table = ChecksumTable.build([(e.offset, e.nbytes) for e in bucket.entries], device=memory.device)
    return as_bytes(checksum(table, memory))


def tensor_checksum(tensor: torch.Tensor) -> int:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return unsigned(as_bytes(checksum(ChecksumTable.build([(0, raw.numel())], device=raw.device), raw)))[0]


def as_bytes(values: torch.Tensor) -> bytes:
    """int64 values as they travel: 8 little-endian bytes each."""
    little: bytes = values.cpu().numpy().astype("<i8", copy=False).tobytes()
    return little


def unsigned(checksums: bytes) -> tuple[int, ...]:
    """What `as_bytes` made, as integers in [0, 2^64)."""
    return struct.unpack(f"<{len(checksums) // 8}Q", checksums)


def describe_differences(found: list[str]) -> str:
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{len(found)} differences between the update and the server: {'; '.join(found[:5])}{more}"
