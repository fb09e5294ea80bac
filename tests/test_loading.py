"""`LoadingWeights`: any engine's `load_weights` behind a real Receiver and real sockets."""

import pytest
import torch

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import TransportError
from fp8bridge.receiver import Receiver
from fp8bridge.staging import LoadingWeights

from .support import FP8_CONFIG, FP8_LAYOUT, ZmqThreadServer, assert_same_bits, expected_wire, tiny_model


class Engine(ZmqThreadServer):
    """Holds what its own `load_weights` was given."""

    def __init__(self, fail_at=None):
        super().__init__("engine", layout=FP8_LAYOUT)
        self.held, self.loads, self.fail_at = {}, 0, fail_at

    def load_weights(self, tensors):
        self.loads += 1
        if self.loads == self.fail_at:
            raise MemoryError("no room")
        self.held |= {name: tensor.clone() for name, tensor in tensors}

    def receive(self, addresses, token, manifest_hash, *, timeout_s):
        weights = LoadingWeights(self.load_weights, FP8_LAYOUT)
        weights.begin(self._manifest)
        Receiver(weights, self.name).pull(addresses, token, manifest_hash, timeout_s=timeout_s)
        self.weights.commit = lambda: None


def connect(engine, model):
    return fp8bridge.connect(StateDictSource(model, FP8_CONFIG), [engine], bucket_nbytes=60_000, bucket_timeout_s=5)


def test_every_tensor_reaches_the_engine_once():
    engine, model = Engine(), tiny_model()
    with connect(engine, model) as bridge:
        bridge.update_weights(version=1)
        assert engine.loads == len(bridge.plan.manifest.buckets)
    assert_same_bits(engine.held, expected_wire(model))


def test_an_engine_that_raises_ends_the_update_at_once_with_its_words():
    engine = Engine(fail_at=2)
    with (
        connect(engine, tiny_model()) as bridge,
        pytest.raises(TransportError, match="cannot take the update: MemoryError: no room"),
    ):
        bridge.update_weights(version=1)
    assert torch.is_tensor(next(iter(engine.held.values())))
