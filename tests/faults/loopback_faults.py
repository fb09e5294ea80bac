"""The faults of the matrix as what happens to the calls of a server inside the process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fp8bridge import LoopbackServer
from fp8bridge.errors import BridgeError, ServerRefusedError, ServerTimeoutError
from fp8bridge.protocols import PackedBucket

from .lines import flipped
from .matrix import Cell

CALLS = {"begin": "begin", "commit": "commit", "release": "resume"}


class FaultyServer(LoopbackServer):
    """Does what `cell` says in the phase that it says, once; `refuse` again and again."""

    cell: Cell | None = None
    fired = 0
    _bucket = 0
    _held: PackedBucket | None = None

    def strike(self, cell: Cell, buckets: int) -> None:
        self.cell, self.fired, self._held = cell, 0, None
        if cell.in_bucket:
            self._bucket = {"first": 0, "middle": buckets // 2, "last": buckets - 1}[cell.place]
            if cell.fault == "reorder":
                self._bucket = min(self._bucket, buckets - 2)

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        if self._mine_now("begin") and self.cell.fault == "wrong hash":
            if self.cell.party == "trainer":
                manifest_hash = "0" * 32
            elif self.fired == 1:
                self._manifest = None
        self._call("begin", lambda: super(FaultyServer, self).begin(token, manifest_hash, lease_s=lease_s))

    def commit(self, token: str, version: str) -> float:
        return self._call("commit", lambda: super(FaultyServer, self).commit(token, version))

    def resume(self) -> None:
        self._call("resume", super().resume)

    def take(self, packed: PackedBucket) -> None:
        cell = self.cell
        if self._held is not None:
            held, self._held = self._held, None
            super().take(packed)
            super().take(held)
            return
        if cell is None or not cell.in_bucket or packed.bucket.index != self._bucket or self.fired:
            super().take(packed)
            return
        match cell.fault, cell.party:
            case "corrupt a byte", "trainer":
                self.fired += 1
                memory = packed.memory.clone()
                memory[memory.numel() // 2] ^= 1
                super().take(replace(packed, memory=memory))
            case "wrong hash", "trainer":
                self.fired += 1
                super().take(replace(packed, checksums=flipped(packed.checksums, 0)))
            case "drop", "trainer":
                self.fired += 1
            case "reorder", "trainer":
                self.fired += 1
                self._held = packed
            case _:
                self._strike(lambda: super(FaultyServer, self).take(packed))

    def _mine_now(self, call: str) -> bool:
        cell = self.cell
        if cell is None or cell.in_bucket or CALLS[cell.phase] != call:
            return False
        if self.fired and cell.fault not in ("refuse", "wrong hash"):
            return False
        if cell.fault == "wrong hash":
            self.fired += 1
        return True

    def _call(self, call: str, work: Callable[[], Any]) -> Any:
        if self.cell is None or self.cell.fault == "wrong hash" or not self._mine_now(call):
            return work()
        return self._strike(work)

    def _strike(self, work: Callable[[], Any]) -> Any:
        self.fired += 1
        late = ServerTimeoutError(f"{self.name} did not answer", server=self.name)
        match self.cell.fault, self.cell.party:
            case "kill", _:
                self._dead = True
            case "drop", "trainer":
                raise late
            case "drop", "server":
                work()
                raise late
            case "duplicate", _:
                value = work()
                with contextlib.suppress(BridgeError):  # the second answer is nobody's
                    work()
                return value
            case "refuse", "server":
                raise ServerRefusedError(f"{self.name} refused: not today", answer="not today", server=self.name)
            case "refuse", "trainer":
                signal.raise_signal(signal.SIGINT)
        return work()
