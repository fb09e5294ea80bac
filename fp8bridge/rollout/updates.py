"""One weight update at a time: begin, receive, commit as a whole, or drop.

    (none) ─begin─► opening ─idle─► open ─pull─► receiving ─► open ─end─► committing ─► (none)
                                     └── abort, or the lease runs out: everything dropped ──► (none)

State lives on the event loop and is touched nowhere else. Buckets arrive in a worker thread, into
memory that generation cannot see; the switch happens on the engine's thread between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import BridgeError
from ..plan import Manifest
from ..receiver import Receiver
from .answers import Refused
from .bodies import Begin, End, Pull
from .engine import Engine

log = logging.getLogger("fp8bridge.rollout")

ALREADY_OPEN = "a weight-update session is already open; call end_weight_update() first"
NOT_OPEN = "no weight-update session is open; call begin_weight_update() first"
OUTSIDE = "{} must run between begin_weight_update() and end_weight_update()"
"""SGLang's words."""

_TICK_S = 0.1
_MANIFESTS_KEPT = 2


@dataclass(slots=True, eq=False)
class _Session:
    id: str | None
    lease_s: float | None
    state: Literal["opening", "open", "receiving", "committing", "aborting"] = "opening"
    manifest: Manifest | None = None
    pulled: bool = False
    load_s: float = 0.0
    heard_at: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)
    pull: asyncio.Future[int] | None = None

    def touch(self) -> None:
        self.heard_at = time.monotonic()

    @property
    def expired(self) -> bool:
        if self.lease_s is None or self.state not in ("open", "receiving"):
            return False
        return time.monotonic() - self.heard_at > self.lease_s


class Updates:
    """name: how this server calls itself to the senders (its URL). trainer_key: see `Receiver`."""

    def __init__(self, engine: Engine, name: str, *, trainer_key: bytes | None = None) -> None:
        self._trainer_key = trainer_key
        self.name = name
        self.last_abort: dict[str, Any] | None = None
        self._engine = engine
        self._weights = engine.model.weights
        self._session: _Session | None = None
        self._resume_by: float | None = None
        """When a pause ends by itself, unless a session is open or the client says continue."""
        self._manifests: dict[str, Manifest] = {}

    @property
    def state(self) -> str | None:
        return None if self._session is None else self._session.state

    def preflight(self, data: Any) -> tuple[Manifest, list[str]]:
        """The manifest, kept by its hash, and how it differs from this server's weights (then not kept)."""
        manifest = Manifest.from_dict(data)
        found = self._weights.differences(manifest)
        if not found:
            self._manifests.pop(manifest.hash, None)
            self._manifests[manifest.hash] = manifest
            while len(self._manifests) > _MANIFESTS_KEPT:
                self._manifests.pop(next(iter(self._manifests)))
        return manifest, found

    async def begin(self, body: Begin) -> None:
        """Open a session; like SGLang, after the requests that are running have ended, unless paused."""
        if self._session is not None:
            raise Refused(ALREADY_OPEN)
        if body.selector == "draft":
            raise Refused("this server has no draft model; send selector 'target' or 'all'")
        if body.lease_s is not None and not body.lease_s > 0:
            raise Refused(f"lease_s must be a positive number of seconds, got {body.lease_s!r}")
        session = _Session(body.session, body.lease_s)
        if body.manifest_hash is not None:
            self._expect(session, body.manifest_hash)
        self._session = session
        try:
            await asyncio.wrap_future(self._engine.call_when_idle(lambda: None))
        finally:
            if self._session is session and session.state == "opening":
                session.state = "open"
                session.touch()
        if self._session is not session:
            raise Refused("the session was aborted while it waited for running requests to end")

    async def pull(self, body: Pull) -> int:
        """Receive every bucket that is missing; the bytes received. The session stays open whatever comes."""
        session = self._current(OUTSIDE.format("update_weights_from_zmq"), body.session)
        self._require_state(session, "open")
        if not body.endpoints or not body.timeout_s > 0:
            raise Refused("endpoints must name at least one sender, and timeout_s must be positive")
        if session.manifest is None or session.manifest.hash != body.manifest_hash:
            self._expect(session, body.manifest_hash)
        receiver = Receiver(
            self._weights,
            self.name,
            should_stop=session.stop.is_set,
            on_alive=session.touch,
            trainer_key=self._trainer_key,
        )
        session.state, session.pulled = "receiving", True
        session.pull = asyncio.ensure_future(
            asyncio.to_thread(
                receiver.pull, body.endpoints, body.session or "", body.manifest_hash, timeout_s=body.timeout_s
            )
        )
        try:
            return await session.pull
        finally:
            session.touch()
            session.load_s += receiver.load_s
            if session.state == "receiving":
                session.state, session.pull = "open", None

    async def end(self, body: End) -> float:
        """Commit what was received, version and weights in one step, and close the session. Returns the seconds
        spent on checking and staging what came.

        A session that received nothing and names no version is just closed, as SGLang does it.
        """
        session = self._current(NOT_OPEN, body.session)
        self._require_state(session, "open")
        commits = session.pulled or body.weight_version is not None
        if commits and (session.manifest is None or self._weights.missing):
            raise Refused(
                f"nothing was committed: buckets {self._weights.missing[:8]} have not arrived; receive them, or "
                "give up with POST /abort_weight_update"
            )
        session.state = "committing"
        try:
            await asyncio.wrap_future(
                self._engine.call_when_idle(lambda: self._commit(body.weight_version) if commits else None)
            )
        except BridgeError:
            session.state = "open"
            raise
        self._close(session)
        return session.load_s

    async def abort(self, session_id: str | None, reason: str, *, whosever: bool = False) -> bool:
        """Drop what arrived and close; False if nothing was open. Returns once a running pull has stopped.

        whosever: also a session that another client opened.
        """
        if self._session is None:
            return False
        session = self._session if whosever else self._current(NOT_OPEN, session_id)
        if session.state == "committing":
            raise Refused("the session is being committed; it cannot be aborted any more")
        await self._drop(session, reason)
        return True

    async def watch(self) -> None:
        """Abort sessions whose client is gone, and let generation go on. Runs as long as the server."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._session is not None and self._session.expired:
                lease_s = self._session.lease_s
                await self._drop(self._session, f"nothing was heard from the client for {lease_s:g} s (its lease)")
                await self._resume()
            elif self._session is None and self._resume_by is not None and time.monotonic() > self._resume_by:
                await self._resume()

    def expect_resume(self, lease_s: float | None) -> None:
        """A pause ends by itself after this long without a session; None: only when told."""
        self._resume_by = None if lease_s is None else time.monotonic() + lease_s

    async def close(self) -> None:
        if self._session is not None:
            await self._drop(self._session, "the server is shutting down")

    def _commit(self, version: str | None) -> None:
        self._weights.commit()
        if version is not None:
            self._engine.set_version(version)

    async def _drop(self, session: _Session, reason: str) -> None:
        session.state = "aborting"
        session.stop.set()
        if session.pull is not None:
            await asyncio.wait([session.pull])
        if self._session is not session:
            return
        self._close(session)
        self.last_abort = {"reason": reason, "time": time.time(), "weight_version": self._engine.weight_version}
        log.warning("weight update aborted: %s; weight version stays %s", reason, self._engine.weight_version)

    def _close(self, session: _Session) -> None:
        self._weights.abort()
        self._session = None
        # Whoever opened it still has to say continue; a lease holds for that too.
        self.expect_resume(session.lease_s)

    async def _resume(self) -> None:
        self._resume_by = None
        if self._engine.paused:
            await asyncio.wrap_future(self._engine.resume())
            log.warning("nobody said continue: generation goes on with version %s", self._engine.weight_version)

    def _expect(self, session: _Session, manifest_hash: str) -> None:
        manifest = self._manifests.get(manifest_hash)
        if manifest is None:
            raise Refused(f"manifest {manifest_hash!r} is not known here; send it to POST /fp8bridge/preflight first")
        if session.manifest is not None and session.pulled:
            raise Refused("this session has begun with another manifest; abort it and begin again")
        self._weights.begin(manifest)
        session.manifest = manifest

    def _current(self, if_none: str, session_id: str | None) -> _Session:
        if self._session is None:
            raise Refused(if_none)
        if self._session.id != session_id:
            raise Refused("another client's weight-update session is open; `session` must be the one it began with")
        self._session.touch()
        return self._session

    def _require_state(self, session: _Session, state: str) -> None:
        if session.state != state:
            raise Refused(f"the weight-update session is {session.state}; wait for that, or abort it")
