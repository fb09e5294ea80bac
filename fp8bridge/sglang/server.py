"""Control of a stock SGLang server: `protocols.RolloutServer` in terms of its own endpoints.

Weights that arrive over `nccl` are loaded bucket by bucket into the live model: there is no way back but
to send a whole version again. So an update that ends early leaves the server fenced, with a weight
version that no trainer ever gives out.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import (
    LayoutError,
    ServerError,
    ServerMismatchError,
    ServerRefusedError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from ..http import Http
from ..layout import ServerLayout
from ..plan import Bucket, Manifest
from ..protocols import ServerInfo
from ..staging import describe_differences
from .agent import LOADER, LoaderAgent, Report
from .client import INCOMPLETE, SESSIONS_SINCE, TESTED, SglangClient, incomplete, version_of

T = TypeVar("T")

log = logging.getLogger("fp8bridge")

_RELEASE_TIMEOUT_S = 10.0
_TAKEN = "already open"
"""In SGLang's refusal to begin a second session."""


class SglangServer:
    """`facts`: its /server_info; `host`: address of this trainer that it can reach. Made by `open_server`.

    replay: load by the copies that the rehearsal saw, where they are the whole load. load_way: which way
    the last load went. held: whoever made it pauses and resumes the server, so that no rehearsal does.
    sessions_wanted: False for a way of loading that itself processes the weights, as the end of a session would.

    Raises ServerMismatchError for what no update can be sent to: pipeline parallel servers and replicas
    behind one port (dp_size), whose ranks SGLang's own update groups do not cover.
    """

    atomic = False

    def __init__(self, http: Http, facts: dict[str, Any], *, timeout_s: float, host: str) -> None:
        self.name = http.name
        self._http = http
        self.client = SglangClient(http)
        self._host = host
        self.replay = True
        self.held = False
        self.sessions_wanted = True
        self.load_way = "load_weights"
        self._manifest: Manifest | None = None
        self._timeout_s = timeout_s
        self._session_open = False
        self._unheard = False
        """A begin of ours was not answered: a server that wakes up may open that session yet."""
        self._touched = False
        self._token = ""
        self._taken: ServerRefusedError | None = None
        self._learn(facts)
        if not TESTED[0] <= self.version <= TESTED[1]:
            log.warning("%s is SGLang %s; tested are 0.5.10 to 0.5.23", self.name, facts.get("version"))

    def _learn(self, facts: dict[str, Any]) -> None:
        """At the start, and whenever the server is asked anew: it may have been restarted as another one."""
        self.facts = facts
        self.version = version_of(str(facts.get("version")))
        self.tp_size = int(facts.get("tp_size", 1))
        self.has_sessions = self.version >= SESSIONS_SINCE
        self.loader = LoaderAgent(self.client, self.tp_size, self._host)
        self.has_loader = LOADER in (facts.get("custom_weight_loader") or ())
        for size in ("pp_size", "dp_size"):
            if int(facts.get(size) or 1) > 1:
                raise ServerMismatchError(
                    f"{self.name} runs with {size} {facts[size]}: SGLang's weight update reaches tensor-parallel "
                    "ranks alone; serve each replica on its own port, and without pipeline stages",
                    server=self.name,
                )

    # --- protocols.RolloutServer

    def info(self) -> ServerInfo:
        self._learn(self.client.server_info())
        model = self._model()
        return ServerInfo(
            engine=f"sglang {self.facts.get('version', 'unknown')}",
            layout=self._layout(model),
            weight_version=self.client.weight_version(),
            model=model,
            atomic=self.atomic,
        )

    def preflight(self, manifest: Manifest) -> None:
        """Where our loader is in the server: a rehearsal of the load. Else what can be known of a server that
        does not tell its tensors: the config it was started from. One that allows neither is refused."""
        self._manifest = manifest
        layout = self._layout(self._model())
        if layout is None and not self.has_loader:
            raise ServerMismatchError(
                f"{self.name} was started from {self.facts.get('model_path')}, which is not on this host, so nothing "
                "tells whether it can take this model, and SGLang would answer 200 to any shape; start it with "
                f"--custom-weight-loader {LOADER}, or put its folder where the trainer can read it",
                server=self.name,
            )
        if layout is not None and (found := layout.differences(manifest.layout)):
            raise ServerMismatchError(f"{self.name} has another layout: {'; '.join(found)}", server=self.name)
        if self.has_loader:
            self._rehearse(manifest)

    def _rehearse(self, manifest: Manifest) -> None:
        reports = self._in_session(
            lambda: self._load_call("rehearse", {"manifest": manifest.as_dict(), "tp_size": self.tp_size})
        )
        problems = next((r.data["problems"] for r in reports if r.data["problems"]), None)
        if problems:
            raise ServerMismatchError(
                f"{self.name} cannot take this model: {describe_differences(problems)}", server=self.name
            )

    def _in_session(self, call: Callable[[], T]) -> T:
        """SGLang takes a loader's call only inside a session, and not while requests run."""
        if not self.has_sessions:
            return call()
        if not self.held:
            self.client.pause("retract")
        try:
            self._begin()
            try:
                return call()
            finally:
                self.client.end()
        finally:
            if self._taken is None and not self.held:
                self.resume()

    def _begin(self) -> None:
        """Open a session. One that is there already is another trainer's: that one has paused the server and
        will resume it, so from here to the next try nothing of ours does."""
        self._taken = None
        self._end_unheard()
        try:
            self.client.begin()
        except (ServerTimeoutError, ServerUnreachableError):
            self._unheard = True
            raise
        except ServerRefusedError as err:
            if _TAKEN not in err.answer:
                raise
            self._taken = ServerRefusedError(
                f"{self.name} is being updated by another trainer ({err.answer}); if that one is gone, "
                f"`fp8bridge doctor --server {self.name} --repair` closes its session",
                status=err.status,
                answer=err.answer,
                server=self.name,
            )
            raise self._taken from err

    def pause(self, mode: str, *, lease_s: float) -> None:
        if mode == "retract" and not self.has_sessions:
            raise ServerMismatchError(
                f"{self.name} is SGLang {self.facts.get('version')}, which dies when its cache is flushed with "
                "retracted requests; set pause_mode='abort', or use 0.5.21 or newer",
                server=self.name,
            )
        self.client.pause(mode)

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        self._touched = False
        self._token = token
        self._session_open = False
        if self.has_sessions and self.sessions_wanted:
            self._begin()
            self._session_open = True

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        """The transport makes a request for each bucket itself, together with its broadcast."""

    def disclaim(self) -> None:
        """Before the first byte of the old version is overwritten: whoever dies from now on, no one believes
        that it is there."""
        if not self._touched:
            self.client.set_version(incomplete(self._token))
            self._touched = True

    def load_bucket(self, bucket: Bucket, group: str, *, timeout_s: float) -> None:
        """Receive and load one bucket, from the transport's group. From here on the old version is gone."""
        self.disclaim()
        self.client.update_from_distributed(bucket, group, timeout_s=timeout_s)

    def load_shared(
        self,
        bucket: Bucket,
        manifest_hash: str,
        offset: int,
        exported: dict[str, Any] | None,
        *,
        trainer: str,
        timeout_s: float,
    ) -> None:
        """Load a bucket that begins at `offset` of the trainer's GPU memory; `exported`: that memory, the first time.
        A new `trainer` makes the server let go of another one's.

        Returns when the server's device has read it.
        """
        self.disclaim()
        body = {"manifest_hash": manifest_hash, "index": bucket.index, "offset": offset, "export": exported}
        body |= {"trainer": trainer, "replay": self.replay}
        reports = self.loader.call("load_shared", body, timeout_s=timeout_s)
        self.load_way = str(reports[0].data["way"])

    def commit(self, token: str, version: str) -> float | None:
        self._end()
        self.client.set_version(version)
        if (claimed := self.client.weight_version()) != version:
            self.client.set_version(incomplete(token))
            raise ServerError(f"{self.name} was told to call itself {version} and says {claimed!r}", server=self.name)
        self._touched = False
        return None

    def abort(self, token: str) -> None:
        if self._taken is not None:
            raise self._taken
        try:
            self._end()
        except ServerRefusedError as err:
            # A refusal of the abort itself would mean another trainer's session; this one is ours to clean up.
            raise ServerError(err.message, server=self.name) from err
        # Its own word: also other trainer ranks may have sent it buckets.
        if str(self.client.weight_version()).startswith(INCOMPLETE):
            raise ServerError(
                f"{self.name} holds a mix of two versions, since SGLang loads in place; send it a whole one "
                "(bridge.admit does, with keep_last, or the next update after it)",
                server=self.name,
            )

    def flush_cache(self) -> None:
        self.client.flush_cache(timeout_s=self._timeout_s)

    def resume(self) -> None:
        self.client.resume(timeout_s=min(_RELEASE_TIMEOUT_S, self._timeout_s))

    def checksums(self) -> dict[str, int]:
        if self.has_loader and self._manifest is not None:
            return self._in_session(self._read_back)
        raise ServerMismatchError(
            f"{self.name} cannot tell the bytes of its tensors: SGLang's own checker hashes dequantized, fused "
            "weights. Start it with --custom-weight-loader fp8bridge.sglang.loader.load",
            server=self.name,
        )

    def replica_checksums(self) -> dict[str, str]:
        """SGLang's own hash of each parameter of each TP rank, dequantized: equal on servers that hold the same, and
        comparable with nothing else. Needs no loader of ours, and a GPU on the server."""
        ranks = self.client.checker("checksum").get("ranks") or []
        found = {f"{name}, rank {i}": str(v) for i, r in enumerate(ranks) for name, v in r["checksums"].items()}
        if not found:
            raise ServerMismatchError(f"{self.name} told no checksums of its parameters", server=self.name)
        return found

    def _load_call(self, phase: str, data: dict[str, Any]) -> list[Report]:
        return self.loader.call(phase, data, timeout_s=self._timeout_s)

    def _read_back(self) -> dict[str, int]:
        """Checksums of the tensors as they were sent, put together from what each TP rank has of them."""
        assert self._manifest is not None, "rehearsed"
        body: dict[str, Any] = {"manifest_hash": self._manifest.hash}
        if self.tp_size == 1:
            return dict(self._load_call("checksums", body)[0].data["tensors"])
        found: dict[str, int] = {}
        body["folder"] = self._load_call("share", {})[0].data["folder"]
        try:
            for bucket in self._manifest.buckets:
                self._load_call("put", body | {"index": bucket.index})
                found |= self._load_call("compare", body | {"index": bucket.index})[0].data["tensors"]
        finally:
            self._load_call("drop", {})
        return found

    def logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        return self._http.logprobs(prompt, count)

    def repair(self) -> list[str]:
        """Close a session that a trainer left open, and let generation go on; what was done."""
        done = []
        if self.has_sessions:
            try:
                self.client.end()
                self.client.set_version(f"{INCOMPLETE}-repaired")
                done.append("closed an open update session; its weights may be a mix of two versions")
            except ServerRefusedError:
                pass  # none was open
        self.resume()
        done.append("resumed generation")
        return done

    def close(self) -> None:
        self.client.close()

    # --- inside

    def _end_unheard(self) -> None:
        if self._unheard:
            with contextlib.suppress(ServerRefusedError):  # there is none
                self.client.end()
            self._unheard = False

    def _end(self) -> None:
        self._end_unheard()
        if self._session_open:
            self.client.end()
            self._session_open = False

    def _model(self) -> dict[str, Any] | None:
        """Its Hugging Face config, if the folder it was started from can be read here."""
        path = Path(str(self.facts.get("model_path", ""))) / "config.json"
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as err:
            raise ServerMismatchError(
                f"{self.name} serves {path}, which cannot be read: {err}", server=self.name
            ) from err
        return found

    def _layout(self, model: dict[str, Any] | None) -> ServerLayout | None:
        if model is None:
            return None
        try:
            return ServerLayout.from_hf_config(model)
        except LayoutError as err:
            raise ServerMismatchError(f"{self.name}: {err.message}", server=self.name) from err
