"""`ipc`: a trainer and SGLang servers on the same GPU. Buckets are not sent; servers read them where they are.

The packer's two slots are exported once (CUDA IPC handles) to our loader in the server. Then a
call names the slot that holds a bucket; the loader loads it and answers after a device sync, and only
then is the slot written again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..config import BridgeConfig
from ..errors import BridgeError, ConfigError, TransportError
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer, Target
from ..sglang.cuda_ipc import export


class IpcTransport:
    """See `protocols.Transport`. Rank 0 alone sends; `servers` are SglangServers with our loader."""

    multi_sender = False
    all_connect = False

    def __init__(self, servers: Sequence[RolloutServer], config: BridgeConfig) -> None:
        self.failures: dict[str, BridgeError] = {}
        self._config = config
        self._servers: dict[str, Any] = {}
        self._trainer = secrets.token_hex(8)
        self._exported: dict[str, set[int]] = {}
        self._live: set[str] = set()
        self._loading: dict[int, dict[str, Future[None]]] = {}
        # One call at a time and server: SGLang loads in the order of its calls.
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for server in servers:
            self.join(server)

    def join(self, server: RolloutServer) -> None:
        if not getattr(server, "has_loader", False):
            raise ConfigError(
                f"transport 'ipc' sends to SGLang with our loader, which {server.name} has not; start it with "
                "--custom-weight-loader fp8bridge.sglang.loader.load"
            )
        self._servers[server.name] = server
        self._exported[server.name] = set()
        self._pools.setdefault(server.name, ThreadPoolExecutor(max_workers=1, thread_name_prefix="fp8bridge-ipc"))

    def meet(self, target: Target) -> None:
        """Other ranks send nothing."""

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        self.failures = {}
        self._live = set(tokens) & set(self._servers)
        self._loading = {}
        self._hash = manifest.hash
        return "ipc"

    def connect(self, *, timeout_s: float, gone: Callable[[str], BridgeError | None]) -> None:
        for name in sorted(self._live):
            if error := gone(name):
                self._lose(name, error)

    def drop(self, names: Sequence[str], reason: str) -> None:
        for name in self._live & set(names):
            self._lose(name, TransportError(reason, server=name))

    def send(self, packed: PackedBucket) -> None:
        if packed.memory.device.type != "cuda":
            raise ConfigError("transport 'ipc' needs parameters on a CUDA device; use transport='zmq'")
        # The server's stream is not ours: what it reads must be written.
        torch.cuda.current_stream(packed.memory.device).synchronize()
        self._loading[packed.bucket.index] = {
            name: self._pools[name].submit(self._load, name, packed) for name in sorted(self._live)
        }

    def wait(self, index: int) -> None:
        for name, future in self._loading.pop(index, {}).items():
            try:
                future.result()
            except BridgeError as err:
                if name not in self.failures:
                    self._lose(name, err)

    def close(self, reason: str = "") -> None:
        """Whatever still loads is waited for: it reads memory that the trainer will write."""
        for index in list(self._loading):
            self.wait(index)
        self._live = set()

    def release(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def _load(self, name: str, packed: PackedBucket) -> None:
        if name in self.failures or not packed.bucket.nbytes:
            return
        server, slot = self._servers[name], packed.memory.data_ptr()
        try:
            exported = None if slot in self._exported[name] else _export_slot(packed.memory)
            server.load_slot(
                packed.bucket,
                self._hash,
                slot,
                exported,
                trainer=self._trainer,
                timeout_s=self._config.bucket_timeout_s,
            )
        except RuntimeError as err:
            raise TransportError(f"{name}: bucket {packed.bucket.index} cannot be shared: {err}", server=name) from err
        self._exported[name].add(slot)

    def _lose(self, name: str, error: BridgeError) -> None:
        self.failures[name] = error
        self._live.discard(name)
        # It may have been restarted by the time it is back.
        self._exported[name] = set()


def _export_slot(memory: torch.Tensor) -> dict[str, Any]:
    """All of the slot that a bucket's memory is the beginning of: the next one in it may be larger."""
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device)
    whole.set_(memory.untyped_storage())
    return export(whole)
