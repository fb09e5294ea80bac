"""One update of a set of servers: begin, all acknowledged, commit; or every one as it was.

    healthy ──────begin──► updating ──commit──► healthy (new version)
    catching_up ──begin──►    │ failed, or another server's failure ended the update
                              ▼
          as it was before, resumed; or, if it was the one that failed, fenced

Rank 0 alone runs this. Whatever happens, a server is resumed or fenced at the end: a fenced server
is one that missed a version, or that may still be paused because it did not answer; it takes no part in
later updates until it is admitted. A server that was admitted is catching up until it holds a version.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from .config import BridgeConfig
from .errors import (
    BridgeError,
    CommitError,
    ServerError,
    ServerRefusedError,
    ServerTimeoutError,
    VersionError,
)
from .plan import Manifest
from .protocols import RolloutServer, ServerInfo

log = logging.getLogger("fp8bridge")

T = TypeVar("T")
State = Literal["healthy", "updating", "fenced", "catching_up"]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server has changed its state. version: what it committed for us last; reason: why it is fenced."""

    server: str
    state: State
    version: int | None
    reason: str


OnState = Callable[[ServerEvent], None]


@dataclass(slots=True)
class Member:
    """A server of the set. `version`: the last one it committed for us, None before the first."""

    server: RolloutServer
    state: State = "healthy"
    version: int | None = None
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the last version it committed: `report.SERVER_STAGES`."""
    releasing: Future[None] | None = None
    """Abort and resume of a fenced server, still under way; the others do not wait for it."""

    @property
    def name(self) -> str:
        return self.server.name


class ServerSet:
    """The servers of a bridge. Not thread-safe; calls to the servers run in parallel inside.

    on_state: told of every change of a state, one at a time, in a thread of its own; what it raises is
    logged and changes nothing.
    """

    def __init__(self, servers: Sequence[RolloutServer], *, on_state: OnState | None = None) -> None:
        self.members = {s.name: Member(s) for s in servers}
        self._on_state = on_state
        self._teller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fp8bridge-state")
        # Two calls per server can run at a time (receive, and whatever ends it); threads are made on demand.
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="fp8bridge-server")

    @property
    def healthy(self) -> list[Member]:
        return [m for m in self.members.values() if m.state == "healthy"]

    @property
    def ready(self) -> list[Member]:
        """Those that an update goes to."""
        return [m for m in self.members.values() if m.state in ("healthy", "catching_up")]

    def move(self, member: Member, state: State, *, reason: str = "") -> None:
        """Set a member's state, and tell."""
        member.state, member.reason = state, reason
        if self._on_state is not None:
            event = ServerEvent(member.name, state, member.version, reason)
            self._teller.submit(self._tell, self._on_state, event)

    def _tell(self, on_state: OnState, event: ServerEvent) -> None:
        try:
            on_state(event)
        except Exception:
            log.exception("on_state raised for %s, %s", event.server, event.state)

    def each(self, members: Sequence[Member], call: Callable[[Member], T]) -> dict[str, T | BridgeError]:
        """`call` for every member at once; its value, or the BridgeError it raised."""
        futures = {m.name: self._pool.submit(call, m) for m in members}
        try:
            wait(futures.values())
        finally:
            # Also after an interrupt: what follows must not meet a call of this round that is still under way.
            wait(futures.values())
        answers: dict[str, T | BridgeError] = {}
        for name, future in futures.items():
            answer = _outcome(future)
            answers[name] = answer
        return answers

    def submit(self, member: Member, call: Callable[[Member], None]) -> Future[None]:
        return self._pool.submit(call, member)

    def require(self, members: Sequence[Member], call: Callable[[Member], T]) -> dict[str, T]:
        """`call` for every member at once; the first error is raised after all have answered."""
        found: dict[str, T] = {}
        for name, answer in self.each(members, call).items():
            if isinstance(answer, BridgeError):
                raise answer
            found[name] = answer
        return found

    def info(self) -> dict[str, ServerInfo]:
        """What every member says about itself. Raises the first ServerError."""
        return self.require(list(self.members.values()), lambda m: m.server.info())

    def add(self, member: Member) -> None:
        """A new member, or one that is there already."""
        self.members[member.name] = member

    def fence(self, member: Member, error: BridgeError) -> None:
        self.move(member, "fenced", reason=str(error))
        log.warning("fenced %s: %s", member.name, error)

    def settle_release(self, member: Member) -> None:
        """Wait until nothing of an earlier update can still reach this server."""
        if member.releasing is not None:
            error = _outcome(member.releasing)
            if isinstance(error, BridgeError):
                log.warning("%s may still be paused: %s", member.name, error)
            member.releasing = None

    def close(self) -> None:
        for member in self.members.values():
            self.settle_release(member)
        for member in self.members.values():
            member.server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._teller.shutdown(wait=True)


def _outcome(future: Future[T]) -> T | BridgeError:
    try:
        return future.result()
    except BridgeError as err:
        return err


class Update:
    """One version on its way to the servers of a set, or to some of them. Used once.

    members: None: all that are ready, of which `min_healthy` must get it; else these, each of them.
    """

    def __init__(
        self,
        servers: ServerSet,
        version: int,
        manifest: Manifest,
        config: BridgeConfig,
        *,
        members: Sequence[Member] | None = None,
    ) -> None:
        self.version = version
        self.paused_s = 0.0
        self.committed: list[str] = []
        """Servers that hold the version."""
        self._servers = servers
        self._manifest = manifest
        self._config = config
        self._members = list(servers.ready if members is None else members)
        self._least = config.min_healthy if members is None else len(self._members)
        self._before: dict[str, State] = {m.name: m.state for m in self._members}
        self._tokens: dict[str, str] = {}
        self._receiving: dict[str, Future[None]] = {}
        self._failed: dict[str, BridgeError] = {}
        self._paused_at = 0.0

    @property
    def updating(self) -> list[Member]:
        return [m for m in self._servers.members.values() if m.state == "updating"]

    def begin(self) -> dict[str, str]:
        """Pause every server and open a session on it: server name -> its secret token.

        Raises, with every server resumed, if too few could begin.
        """
        members = self._members
        self._require_enough(len(members))
        self._tokens = {m.name: secrets.token_hex(16) for m in members}
        self._paused_at = time.perf_counter()
        for member in members:
            self._servers.move(member, "updating")
        answers = self._servers.each(members, self._begin_one)
        self.fail({name: answer for name, answer in answers.items() if isinstance(answer, BridgeError)})
        return {m.name: self._tokens[m.name] for m in self.updating}

    def receive(self, addresses: Sequence[str]) -> None:
        """Tell every server to fetch its buckets; `gone` and `settle` learn how it went."""
        for member in self.updating:
            self._receiving[member.name] = self._servers.submit(
                member,
                lambda m: m.server.receive(
                    addresses,
                    self._tokens[m.name],
                    self._manifest.hash,
                    timeout_s=self._config.bucket_timeout_s,
                ),
            )

    def gone(self, name: str) -> BridgeError | None:
        """The error of a server whose `receive` has already failed; never waits."""
        future = self._receiving.get(name)
        if future is None or not future.done():
            return None
        answer = _outcome(future)
        return answer if isinstance(answer, BridgeError) else None

    def fail(self, errors: dict[str, BridgeError]) -> None:
        """Take these servers out of the update: each goes back to its old version and is fenced.

        Raises, with every server resumed, if too few remain.
        """
        members = [m for m in self.updating if m.name in errors]
        for member in members:
            self._failed[member.name] = errors[member.name]
            self._servers.fence(member, errors[member.name])
            member.releasing = self._servers.submit(member, self._release)
        if len(self.updating) < self._least:
            first = next(iter(errors.values()))
            self.rollback(f"fewer than {self._least} servers are left")
            raise first

    def settle(self, sender_failures: dict[str, BridgeError]) -> None:
        """Wait until each server says that it holds everything. Raises as `fail` does."""
        failures = dict(sender_failures)
        deadline = time.monotonic() + self._config.request_timeout_s
        for member in self.updating:
            if member.name in failures:
                continue
            if error := self._receive_error(member.name, deadline):
                failures[member.name] = error
        if failures:
            self.fail(failures)

    def _receive_error(self, name: str, deadline: float) -> BridgeError | None:
        future = self._receiving[name]
        wait([future], timeout=max(0.0, deadline - time.monotonic()))
        if not future.done():
            message = f"{name} acknowledged every bucket and then did not say that the update is whole"
            return ServerTimeoutError(message, server=name)
        return self.gone(name)

    def commit(self) -> list[str]:
        """Every server still in the update switches to the new version and goes on generating.

        Returns the names that hold it. Raises CommitError if they are fewer than `min_healthy`.
        """
        members = self.updating
        answers: dict[str, BridgeError | None] = {}

        def commit(member: Member) -> None:
            try:
                self._commit_one(member)
                answers[member.name] = None
            except BridgeError as err:
                answers[member.name] = err

        try:
            self._servers.each(members, commit)
        finally:
            # Also after an interrupt: a server that was told to commit has done so or is fenced.
            errors = self._settle_commit(members, answers)
        if len(self.committed) < self._least:
            raise CommitError(
                f"version {self.version} is on {len(self.committed)} servers, {self._least} were asked for; "
                f"fenced: {'; '.join(str(e) for e in errors.values())}",
                version=self.version,
            )
        return self.committed

    def _settle_commit(self, members: list[Member], answers: dict[str, BridgeError | None]) -> dict[str, BridgeError]:
        errors: dict[str, BridgeError] = {}
        for member in members:
            lost = ServerError(f"the commit of {member.name} was not heard out", server=member.name)
            answer = answers.get(member.name, lost)
            if answer is None:
                member.version = self.version
                self.committed.append(member.name)
                self._servers.move(member, "healthy")
            else:
                errors[member.name] = answer
                self._servers.fence(member, answer)
                member.releasing = self._servers.submit(member, self._release)
        self.paused_s = time.perf_counter() - self._paused_at
        return errors

    def rollback(self, reason: str) -> None:
        """Give up: every server drops what arrived and generates with its old version again.

        One that does not confirm it is fenced. Calling it twice is harmless.
        """
        members = self.updating
        if members:
            log.warning("version %d is given up: %s", self.version, reason)
        for name, answer in self._servers.each(members, self._release).items():
            member = self._servers.members[name]
            if isinstance(answer, BridgeError):
                self._servers.fence(member, answer)
            else:
                self._servers.move(member, self._before[name])
        self.paused_s = time.perf_counter() - self._paused_at if self._paused_at else 0.0
        for member in self._servers.members.values():
            self._servers.settle_release(member)

    def _begin_one(self, member: Member) -> None:
        # A session outlives a silent bucket and a slow commit request, and no more.
        lease_s = self._config.bucket_timeout_s + self._config.request_timeout_s
        member.server.pause(self._config.pause_mode, lease_s=lease_s)
        token = self._tokens[member.name]
        try:
            member.server.begin(token, self._manifest.hash, lease_s=lease_s)
        except ServerRefusedError as err:
            # A server that was restarted since has lost the plan. If it still fits, this update brings it
            # up to date; any other refusal comes again.
            log.warning("%s refused to begin (%s); comparing the plan with it again", member.name, err.answer)
            member.server.preflight(self._manifest)
            member.server.begin(token, self._manifest.hash, lease_s=lease_s)

    def _commit_one(self, member: Member) -> None:
        start = time.perf_counter()
        load_s = member.server.commit(self._tokens[member.name], str(self.version))
        committed = time.perf_counter()
        if self._config.pause_mode != "in_place":
            member.server.flush_cache()
        member.server.resume()
        member.seconds = {"commit": committed - start, "paused": time.perf_counter() - self._paused_at}
        if load_s is not None:
            member.seconds["load"] = load_s

    def _release(self, member: Member) -> None:
        """Abort, then resume; also where the abort got no answer. A refusal means that the session there is
        another trainer's: that one has paused the server and will resume it."""
        try:
            member.server.abort(self._tokens[member.name])
        except ServerRefusedError:
            raise
        except ServerError:
            member.server.resume()
            raise
        member.server.resume()

    def _require_enough(self, count: int) -> None:
        if count < self._least:
            fenced = "; ".join(f"{m.name}: {m.reason}" for m in self._servers.members.values() if m.state == "fenced")
            raise ServerError(
                f"{count} healthy servers, {self._least} are needed (fenced: {fenced or 'none'}); "
                "repair them and bridge.admit(url)"
            )


def check_version(version: object, last: int | None, reported: dict[str, str | None]) -> None:
    """Raise VersionError unless `version` is an int above the last one and above every server's claim."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise VersionError(f"version must be an integer >= 0, got {version!r}")
    if last is not None and version <= last:
        raise VersionError(f"version {version} is not larger than the last one, {last}; pass a growing number")
    for name, text in reported.items():
        if text and text.isdigit() and int(text) >= version:
            raise VersionError(
                f"{name} already claims version {text}, which is not below {version}; continue from there, or "
                "restart the server",
                server=name,
                version=version,
            )
