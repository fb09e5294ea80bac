"""The socket a server listens on, made before the server so that its address is known at once."""

from __future__ import annotations

import socket

from ..errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as err:
        raise ConfigError(f"cannot listen on {host}:{port}: {err}; choose another address") from err


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
