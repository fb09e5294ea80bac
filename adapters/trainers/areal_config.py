"""AReaL's `FP8EngineConfig` in the words of ours. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from fp8bridge.errors import ConfigError

SAME = ("mode", "recipe")
RENAMED = {"param": "fp8_params", "tp_only_amax_red": "tp_only_amax_reduction"}
DELAYED = {"margin": 0, "amax_history_len": 1, "amax_compute_algo": "most_recent", "wgrad": True}
"""Fields that only the `delayed` recipe uses, with AReaL's defaults."""
ATTENTION = ("dot_product_attention", "multi_head_attention")
BF16_LAYERS = {
    "num_layers_at_start_in_bf16": "bf16_layers_at_start",
    "num_layers_at_end_in_bf16": "bf16_layers_at_end",
}
OTHERS = ("first_last_layers_bf16", "direct_convert")


def convert_fp8_config(
    areal: Any, *, fp8_param_gather: bool | None = None, float32_scales: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The fields for `fp8bridge.engine.FP8EngineConfig.from_dict`, and what AReaL was told that has no effect.

    areal: AReaL's `fp8_config`, as its dataclass or a mapping. fp8_param_gather: of AReaL's `ddp`, where it is
    known. float32_scales: the trainer runs with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, for which AReaL has no
    field. Raises ConfigError for an unknown field and for settings of AReaL's that contradict each other.
    """
    given = _fields(areal)
    notes: list[str] = []
    out: dict[str, Any] = {name: given[name] for name in SAME if name in given}
    out |= {ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given}
    if fp8_param_gather is not None and fp8_param_gather != bool(given.get("param", False)):
        raise ConfigError(
            f"fp8_config.param is {given.get('param', False)} and ddp.fp8_param_gather is {fp8_param_gather}; "
            "parameters kept in FP8 are gathered in FP8: set both alike"
        )
    recipe = given.get("recipe", "delayed")
    out["recipe"] = recipe
    for name, default in DELAYED.items():
        value = given.get(name, default)
        if recipe == "delayed":
            out[name] = value
        elif value != default:
            notes.append(f"{name}={value!r} has no effect with recipe {recipe!r}")
    _attention(given, recipe, out, notes)
    if given.get("first_last_layers_bf16"):
        out |= {ours: given.get(theirs, 1) for theirs, ours in BF16_LAYERS.items()}
    if float32_scales:
        if recipe != "blockwise":
            raise ConfigError(f"float32_scales is for recipe 'blockwise', not {recipe!r}")
        out["block_scales"] = "float32"
    if not given.get("direct_convert", True):
        notes.append("direct_convert=False has no counterpart: FP8 parameters always reach the servers as they are")
    return out, notes


def _attention(given: Mapping[str, Any], recipe: str, out: dict[str, Any], notes: list[str]) -> None:
    """FP8 attention, where the recipe has it; Megatron-Core drops it without a word for the others."""
    for name in ATTENTION:
        served = recipe == "delayed" or (name == "dot_product_attention" and recipe != "blockwise")
        if given.get(name) and served:
            out[name] = True
        elif given.get(name):
            notes.append(f"{name}=True has no effect with recipe {recipe!r}")
    if out.get("tp_only_amax_reduction") and recipe != "delayed" and not out.get("dot_product_attention"):
        del out["tp_only_amax_reduction"]
        notes.append(f"tp_only_amax_red=True has no effect with recipe {recipe!r}")


def _fields(areal: Any) -> dict[str, Any]:
    given = asdict(areal) if is_dataclass(areal) and not isinstance(areal, type) else areal
    if not isinstance(given, Mapping):
        raise ConfigError(f"AReaL's fp8_config is its dataclass or a mapping, not a {type(areal).__name__}")
    known = {*SAME, *RENAMED, *DELAYED, *ATTENTION, *BF16_LAYERS, *OTHERS}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"AReaL's fp8_config has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return dict(given)
