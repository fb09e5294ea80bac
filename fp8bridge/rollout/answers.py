"""SGLang's answers. It has four error bodies; which one comes depends on the endpoint.

outcome(False, ...)  {"success": false, "message"}            400   control of weights
error(...)           {"error": {"message"}}                   400   requests
invalid(...)         {"object": "error", "message", ...}      400   a body that does not validate
(uncaught)           Internal Server Error                    500   ours only by a bug
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse


class Refused(Exception):
    """An endpoint that changes weights says no; becomes `outcome(False, message)`."""


def outcome(success: bool, message: str, **more: Any) -> JSONResponse:
    return JSONResponse({"success": success, "message": message, **more}, status_code=200 if success else 400)


def error(message: str, *, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def invalid(message: str) -> JSONResponse:
    body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(body, status_code=400)
