"""The HTTP server: routes, keys, error bodies, and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..config import is_loopback
from ..errors import BridgeError, ConfigError
from .answers import Refused, invalid, outcome
from .auth import ApiKeys
from .bodies import InvalidBody
from .config import ServeConfig
from .generate_endpoints import GenerateEndpoints
from .listen import listen, url_of
from .service import Service
from .update_endpoints import UpdateEndpoints

log = logging.getLogger("fp8bridge.rollout")

DEFAULT_PORT = 30000
_SHUTDOWN_S = 3


def create_app(service: Service) -> Starlette:
    """The ASGI application; it closes `service` when it shuts down."""
    generate, update = GenerateEndpoints(service), UpdateEndpoints(service)
    users = generate.user_routes()
    keys = Middleware(
        ApiKeys,
        user_paths=frozenset(route.path for route in users),
        api_key=service.config.api_key,
        admin_api_key=service.config.admin_api_key,
    )
    return Starlette(
        routes=[*users, *generate.admin_routes(), *update.routes()],
        middleware=[keys],
        exception_handlers={
            Refused: _refused,
            BridgeError: _refused,
            InvalidBody: _invalid,
            HTTPException: _http_error,
        },
        lifespan=lambda _: _lifespan(service),
    )


def serve(
    config: ServeConfig,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    listening: socket.socket | None = None,
) -> None:
    """Run a rollout server until SIGINT or SIGTERM. `listening`: a bound socket to use instead of host and port.

    Raises ConfigError for an address that is taken, or that others can reach while no key is set.
    """
    if listening is None:
        if not is_loopback(host) and not (config.api_key or config.admin_api_key):
            raise ConfigError(
                f"host {host!r} can be reached from outside and anyone could replace the weights; set an api_key, "
                "or serve on 127.0.0.1"
            )
        listening = listen(host, port)
    url = url_of(listening)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    service = Service(config, url)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(service),
            log_level=config.log_level,
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )
    log.info("listening on %s", url)
    server.run(sockets=[listening])


@contextlib.asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    watch = asyncio.create_task(service.updates.watch())
    try:
        yield
    finally:
        watch.cancel()
        await service.close()


async def _refused(request: Request, err: Exception) -> Response:
    return outcome(False, str(err))


async def _invalid(request: Request, err: Exception) -> Response:
    return invalid(str(err))


async def _http_error(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    return JSONResponse({"detail": err.detail}, status_code=err.status_code)
