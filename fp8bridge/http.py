"""Requests to a rollout server: every failure becomes a ServerError with its name and its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from .errors import ConfigError, ServerRefusedError, ServerTimeoutError, ServerUnreachableError

_USER_PATHS = ("/generate", "/server_info", "/model_info")
"""What an API key opens; the rest of what is asked here changes a server, and wants its admin key if it has one."""


class Http:
    """One server's HTTP side. Thread-safe. `url`: scheme, host and port, as in http://rollout-0:30000."""

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not a server address; give http://host:port")
        self.name = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {False: _bearer(api_key), True: _bearer(admin_api_key or api_key)}
        self._client = httpx.Client(base_url=self.name, timeout=timeout_s, trust_env=False)

    def logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        """Log-probabilities of the prompt's tokens but the first, then of `count` greedy ones, by /generate."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = self.call("POST", "/generate", body)["meta_info"]
        pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        return [float(pair[0]) for pair in pairs]

    def one_connection_each(self) -> None:
        """From now on, for a server that closes a connection on which it has answered with an error."""
        self._client.headers["Connection"] = "close"

    def close(self) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = -1.0
    ) -> dict[str, Any]:
        """One request; `timeout_s` None waits for ever, -1 takes the configured time."""
        limit = self._timeout_s if timeout_s == -1.0 else timeout_s
        timeout = httpx.Timeout(limit, connect=self._timeout_s)
        try:
            headers = self._headers[path not in _USER_PATHS]
            response = self._client.request(method, path, json=body, headers=headers, timeout=timeout)
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


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _words(answer: Any) -> str:
    """The message in any of SGLang's four error bodies."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(answer.get("message") or error or "")
