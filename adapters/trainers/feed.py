"""A bridge for frameworks that hand over `(name, whole tensor)` pairs at each update: what their adapters share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8bridge import Bridge, BridgeConfig, SyncReport, WeightSource, connect
from fp8bridge.errors import ConfigError
from fp8bridge.protocols import RolloutServer
from fp8bridge.sglang.server import SglangServer

from .state_dict import HandedSource


class WeightFeed:
    """Connects at the first update, when the tensors are known. The servers may be other ones at each update.

    alone: only this rank calls it, whatever torch.distributed has; else every rank does.
    held, settings: see `connect_framework`.
    """

    def __init__(
        self, hf_config: Mapping[str, Any] | str | Path, *, alone: bool = False, held: bool = False, **settings: Any
    ) -> None:
        self.source = HandedSource(hf_config, alone=alone)
        self.report: SyncReport | None = None
        bridge_config(settings)  # a wrong field is an error now, not at the first update
        self._settings = settings
        self._held = held
        self._bridge: Bridge | None = None
        self._connected: list[str] = []
        self._last_version = 0

    def update(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        servers: Sequence[str | RolloutServer],
        *,
        version: int | None = None,
    ) -> SyncReport:
        """Take the tensors and give them to every server. version: None counts on from the last one.

        Raises what `fp8bridge.connect` and `Bridge.update_weights` raise, and ConfigError if they are not
        the tensors of the first update.
        """
        self.source.take(tensors)
        bridge = self._connect(servers)
        number = self._last_version + 1 if version is None else version
        self.report = bridge.update_weights(version=number)
        self._last_version = number
        return self.report

    def verify(self) -> dict[str, int]:
        """See `Bridge.verify`."""
        if self._bridge is None:
            raise ConfigError("nothing to verify: no update has been made yet")
        return self._bridge.verify()

    def close(self) -> None:
        """Release sockets and groups; the servers keep their weights. Idempotent."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None

    def _connect(self, servers: Sequence[str | RolloutServer]) -> Bridge:
        names = [s if isinstance(s, str) else s.name for s in servers]
        if self._bridge is not None and names != self._connected:
            self.close()
        if self._bridge is None:
            self._bridge = connect_framework(self.source, servers, self._settings, held=self._held)
            self._connected = names
        return self._bridge


def connect_framework(
    source: WeightSource, servers: Sequence[str | RolloutServer], settings: Mapping[str, Any], *, held: bool = False
) -> Bridge:
    """`fp8bridge.connect` for a framework that cannot leave a server out.

    `min_healthy` is all servers unless it is given: the framework would go on sampling from one that was
    fenced. held: it pauses the servers itself before an update and lets them go on after it.
    """
    config = bridge_config({"min_healthy": max(1, len(servers))} | dict(settings))
    return HeldBridge(source, servers, config) if held else connect(source, servers, config)


class HeldBridge(Bridge):
    """A bridge to servers that the framework pauses and resumes itself."""

    def _server(self, server: str | RolloutServer) -> RolloutServer:
        return HeldServer(super()._server(server))


class HeldServer:
    """A rollout server whose generation the framework pauses and resumes itself, as around a KV cache that it
    releases meanwhile. A `RolloutServer`: everything else goes to `server`."""

    def __init__(self, server: RolloutServer) -> None:
        self.name = server.name
        self._server = server
        if isinstance(server, SglangServer):
            server.held = True  # a rehearsal and a reading of checksums do not resume it either

    def pause(self, mode: str, *, lease_s: float) -> None:
        """The framework did."""

    def resume(self) -> None:
        """The framework will, when the whole step is over."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


def bridge_config(settings: Mapping[str, Any]) -> BridgeConfig:
    """A BridgeConfig from a framework's free-form options; ConfigError names the one it does not know."""
    unknown = settings.keys() - BridgeConfig.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(BridgeConfig.__dataclass_fields__)
        raise ConfigError(f"{', '.join(sorted(unknown))}: no field of BridgeConfig; there are {known}")
    return BridgeConfig(**settings)
