"""The identity update: a server that is sent the very weights it holds must go on computing the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .verify import NEW_TOKENS, PROMPT, tensors_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Identity:
    """gap: largest difference of a logprob; checked: tensors whose bytes were read back, 0 where they cannot be."""

    url: str
    gap: float
    checked: int


def identity_update(url: str, checkpoint: Path, **options: Any) -> Identity:
    """Send the checkpoint that the server was started from, and compare its logprobs before and after.

    What a plain load leaves stale (copies that an engine derives from its weights) shows here and in no
    checksum. The server keeps its weight version. options: fields of BridgeConfig. Raises BridgeError.
    """
    import fp8bridge

    from ..adapters.hf_config import load_hf_config
    from ..adapters.state_dict import StateDictSource
    from ..errors import ServerError
    from ..http import Http

    keys = {name: options.get(name) for name in ("api_key", "admin_api_key")}
    http = Http(url, timeout_s=options.get("request_timeout_s", 60.0), **keys)
    weights: dict[str, torch.Tensor] = dict(tensors_of(checkpoint))
    try:
        before, claimed = http.logprobs(PROMPT, NEW_TOKENS), str(http.call("GET", "/model_info").get("weight_version"))
        number = int(claimed) + 1 if claimed.isdigit() else 1
        with fp8bridge.connect(StateDictSource(weights, load_hf_config(checkpoint)), [url], **options) as bridge:
            bridge.update_weights(version=number)
            try:
                checked = sum(bridge.verify().values())
            except ServerError:
                checked = 0  # stock SGLang without our loader
        body = {"new_version": claimed, "abort_all_requests": False}
        http.call("POST", "/update_weight_version", body)
        after = http.logprobs(PROMPT, NEW_TOKENS)
    finally:
        http.close()
    return Identity(url, max(abs(a - b) for a, b in zip(before, after, strict=True)), checked)
