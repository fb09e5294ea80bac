"""Who may take traffic: `on_state` listeners that tell a router, or any HTTP endpoint.

A server that is fenced or catching up holds other weights than the rest. `updating` is no reason to
leave: such a server is paused and answers in a moment.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import httpx

from .session import ServerEvent

_TIMEOUT_S = 10.0


class WebHook:
    """POSTs every ServerEvent as JSON ({"server", "state", "version", "reason"}) to `url`.

    An answer that is no success is raised as httpx.HTTPError, which the bridge logs.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = url
        self._options = _options(api_key, timeout_s)

    def __call__(self, event: ServerEvent) -> None:
        httpx.post(self._url, json=asdict(event), **self._options).raise_for_status()


class SglangRouter:
    """Takes servers that are fenced or catching up out of an SGLang router (Model Gateway), and puts them
    back once they hold the current version.

    url: the router's. api_key: its admin key, if it asks for one. Servers are found by the URL that the
    bridge has for them; one that the router did not have when it was fenced is not added by us.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        self._workers = f"{url.rstrip('/')}/workers"
        self._options = _options(api_key, timeout_s)
        self._taken_out: set[str] = set()

    def __call__(self, event: ServerEvent) -> None:
        if event.state in ("fenced", "catching_up"):
            self._take_out(event.server)
        elif event.state == "healthy" and event.server in self._taken_out:
            httpx.post(self._workers, json={"url": event.server}, **self._options).raise_for_status()
            self._taken_out.discard(event.server)

    def _take_out(self, server: str) -> None:
        listed = httpx.get(self._workers, **self._options)
        listed.raise_for_status()
        for worker in listed.json()["workers"]:
            if worker["url"].rstrip("/") == server:
                self._taken_out.add(server)
                httpx.delete(f"{self._workers}/{worker['id']}", **self._options).raise_for_status()


def _options(api_key: str | None, timeout_s: float) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"headers": headers, "timeout": timeout_s, "trust_env": False}
