"""The loader's answers: whose they are, and what a stranger's are worth."""

import threading

import msgpack
import pytest
import torch
import zmq

from fp8bridge.errors import ServerRefusedError, ServerTimeoutError, WireError
from fp8bridge.sglang import agent, loader, payload
from fp8bridge.sglang.agent import LoaderAgent, Report


class Client:
    """Calls the loader as a server of `ranks` TP ranks would; `before`: what comes to the socket first."""

    name = "http://server"

    def __init__(self, ranks, before=None, mute=()):
        self.ranks, self.before, self.mute = ranks, before, mute

    def update_from_tensor(self, payloads, load_format, *, timeout_s):
        import base64
        import pickle

        assert load_format == agent.LOADER
        assert len(payloads) == self.ranks
        for rank, text in enumerate(payloads):
            tensors = pickle.loads(base64.b64decode(text))
            if self.before:
                self.before(msgpack.unpackb(payload.unpack(tensors)))
            if rank not in self.mute:
                loader.load(torch.nn.Linear(1, 1), tensors)


def push(address, frame):
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    socket.send(frame)
    context.destroy(linger=2000)


def test_every_rank_reports_and_a_failure_has_the_loaders_words():
    assert [r.rank for r in LoaderAgent(Client(2), 2, "127.0.0.1").call("drop", {}, timeout_s=5)] == [0, 1]
    with pytest.raises(ServerRefusedError, match=r"http://server \(TP rank 0\) refused 'load': .*rehearse it first"):
        LoaderAgent(Client(2), 2, "127.0.0.1").call("load", {"manifest_hash": "x", "folder": "y"}, timeout_s=5)


def test_a_strangers_reports_count_for_nothing():
    def forge(call):
        _, rank, address, secret, _ = call
        for frame in (
            b"no msgpack",
            msgpack.packb(["x", 1, True]),
            Report("0" * len(secret), rank, True, "", {"forged": True}).encode(),
            Report(secret, 7, True, "", {"forged": True}).encode(),
        ):
            push(address, frame)

    [report] = LoaderAgent(Client(1, before=forge), 1, "127.0.0.1").call("drop", {}, timeout_s=5)
    assert report.data == {}


def test_a_rank_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(agent, "_GRACE_S", 0.3)
    with pytest.raises(ServerTimeoutError, match=r"did not report on 'drop' from TP ranks \[1\]"):
        LoaderAgent(Client(2, mute={1}), 2, "127.0.0.1").call("drop", {}, timeout_s=5)
    assert threading.active_count() < 20


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgpack.packb({}), msgpack.packb([1, 0, True, "", {}])])
def test_what_is_no_report_is_a_wire_error(frame):
    with pytest.raises(WireError, match="no report of fp8bridge's loader"):
        Report.decode(frame)
