"""Which kind of server answers at a URL."""

from __future__ import annotations

from .config import BridgeConfig
from .errors import ConfigError, ServerMismatchError
from .http import Http
from .servers import HttpServer
from .sglang.agent import LOADER
from .sglang.pulling import PullingSglangServer
from .sglang.server import SglangServer


def open_server(
    url: str, *, timeout_s: float, api_key: str | None = None, config: BridgeConfig | None = None
) -> HttpServer | SglangServer:
    """An embedded server or a stock SGLang one, by its /server_info. Raises ServerError."""
    if config is not None and config.transport == "loopback":
        raise ConfigError(f"transport 'loopback' reaches objects in this process, not {url}; use transport='zmq'")
    http = Http(url, timeout_s=timeout_s, api_key=api_key)
    try:
        facts = http.call("GET", "/server_info")
        if "fp8bridge" in facts:
            http.close()
            return HttpServer(url, timeout_s=timeout_s, api_key=api_key)
        if "tp_size" not in facts:
            raise ServerMismatchError(
                f"{http.name} is neither an SGLang server nor one of `fp8bridge serve` (by its /server_info)",
                server=http.name,
            )
        config = config or BridgeConfig()
        kind = PullingSglangServer if config.transport == "zmq" else SglangServer
        server = kind(http, facts, timeout_s=timeout_s, host=config.host)
        if config.transport == "zmq" and not server.has_loader:
            raise ServerMismatchError(
                f"{http.name} is a stock SGLang server without our loader, which transport 'zmq' needs; start it with "
                f"--custom-weight-loader {LOADER}, or use transport='nccl'",
                server=http.name,
            )
        return server
    except BaseException:
        http.close()
        raise
