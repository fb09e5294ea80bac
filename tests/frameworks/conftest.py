"""Servers for the framework tests."""

import pytest


@pytest.fixture
def server():
    """One embedded rollout server of other weights than any trainer's, and a client of it."""
    from fp8bridge import rollout

    from ..rollout.rig import FP8_QWEN3, Client

    with rollout.launch(FP8_QWEN3, seed=90) as running:
        client = Client(running, seed=90)
        yield client
        client.http.close()
