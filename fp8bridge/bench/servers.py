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
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer
from ..receiver import Receiver
from ..staging import bucket_checksums, unsigned
from ..transport.loopback import LoopbackServer


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


class _Control:
    """What runs in the child: one server, made on the first call. Its methods are called through a pipe."""

    def __init__(self, name: str, layout: dict[str, Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self._server = ZmqServer(name, layout=ServerLayout.from_hf_config(layout))

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self._server, method)(*args, **kwargs)


class _Manager(BaseManager):
    pass


_Manager.register("Control", _Control)


class ProcessServer:
    """A `ZmqServer` in a process of its own, so that it does not share this one's interpreter."""

    def __init__(self, name: str, control: Any) -> None:
        self.name = name
        self._control = control

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self._control.call(method, args, kwargs)

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
    if transport != "zmq":
        raise ConfigError(f"transport {transport!r} needs running servers: give their URLs")
    managers = [
        _Manager(ctx=multiprocessing.get_context("spawn"), authkey=secrets.token_bytes()) for _ in range(servers)
    ]
    try:
        for manager in managers:
            manager.start()
        made: list[str | RolloutServer] = []
        for i, manager in enumerate(managers):
            control = manager.Control(f"zmq-{i}", layout.as_hf_config(), threads)  # type: ignore[attr-defined]
            made.append(ProcessServer(f"zmq-{i}", control))
        yield made
    finally:
        for manager in managers:
            manager.shutdown()
