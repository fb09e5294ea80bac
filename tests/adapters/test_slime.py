"""slime's and miles' calls, as their Megatron actor is published (no package is), with a live Megatron model."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("starlette")

from fp8bridge import rollout
from fp8bridge.adapters import slime
from fp8bridge.errors import ConfigError

from ..frameworks.support import run_snippet
from ..rollout.rig import FP8_QWEN3, Client


def test_the_snippet_updates_an_engine(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(FP8_QWEN3))
    with rollout.launch(FP8_QWEN3, seed=90) as running:
        client = Client(running, seed=90)
        old = client.checksums()
        lines = run_snippet("slime.md", tmp_path, tmp_path, running.url).splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2", "3"]
        assert client.version() == "3"
        assert client.checksums() != old
        assert not client.load()["paused"]
        client.http.close()


@pytest.mark.parametrize("name", slime.ACTOR_MODULES)
def test_the_hook_replaces_the_updater_of_the_framework_that_is_loaded(name, monkeypatch):
    actor = ModuleType(name)
    actor.UpdateWeightFromDistributed = object
    monkeypatch.setitem(sys.modules, name, actor)
    slime.install(SimpleNamespace(colocate=False))
    assert actor.UpdateWeightFromDistributed is slime.BridgeUpdater


def test_the_hook_refuses_what_it_cannot_serve(monkeypatch):
    with pytest.raises(ConfigError, match="--colocate"):
        slime.install(SimpleNamespace(colocate=True))
    monkeypatch.setitem(sys.modules, slime.ACTOR_MODULES[0], ModuleType("renamed"))
    with pytest.raises(ConfigError, match=r"none of slime.backends.megatron_utils.actor.* is loaded"):
        slime.install(SimpleNamespace(colocate=False))
