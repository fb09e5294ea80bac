"""OpenRLHF: `trainer.broadcast_to_vllm = BridgeBroadcast(trainer, servers)` in its policy actor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8bridge import SyncReport
from fp8bridge.errors import ConfigError
from fp8bridge.protocols import RolloutServer

from .feed import WeightFeed
from .frameworks import warn_if_untested


class BridgeBroadcast:
    """What OpenRLHF calls in place of its `broadcast_to_vllm`, on every rank of the policy.

    trainer: OpenRLHF's `ActorPPOTrainer`. servers: URLs. hf_config: by default the model's own. settings:
    fields of BridgeConfig. report: of the last update. Versions on the servers count the updates from 1.
    """

    def __init__(
        self,
        trainer: Any,
        servers: Sequence[str | RolloutServer],
        hf_config: Mapping[str, Any] | str | Path | None = None,
        **settings: Any,
    ) -> None:
        warn_if_untested("OpenRLHF")
        if getattr(trainer.strategy.args.vllm, "enable_sleep", False):
            raise ConfigError("vllm.enable_sleep takes the servers' weights away; turn it off")
        self._trainer = trainer
        self._servers = list(servers)
        model = trainer.actor.model.module
        self._feed = WeightFeed(model.config.to_dict() if hf_config is None else hf_config, **settings)

    @property
    def report(self) -> SyncReport | None:
        return self._feed.report

    def __call__(self) -> None:
        """Give every server the weights. Collective. Raises the bridge's errors; the servers then go on with the
        old weights."""
        self._feed.update(self._weights(), self._servers)

    def close(self) -> None:
        self._feed.close()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._trainer.actor.model.module
        for name, parameter in model.named_parameters():
            with self._gathered(parameter, model):
                yield name, parameter.data

    def _gathered(self, parameter: torch.Tensor, model: Any) -> contextlib.AbstractContextManager[Any]:
        """DeepSpeed's whole parameter, while it is being copied."""
        deepspeed_args = self._trainer.strategy.args.ds
        if deepspeed_args.tensor_parallel_size > 1:
            from deepspeed.module_inject.layers import GatherReplacedLayerParams

            gathered: contextlib.AbstractContextManager[Any] = GatherReplacedLayerParams(
                [parameter], model, enabled=True
            )
            return gathered
        if deepspeed_args.zero_stage == 3:
            from deepspeed.zero import GatheredParameters

            gathered = GatheredParameters([parameter], enabled=True)
            return gathered
        return contextlib.nullcontext()
