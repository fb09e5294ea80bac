"""The cells of the fault matrix with transport `nccl`, its groups over gloo: real SGLang servers on the CPU.

SGLang loads in place. So a server that loses an update half-way claims no version until it is sent a whole one,
and a trainer that dies leaves it paused until `fp8bridge doctor --repair`.
"""

import os
import signal
import time
from dataclasses import replace

import httpx
import pytest

from fp8bridge.rollout_server import open_server
from fp8bridge.staging import tensor_checksum
from tests.faults.lines import HttpLine, flipped
from tests.faults.matrix import RUN, covering
from tests.faults.rigs import NEW, NEXT, OLD, Rig
from tests.faults.trainers import Trainers
from tests.faults.zmq_faults import PATHS, Claims, Control, Strike
from tests.test_fault_matrix import record, run

from . import rig as sglang
from .rig import BF16, SglangProcess, connect, descendants, fused, model_folder, weights

VERSION = "0.5.23"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not (sglang.ENVIRONMENTS / VERSION / ".installed").exists(),
        reason="no SGLang environment; `make test-sglang` installs it",
    ),
]


def checksums(tensors):
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


class SglangRig(Rig):
    """Two BF16 servers, which generate; the trainer reaches the bad one through `line`."""

    has_leases = False
    atomic = False

    def __init__(self, folder):
        super().__init__({seed: weights(seed) for seed in (OLD, NEW, NEXT)}, lambda m: checksums(fused(m, BF16)))
        self._folder = folder
        model = model_folder(folder / "model", BF16)
        self.good, self.bad = (SglangProcess(VERSION, model, "--load-format", "dummy") for _ in range(2))
        self.trainers = Trainers()
        try:
            for server in (self.good, self.bad):
                server.wait_ready(timeout_s=350)
        except BaseException:
            self.good.close()
            self.bad.close()
            self.trainers.close()
            raise
        self.line = HttpLine(self.bad.url)
        self.names = (self.good.url, self.line.url)
        settings = {"transport": "nccl", "group_backend": "gloo", "pause_mode": "abort", "senders": "first"}
        limits = {"bucket_nbytes": 200_000, "rule": None, "open_timeout_s": 15, "request_timeout_s": 20}
        self.task = {"kind": "sglang", "settings": settings | limits | {"bucket_timeout_s": 4}}

    def connect(self, **options):
        class At:
            def __init__(self, url):
                self.url = url

        limits = {"bucket_timeout_s": 4, "request_timeout_s": 20, "open_timeout_s": 15, "keep_last": 1}
        self.bridge = connect([At(url) for url in self.names], self.model, BF16, **limits | options)
        return self.bridge

    def claim(self, server):
        return server.weight_version()

    def claim_to_be_ahead(self):
        fault = self.line.fault = Claims()
        return lambda: fault.fired

    def asked_in(self, cell):
        if cell.phase == "commit":
            return lambda path, body: path == "/update_weight_version" and b"incomplete" not in body
        if not cell.in_bucket:
            return lambda path, body: path == PATHS[cell.phase]
        seen = []

        def nth(path, body):
            seen.extend([path] if path == "/update_weights_from_distributed" else [])
            return path == "/update_weights_from_distributed" and len(seen) == self._nth[cell.place]

        return nth

    def arm(self, cell, buckets, at_bucket):
        self._nth = {"first": 1, "middle": buckets // 2 + 1, "last": buckets}
        deed = {"kill": self.bad.kill, "stall": self.stall}.get(cell.fault)
        if cell.fault == "corrupt a byte" and cell.in_bucket and cell.party == "trainer":
            return self._corrupt_broadcast(self._nth[cell.place])
        wanted = self.asked_in(cell)
        fault = self.line.fault = Strike(wanted, deed) if deed else Control(cell, wanted)
        return (lambda: fault.fired), None

    def _corrupt_broadcast(self, nth):
        """A byte changes between the trainer's memory and the group."""
        line = self.bridge._transport._lines[self.line.url]
        send, sent = line.send, []

        def change(packed):
            sent.append(packed)
            if len(sent) == nth:
                data = packed.memory.numpy().tobytes()
                memory = packed.memory.clone()
                memory.numpy()[:] = memoryview(bytearray(flipped(data, len(data) // 2 // 2 * 2)))
                packed = replace(packed, memory=memory)
            send(packed)

        line.send = change
        return (lambda: len(sent) >= nth), None

    def stall(self):
        for pid in (self.bad.process.pid, *descendants(self.bad.process.pid)):
            os.kill(pid, signal.SIGSTOP)

    def repair(self):
        self.line.calm()
        if self.bad.process.poll() is not None:
            self.bad = self.bad.restarted().wait_ready()
            return
        for pid in (*descendants(self.bad.process.pid), self.bad.process.pid):
            os.kill(pid, signal.SIGCONT)

    def replace_what_hangs(self):
        """So that a cell that failed fails alone."""
        self.line.calm()
        for name in ("good", "bad"):
            server = getattr(self, name)
            try:
                httpx.get(f"{server.url}/server_info", timeout=30).raise_for_status()
            except httpx.HTTPError:
                setattr(self, name, server.restarted().wait_ready())

    def clean_up_after_trainer(self):
        for server in (self.good, self.bad):
            control = open_server(server.url, timeout_s=60)
            control.repair()
            control.close()

    def check(self):
        for server in (self.good, self.bad):
            self._wait_calm(server)
            claim = server.weight_version()
            held = checksums(self._parameters(server)) if claim.isdigit() else {}
            self.assert_true_claim(claim, held, {})
            _, _, version = server.generate(3)
            assert version == claim

    def _parameters(self, server):
        """Once the bridge has closed a session that it did not know to be open."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return server.parameters(self._folder)
            except AssertionError as err:
                if "already open" not in str(err) or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def _wait_calm(self, server):
        deadline = time.monotonic() + 60
        while True:
            try:
                if not server.paused():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "it stays paused"
            time.sleep(0.2)

    def close(self):
        self.trainers.close()
        self.line.close()
        for server in (self.good, self.bad):
            server.close()


@pytest.fixture(scope="module")
def nccl_rig(tmp_path_factory):
    rig = SglangRig(tmp_path_factory.mktemp("sglang"))
    yield rig
    rig.close()


def params():
    cells = [c for c in RUN if c.transport == "nccl"]
    few = covering(cells)
    return [pytest.param(c, id=str(c), marks=() if c in few else pytest.mark.faults) for c in cells]


@pytest.mark.parametrize("cell", params())
def test_nccl(nccl_rig, cell, monkeypatch, caplog):
    nccl_rig.replace_what_hangs()
    start = time.monotonic()
    record(cell, run(nccl_rig, cell, monkeypatch), start)
