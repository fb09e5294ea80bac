"""AReaL's own Megatron engine and SGLang client with our updates: a live Megatron model, a real rollout server."""

import contextlib
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("areal", reason="AReaL is not installed: make test-frameworks does")

import torch
import torch.distributed as dist

from fp8bridge.errors import CommitError, ConfigError, NonFiniteError, ServerRefusedError
from fp8bridge.staging import tensor_checksum

from ..rollout.rig import QWEN3
from .support import snippets

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module", autouse=True)
def no_megatron_bridge():
    """AReaL imports Megatron-Bridge to load checkpoints. It needs CUDA packages, and nothing here calls it."""
    stand_in = MagicMock(__path__=[], __spec__=None)
    names = ("megatron.bridge", "megatron.bridge.peft", "megatron.bridge.peft.lora")
    sys.modules |= dict.fromkeys(names, stand_in)
    yield
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model():
    """One rank's Megatron model, in this process: it changes torch, so this module runs by itself."""
    from megatron.core import parallel_state

    from fp8bridge.demo.megatron_cpu import build_model, use_cpu

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    use_cpu()
    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(3)
    yield build_model(QWEN3, dtype=torch.bfloat16)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def actor(model):
    """The page's class; only what AReaL's constructor would load from disk onto GPUs is put in its place."""
    scope = {}
    exec(snippets("areal.md")[0], scope)  # the page's own code

    class Parts(scope["Actor"]):
        _offload_aware_context = contextlib.nullcontext
        cpu_group = None

        def __init__(self):
            self.model = model
            self.hf_config = SimpleNamespace(to_dict=lambda: QWEN3)
            self.rollout_engine = None
            self.weight_update_group_initialized = False
            self._version = 0
            self.logger = None

    made = Parts()
    yield made
    made._close_bridge()


def rollout_engine(url):
    """AReaL's SGLang client, which knows the server and pauses it over HTTP."""
    from areal.api.cli_args import InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine

    engine = RemoteSGLangEngine(InferenceEngineConfig(pause_grace_period=0.0))
    engine._engine.addresses = [url.removeprefix("http://")]
    return engine


def meta(version=None, kind="xccl", **changes):
    from areal.api.io_struct import WeightUpdateMeta

    made = WeightUpdateMeta(type=kind, **changes)
    return made if version is None else made.with_version(version)


@pytest.fixture
def connect(actor, monkeypatch):
    """AReaL's connect_engine, without the devices it waits for."""
    import areal.engine.megatron_engine as module

    monkeypatch.setattr(module, "current_platform", SimpleNamespace(synchronize=lambda: None))

    def run(url):
        actor.connect_engine(rollout_engine(url), meta())
        assert not actor.weight_update_group_initialized, "no NCCL group is made"

    return run


def test_areal_updates_go_over_the_bridge_with_areals_versions(actor, connect, server):
    from fp8bridge.adapters.megatron import MegatronSource

    connect(server.server.url)
    actor.update_weights(meta(4))
    assert server.version() == "4"
    assert actor.report.version == 4
    assert not server.load()["paused"], "AReaL's client continued it"
    norm = "model.norm.weight"
    source = MegatronSource(actor.model, QWEN3)
    shard = next(s for s in source.describe()[1] if s.tensor == norm)
    assert server.checksums()[norm] == f"{tensor_checksum(source.read(shard.param).reshape(-1)):016x}"
    actor.set_version(4)
    actor.update_weights(meta())
    assert server.version() == "5", "AReaL gave none: the next after its own"
    assert actor._bridge.verify()


def test_an_error_is_raised_and_generation_continues_with_the_old_version(actor, connect, server):
    connect(server.server.url)
    actor.update_weights(meta(1))
    weight = next(actor.model[0].parameters())
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        actor.update_weights(meta(2))
    with torch.no_grad():
        weight[0, 0] = kept
    assert (server.version(), server.load()["paused"]) == ("1", False)
    with pytest.raises(ConfigError, match="use_lora must be off"):
        actor.update_weights(meta(2, use_lora=True))
    with pytest.raises(ConfigError, match="weight_update_mode is 'disk'; with BridgeUpdates it must be 'xccl'"):
        actor.update_weights(meta(2, kind="disk"))
    server.server.kill()
    with pytest.raises(RuntimeError, match="pause_generation"):  # AReaL's own client noticed first
        actor.update_weights(meta(2))


def test_a_server_that_fails_is_an_error_on_the_trainer(actor, connect, server, monkeypatch):
    from fp8bridge.servers import HttpServer

    connect(server.server.url)
    actor.update_weights(meta(1))

    def refuse(self, *_, **__):
        raise ServerRefusedError(f"{self.name} refused", server=self.name)

    monkeypatch.setattr(HttpServer, "commit", refuse)
    with pytest.raises(CommitError, match="version 2 is on 0 servers, 1 were asked for"):
        actor.update_weights(meta(2))
    assert (server.version(), server.load()["paused"]) == ("1", False)


def test_a_rollout_engine_without_addresses_asks_for_them(actor, connect):
    engine = SimpleNamespace(pause_generation=lambda: None, continue_generation=lambda: None)
    with pytest.raises(ConfigError, match="set bridge_servers on the engine's class"):
        actor.connect_engine(engine, meta())
    type(actor).bridge_servers = ["http://here:1"]
    actor.connect_engine(engine, meta())
    assert actor._urls == ["http://here:1"]


def test_before_a_rollout_engine_is_connected_areal_says_so(actor):
    with pytest.raises(RuntimeError, match="connect"):
        actor.update_weights(meta(1))


def test_areals_own_fp8_config_is_known_field_by_field():
    from areal.api.cli_args import FP8EngineConfig

    from fp8bridge.adapters.areal_config import convert_fp8_config

    fields, notes = convert_fp8_config(FP8EngineConfig(mode="hybrid", recipe="blockwise", param=True))
    assert fields == {
        "mode": "hybrid", "recipe": "blockwise", "fp8_params": True, "tp_only_amax_reduction": False
    }  # fmt: skip
    assert notes == []
