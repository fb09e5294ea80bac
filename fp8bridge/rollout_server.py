"""Which kind of server answers at a URL."""

from __future__ import annotations

from typing import Any

from .config import BridgeConfig
from .errors import ConfigError, ServerMismatchError, ServerRefusedError
from .http import Http
from .servers import HttpServer
from .sglang.agent import LOADER
from .sglang.pulling import PullingSglangServer
from .sglang.server import SglangServer
from .vllm.server import VllmServer


def open_server(
    url: str,
    *,
    timeout_s: float,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    config: BridgeConfig | None = None,
) -> HttpServer | SglangServer | VllmServer:
    """An embedded server, a stock SGLang one or a vLLM one, by its /server_info. Raises ServerError."""
    if config is not None and config.transport == "loopback":
        raise ConfigError(f"transport 'loopback' reaches objects in this process, not {url}; use transport='zmq'")
    keys = {"api_key": api_key, "admin_api_key": admin_api_key}
    http = Http(url, timeout_s=timeout_s, **keys)
    try:
        facts = _facts(http)
        if "fp8bridge" in facts:
            http.close()
            return HttpServer(url, timeout_s=timeout_s, **keys)
        if "vllm_config" in facts:
            return VllmServer(http)
        if "tp_size" not in facts:
            raise ServerMismatchError(
                f"{http.name} is no SGLang or vLLM server, nor one of `fp8bridge serve` (by its /server_info)",
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


def _facts(http: Http) -> dict[str, Any]:
    try:
        return http.call("GET", "/server_info")
    except ServerRefusedError as err:
        if err.status != 404:
            raise
        raise ServerMismatchError(
            f"{http.name} has no /server_info; if it is vLLM, start it with VLLM_SERVER_DEV_MODE=1", server=http.name
        ) from err
