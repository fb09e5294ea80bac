"""A client of a stock SGLang server's weight endpoints, for threads and for asyncio."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ..http import AsyncHttp, Http
from . import endpoints
from .endpoints import Call

P = ParamSpec("P")
T = TypeVar("T")

TESTED = ((0, 5, 10), (0, 5, 23))
"""Oldest and newest version that this client is written for."""

SESSIONS_SINCE = (0, 5, 21)
"""From here on updates run between /begin_weight_update and /end_weight_update; before, there is neither."""


INCOMPLETE = "incomplete"
"""Prefix of the weight version of a server whose update is under way or ended early."""


def incomplete(token: str) -> str:
    return f"{INCOMPLETE}-{token[:8]}"


class _Endpoint(Generic[P, T]):
    """A function of `endpoints` as a method: sent at once by the one client, to be awaited with the other."""

    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self._make = make

    @overload
    def __get__(self, client: SglangClient, owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncSglangClient, owner: Any = None) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, client: None, owner: Any = None) -> Callable[P, Call[T]]: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        if client is None:
            return self._make

        @functools.wraps(self._make)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._make(*args, **kwargs))

        return method


class _Endpoints:
    server_info = _Endpoint(endpoints.server_info)
    weight_version = _Endpoint(endpoints.weight_version)
    pause = _Endpoint(endpoints.pause)
    resume = _Endpoint(endpoints.resume)
    begin = _Endpoint(endpoints.begin)
    end = _Endpoint(endpoints.end)
    init_group = _Endpoint(endpoints.init_group)
    destroy_group = _Endpoint(endpoints.destroy_group)
    update_from_distributed = _Endpoint(endpoints.update_from_distributed)
    update_from_tensor = _Endpoint(endpoints.update_from_tensor)
    update_from_ipc = _Endpoint(endpoints.update_from_ipc)
    set_version = _Endpoint(endpoints.set_version)
    flush_cache = _Endpoint(endpoints.flush_cache)
    checker = _Endpoint(endpoints.checker)
    release_memory = _Endpoint(endpoints.release_memory)
    resume_memory = _Endpoint(endpoints.resume_memory)


class SglangClient(_Endpoints):
    """See `Http` for what is raised. Thread-safe. Every call is one request."""

    def __init__(self, http: Http) -> None:
        self.name = http.name
        self._http = http

    def send(self, call: Call[T]) -> T:
        return call.read(self._http.call(call.method, call.path, call.body, timeout_s=call.timeout_s))

    def close(self) -> None:
        self._http.close()


class AsyncSglangClient(_Endpoints):
    """The same for asyncio: every method is to be awaited. Raises what `SglangClient` does.

    async with AsyncSglangClient(AsyncHttp("http://rollout-0:30000", timeout_s=60)) as client:
        await client.pause("retract")
    """

    def __init__(self, http: AsyncHttp) -> None:
        self.name = http.name
        self._http = http

    async def send(self, call: Call[T]) -> T:
        return call.read(await self._http.call(call.method, call.path, call.body, timeout_s=call.timeout_s))

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> AsyncSglangClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def version_of(text: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23.post1"; () where it is none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()
