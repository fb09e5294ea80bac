"""slime and miles: `--custom-megatron-init-path fp8bridge.adapters.slime.install` puts a bridge in place of their
broadcast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp8bridge import SyncReport
from fp8bridge.errors import ConfigError

from .feed import connect_framework
from .frameworks import warn_if_untested
from .megatron import MegatronSource

if TYPE_CHECKING:
    from fp8bridge import Bridge

ACTOR_MODULES = ("slime.backends.megatron_utils.actor", "miles.backends.megatron_utils.actor")
REPLACED = "UpdateWeightFromDistributed"
"""The updater that both choose when trainer and servers have GPUs of their own."""


class BridgeUpdater:
    """An updater as slime's Megatron actor makes and calls it, on every trainer rank.

    args.hf_checkpoint: the model's folder. args.fp8bridge: a dict of BridgeConfig's fields, and `servers`,
    URLs in place of those of slime's engines; from the file of `--custom-config-path`. weight_version:
    of the last update, counted from 1. report: of the last update.
    """

    def __init__(self, args: Any, model: Any, *unused: Any, **also_unused: Any) -> None:
        for name in ("slime", "miles"):
            warn_if_untested(name)
        self._settings = dict(getattr(args, "fp8bridge", None) or {})
        self._given = self._settings.pop("servers", None)
        self._source = MegatronSource(list(model), args.hf_checkpoint)
        self._servers: list[Any] = []
        self._bridge: Bridge | None = None
        self.weight_version = 0
        self.report: SyncReport | None = None

    def connect_rollout_engines(
        self, rollout_engines: Sequence[Any], rollout_engine_lock: Any = None, *unused: Any, **also_unused: Any
    ) -> None:
        """Called when engines are new. Collective; the bridge itself connects at the next update."""
        self.disconnect_rollout_engines()
        self._servers = list(self._given) if self._given is not None else _urls(rollout_engines)

    def disconnect_rollout_engines(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None

    def update_weights(self) -> None:
        """Give every engine the weights. Collective. Raises the bridge's errors; the engines then go on with the
        old version."""
        if not self._servers:
            raise ConfigError("no rollout engines: call connect_rollout_engines first")
        if self._bridge is None:
            self._bridge = connect_framework(self._source, self._servers, self._settings)
        self.report = self._bridge.update_weights(version=self.weight_version + 1)
        self.weight_version += 1


def install(args: Any) -> None:
    """The hook that slime and miles call on every trainer rank before they make their updater."""
    if getattr(args, "colocate", False):
        raise ConfigError("--colocate shares GPUs with the servers; the bridge needs servers on GPUs of their own")
    found = [name for name in ACTOR_MODULES if hasattr(sys.modules.get(name), REPLACED)]
    if not found:
        raise ConfigError(f"none of {', '.join(ACTOR_MODULES)} is loaded with {REPLACED}; is this slime or miles?")
    for name in found:
        setattr(sys.modules[name], REPLACED, BridgeUpdater)


def _urls(engines: Sequence[Any]) -> list[str]:
    """Rank 0 asks the engines' Ray actors; the others learn as many names."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return [f"engine-{i}" for i in range(len(engines))]
    import ray

    hosts = ray.get([engine.get_server_host.remote() for engine in engines])
    ports = ray.get([engine.get_server_port.remote() for engine in engines])
    return [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
