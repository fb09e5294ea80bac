"""OpenRLHF's own policy actor with our broadcast. What it imports and a CPU cannot have is stood in for: deepspeed and
vllm; with it ZeRO-3's gathering."""

import importlib.abc
import importlib.machinery
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("openrlhf", reason="OpenRLHF is not installed: make test-frameworks does")

import torch

from fp8bridge import LoopbackServer
from fp8bridge.adapters.openrlhf import BridgeBroadcast
from fp8bridge.errors import ConfigError, NonFiniteError

from ..support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, tiny_model
from .support import snippets

pytestmark = pytest.mark.frameworks

STOOD_IN = {"deepspeed", "vllm", "flash_attn", "ring_flash_attn", "peft", "optree", "torchvision"}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of those packages: every name in it is there, and does nothing."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STOOD_IN:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name, __version__="0")

    def exec_module(self, module):
        """Nothing to run."""


@pytest.fixture(scope="module")
def page():
    """What the page's code defines, run with OpenRLHF's real actor module."""
    finder = StandIns()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("openrlhf.trainer.ray.ppo_actor")
        scope = {}
        exec(snippets("openrlhf.md")[0], scope)
        yield scope
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in STOOD_IN]:
            del sys.modules[name]


def make_trainer(model, **vllm):
    class Model(torch.nn.Module):
        config = SimpleNamespace(to_dict=lambda: FP8_CONFIG)

        def named_parameters(self, *_, **__):
            return ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in model.items())

    args = SimpleNamespace(ds=SimpleNamespace(tensor_parallel_size=1, zero_stage=2), vllm=SimpleNamespace(**vllm))
    actor = SimpleNamespace(model=SimpleNamespace(module=Model()))
    return SimpleNamespace(actor=actor, strategy=SimpleNamespace(args=args), broadcast_to_vllm=None)


def test_the_snippets_actor_sends_over_the_bridge(page):
    server, model = LoopbackServer(layout=FP8_LAYOUT), tiny_model()
    actor = object.__new__(page["BridgedPolicyActor"])
    actor.trainer = make_trainer(model)
    page["SERVERS"][:] = [server]
    page["BridgeBroadcast"] = lambda trainer, servers: BridgeBroadcast(trainer, servers, transport="loopback")
    page["isinstance"] = lambda thing, _: isinstance(thing, BridgeBroadcast)
    for version in ("1", "2"):
        model["model.norm.weight"].mul_(2)
        actor.broadcast_to_vllm()  # OpenRLHF's own method, which calls its trainer's
        assert_same_bits(server.tensors, expected_wire(model))
        assert server.weight_version == version
    assert actor.trainer.broadcast_to_vllm.report.version == 2


def test_openrlhf_calls_what_the_recipe_replaces(page):
    module = sys.modules["openrlhf.trainer.ray.ppo_actor"]
    assert module.ActorPPOTrainer.broadcast_to_vllm.__code__.co_argcount == 1
    assert page["Plain"] in page["BridgedPolicyActor"].__mro__


def test_errors_are_raised_and_sleep_is_refused():
    model = tiny_model()
    broadcast = BridgeBroadcast(make_trainer(model), [LoopbackServer(layout=FP8_LAYOUT)], transport="loopback")
    broadcast()
    model["model.norm.weight"][0] = float("inf")
    with pytest.raises(NonFiniteError):
        broadcast()
    broadcast.close()
    with pytest.raises(ConfigError, match="enable_sleep"):
        BridgeBroadcast(make_trainer(model, enable_sleep=True), ["http://127.0.0.1:1"])
