"""Transports, opened by name. Each lives in the module of that name and is imported on use."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import BridgeConfig
from ..protocols import RolloutServer, Target, Transport


def open_transport(
    config: BridgeConfig, servers: Sequence[RolloutServer], targets: Sequence[Target] = ()
) -> Transport:
    """The transport of `config.transport`. `servers`: on rank 0, those it will send to; `targets`: the same on
    the other ranks."""
    if config.transport == "loopback":
        from .loopback import LoopbackTransport

        return LoopbackTransport(servers)
    if config.transport == "ipc":
        from .ipc import IpcTransport

        return IpcTransport(servers, config)
    if config.transport == "nccl":
        from .nccl import NcclTransport

        return NcclTransport(servers, config, targets)
    from ..keys import load_key_pair
    from .zmq import ZmqTransport

    pair = None if config.curve_key_file is None else load_key_pair(config.curve_key_file)
    return ZmqTransport(config.host, bucket_timeout_s=config.bucket_timeout_s, keys=pair, streams=config.streams)
