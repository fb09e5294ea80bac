"""Every way an update can go wrong leaves the server on its old weights, serving, and ready for the next one."""

from __future__ import annotations

import os
import time

import pytest

from fp8bridge.wire import Ping, Refuse, Welcome

from .rig import Client, CutLine, Sender, make_manifest, reference

GOOD = 2


@pytest.fixture(scope="module")
def new():
    """The weights that never arrive, and their manifest."""
    model = reference(9)
    return model.weights.tensors, make_manifest(model.weights.tensors, model.weights.layout, 20_000)


@pytest.fixture
def untouched(server):
    """The server; afterwards its bytes, version and tokens are what they were, and it takes an update."""
    server.update(GOOD, "good")
    before = server.checksums(), server.version(), server.generate(6)["output_ids"]
    yield server
    assert (server.checksums(), server.version(), server.generate(6)["output_ids"]) == before
    server.update(3, "next")
    server.update(GOOD, "good")
    assert server.checksums() == before[0]


def corrupt(index, payload):
    return payload if index != 1 else payload[:7] + bytes([payload[7] ^ 1]) + payload[8:]


def truncate(index, payload):
    return payload if index != 1 else payload[:-1]


def lengthen(index, payload):
    return payload if index != 1 else payload + b"x"


CASES = {
    "a flipped bit": ({"change": corrupt}, "bucket 1 changed on the way"),
    "a short payload": ({"change": truncate}, "not"),
    "a long payload": ({"change": lengthen}, "has a payload of"),
    "a bucket twice": ({"order": [0, 0, 1]}, "bucket 0 came, 1 was next"),
    "buckets out of order": ({"order": [1, 0]}, "bucket 1 came, 0 was next"),
    "a bucket too few": ({"order": [0, 1]}, "heard nothing from the trainer for 0.7 s, waiting for buckets [2"),
    "a promise of too few": ({"welcome": Welcome((0, 1), 1)}, "the senders promise buckets [0, 1]"),
    "a refusal": ({"welcome": Refuse("no more updates today")}, "no more updates today"),
    "another message": ({"welcome": Ping()}, "answered a Hello with Ping"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_sender(untouched, new, case):
    how, words = CASES[case]
    tensors, manifest = new
    with Sender(tensors, manifest, **how) as sender:
        untouched.begin(sender, manifest)
        answer = untouched.refused("/update_weights_from_zmq", untouched.pull_body(sender, manifest, timeout_s=0.7))
        assert words in answer
        refused = untouched.refused("/end_weight_update", {"session": sender.session, "weight_version": "bad"})
        assert "nothing was committed" in refused
        untouched.ok("/abort_weight_update", {"session": sender.session})


def test_a_sender_that_is_not_there(untouched, new, free_port):
    tensors, manifest = new
    with Sender(tensors, manifest) as sender:
        untouched.begin(sender, manifest)
        body = untouched.pull_body(sender, manifest, endpoints=[f"tcp://127.0.0.1:{free_port()}"], timeout_s=0.5)
        assert "no answer from sender" in untouched.refused("/update_weights_from_zmq", body)
        body = untouched.pull_body(sender, manifest, endpoints=["carrier-pigeon://7"], timeout_s=0.5)
        assert "cannot connect to sender" in untouched.refused("/update_weights_from_zmq", body)
        untouched.ok("/abort_weight_update", {"session": sender.session})


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_line_cut_inside_a_bucket_ends_with_the_lease(untouched, new, mode):
    """The trainer dies for good: no abort, no continue. The server helps itself."""
    tensors, manifest = new
    join = untouched.in_background(lambda: untouched.generate(120))
    untouched.wait_running()
    with Sender(tensors, manifest) as sender:
        line = CutLine(sender.port, nbytes=manifest.buckets[0].nbytes + manifest.buckets[1].nbytes // 2)
        untouched.ok("/pause_generation", {"mode": mode})
        untouched.begin(sender, manifest, lease_s=1.0)
        body = untouched.pull_body(sender, manifest, endpoints=[line.endpoint], timeout_s=60)
        pulling = untouched.in_background(lambda: untouched.post("/update_weights_from_zmq", body))
        assert line.cut.wait(10)
        assert untouched.load()["paused"] is True
        answer = pulling()
        assert answer.status_code == 400
        assert "aborted" in answer.json()["message"]
    untouched.wait_for(lambda: not untouched.load()["paused"], timeout_s=3)
    info = untouched.info()["fp8bridge"]
    assert info["session"] is None
    assert "nothing was heard from the client for 1 s" in info["last_abort"]["reason"]
    assert info["last_abort"]["weight_version"] == "good"
    meta = join()["meta_info"]
    assert [s["version"] for s in meta["weight_versions"]] == ["good"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")


def test_a_lease_is_kept_alive_by_the_sender_alone(untouched, new):
    tensors, manifest = new

    def slowly(index, payload):
        time.sleep(0.25)
        return payload

    with Sender(tensors, manifest, change=slowly) as sender:
        assert len(manifest.buckets) * 0.25 > 0.8
        untouched.begin(sender, manifest, lease_s=0.8)
        untouched.ok("/update_weights_from_zmq", untouched.pull_body(sender, manifest))
        untouched.ok("/abort_weight_update", {"session": sender.session})


def test_a_pause_with_a_lease_ends_by_itself(untouched):
    """A trainer that dies between pause and begin."""
    untouched.ok("/pause_generation", {"mode": "retract", "lease_s": 0.5})
    assert untouched.load()["paused"] is True
    untouched.wait_for(lambda: not untouched.load()["paused"], timeout_s=3)
    untouched.ok("/pause_generation", {"mode": "retract"})
    time.sleep(0.8)
    assert untouched.load()["paused"] is True, "without a lease only `continue` ends it, as in SGLang"
    untouched.ok("/continue_generation")


def test_a_client_that_dies_between_commit_and_continue(untouched, new):
    tensors, manifest = new
    with Sender(tensors, manifest) as sender:
        untouched.ok("/pause_generation", {"mode": "retract"})
        untouched.begin(sender, manifest, lease_s=0.8)
        untouched.ok("/update_weights_from_zmq", untouched.pull_body(sender, manifest))
        untouched.ok("/end_weight_update", {"session": sender.session, "weight_version": "bad"})
    assert untouched.load()["paused"] is True
    untouched.wait_for(lambda: not untouched.load()["paused"], timeout_s=3)
    assert untouched.version() == "bad"
    untouched.update(GOOD, "good")


def test_an_update_with_nan_weights_fails_requests_and_not_the_server(untouched):
    tensors = dict(reference(9).weights.tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    manifest = make_manifest(tensors, untouched.layout)
    with Sender(tensors, manifest) as sender:
        untouched.begin(sender, manifest)
        untouched.ok("/update_weights_from_zmq", untouched.pull_body(sender, manifest))
        untouched.ok("/end_weight_update", {"session": sender.session, "weight_version": "nan"})
    response = untouched.post("/generate", {"input_ids": [1, 2]})
    assert response.status_code == 500
    assert response.json() == {"error": {"message": "weight version 'nan' gives NaN or Inf logits"}}
    untouched.update(GOOD, "good")


def test_a_hundred_aborted_updates_leak_nothing(untouched: Client, new):
    tensors, manifest = new
    process = f"/proc/{untouched.server.process.pid}"

    def held():
        return len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task"))

    with Sender(tensors, manifest, welcome=Refuse("not now")) as sender:
        before = None
        for i in range(100):
            untouched.begin(sender, manifest)
            if i % 5 == 0:
                untouched.refused("/update_weights_from_zmq", untouched.pull_body(sender, manifest))
            untouched.ok("/abort_weight_update", {"session": sender.session})
            if i == 30:
                before = held()
        fds, threads = held()
    assert fds <= before[0] + 2
    assert threads <= before[1] + 1
