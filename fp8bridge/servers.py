"""Control of the embedded rollout server over HTTP: SGLang's endpoints and its own. Payload does not pass here."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from .errors import LayoutError, ServerError, ServerMismatchError, ServerRefusedError
from .http import Http
from .layout import ServerLayout
from .plan import Manifest
from .protocols import ServerInfo

_RELEASE_TIMEOUT_S = 10.0
"""For calls that undo an update: a stalled server must not hold up the others for long."""

UNKNOWN_VERSION = "unknown"
"""What a server claims whose version is in doubt."""


class HttpServer:
    """See `protocols.RolloutServer`. `url`: scheme, host and port, as in http://rollout-0:30000."""

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        self._http = Http(url, timeout_s=timeout_s, api_key=api_key, admin_api_key=admin_api_key)
        self.name = self._http.name
        self._timeout_s = timeout_s

    def info(self) -> ServerInfo:
        answer = self._http.call("GET", "/server_info")
        ours = answer.get("fp8bridge")
        if not isinstance(ours, dict):
            raise ServerMismatchError(
                f"{self.name} takes no weights over ZMQ (no 'fp8bridge' in its /server_info); start it with "
                "`fp8bridge serve`",
                server=self.name,
            )
        model = ours.get("hf_config") or None
        version = self._http.call("GET", "/model_info").get("weight_version")
        return ServerInfo(
            engine=str(answer.get("version", "unknown")),
            layout=self._layout(model),
            weight_version=None if version is None else str(version),
            model=model,
            atomic=bool(ours.get("atomic")),
            session=ours.get("session"),
        )

    def preflight(self, manifest: Manifest) -> None:
        try:
            answer = self._http.call("POST", "/fp8bridge/preflight", manifest.as_dict())
        except ServerRefusedError as err:
            raise ServerMismatchError(f"{self.name} cannot take this model: {err.answer}", server=self.name) from err
        if answer.get("hash") != manifest.hash:
            raise ServerMismatchError(
                f"{self.name} reads plan {answer.get('hash')}, the trainer has {manifest.hash}; use one version "
                "of fp8bridge on both sides",
                server=self.name,
            )

    def pause(self, mode: str, *, lease_s: float) -> None:
        self._http.call("POST", "/pause_generation", {"mode": mode, "lease_s": lease_s})

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        body = {"selector": "all", "session": token, "manifest_hash": manifest_hash, "lease_s": lease_s}
        self._http.call("POST", "/begin_weight_update", body)

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        body = {
            "endpoints": list(addresses),
            "session": token,
            "manifest_hash": manifest_hash,
            "timeout_s": timeout_s,
        }
        # No limit of ours on the whole transfer: each bucket has one, and a dead server drops the connection.
        self._http.call("POST", "/update_weights_from_zmq", body, timeout_s=None)

    def commit(self, token: str, version: str) -> float | None:
        answer = self._http.call("POST", "/end_weight_update", {"session": token, "weight_version": version})
        if answer.get("weight_version") != version:
            # What it holds was acknowledged, but not under which name: it must not go by a wrong one.
            with contextlib.suppress(ServerError):  # it is fenced anyhow
                body = {"new_version": UNKNOWN_VERSION, "abort_all_requests": False}
                self._http.call("POST", "/update_weight_version", body)
            raise ServerError(
                f"{self.name} was told to commit version {version} and says {answer.get('weight_version')!r}; it is "
                f"called {UNKNOWN_VERSION!r} until it gets a version again",
                server=self.name,
            )
        load_s = answer.get("load_s")
        return float(load_s) if isinstance(load_s, int | float) else None

    def abort(self, token: str) -> None:
        self._http.call("POST", "/abort_weight_update", {"session": token}, timeout_s=_RELEASE_TIMEOUT_S)

    def flush_cache(self) -> None:
        self._http.call("POST", "/flush_cache")

    def resume(self) -> None:
        body = {"torch_empty_cache": False}
        self._http.call("POST", "/continue_generation", body, timeout_s=min(_RELEASE_TIMEOUT_S, self._timeout_s))

    def checksums(self) -> dict[str, int]:
        answer = self._http.call("POST", "/weights_checker", {"action": "checksum"})
        return {name: int(value, 16) for name, value in answer["tensors"].items()}

    def logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        return self._http.logprobs(prompt, count)

    def repair(self) -> list[str]:
        """Drop an update session that some client left open, and let a paused server go on; what was done.

        For servers whose trainer is gone: an update that is under way is dropped as well.
        """
        done = []
        answer = self._http.call("GET", "/server_info")
        if answer.get("fp8bridge", {}).get("session") is not None:
            self._http.call("POST", "/abort_weight_update", {"whosever": True}, timeout_s=_RELEASE_TIMEOUT_S)
            done.append("dropped an open update session")
        if any(state.get("paused") for state in answer.get("internal_states", ())):
            self.resume()
            done.append("resumed generation")
        return done

    def close(self) -> None:
        self._http.close()

    def _layout(self, model: dict[str, Any] | None) -> ServerLayout | None:
        if model is None:
            return None
        try:
            return ServerLayout.from_hf_config(model)
        except LayoutError as err:
            raise ServerMismatchError(f"{self.name}: {err.message}", server=self.name) from err
