"""`Bridge`: the one object users hold. It wires the stages together and adds nothing of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from .config import BridgeConfig
from .errors import CommitError, ConfigError, VerifyError, VersionError
from .exporters import Exporters
from .gather import Gather
from .layout import ServerLayout
from .nvtx import ranges
from .planning import agree_on_plan
from .preflight import resolve_layout
from .protocols import RolloutServer, Target
from .ranks import Ranks, SingleRank, agree, connect_ranks
from .report import ServerReport, Stopwatch, SyncReport
from .reporting import compare, decoded, encoded, facts_of, measured, states, sync_report
from .rollout_server import open_server
from .sending import Progress, Sender
from .session import Member, OnState, ServerSet, Update, check_version
from .snapshots import Snapshots
from .transport import open_transport
from .types import WeightSource


def connect(
    source: WeightSource,
    servers: Sequence[str | RolloutServer],
    config: BridgeConfig | None = None,
    *,
    on_state: OnState | None = None,
    **overrides: Any,
) -> Bridge:
    """Plan the sync of `source` to `servers` and check that every server can take it. Moves no weights.

    Collective: every trainer rank calls it with its own source; `servers` (URLs, or LoopbackServer
    objects) are contacted by rank 0 alone. `overrides` are fields of BridgeConfig. `on_state` is called on
    rank 0 with a ServerEvent whenever a server changes its state, from a thread of its own and in order:
    a function of yours, or `fp8bridge.routing.SglangRouter` / `WebHook`.

    Raises, on every rank: ConfigError, PlanError, ServerUnreachableError, ServerMismatchError (not
    FP8, another block size, model, name, shape or dtype). Use it as a context manager.
    """
    if config is not None and overrides:
        raise ConfigError(f"give either a BridgeConfig or its fields, not both: {', '.join(overrides)}")
    try:
        return Bridge(source, servers, config or BridgeConfig(**overrides), on_state=on_state)
    except TypeError as err:
        if "unexpected keyword argument" not in str(err) or "BridgeConfig" not in str(err):
            raise
        raise ConfigError(f"{err}; see BridgeConfig for the fields there are") from err


class Bridge:
    """A connection of one trainer (all its ranks) to its rollout servers. Made by `connect`.

    plan: the Plan, the same on every rank.
    """

    def __init__(
        self,
        source: WeightSource,
        servers: Sequence[str | RolloutServer],
        config: BridgeConfig,
        *,
        on_state: OnState | None = None,
    ) -> None:
        self.config = config
        self._source = source
        self._on_state = on_state
        self._last_version: int | None = None
        self._current: int | None = None
        self._set: ServerSet | None = None
        self._held = ExitStack()
        self._exporters: Exporters | None = None
        self._closed = False
        self._updating = threading.Lock()
        alone = getattr(source, "alone", False)
        self._ranks: Ranks = SingleRank() if alone else connect_ranks(timeout_s=config.collective_timeout_s)
        self._held.callback(self._ranks.close)
        try:
            self._connect(servers)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Bridge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def servers(self) -> dict[str, ServerReport]:
        """State of every server. Rank 0 knows at once; the others at the next call that succeeds."""
        return dict(self._states)

    def update_weights(self, *, version: int, on_progress: Progress | None = None) -> SyncReport:
        """Give every healthy server the trainer's current weights as `version`.

        Collective: every trainer rank calls it with the same version, with no optimizer step running.
        The parameters are only read, and free to change when it returns.

        On return at least `min_healthy` servers generate with the new version; servers that failed
        are in `report.fenced` and take no further part until `admit`. On an error, raised on every
        rank, no server has the new version (CommitError excepted) and all of them have resumed or
        are fenced. Raises NonFiniteError, VersionError, ServerError, TransportError, CommitError,
        RankError.
        """
        with self._alone():
            return self._told(version, lambda: self._update_now(version, on_progress))

    def rollback(self, version: int | None = None, *, on_progress: Progress | None = None) -> SyncReport:
        """Give every healthy server a version that is kept (`BridgeConfig.keep_last`) again, under its number.

        Collective. None: the newest one before the current. The parameters are not read. The next
        `update_weights` still needs a version above the highest there was. Raises VersionError if the
        version is not kept, else as `update_weights` does.
        """
        with self._alone():
            watch = Stopwatch(ranges())
            found: int = agree(self._ranks, lambda: self._kept_version(version))[0]
            watch.meet()
            return self._told(
                found, lambda: self._update(found, watch, lambda: self._sender.resend(found, watch, on_progress))
            )

    @property
    def kept_versions(self) -> list[int]:
        """Versions that `rollback` can send, the oldest first."""
        return self._snapshots.versions

    def verify(self) -> dict[str, int]:
        """Prove that every healthy server holds the bytes of the last update: server -> tensors compared.

        Collective. Compares the checksum of each tensor that was packed with the server's own, read
        from the weights it generates with. Raises VerifyError naming server and tensors.
        """
        self._require_open()
        sent: dict[str, int] = {}
        for part in agree(self._ranks, self._sender.sent_checksums):
            sent |= part
        if not sent:
            raise VerifyError("nothing to verify: no update has been made yet")
        counts: dict[str, int] = agree(self._ranks, lambda: compare(sent, self.server_checksums()))[0]
        return counts

    def server_checksums(self) -> dict[str, dict[str, int]]:
        """uint64 of the bytes of every tensor that each healthy server generates with, by wire name.

        Rank 0 alone; other ranks get {}. Raises the first ServerError.
        """
        self._require_open()
        if self._set is None:
            return {}
        return self._set.require(self._set.healthy, lambda m: m.server.checksums())

    def admit(self, server: str | RolloutServer) -> None:
        """Take a fenced (or new) server into the set.

        It is `catching_up` until it holds the current version: with `keep_last` that is sent to it at once,
        from host memory; without, the next update brings it, and until then it should take no traffic.
        Collective. Raises as `connect` does, leaving the set as it was, and as `update_weights` does where
        it was sent a version (it is then fenced).
        """
        with self._alone():
            name = server.rstrip("/") if isinstance(server, str) else server.name
            admitted = agree(self._ranks, lambda: self._admit(name, server))[0]
            if self._ranks.rank != 0:
                self._transport.meet(Target(*admitted["target"]))
            self._states = decoded(admitted["states"])
            if self._current is None or self._current not in self._snapshots.versions:
                return
            watch, version = Stopwatch(ranges()), self._current
            self._update(version, watch, lambda: self._sender.resend(version, watch, None), only=name)

    def _admit(self, name: str, server: str | RolloutServer) -> dict[str, Any]:
        if self._set is None:
            return {}
        with ExitStack() as opened:
            member = self._set.members.get(name)
            if member is None:
                member = Member(self._server(server))
                opened.callback(member.server.close)
            self._set.settle_release(member)
            info = member.server.info()
            resolve_layout({member.name: info}, self._source.hf_config, expected=self.plan.layout)
            member.server.preflight(self.plan.manifest)
            self._transport.join(member.server)
            member.server.resume()
            member.version = None
            self._set.add(member)
            opened.pop_all()
        self._set.move(member, "catching_up")
        return {"states": encoded(states(self._set)), "target": Target.of(member.server).encoded()}

    def close(self) -> None:
        """Release sockets and groups of this process. The servers keep their weights. Idempotent.

        Waits for an update that another thread is in; its time limits bound that.
        """
        with self._updating:
            self._closed = True
        self._held.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this bridge is closed; connect again")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One update, rollback or admit at a time."""
        self._require_open()
        if not self._updating.acquire(blocking=False):
            raise ConfigError("an update of this bridge is already running; wait for it to return")
        try:
            self._require_open()
            yield
        finally:
            self._updating.release()

    # --- connect

    def _connect(self, servers: Sequence[str | RolloutServer]) -> None:
        agree(self._ranks, lambda: self._make_servers(servers))
        members = [m.server for m in self._set.members.values()] if self._set else []
        targets = agree(self._ranks, lambda: [Target.of(server).encoded() for server in members])[0]
        self._transport = open_transport(self.config, members, [Target(*t) for t in targets])
        self._held.callback(self._transport.release)
        if not self._transport.multi_sender and self._ranks.size > 1 and self.config.senders != "first":
            raise ConfigError(
                f"transport {self.config.transport!r} sends from rank 0 alone; set senders='first' to gather there"
            )
        hello = agree(self._ranks, self._probe)[0]
        layout = ServerLayout.from_hf_config(hello["config"])
        self._reported: dict[str, str | None] = hello["versions"]
        start = time.perf_counter()
        self.plan = agree_on_plan(self._ranks, self._source, layout, self.config)
        self._facts = facts_of(self.plan, time.perf_counter() - start)
        self._gather = Gather(self.plan, self._ranks, self._source)
        self._snapshots = Snapshots(self.config.keep_last)
        self._sender = Sender(self.plan, self._ranks, self._transport, self._gather, self._snapshots, self.config)
        self._states = decoded(agree(self._ranks, self._preflight)[0])

    def _server(self, server: str | RolloutServer) -> RolloutServer:
        if isinstance(server, str):
            return open_server(
                server,
                timeout_s=self.config.request_timeout_s,
                api_key=self.config.api_key,
                admin_api_key=self.config.admin_api_key,
                config=self.config,
            )
        return server

    def _make_servers(self, servers: Sequence[str | RolloutServer]) -> None:
        if self._ranks.rank != 0:
            return
        if isinstance(servers, str) or not servers:
            raise ConfigError(f"servers must be a list of at least one URL, got {servers!r}")
        names = [s.rstrip("/") if isinstance(s, str) else s.name for s in servers]
        if len(set(names)) < len(names):
            raise ConfigError(f"a server is given twice: {', '.join(names)}")
        if self.config.min_healthy > len(names):
            raise ConfigError(f"min_healthy is {self.config.min_healthy}, but there are {len(names)} servers")
        with ExitStack() as opened:
            made = []
            for server in servers:
                made.append(self._server(server))
                opened.callback(made[-1].close)
            self._set = ServerSet(made, on_state=self._on_state)
            opened.pop_all()
        self._held.callback(self._set.close)
        self._exporters = Exporters(self.config)
        self._held.callback(self._exporters.close)

    def _probe(self) -> dict[str, Any]:
        """Rank 0: the config whose layout everyone plans for, and the versions the servers claim."""
        if self._set is None:
            return {}
        infos = self._set.info()
        layout = resolve_layout(infos, self._source.hf_config, expected=None)
        return {
            "config": layout.as_hf_config(),
            "versions": {name: info.weight_version for name, info in infos.items()},
        }

    def _preflight(self) -> dict[str, Any]:
        if self._set is None:
            return {}
        self._set.require(list(self._set.members.values()), lambda m: m.server.preflight(self.plan.manifest))
        return encoded(states(self._set))

    # --- update

    def _told(self, version: int, work: Callable[[], SyncReport]) -> SyncReport:
        """`work`, and its report or its error to whoever was asked for (files, metrics)."""
        try:
            report = work()
        except BaseException as err:
            if self._exporters is not None:
                self._exporters.failure(version, err)
            raise
        if self._exporters is not None:
            self._exporters.success(report)
        return report

    def _update_now(self, version: int, on_progress: Progress | None) -> SyncReport:
        watch = Stopwatch(ranges())
        with watch.stage("check"):
            self._check(version)
        watch.meet()
        return self._update(version, watch, lambda: self._sender.send(version, watch, on_progress))

    def _update(
        self, version: int, watch: Stopwatch, send: Callable[[], None], *, only: str | None = None
    ) -> SyncReport:
        """Begin, send, commit; or every server as it was. `only`: this one server catches up."""
        update = None
        if self._set is not None:
            members = None if only is None else [self._set.members[only]]
            update = Update(self._set, version, self.plan.manifest, self.config, members=members)
        try:
            self._sender.open(update, watch)
            send()
            self._settle_and_commit(update, watch)
        except BaseException as err:
            reason = str(err) or type(err).__name__
            self._sender.close(reason)
            self._snapshots.abort()
            if update is not None:
                update.rollback(reason)
                self._states = states(self._set)
            if isinstance(err, CommitError) or (update is not None and update.committed):
                # Some server has it: the number is used up, and no version is everywhere.
                self._last_version = max(version, self._last_version or 0)
                self._current = None
            raise
        self._sender.close()
        self._snapshots.commit()
        self._current = version
        self._last_version = max(version, self._last_version or 0)
        return self._report(version, watch, update)

    def _kept_version(self, version: int | None) -> int:
        kept = self._snapshots.versions
        older = [v for v in kept if self._current is None or v < self._current]
        if version is None and older:
            version = max(older)
        if version is None or version not in kept:
            wanted = "no older version" if version is None else f"version {version}"
            raise VersionError(f"{wanted} is kept (kept: {kept or 'none'}); BridgeConfig.keep_last says how many are")
        return version

    def _check(self, version: int) -> None:
        """Before any server hears of the update: versions agree and grow, every value is finite."""

        def checked() -> int:
            check_version(version, self._last_version, self._reported)
            return version

        versions = agree(self._ranks, checked)
        if len(set(versions)) > 1:
            raise ConfigError(f"the ranks were given different versions: {versions}")
        agree(self._ranks, self._gather.check)

    def _settle_and_commit(self, update: Update | None, watch: Stopwatch) -> None:
        with watch.stage("commit"):

            def settle_and_commit() -> dict[str, Any]:
                if update is None or self._set is None:
                    return {}
                update.settle(self._sender.failures)
                update.commit()
                return encoded(states(self._set))

            self._states = decoded(agree(self._ranks, settle_and_commit)[0])
            # Also those that failed only now: what they still wait for must not come, nor keep them waiting.
            fenced = [name for name, server in self._states.items() if server.state == "fenced"]
            self._transport.drop(fenced, "it was fenced")

    def _report(self, version: int, watch: Stopwatch, update: Update | None) -> SyncReport:
        mine = measured(
            watch,
            paused_s=update.paused_s if update else 0.0,
            extra_nbytes=self._sender.extra_nbytes,
            traced=self.config.trace_path is not None,
        )
        return sync_report(version, self._facts, self.servers, agree(self._ranks, lambda: mine))
