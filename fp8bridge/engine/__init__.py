"""The trainer's half: FP8 training of Megatron-Core from one config, and its checkpoints.

    from fp8bridge.engine import FP8EngineConfig, apply_to_megatron, set_environment

    config = FP8EngineConfig.hopper_blockwise()
    set_environment(config)                      # before Megatron is imported
    ...
    apply_to_megatron(config, transformer_config, ddp_config, optimizer_config)

Nothing here needs torch before it is called. Checkpoints are in `fp8bridge.engine.checkpoint`.
"""

from .agreement import check_checkpoint, check_server
from .config import PRESETS, FP8EngineConfig
from .environment import Environment, check_environment, set_environment
from .megatron import Change, apply_to_megatron
from .memory import bytes_per_parameter
from .tokens import align_tokens, check_tokens, token_alignment

__all__ = [
    "PRESETS",
    "Change",
    "Environment",
    "FP8EngineConfig",
    "align_tokens",
    "apply_to_megatron",
    "bytes_per_parameter",
    "check_checkpoint",
    "check_environment",
    "check_server",
    "check_tokens",
    "set_environment",
    "token_alignment",
]
