"""verl's `CheckpointEngine`: trainer workers send straight to the SGLang replicas, whose workers only wait.

actor_rollout_ref.rollout.checkpoint_engine:
  backend: fp8bridge
  custom_backend_module: fp8bridge.adapters.verl_backend
  engine_kwargs: {fp8bridge: {hf_config: path/to/model, host: 10.0.0.7, allow_plaintext: true}}
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch

from fp8bridge.errors import ConfigError

from .feed import WeightFeed, bridge_config
from .frameworks import warn_if_untested

BACKEND = "fp8bridge"
_REPLICA = re.compile(r"rollout_(?:standalone|colocate)_(\d+)(_.+)?")
"""verl's name for the worker group of a replica; it calls the group's server `sglang_server_{rank}_0{suffix}`."""


class BridgeCheckpointEngine:
    """One per trainer worker and per rollout worker; verl calls it, all trainer workers together.

    hf_config: the model's folder or config.json. servers: URLs of the replicas; None: verl's own, asked
    for at every update, so that replicas may come and go. settings: fields of BridgeConfig.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        hf_config: Any = None,
        servers: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if hf_config is None:
            raise ConfigError(f"engine_kwargs.{BACKEND}.hf_config is missing; give the model's folder or config.json")
        warn_if_untested("verl")
        self._settings = {"bucket_nbytes": bucket_size} | settings
        bridge_config(self._settings)
        self._hf_config = hf_config
        self._given = None if servers is None else list(servers)
        self._servers: list[str] = []
        self._feed: WeightFeed | None = None

    def prepare(self) -> dict[str, Any]:
        """What `build_topology` sees of this worker."""
        return {"servers": self._given, "worker_group": os.environ.get("WG_PREFIX", "")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """On the driver: every trainer worker learns the servers of this update, rollout workers learn nothing."""
        given = metadata[0]["servers"]
        servers = _replica_urls(metadata[actor_wg_world_size:]) if given is None else given
        return {"servers": [servers] * actor_wg_world_size}, {"servers": [[]] * rollout_world_size}

    def init_process_group(self, servers: Sequence[str]) -> None:
        self._servers = list(servers)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Give every server the weights; the version on them is `global_steps`. Raises the bridge's errors.

        The metrics go to verl's logger.
        """
        if self._feed is None:
            # verl pauses the replicas, takes their KV cache away, and gives both back after the update.
            self._feed = WeightFeed(self._hf_config, held=True, **self._settings)
        report = self._feed.update(weights, self._servers, version=global_steps)
        return {
            "fp8bridge/seconds": report.seconds,
            "fp8bridge/nbytes": float(report.nbytes),
            "fp8bridge/servers": float(len(report.servers) - len(report.fenced)),
            "fp8bridge/fenced": float(len(report.fenced)),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Nothing: the server has its weights already when verl reads to the end of this."""
        nothing: tuple[tuple[str, torch.Tensor], ...] = ()
        for pair in nothing:
            yield pair

    def finalize(self) -> None:
        """Nothing: the connection is kept for the next update."""


def register() -> None:
    """Make `backend: fp8bridge` known to verl in this process."""
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

    CheckpointEngine.register(BridgeCheckpointEngine)
    CheckpointEngineRegistry.register(BACKEND)(BridgeCheckpointEngine)


def _replica_urls(rollout_workers: Iterable[dict[str, Any]]) -> list[str]:
    """The URL of each replica's server, which verl keeps as a named Ray actor."""
    import ray

    decoding = "sglang_server_decode_"
    if any(name.startswith(decoding) for name in ray.util.list_named_actors()):
        raise ConfigError(
            f"verl runs decode servers of their own ({decoding}*), which need the weights too; give the URLs of all "
            f"servers as engine_kwargs.{BACKEND}.servers"
        )
    names = []
    for group in dict.fromkeys(worker["worker_group"] for worker in rollout_workers):
        match = _REPLICA.fullmatch(group)
        if match is None:
            raise ConfigError(
                f"cannot tell the server of verl's worker group {group!r}; give engine_kwargs.{BACKEND}.servers"
            )
        names.append(f"sglang_server_{match[1]}_0{match[2] or ''}")
    addresses = ray.get([ray.get_actor(name).get_server_address.remote() for name in names])
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in addresses]
