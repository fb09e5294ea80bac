"""SkyRL's `WeightTransferSender`: the chunks of its trainer workers go over a bridge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8bridge import SyncReport
from fp8bridge.protocols import RolloutServer

from .feed import WeightFeed
from .frameworks import warn_if_untested


class BridgeSender:
    """Every trainer worker has one, and all call it together; each keeps its share of the model.

    servers: URLs of the rollout servers. hf_config: the model's folder, config.json or dict. settings: fields
    of BridgeConfig. report: of the last update. Versions on the servers count the updates from 1.
    """

    def __init__(
        self, servers: Sequence[str | RolloutServer], hf_config: Mapping[str, Any] | str | Path, **settings: Any
    ) -> None:
        warn_if_untested("SkyRL")
        self._servers = list(servers)
        self._feed = WeightFeed(hf_config, **settings)

    @property
    def report(self) -> SyncReport | None:
        return self._feed.report

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Mapping[str, Any] | None = None) -> None:
        """Give every server what SkyRL's extractor yields. Raises the bridge's errors; the servers then go on with
        the old weights."""
        self._feed.update(_pairs(chunks), self._servers)

    def teardown(self) -> None:
        """Release sockets; the servers keep their weights."""
        self._feed.close()


def _pairs(chunks: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
