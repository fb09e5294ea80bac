"""Control of a vLLM server: `protocols.RolloutServer` in terms of its weight-transfer endpoints.

An update is atomic up to the load itself, which is the commit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LayoutError, ServerError, ServerMismatchError, ServerRefusedError
from ..http import Http
from ..layout import ServerLayout
from ..plan import Manifest
from ..protocols import ServerInfo

INCOMPLETE = "incomplete"
"""Prefix of the weight version while the load runs, and for good if it ends early."""
_MODES = {"abort": "abort", "in_place": "keep"}
_OPEN, _CLOSED = "already active", ("must be called before", "without a matching")
"""In vLLM's refusals: of a second session, and of calls outside of one."""


class VllmServer:
    """Made by `open_server`. vLLM must run with VLLM_SERVER_DEV_MODE=1 and our weight-transfer backend."""

    def __init__(self, http: Http) -> None:
        self.name = http.name
        self._http = http
        http.one_connection_each()
        self._manifest: Manifest | None = None
        self._token = ""
        self._session_open = False
        self._touched = False

    def info(self) -> ServerInfo:
        version = self._http.call("GET", "/version").get("version", "unknown")
        model = self._model()
        try:
            layout = None if model is None else ServerLayout.from_hf_config(model)
        except LayoutError as err:
            raise ServerMismatchError(f"{self.name}: {err.message}", server=self.name) from err
        weights = self._http.call("GET", "/weight_info").get("weight_version")
        return ServerInfo(
            engine=f"vllm {version}", layout=layout, weight_version=weights, model=model, atomic=True
        )  # fmt: skip

    def preflight(self, manifest: Manifest) -> None:
        """A rehearsal of the load, in a session that changes nothing."""
        self._manifest = manifest
        self._start()
        try:
            self._update("rehearse", manifest=manifest.as_dict())
        except ServerRefusedError as err:
            raise ServerMismatchError(f"{self.name} cannot take this model: {err.answer}", server=self.name) from err
        finally:
            self._finish_unless_closed()

    def pause(self, mode: str, *, lease_s: float) -> None:
        if mode not in _MODES:
            raise ServerMismatchError(
                f"{self.name} is vLLM, which cannot {mode} its requests; set pause_mode='abort'", server=self.name
            )
        self._http.call("POST", f"/pause?mode={_MODES[mode]}")

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        self._token, self._touched = token, False
        self._start()

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        assert self._manifest is not None, "preflight came first"
        told = {"endpoints": list(addresses), "session": token, "timeout_s": timeout_s, "name": self.name}
        # No limit of ours on the whole transfer: each bucket has one, in the worker.
        self._update("pull", manifest=self._manifest.as_dict(), **told)

    def commit(self, token: str, version: str) -> float | None:
        self._set_version(f"{INCOMPLETE}-{self._token[:8]}")
        self._touched = True
        start = time.perf_counter()
        self._http.call("POST", "/finish_weight_update", {"weight_version": version})
        self._session_open = self._touched = False
        return time.perf_counter() - start

    def abort(self, token: str) -> None:
        if self._touched:
            raise ServerError(f"{self.name} failed while it loaded; restart it, then bridge.admit", server=self.name)
        if not self._session_open:
            return
        try:
            self._update("drop")
        except ServerRefusedError as err:
            if not _is(err, *_CLOSED):
                raise
            self._session_open = False
        else:
            self._finish_unless_closed()

    def flush_cache(self) -> None:
        self._http.call("POST", "/reset_prefix_cache")

    def resume(self) -> None:
        self._http.call("POST", "/resume")

    def checksums(self) -> dict[str, int]:
        raise ServerMismatchError(
            f"{self.name} cannot tell the bytes it was sent: vLLM's own checker hashes fused weights", server=self.name
        )

    def logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        raise ServerMismatchError(f"{self.name} is vLLM; its logprobs are not compared here", server=self.name)

    def repair(self) -> list[str]:
        """Close a session that a trainer left open, and let generation go on; what was done."""
        done = ["closed an open update session"] if self._finish_unless_closed() else []
        self.resume()
        return [*done, "resumed generation"]

    def close(self) -> None:
        self._http.close()

    def _start(self) -> None:
        try:
            self._http.call("POST", "/start_weight_update")
        except ServerRefusedError as err:
            if not _is(err, _OPEN):
                raise
            raise ServerRefusedError(
                f"{self.name} is being updated by another trainer; if that one is gone, `fp8bridge doctor --server "
                f"{self.name} --repair` closes its session",
                status=err.status,
                answer=err.answer,
                server=self.name,
            ) from err
        self._session_open = True

    def _update(self, phase: str, **told: Any) -> None:
        self._http.call("POST", "/update_weights", {"update_info": {"phase": phase, **told}}, timeout_s=None)

    def _finish_unless_closed(self) -> bool:
        """vLLM closes a session by itself when an update in it fails."""
        self._session_open = False
        try:
            self._http.call("POST", "/finish_weight_update")
        except ServerRefusedError as err:
            if not _is(err, *_CLOSED):
                raise
            return False
        return True

    def _set_version(self, version: str) -> None:
        self._http.call("POST", "/update_weight_version", {"new_version": version})

    def _model(self) -> dict[str, Any] | None:
        """Its Hugging Face config, if the folder it was started from can be read here."""
        models = self._http.call("GET", "/v1/models").get("data") or [{}]
        path = Path(str(models[0].get("root", ""))) / "config.json"
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as err:
            raise ServerMismatchError(
                f"{self.name} serves {path}, which cannot be read: {err}", server=self.name
            ) from err
        return found


def _is(err: ServerRefusedError, *words: str) -> bool:
    return any(word in err.answer for word in words)
