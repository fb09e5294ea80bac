"""The `--quantization` option of `plan` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
METAVAR = "fp8|none|PATH"
HELP = (
    "What servers hold: 128x128 block FP8, nothing quantized, or the quantization_config in a JSON file. "
    "Default: as the config says."
)


def with_quantization(hf_config: Mapping[str, Any], quantization: str | None) -> dict[str, Any]:
    """`hf_config` with the quantization_config that the option asks for."""
    if quantization is None:
        return dict(hf_config)
    bare = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    if quantization == "none":
        return bare
    if quantization == "fp8":
        return bare | {"quantization_config": BLOCK_FP8}
    from ..adapters.hf_config import load_hf_config

    given = load_hf_config(quantization)
    return bare | {"quantization_config": given.get("quantization_config", given)}
