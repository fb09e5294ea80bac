"""NeMo-RL's `WeightSynchronizer`: Megatron policy workers send straight to the SGLang servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8bridge import SyncReport, WeightSource
from fp8bridge.errors import ConfigError

from .feed import bridge_config
from .frameworks import warn_if_untested
from .ray import RayBridge


class BridgeWeightSynchronizer:
    """Made on the driver, for generation on GPUs of its own; NeMo-RL calls it as any of its synchronizers.

    policy: NeMo-RL's, whose `worker_group.workers` are the trainer ranks. generation: its SGLang generation.
    servers: URLs. hf_config: the model's folder, config.json or dict. make_source: a worker's weight source;
    by default that of its Megatron model. settings: fields of BridgeConfig. report: of the last sync.
    """

    def __init__(
        self,
        policy: Any,
        generation: Any,
        *,
        servers: Sequence[str],
        hf_config: Mapping[str, Any] | str | Path,
        make_source: Callable[[Any], WeightSource] | None = None,
        **settings: Any,
    ) -> None:
        warn_if_untested("NeMo-RL")
        self._policy = policy
        self._generation = generation
        self._servers = list(servers)
        self._make_source = make_source or (lambda worker: _megatron_source(worker, hf_config))
        # All generation workers are always at one version: that is NeMo-RL's rule.
        self._settings = {"min_healthy": max(1, len(self._servers))} | settings
        bridge_config(self._settings)  # a wrong field is an error now
        self._bridge: RayBridge | None = None
        self._version = 0
        self._stale = True
        self.report: SyncReport | None = None

    @property
    def is_stale(self) -> bool:
        return self._stale

    def mark_stale(self) -> None:
        self._stale = True

    def init_communicator(self) -> None:
        """Plan the sync and check every server. Raises as `fp8bridge.connect` does."""
        self.shutdown()
        workers = self._policy.worker_group.workers
        self._bridge = RayBridge(workers, self._make_source, self._servers, **self._settings)

    def sync_weights(self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None) -> dict[str, float]:
        """Give every server the policy's weights as the next version; seconds and bytes for NeMo-RL's logger.

        Raises the bridge's errors; weights are then stale as before, and the servers generate with the old ones.
        """
        if kv_scales:
            raise ConfigError(f"KV-cache scales cannot be sent ({len(kv_scales)} were given); turn FP8 KV cache off")
        if self._bridge is None:
            raise ConfigError("call init_communicator first")
        name = "prepare_for_generation/transfer_and_update_weights"
        with timer.time(name) if timer is not None else contextlib.nullcontext():
            self._generation.prepare_for_generation(tags=["weights"])
            try:
                self.report = self._bridge.update_weights(version=self._version + 1)
            finally:
                self._generation.prepare_for_generation(tags=["kv_cache"])
        self._version += 1
        self._stale = False
        stages = {f"fp8bridge/{stage}_s": spread.max for stage, spread in self.report.stages.items()}
        return {"fp8bridge/seconds": self.report.seconds, "fp8bridge/nbytes": float(self.report.nbytes), **stages}

    def shutdown(self) -> None:
        """Release sockets on the workers. Idempotent."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None


def _megatron_source(worker: Any, hf_config: Mapping[str, Any] | str | Path) -> WeightSource:
    from .megatron import MegatronSource

    model = worker.model
    return MegatronSource(model if isinstance(model, list | tuple) else [model], hf_config)
