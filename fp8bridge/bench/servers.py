"""Servers to sync to: in this process on its device, in a process of their own, or running elsewhere.

A new transport needs one branch in `start_servers`, and a server that it can feed.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

import torch

from ..errors import ConfigError
from ..kernels import BoundUnpack, UnpackItem, UnpackTable
from ..layout import ServerLayout
from ..plan import Bucket, Manifest
from ..protocols import PackedBucket, RolloutServer
from ..receiver import Receiver
from ..staging import bucket_checksums, unsigned
from ..transport.loopback import LoopbackServer
from ..transport.nccl import from_rank_0, make_group, reach_store


class ScatterServer(LoopbackServer):
    """Keeps one set of tensors on a device and scatters each bucket into them in one launch, as a server that
    loads weights in place does. Not atomic: for benchmarks."""

    def __init__(self, name: str, *, layout: ServerLayout, device: torch.device) -> None:
        super().__init__(name, layout=layout, device=device)
        self._bound: dict[int, BoundUnpack] = {}

    def preflight(self, manifest: Manifest) -> None:
        super().preflight(manifest)
        self._bound = {}
        for bucket in manifest.buckets:
            items, views = [], []
            for e in bucket.entries:
                items.append(UnpackItem(1, e.nbytes, "uint8", e.offset))
                views.append(self.tensors[e.name].view(-1).view(torch.uint8).view(1, e.nbytes))
            self._bound[bucket.index] = UnpackTable.build(items, device=self._device).bind(views)

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        self._token, self._load_s = token, 0.0

    def take(self, packed: PackedBucket) -> None:
        start = time.perf_counter()
        self._bound[packed.bucket.index].launch(packed.memory)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._load_s += time.perf_counter() - start

    def commit(self, token: str, version: str) -> float:
        self.weight_version, self._token = version, None
        return self._load_s

    def abort(self, token: str) -> None:
        self._token = None

    def checksums(self) -> dict[str, int]:
        assert self._manifest is not None, "asked before a plan was shown"
        found: dict[str, int] = {}
        for bucket in self._manifest.buckets:
            raw = [self.tensors[e.name].view(-1).view(torch.uint8) for e in bucket.entries]
            sums = unsigned(bucket_checksums(bucket, torch.cat(raw)))
            found |= {e.name: value for e, value in zip(bucket.entries, sums, strict=True)}
        return found


class ZmqServer(LoopbackServer):
    """Pulls its buckets through a real `Receiver`, checks and stages them; generates nothing."""

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        receiver = Receiver(self.weights, self.name, should_stop=lambda: self._token != token)
        receiver.pull(addresses, token, manifest_hash, timeout_s=timeout_s)
        self._load_s = receiver.load_s


class GroupServer(ScatterServer):
    """Receives each bucket in one broadcast, as stock SGLang does, and scatters it into its tensors while the next
    one arrives: two buckets of memory, and a commit that waits for all."""

    def init_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, timeout_s: float
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = reach_store(host, port, world_size, timeout_s=timeout_s)
        self._group = make_group(
            store, world_size, group, backend, timeout_s=timeout_s, bucket_timeout_s=timeout_s, rank=rank_offset
        )
        self._slots = [_Slot(self._device) for _ in range(2)]

    def destroy_group(self, group: str, *, timeout_s: float) -> None:
        torch.distributed.destroy_process_group(self._group)

    def load(self, index: int) -> None:
        assert self._manifest is not None, "a bucket before a plan was shown"
        bucket = self._manifest.buckets[index]
        slot = self._slots[index % 2]
        memory = slot.reserve(bucket.nbytes)
        self._group.broadcast([memory], from_rank_0()).wait()
        slot.scatter(self._bound[index], memory)

    def commit(self, token: str, version: str) -> float:
        start = time.perf_counter()
        for slot in self._slots:
            slot.settle()
        self._load_s = time.perf_counter() - start
        return super().commit(token, version)

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        """Each bucket has a request of its own."""


class _Slot:
    """Memory for a bucket, and the stream that empties it."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reserve(self, nbytes: int) -> torch.Tensor:
        self.settle()
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:nbytes]

    def scatter(self, bound: BoundUnpack, memory: torch.Tensor) -> None:
        if self._stream is None:
            bound.launch(memory)
            return
        self._stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(self._stream):
            bound.launch(memory)

    def settle(self) -> None:
        """Until what was in it has been scattered."""
        if self._stream is not None:
            self._stream.synchronize()


class _Control:
    """What runs in the child: one server. Its methods are called through a pipe."""

    def __init__(self, transport: str, name: str, layout: dict[str, Any], device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        kind, where = (GroupServer, device) if transport == "nccl" else (ZmqServer, "cpu")
        self._server = kind(name, layout=ServerLayout.from_hf_config(layout), device=torch.device(where))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self._server, method)(*args, **kwargs)


class _Manager(BaseManager):
    pass


_Manager.register("Control", _Control)


class ProcessServer:
    """A server in a process of its own, so that it does not share this one's interpreter."""

    tp_size = 1

    def __init__(self, name: str, control: Any) -> None:
        self.name = name
        self._control = control
        self.client = self
        """Where the `nccl` transport looks for the calls that make a group."""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self._control.call(method, args, kwargs)

    def load_bucket(self, bucket: Bucket, group: str, *, timeout_s: float) -> None:
        """For `nccl`: the child knows the bucket, and a thousand pickled entries would take longer than it."""
        self._control.call("load", (bucket.index,), {})

    def close(self) -> None:
        """The process ends with `start_servers`."""


@contextmanager
def start_servers(
    transport: str, servers: Sequence[str] | int, layout: ServerLayout, *, device: torch.device, threads: int = 8
) -> Iterator[list[str | RolloutServer]]:
    """Servers for one configuration: URLs as they are, or that many of this benchmark's own."""
    if not isinstance(servers, int):
        yield list(servers)
        return
    if transport == "loopback":
        yield [ScatterServer(f"loopback-{i}", layout=layout, device=device) for i in range(servers)]
        return
    if transport not in ("zmq", "nccl"):
        raise ConfigError(f"transport {transport!r} needs running servers: give their URLs")
    managers = [
        _Manager(ctx=multiprocessing.get_context("spawn"), authkey=secrets.token_bytes()) for _ in range(servers)
    ]
    try:
        for manager in managers:
            manager.start()
        made: list[str | RolloutServer] = []
        for i, manager in enumerate(managers):
            options = (transport, f"{transport}-{i}", layout.as_hf_config(), str(device), threads)
            made.append(ProcessServer(options[1], manager.Control(*options)))  # type: ignore[attr-defined]
        yield made
    finally:
        for manager in managers:
            manager.shutdown()
