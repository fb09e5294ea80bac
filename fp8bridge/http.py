"""Requests to a rollout server: every failure becomes a ServerError with its name and its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from .errors import ConfigError, ServerError, ServerRefusedError, ServerTimeoutError, ServerUnreachableError

_USER_PATHS = ("/generate", "/server_info", "/model_info")
"""What an API key opens; the rest of what is asked here changes a server, and wants its admin key if it has one."""

CONFIGURED = -1.0
"""As a time limit: the one that was given when the client was made."""


class _Side:
    """What a request is made of and what its answer means, however it travels."""

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not a server address; give http://host:port")
        self.name = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {False: _bearer(api_key), True: _bearer(admin_api_key or api_key)}
        self._settings: dict[str, Any] = {"base_url": self.name, "timeout": timeout_s, "trust_env": False}

    def _options(self, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> dict[str, Any]:
        limit = self._timeout_s if timeout_s == CONFIGURED else timeout_s
        timeout = httpx.Timeout(limit, connect=self._timeout_s)
        return {"json": body, "headers": self._headers[path not in _USER_PATHS], "timeout": timeout}

    def _failed(self, path: str, options: dict[str, Any], err: httpx.HTTPError) -> ServerError:
        if isinstance(err, httpx.TimeoutException):
            limit = options["timeout"].read or self._timeout_s
            words = f"{self.name} did not answer {path} in {limit:g} s; is it overloaded or stopped?"
            return ServerTimeoutError(words, server=self.name)
        return ServerUnreachableError(
            f"{self.name} is not reachable at {path} ({err}); is the server running?", server=self.name
        )

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


class Http(_Side):
    """One server's HTTP side. Thread-safe. `url`: scheme, host and port, as in http://rollout-0:30000."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._client = httpx.Client(**self._settings)

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
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = CONFIGURED
    ) -> dict[str, Any]:
        """One request; `timeout_s` None waits for ever, CONFIGURED takes the configured time."""
        options = self._options(path, body, timeout_s)
        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as err:
            raise self._failed(path, options, err) from err
        return self._parse(path, response)


class AsyncHttp(_Side):
    """The same for asyncio: for one event loop, whose tasks may share it."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._client = httpx.AsyncClient(**self._settings)

    async def close(self) -> None:
        await self._client.aclose()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = CONFIGURED
    ) -> dict[str, Any]:
        """As `Http.call`. A task that is cancelled drops its connection; the server may still do what it was asked."""
        options = self._options(path, body, timeout_s)
        try:
            response = await self._client.request(method, path, **options)
        except httpx.HTTPError as err:
            raise self._failed(path, options, err) from err
        return self._parse(path, response)


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
