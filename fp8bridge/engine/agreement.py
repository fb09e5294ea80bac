"""Whether a config agrees with the checkpoint it starts from and the servers it feeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8bridge.errors import ConfigError, LayoutError
from fp8bridge.layout import ServerLayout

from .config import FP8EngineConfig

BLOCK = (128, 128)
"""Weight blocks of Transformer Engine's `blockwise` recipe."""


def check_checkpoint(config: FP8EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the checkpoint of this Hugging Face config is in the FP8 that is trained.

    So that step 0 of trainer and servers is the same model. Loading itself takes BF16 checkpoints too.
    """
    try:
        layout = ServerLayout.from_hf_config(dict(hf_config))
    except LayoutError as err:
        raise ConfigError(f"the base checkpoint: {err}") from err
    if layout.block is None:
        raise ConfigError(
            "the base checkpoint is not FP8 (its config.json has no quantization_config), but training is; make one "
            "that is with `fp8bridge convert SRC DST --to fp8`"
        )
    if config.recipe == "blockwise" and layout.block != BLOCK:
        raise ConfigError(
            f"the base checkpoint has weight_block_size {list(layout.block)}, recipe 'blockwise' trains in "
            f"{list(BLOCK)}; convert it (`fp8bridge convert`, to bf16 and back to fp8)"
        )
    if config.recipe == "blockwise" and layout.scale_format == "ue8m0" and config.block_scales == "float32":
        raise ConfigError("the base checkpoint has power-of-two scales (ue8m0); set block_scales='power_of_two'")


def check_server(config: FP8EngineConfig, layout: ServerLayout) -> None:
    """Raise ConfigError if servers of this layout cannot take what is trained.

    BF16 parameters can be quantized to any layout on the way; FP8 ones must fit as they are.
    """
    if layout.scale_format == "ue8m0" and config.recipe == "blockwise" and config.block_scales == "float32":
        raise ConfigError(
            "block_scales='float32', but the servers want power-of-two scales (scale_fmt ue8m0); set "
            "block_scales='power_of_two'"
        )
    if not config.fp8_params:
        return
    if config.recipe != "blockwise":
        raise ConfigError(
            f"fp8_params with recipe {config.recipe!r}: servers hold {layout.describe()}, and these parameters cannot "
            "become that without changing; use recipe 'blockwise', or fp8_params=False"
        )
    if layout.block is None:
        raise ConfigError(
            f"fp8_params, but the servers are {layout.describe()}; serve an FP8 checkpoint, or set fp8_params=False"
        )
    if layout.block != BLOCK:
        raise ConfigError(
            f"the servers have scale blocks of {list(layout.block)}, recipe 'blockwise' has {list(BLOCK)}; serve a "
            "checkpoint with those, or set fp8_params=False"
        )
