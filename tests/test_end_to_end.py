"""The bridge and real rollout servers in processes of their own: real HTTP, real sockets, real kills."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

import fp8bridge
from fp8bridge import rollout
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ServerError, ServerMismatchError, VersionError

from .rollout.rig import FP8_QWEN3, QWEN3, Client, reference
from .support import expected_wire


def plain_weights(seed):
    """A trainer's bf16 weights."""
    return {name: tensor.clone() for name, tensor in reference(seed, QWEN3).weights.tensors.items()}


def connect(clients, model, config=QWEN3, **options):
    urls = [c.server.url if isinstance(c, Client) else c for c in clients]
    settings = {"bucket_nbytes": 30_000, "open_timeout_s": 10, "request_timeout_s": 10, "bucket_timeout_s": 2}
    return fp8bridge.connect(StateDictSource(model, config), urls, **settings | options)


def assert_holds(client, model):
    from fp8bridge.staging import tensor_checksum

    wire = expected_wire(model)
    assert client.checksums() == {name: f"{tensor_checksum(t):016x}" for name, t in wire.items()}


@pytest.fixture
def pair():
    with launched_pair() as clients:
        yield clients


@contextmanager
def launched_pair():
    """Two servers of other weights than any trainer's here."""
    servers = [rollout.launch(FP8_QWEN3, seed=90 + i, wait=False) for i in range(2)]
    try:
        for server in servers:
            server.wait_ready()
        clients = [Client(server, seed=0) for server in servers]
        yield clients
        for client in clients:
            client.http.close()
    finally:
        for server in servers:
            if server.process.poll() is None:
                os.kill(server.process.pid, signal.SIGCONT)
            server.close()


def test_both_servers_generate_with_the_trainers_weights_update_after_update(pair):
    model = plain_weights(1)
    with connect(pair, model, rule="sglang") as bridge:
        for version in (1, 2):
            for tensor in model.values():
                tensor.mul_(1.25)
            report = bridge.update_weights(version=version)
            assert bridge.verify().keys() == report.servers.keys()
            outputs = []
            for client in pair:
                assert_holds(client, model)
                answer = client.generate()
                outputs.append(answer["output_ids"])
                assert answer["meta_info"]["weight_version"] == str(version)
            assert outputs[0] == outputs[1]
        with pytest.raises(VersionError):
            bridge.update_weights(version=2)
    with connect(pair, model) as bridge, pytest.raises(VersionError, match="already claims version 2"):
        bridge.update_weights(version=2)


def test_a_request_in_flight_goes_on_with_the_new_weights(pair):
    client = pair[0]
    with connect([client], plain_weights(1)) as bridge:
        join = client.in_background(lambda: client.generate(200))
        client.wait_running()
        bridge.update_weights(version=1)
        versions = [span["version"] for span in join()["meta_info"]["weight_versions"]]
    assert versions == ["default", "1"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_a_server_lost_in_the_middle_is_fenced_and_comes_back(pair, sig):
    model = plain_weights(1)
    good, bad = pair
    with connect(pair, model) as bridge:
        bridge.update_weights(version=1)
        for tensor in model.values():
            tensor.mul_(0.5)

        def lose(done, total):
            if done == 2:
                os.kill(bad.server.process.pid, sig)

        start = time.monotonic()
        report = bridge.update_weights(version=2, on_progress=lose)
        assert list(report.fenced) == [bad.server.url]
        assert time.monotonic() - start < 40
        assert_holds(good, model)
        assert good.version() == "2"
        assert good.load()["paused"] is False
        assert len(good.generate()["output_ids"]) == 12
        bad = revive(bad)
        bridge.admit(bad.server.url)
        bridge.update_weights(version=3)
        assert_holds(bad, model)
        assert bad.generate()["output_ids"] == good.generate()["output_ids"]
        bad.http.close()
        bad.server.close()


def revive(client):
    """The stalled server goes on; the killed one is started again at its old address."""
    server = client.server
    if server.process.poll() is None:
        os.kill(server.process.pid, signal.SIGCONT)
        client.wait_for(lambda: client.info()["fp8bridge"]["session"] is None)
        assert client.version() == "1", "it woke up with its old version"
        return client
    port = int(server.url.rsplit(":", 1)[1])
    return Client(rollout.launch(FP8_QWEN3, seed=77, port=port), seed=77)


TRAINER = """
import os, sys, time
from tests.test_end_to_end import connect, plain_weights
phase, urls = sys.argv[1], sys.argv[2:]

def die(done, total):
    os.kill(os.getpid(), 9)

with connect(urls, plain_weights(1), request_timeout_s=1, bucket_timeout_s=1) as bridge:
    if phase == "bucket":
        bridge.update_weights(version=1, on_progress=die)
    from fp8bridge.session import Update
    def wrapped(self, *a, **k):
        os.kill(os.getpid(), 9)
    setattr(Update, phase, wrapped)
    bridge.update_weights(version=1)
"""


@pytest.mark.parametrize("phase", ["receive", "bucket", "commit"])
def test_a_trainer_that_dies_leaves_no_server_paused_or_claiming_what_it_does_not_hold(pair, phase):
    before = [(c.checksums(), c.version()) for c in pair]
    urls = [c.server.url for c in pair]
    dead = subprocess.run([sys.executable, "-c", TRAINER, phase, *urls], capture_output=True, text=True, timeout=60)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    for client, old in zip(pair, before, strict=True):
        client.wait_for(lambda c=client: c.info()["fp8bridge"]["session"] is None and not c.load()["paused"])
        assert (client.checksums(), client.version()) == old
        client.generate()
    with connect(pair, plain_weights(2)) as bridge:
        bridge.update_weights(version=1)
    assert_holds(pair[0], plain_weights(2))


def test_two_trainers_at_once_do_not_mix(pair):
    """The second one's begin is refused while the first one's session is open."""
    model = plain_weights(1)
    refused = []

    def intrude(done, total):
        if done == 1:
            with connect(pair, plain_weights(5)) as other, pytest.raises(ServerError, match="already open") as caught:
                other.update_weights(version=9)
            refused.append(caught.value)

    with connect(pair, model) as bridge:
        report = bridge.update_weights(version=1, on_progress=intrude)
    assert len(refused) == 1
    assert not report.fenced
    for client in pair:
        assert_holds(client, model)
        assert client.load()["paused"] is False


def test_connect_refuses_servers_of_another_model_or_layout_by_name(pair):
    wrong_model = QWEN3 | {"num_hidden_layers": 1}
    with pytest.raises(ServerMismatchError, match="num_hidden_layers: server 2, trainer 1"):
        connect(pair, plain_weights(1), wrong_model)
    quant = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    with pytest.raises(ServerMismatchError, match=r"block: \[64, 64\] != \[128, 128\]"):
        connect(pair, plain_weights(1), QWEN3 | {"quantization_config": quant})
    model = plain_weights(1)
    model["model.norm.weight"] = torch.zeros(145, dtype=torch.bfloat16)
    del model["lm_head.weight"]
    with pytest.raises(ServerMismatchError) as caught:
        connect(pair, model)
    assert "model.norm.weight is bfloat16 [144] on the server, bfloat16 [145] in the update" in str(caught.value)
    assert "lm_head.weight" in str(caught.value)
    for client in pair:
        assert client.info()["fp8bridge"]["session"] is None


def test_a_hundred_updates_leave_nothing_behind(pair):
    model = plain_weights(1)
    with connect(pair, model) as bridge:
        bridge.update_weights(version=1)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        server_files = [len(os.listdir(f"/proc/{c.server.process.pid}/fd")) for c in pair]
        for version in range(2, 102):
            bridge.update_weights(version=version)
        assert threading.active_count() <= threads + 2, "the pool may have grown to its size"
        assert len(os.listdir("/proc/self/fd")) <= files + 2
        now = [len(os.listdir(f"/proc/{c.server.process.pid}/fd")) for c in pair]
        assert all(b <= a + 2 for a, b in zip(server_files, now, strict=True))
        assert bridge.verify()
