"""`zmq`: raw payload frames over TCP, with credits and acknowledgements.

Each sending rank binds one ROUTER socket per update; servers connect to it (`receiver.Receiver`).
A server makes several connections where one would not fill the line; each has its own part of the
buckets. One thread owns the socket: it answers Hellos, keeps at most `Hello.credits` buckets unacknowledged
per connection, notices peers that are gone, and lets the trainer's thread gather and pack meanwhile.
Payload is not copied here: libzmq reads the bucket's memory until the server has it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import zmq

from ..errors import BridgeError, ServerTimeoutError, ServerUnreachableError, TransportError, WireError
from ..keys import KeyPair, with_key
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer, Target
from ..wire import (
    FRAME_NBYTES,
    Ack,
    BucketHeader,
    Hello,
    Message,
    Ping,
    Refuse,
    Welcome,
    decode,
    encode,
    max_header_nbytes,
)

_TICK_S = 0.05
_PING_S = 0.5
_IO_THREADS = 8


@dataclass(slots=True)
class _Stream:
    """One connection of a server. `identity`: empty until it has come."""

    identity: bytes = b""
    credits: int = 0
    queue: deque[PackedBucket] = field(default_factory=deque)
    in_flight: dict[int, float] = field(default_factory=dict)
    """Bucket index -> time it was handed to libzmq."""


@dataclass(slots=True)
class _Peer:
    """One server, as the socket's thread sees it."""

    name: str
    streams: list[_Stream]
    acked: set[int] = field(default_factory=set)
    pinged: float = 0.0

    @property
    def connected(self) -> bool:
        return all(s.identity for s in self.streams)


class ZmqTransport:
    """See `protocols.Transport`. `host`: address of this machine that servers can reach; `keys`: encrypt
    with CURVE, as the holder of this pair; `streams`: connections of each server to all senders together, at least.
    """

    multi_sender = True
    all_connect = False
    from_device = False

    def __init__(self, host: str, *, bucket_timeout_s: float, keys: KeyPair | None = None, streams: int = 1) -> None:
        self._keys = keys
        self._wanted_streams = streams
        self._host = f"[{host}]" if ":" in host else host
        self._bucket_timeout_s = bucket_timeout_s
        self.failures: dict[str, BridgeError] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._reason = ""
        self._twins: dict[int, torch.Tensor] = {}

    def join(self, server: RolloutServer) -> None:
        """Servers connect by themselves, with the token of an update."""

    def meet(self, target: Target) -> None:
        """As `join`."""

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        if self._thread is not None:
            raise TransportError("the last update of this transport was not closed")
        self.failures = {}
        self._reason = ""
        self._stopping = False
        self._manifest = manifest
        self._buckets = tuple(buckets)
        senders = len({b.owner for b in manifest.buckets})
        self._streams = max(1, min(-(-self._wanted_streams // max(1, senders)), len(buckets)))
        self._peers = {token: _Peer(name, [_Stream() for _ in range(self._streams)]) for name, token in tokens.items()}
        self._outbox: list[tuple[_Peer, Message]] = []
        self._context = zmq.Context(io_threads=min(self._streams * max(1, len(tokens)), _IO_THREADS))
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.IPV6, int(self._host.startswith("[")))
        # No ZMTP heartbeats: libzmq aborts the process of a receiver that they cut off while its queue is full
        # (zeromq/libzmq #4767). A lost peer shows by its closed connection, a stalled one by its bucket's limit.
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_header_nbytes(0))
        self._socket.setsockopt(zmq.SNDHWM, 0)  # counts frames; what bounds the queue are the credits
        if self._keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = self._keys
        try:
            port = self._socket.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as err:
            self._context.destroy(linger=0)
            raise TransportError(f"cannot listen on {self._host}: {err}; is it an address of this host?") from err
        self._thread = threading.Thread(target=self._run, name="fp8bridge-zmq", daemon=True)
        self._thread.start()
        address = f"tcp://{self._host}:{port}"
        return address if self._keys is None else with_key(address, self._keys.public)

    def connect(self, *, timeout_s: float, gone: Callable[[str], BridgeError | None]) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while waiting := [p.name for p in self._live() if not p.connected]:
                for name in waiting:
                    if error := gone(name):
                        self._fail(name, error)
                    elif time.monotonic() > deadline:
                        message = (
                            f"{name} did not connect to this trainer at {self._host} in {timeout_s:g} s; "
                            "can the server reach that address? (BridgeConfig.host)"
                        )
                        self._fail(name, ServerTimeoutError(message, server=name))
                self._changed.wait(_TICK_S)

    def drop(self, names: Sequence[str], reason: str) -> None:
        with self._changed:
            for name in names:
                self._fail(name, TransportError(reason, server=name))

    def send(self, packed: PackedBucket) -> None:
        packed = self._on_host(packed)
        with self._changed:
            stream = self._buckets.index(packed.bucket.index) % self._streams
            for peer in self._live():
                peer.streams[stream].queue.append(packed)
        self._wake.send(b"")

    def wait(self, index: int) -> None:
        with self._changed:
            while any(index not in peer.acked for peer in self._live()):
                self._changed.wait(_TICK_S)

    def close(self, reason: str = "") -> None:
        if self._thread is None:
            return
        with self._changed:
            self._reason = reason
            self._stopping = True
        self._wake.send(b"")
        self._thread.join()
        self._thread = None
        self._context.destroy(linger=200)

    def release(self) -> None:
        """Nothing is kept from update to update."""

    def _on_host(self, packed: PackedBucket) -> PackedBucket:
        """The bucket in memory that libzmq can read: a pinned twin of each of the packer's CUDA slots."""
        if packed.memory.device.type == "cpu":
            return packed
        slot = packed.memory.data_ptr()
        twin = self._twins.get(slot)
        if twin is None or twin.numel() < packed.bucket.nbytes:
            twin = self._twins[slot] = torch.empty(packed.bucket.nbytes, dtype=torch.uint8, pin_memory=True)
        memory = twin[: packed.bucket.nbytes]
        memory.copy_(packed.memory)
        return replace(packed, memory=memory)

    def _live(self) -> list[_Peer]:
        return [p for p in self._peers.values() if p.name not in self.failures]

    def _fail(self, name: str, error: BridgeError) -> None:
        """Called with the lock held. The first reason stays."""
        if name not in self.failures:
            self.failures[name] = error
            for peer in self._peers.values():
                if peer.name == name:
                    for stream in peer.streams:
                        stream.queue.clear()
                    self._outbox.append((peer, Refuse(str(error))))
        self._changed.notify_all()

    # Everything below runs in the socket's thread, which alone touches the sockets (libzmq sockets
    # are not thread-safe); the trainer's thread leaves word in queues and wakes it.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            poller.poll(int(_TICK_S * 1000))
            while self._woken.poll(0):
                self._woken.recv()
            with self._changed:
                while self._socket.poll(0):
                    self._receive()
                now = time.monotonic()
                for peer in self._live():
                    self._feed(peer, now)
                if self._stopping and self._reason:
                    self._outbox += [(peer, Refuse(self._reason)) for peer in self._live()]
                for peer, message in self._outbox:
                    self._tell(peer, message)
                self._outbox.clear()
                if self._stopping:
                    return

    def _receive(self) -> None:
        identity, *frames = self._socket.recv_multipart()
        try:
            message = decode(frames[0]) if len(frames) == 1 else None
        except WireError as err:
            self._protocol_error(identity, str(err))
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        peer, stream = self._who(identity)
        if peer is None or stream is None or peer.name in self.failures:
            return
        if isinstance(message, Ack):
            self._acknowledge(peer, stream, message)
        elif isinstance(message, Refuse):
            self._fail(peer.name, TransportError(f"{peer.name} gave up: {message.message}", server=peer.name))
        else:
            self._protocol_error(identity, f"unexpected {type(message).__name__}")

    def _who(self, identity: bytes) -> tuple[_Peer | None, _Stream | None]:
        """(None, None) for a stranger."""
        found = ((p, s) for p in self._peers.values() for s in p.streams if s.identity == identity)
        return next(found, (None, None))

    def _protocol_error(self, identity: bytes, text: str) -> None:
        peer, _ = self._who(identity)
        if peer is not None:
            self._fail(peer.name, WireError(f"{peer.name} broke the protocol: {text}", server=peer.name))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        peer = self._peers.get(hello.session)
        if peer is None or peer.name in self.failures:
            self._say(identity, Refuse("this is not a session of this trainer; ask it for a new update"))
        elif hello.manifest_hash != self._manifest.hash:
            self._say(identity, Refuse("plan hash differs"))
            message = f"{peer.name} has plan {hello.manifest_hash[:16]}, the trainer {self._manifest.hash[:16]}"
            self._fail(peer.name, WireError(message, server=peer.name))
        elif not 0 <= hello.stream < self._streams:
            self._say(identity, Refuse(f"there is no connection {hello.stream} of {self._streams}"))
        elif (stream := peer.streams[hello.stream]).identity:
            self._say(identity, Refuse("this session is already connected"))
        else:
            stream.identity, stream.credits = identity, max(1, min(hello.credits, 16))
            peer.pinged = time.monotonic()
            self._tell(peer, Welcome(self._buckets[hello.stream :: self._streams], self._streams), stream)
            self._changed.notify_all()

    def _acknowledge(self, peer: _Peer, stream: _Stream, ack: Ack) -> None:
        if ack.index not in stream.in_flight:
            message = f"{peer.name} acknowledged bucket {ack.index}, which it was not sent"
            self._fail(peer.name, WireError(message, server=peer.name, bucket=ack.index))
            return
        del stream.in_flight[ack.index]
        if not ack.ok:
            message = f"{peer.name} did not take bucket {ack.index}: {ack.message}"
            self._fail(peer.name, TransportError(message, server=peer.name, bucket=ack.index))
            return
        peer.acked.add(ack.index)
        self._changed.notify_all()

    def _feed(self, peer: _Peer, now: float) -> None:
        """Send what credits allow; notice silence and disconnection."""
        for stream in peer.streams:
            while stream.identity and stream.queue and len(stream.in_flight) < stream.credits:
                packed = stream.queue.popleft()
                header = BucketHeader(packed.bucket.index, packed.bucket.nbytes, packed.checksums)
                if not self._tell(peer, header, stream, packed):
                    return
                stream.in_flight[packed.bucket.index] = now
        late = [i for s in peer.streams for i, since in s.in_flight.items() if now - since > self._bucket_timeout_s]
        if late:
            message = f"{peer.name} did not acknowledge bucket {late[0]} in {self._bucket_timeout_s:g} s"
            self._fail(peer.name, ServerTimeoutError(message, server=peer.name, bucket=late[0]))
        elif now - peer.pinged > _PING_S and len(peer.acked) < len(self._buckets):
            peer.pinged = now
            self._tell(peer, Ping())

    def _tell(
        self, peer: _Peer, message: Message, stream: _Stream | None = None, packed: PackedBucket | None = None
    ) -> bool:
        """Over one connection of the server or all that it has; False if it is gone, which is recorded."""
        used = [s for s in (peer.streams if stream is None else [stream]) if s.identity]
        errors = [e for s in used if (e := self._say(s.identity, message, packed)) is not None]
        if errors and peer.name not in self.failures:
            words = f"{peer.name} is gone ({errors[0]}); was it stopped or killed?"
            self._fail(peer.name, ServerUnreachableError(words, server=peer.name))
        return not errors

    def _say(self, identity: bytes, message: Message, packed: PackedBucket | None = None) -> zmq.ZMQError | None:
        frames: list[bytes | memoryview] = [identity, encode(message)]
        if packed is not None:
            payload = packed.memory.numpy().data
            frames += [payload[at : at + FRAME_NBYTES] for at in range(0, len(payload), FRAME_NBYTES)] or [payload]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=packed is None)
        except zmq.ZMQError as err:
            return err
        return None
