"""AReaL: `class Actor(BridgeUpdates, MegatronPPOActor)` sends its weights over a bridge."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from fp8bridge import SyncReport
from fp8bridge.errors import ConfigError, RankError

from .feed import connect_framework
from .frameworks import warn_if_untested
from .megatron import MegatronSource

if TYPE_CHECKING:
    from fp8bridge import Bridge


class BridgeUpdates:
    """Put it before AReaL's `MegatronEngine`, or a subclass, in a class of your own; AReaL's calls stay the same.

    bridge_settings: fields of BridgeConfig. bridge_servers: URLs; None: those of the rollout engine.
    report: of the last update.

    AReaL's rules hold: rank 0 pauses generation, all ranks wait, and it continues when every server has
    the version that the trainer then sets (`meta.version`); after an error it continues with the old one.
    """

    bridge_settings: ClassVar[dict[str, Any]] = {}
    bridge_servers: ClassVar[Sequence[Any] | None] = None
    report: SyncReport | None = None
    _bridge: Bridge | None = None
    _urls: Sequence[Any] = ()

    # What AReaL's engine has, and this class uses.
    model: Any
    hf_config: Any
    rollout_engine: Any
    cpu_group: Any

    def connect_engine(self, engine: Any, meta: Any) -> None:
        """As AReaL's, but for the NCCL group; a later call with other servers connects anew."""
        warn_if_untested("AReaL")
        without_group = copy.copy(meta)
        without_group.type = "disk"  # the one kind for which AReaL sets nothing up
        super().connect_engine(engine, without_group)  # type: ignore[misc]
        self._close_bridge()
        self._urls = self._servers()

    def update_weights(self, meta: Any) -> None:
        """Give every rollout server the weights as version `meta.version`, or the next one where AReaL gave none.

        Collective. Raises the bridge's errors; no server has the new version then.
        """
        self._check_rollout_engine_connected()  # type: ignore[attr-defined]
        if meta.type != "xccl":
            raise ConfigError(f"weight_update_mode is {meta.type!r}; with BridgeUpdates it must be 'xccl'")
        if meta.use_lora:
            raise ConfigError("LoRA adapters go to the servers by AReaL's own update; use_lora must be off")
        version = self.get_version() + 1 if meta.version is None else meta.version  # type: ignore[attr-defined]
        with self._offload_aware_context():  # type: ignore[attr-defined]
            self._hold("pause_generation")
            try:
                self.report = self._connected().update_weights(version=version)
            finally:
                self._hold("continue_generation")

    def destroy(self) -> None:
        self._close_bridge()
        super().destroy()  # type: ignore[misc]

    def _connected(self) -> Bridge:
        if self._bridge is None:
            source = MegatronSource(list(self.model), self.hf_config.to_dict())
            self._bridge = connect_framework(source, self._urls, self.bridge_settings, held=True)
        return self._bridge

    def _hold(self, verb: str) -> None:
        """Rank 0 tells the rollout engine; if that fails, no rank goes on alone."""
        failed: list[Exception | None] = [None]
        if dist.get_rank() == 0:
            try:
                getattr(self.rollout_engine, verb)()
            except Exception as err:  # noqa: BLE001 - raised again below, once the other ranks know
                failed = [err]
        told = [failed[0] and f"{type(failed[0]).__name__}: {failed[0]}"]
        dist.broadcast_object_list(told, src=0, group=self.cpu_group)
        if failed[0] is not None:
            raise failed[0]
        if told[0] is not None:
            raise RankError(f"trainer rank 0 failed in {verb}: {told[0]}")

    def _servers(self) -> list[Any]:
        if self.bridge_servers is not None:
            return list(self.bridge_servers)
        engine = self.rollout_engine
        addresses = getattr(getattr(engine, "_engine", engine), "addresses", None)
        if not addresses:
            raise ConfigError(
                f"a {type(engine).__name__} does not tell its servers' addresses; "
                "set bridge_servers on the engine's class"
            )
        return [address if "://" in address else f"http://{address}" for address in addresses]

    def _close_bridge(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
