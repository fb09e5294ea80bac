"""verl's own CheckpointEngineManager, registry, workers and replicas with our backend, on a real local Ray."""

import asyncio

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks does")

from fp8bridge import LoopbackServer
from fp8bridge.adapters.verl import BridgeCheckpointEngine
from fp8bridge.errors import ConfigError, ServerError, VersionError

from ..support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, tiny_model
from .support import run_snippet, save_model

pytestmark = pytest.mark.frameworks


def test_the_snippet_updates_a_replica_through_verls_manager(server, tmp_path):
    """Two trainer workers, verl's replica and its rollout worker; the last of three updates is checked bit for bit."""
    from fp8bridge.staging import tensor_checksum

    from ..rollout.rig import QWEN3, reference

    save_model(tmp_path / "model", seed=1)
    printed = run_snippet("verl.md", tmp_path, tmp_path / "model", server.server.url)
    assert [line.split()[0] for line in printed.splitlines()] == ["1", "2", "3"]
    assert "'fp8bridge/servers': 1.0, 'fp8bridge/fenced': 0.0" in printed
    assert server.version() == "3"
    assert not server.load()["paused"], "verl resumed it"
    trained = reference(1, QWEN3).weights.tensors
    for tensor in trained.values():
        for _ in range(3):
            tensor.mul_(1.25)
    wire = expected_wire(trained)
    assert server.checksums() == {name: f"{tensor_checksum(tensor):016x}" for name, tensor in wire.items()}
    assert server.generate()["meta_info"]["weight_version"] == "3"


def test_the_backend_is_verls_own_kind():
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("fp8bridge.adapters.verl_backend")
    made = CheckpointEngineRegistry.new("fp8bridge", bucket_size=1 << 20, is_master=True, hf_config=FP8_CONFIG)
    assert isinstance(made, CheckpointEngine)
    assert CheckpointEngine.__abstractmethods__ <= set(dir(made))
    with pytest.raises(ConfigError, match=r"engine_kwargs\.fp8bridge\.hf_config is missing"):
        CheckpointEngineRegistry.new("fp8bridge", bucket_size=1 << 20)
    with pytest.raises(ConfigError, match="rollout_dtype: no field of BridgeConfig"):
        CheckpointEngineRegistry.new("fp8bridge", bucket_size=1, hf_config=FP8_CONFIG, rollout_dtype="bfloat16")


def send(engine, servers, model, step=None):
    engine.init_process_group(servers)
    return asyncio.run(engine.send_weights(iter(model.items()), global_steps=step))


def test_replicas_may_come_and_one_that_fails_is_an_error():
    model = tiny_model()
    engine = BridgeCheckpointEngine(30_000, hf_config=FP8_CONFIG, transport="loopback")
    first, second = (LoopbackServer(name, layout=FP8_LAYOUT) for name in "ab")
    first.paused = True  # verl's doing; verl will undo it
    assert send(engine, [first], model, 5)["fp8bridge/servers"] == 1
    assert first.paused
    assert send(engine, [first, second], model)["fp8bridge/servers"] == 2
    for server in (first, second):
        assert_same_bits(server.tensors, expected_wire(model))
        assert server.weight_version == "6", "counted on"
    with pytest.raises(VersionError):
        send(engine, [first, second], model, 6)
    second.fail_at_bucket = 1
    with pytest.raises(ServerError, match="b is not reachable"):
        send(engine, [first, second], model, 7)
    assert first.weight_version == "6"


def test_servers_are_found_by_verls_names_or_asked_for():
    metadata = [
        {"servers": None, "worker_group": "any"},
        {"servers": None, "worker_group": "rollout_reward_colocate_0"},
    ]
    with pytest.raises(ConfigError, match=r"worker group 'rollout_reward_colocate_0'; give engine_kwargs"):
        BridgeCheckpointEngine.build_topology(1, 1, metadata)
    metadata[0]["servers"] = ["http://here:1"]
    assert BridgeCheckpointEngine.build_topology(1, 1, metadata) == (
        {"servers": [["http://here:1"]]},
        {"servers": [[]]},
    )
