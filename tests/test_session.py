"""One server fails at each call of an update: the promises that must hold afterwards."""

import pytest
import torch

import fp8bridge
from fp8bridge import LoopbackServer
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import (
    BridgeError,
    CommitError,
    ServerMismatchError,
    ServerRefusedError,
    ServerTimeoutError,
    VersionError,
)
from fp8bridge.session import check_version

from .support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, tiny_model

OLD, NEW = tiny_model(seed=1), tiny_model(seed=2)


class Flaky(LoopbackServer):
    """Fails `times` times at the calls named in `failing`; a lost answer comes after the deed."""

    def __init__(self, name, failing=(), *, times=99, after=False):
        super().__init__(name, layout=FP8_LAYOUT)
        self.failing, self.times, self.after = set(failing), times, after

    def _maybe_fail(self, call):
        if call in self.failing and self.times:
            self.times -= 1
            raise ServerTimeoutError(f"{self.name} did not answer {call}", server=self.name)


def _wrap(call):
    def method(self, *args, **options):
        if not self.after:
            self._maybe_fail(call)
        getattr(LoopbackServer, call)(self, *args, **options)
        self._maybe_fail(call)

    return method


CALLS = ["pause", "begin", "receive", "take", "commit", "flush_cache", "resume", "abort"]
for _call in CALLS:
    setattr(Flaky, _call, _wrap(_call))


def connect(servers, model, **options):
    source = StateDictSource(model, FP8_CONFIG)
    return fp8bridge.connect(source, servers, transport="loopback", bucket_nbytes=60_000, **options)


def holds(server, model):
    try:
        assert_same_bits(server.tensors, expected_wire(model))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("call", CALLS[:-1])
def test_whatever_call_fails_the_promises_hold(call, after):
    model = {n: t.clone() for n, t in OLD.items()}
    good, bad = Flaky("good"), Flaky("bad", after=after)
    with connect([good, bad], model) as bridge:
        bridge.update_weights(version=1)
        for name, tensor in model.items():
            tensor.copy_(NEW[name])
        bad.failing = {call}
        report = bridge.update_weights(version=2)
        assert list(report.fenced) == ["bad"]
        assert f"did not answer {call}" in report.fenced["bad"]
        assert (good.weight_version, good.paused, holds(good, NEW)) == ("2", False, True)
        claimed = {"1": OLD, "2": NEW}[bad.weight_version]
        assert holds(bad, claimed), "no server claims a version it does not hold"
        assert bad._token is None, "no session is left open"
        assert not bad.paused or call == "resume", "resumed, unless it refuses to be"
        bad.failing = set()
        bridge.admit("bad")
        assert not bad.paused
        report = bridge.update_weights(version=3)
        assert not report.fenced
        assert holds(bad, NEW)


@pytest.mark.parametrize("call", ["pause", "begin", "receive", "take"])
def test_when_too_few_are_left_the_good_server_keeps_its_old_version(call):
    model = {n: t.clone() for n, t in OLD.items()}
    good, bad = Flaky("good"), Flaky("bad")
    with connect([good, bad], model, min_healthy=2) as bridge:
        bridge.update_weights(version=1)
        for name, tensor in model.items():
            tensor.copy_(NEW[name])
        bad.failing = {call}
        with pytest.raises(ServerTimeoutError, match=f"bad did not answer {call}"):
            bridge.update_weights(version=2)
        assert (good.weight_version, good.paused, holds(good, OLD)) == ("1", False, True)
        assert {n: s.state for n, s in bridge.servers.items()} == {"good": "healthy", "bad": "fenced"}
        bad.failing = set()
        bridge.admit("bad")
        bridge.update_weights(version=2), "the version that failed may be tried again"
        assert holds(good, NEW)
        assert holds(bad, NEW)


def test_a_commit_that_too_few_confirm_is_an_error_that_says_who_has_it():
    good, bad = Flaky("good"), Flaky("bad", {"commit"})
    with connect([good, bad], OLD, min_healthy=2) as bridge:
        with pytest.raises(
            CommitError, match="version 1 is on 1 servers, 2 were asked for; fenced: bad did not answer"
        ):
            bridge.update_weights(version=1)
        assert holds(good, OLD)
        assert bridge.servers["good"].version == 1
        bad.failing = set()
        bridge.admit("bad")
        with pytest.raises(VersionError, match="not larger than the last one, 1"):
            bridge.update_weights(version=1)
        bridge.update_weights(version=2)
        assert holds(bad, OLD)


def test_a_server_that_is_lost_at_the_commit_is_dropped_by_the_transport_too():
    """Over a broadcast it may wait in the group for something that never comes."""
    good, bad = Flaky("good"), Flaky("bad", {"commit"})
    with connect([good, bad], OLD) as bridge:
        assert list(bridge.update_weights(version=1).fenced) == ["bad"]
        assert bridge._transport._live == {"good"}


def test_a_server_that_confirms_nothing_is_fenced_though_the_failure_was_another_ones():
    model = {n: t.clone() for n, t in OLD.items()}
    mute, bad = Flaky("mute", {"abort", "resume"}), Flaky("bad", {"take"})
    with connect([mute, bad], model, min_healthy=2) as bridge:
        with pytest.raises(ServerTimeoutError, match="bad did not answer take"):
            bridge.update_weights(version=1)
        assert bridge.servers["mute"].state == "fenced"
        assert "mute did not answer" in bridge.servers["mute"].reason


def test_an_interrupt_in_the_middle_puts_every_server_back():
    servers = [Flaky("a"), Flaky("b")]
    model = {n: t.clone() for n, t in OLD.items()}

    def interrupt(done, total):
        raise KeyboardInterrupt

    with connect(servers, model) as bridge:
        bridge.update_weights(version=1)
        model["model.norm.weight"] += 1
        with pytest.raises(KeyboardInterrupt):
            bridge.update_weights(version=2, on_progress=interrupt)
        for server in servers:
            assert (server.weight_version, server.paused, holds(server, OLD)) == ("1", False, True)
        bridge.update_weights(version=2)
        assert holds(servers[0], model)


def test_an_open_session_of_another_trainer_is_respected():
    server = Flaky("a")
    with connect([server], OLD) as bridge:
        server._token, server.paused = "someone else's", True
        with pytest.raises(ServerRefusedError, match="already open"):
            bridge.update_weights(version=1)
        assert server._token == "someone else's"
        assert server.paused, "the other trainer has paused it and will resume it"


def test_a_server_that_was_restarted_between_updates_is_brought_up_to_date():
    model = {n: t.clone() for n, t in OLD.items()}
    server = Flaky("a")
    with connect([server], model) as bridge:
        bridge.update_weights(version=1)
        server.revive()
        server.weight_version = "default"
        assert not bridge.update_weights(version=2).fenced
        assert holds(server, OLD)
        server.revive()
        server.weights.tensors = {"another.weight": torch.zeros(1)}
        with pytest.raises(ServerMismatchError, match="differences"):
            bridge.update_weights(version=3)
        assert not server.paused


def test_a_server_that_lies_about_its_bytes_is_found_by_verify():
    server = Flaky("a")
    with connect([server], OLD) as bridge:
        bridge.update_weights(version=1)
        codes = server.tensors["model.layers.0.mlp.up_proj.weight"]
        codes.view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(BridgeError, match=r"up_proj\.weight"):
            bridge.verify()


@pytest.mark.parametrize(("last", "reported", "fine"), [(None, {}, 0), (3, {}, 4), (None, {"a": "default"}, 0)])
def test_versions_that_are_fine(last, reported, fine):
    check_version(fine, last, reported)
