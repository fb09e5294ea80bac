"""What the fuzzers feed, and what must hold whatever comes: hypothesis in test_fuzz.py, coverage-guided in
scripts/fuzz.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import zmq

from fp8bridge import BridgeConfig
from fp8bridge.errors import BridgeError, TransportError, WireError
from fp8bridge.plan import Manifest
from fp8bridge.planner import make_plan
from fp8bridge.protocols import PackedBucket
from fp8bridge.receiver import Receiver
from fp8bridge.rollout import bodies
from fp8bridge.sglang.agent import Report
from fp8bridge.staging import StagedWeights, bucket_checksums
from fp8bridge.transport.zmq import ZmqTransport
from fp8bridge.wire import Ack, BucketHeader, Hello, Welcome, decode, encode, max_header_nbytes

from .support import FP8_LAYOUT, SplitSource, expected_wire, tiny_model

MODEL = tiny_model(layers=1, hidden=64, ffn=72)
MANIFEST = make_plan([SplitSource(MODEL, 0, 1).describe()], FP8_LAYOUT, BridgeConfig(bucket_nbytes=9_000)).manifest
OLD = expected_wire(tiny_model(layers=1, hidden=64, ffn=72, seed=8))
NEW = expected_wire(MODEL)

Stream = list[list[bytes]]
"""Messages of a sender, each its frames."""


def good_stream() -> Stream:
    """What an honest sender says in an update."""
    found = [[encode(Welcome(tuple(b.index for b in MANIFEST.buckets), 1))]]
    for bucket in MANIFEST.buckets:
        parts = [NEW[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries]
        memory = torch.cat(parts)
        header = BucketHeader(bucket.index, bucket.nbytes, bucket_checksums(bucket, memory))
        found.append([encode(header), memory.numpy().tobytes()])
    return found


GOOD = good_stream()
SERVER_SAYS = [
    [b"a", encode(Hello("token", MANIFEST.hash, "server", 2, 0))],
    *([b"a", encode(Ack(bucket.index, True, ""))] for bucket in MANIFEST.buckets),
]
"""What an honest server says in an update, behind its identity."""
PACKED = [
    PackedBucket(bucket, torch.frombuffer(bytearray(payload), dtype=torch.uint8), decode(header).checksums)
    for bucket, (header, payload) in zip(MANIFEST.buckets, GOOD[1:], strict=True)
]
LIMIT = max(max_header_nbytes(20), *(b.nbytes for b in MANIFEST.buckets))
"""libzmq hands on no longer frame."""


class ScriptedSocket:
    """A DEALER whose sender says what the script says, and then nothing."""

    def __init__(self, stream: Sequence[Sequence[bytes]]) -> None:
        self._frames = [(frame, i < len(message) - 1) for message in stream for i, frame in enumerate(message)]
        self._more = False
        self.sent: list[bytes] = []

    @property
    def empty(self) -> bool:
        return not self._frames

    def poll(self, timeout: int = 0) -> int:
        return 0 if self.empty else zmq.POLLIN

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if self.empty:
            raise TransportError("silence")
        frame, self._more = self._frames.pop(0)
        return frame if copy else zmq.Frame(frame)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.RCVMORE
        return int(self._more)

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.sent.append(frame)


class ScriptedReceiver(Receiver):
    """A receiver of one sender, without a network."""

    def take(self, socket: ScriptedSocket) -> None:
        self._header_nbytes = max_header_nbytes(self._weights.longest_list)
        answer = decode(socket.recv(), self._header_nbytes)
        if not isinstance(answer, Welcome):
            raise WireError("no welcome")
        expected = list(answer.buckets)
        self._check_promised({socket: expected})  # type: ignore[dict-item]
        while expected:
            self._receive_one(socket, expected)  # type: ignore[arg-type]


def feed_receiver(stream: Stream) -> bool:
    """Whether the update came whole. Raises AssertionError where a promise breaks, and whatever crashes.

    Nothing but BridgeErrors, the weights untouched until commit, and then exactly what the checksums said.
    """
    weights = StagedWeights(dict(OLD), FP8_LAYOUT)
    weights.begin(MANIFEST)
    try:
        ScriptedReceiver(weights, "server").take(ScriptedSocket(stream))
    except BridgeError:
        assert all(weights.tensors[name] is tensor for name, tensor in OLD.items())
        return False
    weights.commit()
    for name, tensor in weights.tensors.items():
        assert (tensor.dtype, tensor.shape) == (NEW[name].dtype, NEW[name].shape)
    return True


def feed_frame(frame: bytes) -> None:
    """One header, as every side parses it."""
    for parse in (decode, Report.decode):
        with contextlib.suppress(WireError):
            parse(frame)


class ScriptedRouter:
    """A sender's ROUTER that swallows what it is told to send."""

    def send_multipart(self, frames: Any, flags: int = 0, copy: bool = True) -> None:
        if not frames[0]:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)


class ScriptedTransport(ZmqTransport):
    """A sender without a network, whose servers say what the script says."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", bucket_timeout_s=60)
        self.failures = {}
        self._manifest, self._buckets = MANIFEST, tuple(b.index for b in MANIFEST.buckets)
        from fp8bridge.transport.zmq import _Peer, _Stream

        self._streams = 2
        self._peers = {"token": _Peer("server", [_Stream(), _Stream()])}
        self._outbox = []

    def take(self, messages: Stream) -> None:
        self._socket = _Inbox(messages)
        with self._changed:
            while self._socket.messages:
                self._receive()
                for peer in self._live():
                    self._feed(peer, 0.0)


class _Inbox(ScriptedRouter):
    def __init__(self, messages: Stream) -> None:
        self.messages = [list(m) for m in messages if m]

    def recv_multipart(self) -> list[bytes]:
        return self.messages.pop(0)


def feed_sender(messages: Stream, packed: Sequence[PackedBucket] = ()) -> None:
    """Frames of servers and strangers to a sender; only the server of a session can lose it."""
    transport = ScriptedTransport()
    for peer in transport._peers.values():
        for i, each in enumerate(packed):
            peer.streams[i % len(peer.streams)].queue.append(each)
    transport.take(messages)
    assert transport.failures.keys() <= {"server"}


BODIES = [cls for cls in vars(bodies).values() if is_dataclass(cls)]


def feed_body(data: Any) -> None:
    """A control request's JSON, as every endpoint reads it."""
    for cls in BODIES:
        try:
            body = bodies.read_body(cls, data)
        except bodies.InvalidBody:
            continue
        assert len(fields(body)) == len(fields(cls))
    try:
        manifest = Manifest.from_dict(data)
    except (WireError, BridgeError):
        return
    assert Manifest.from_dict(manifest.as_dict()).hash == manifest.hash
    StagedWeights(dict(OLD), FP8_LAYOUT).differences(manifest)


def parsed(raw: bytes) -> Any:
    """JSON as the server reads it; None where it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
