"""One server process per test module."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from fp8bridge import rollout

from .rig import FP8_QWEN3, Client


@pytest.fixture(scope="module")
def running():
    with rollout.launch(FP8_QWEN3, seed=1) as server:
        client = Client(server, seed=1)
        yield client
        client.http.close()


@pytest.fixture
def server(running):
    """The module's server, idle and without a session before each test, and still alive after it."""
    session = running.info()["fp8bridge"]["session"]
    assert session is None, "the test before left a session open"
    yield running
    running.ok("/continue_generation")
    assert running.server.process.poll() is None, running.server.log_tail()
