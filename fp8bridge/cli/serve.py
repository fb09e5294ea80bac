"""`fp8bridge serve`: the embedded rollout server."""

from __future__ import annotations


def serve() -> None:
    """Start a rollout server on this machine."""
