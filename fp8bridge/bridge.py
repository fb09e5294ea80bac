"""`Bridge`: the one object users hold. It wires the stages together and adds nothing of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from types import TracebackType
from typing import Any

from .config import BridgeConfig
from .errors import BridgeError, CommitError, ConfigError, RankError, VerifyError, error_from_dict
from .gather import Gather
from .layout import ServerLayout
from .pack import SLOTS, Packer
from .plan import Plan
from .planner import make_plan
from .preflight import resolve_layout
from .protocols import RolloutServer
from .ranks import Ranks, SingleRank, agree, connect_ranks
from .report import ServerReport, Spread, Stopwatch, SyncReport
from .servers import HttpServer
from .session import Member, ServerSet, Update, check_version
from .transport import open_transport
from .types import Shard, TensorMeta, WeightSource

Progress = Callable[[int, int], None]
"""Called with (buckets packed on this rank, buckets of this rank)."""


def connect(
    source: WeightSource,
    servers: Sequence[str | RolloutServer],
    config: BridgeConfig | None = None,
    **overrides: Any,
) -> Bridge:
    """Plan the sync of `source` to `servers` and check that every server can take it. Moves no weights.

    Collective: every trainer rank calls it with its own source; `servers` (URLs, or LoopbackServer
    objects) are contacted by rank 0 alone. `overrides` are fields of BridgeConfig.

    Raises, on every rank: ConfigError, PlanError, ServerUnreachableError, ServerMismatchError (not
    FP8, another block size, model, name, shape or dtype). Use it as a context manager.
    """
    if config is not None and overrides:
        raise ConfigError(f"give either a BridgeConfig or its fields, not both: {', '.join(overrides)}")
    try:
        return Bridge(source, servers, config or BridgeConfig(**overrides))
    except TypeError as err:
        if "unexpected keyword argument" not in str(err) or "BridgeConfig" not in str(err):
            raise
        raise ConfigError(f"{err}; see BridgeConfig for the fields there are") from err


class Bridge:
    """A connection of one trainer (all its ranks) to its rollout servers. Made by `connect`.

    plan: the Plan, the same on every rank.
    """

    def __init__(self, source: WeightSource, servers: Sequence[str | RolloutServer], config: BridgeConfig) -> None:
        self.config = config
        self._source = source
        self._last_version: int | None = None
        self._sent: dict[str, int] = {}
        self._set: ServerSet | None = None
        self._closed = False
        self._updating = threading.Lock()
        alone = getattr(source, "alone", False)
        self._ranks: Ranks = SingleRank() if alone else connect_ranks(timeout_s=config.collective_timeout_s)
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
        self._require_open()
        if not self._updating.acquire(blocking=False):
            raise ConfigError("an update of this bridge is already running; wait for it to return")
        try:
            return self._update(version, on_progress)
        finally:
            self._updating.release()

    def verify(self) -> dict[str, int]:
        """Prove that every healthy server holds the bytes of the last update: server -> tensors compared.

        Collective. Compares the checksum of each tensor that was packed with the server's own, read
        from the weights it generates with. Raises VerifyError naming server and tensors.
        """
        self._require_open()
        sent: dict[str, int] = {}
        for part in agree(self._ranks, lambda: self._sent):
            sent |= part
        if not sent:
            raise VerifyError("nothing to verify: no update has been made yet")
        counts: dict[str, int] = agree(self._ranks, lambda: self._compare(sent))[0]
        return counts

    def admit(self, server: str | RolloutServer) -> None:
        """Take a fenced (or new) server into the set; the next update brings it up to date.

        Collective. Raises as `connect` does, leaving the set as it was.
        """
        self._require_open()
        name = server.rstrip("/") if isinstance(server, str) else server.name

        def admit() -> dict[str, Any]:
            if self._set is None:
                return {}
            member = self._set.members.get(name) or Member(self._server(server))
            self._set.settle_release(member)
            info = member.server.info()
            resolve_layout({member.name: info}, self._source.hf_config, expected=self.plan.layout)
            member.server.preflight(self.plan.manifest)
            member.server.resume()
            member.state, member.version, member.reason = "healthy", None, ""
            self._set.add(member)
            return _encoded(_states(self._set))

        self._states = _decoded(agree(self._ranks, admit)[0])

    def close(self) -> None:
        """Release sockets and groups of this process. The servers keep their weights. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._set is not None:
            self._set.close()
            self._set = None
        self._ranks.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this bridge is closed; connect again")

    # --- connect

    def _connect(self, servers: Sequence[str | RolloutServer]) -> None:
        agree(self._ranks, lambda: self._make_servers(servers))
        members = [m.server for m in self._set.members.values()] if self._set else []
        self._transport = open_transport(self.config, members)
        if not self._transport.multi_sender and self._ranks.size > 1 and self.config.senders != "first":
            raise ConfigError(
                f"transport {self.config.transport!r} sends from rank 0 alone; set senders='first' to gather there"
            )
        hello = agree(self._ranks, self._probe)[0]
        layout = ServerLayout.from_hf_config(hello["config"])
        self._reported: dict[str, str | None] = hello["versions"]
        self.plan = self._plan(layout)
        self._gather = Gather(self.plan, self._ranks, self._source)
        self._packer = Packer(self.plan, self._ranks.rank)
        self._states = _decoded(agree(self._ranks, self._preflight)[0])

    def _server(self, server: str | RolloutServer) -> RolloutServer:
        if isinstance(server, str):
            return HttpServer(server, timeout_s=self.config.request_timeout_s, api_key=self.config.api_key)
        return server

    def _make_servers(self, servers: Sequence[str | RolloutServer]) -> None:
        if self._ranks.rank != 0:
            return
        if isinstance(servers, str) or not servers:
            raise ConfigError(f"servers must be a list of at least one URL, got {servers!r}")
        made = [self._server(s) for s in servers]
        names = [s.name for s in made]
        if len(set(names)) < len(names):
            raise ConfigError(f"a server is given twice: {', '.join(names)}")
        if self.config.min_healthy > len(made):
            raise ConfigError(f"min_healthy is {self.config.min_healthy}, but there are {len(made)} servers")
        self._set = ServerSet(made)

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

    def _plan(self, layout: ServerLayout) -> Plan:
        def describe() -> list[Any]:
            metas, shards = self._source.describe()
            trained = [getattr(self._source, "rule", None), getattr(self._source, "requantized", {})]
            return [[astuple(m) for m in metas], [astuple(s) for s in shards], *trained]

        answers = agree(self._ranks, describe)
        described = [
            ([TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in metas], [Shard(*s) for s in shards])
            for metas, shards, _, _ in answers
        ]
        requantized: dict[str, str] = {}
        for _, _, _, reasons in answers:
            requantized |= reasons
        rules = {rule for _, _, rule, _ in answers if rule}
        plan = make_plan(described, layout, self.config, trained_rules=rules, requantized=requantized)
        hashes = agree(self._ranks, lambda: plan.hash)
        if len(set(hashes)) > 1:
            raise ConfigError(f"the ranks made different plans ({hashes}); give every rank the same BridgeConfig")
        return plan

    def _preflight(self) -> dict[str, Any]:
        if self._set is None:
            return {}
        self._set.require(list(self._set.members.values()), lambda m: m.server.preflight(self.plan.manifest))
        return _encoded(_states(self._set))

    # --- update

    def _update(self, version: int, on_progress: Progress | None) -> SyncReport:
        watch = Stopwatch()
        with watch.stage("check"):
            self._check(version)
        update = Update(self._set, version, self.plan.manifest, self.config) if self._set else None
        try:
            self._open(update, watch)
            self._send(watch, on_progress)
            self._settle_and_commit(update, watch)
        except BaseException as err:
            reason = str(err) or type(err).__name__
            self._transport.close(reason)
            if update is not None:
                update.rollback(reason)
                self._states = _states(self._set)
            if isinstance(err, CommitError):
                self._last_version = version  # some server has it; the number is used up
            raise
        self._transport.close()
        self._last_version = version
        return self._report(version, watch, update)

    def _check(self, version: int) -> None:
        """Before any server hears of the update: versions agree and grow, every value is finite."""
        check_version(version, self._last_version, self._reported)
        versions = agree(self._ranks, lambda: version)
        if len(set(versions)) > 1:
            raise ConfigError(f"the ranks were given different versions: {versions}")
        agree(self._ranks, self._read_and_check)

    def _read_and_check(self) -> None:
        before_read = getattr(self._source, "before_read", None)
        if before_read is not None:
            before_read()
        self._gather.check_finite()

    def _open(self, update: Update | None, watch: Stopwatch) -> None:
        """Sessions on all servers, sockets on all senders, and the two connected."""
        with watch.stage("begin"):
            tokens = agree(self._ranks, lambda: update.begin() if update else None)[0]
        with watch.stage("open"):
            rank, manifest = self._ranks.rank, self.plan.manifest
            mine = [b.index for b in manifest.buckets if b.owner == rank]
            addresses = agree(self._ranks, lambda: self._transport.open(tokens, manifest, mine))
            used = [addresses[0], *(addresses[o] for o in self.plan.owners if o != 0)]

            def connect() -> list[str]:
                if update is None:
                    return []
                update.receive(used)
                self._transport.connect(timeout_s=self.config.open_timeout_s, gone=update.gone)
                update.fail(dict(self._transport.failures))
                return [m.name for m in update.updating]

            live = agree(self._ranks, connect)[0]
            self._transport.drop([n for n in tokens if n not in live], "it did not connect to every sender")

    def _send(self, watch: Stopwatch, on_progress: Progress | None) -> None:
        """All rounds: gather, pack, send, two buckets in flight. Every rank learns of any rank's error."""
        self._failures: dict[str, BridgeError] = {}
        for part in agree(self._ranks, lambda: self._send_mine(watch, on_progress)):
            self._failures |= {name: error_from_dict(data) for name, data in part.items()}

    def _send_mine(self, watch: Stopwatch, on_progress: Progress | None) -> dict[str, Any]:
        error: Exception | None = None
        in_slot: list[int] = []
        total = sum(b.owner == self._ranks.rank for b in self.plan.manifest.buckets)
        self._sent = {}
        for round_index in range(len(self.plan.rounds)):
            # After an error the rounds go on: the other ranks still count on this one's messages.
            try:
                bucket, memory = self._gather.bucket(round_index), None
                if bucket is not None:
                    if len(in_slot) >= SLOTS:
                        with watch.stage("wire"):
                            self._transport.wait(in_slot[-SLOTS])
                    memory = self._packer.memory(bucket, len(in_slot) % SLOTS, self._gather.device)
                with watch.stage("gather"):
                    matrices = self._gather.round(round_index, memory)
                if bucket is None or memory is None or error is not None:
                    continue
                with watch.stage("pack"):
                    packed = self._packer.pack(bucket, memory, matrices)
            except RankError:
                raise
            except Exception as err:  # noqa: BLE001 - raised below, when no rank waits for this one any more
                error = error or err
                continue
            self._transport.send(packed)
            in_slot.append(bucket.index)
            self._sent |= {e.name: c for e, c in zip(packed.bucket.entries, packed.checksums, strict=True)}
            if on_progress:
                on_progress(len(in_slot), total)
        if error is not None:
            raise error
        with watch.stage("wire"):
            for index in in_slot[-SLOTS:]:
                self._transport.wait(index)
        return {name: err.to_dict() for name, err in self._transport.failures.items()}

    def _settle_and_commit(self, update: Update | None, watch: Stopwatch) -> None:
        with watch.stage("commit"):

            def settle_and_commit() -> dict[str, Any]:
                if update is None or self._set is None:
                    return {}
                update.settle(self._failures)
                update.commit()
                return _encoded(_states(self._set))

            self._states = _decoded(agree(self._ranks, settle_and_commit)[0])

    def _report(self, version: int, watch: Stopwatch, update: Update | None) -> SyncReport:
        mine = {
            "seconds": watch.total,
            "stages": watch.seconds,
            "paused_s": update.paused_s if update else 0.0,
            "extra_nbytes": self._gather.extra_nbytes + self._packer.extra_nbytes,
        }
        ranks = agree(self._ranks, lambda: mine)
        return SyncReport(
            version=version,
            seconds=max(r["seconds"] for r in ranks),
            stages={name: Spread.of([r["stages"][name] for r in ranks]) for name in watch.seconds},
            paused_s=ranks[0]["paused_s"],
            nbytes=self.plan.nbytes,
            nbytes_gathered=self.plan.gathered_nbytes(),
            buckets=len(self.plan.manifest.buckets),
            rule=self.plan.rule,
            plan_hash=self.plan.hash,
            servers=self.servers,
            fallbacks=tuple(self.plan.fallbacks()),
            extra_nbytes=Spread.of([r["extra_nbytes"] for r in ranks]),
        )

    def _compare(self, sent: dict[str, int]) -> dict[str, int]:
        if self._set is None:
            return {}
        found = self._set.require(self._set.healthy, lambda m: m.server.checksums())
        for name, theirs in found.items():
            wrong = [t for t in sorted(sent.keys() | theirs.keys()) if sent.get(t) != theirs.get(t)]
            if wrong:
                raise VerifyError(
                    f"{name} holds other bytes than were sent in {len(wrong)} of {len(sent)} tensors: "
                    f"{', '.join(wrong[:5])}; do not use its samples, send the weights again",
                    server=name,
                    tensor=wrong[0],
                )
        return {name: len(sent) for name in found}


def _states(servers: ServerSet | None) -> dict[str, ServerReport]:
    members = servers.members.values() if servers else ()
    return {m.name: ServerReport(m.state, m.version, m.reason) for m in members}


def _encoded(states: dict[str, ServerReport]) -> dict[str, Any]:
    return {name: [s.state, s.version, s.reason] for name, s in states.items()}


def _decoded(data: dict[str, Any]) -> dict[str, ServerReport]:
    return {name: ServerReport(*fields) for name, fields in data.items()}
