"""The configurations of `bench sync`: one, or a row of them in which one thing grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import MIB
from ..errors import ConfigError
from .sync import Case

SWEEPS = ("bucket", "servers", "tensors", "model")


def sweep(kind: str, base: Case, steps: Sequence[int] = ()) -> list[Case]:
    """Variants of `base`. Steps: MiB of a bucket; servers; experts of a layer; layers of the model."""
    if kind == "bucket":
        return [
            replace(base, label=f"{base.label}, {mib} MiB", bucket_nbytes=mib * MIB)
            for mib in steps or (16, 64, 256, 1024)
        ]
    if kind == "servers":
        return [replace(base, label=f"{base.label}, {n} servers", servers=n) for n in steps or (1, 2, 4)]
    if kind == "model":
        layers = base.hf_config["num_hidden_layers"]
        return [_resized(base, f"{n} layers", num_hidden_layers=n) for n in steps or _halves(layers)]
    if kind == "tensors":
        return _by_tensors(base, steps)
    raise ConfigError(f"sweep must be one of {', '.join(SWEEPS)}; got {kind!r}")


def _by_tensors(base: Case, steps: Sequence[int]) -> list[Case]:
    """The same bytes in more and smaller experts."""
    field = next((name for name in ("num_experts", "n_routed_experts") if name in base.hf_config), None)
    if field is None:
        raise ConfigError("a sweep over tensors divides experts; choose a model that has them, such as Qwen3-30B-A3B")
    whole = base.hf_config[field] * base.hf_config["moe_intermediate_size"]
    return [
        _resized(base, f"{n} experts", **{field: n, "moe_intermediate_size": whole // n})
        for n in steps or _halves(base.hf_config[field])
    ]


def _resized(base: Case, text: str, **sizes: Any) -> Case:
    return replace(base, label=f"{base.label}, {text}", hf_config=base.hf_config | sizes)


def _halves(most: int) -> list[int]:
    """Up to four sizes: the whole, a half, a quarter, ..., smallest first."""
    return sorted({max(1, most >> shift) for shift in range(4)})
