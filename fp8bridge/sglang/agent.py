"""The trainer's side of `loader`: calls it in every TP rank of a server and hears what each one says.

A loader that raises would end SGLang's scheduler, and its return value is dropped. So it never raises,
and answers on a socket of ours whose address comes with the call.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from ..errors import ServerRefusedError, ServerTimeoutError, WireError
from ..wire import MAX_HEADER_NBYTES
from . import payload
from .client import SglangClient

LOADER = "fp8bridge.sglang.loader.load"
_GRACE_S = 10.0
"""How long an answer may come after the HTTP reply."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the loader of one TP rank answers. `call`: the secret of the call that it answers."""

    call: str
    rank: int
    ok: bool
    message: str
    data: dict[str, Any]

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([self.call, self.rank, self.ok, self.message, self.data])
        return packed

    @classmethod
    def decode(cls, frame: bytes) -> Report:
        try:
            fields = msgpack.unpackb(frame)
            if [type(f) for f in fields] != [str, int, bool, str, dict]:
                raise ValueError("fields of other types")
        except (ValueError, TypeError, msgpack.UnpackException) as err:
            raise WireError(f"an answer that is no report of fp8bridge's loader: {err}") from err
        return cls(*fields)


class LoaderAgent:
    """`host`: address of this trainer that the server can reach."""

    def __init__(self, client: SglangClient, tp_size: int, host: str) -> None:
        self._client = client
        self._tp_size = tp_size
        self._host = host

    def call(self, phase: str, data: dict[str, Any], *, timeout_s: float | None) -> list[Report]:
        """One report of each TP rank, by rank. Raises ServerError with the first loader's own words."""
        context = zmq.Context()
        socket = context.socket(zmq.PULL)
        try:
            host = f"[{self._host}]" if ":" in self._host else self._host
            socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_NBYTES)
            port = socket.bind_to_random_port(f"tcp://{host}")
            address = f"tcp://{host}:{port}"
            secret = secrets.token_hex(16)
            calls = [msgpack.packb([phase, rank, address, secret, data]) for rank in range(self._tp_size)]
            self._client.update_from_tensor([payload.pack(c) for c in calls], LOADER, timeout_s=timeout_s)
            return self._collect(socket, phase, secret)
        finally:
            socket.close(linger=0)
            context.term()

    def _collect(self, socket: zmq.Socket[bytes], phase: str, secret: str) -> list[Report]:
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + _GRACE_S
        while len(reports) < self._tp_size:
            if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                missing = [r for r in range(self._tp_size) if r not in reports]
                raise ServerTimeoutError(
                    f"{self._client.name}: the loader did not report on {phase!r} from TP ranks {missing}; can the "
                    f"server reach {self._host}? (BridgeConfig.host)",
                    server=self._client.name,
                )
            report = self._read(socket.recv())
            if report is not None and secrets.compare_digest(report.call, secret):
                reports[report.rank] = report
        failed = next((r for r in reports.values() if not r.ok), None)
        if failed is not None:
            raise ServerRefusedError(
                f"{self._client.name} (TP rank {failed.rank}) refused {phase!r}: {failed.message}",
                status=200,
                answer=failed.message,
                server=self._client.name,
            )
        return [reports[r] for r in sorted(reports)]

    def _read(self, frame: bytes) -> Report | None:
        """None for what some stranger sent to this port."""
        try:
            report = Report.decode(frame)
        except WireError:
            return None
        return report if 0 <= report.rank < self._tp_size else None
