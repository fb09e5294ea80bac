"""Ports for processes that are told where to listen."""

import random
import socket

_EPHEMERAL = 32768
"""From here on the system takes ports for connections of its own, also between our look and a server's start."""
_given = set()


def free_port():
    """A TCP port on loopback that nothing listens on, and that no one else is told by this process."""
    while True:
        port = random.SystemRandom().randrange(10_000, _EPHEMERAL)
        with socket.socket() as s:
            if port in _given or s.connect_ex(("127.0.0.1", port)) == 0:
                continue
        with socket.socket() as s:
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
        _given.add(port)
        return port
