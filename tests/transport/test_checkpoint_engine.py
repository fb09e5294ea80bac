"""checkpoint-engine's own worker at the other end, over real sockets. Here both share memory by name; on a GPU the
same runs inside SGLang (`tests/test_gpu_sglang.py`)."""

import json
import pickle
import threading

import pytest
import torch
import zmq
from checkpoint_engine import worker

from fp8bridge.config import BridgeConfig
from fp8bridge.errors import ConfigError, ServerMismatchError, ServerRefusedError, ServerTimeoutError
from fp8bridge.http import Http
from fp8bridge.plan import Bucket, Entry, Manifest
from fp8bridge.protocols import PackedBucket
from fp8bridge.sglang import payload
from fp8bridge.sglang.server import SglangServer
from fp8bridge.transport import checkpoint_engine
from fp8bridge.transport.checkpoint_engine import CheckpointEngineLine
from fp8bridge.transport.ipc import IpcTransport
from tests.scripted import Scripted
from tests.support import FP8_LAYOUT

MEMORY = torch.zeros(2048, dtype=torch.uint8)
"""What the trainer shares; a slot begins at 0 and one at 1024."""


def shared_memory(*args):
    return MEMORY


class CpuDevice:
    """In place of checkpoint-engine's CUDA or NPU: nothing to wait for."""

    class device_module:
        synchronize = ipc_collect = empty_cache = staticmethod(lambda: None)


class Engine:
    """Stock SGLang's side of the endpoint, as its worker extension does it: one call of the package."""

    def __init__(self):
        self.held, self.processed = {}, 0
        self.refuse = self.answered = None
        self.scripted = Scripted()
        ok = (200, {"success": True})
        self.scripted.answers = {
            "/update_weights_from_ipc": self.update,
            "/update_weight_version": ok,
            "/begin_weight_update": ok,
            "/end_weight_update": ok,
        }
        facts = {"version": "0.5.23", "tp_size": 1, "model_path": "nowhere"}
        self.server = SglangServer(Http(self.scripted.url, timeout_s=5), facts, timeout_s=5, host="127.0.0.1")

    def load(self, tensors):
        if self.refuse:
            raise ValueError(self.refuse)
        self.held |= {name: t.clone() for name, t in tensors}

    def process(self):
        self.processed += 1

    def update(self):
        sockets = json.loads(self.scripted.seen[-1][2])["zmq_handles"]
        context = zmq.Context()
        try:
            worker.update_weights_from_ipc(
                context, sockets["GPU-here"], device_id=0, run=self.load, post_hook=self.process
            )
            self.answered = 200, {"success": True, "message": "IPC weight update completed successfully"}
        except Exception as err:  # noqa: BLE001 - SGLang answers with it
            self.answered = 400, {"success": False, "message": str(err)}
        finally:
            context.destroy(linger=0)
        return self.answered

    @property
    def paths(self):
        return [path for path, _, _ in self.scripted.seen]

    def close(self):
        self.server.close()
        self.scripted.close()


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(worker, "DeviceManager", CpuDevice)
    monkeypatch.setattr(checkpoint_engine, "gpu_of", lambda memory: "GPU-here")
    handle = pickle.dumps((shared_memory, (0,) * 8))
    monkeypatch.setattr(payload, "pack_memory", lambda memory: handle)
    made = Engine()
    yield made
    made.close()


@pytest.fixture
def line(engine):
    made = CheckpointEngineLine(engine.server, timeout_s=10)
    yield made
    made.lost("the test is over")


def packed_pair():
    """Two buckets, one in each slot of the shared memory; and the tensors in them."""
    tensors = {
        "w": torch.arange(510, dtype=torch.float32).bfloat16().reshape(17, 30),
        "codes": torch.arange(200, dtype=torch.uint8).reshape(10, 20).view(torch.float8_e4m3fn),
        "scale": torch.arange(16.0),
    }
    entries = (
        (Entry("w", "bfloat16", (17, 30), 0, 1020),),
        (Entry("codes", "float8_e4m3fn", (10, 20), 0, 200), Entry("scale", "float32", (16,), 200, 64)),
    )
    found, packed = [], []
    for index, (parts, start) in enumerate(zip(entries, (0, 1024), strict=True)):
        found.append(Bucket(index, 0, sum(e.nbytes for e in parts), parts))
        for e in parts:
            data = tensors[e.name].view(-1).view(torch.uint8)
            MEMORY[start + e.offset : start + e.offset + e.nbytes] = data
        packed.append(PackedBucket(found[-1], MEMORY.narrow(0, start, found[-1].nbytes), b""))
    return Manifest(FP8_LAYOUT, tuple(found)), packed, tensors


def test_every_tensor_arrives_from_where_it_lies_and_the_weights_are_processed_once(engine, line):
    manifest, packed, tensors = packed_pair()
    for update in (1, 2):
        engine.held = {}
        engine.server.begin("token-of-the-update", manifest.hash, lease_s=5)
        line.open(manifest, [0, 1])
        for each in packed:
            line.load(each)
        line.end("")
        assert engine.held.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert engine.held[name].dtype == tensor.dtype
            assert torch.equal(engine.held[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
        assert engine.processed == update
    assert "/begin_weight_update" not in engine.paths, "the end of a session would process the weights again"
    assert engine.paths.count("/update_weights_from_ipc") == 2
    told = [json.loads(body)["new_version"] for path, _, body in engine.scripted.seen if path.endswith("version")]
    assert told == ["incomplete-token-of"] * 2, "until the commit no one believes the old version is there"


def test_a_server_that_cannot_load_says_why_and_comes_out_of_its_request(engine, line):
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    line.load(packed[0])
    engine.refuse = "no parameter of that name"
    with pytest.raises(ServerRefusedError, match="could not load what it was shown: ValueError: no parameter of that"):
        line.load(packed[1])
    line.lost("it failed")
    assert engine.processed == 0
    engine.refuse = None
    line.open(manifest, [0, 1])
    for each in packed:
        line.load(each)
    assert engine.processed == 1, "and takes the next update"


def test_an_update_that_ends_early_frees_the_server(engine, line):
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    line.load(packed[0])
    line.end("another rank failed")
    assert engine.answered[0] == 400
    assert engine.processed == 0
    assert "w" in engine.held
    line.end("")  # nothing is open: nothing happens


def test_a_server_without_the_package_has_the_old_version_still(engine, line):
    words = "IPC weight update failed: ImportError checkpoint-engine is not installed. Please install it"
    engine.scripted.answers["/update_weights_from_ipc"] = (400, {"success": False, "message": words})
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    with pytest.raises(ServerMismatchError, match="neither our loader nor checkpoint-engine.*pip install"):
        line.load(packed[0])
    line.lost("")
    assert "/update_weight_version" not in engine.paths


def test_another_refusal_keeps_the_servers_words(engine, line):
    words = "Device UUID GPU-7 not found in zmq_handles: ['GPU-here']"
    engine.scripted.answers["/update_weights_from_ipc"] = (400, {"success": False, "message": words})
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    with pytest.raises(ServerRefusedError, match="Device UUID GPU-7 not found"):
        line.load(packed[0])


def test_a_server_that_never_comes_to_the_socket_is_named_in_time(engine, line):
    gate = threading.Event()
    engine.scripted.answers["/update_weights_from_ipc"] = lambda: gate.wait(20) and (200, {"success": True})
    line._timeout_s = 0.3
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    with pytest.raises(ServerTimeoutError, match=r"over checkpoint-engine's socket in 0\.3 s"):
        line.load(packed[0])
    gate.set()
    line.lost("")


def test_a_server_that_says_it_is_done_too_early_is_not_believed(engine, line):
    engine.scripted.answers["/update_weights_from_ipc"] = (200, {"success": True})
    manifest, packed, _ = packed_pair()
    line.open(manifest, [0, 1])
    with pytest.raises(ServerRefusedError, match="ended the update before it was told everything"):
        line.load(packed[0])


def test_several_tp_ranks_and_other_servers_are_refused_before_anything_is_asked(engine):
    engine.server.tp_size = 2
    with pytest.raises(ServerMismatchError, match="tp_size 2.*--custom-weight-loader"):
        IpcTransport([engine.server], BridgeConfig(transport="ipc"))
    with pytest.raises(ConfigError, match="transport 'ipc' sends to SGLang, which here is not"):
        IpcTransport([type("Other", (), {"name": "here"})()], BridgeConfig(transport="ipc"))
    assert engine.paths == []
