"""fp8bridge: a trainer's weights into running inference servers, fast and provably right.

    import fp8bridge
    from fp8bridge.adapters.megatron import MegatronSource

    source = MegatronSource(model_chunks, hf_config="path/or/dict")
    with fp8bridge.connect(source, ["http://rollout-0:30000"]) as bridge:
        report = bridge.update_weights(version=1)

Everything public is named in `__all__`; errors are in `fp8bridge.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .config import BridgeConfig
from .errors import BridgeError
from .layout import ServerLayout
from .plan import Plan
from .report import SyncReport
from .types import Shard, TensorMeta, WeightSource

if TYPE_CHECKING:
    from .bridge import Bridge, connect
    from .session import ServerEvent
    from .transport.loopback import LoopbackServer

__version__ = "0.1.0"

__all__ = [
    "Bridge",
    "BridgeConfig",
    "BridgeError",
    "LoopbackServer",
    "Plan",
    "ServerEvent",
    "ServerLayout",
    "Shard",
    "SyncReport",
    "TensorMeta",
    "WeightSource",
    "connect",
    "errors",
]

_LAZY = {"Bridge": ".bridge", "connect": ".bridge", "LoopbackServer": ".transport.loopback", "ServerEvent": ".session"}
"""Names that need torch: imported when first used, so that planning tools start at once."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module 'fp8bridge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
