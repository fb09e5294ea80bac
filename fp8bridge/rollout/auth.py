"""Who may call what: SGLang's rules for an API key and an admin key.

health, readiness   always open
requests, info      the API key, if one is set
everything else     the admin key if one is set, else the API key if one is set
"""

from __future__ import annotations

import secrets
from collections.abc import Container

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_OPEN = ("/health", "/ready", "/metrics")


def is_allowed(
    path: str, authorization: str | None, *, admin: bool, api_key: str | None, admin_api_key: str | None
) -> bool:
    """admin: the path is one that changes the server."""
    if path.startswith(_OPEN):
        return True
    key = (admin_api_key or api_key) if admin else api_key
    return key is None or _bears(authorization, key)


def _bears(authorization: str | None, key: str) -> bool:
    scheme, _, token = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), key.encode())


class ApiKeys:
    """ASGI middleware. user_paths: the paths that the API key opens even where there is an admin key."""

    def __init__(
        self, app: ASGIApp, *, user_paths: Container[str], api_key: str | None, admin_api_key: str | None
    ) -> None:
        self._app = app
        self._user_paths = user_paths
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            allowed = is_allowed(
                request.url.path,
                request.headers.get("authorization"),
                admin=request.url.path not in self._user_paths,
                api_key=self._api_key,
                admin_api_key=self._admin_api_key,
            )
            if not allowed:
                await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
