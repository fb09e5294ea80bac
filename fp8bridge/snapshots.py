"""The last versions, as packed buckets in host memory: for rollback, and for servers that come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .errors import VersionError
from .protocols import PackedBucket


class Snapshots:
    """What this rank sent of the last `keep` committed versions. Not thread-safe.

    Memory: `keep` times the bytes of this rank's buckets, and once more while an update runs; pinned where the
    weights are on a CUDA device. It is taken once and used again for later versions.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._versions: dict[int, list[PackedBucket]] = {}
        self._arriving: tuple[int, list[PackedBucket]] | None = None
        self._free: dict[int, list[torch.Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """Committed ones that can be sent again, the oldest first."""
        return list(self._versions)

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        held = [p.memory for packed in self._versions.values() for p in packed]
        held += [p.memory for p in self._arriving[1]] if self._arriving else []
        return sum(m.numel() for m in held) + sum(m.numel() for free in self._free.values() for m in free)

    def begin(self, version: int) -> None:
        """A new version is about to be sent."""
        self.abort()
        if self._keep:
            self._arriving = (version, [])

    def add(self, packed: PackedBucket) -> None:
        """Copy a bucket of the version that was begun; complete when it returns."""
        if self._arriving is None:
            return
        free = self._free.get(packed.bucket.index)
        pinned = packed.memory.device.type == "cuda"
        memory = free.pop() if free else torch.empty(packed.bucket.nbytes, dtype=torch.uint8, pin_memory=pinned)
        memory.copy_(packed.memory)
        self._arriving[1].append(replace(packed, memory=memory))

    def commit(self) -> None:
        """Keep the version that was begun, and let the oldest go."""
        if self._arriving is None:
            return
        version, buckets = self._arriving
        self._arriving = None
        self._versions[version] = buckets
        while len(self._versions) > self._keep:
            self._release(self._versions.pop(next(iter(self._versions))))

    def abort(self) -> None:
        """Drop the version that was begun. Harmless when there is none."""
        if self._arriving is not None:
            self._release(self._arriving[1])
            self._arriving = None

    def buckets(self, version: int) -> Iterator[PackedBucket]:
        """In the order of sending; the memory stays ours. Raises VersionError if the version is not kept."""
        if version not in self._versions:
            raise VersionError(
                f"version {version} is not kept (kept: {self.versions or 'none'}); BridgeConfig.keep_last says how "
                "many are",
                version=version,
            )
        return iter(self._versions[version])

    def _release(self, buckets: list[PackedBucket]) -> None:
        for packed in buckets:
            self._free.setdefault(packed.bucket.index, []).append(packed.memory)
