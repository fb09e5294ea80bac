"""Endpoints about requests: generate, pause, continue, flush, abort, health, info."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from . import bodies
from .answers import error
from .generation import Generation
from .http_body import read_json, read_request
from .requests import GenerateRequest, read_generate
from .sampling import Sampling
from .service import Service

_DISCONNECT_POLL_S = 0.5
_FLUSH_POLL_S = 0.02

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
FLUSH_TIMED_OUT = "Timed out waiting for idle state."
FLUSH_IN_PROGRESS = "Another flush_cache is already in progress."


class GenerateEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._flushing = False

    def user_routes(self) -> list[Route]:
        """What the API key opens."""
        return [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/model_info", self.model_info),
            Route("/get_model_info", self.model_info),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),
            Route("/health", self.health),
            Route("/health_generate", self.health_generate),
            Route("/ready", self.ready),
        ]

    def admin_routes(self) -> list[Route]:
        return [
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.resume, methods=["POST"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
        ]

    async def generate(self, request: Request) -> Response:
        data = await read_json(request)
        try:
            asked = read_generate(data, self._service.model, self._service.tokenizer)
        except ValueError as err:
            return error(str(err))
        self._engine.submit(asked.generations)
        await self._until_done(request, asked)
        if failed := [e for g in asked.generations if (e := g.done.exception()) is not None]:
            return error(str(failed[0]), status=500)
        answers = [self._answer(g) for g in asked.generations]
        return JSONResponse(answers if asked.is_batch else answers[0])

    async def _until_done(self, request: Request, asked: GenerateRequest) -> None:
        """Wait for every prompt; a client that hangs up aborts its requests."""
        pending = {asyncio.wrap_future(g.done) for g in asked.generations}
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_DISCONNECT_POLL_S)
            if pending and await request.is_disconnected():
                for generation in asked.generations:
                    self._engine.abort(generation.rid)
                await asyncio.wait(pending)
                return

    def _answer(self, generation: Generation) -> dict[str, Any]:
        answer = {"output_ids": generation.output_ids, "meta_info": generation.meta_info(self._engine.weight_version)}
        if self._service.tokenizer is not None:
            answer["text"] = self._service.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        return answer

    async def pause(self, request: Request) -> Response:
        body = await read_request(bodies.Pause, request)
        await asyncio.wrap_future(self._engine.pause(body.mode))
        self._service.updates.expect_resume(body.lease_s)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await read_request(bodies.Empty, request)
        await asyncio.wrap_future(self._engine.resume())
        self._service.updates.expect_resume(None)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        """There is no prefix cache to drop; the answer tells whether any KV of old weights is left."""
        try:
            timeout_s = float(request.query_params.get("timeout", "0"))
        except ValueError:
            timeout_s = -1.0
        if not timeout_s >= 0:
            raise bodies.InvalidBody(["query.timeout: Input should be a number, 0 or more"])
        if self._flushing:
            return PlainTextResponse(FLUSH_IN_PROGRESS, status_code=400)
        self._flushing = True
        try:
            flushed = await self._flush(timeout_s)
        finally:
            self._flushing = False
        if flushed:
            return PlainTextResponse(FLUSHED)
        return PlainTextResponse(FLUSH_TIMED_OUT if timeout_s else NOT_FLUSHED, status_code=400)

    async def _flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not await asyncio.wrap_future(self._engine.flush_cache()):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_FLUSH_POLL_S)
        return True

    async def abort(self, request: Request) -> Response:
        body = await read_request(bodies.Abort, request)
        # SGLang matches prefixes, and the empty id is one of every id.
        await asyncio.wrap_future(self._engine.abort(None if body.abort_all else body.rid or ""))
        return Response(status_code=200)

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(self._service.model_info())

    async def server_info(self, request: Request) -> Response:
        return JSONResponse(self._service.server_info())

    async def health(self, request: Request) -> Response:
        """Never waits, whatever is being generated or updated."""
        return Response(status_code=200 if self._engine.alive else 503)

    async def health_generate(self, request: Request) -> Response:
        """Generates one token, unless the server is paused or busy: then it only looks for progress."""
        if self._engine.paused or any(self._engine.load.values()):
            await asyncio.wrap_future(self._engine.call(lambda: None))
            return Response(status_code=200)
        probe = Generation(
            rid="HEALTH_CHECK", prompt=[0], sampling=Sampling(temperature=0.0), max_new_tokens=1, seed=0
        )
        self._engine.submit([probe])
        await asyncio.wait([asyncio.wrap_future(probe.done)])
        return Response(status_code=200 if probe.done.exception() is None else 503)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=503 if self._engine.paused or not self._engine.alive else 200)
