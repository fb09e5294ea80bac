"""How a rollout server behaves: one frozen dataclass, validated when made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

DEFAULT_WEIGHT_VERSION = "default"
"""SGLang's name for weights that nobody has named yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `serve` and `launch` need to know. Only the model is required."""

    hf_config: dict[str, Any]
    """Hugging Face config of the model; its `quantization_config` decides what is held in FP8."""

    weights: str | None = None
    """Folder of safetensors. None: random weights drawn from `seed` (SGLang's `load_format="dummy"`)."""

    seed: int = 0
    """Of random weights. Sampling is seeded by each request (`sampling_seed`)."""

    tokenizer: str | None = None
    """Folder or hub name. None: requests are token ids only."""

    weight_version: str = DEFAULT_WEIGHT_VERSION
    """What the initial weights are called."""

    max_running_requests: int = 16
    """Requests that are generated at the same time; the others wait."""

    threads: int = 1
    """CPU threads of torch in the server. Several servers usually share a host."""

    api_key: str | None = field(default=None, repr=False)
    """Asked of every request except health checks."""

    admin_api_key: str | None = field(default=None, repr=False)
    """If set, asked (instead of `api_key`) of everything that changes the server."""

    trainer_key: str | None = None
    """Public CURVE key (Z85) of the one trainer to take weights from. None: any, encrypted or not."""

    log_level: str = "warning"

    def __post_init__(self) -> None:
        if not isinstance(self.hf_config, dict) or "model_type" not in self.hf_config:
            raise ConfigError("hf_config must be a Hugging Face config with a model_type (see read_hf_config)")
        for name in ("max_running_requests", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.trainer_key is not None and len(self.trainer_key) != 40:
            raise ConfigError(
                "trainer_key must be a public CURVE key of 40 characters (fp8bridge.keys.load_public_key)"
            )
        if not self.weight_version:
            raise ConfigError("weight_version must not be empty")


def read_hf_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face config from a dict, a `config.json`, or the folder that holds one."""
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as err:
        raise ConfigError(f"no Hugging Face config at {path}: {err.strerror}; give a folder or a config.json") from err
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON: {err}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a Hugging Face config")
    return config
