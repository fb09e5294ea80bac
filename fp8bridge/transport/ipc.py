"""`ipc`: a trainer and SGLang servers on the same GPU. Buckets are not sent; servers read them where they are.

The packer's memory is shared once (CUDA IPC handles) with our loader in the server. Then a call tells where
in it a bucket lies; the loader loads it and answers after a device sync, and only then is the place written
again. A server without our loader is spoken to by checkpoint-engine's protocol (`checkpoint_engine.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..config import BridgeConfig
from ..errors import BridgeError, ConfigError, TransportError
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer, Target
from ..sglang.cuda_ipc import export, whole
from ..sglang.server import SglangServer
from .checkpoint_engine import CheckpointEngineLine


class IpcTransport:
    """See `protocols.Transport`. Rank 0 alone sends; `servers` are SglangServers."""

    multi_sender = False
    all_connect = False
    from_device = True

    def __init__(self, servers: Sequence[RolloutServer], config: BridgeConfig) -> None:
        self.failures: dict[str, BridgeError] = {}
        self._config = config
        self._lines: dict[str, _LoaderLine | CheckpointEngineLine] = {}
        self._live: set[str] = set()
        self._loading: dict[int, dict[str, Future[None]]] = {}
        # One call at a time and server: SGLang loads in the order of its calls.
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for server in servers:
            self.join(server)

    def join(self, server: RolloutServer) -> None:
        if not isinstance(server, SglangServer):
            raise ConfigError(f"transport 'ipc' sends to SGLang, which {server.name} is not; use transport='zmq'")
        kind = _LoaderLine if server.has_loader else CheckpointEngineLine
        self._lines[server.name] = kind(server, timeout_s=self._config.bucket_timeout_s)
        self._pools.setdefault(server.name, ThreadPoolExecutor(max_workers=1, thread_name_prefix="fp8bridge-ipc"))

    def meet(self, target: Target) -> None:
        """Other ranks send nothing."""

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        self.failures = {}
        self._live = set(tokens) & set(self._lines)
        self._loading = {}
        for name in self._live:
            self._lines[name].open(manifest, [i for i in buckets if manifest.buckets[i].nbytes])
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
        for name in self._live:
            self._lines[name].end(reason)
        self._live = set()

    def release(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def _load(self, name: str, packed: PackedBucket) -> None:
        if name in self.failures or not packed.bucket.nbytes:
            return
        try:
            self._lines[name].load(packed)
        except RuntimeError as err:
            raise TransportError(f"{name}: bucket {packed.bucket.index} cannot be shared: {err}", server=name) from err

    def _lose(self, name: str, error: BridgeError) -> None:
        self.failures[name] = error
        self._live.discard(name)
        # On the thread that speaks to it, after what is under way.
        self._pools[name].submit(self._lines[name].lost, str(error))


class _LoaderLine:
    """A server with our loader, and what it has been shown of our memory."""

    def __init__(self, server: SglangServer, *, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._trainer = secrets.token_hex(8)
        self._shown: int | None = None
        self._hash = ""

    def open(self, manifest: Manifest, buckets: Sequence[int]) -> None:
        self._hash = manifest.hash

    def load(self, packed: PackedBucket) -> None:
        storage = packed.memory.untyped_storage()
        exported = None if storage.data_ptr() == self._shown else export(whole(packed.memory))
        self._server.load_shared(
            packed.bucket,
            self._hash,
            int(packed.memory.storage_offset()),
            exported,
            trainer=self._trainer,
            timeout_s=self._timeout_s,
        )
        self._shown = storage.data_ptr()

    def end(self, reason: str) -> None:
        """It keeps what it was shown, for the next update."""

    def lost(self, reason: str) -> None:
        # It may have been restarted by the time it is back.
        self._shown = None
