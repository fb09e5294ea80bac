"""Reading a request's JSON, bounded."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from .bodies import InvalidBody, read_body

B = TypeVar("B")

MAX_BODY_NBYTES = 256 << 20
"""A manifest is about 150 bytes a tensor; prompts are smaller."""


async def read_request(cls: type[B], request: Request, *, optional: bool = False) -> B:
    """The body as one of `bodies`. Raises InvalidBody. optional: no body at all means the defaults."""
    return read_body(cls, await read_json(request, default={} if optional else None))


async def read_json(request: Request, default: Any = None) -> Any:
    raw = await _read(request)
    if raw and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Besides being SGLang's rule, it keeps web pages from posting to a server on loopback.
        raise InvalidBody(["header.content-type: Unsupported Media Type: Only 'application/json' is allowed"])
    if not raw:
        if default is None:
            raise InvalidBody(["body: Field required"])
        return default
    try:
        return _parse(raw)
    except (ValueError, RecursionError) as err:
        raise InvalidBody([f"body: JSON decode error, {err}"]) from err


def _parse(raw: bytes) -> Any:
    """JSON whose strings are text: half a surrogate pair would come back in every answer, which cannot be sent."""
    data = json.loads(raw.decode("utf-8"))
    if b"\\ud" in raw.lower():
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    return data


async def _read(request: Request) -> bytes:
    chunks, nbytes = [], 0
    async for chunk in request.stream():
        nbytes += len(chunk)
        if nbytes > MAX_BODY_NBYTES:
            raise HTTPException(413, f"a body of more than {MAX_BODY_NBYTES} bytes is not read")
        chunks.append(chunk)
    return b"".join(chunks)
