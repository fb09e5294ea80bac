"""What an update did and where its time went. Standard library only; `exporters.py` writes it elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

STAGES = ("check", "begin", "open", "gather", "pack", "wire", "commit")
"""check: NaN/Inf scan. begin: pause and open sessions. open: servers connect. gather: shards to
senders. pack: quantize and copy into buckets. wire: handing buckets over and waiting for acknowledgements (what
gather and pack did not hide). commit: switch, flush, resume."""

SERVER_STAGES = ("load", "commit", "paused")
"""load: the server's own checking and loading, where it tells. commit: its answer to the switch. paused: how
long it did not generate."""


class Stopwatch:
    """Seconds per stage on one rank, and when each stage ran.

    ranges: what marks a stage for a profiler, such as NVTX; called with the stage's name.
    """

    def __init__(self, ranges: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.spans: list[tuple[str, float, float]] = []
        """(stage, start, end), in seconds of `time.perf_counter`."""
        self.common = self._start = time.perf_counter()
        self.common_at = time.time()
        """`common`, in seconds since 1970."""
        self._ranges = ranges or (lambda name: nullcontext())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._ranges(name):
                yield
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - start
            self.spans.append((name, start, end))

    def meet(self) -> None:
        """All ranks have just left a collective: traces of ranks whose clocks differ are joined at this moment."""
        self.common, self.common_at = time.perf_counter(), time.time()

    def trace(self) -> list[tuple[str, float, float]]:
        """(stage, start, seconds); the start counts from `meet`, so the first stages are before 0."""
        return [(name, start - self.common, end - start) for name, start, end in self.spans]

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the trainer ranks, or over the servers."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class ServerReport:
    """A server after the update: its state, the version it holds for us, why it is fenced, and seconds of
    the last update it committed, by `SERVER_STAGES`."""

    state: str
    version: int | None
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    load_way: str = ""
    """How it loaded the last version, where it tells: `replay` (copies) or `load_weights` (the model's own)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What every update of one plan has in common."""

    nbytes: int
    """Bytes to one server."""
    nbytes_gathered: int
    """Bytes between trainer ranks."""
    buckets: int
    rule: str | None
    plan_hash: str
    plan_s: float
    """Seconds that describing and planning took, once, when the bridge connected."""
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport(PlanFacts):
    """The same on every rank. Seconds are wall time; stages of one rank overlap the wire."""

    version: int
    seconds: float
    stages: dict[str, Spread]
    """Of `STAGES`, over the trainer ranks."""
    paused_s: float
    """How long the servers did not generate: from the first pause to the last resume."""
    servers: dict[str, ServerReport]
    extra_nbytes: Spread
    """Most memory held by the bridge on a rank, beside the parameters."""
    traces: tuple[list[tuple[str, float, float]], ...] = field(default=(), repr=False)
    """`Stopwatch.trace` of each rank, where a trace was asked for (`BridgeConfig.trace_path`)."""
    met_at: float = 0.0
    """The ranks' common moment that traces count from, on rank 0's clock: seconds since 1970."""

    @property
    def server_stages(self) -> dict[str, Spread]:
        """Of `SERVER_STAGES`, over the servers that hold this version and tell."""
        told: dict[str, list[float]] = {}
        for server in self._holders:
            for name, seconds in server.seconds.items():
                told.setdefault(name, []).append(seconds)
        return {name: Spread.of(values) for name, values in told.items()}

    @property
    def nbytes_sent(self) -> int:
        """Bytes to all servers that hold the version."""
        return self.nbytes * len(self._holders)

    @property
    def gbytes_per_s(self) -> float:
        """Bytes to all servers that hold the version, over the whole update's seconds."""
        return self.nbytes_sent / self.seconds / 1e9

    @property
    def stage_gbytes_per_s(self) -> dict[str, float]:
        """gather: bytes between ranks, pack: bytes into buckets, send: bytes to all servers over the three
        stages that overlap (gather, pack, wire). By the slowest rank's seconds; a stage that took none is left out."""
        slowest = {name: spread.max for name, spread in self.stages.items()}
        moved = {
            "gather": (self.nbytes_gathered, slowest["gather"]),
            "pack": (self.nbytes, slowest["pack"]),
            "send": (self.nbytes_sent, slowest["gather"] + slowest["pack"] + slowest["wire"]),
        }
        return {name: nbytes / seconds / 1e9 for name, (nbytes, seconds) in moved.items() if seconds > 0}

    @property
    def fenced(self) -> dict[str, str]:
        """Server -> why it did not get this version."""
        return {name: s.reason for name, s in self.servers.items() if s.state == "fenced"}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a logger: every field but the traces, and the figures made of them."""
        data = asdict(self)
        del data["traces"]
        return data | {
            "server_stages": {name: asdict(spread) for name, spread in self.server_stages.items()},
            "nbytes_sent": self.nbytes_sent,
            "gbytes_per_s": self.gbytes_per_s,
            "stage_gbytes_per_s": self.stage_gbytes_per_s,
            "fenced": self.fenced,
        }

    @property
    def _holders(self) -> list[ServerReport]:
        return [s for s in self.servers.values() if s.version == self.version]
