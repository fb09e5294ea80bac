"""The faults of the matrix as what happens on a line to an embedded server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from fp8bridge.wire import Ack, BucketHeader, Hello, Message

from .lines import Answer, Fault, flipped, refusal, said
from .matrix import Cell

PATHS = {"begin": "/begin_weight_update", "commit": "/end_weight_update", "release": "/continue_generation"}


def in_phase(cell: Cell) -> Callable[[str, bytes], bool]:
    return lambda path, body: path == PATHS[cell.phase]


class Strike(Fault):
    """Calls `deed` when the request that is wanted comes by, once."""

    def __init__(self, wanted: Callable[[str, bytes], bool], deed: Callable[[], None]) -> None:
        super().__init__()
        self._wanted, self._deed = wanted, deed

    def request(self, path: str, body: bytes) -> list[bytes] | Answer:
        if not self.fired and self._wanted(path, body):
            self.fired += 1
            self._deed()
        return [body]


class Control(Fault):
    """A bad request or answer of one kind. A refusal comes again and again, the others once.

    wanted: whether a request is the one, by its path and body; by default that of the cell's phase.
    """

    def __init__(self, cell: Cell, wanted: Callable[[str, bytes], bool] | None = None) -> None:
        super().__init__()
        self._cell = cell
        self._wanted = wanted or in_phase(cell)
        self._again = cell.fault in ("refuse", "wrong hash") and wanted is None
        self._answer_to = ""

    def request(self, path: str, body: bytes) -> list[bytes] | Answer:
        if (self.fired and not self._again) or not self._wanted(path, body):
            return [body]
        self._answer_to = path
        self.fired += 1
        if self._cell.party == "trainer":
            return self._bad_request(body)
        return refusal("not today") if self._cell.fault == "refuse" else [body]

    def response(self, path: str, answer: Answer) -> list[Answer]:
        if path != self._answer_to or self._cell.party == "trainer":
            return [answer]
        self._answer_to = ""
        match self._cell.fault:
            case "drop":
                return []
            case "duplicate":
                return [answer, answer]
            case "corrupt a byte":
                return [Answer(answer.status, flipped(answer.body, 0))]
            case "wrong version":
                told = json.loads(answer.body) | {"weight_version": "77777", "new_version": "77777"}
                return [Answer(answer.status, json.dumps(told).encode())]
        return [answer]

    def _bad_request(self, body: bytes) -> list[bytes]:
        match self._cell.fault:
            case "drop":
                return []
            case "duplicate":
                return [body, body]
            case "corrupt a byte":
                at = body.find(b'"session":')
                return [flipped(body, 0 if at < 0 else at + 20)]
            case "wrong version":
                name = "weight_version" if b"weight_version" in body else "new_version"
                return [json.dumps(json.loads(body) | {name: "77777"}).encode()]
            case "wrong hash":
                return [json.dumps(json.loads(body) | {"manifest_hash": "0" * 32}).encode()]
        raise AssertionError(self._cell)


class Claims(Fault):
    """The server says that it holds a version that is far ahead."""

    def response(self, path: str, answer: Answer) -> list[Answer]:
        if path != "/model_info":
            return [answer]
        self.fired += 1
        return [Answer(200, json.dumps(json.loads(answer.body) | {"weight_version": "1000000"}).encode())]


class AnotherHello(Fault):
    """The server comes with another plan's hash."""

    payload = True

    def to_trainer(self, message: Message, frames: list[bytes]) -> list[list[bytes]]:
        if not isinstance(message, Hello):
            return [frames]
        self.fired += 1
        return [said(replace(message, manifest_hash="0" * 32))]


class Payload(Fault):
    """A bad bucket, or a bad acknowledgement of one; `buckets`: how many come through this line."""

    payload = True

    def __init__(self, cell: Cell, buckets: int) -> None:
        super().__init__()
        self._cell = cell
        self._index = {"first": 0, "middle": buckets // 2, "last": buckets - 1}[cell.place]
        if cell.fault == "reorder":
            self._index = min(self._index, buckets - 2)
        self._held: list[list[bytes]] = []

    def to_server(self, message: Message, frames: list[bytes]) -> list[list[bytes]]:
        if self._cell.party == "trainer" and isinstance(message, BucketHeader):
            return self._change(message, frames)
        return [frames]

    def to_trainer(self, message: Message, frames: list[bytes]) -> list[list[bytes]]:
        if self._cell.party == "server" and isinstance(message, Ack):
            return self._change(message, frames)
        return [frames]

    def _change(self, message: BucketHeader | Ack, frames: list[bytes]) -> list[list[bytes]]:
        if self._held:
            held, self._held = self._held, []
            return [frames, *held]
        if message.index != self._index or self.fired:
            return [frames]
        self.fired += 1
        match self._cell.fault:
            case "corrupt a byte":
                return [[*frames[:-1], flipped(frames[-1], len(frames[-1]) // 2)]]
            case "drop":
                return []
            case "duplicate":
                return [frames, frames]
            case "reorder":
                self._held = [frames]
                return []
            case "wrong hash":
                assert isinstance(message, BucketHeader)
                return [said(replace(message, checksums=bytes(len(message.checksums)))) + frames[1:]]
            case "refuse":
                return [said(Ack(message.index, False, "not today"))]
        raise AssertionError(self._cell)


def on_the_line(cell: Cell, buckets: int) -> Fault:
    """What a line does for this cell; the rest is done to processes."""
    if cell.in_bucket:
        return Payload(cell, buckets)
    if (cell.fault, cell.phase, cell.party) == ("wrong hash", "begin", "server"):
        return AnotherHello()
    return Control(cell)
