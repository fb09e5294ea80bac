"""What a cell of the matrix runs against: two servers, one of which a fault hits, and what each must hold."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import fp8bridge
from fp8bridge import rollout
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.staging import tensor_checksum
from tests.rollout.rig import FP8_QWEN3, QWEN3, Client
from tests.support import FP8_CONFIG, FP8_LAYOUT, expected_wire, tiny_model
from tests.test_end_to_end import plain_weights

from .lines import HttpLine
from .loopback_faults import FaultyServer
from .matrix import Cell
from .trainers import LEASE_S, SETTINGS, Trainers
from .zmq_faults import Claims, Strike, in_phase, on_the_line

OLD, NEW, NEXT = 1, 2, 3
"""Seeds of the weights before, during and after the fault."""


def sums(model: dict[str, Any]) -> dict[str, int]:
    return {name: tensor_checksum(tensor) for name, tensor in expected_wire(model).items()}


AtBucket = Callable[[Callable[[], None]], Any]
"""Takes a deed for the cell's bucket and gives an Armed."""
Armed = tuple[Callable[[], Any], Any]
"""Whether the fault has happened, and the `on_progress` that makes it happen."""


class Rig:
    """good, bad: the servers. A claim that is a number must be the bytes of that number's update."""

    names: tuple[str, str]
    trainers: Trainers | None = None
    ranks_that_send = 1
    has_leases = True
    atomic = True
    """An update that ends early leaves the old version."""

    def __init__(self, models: dict[int, dict[str, Any]], held: Callable[[dict[str, Any]], Any]) -> None:
        """held: the checksums of a server that holds a model."""
        self.task: dict[str, Any] = {}
        """For `Trainers.start`."""
        self._models = models
        self._sums = {seed: held(model) for seed, model in models.items()}
        self.model = {name: tensor.clone() for name, tensor in models[OLD].items()}
        """The parameters of the trainer in this process."""
        self.version = 0
        self._seeds: dict[str, int] = {}
        """Version that some trainer has tried, as a server claims it -> seed of its weights."""

    def next_version(self, seed: int) -> int:
        self.version += 1
        self._seeds[str(self.version)] = seed
        return self.version

    def clean_up_after_trainer(self) -> None:
        """What an operator does when a trainer has died."""

    def train(self, seed: int) -> None:
        for name, tensor in self.model.items():
            tensor.copy_(self._models[seed][name])

    def assert_true_claim(self, claim: str, held: dict[str, int], first: dict[str, int]) -> None:
        """No server claims a version that it does not hold, nor one that there never was."""
        if claim in self._seeds:
            assert held == self._sums[self._seeds[claim]], f"claims {claim} and holds something else"
        elif claim == "default":
            assert held == first, "claims its first weights and holds something else"
        else:
            assert claim.startswith(("unknown", "incomplete-")), f"claims {claim!r}, which nobody sent"


class LoopbackRig(Rig):
    names = ("good", "bad")

    def __init__(self) -> None:
        super().__init__({seed: tiny_model(seed=seed) for seed in (OLD, NEW, NEXT)}, sums)
        self.good, self.bad = (FaultyServer(n, layout=FP8_LAYOUT) for n in self.names)

    def connect(self, *, rank: int = 0, **options: Any) -> fp8bridge.Bridge:
        settings = {"transport": "loopback", "bucket_nbytes": 60_000, "keep_last": 1} | options
        return fp8bridge.connect(StateDictSource(self.model, FP8_CONFIG, rank=rank), [self.good, self.bad], **settings)

    def arm(self, cell: Cell, buckets: int, at_bucket: AtBucket) -> Armed:
        self.bad.strike(cell, buckets)
        return (lambda: self.bad.fired), None

    def repair(self) -> None:
        self.bad.cell = None
        if self.bad.weight_version == "1000000":
            self.bad.weight_version = self._ahead
        if self.bad._dead:
            self.bad.revive()

    def claim_to_be_ahead(self) -> Callable[[], int]:
        self._ahead, self.bad.weight_version = self.bad.weight_version, "1000000"
        return lambda: True

    def claim(self, server: FaultyServer) -> str:
        return server.weight_version

    def check(self) -> None:
        deadline = time.monotonic() + 10
        for server in (self.good, self.bad):
            while (server._token, server.paused) != (None, False):
                assert time.monotonic() < deadline, "it stays paused, or in a session"
                time.sleep(0.01)
            self.assert_true_claim(server.weight_version, server.checksums(), {})


class ZmqRig(Rig):
    """Real servers; the trainer reaches the bad one through `line`."""

    ranks_that_send = 2

    def __init__(self) -> None:
        super().__init__({seed: plain_weights(seed) for seed in (OLD, NEW, NEXT)}, sums)
        started = [rollout.launch(FP8_QWEN3, seed=90 + i, wait=False) for i in range(2)]
        self.trainers = Trainers()
        self._dead: list[rollout.RunningServer] = []
        try:
            for server in started:
                server.wait_ready()
        except BaseException:
            self.trainers.close()
            for server in started:
                server.close()
            raise
        self.good, self.bad = (Client(server, seed=90 + i) for i, server in enumerate(started))
        self._full = False
        self.line = HttpLine(self.bad.server.url)
        self.names = (self.good.server.url, self.line.url)
        self._first = {c: {n: int(v, 16) for n, v in c.checksums().items()} for c in (self.good, self.bad)}

    def connect(self, **options: Any) -> fp8bridge.Bridge:
        return fp8bridge.connect(StateDictSource(self.model, QWEN3), list(self.names), **SETTINGS | options)

    def claim(self, client: Client) -> str:
        return client.version()

    @property
    def pid(self) -> int:
        return self.bad.server.process.pid

    def arm(self, cell: Cell, buckets: int, at_bucket: AtBucket) -> Armed:
        deed = {"kill": self.kill, "stall": self.stall, "disk full": self.fill_disk}.get(cell.fault)
        if deed and cell.in_bucket:
            return at_bucket(deed)
        fault = self.line.fault = Strike(in_phase(cell), deed) if deed else on_the_line(cell, buckets)
        return (lambda: fault.fired), None

    def asked_in(self, cell: Cell) -> Callable[[str, bytes], bool]:
        return in_phase(cell)

    def kill(self) -> None:
        self.bad.server.kill()

    def stall(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def claim_to_be_ahead(self) -> Callable[[], int]:
        fault = self.line.fault = Claims()
        return lambda: fault.fired

    def fill_disk(self) -> None:
        """Whatever the server writes to a file from now on finds the disk full."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        self._full = True

    def _write_a_line(self) -> None:
        """A lost session, which the server puts into its log: what it writes nowhere else."""
        self.bad.wait_for(lambda: self.bad.info()["fp8bridge"]["session"] is None)
        self.bad.ok("/begin_weight_update", {"session": "left", "lease_s": 0.1})
        self.bad.wait_for(lambda: self.bad.info()["fp8bridge"]["session"] is None)

    def repair(self) -> None:
        """The line is good again, a stalled server goes on, a killed one is started at its old address."""
        self.line.calm()
        if self.bad.server.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            if self._full:
                self._write_a_line()
            self._full = False
            limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, limits)
            return
        first = self._first.pop(self.bad)
        self.bad.http.close()
        self.bad.server.close()
        port = int(self.bad.server.url.rsplit(":", 1)[1])
        self.bad = Client(rollout.launch(FP8_QWEN3, seed=91, port=port), seed=91)
        self._first[self.bad] = first

    def check(self) -> None:
        for client in (self.good, self.bad):
            client.wait_for(lambda c=client: self._calm(c), timeout_s=LEASE_S + 20)
            held = {n: int(v, 16) for n, v in client.checksums().items()}
            self.assert_true_claim(client.version(), held, self._first[client])
            answer = client.generate(3)
            assert answer["meta_info"]["weight_version"] == client.version()

    def _calm(self, client: Client) -> bool:
        info = client.info()
        return info["fp8bridge"]["session"] is None and not info["internal_states"][0]["paused"]

    def close(self) -> None:
        self.trainers.close()
        self.line.close()
        for client in (self.good, self.bad):
            if client.server.process.poll() is None:
                os.kill(client.server.process.pid, signal.SIGCONT)
            client.http.close()
            client.server.close()
