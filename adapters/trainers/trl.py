"""TRL's asynchronous GRPO: `AsyncGRPOTrainer(..., weight_transfer=BridgeWeightTransfer(...))`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8bridge import SyncReport
from fp8bridge.protocols import RolloutServer

from .feed import WeightFeed
from .frameworks import warn_if_untested


class BridgeWeightTransfer:
    """TRL's `WeightTransferProtocol`. TRL calls it on the main process only, which reads the whole model.

    servers: URLs of the rollout servers. hf_config: the model's, as a dict, file or folder. settings:
    fields of BridgeConfig. report: of the last update. The version on the servers counts the updates
    from 1, as TRL's `model_version` does.
    """

    def __init__(
        self, servers: Sequence[str | RolloutServer], hf_config: Mapping[str, Any] | str | Path, **settings: Any
    ) -> None:
        warn_if_untested("TRL")
        self._servers = list(servers)
        self._feed = WeightFeed(hf_config, alone=True, **settings)
        self._version = 0

    @property
    def report(self) -> SyncReport | None:
        return self._feed.report

    def init_weight_transfer(self) -> None:
        """Nothing yet: names and shapes come with the first weights."""

    def pause(self) -> None:
        """Nothing: the bridge pauses the servers itself, when all is ready to be sent."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give every server the weights. Raises the bridge's errors; the servers then go on with the old ones."""
        self._feed.update(iterator, self._servers, version=self._version + 1)
        self._version += 1

    def resume(self) -> None:
        """Nothing: the servers generate again when `send_weights` returns or raises."""

    def destroy(self) -> None:
        """Release sockets; the servers keep their weights."""
        self._feed.close()
