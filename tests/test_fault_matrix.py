"""Every fault in every phase of an update, on either side: nothing lost, nothing half, and the next update works.

Real servers, real kills and stops, and lines between them that change what passes. The default run takes a few
of the cells with sockets, which together have every fault and every phase; `make test-faults` takes them all. The
cells of transport `nccl` need SGLang: sglang/test_fault_matrix_nccl.py.
"""

import json
import os
import signal
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from fp8bridge.errors import BridgeError, ConfigError, VerifyError, VersionError

from .faults.matrix import CELLS, FAULTS, OUTCOMES, PARTIES, PHASES, RUN, TRANSPORTS, covering, expected, why_not
from .faults.rigs import NEW, NEXT, OLD, LoopbackRig, ZmqRig
from .faults.zmq_faults import Strike
from .support import run_ranks

STALL_S = 6
"""Longer than any limit of the trainers."""


@pytest.fixture(scope="module")
def zmq_rig():
    rig = ZmqRig()
    yield rig
    rig.close()


def params(transport):
    cells = [c for c in RUN if c.transport == transport]
    few = set(cells) if transport == "loopback" else covering(cells)
    return [pytest.param(c, id=str(c), marks=() if c in few else pytest.mark.faults) for c in cells]


def record(cell, outcome, start):
    """A line for tests/faults/table.py, where a run asks for it."""
    path = os.environ.get("FP8BRIDGE_FAULT_RECORD")
    if path:
        row = [cell.fault, cell.phase, cell.transport, cell.party, outcome, round(time.monotonic() - start, 2)]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def test_every_combination_is_run_or_has_a_reason():
    assert len(CELLS) == len(FAULTS) * len(PHASES) * len(TRANSPORTS) * len(PARTIES) == 360
    assert all(set(expected(c)) <= set(OUTCOMES) for c in RUN)
    for transport in TRANSPORTS:
        cells = [c for c in RUN if c.transport == transport]
        few = covering(cells)
        for party in PARTIES:
            mine = {(c.fault, c.phase) for c in cells if c.party == party}
            chosen = {(c.fault, c.phase) for c in few if c.party == party}
            for i in (0, 1):
                assert {c[i] for c in chosen} == {c[i] for c in mine}
    assert all(why_not(c) for c in set(CELLS) - set(RUN))


@pytest.mark.parametrize("cell", params("loopback"))
def test_loopback(cell, monkeypatch, caplog):
    start, rig = time.monotonic(), LoopbackRig()
    outcome = run(rig, cell, monkeypatch)
    record(cell, outcome, start)


@pytest.mark.parametrize("cell", params("zmq"))
def test_zmq(zmq_rig, cell, monkeypatch, caplog):
    start = time.monotonic()
    outcome = run(zmq_rig, cell, monkeypatch)
    record(cell, outcome, start)


def run(rig, cell, monkeypatch):
    """An update, one with the fault, and one after it; how the one with the fault ended."""
    rig.repair()
    with rig.connect() as bridge:
        rig.train(OLD)
        bridge.update_weights(version=rig.next_version(OLD))
        assert {s.state for s in bridge.servers.values()} == {"healthy"}
    version = rig.next_version(NEW)
    rig.train(NEW)
    if (cell.fault, cell.phase) == ("wrong version", "begin"):
        outcome = wrong_from_the_start(rig, cell, version, monkeypatch)
    elif rig.trainers and cell.party == "trainer" and cell.fault in ("kill", "stall", "refuse"):
        outcome = with_trainer_processes(rig, cell, version)
    else:
        return with_one_trainer(rig, cell, version)
    rig.repair()
    rig.check()
    with rig.connect() as bridge:
        assert_next_update(rig, bridge)
    return outcome


def with_one_trainer(rig, cell, version):
    """In this process, which goes on after the fault: it admits what was fenced, and updates again."""
    disk = cell.fault == "disk full" and cell.party == "trainer"
    # On one connection: buckets on several have no order among them.
    one = {"streams": 1} if cell.fault == "reorder" else {}
    with rig.connect(report_path="/dev/full" if disk else None, **one) as bridge:
        # A bridge that has updated once: nothing is new to it.
        bridge.update_weights(version=version)
        version = rig.next_version(NEXT)
        rig.train(NEXT)
        fired, progress = prepare(rig, cell, len(bridge.plan.manifest.buckets))
        outcome, reason = update(bridge, rig, cell, version, progress)
        assert fired(), "the fault did not happen"
        rig.repair()
        assert outcome in expected(cell) or expected(cell) == ("by verify",), (outcome, reason)
        if expected(cell) == ("by verify",):
            outcome = found_by_verify(rig, bridge)
        else:
            rig.check()
        claims = [rig.claim(s) for s in (rig.good, rig.bad)]
        assert outcome not in ("fenced", "committed") or claims[0] == str(version)
        assert outcome != "committed" or claims[1] == str(version)
        assert outcome != "old" or str(version) not in claims
        assert_next_update(rig, bridge)
    return outcome


def assert_next_update(rig, bridge):
    for name, server in bridge.servers.items():
        if server.state == "fenced":
            bridge.admit(name)
            rig.check()
    rig.train(OLD)
    version = rig.next_version(OLD)
    assert not bridge.update_weights(version=version).fenced
    assert bridge.verify().keys() == set(rig.names)
    rig.check()
    assert [rig.claim(s) for s in (rig.good, rig.bad)] == [str(version)] * 2


def found_by_verify(rig, bridge):
    with pytest.raises(VerifyError, match=f"{rig.names[1]} holds other bytes"):
        bridge.verify()
    return "by verify"


def update(bridge, rig, cell, version, progress):
    """How it ended, of OUTCOMES, and why."""
    try:
        report = bridge.update_weights(version=version, on_progress=progress)
    except (BridgeError, RuntimeError) as err:
        return "old", str(err)
    except KeyboardInterrupt:
        return ("old" if cell.in_bucket or cell.phase == "begin" else "either"), "interrupted"
    fenced = report.fenced
    assert fenced.keys() <= {rig.names[1]}, "only the one that failed is named"
    return ("fenced" if fenced else "committed"), "".join(fenced.values())


def prepare(rig, cell, buckets):
    """Make the fault ready: whether it has happened, and the progress callback that makes it happen."""
    struck = []

    def at_bucket(deed):
        def progress(done, total):
            if done == {"first": 1, "middle": total // 2 + 1, "last": total}[cell.place] and not struck:
                struck.append(done)
                deed()

        return (lambda: struck), progress

    if (cell.fault, cell.party) == ("disk full", "trainer"):
        return (lambda: True), None
    if (cell.fault, cell.party, cell.phase) == ("refuse", "trainer", "begin"):
        rig.model["model.norm.weight"][3] = float("nan")
        return (lambda: True), None
    if (cell.fault, cell.party, cell.in_bucket) == ("refuse", "trainer", True):
        return at_bucket(has_had_enough)
    return rig.arm(cell, buckets, at_bucket)


def has_had_enough():
    raise RuntimeError("this rank has had enough")


def wrong_from_the_start(rig, cell, version, monkeypatch):
    """A server that is ahead of the trainer, or ranks that do not agree: found before anything is sent."""
    before = [rig.claim(s) for s in (rig.good, rig.bad)]
    if cell.party == "server":
        said = rig.claim_to_be_ahead()
        with rig.connect() as bridge, pytest.raises(VersionError, match="already claims version 1000000"):
            bridge.update_weights(version=version)
        assert said()
    elif rig.trainers:
        rig.trainers.start(list(rig.names), version, NEW, versions=[version, version + 1], **rig.task)
        ends = rig.trainers.wait()
        assert {e["error"] for e in ends} == {"ConfigError"}, ends
    else:
        with monkeypatch.context() as patch:
            ends = run_ranks(2, lambda rank: update_as(rig, rank, version + rank), patch)
        assert all(isinstance(e, ConfigError) for e in ends), ends
    rig.repair()
    assert [rig.claim(s) for s in (rig.good, rig.bad)] == before
    return "old"


def update_as(rig, rank, version):
    with rig.connect(rank=rank, senders="first") as bridge:
        bridge.update_weights(version=version)


def with_trainer_processes(rig, cell, version):
    """Two ranks in processes; one is killed, stopped for longer than any limit, or raises."""
    number = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP, "refuse": 0}[cell.fault]
    struck = 1 if cell.phase in ("middle bucket", "last bucket") and rig.ranks_that_send > 1 else 0
    task = {}
    if cell.in_bucket:
        task["at"] = [struck, cell.place, int(number)]
    elif cell.fault == "refuse" and cell.phase == "begin":
        task["nan"] = True
    else:
        rig.line.fault = Strike(rig.asked_in(cell), lambda: os.kill(pids[0], number or signal.SIGINT))
    fault = rig.line.fault
    before = [rig.claim(s) for s in (rig.good, rig.bad)]
    pids = rig.trainers.start(list(rig.names), version, NEW, **task, **rig.task)
    if cell.fault == "stall":
        rig.trainers.wait_stopped(pids[struck])
        if rig.has_leases:
            rig.check()
        else:
            time.sleep(STALL_S)
        os.kill(pids[struck], signal.SIGCONT)
    ends = rig.trainers.wait()
    assert "hung" not in {e["error"] for e in ends}, ends
    rig.clean_up_after_trainer()
    rig.check()
    claims = [rig.claim(s) for s in (rig.good, rig.bad)]
    assert fault.fired or task, "the fault did not happen"
    if expected(cell) == ("old",):
        assert str(version) not in claims, ends
        assert all(e["error"] for e in ends), ends
        assert claims == before or not rig.atomic
        return "old"
    assert {c for c in claims if c.isdigit()} <= {*before, str(version)}
    return "either"
