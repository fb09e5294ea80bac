"""One running rollout server without its HTTP: the parts that the endpoints share."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import torch

from .checker import WeightsChecker
from .config import ServeConfig
from .engine import Engine
from .model import build_model
from .updates import Updates

if TYPE_CHECKING:
    from .requests import Tokenizer

log = logging.getLogger("fp8bridge.rollout")

SPEAKS_SGLANG = "0.5.23"
"""The SGLang release whose endpoints, fields and refusals this server mirrors."""


class Service:
    """url: how it calls itself to trainers. Builds the model, so this takes a while."""

    def __init__(self, config: ServeConfig, url: str) -> None:
        torch.set_num_threads(config.threads)
        if config.weights is None:
            log.warning("no weights were given: they are random (seed %d)", config.seed)
        self.config = config
        self.url = url
        self.model = build_model(config.hf_config, seed=config.seed, weights=config.weights)
        self.tokenizer = _load_tokenizer(config.tokenizer)
        self.engine = Engine(
            self.model, weight_version=config.weight_version, max_running_requests=config.max_running_requests
        )
        self.updates = Updates(
            self.engine, url, trainer_key=config.trainer_key.encode() if config.trainer_key else None
        )
        self.checker = WeightsChecker(self.model.weights)
        self.started_at = time.time()

    async def close(self) -> None:
        await self.updates.close()
        self.engine.close()

    def model_info(self) -> dict[str, Any]:
        """SGLang's `/model_info`."""
        return {
            "model_path": self.config.weights or "dummy",
            "served_model_name": self.config.weights or "dummy",
            "tokenizer_path": self.config.tokenizer,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.engine.weight_version,
            "load_format": "safetensors" if self.config.weights else "dummy",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.config.hf_config["model_type"],
            "architectures": self.config.hf_config.get("architectures"),
        }

    def server_info(self) -> dict[str, Any]:
        """What of SGLang's `/server_info` a trainer reads, and `fp8bridge`: what this server can do."""
        from .. import __version__
        from ..wire import PROTOCOL

        return {
            "version": f"fp8bridge {__version__}, speaks sglang {SPEAKS_SGLANG}",
            "model_path": self.config.weights or "dummy",
            "skip_tokenizer_init": self.tokenizer is None,
            "context_length": self.model.context_len,
            "max_running_requests": self.config.max_running_requests,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "weight_version": self.engine.weight_version,
            "startup_time": self.started_at,
            "internal_states": [self.engine.load | {"paused": self.engine.paused}],
            "fp8bridge": {
                "protocol": PROTOCOL,
                "atomic": True,
                "sessions": True,
                "hf_config": self.config.hf_config,
                "session": self.updates.state,
                "last_abort": self.updates.last_abort,
            },
        }


def _load_tokenizer(source: str | None) -> Tokenizer | None:
    if source is None:
        return None
    from transformers import AutoTokenizer

    return cast("Tokenizer", AutoTokenizer.from_pretrained(source))
