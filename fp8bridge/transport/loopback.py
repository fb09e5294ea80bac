"""`loopback`: a rollout server inside this process, and the transport that feeds it.

For tests, ours and users': the whole path except the network, with the same checks. A
`LoopbackServer` can be told to fail at a bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import BridgeError, ConfigError, ServerMismatchError, ServerRefusedError, ServerUnreachableError
from ..layout import ServerLayout
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer, ServerInfo, Target
from ..staging import StagedWeights, describe_differences


class LoopbackServer:
    """Holds real tensors by wire name (`X.weight`, `X.weight_scale_inv`, ...); generates nothing.

    tensors: what it holds at start, also the names, shapes and dtypes it insists on. None: it takes
    the first plan it is shown, and starts from zeros.
    fail_at_bucket: it dies when that bucket arrives, and stays dead until `revive()`.
    device: where it keeps what it receives.
    """

    def __init__(
        self,
        name: str = "loopback",
        *,
        layout: ServerLayout,
        tensors: dict[str, torch.Tensor] | None = None,
        fail_at_bucket: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self._device = torch.device(device)
        self.weights = StagedWeights(tensors or {}, layout)
        self.weight_version: str = "default"
        self.paused = False
        self.calls: list[str] = []
        self.fail_at_bucket = fail_at_bucket
        self._dead = False
        self._token: str | None = None
        self._load_s = 0.0
        self._manifest: Manifest | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it would generate with now."""
        return self.weights.tensors

    def revive(self) -> None:
        """Restart it, as a process would: not paused, no session, the weights it last committed."""
        self._dead, self.paused, self._token = False, False, None
        self.fail_at_bucket, self._manifest = None, None
        self.weights.abort()

    def info(self) -> ServerInfo:
        self._alive("info")
        return ServerInfo("loopback", self.weights.layout, self.weight_version, None, True)

    def preflight(self, manifest: Manifest) -> None:
        self._alive("preflight")
        if not self.weights.tensors:
            self.weights.tensors = {
                n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype), device=self._device)
                for n, e in manifest.entries().items()
            }
        if found := self.weights.differences(manifest):
            raise ServerMismatchError(f"{self.name}: {describe_differences(found)}", server=self.name)
        self._manifest = manifest

    def pause(self, mode: str, *, lease_s: float) -> None:
        self._alive("pause")
        self.paused = True

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        self._alive("begin")
        if self._token is not None:
            raise self._refused("A weight update session is already open.")
        if self._manifest is None or manifest_hash != self._manifest.hash:
            raise self._refused("unknown plan; preflight first")
        self._token, self._load_s = token, 0.0
        self.weights.begin(self._manifest)

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        self._alive("receive")

    def take(self, packed: PackedBucket) -> None:
        """One bucket from the transport."""
        if packed.bucket.index == self.fail_at_bucket:
            self._dead = True
        self._alive(f"bucket {packed.bucket.index}")
        start = time.perf_counter()
        self.weights.stage(packed.bucket.index, packed.memory.to(self._device, copy=True), packed.checksums)
        self._load_s += time.perf_counter() - start

    def commit(self, token: str, version: str) -> float:
        self._alive("commit")
        self._mine(token)
        self.weights.commit()
        self.weight_version, self._token = version, None
        return self._load_s

    def abort(self, token: str) -> None:
        self._alive("abort")
        if self._token is None:
            return
        self._mine(token)
        self._token = None
        self.weights.abort()

    def flush_cache(self) -> None:
        self._alive("flush_cache")

    def resume(self) -> None:
        self._alive("resume")
        self.paused = False

    def checksums(self) -> dict[str, int]:
        self._alive("checksums")
        return self.weights.checksums()

    def close(self) -> None:
        """Nothing to release."""

    def _alive(self, call: str) -> None:
        if self._dead:
            raise ServerUnreachableError(f"{self.name} is not reachable (it was told to die)", server=self.name)
        self.calls.append(call)

    def _mine(self, token: str) -> None:
        if token != self._token:
            raise self._refused("this session is not open here")

    def _refused(self, answer: str) -> ServerRefusedError:
        return ServerRefusedError(f"{self.name} refused: {answer}", status=400, answer=answer, server=self.name)


class LoopbackTransport:
    """See `protocols.Transport`. Everything happens in `send`."""

    multi_sender = False
    all_connect = False
    from_device = False

    def __init__(self, servers: Sequence[RolloutServer]) -> None:
        self._servers: dict[str, Any] = {}
        for server in servers:
            self.join(server)
        self.failures: dict[str, BridgeError] = {}

    def join(self, server: RolloutServer) -> None:
        if not hasattr(server, "take"):
            raise ConfigError(
                f"transport 'loopback' reaches LoopbackServer objects in this process, not {server.name}; "
                "use transport='zmq' for a URL"
            )
        self._servers[server.name] = server

    def meet(self, target: Target) -> None:
        """Other ranks send nothing."""

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        self.failures = {}
        self._live = set(tokens)
        return "loopback"

    def connect(self, *, timeout_s: float, gone: Callable[[str], BridgeError | None]) -> None:
        for name in sorted(self._live):
            if error := gone(name):
                self._lose(name, error)

    def drop(self, names: Sequence[str], reason: str) -> None:
        self._live -= set(names)

    def send(self, packed: PackedBucket) -> None:
        for name in sorted(self._live & set(self._servers)):
            try:
                self._servers[name].take(packed)
            except BridgeError as err:
                self._lose(name, err)

    def wait(self, index: int) -> None:
        """Every bucket is acknowledged when `send` returns."""

    def close(self, reason: str = "") -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing is held."""

    def _lose(self, name: str, error: BridgeError) -> None:
        self.failures[name] = error
        self._live.discard(name)
