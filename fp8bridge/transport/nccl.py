"""`nccl`: one broadcast per bucket into stock SGLang, with a group of its own for every server.

A bucket's request and its broadcast are made together, by one thread per server, and the next request
only after the last answer: SGLang pairs them by order alone. An answer that is an error ends the group
at once, so that no rank stays in a collective that will never be joined. Groups are kept from update to
update and made again after their server was lost.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import BridgeConfig
from ..errors import BridgeError, ConfigError, ServerError, ServerTimeoutError, TransportError
from ..plan import Manifest
from ..protocols import PackedBucket, RolloutServer, Target
from ..sglang.target import BucketTarget

log = logging.getLogger("fp8bridge")

_TICK_S = 0.05
_LEAVE_TIMEOUT_S = 10.0


class NcclTransport:
    """See `protocols.Transport`. `servers`, on rank 0, are SglangServers; every other rank that sends knows them
    as `targets`, and has groups and requests of its own. A server serves one request after the other."""

    multi_sender = True
    all_connect = True
    from_device = True

    def __init__(self, servers: Sequence[RolloutServer], config: BridgeConfig, targets: Sequence[Target] = ()) -> None:
        self.failures: dict[str, BridgeError] = {}
        self._config = config
        self._lines: dict[str, _Line] = {}
        self._live: set[str] = set()
        sends = servers or (targets and config.senders == "all")
        if config.group_backend == "nccl" and sends:
            _check_environment()
        for server in servers:
            self.join(server)
        if not servers:
            for target in targets:
                self.meet(target)

    def join(self, server: RolloutServer) -> None:
        if not hasattr(server, "load_bucket"):
            raise ConfigError(
                f"transport 'nccl' sends to stock SGLang, which {server.name} is not; use transport='zmq'"
            )
        self._join(server)

    def meet(self, target: Target) -> None:
        self._join(BucketTarget(target, self._config))

    def _join(self, server: Any) -> None:
        line = _Line(server, self._config)
        if (before := self._lines.pop(server.name, None)) is not None:
            before.retire()
            line.left = before.left
        self._lines[server.name] = line

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        self.failures = {}
        self._live = set(tokens) & set(self._lines) if buckets else set()
        for name in self._live:
            self._lines[name].open(tokens[name])
        return "nccl"

    def connect(self, *, timeout_s: float, gone: Callable[[str], BridgeError | None]) -> None:
        """Make the groups that are missing, all at once."""
        lines = [self._lines[name] for name in sorted(self._live)]
        with ThreadPoolExecutor(max_workers=max(1, len(lines))) as pool:
            made = [(line, pool.submit(line.connect, timeout_s)) for line in lines]
        for line, future in made:
            error = gone(line.name) or _error(future)
            if error is not None:
                self._lose(line.name, error)

    def drop(self, names: Sequence[str], reason: str) -> None:
        for name in self._live & set(names):
            self._lose(name, TransportError(reason, server=name))

    def send(self, packed: PackedBucket) -> None:
        for name in self._live:
            self._lines[name].send(packed)

    def wait(self, index: int) -> None:
        for name in sorted(self._live):
            error = self._lines[name].wait(index)
            if error is not None:
                self._lose(name, error)

    def close(self, reason: str = "") -> None:
        """Groups of servers that took everything stay; with a reason, all are ended."""
        for name in list(self._live):
            if reason:
                self._lines[name].end()
        self._live = set()

    def release(self) -> None:
        """Leave every group, at both ends: each costs its server a communicator."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._lines))) as pool:
            for line in self._lines.values():
                pool.submit(line.leave)

    def _lose(self, name: str, error: BridgeError) -> None:
        self.failures[name] = error
        self._live.discard(name)
        self._lines[name].end()


class _Line:
    """One server's group, and the thread that sends to it."""

    def __init__(self, server: Any, config: BridgeConfig) -> None:
        self.name: str = server.name
        self._server = server
        self._config = config
        self._group: Any = None
        self._group_name = ""
        self.left: list[str] = []
        """Groups that the server may still hold."""
        self._outbox: queue.SimpleQueue[tuple[PackedBucket, Any] | None] = queue.SimpleQueue()
        self._answers: dict[int, BridgeError | None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, token: str) -> None:
        """A new update, whose secret for this server is `token`."""
        self._answers.clear()
        if isinstance(self._server, BucketTarget):
            self._server.token = token

    def connect(self, timeout_s: float) -> None:
        """Join the server in a new group, unless there is one. Raises BridgeError; never hangs longer."""
        if self._group is not None:
            return
        self._forget_left(timeout_s)
        self._group_name = f"fp8bridge-{secrets.token_hex(4)}"
        host, backend, world = self._config.host, self._config.group_backend, 1 + self._server.tp_size
        store = open_store(host, world, timeout_s=timeout_s)
        port = store.port
        pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="fp8bridge-group")
        making = pool.submit(
            make_group,
            store,
            world,
            self._group_name,
            backend,
            timeout_s=timeout_s,
            bucket_timeout_s=self._config.bucket_timeout_s,
        )
        asked = pool.submit(
            self._server.client.init_group,
            host=host,
            port=port,
            rank_offset=1,
            world_size=world,
            group=self._group_name,
            backend=backend,
            timeout_s=timeout_s + 5,
        )
        # Whichever is left waiting when the other fails ends by its own time limit.
        pool.shutdown(wait=False)
        while not (making.done() and asked.done()):
            if asked.done() and (error := _error(asked)):
                raise error
            if making.done() and making.exception() is not None:
                break
            time.sleep(0.01)
        if failure := making.exception():
            raise ServerTimeoutError(
                f"{self.name} did not join the update group at {host}:{port} in {timeout_s:g} s ({failure}); can the "
                "server reach that address? (BridgeConfig.host)",
                server=self.name,
            ) from failure
        if error := _error(asked):
            raise error
        self._group = making.result()
        self._thread = threading.Thread(target=self._run, name=f"fp8bridge-{self.name}", daemon=True)
        self._thread.start()

    def send(self, packed: PackedBucket) -> None:
        ready = None
        if packed.memory.device.type == "cuda":
            # The worker's stream waits for the kernels that fill the bucket.
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(packed.memory.device))
        self._outbox.put((packed, ready))

    def wait(self, index: int) -> BridgeError | None:
        """Until the server has answered for the bucket: None, or what went wrong."""
        with self._changed:
            while index not in self._answers:
                failed = next((e for e in self._answers.values() if e is not None), None)
                if failed is not None:
                    return failed
                self._changed.wait(_TICK_S)
            return self._answers[index]

    def end(self) -> None:
        """Leave the group without waiting for anyone in it. Idempotent."""
        group, self._group = self._group, None
        thread, self._thread = self._thread, None
        if group is not None:
            self.left.append(self._group_name)
            abandon(group, self._config.group_backend)
        if thread is not None:
            self._outbox.put(None)
        self._outbox = queue.SimpleQueue()

    def leave(self) -> None:
        """Leave the group, and have the server leave it. One that was lost keeps its own: it may not answer."""
        if self._group is not None:
            self.end()
            self._forget_left(_LEAVE_TIMEOUT_S)
        self.retire()

    def retire(self) -> None:
        """For good; what is still under way ends by itself."""
        self.end()
        if isinstance(self._server, BucketTarget):
            self._server.client.close()

    def _forget_left(self, timeout_s: float) -> None:
        while self.left:
            name = self.left.pop()
            try:
                self._server.client.destroy_group(name, timeout_s=timeout_s)
            except ServerError as err:
                # Above all, a server that was restarted since has no such group.
                log.info("%s was not told to leave group %s: %s", self.name, name, err)

    def _run(self) -> None:
        outbox, group, group_name = self._outbox, self._group, self._group_name
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fp8bridge-load") as pool:
            while (task := outbox.get()) is not None:
                packed, ready = task
                try:
                    error = self._load(packed, ready, group, group_name, pool)
                except Exception as err:  # noqa: BLE001 - the trainer's thread must learn of it
                    error = TransportError(f"{self.name}: {type(err).__name__}: {err}", server=self.name)
                with self._changed:
                    self._answers[packed.bucket.index] = error
                    self._changed.notify_all()
                if error is not None:
                    return

    def _load(
        self, packed: PackedBucket, ready: Any, group: Any, group_name: str, pool: ThreadPoolExecutor
    ) -> BridgeError | None:
        if packed.bucket.nbytes == 0:
            return None
        limit_s = self._config.bucket_timeout_s
        answer = pool.submit(self._server.load_bucket, packed.bucket, group_name, timeout_s=limit_s)
        if ready is not None:
            torch.cuda.set_device(packed.memory.device)
            ready.wait()
        work = group.broadcast([packed.memory], from_rank_0())
        deadline = time.monotonic() + limit_s
        futures.wait([answer], timeout=limit_s)
        if answer.done() and (error := _error(answer)):
            return error
        while not work.is_completed() or not answer.done():
            if time.monotonic() > deadline:
                return ServerTimeoutError(
                    f"{self.name} did not load bucket {packed.bucket.index} in {limit_s:g} s",
                    server=self.name,
                    bucket=packed.bucket.index,
                )
            time.sleep(0.0002)
        work.wait()  # raises what the broadcast met at this end
        return None


def open_store(host: str, world_size: int, *, timeout_s: float) -> Any:
    """Where the ranks of a group meet: at `.port`, which the system chooses as it listens, so that none is taken."""
    limit = timedelta(seconds=timeout_s)
    torch_dist: Any = dist
    try:
        return torch_dist.TCPStore(host, 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
    except RuntimeError as err:
        raise TransportError(f"cannot listen on {host}: {err}; is it an address of this host?") from err


def reach_store(host: str, port: int, world_size: int, *, timeout_s: float) -> Any:
    """The same, for every other rank."""
    torch_dist: Any = dist
    limit = timedelta(seconds=timeout_s)
    return torch_dist.TCPStore(host, port, world_size, is_master=False, timeout=limit, wait_for_workers=False)


def make_group(
    store: Any,
    world_size: int,
    name: str,
    backend: str,
    *,
    timeout_s: float,
    bucket_timeout_s: float,
    rank: int = 0,
) -> Any:
    """A rank of the group that SGLang joins in `init_custom_process_group`; not part of torch's default one.

    The store's prefixes must be SGLang's: `name`, and what torch's own helper adds. Raises what torch
    raises if not all ranks came in `timeout_s`, which also bounds each collective of a gloo group. NCCL's
    watchdog ends this process when a collective is late, so it is given more than we wait ourselves.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    limit = timedelta(seconds=timeout_s)
    bound, default = None, c10d._world.default_pg
    if default is not None:
        # With a bound device torch would split the trainer's own communicator, and wait for its ranks.
        bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            world_size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name,
            timeout=limit if backend == "gloo" else limit + timedelta(seconds=bucket_timeout_s), backend_options=None,
        )  # fmt: skip
    finally:
        if default is not None:
            default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def abandon(group: Any, backend: str) -> None:
    """Drop a group whose other ranks may never answer. Its connections close; a server that waits in it is freed."""
    if backend == "nccl":
        group._get_backend(torch.device("cuda")).abort()
    _forget(group)
    # Destroying a gloo group waits for what is pending in it, which its own time limit ends.
    threading.Thread(target=lambda _held: time.sleep(1), args=(group,), daemon=True).start()


def _forget(group: Any) -> None:
    """Take the group out of every table of torch's, which would keep it, and so its connections, for ever."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    world = c10d._world
    for name in ("pg_group_ranks", "pg_map", "pg_names", "pg_backend_config", "pg_coalesce_state"):
        getattr(world, name, {}).pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for each in {tag, ""} & set(world.tags_to_pg):
        if group in world.tags_to_pg[each]:
            world.tags_to_pg[each].remove(group)
    c10d._unregister_process_group(group.group_name)


def from_rank_0() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    return options


def _check_environment() -> None:
    value = os.environ.get("NCCL_CUMEM_ENABLE")
    if value != "0":
        raise ConfigError(
            f"NCCL_CUMEM_ENABLE is {value!r} in the trainer; SGLang sets it to 0 in its servers, and a group with "
            "both hangs in its first broadcast. Start the trainer with NCCL_CUMEM_ENABLE=0"
        )


def _error(future: Future[Any]) -> BridgeError | None:
    try:
        future.result(timeout=None)
    except BridgeError as err:
        return err
    return None
