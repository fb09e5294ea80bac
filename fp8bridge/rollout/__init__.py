"""The embedded rollout server: SGLang's update and generate endpoints on a CPU, in block FP8.

    from fp8bridge import rollout

    with rollout.launch("path/to/config.json", seed=1) as server:
        ...  # server.url is an SGLang address, as far as a trainer can tell

`serve` runs one in this process. See docs/rollout-server.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import ServeConfig

if TYPE_CHECKING:
    from .app import serve
    from .process import RunningServer, launch

__all__ = ["RunningServer", "ServeConfig", "launch", "serve"]

# starlette, uvicorn and transformers come only with what needs them.
_LAZY = {"serve": ".app", "launch": ".process", "RunningServer": ".process"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module 'fp8bridge.rollout' has no attribute {name!r}")
