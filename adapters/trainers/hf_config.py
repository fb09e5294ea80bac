"""The Hugging Face config of a model, from a dict, a file or a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8bridge.errors import ConfigError


def load_hf_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A copy of the config as a dict. `source` is a dict, a JSON file, or a folder with config.json."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"hf_config: cannot read {path} ({error.strerror}); give a dict, a config.json or its folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"hf_config: {path} is not JSON ({error}); give the model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"hf_config: {path} holds no JSON object; give the model's config.json")
    return config
