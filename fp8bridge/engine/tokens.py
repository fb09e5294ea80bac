"""How many tokens a batch must have so that every FP8 matrix product gets whole blocks. Arithmetic only."""

from __future__ import annotations

import math

from fp8bridge.errors import ConfigError

from .config import FP8EngineConfig

GEMM_TOKENS, MXFP8_TOKENS, BLOCK_TOKENS = 16, 32, 128


def token_alignment(config: FP8EngineConfig, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> int:
    """What the tokens of a micro batch (sequence length x micro batch, over all TP and CP ranks) must divide by.

    Each rank's share needs 16 tokens (`mxfp8`: 32). With sequence parallelism a share is 1 / TP, and
    `blockwise` quantizes it in blocks of 128 before it is gathered: otherwise Transformer Engine gathers
    it in BF16. Context parallelism cuts a sequence into 2 x CP pieces.
    """
    for name, value in (("tp", tp), ("cp", cp)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")
    shares = tp if sequence_parallel else 1
    share = MXFP8_TOKENS if config.recipe == "mxfp8" else GEMM_TOKENS
    if config.recipe == "blockwise" and shares > 1:
        share = BLOCK_TOKENS
    return math.lcm(share * shares * cp, 2 * cp if cp > 1 else 1, config.token_multiple or 1)


def align_tokens(
    tokens: int, config: FP8EngineConfig, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False
) -> int:
    """The smallest aligned count of at least `tokens`: pad the batch to it."""
    step = token_alignment(config, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    return -(-_count(tokens) // step) * step


def check_tokens(
    tokens: int, config: FP8EngineConfig, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False
) -> None:
    """Raise ConfigError, with the next count that fits, unless `tokens` is aligned."""
    needed = align_tokens(tokens, config, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    if tokens != needed:
        raise ConfigError(
            f"{tokens} tokens with recipe {config.recipe!r}, tp {tp}, cp {cp}, sequence_parallel {sequence_parallel}: "
            f"not a multiple of {token_alignment(config, tp=tp, cp=cp, sequence_parallel=sequence_parallel)}; pad to "
            f"{needed} (fp8bridge.engine.align_tokens)"
        )


def _count(tokens: int) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens must be a whole number of at least 1; got {tokens!r}")
    return tokens
