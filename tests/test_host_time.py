"""From the second update on, Python's work is by the bucket, not by the tensor.

The GPU's side is put in place of the CPU's, with launches that do nothing: what is left is host work. Counting
calls of Python functions is exact where a clock on a shared machine is not.
"""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import PlanError
from fp8bridge.kernels import ChecksumTable, PackTable, checks
from fp8bridge.protocols import ServerInfo

from .support import FP8_CONFIG, FP8_LAYOUT


class NoServer:
    """Answers at once and holds nothing."""

    name, tp_size = "nowhere", 1

    def info(self):
        return ServerInfo("none", FP8_LAYOUT, None, None, True)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class NoTransport:
    multi_sender = True
    all_connect = False
    from_device = False

    def __init__(self):
        self.failures = {}

    def open(self, *args):
        return "nowhere"

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class NoLaunch:
    """A device table whose launches cost nothing; counts the uploads of addresses."""

    uploads = 0

    def __init__(self, size):
        self.size = size

    def upload_sources(self, addresses, strides):
        NoLaunch.uploads += 1
        return torch.tensor([addresses, strides])

    def launch(self, *args):
        return torch.zeros(self.size, dtype=torch.int64)

    look = launch


@pytest.fixture
def bridge_of(monkeypatch):
    """A bridge for `model` whose kernels and servers do nothing."""
    monkeypatch.setattr(checks, "uses_triton", lambda device: True)
    monkeypatch.setattr("fp8bridge.bridge.open_transport", lambda *_: NoTransport())
    for table, size in ((PackTable, lambda t: len(t.items)), (ChecksumTable, lambda t: len(t.spans))):
        monkeypatch.setattr(table, "device_table", property(lambda self, size=size: NoLaunch(size(self))))
    NoLaunch.uploads = 0

    def connect(model, **options):
        return fp8bridge.connect(StateDictSource(model, FP8_CONFIG), [NoServer()], **options)

    return connect


def experts(count):
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    return {name.format(i // 64, i % 64): torch.zeros(8, 16, dtype=torch.bfloat16) for i in range(count)}


def python_calls(work):
    """Calls of Python functions (those of C are not by the tensor, or are one pass over a list)."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_an_update(bridge_of, count, buckets):
    one = 8 * 16 + 4
    with bridge_of(experts(count), bucket_nbytes=-(-count // buckets) * one) as bridge:
        assert len(bridge.plan.manifest.buckets) == buckets
        bridge.update_weights(version=1)
        return python_calls(lambda: bridge.update_weights(version=2))


def test_a_tensor_more_costs_no_python_call_and_a_bucket_more_few(bridge_of):
    few, many = (calls_of_an_update(bridge_of, count, 4) for count in (256, 1024))
    assert abs(many - few) < 20, "768 tensors more; waiting for a thread may take a call or two"
    assert calls_of_an_update(bridge_of, 1024, 16) - many < 12 * 100


def test_a_parameter_that_moves_is_found_and_bound_again(bridge_of):
    model = experts(256)
    with bridge_of(model, bucket_nbytes=10_000) as bridge:
        buckets = len(bridge.plan.manifest.buckets)
        bridge.update_weights(version=1)
        assert NoLaunch.uploads == buckets + 1, "one a bucket, and the scan's"
        bridge.update_weights(version=2)
        assert NoLaunch.uploads == buckets + 1
        name = next(iter(model))
        kept = model[name]
        kept.data = torch.ones(8, 16, dtype=torch.bfloat16)  # the same tensor, elsewhere
        bridge.update_weights(version=3)
        assert NoLaunch.uploads == buckets + 1 + 2, "its bucket's and the scan's"
        model[name] = torch.ones(8, 16, dtype=torch.bfloat16)  # another tensor
        bridge.update_weights(version=4)
        assert NoLaunch.uploads == buckets + 1 + 4
        model[name].data = model[name].data.view(16, 8)  # where it was, but seen in another way
        with pytest.raises(PlanError, match=r"is now bfloat16 \[16, 8\], .*connect again"):
            bridge.update_weights(version=5)


def test_freed_weights_are_not_kept_alive(bridge_of):
    """A trainer that offloads its weights between updates gets the memory back."""
    memory = np.ones((8, 16), dtype=np.int16)
    model = experts(64) | {"model.layers.0.mlp.up_proj.weight": torch.from_numpy(memory).view(torch.bfloat16)}
    with bridge_of(model) as bridge:
        bridge.update_weights(version=1)
        bridge.update_weights(version=2)
        watched = weakref.ref(memory)
        del memory
        model["model.layers.0.mlp.up_proj.weight"].data = torch.ones(8, 16, dtype=torch.bfloat16)
        gc.collect()
        assert watched() is None
        bridge.update_weights(version=3)
