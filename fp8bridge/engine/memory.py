"""Bytes per parameter that a config leads to in Megatron-Core with the distributed optimizer. Arithmetic only.

Persistent memory: what stands between two steps. Activations, temporary buffers and the FP32 copies that
the optimizer makes of states while it steps come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import FP8EngineConfig

WIDTH = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
SCALE_BYTES = {"blockwise": 4 / (128 * 128), "mxfp8": 1 / 32, "tensorwise": 0.0, "delayed": 0.0}
"""For each element of a quantized weight, in each direction; per-tensor scales are too few to count."""


@dataclass(frozen=True, slots=True)
class Part:
    """`nbytes` for each parameter, on each rank that holds it.

    what: "weight", "FP8 copies" (of it, for the matrix products), "scales", "gradient", "gradient copy",
    "master", "first moment" or "second moment". dtype: as in FP8EngineConfig, or "remainder": beside a BF16
    parameter, the lower 16 bits of its fp32 master are enough. sharded: divided over data-parallel ranks.
    """

    what: str
    dtype: str
    nbytes: float
    sharded: bool = False


def bytes_per_parameter(
    config: FP8EngineConfig | None, *, linear: bool = True, dp: int = 1, gpu: Literal["hopper", "blackwell"] = "hopper"
) -> list[Part]:
    """The parts of one parameter's memory; their sum is the total.

    config: None is BF16 training. linear: a weight of a linear layer in an FP8 transformer layer; others
    (embeddings, head, norms, router) stay BF16. dp: data-parallel ranks that share the optimizer's states.
    gpu: Hopper multiplies FP8 matrices in one orientation only, so that Transformer Engine keeps whatever
    has one scale a tensor transposed too, optimizer states among it.
    """
    made = config or FP8EngineConfig()
    fp8 = config is not None and linear
    kept = fp8 and made.fp8_params
    both = gpu == "hopper" or made.recipe in ("blockwise", "mxfp8")
    parts = [Part("weight", "fp8" if kept else "bfloat16", 1.0 if kept else 2.0)]
    # For both passes; a weight that is FP8 is one of them already, a BF16 one keeps them from the first micro
    # batch of a step on.
    copies = (2 if both else 1) - (1 if kept else 0)
    if fp8 and copies:
        parts.append(Part("FP8 copies", "fp8", float(copies)))
    if fp8 and SCALE_BYTES[made.recipe]:
        parts.append(Part("scales", "e8m0" if made.recipe == "mxfp8" else "float32", 2 * SCALE_BYTES[made.recipe]))
    parts.append(Part("gradient", made.grad_dtype, WIDTH[made.grad_dtype]))
    if made.grad_dtype != "float32" and not _held_by_te(made):
        # Megatron's optimizer makes it in each step, and lets go of it at the start of the next.
        parts.append(Part("gradient copy", "float32", 4.0 / dp, sharded=True))
    states = {
        "master": _master(made),
        "first moment": made.exp_avg_dtype,
        "second moment": made.exp_avg_sq_dtype,
    }
    for name, dtype in states.items():
        width = 2.0 if dtype == "remainder" or (dtype == "fp8" and gpu == "hopper") else WIDTH[dtype]
        parts.append(Part(name, dtype, width / dp, sharded=True))
    return parts


def total(parts: list[Part]) -> float:
    """Bytes per parameter."""
    return sum(p.nbytes for p in parts)


def _master(config: FP8EngineConfig) -> str:
    if _held_by_te(config) and config.master_dtype == "float32" and not config.fp8_params:
        return "remainder"
    return config.master_dtype


def _held_by_te(config: FP8EngineConfig) -> bool:
    """Whether Transformer Engine's optimizer has the masters, and takes gradients of any dtype; else Megatron."""
    return config.precision_aware and (config.master_dtype == "float16" or config.recipe == "delayed")
