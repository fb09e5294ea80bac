"""What frameworks do today, for comparison: gather each tensor in BF16, one quantize launch per tensor,
concatenate, one send per tensor, and a wait for the receiver per bucket. Nothing overlaps, nothing is checked.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import zmq

from ..errors import VerifyError
from ..layout import SCALE_SUFFIX, ServerLayout
from ..staging import tensor_checksum
from ..transport.nccl import abandon, from_rank_0, make_group, open_store, reach_store
from ..types import TensorMeta
from .per_tensor import quantize_one
from .source import SyntheticSource

_END = b"bucket"
_SAMPLED = 64
_LIMIT_S = 120.0


class Sink(Protocol):
    """Where the baseline's tensors go."""

    def send(self, tensor: torch.Tensor) -> None: ...

    def wait(self) -> None:
        """Until the receiver has everything that was sent."""
        ...


class DeviceSink:
    """Tensors of a server on the same device, filled by one copy each."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._at = 0

    def send(self, tensor: torch.Tensor) -> None:
        if self._at == len(self._held):
            self._held.append(torch.empty_like(tensor))
        self._held[self._at].copy_(tensor)
        self._at += 1

    def wait(self) -> None:
        if self._held and self._held[0].device.type == "cuda":
            torch.cuda.synchronize(self._held[0].device)

    def rewind(self) -> None:
        self._at = 0


class SocketSink:
    """A process on the other end of a ZMQ socket on TCP: a message per tensor, an answer per bucket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, tensor: torch.Tensor) -> None:
        self._socket.send(tensor.cpu().numpy().data, copy=False)

    def wait(self) -> None:
        self._socket.send(_END)
        self._socket.recv()

    def rewind(self) -> None:
        """The receiver keeps nothing."""


class BroadcastSink:
    """A rank of a group of two on the other end: a broadcast per tensor, an answer per bucket."""

    def __init__(self, group: Any, answers: Any) -> None:
        self._group = group
        self._answers = answers
        self._held: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)

    def wait(self) -> None:
        """The sizes of a bucket's tensors in one message, as a request has them; then the tensors."""
        self._answers.send([tensor.numel() for tensor in self._held])
        for tensor in self._held:
            self._group.broadcast([tensor], from_rank_0()).wait()
        self._held = []
        self._answers.recv()

    def rewind(self) -> None:
        """The receiver keeps nothing."""


@contextmanager
def _broadcast_sink(backend: str, device: str) -> Iterator[BroadcastSink]:
    ours, theirs = multiprocessing.Pipe()
    store = open_store("127.0.0.1", 2, timeout_s=_LIMIT_S)
    child = multiprocessing.get_context("spawn").Process(
        target=_join, args=(store.port, backend, device, theirs), daemon=True
    )
    child.start()
    try:
        group = _pair(0, store, backend)
        yield BroadcastSink(group, ours)
        ours.send(None)
        child.join(30)
        abandon(group, backend)
    finally:
        child.kill()


def _pair(rank: int, store: Any, backend: str) -> Any:
    return make_group(store, 2, "baseline", backend, rank=rank, timeout_s=_LIMIT_S, bucket_timeout_s=_LIMIT_S)


def _join(port: int, backend: str, device: str, answers: Any) -> None:
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    group = _pair(1, reach_store("127.0.0.1", port, 2, timeout_s=_LIMIT_S), backend)
    while (sizes := answers.recv()) is not None:
        for nbytes in sizes:
            group.broadcast([torch.empty(nbytes, dtype=torch.uint8, device=where)], from_rank_0()).wait()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        answers.send(None)


@contextmanager
def open_sink(transport: str, *, backend: str, device: str) -> Iterator[DeviceSink | SocketSink | BroadcastSink]:
    """backend, device: of the group of `nccl`."""
    if transport == "loopback":
        yield DeviceSink()
        return
    if transport == "nccl":
        with _broadcast_sink(backend, device) as sink:
            yield sink
        return
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    child = multiprocessing.get_context("spawn").Process(target=_receive, args=(port,), daemon=True)
    child.start()
    try:
        yield SocketSink(socket)
        socket.send(b"")
    finally:
        context.destroy(linger=1000)
        child.join(10)
        if child.is_alive():
            child.kill()


def _receive(port: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(f"tcp://127.0.0.1:{port}")
    while frame := socket.recv():
        if frame == _END:
            socket.send(_END)
    context.destroy(linger=0)


def run_baseline(
    source: SyntheticSource,
    layout: ServerLayout,
    sink: DeviceSink | SocketSink | BroadcastSink,
    *,
    rule: str,
    bucket_nbytes: int,
    servers: int,
    expected: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Seconds of one sync, whole and by stage (host time: on a GPU the waits hold what was launched before).

    expected: checksums by wire name; a sample of the baseline's tensors must have them (VerifyError).
    """
    seconds = dict.fromkeys(("gather", "quantize", "concatenate", "send", "wait"), 0.0)
    sink.rewind()
    began = time.perf_counter()
    with _timed(seconds, "gather"):
        tensors = source.whole()
    stride = max(1, len(tensors) // _SAMPLED)
    checked: list[tuple[str, torch.Tensor]] = []
    for bucket in _buckets(tensors, bucket_nbytes):
        with _timed(seconds, "quantize"):
            wire = [pair for name, tensor in bucket for pair in _wire(name, tensor, layout, rule)]
        with _timed(seconds, "concatenate"):
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in wire])
        at = 0
        for _, tensor in wire:
            nbytes = tensor.numel() * tensor.element_size()
            with _timed(seconds, "send"):
                for _ in range(servers):
                    sink.send(flat[at : at + nbytes])
            at += nbytes
        if expected is not None:
            checked += wire[::stride]
        with _timed(seconds, "wait"):
            for _ in range(servers):
                sink.wait()
    total = time.perf_counter() - began
    for name, tensor in checked:
        if expected is None or tensor_checksum(tensor) != expected[name]:
            raise VerifyError(
                f"the baseline's bytes of {name} are not those of the sync; no speed is shown", tensor=name
            )
    return {"seconds": total, "stages": seconds}


def _wire(name: str, tensor: torch.Tensor, layout: ServerLayout, rule: str) -> list[tuple[str, torch.Tensor]]:
    meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if layout.decide(meta).action != "quantize":
        return [(name, tensor)]
    assert layout.block is not None, "decide() quantizes only with a block"
    codes, scales = quantize_one(tensor, rule, layout.block)
    return [(name, codes), (name + SCALE_SUFFIX, scales)]


def _buckets(tensors: Sequence[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    held: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and nbytes + size > limit:
            yield held
            held, nbytes = [], 0
        held.append((name, tensor))
        nbytes += size
    yield held


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start
