"""Endpoints about weights: SGLang's session, our ZMQ update inside it, checks and reads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import WireError
from ..staging import describe_differences
from . import bodies
from .answers import Refused, error, outcome
from .http_body import read_json, read_request
from .service import Service
from .updates import OUTSIDE

_USE_ZMQ = (
    "{} is not carried by this server; send the weights with POST /update_weights_from_zmq "
    "(fp8bridge: BridgeConfig(transport='zmq'))"
)
_IN_SESSION = ("update_weights_from_distributed", "update_weights_from_tensor")
_ANY_TIME = (
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "init_weights_update_group",
    "destroy_weights_update_group",
)
_DIFFERENCES_SHOWN = 100


class UpdateEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._updates = service.updates
        self._weights = service.model.weights

    def routes(self) -> list[Route]:
        posts = {
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/abort_weight_update": self.abort,
            "/update_weights_from_zmq": self.pull,
            "/update_weight_version": self.set_version,
            "/fp8bridge/preflight": self.preflight,
        }
        posts |= {f"/{name}": self.not_carried for name in (*_IN_SESSION, *_ANY_TIME)}
        return [
            *(Route(path, call, methods=["POST"]) for path, call in posts.items()),
            Route("/weights_checker", self.check, methods=["GET", "POST"]),
            Route("/get_weights_by_name", self.get_weight, methods=["GET", "POST"]),
            Route("/fp8bridge/weights", self.download),
        ]

    async def preflight(self, request: Request) -> Response:
        data = await read_json(request)
        try:
            manifest, found = self._updates.preflight(data)
        except WireError as err:
            return outcome(False, str(err), differences=[])
        if found:
            return outcome(False, describe_differences(found), differences=found[:_DIFFERENCES_SHOWN])
        return outcome(True, "Success", hash=manifest.hash)

    async def begin(self, request: Request) -> Response:
        await self._updates.begin(await read_request(bodies.Begin, request))
        return outcome(True, "Success")

    async def pull(self, request: Request) -> Response:
        body = await read_request(bodies.Pull, request)
        start = time.perf_counter()
        nbytes = await self._updates.pull(body)
        seconds = time.perf_counter() - start
        return outcome(True, f"Received {nbytes} bytes.", nbytes=nbytes, seconds=seconds)

    async def end(self, request: Request) -> Response:
        body = await read_request(bodies.End, request)
        load_s = await self._updates.end(body)
        return outcome(True, "Success", weight_version=self._engine.weight_version, load_s=load_s)

    async def abort(self, request: Request) -> Response:
        body = await read_request(bodies.AbortUpdate, request, optional=True)
        was_open = await self._updates.abort(body.session, "a client asked for it", whosever=body.whosever)
        return outcome(True, "Success" if was_open else "no weight-update session is open")

    async def set_version(self, request: Request) -> Response:
        body = await read_request(bodies.WeightVersion, request)
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.set_version(body.new_version)))
        return outcome(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)

    async def not_carried(self, request: Request) -> Response:
        name = request.url.path.strip("/")
        if name in _IN_SESSION and self._updates.state is None:
            return outcome(False, OUTSIDE.format(name))
        return outcome(False, _USE_ZMQ.format(name))

    async def check(self, request: Request) -> Response:
        body = await read_request(bodies.Check, request, optional=True)
        if body.allow_quant_error:
            raise Refused("allow_quant_error is not carried by this server: tensors are compared byte by byte")
        skip = body.skip_tensor_list or []
        checker = self._service.checker
        more: dict[str, Any] = {}
        if body.action == "checksum":
            more = await asyncio.to_thread(checker.checksums, skip)
        elif body.action == "snapshot":
            checker.snapshot()
        elif body.action == "reset_tensors":
            await asyncio.wrap_future(self._engine.call(lambda: checker.reset(skip)))
        elif body.action == "compare":
            await asyncio.to_thread(checker.compare, skip)
        else:
            raise Refused(f"Unsupported action={body.action!r}")
        return outcome(True, "Success.", **more)

    async def get_weight(self, request: Request) -> Response:
        """Values of the first rows, by wire name; FP8 codes without their scale."""
        body = await read_request(bodies.GetWeight, request)
        tensor = self._weights.tensors.get(body.name)
        if tensor is None:
            return error("Get parameter by name failed")
        return JSONResponse(tensor[: max(0, body.truncate_size)].float().tolist())

    async def download(self, request: Request) -> Response:
        """The current tensors as one safetensors file."""

        def current() -> tuple[dict[str, torch.Tensor], str]:
            return self._weights.tensors, self._engine.weight_version

        tensors, version = await asyncio.wrap_future(self._engine.call(current))
        data = await asyncio.to_thread(_safetensors, tensors, version)
        return Response(data, media_type="application/octet-stream")


def _safetensors(tensors: dict[str, torch.Tensor], version: str) -> bytes:
    from safetensors.torch import save

    # Tensors of one bucket share memory, which the format refuses.
    data: bytes = save({n: t.clone() for n, t in tensors.items()}, metadata={"weight_version": version})
    return data
