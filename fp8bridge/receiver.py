"""The receiving end of the `zmq` transport: pull one update's buckets from all its senders.

The server connects to the trainer, never the other way: a server opens no port for weights, and
only a trainer that the server was told of (over its own HTTP API) can send it anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import zmq

from .config import MAX_STREAMS
from .errors import BridgeError, TransportError, WireError
from .keys import split_key
from .plan import Bucket
from .staging import StagedWeights
from .wire import (
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

CREDITS = 2
"""Buckets a sender may have in flight to this server: one arriving, one being checked."""

_TICK_MS = 200
_THREADS = 4
"""That receive at once, however many connections there are."""

_Expected = dict[zmq.Socket[bytes], list[int]]
"""Connection -> the buckets that will come over it, in order."""


class Receiver:
    """Pulls into `weights`, which must have been told the manifest (`StagedWeights.begin`).

    name: how this server is called in the senders' errors (its URL).
    should_stop: polled several times a second; True makes `pull` give up (session aborted).
    on_alive: called whenever a sender is heard, for leases; by several threads, as `memory` is.
    memory: (bucket index, nbytes) -> where a bucket is received into, a writable flat uint8 array. None: new
        memory for each, of which its tensors are views.
    trainer_key: public CURVE key (Z85) that every sender must have; None: any, also none.
    """

    def __init__(
        self,
        weights: StagedWeights,
        name: str,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_alive: Callable[[], None] = lambda: None,
        trainer_key: bytes | None = None,
        memory: Callable[[int, int], Any] | None = None,
    ) -> None:
        self._memory = memory
        self._trainer_key = trainer_key
        self._weights = weights
        self._name = name
        self._should_stop = should_stop
        self._on_alive = on_alive
        self.load_s = 0.0
        """Seconds spent on checking and staging what arrived, of all threads together."""
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._heard = 0.0

    def pull(self, endpoints: Sequence[str], session: str, manifest_hash: str, *, timeout_s: float) -> int:
        """Receive every bucket, acknowledge each, return the bytes received. Blocks.

        endpoints[0] is the coordinating sender: it is greeted last, so that its Welcome means that
        this server reached all the others. Raises TransportError (silence for `timeout_s`, a sender
        that gave up), WireError and ChecksumError; the senders are told why before it raises.
        """
        self._header_nbytes = max_header_nbytes(self._weights.longest_list)
        context = zmq.Context(io_threads=_THREADS)
        sockets: list[zmq.Socket[bytes]] = []
        try:
            hello = Hello(session, manifest_hash, self._name, CREDITS, 0)
            expected: _Expected = {}
            for endpoint in [*endpoints[1:], endpoints[0]]:
                stream, streams = 0, 1
                while stream < streams:
                    sockets.append(self._connect(context, endpoint))
                    welcome = self._greet(sockets[-1], endpoint, replace(hello, stream=stream), timeout_s)
                    expected[sockets[-1]] = list(welcome.buckets)
                    stream, streams = stream + 1, welcome.streams
            self._check_promised(expected)
            return self._receive_all(expected, timeout_s)
        except BridgeError as err:
            for socket in sockets:
                _send(socket, Refuse(str(err)))
            raise
        except Exception as err:
            # No room, above all. The trainer must not wait for a server that has given up.
            error = TransportError(f"{self._name} cannot take the update: {type(err).__name__}: {err}")
            for socket in sockets:
                _send(socket, Refuse(str(error)))
            raise error from err
        finally:
            for socket in sockets:
                socket.close(linger=1000)
            context.term()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        frames = 1 + -(-self._weights.largest_bucket_nbytes // FRAME_NBYTES)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._header_nbytes, FRAME_NBYTES))
        socket.setsockopt(zmq.RCVHWM, CREDITS * (frames + 1) + 4)
        try:
            address, key = split_key(endpoint)
            if self._trainer_key is not None and key != self._trainer_key:
                found = "no key" if key is None else "another key"
                raise TransportError(f"sender {address} has {found} than the trainer that {self._name} was told of")
            if key is not None:
                socket.curve_serverkey = key
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(address)
        except BridgeError:
            socket.close(linger=0)
            raise
        except zmq.ZMQError as err:
            socket.close(linger=0)
            raise TransportError(f"{self._name} cannot connect to sender {endpoint}: {err}") from err
        return socket

    def _greet(self, socket: zmq.Socket[bytes], endpoint: str, hello: Hello, timeout_s: float) -> Welcome:
        _send(socket, hello)
        deadline = time.monotonic() + timeout_s
        while not socket.poll(_TICK_MS):
            self._check_stop()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"{self._name} got no answer from sender {endpoint} in {timeout_s:g} s; can this host reach it "
                    "(and has it that CURVE key, if any)?"
                )
        answer = decode(socket.recv(), self._header_nbytes)
        if isinstance(answer, Refuse):
            raise TransportError(f"sender {endpoint} refused {self._name}: {answer.message}")
        if not isinstance(answer, Welcome):
            raise WireError(f"sender {endpoint} answered a Hello with {type(answer).__name__}")
        if not 1 <= answer.streams <= MAX_STREAMS:
            raise WireError(f"sender {endpoint} asks for {answer.streams} connections; 1 to {MAX_STREAMS} are made")
        self._on_alive()
        return answer

    def _check_promised(self, expected: _Expected) -> None:
        promised = sorted(i for indexes in expected.values() for i in indexes)
        missing = self._weights.missing
        if promised != missing:
            raise WireError(f"the senders promise buckets {promised[:8]}, the plan has {missing[:8]}")

    def _receive_all(self, expected: _Expected, timeout_s: float) -> int:
        """Connections are shared out among threads. The first error ends all of them."""
        self._broken, self._heard = None, time.monotonic()
        used = [(socket, indexes) for socket, indexes in expected.items() if indexes]
        parts = [dict(used[i::_THREADS]) for i in range(min(len(used), _THREADS))]
        if len(parts) < 2:
            return sum(self._receive_from(part, timeout_s) for part in parts)
        with ThreadPoolExecutor(len(parts), thread_name_prefix="fp8bridge-receive") as pool:
            futures = [pool.submit(self._receive_from, part, timeout_s) for part in parts]
            try:
                return sum(future.result() for future in futures)
            except BaseException as err:  # noqa: BLE001 - raised again; an interrupt ends the threads too
                with self._lock:
                    self._broken = first = self._broken or err
                raise first from None

    def _receive_from(self, expected: _Expected, timeout_s: float) -> int:
        try:
            return self._receive_each(expected, timeout_s)
        except BaseException as err:
            with self._lock:
                self._broken = self._broken or err
            raise

    def _receive_each(self, expected: _Expected, timeout_s: float) -> int:
        poller, nbytes = zmq.Poller(), 0
        for socket in expected:
            poller.register(socket, zmq.POLLIN)
        while any(expected.values()):
            ready = poller.poll(_TICK_MS)
            self._check_stop()
            if not ready and time.monotonic() - self._heard > timeout_s:
                waiting = [i for indexes in expected.values() for i in indexes][:8]
                raise TransportError(
                    f"{self._name} heard nothing from the trainer for {timeout_s:g} s, waiting for buckets {waiting}"
                )
            for socket, _ in ready:
                self._heard = time.monotonic()
                self._on_alive()
                nbytes += self._receive_one(socket, expected[socket])
                if not expected[socket]:
                    poller.unregister(socket)
        return nbytes

    def _receive_one(self, socket: zmq.Socket[bytes], expected: list[int]) -> int:
        message: Message = decode(socket.recv(), self._header_nbytes)
        if isinstance(message, Ping):
            return 0
        if isinstance(message, Refuse):
            raise TransportError(f"the sender gave up: {message.message}")
        if not isinstance(message, BucketHeader):
            raise WireError(f"expected a bucket, got {type(message).__name__}")
        if message.index != expected[0]:
            raise WireError(f"bucket {message.index} came, {expected[0]} was next", bucket=message.index)
        bucket = self._weights.bucket(message.index)
        if message.nbytes != bucket.nbytes:
            raise WireError(f"bucket {bucket.index} says {message.nbytes} bytes, the plan {bucket.nbytes}")
        payload = self._receive_payload(socket, bucket)
        start = time.perf_counter()
        self._weights.check(bucket.index, _tensor(payload), message.checksums)
        with self._lock:
            self._weights.keep(bucket.index, _tensor(payload))
            self.load_s += time.perf_counter() - start
        expected.pop(0)
        _send(socket, Ack(bucket.index, True, ""))
        return bucket.nbytes

    def _receive_payload(self, socket: zmq.Socket[bytes], bucket: Bucket) -> memoryview:
        """All frames of the message, one behind the other, in memory that nobody else has."""
        take = self._memory or _new_memory
        memory, at = np.asarray(take(bucket.index, bucket.nbytes))[: bucket.nbytes], 0
        while socket.getsockopt(zmq.RCVMORE):
            frame = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)
            if len(frame) <= bucket.nbytes - at:
                # Not a memoryview's copy: that would keep the other threads waiting.
                np.copyto(memory[at : at + len(frame)], frame)
            at += len(frame)
        if at != bucket.nbytes:
            raise WireError(f"bucket {bucket.index} has a payload of {at} bytes, not {bucket.nbytes}")
        return memory.data

    def _check_stop(self) -> None:
        if self._broken is not None:
            raise TransportError(f"another connection of {self._name} failed")
        if self._should_stop():
            raise TransportError(f"the update of {self._name} was aborted")


def _new_memory(index: int, nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def _tensor(payload: memoryview) -> torch.Tensor:
    """Flat uint8 that shares the message's memory; torch takes no empty buffers."""
    return torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)


def _send(socket: zmq.Socket[bytes], message: Message) -> None:
    """Never blocks: a peer that is gone is noticed by what does not come back."""
    try:
        socket.send(encode(message), zmq.DONTWAIT)
    except zmq.Again:
        return
