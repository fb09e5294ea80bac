"""Control of a rollout server over HTTP: SGLang's endpoints, and ours where the server has them.

The payload does not pass here. Every failure becomes a ServerError that names the server and keeps
its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from .errors import (
    ConfigError,
    LayoutError,
    ServerMismatchError,
    ServerRefusedError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from .layout import ServerLayout
from .plan import Manifest
from .protocols import ServerInfo

_RELEASE_TIMEOUT_S = 10.0
"""For calls that undo an update: a stalled server must not hold up the others for long."""


class HttpServer:
    """See `protocols.RolloutServer`. `url`: scheme, host and port, as in http://rollout-0:30000."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not a server address; give http://host:port")
        self.name = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.name, headers=headers, timeout=timeout_s, trust_env=False)

    def info(self) -> ServerInfo:
        answer = self._call("GET", "/server_info")
        ours = answer.get("fp8bridge")
        if not isinstance(ours, dict):
            raise ServerMismatchError(
                f"{self.name} takes no weights over ZMQ (no 'fp8bridge' in its /server_info); start it with "
                "`fp8bridge serve`",
                server=self.name,
            )
        model = ours.get("hf_config") or None
        version = self._call("GET", "/model_info").get("weight_version")
        return ServerInfo(
            engine=str(answer.get("version", "unknown")),
            layout=self._layout(model),
            weight_version=None if version is None else str(version),
            model=model,
            atomic=bool(ours.get("atomic")),
        )

    def preflight(self, manifest: Manifest) -> None:
        try:
            answer = self._call("POST", "/fp8bridge/preflight", manifest.as_dict())
        except ServerRefusedError as err:
            raise ServerMismatchError(f"{self.name} cannot take this model: {err.answer}", server=self.name) from err
        if answer.get("hash") != manifest.hash:
            raise ServerMismatchError(
                f"{self.name} reads plan {answer.get('hash')}, the trainer has {manifest.hash}; use one version "
                "of fp8bridge on both sides",
                server=self.name,
            )

    def pause(self, mode: str, *, lease_s: float) -> None:
        self._call("POST", "/pause_generation", {"mode": mode, "lease_s": lease_s})

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        body = {"selector": "all", "session": token, "manifest_hash": manifest_hash, "lease_s": lease_s}
        self._call("POST", "/begin_weight_update", body)

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        body = {
            "endpoints": list(addresses),
            "session": token,
            "manifest_hash": manifest_hash,
            "timeout_s": timeout_s,
        }
        # No limit of ours on the whole transfer: each bucket has one, and a dead server drops the connection.
        self._call("POST", "/update_weights_from_zmq", body, timeout_s=None)

    def commit(self, token: str, version: str) -> float | None:
        answer = self._call("POST", "/end_weight_update", {"session": token, "weight_version": version})
        load_s = answer.get("load_s")
        return float(load_s) if isinstance(load_s, int | float) else None

    def abort(self, token: str) -> None:
        self._call("POST", "/abort_weight_update", {"session": token}, timeout_s=_RELEASE_TIMEOUT_S)

    def flush_cache(self) -> None:
        self._call("POST", "/flush_cache")

    def resume(self) -> None:
        body = {"torch_empty_cache": False}
        self._call("POST", "/continue_generation", body, timeout_s=min(_RELEASE_TIMEOUT_S, self._timeout_s))

    def checksums(self) -> dict[str, int]:
        answer = self._call("POST", "/weights_checker", {"action": "checksum"})
        return {name: int(value, 16) for name, value in answer["tensors"].items()}

    def close(self) -> None:
        self._client.close()

    def _layout(self, model: dict[str, Any] | None) -> ServerLayout | None:
        if model is None:
            return None
        try:
            return ServerLayout.from_hf_config(model)
        except LayoutError as err:
            raise ServerMismatchError(f"{self.name}: {err.message}", server=self.name) from err

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = -1.0
    ) -> dict[str, Any]:
        """One request; `timeout_s` None waits for ever, -1 takes the configured time."""
        limit = self._timeout_s if timeout_s == -1.0 else timeout_s
        timeout = httpx.Timeout(limit, connect=self._timeout_s)
        try:
            response = self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException as err:
            raise ServerTimeoutError(
                f"{self.name} did not answer {path} in {limit or self._timeout_s:g} s; is it overloaded or stopped?",
                server=self.name,
            ) from err
        except httpx.HTTPError as err:
            raise ServerUnreachableError(
                f"{self.name} is not reachable at {path} ({err}); is the server running?", server=self.name
            ) from err
        return self._parse(path, response)

    def _parse(self, path: str, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            words = _words(answer) or response.text[:500] or response.reason_phrase
            raise ServerRefusedError(
                f"{self.name} answered {path} with {response.status_code}: {words}",
                status=response.status_code,
                answer=words,
                server=self.name,
            )
        return answer if isinstance(answer, dict) else {}


def _words(answer: Any) -> str:
    """The message in any of SGLang's four error bodies."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(answer.get("message") or error or "")
