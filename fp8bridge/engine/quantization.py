"""The quantization_config of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

BLOCK_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def quantized_config(hf_config: Mapping[str, Any], to: Literal["fp8", "bf16"] | None) -> dict[str, Any]:
    """`hf_config` for a checkpoint in `to`; None leaves it as it is. An FP8 config keeps its own details."""
    config = dict(hf_config)
    if to == "fp8" and not config.get("quantization_config"):
        config["quantization_config"] = dict(BLOCK_FP8)
    elif to == "bf16":
        config.pop("quantization_config", None)
    return config
