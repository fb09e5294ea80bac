"""NeMo-RL's synchronizer interface as published (its package on the registry is empty), on a real local Ray."""

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-frameworks does")

from fp8bridge.adapters.nemo_rl import BridgeWeightSynchronizer
from fp8bridge.errors import ConfigError

from .support import run_snippet, save_model

pytestmark = pytest.mark.frameworks


def test_the_snippet_syncs_policy_workers(server, tmp_path):
    save_model(tmp_path / "model")
    lines = run_snippet("nemo-rl.md", tmp_path, tmp_path / "model", server.server.url).splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == ["1 False", "2 False"]
    assert float(lines[0].split()[-1]) > 0
    assert server.version() == "2"
    assert not server.load()["paused"]


def test_it_has_the_members_of_nemo_rls_interface():
    """`nemo_rl/weight_sync/interfaces.py` of August 2026."""
    wanted = {"sync_weights", "is_stale", "mark_stale", "init_communicator", "shutdown"}
    assert wanted <= set(dir(BridgeWeightSynchronizer))
    assert isinstance(inspect.getattr_static(BridgeWeightSynchronizer, "is_stale"), property)
    parameters = inspect.signature(BridgeWeightSynchronizer.sync_weights).parameters
    assert {name: p.kind for name, p in parameters.items() if name != "self"} == dict.fromkeys(
        ("timer", "kv_scales"), inspect.Parameter.KEYWORD_ONLY
    )


class FailingBridge:
    """Takes the place of the connected bridge: the update fails."""

    def update_weights(self, *, version):
        raise ConfigError(f"version {version} failed")

    def close(self):
        pass


def test_a_failed_sync_leaves_weights_stale_and_gives_the_kv_cache_back():
    tags = []
    generation = SimpleNamespace(prepare_for_generation=lambda tags: seen.append(*tags))
    seen = tags
    made = BridgeWeightSynchronizer(None, generation, servers=["http://127.0.0.1:1"], hf_config={})
    with pytest.raises(ConfigError, match="call init_communicator first"):
        made.sync_weights()
    with pytest.raises(ConfigError, match="KV-cache scales cannot be sent"):
        made.sync_weights(kv_scales={"layer": 1.0})
    made._bridge = FailingBridge()
    with pytest.raises(ConfigError, match="version 1 failed"):
        made.sync_weights()
    assert made.is_stale
    assert tags == ["weights", "kv_cache"]
    made.shutdown()
