"""Whether a config can run here: Transformer Engine's version, the GPU, and a variable read at its import."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError

from .config import FP8EngineConfig

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Transformer Engine reads it once, while it is imported."""

OLDEST = {"delayed": (2, 0), "mxfp8": (2, 1), "tensorwise": (2, 2), "blockwise": (2, 3)}
"""Recipe -> first Transformer Engine with which Megatron-Core offers it."""

CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
BLACKWELL, NO_MXFP8 = (10, 0), (12, 0)
CUDA_OF_BLOCKWISE = (12, 9)
INSTALL = "pip install 'fp8bridge[te]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `check_environment` looks at. `here()` finds it out; tests make their own.

    capability: of the GPU, None where there is none (a login node): then nothing is said about GPUs.
    fp32_scales: whether Transformer Engine, if it is imported already, took the variable as set.
    bf16_wgrad: whether its `delayed` recipe, if it is imported, can leave weight gradients out of FP8.
    variable: its value now, None if unset.
    """

    te_version: str | None
    capability: tuple[int, int] | None = None
    cuda: str | None = None
    fp32_scales: bool | None = None
    bf16_wgrad: bool | None = None
    variable: str | None = None

    @classmethod
    def here(cls) -> Environment:
        """Imports torch, not Transformer Engine."""
        import torch

        gpu = torch.cuda.is_available()
        return cls(
            te_version=_te_version(),
            capability=torch.cuda.get_device_capability() if gpu else None,
            cuda=torch.version.cuda,
            fp32_scales=_imported_fp32_scales(),
            bf16_wgrad=_imported_bf16_wgrad(),
            variable=os.environ.get(FP32_SCALES),
        )


def set_environment(config: FP8EngineConfig) -> None:
    """Make Transformer Engine take the config's block scales. Call it in every trainer process, before
    Megatron or Transformer Engine is imported; ConfigError if that is too late. Idempotent."""
    found = _imported_fp32_scales()
    if found is None:
        if config.recipe == "blockwise":
            os.environ[FP32_SCALES] = "1" if config.block_scales == "float32" else "0"
        return
    _check_scales(config, found)


def check_environment(config: FP8EngineConfig, environment: Environment) -> None:
    """Raise ConfigError, saying what to install or to change, unless the config can run there."""
    _check_version(config, environment.te_version)
    _check_gpu(config, environment)
    if not config.wgrad and environment.bf16_wgrad is False:
        raise ConfigError(
            f"wgrad=False: Transformer Engine {environment.te_version} has no override_linear_precision any more and "
            "would ignore it; set wgrad=True"
        )
    if config.recipe != "blockwise":
        return
    if environment.fp32_scales is not None:
        _check_scales(config, environment.fp32_scales)
    elif (environment.variable == "1") != (config.block_scales == "float32"):
        raise ConfigError(
            f"block_scales={config.block_scales!r}, but {FP32_SCALES} is {environment.variable!r}; call "
            "fp8bridge.engine.set_environment(config) before Megatron is imported"
        )


def _check_version(config: FP8EngineConfig, version: str | None) -> None:
    oldest = OLDEST[config.recipe]
    wanted = f"{'.'.join(map(str, oldest))} or newer"
    if version is None:
        raise ConfigError(
            f"recipe {config.recipe!r} needs Transformer Engine {wanted}, which is not installed; Megatron-Core would "
            f"train in BF16 without a word: {INSTALL}"
        )
    if _numbers(version) < oldest:
        raise ConfigError(f"recipe {config.recipe!r} needs Transformer Engine {wanted}; found {version}: {INSTALL}")


def _check_gpu(config: FP8EngineConfig, environment: Environment) -> None:
    gpu = environment.capability
    if gpu is None:
        return
    least, name = CAPABILITY[config.recipe], ".".join(map(str, gpu))
    if gpu < least:
        raise ConfigError(
            f"recipe {config.recipe!r} needs a GPU of compute capability {'.'.join(map(str, least))}; this one has "
            f"{name}; use {_recipe_for(gpu)}"
        )
    if config.recipe == "mxfp8" and gpu >= NO_MXFP8:
        raise ConfigError(f"recipe 'mxfp8' does not run on compute capability {name} yet; use recipe 'blockwise'")
    if config.recipe == "blockwise" and (environment.cuda is None or _numbers(environment.cuda) < CUDA_OF_BLOCKWISE):
        raise ConfigError(
            f"recipe 'blockwise' needs CUDA 12.9; this torch has {environment.cuda}; install a newer build"
        )
    if config.block_scales == "float32" and gpu >= BLACKWELL:
        raise ConfigError(
            f"block_scales='float32' on compute capability {name}: Blackwell multiplies by power-of-two scales only; "
            "set block_scales='power_of_two'"
        )


def _recipe_for(gpu: tuple[int, int]) -> str:
    fitting = [name for name in CAPABILITY if CAPABILITY[name] <= gpu]
    return f"recipe {' or '.join(map(repr, fitting))}" if fitting else "BF16 training (no FP8 engine config)"


def _check_scales(config: FP8EngineConfig, fp32_scales: bool) -> None:
    if config.recipe == "blockwise" and fp32_scales != (config.block_scales == "float32"):
        has = "float32" if fp32_scales else "power_of_two"
        raise ConfigError(
            f"block_scales={config.block_scales!r}, but Transformer Engine was imported with {has} scales and reads "
            f"{FP32_SCALES} only then; call fp8bridge.engine.set_environment(config) before Megatron is imported, or "
            f"set block_scales={has!r}"
        )


def _imported_fp32_scales() -> bool | None:
    recipes: Any = sys.modules.get("transformer_engine.common.recipe")
    block = getattr(recipes, "Float8BlockScaling", None)
    return None if block is None else not block.fp8_quant_fwd_weight.power_2_scale


def _imported_bf16_wgrad() -> bool | None:
    recipes: Any = sys.modules.get("transformer_engine.common.recipe")
    delayed = getattr(recipes, "DelayedScaling", None)
    return None if delayed is None else "override_linear_precision" in delayed.__dataclass_fields__


def _te_version() -> str | None:
    """Of the imported package, else of the installed one."""
    import importlib.metadata

    loaded = getattr(sys.modules.get("transformer_engine"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 20) of "2.20.2+cu13"; what is no number ends it."""
    found = []
    for part in version.split(".")[:2]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
