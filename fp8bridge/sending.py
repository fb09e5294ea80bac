"""One trainer rank's side of an update: sockets, then its buckets, two in flight. Collective throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .config import BridgeConfig
from .errors import BridgeError, RankError, TransportError, error_from_dict
from .gather import Gather
from .pack import Packer
from .plan import Bucket, Plan
from .protocols import PackedBucket, Transport
from .ranks import Ranks, agree
from .report import Stopwatch
from .session import Update
from .snapshots import Snapshots
from .staging import unsigned

_IN_FLIGHT = 2
"""Kept buckets on their way at a time."""

Progress = Callable[[int, int], None]
"""Called with (buckets packed on this rank, buckets of this rank)."""


class Sender:
    """Owns the gather and pack buffers of this rank. Every rank makes every call, in the same order.

    failures: servers that any rank lost during the last `send` or `resend`.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        transport: Transport,
        gather: Gather,
        snapshots: Snapshots,
        config: BridgeConfig,
    ) -> None:
        self._sent: dict[int, bytes] = {}
        self.failures: dict[str, BridgeError] = {}
        self._plan = plan
        self._ranks = ranks
        self._transport = transport
        self._gather = gather
        self._packer = Packer(plan, ranks.rank)
        self._snapshots = snapshots
        self._config = config

    @property
    def extra_nbytes(self) -> int:
        """Memory beside the parameters: gather buffers, bucket slots and kept versions."""
        return self._gather.extra_nbytes + self._packer.extra_nbytes + self._snapshots.nbytes

    def open(self, update: Update | None, watch: Stopwatch) -> None:
        """Sessions on all servers, sockets on all senders, and the two connected. `update`: on rank 0."""
        with watch.stage("begin"):
            tokens = agree(self._ranks, lambda: update.begin() if update else None)[0]
        with watch.stage("open"):
            rank, manifest = self._ranks.rank, self._plan.manifest
            mine = [b.index for b in manifest.buckets if b.owner == rank]
            addresses = agree(self._ranks, lambda: self._transport.open(tokens, manifest, mine))
            used = [addresses[0], *(addresses[o] for o in self._plan.owners if o != 0)]

            def connect() -> dict[str, Any]:
                if update is not None:
                    update.receive(used)
                if update is not None or self._transport.all_connect:
                    gone = update.gone if update is not None else lambda name: None
                    self._transport.connect(timeout_s=self._config.open_timeout_s, gone=gone)
                return {name: err.to_dict() for name, err in self._transport.failures.items()}

            def settle() -> list[str]:
                if update is None:
                    return []
                update.fail(failures)
                return [m.name for m in update.updating]

            failures = self._lost(agree(self._ranks, connect))
            live = agree(self._ranks, settle)[0]
            self._transport.drop([n for n in tokens if n not in live], "it did not connect to every sender")

    def send(self, version: int, watch: Stopwatch, on_progress: Progress | None) -> None:
        """All rounds: gather, pack, send. Every rank learns of any rank's error."""
        self._snapshots.begin(version)
        self._share(lambda: self._send_mine(watch, on_progress))

    def resend(self, version: int, watch: Stopwatch, on_progress: Progress | None) -> None:
        """The buckets of a kept version, as they were. Raises VersionError on a rank that has not kept it."""
        self._share(lambda: self._send_kept(self._snapshots.buckets(version), watch, on_progress))

    def close(self, reason: str = "") -> None:
        """End the update; with a reason, servers that still wait are told to give up."""
        self._transport.close(reason)

    def _share(self, work: Callable[[], dict[str, Any]]) -> None:
        self.failures = self._lost(agree(self._ranks, work))

    @staticmethod
    def _lost(parts: Sequence[dict[str, Any]]) -> dict[str, BridgeError]:
        """What each rank reports of servers, as errors by server."""
        return {name: error_from_dict(data) for part in parts for name, data in part.items()}

    def sent_checksums(self) -> dict[str, int]:
        """Wire name -> checksum (uint64) of what this rank sent last."""
        buckets = self._plan.manifest.buckets
        return {
            entry.name: value
            for index, checksums in self._sent.items()
            for entry, value in zip(buckets[index].entries, unsigned(checksums), strict=True)
        }

    def _send_mine(self, watch: Stopwatch, on_progress: Progress | None) -> dict[str, Any]:
        error: Exception | None = None
        in_flight: list[int] = []
        self._packer.begin()
        self._sent = {}
        for round_index in range(len(self._plan.rounds)):
            # After an error the rounds go on: the other ranks still count on this one's messages.
            try:
                bucket, memory = self._gather.bucket(round_index), None
                if bucket is not None:
                    memory = self._place(bucket, in_flight, watch)
                with watch.stage("gather"):
                    matrices = self._gather.round(round_index, memory)
                if bucket is None or memory is None or error is not None:
                    continue
                with watch.stage("pack"):
                    packed = self._packer.pack(bucket, memory, matrices)
                    self._snapshots.add(packed)
                self._send_one(packed, watch, on_progress)
                in_flight.append(bucket.index)
            except RankError:
                raise
            except Exception as err:  # noqa: BLE001 - raised below, when no rank waits for this one any more
                error = error or err
        if error is not None:
            raise error
        return self._acknowledged(in_flight, watch)

    def _send_kept(
        self, buckets: Iterator[PackedBucket], watch: Stopwatch, on_progress: Progress | None
    ) -> dict[str, Any]:
        in_flight: list[int] = []
        self._packer.begin()
        self._sent = {}
        for packed in buckets:
            if len(in_flight) >= _IN_FLIGHT:
                self._wait(in_flight.pop(0), watch)
            if self._transport.from_device and packed.memory.device != self._gather.device:
                memory = self._place(packed.bucket, in_flight, watch)
                memory.copy_(packed.memory, non_blocking=True)
                packed = replace(packed, memory=memory)
            self._send_one(packed, watch, on_progress)
            in_flight.append(packed.bucket.index)
        return self._acknowledged(in_flight, watch)

    def _place(self, bucket: Bucket, in_flight: list[int], watch: Stopwatch) -> torch.Tensor:
        """Memory for a bucket, once what was in it has been acknowledged."""
        slot, before = self._packer.reserve(bucket)
        if before is not None and before in in_flight:
            self._wait(before, watch)
            in_flight.remove(before)
        return self._packer.memory(bucket, slot, self._gather.device)

    def _send_one(self, packed: PackedBucket, watch: Stopwatch, on_progress: Progress | None) -> None:
        with watch.stage("wire"):
            self._transport.send(packed)
        self._sent[packed.bucket.index] = packed.checksums
        if on_progress:
            on_progress(len(self._sent), sum(b.owner == self._ranks.rank for b in self._plan.manifest.buckets))

    def _wait(self, index: int, watch: Stopwatch) -> None:
        with watch.stage("wire"):
            self._transport.wait(index)
        limit = self._config.update_timeout_s
        if limit is not None and watch.total > limit:
            raise TransportError(
                f"the update is not done after {watch.total:.1f} s (update_timeout_s is {limit:g}); the last bucket "
                f"acknowledged is {index}",
                bucket=index,
            )

    def _acknowledged(self, in_flight: list[int], watch: Stopwatch) -> dict[str, Any]:
        for index in in_flight:
            self._wait(index, watch)
        return {name: err.to_dict() for name, err in self._transport.failures.items()}
