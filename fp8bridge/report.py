"""What an update did and where its time went. Standard library only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("check", "begin", "open", "gather", "pack", "wire", "commit")
"""check: NaN/Inf scan. begin: pause and open sessions. open: servers connect. gather: shards to
senders. pack: quantize and copy into buckets. wire: waiting for acknowledgements (what gather and
pack did not hide). commit: switch, flush, resume."""


class Stopwatch:
    """Seconds per stage on one rank."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the trainer ranks."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class ServerReport:
    """A server after the update: its state, the version it holds for us, why it is fenced."""

    state: str
    version: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The same on every rank. Seconds are wall time; stages of one rank overlap the wire."""

    version: int
    seconds: float
    stages: dict[str, Spread]
    paused_s: float
    """How long the servers did not generate."""
    nbytes: int
    """Bytes to one server."""
    nbytes_gathered: int
    buckets: int
    rule: str | None
    plan_hash: str
    servers: dict[str, ServerReport]
    fallbacks: tuple[str, ...]
    extra_nbytes: Spread
    """Memory held by the bridge on a rank, beside the parameters."""

    @property
    def gbytes_per_s(self) -> float:
        """Bytes to all servers that hold the version, over the whole update's seconds."""
        holders = sum(s.version == self.version for s in self.servers.values())
        return self.nbytes * holders / self.seconds / 1e9

    @property
    def fenced(self) -> dict[str, str]:
        """Server -> why it did not get this version."""
        return {name: s.reason for name, s in self.servers.items() if s.state == "fenced"}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a logger."""
        return asdict(self) | {"gbytes_per_s": self.gbytes_per_s, "fenced": self.fenced}
