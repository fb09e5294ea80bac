"""Kept versions: going back, catching up, what they cost; and who is told of a server's state."""

import threading

import pytest
import torch

import fp8bridge
from fp8bridge import LoopbackServer, ServerEvent
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, ServerError, ServerUnreachableError, VersionError
from fp8bridge.snapshots import Snapshots

from .support import (
    FP8_CONFIG,
    FP8_LAYOUT,
    SplitSource,
    ZmqThreadServer,
    assert_same_bits,
    expected_wire,
    run_ranks,
    tiny_model,
)


def connect(servers, model, **options):
    source = StateDictSource(model, FP8_CONFIG)
    return fp8bridge.connect(source, servers, **{"transport": "loopback", "bucket_nbytes": 60_000} | options)


def change(model):
    for tensor in model.values():
        tensor.mul_(1.5)
    return {name: tensor.clone() for name, tensor in model.items()}


def test_going_back_and_forth_gives_every_kept_version_bit_for_bit():
    model = tiny_model()
    servers = [LoopbackServer(n, layout=FP8_LAYOUT) for n in ("a", "b")]
    with connect(servers, model, keep_last=2) as bridge:
        old = {}
        for version in (1, 2, 3):
            old[version] = change(model)
            bridge.update_weights(version=version)
        assert bridge.kept_versions == [2, 3]
        parameters = {n: t.clone() for n, t in model.items()}
        for version in (2, 3, 2):
            report = bridge.rollback(version)
            assert report.version == version
            assert {(s.state, s.version, s.reason) for s in report.servers.values()} == {("healthy", version, "")}
            for server in servers:
                assert server.weight_version == str(version)
                assert_same_bits(server.tensors, expected_wire(old[version]))
            assert bridge.verify()
        assert all(torch.equal(model[n], t) for n, t in parameters.items())
        with pytest.raises(VersionError, match="not larger than the last one, 3"):
            bridge.update_weights(version=3)
        bridge.update_weights(version=4)
        assert bridge.kept_versions == [3, 4]
        assert bridge.rollback().version == 3, "without a number, the newest before the current one"


@pytest.mark.parametrize(
    ("keep", "ask", "says"), [(0, None, "no older version"), (1, None, "no older"), (1, 1, "version 1 is kept")]
)
def test_a_version_that_is_not_kept_is_refused_and_nothing_happens(keep, ask, says):
    model, server = tiny_model(), LoopbackServer(layout=FP8_LAYOUT)
    with connect([server], model, keep_last=keep) as bridge:
        for version in (1, 2):
            change(model)
            bridge.update_weights(version=version)
        calls = list(server.calls)
        with pytest.raises(VersionError, match=says):
            bridge.rollback(ask)
        assert server.calls == calls


def test_an_update_that_fails_leaves_the_kept_versions_as_they_were():
    model = tiny_model()
    server = LoopbackServer("a", layout=FP8_LAYOUT)
    with connect([server], model, keep_last=1) as bridge:
        first = change(model)
        bridge.update_weights(version=1)
        change(model)
        server.fail_at_bucket = 2
        with pytest.raises(ServerUnreachableError):
            bridge.update_weights(version=2)
        server.revive()
        bridge.admit("a")
        assert bridge.kept_versions == [1]
        assert server.weight_version == "1"
        assert_same_bits(server.tensors, expected_wire(first))


@pytest.mark.parametrize("transport", ["loopback", "zmq"])
def test_a_server_that_comes_back_or_joins_is_given_the_current_version_at_once(transport):
    model, kind = tiny_model(), LoopbackServer if transport == "loopback" else ZmqThreadServer
    good, bad, late = (kind(n, layout=FP8_LAYOUT) for n in ("good", "bad", "late"))
    with connect([good, bad], model, keep_last=1, transport=transport) as bridge:
        bridge.update_weights(version=1)
        bad.fail_at_bucket = 1
        bad.calls.clear()
        now = change(model)
        if transport == "loopback":
            assert list(bridge.update_weights(version=2).fenced) == ["bad"]
        else:
            bad._dead = True
            assert list(bridge.update_weights(version=2).fenced) == ["bad"]
        change(model)  # the trainer trains on: what they are given is version 2, not the weights of now
        bad.revive()
        good.calls.clear()
        bridge.admit("bad")
        bridge.admit(late)
        assert good.calls == [], "a server that is up to date is not disturbed"
        for server in (bad, late):
            state = bridge.servers[server.name]
            assert (state.state, state.version, state.reason) == ("healthy", 2, "")
            assert (server.weight_version, server.paused) == ("2", False)
            assert_same_bits(server.tensors, expected_wire(now))


def test_without_kept_versions_an_admitted_server_catches_up_with_the_next_update():
    good, bad = (LoopbackServer(n, layout=FP8_LAYOUT) for n in ("good", "bad"))
    with connect([good, bad], tiny_model()) as bridge:
        bad.fail_at_bucket = 0
        bridge.update_weights(version=1)
        bad.revive()
        bridge.admit("bad")
        assert bridge.servers["bad"].state == "catching_up"
        assert bridge.verify().keys() == {"good"}
        bridge.update_weights(version=2)
        assert bridge.servers["bad"].state == "healthy"


def test_a_server_that_fails_to_catch_up_is_fenced_and_the_others_go_on():
    good, bad = (LoopbackServer(n, layout=FP8_LAYOUT) for n in ("good", "bad"))
    with connect([good, bad], tiny_model(), keep_last=1) as bridge:
        bad.fail_at_bucket = 0
        bridge.update_weights(version=1)
        bad.revive()
        bad.fail_at_bucket = 1
        with pytest.raises(ServerUnreachableError, match="bad"):
            bridge.admit("bad")
        assert bridge.servers["bad"].state == "fenced"
        assert bridge.servers["good"].state == "healthy"
        assert not good.paused


def test_a_failed_update_leaves_a_server_that_catches_up_catching_up():
    good, bad = (LoopbackServer(n, layout=FP8_LAYOUT) for n in ("good", "bad"))
    with connect([good, bad], tiny_model(), min_healthy=2) as bridge:
        bridge.update_weights(version=1)
        bridge.admit("bad")
        good.fail_at_bucket = 1
        with pytest.raises(ServerError):
            bridge.update_weights(version=2)
        assert {n: s.state for n, s in bridge.servers.items()} == {"good": "fenced", "bad": "catching_up"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_keeps_and_sends_its_own_share(ranks, monkeypatch):
    model = tiny_model()
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)

    def work(rank):
        source = SplitSource(model, rank, ranks)
        with fp8bridge.connect(source, [server], bucket_nbytes=60_000, keep_last=2) as bridge:
            bridge.update_weights(version=1)
            for param in source._params.values():
                param.mul_(2)
            bridge.update_weights(version=2)
            report = bridge.rollback()
            return report.version, bridge._snapshots.nbytes, bridge.plan.nbytes

    found = run_ranks(ranks, work, monkeypatch)
    assert [f[0] for f in found] == [1] * ranks
    assert_same_bits(server.tensors, expected_wire(model))
    assert sum(f[1] for f in found) == 2 * found[0][2], "two versions, spread over the ranks"


def test_memory_of_kept_versions_is_flat_and_is_reported():
    model = tiny_model()
    with connect([LoopbackServer(layout=FP8_LAYOUT)], model, keep_last=1) as bridge:
        sizes = [bridge.update_weights(version=v).extra_nbytes.max for v in range(1, 6)]
        assert bridge._snapshots.nbytes == 2 * bridge.plan.nbytes, "one kept, one free for the next"
    assert len(set(sizes[1:])) == 1


@pytest.mark.parametrize("keep", [-1, True, 1.5, "2"])
def test_keep_last_must_be_a_count(keep):
    with pytest.raises(ConfigError, match="keep_last"):
        fp8bridge.BridgeConfig(keep_last=keep)


def test_nothing_is_kept_without_being_asked():
    snapshots = Snapshots(0)
    snapshots.begin(1)
    snapshots.commit()
    assert (snapshots.versions, snapshots.nbytes) == ([], 0)


# --- who is told


def test_every_change_of_state_is_told_once_and_in_order():
    events: list[ServerEvent] = []
    good, bad = (LoopbackServer(n, layout=FP8_LAYOUT) for n in ("good", "bad"))
    with connect([good, bad], tiny_model(), keep_last=1, on_state=events.append) as bridge:
        bridge.update_weights(version=1)
        bad.fail_at_bucket = 1
        bridge.update_weights(version=2)
        bad.revive()
        bridge.admit("bad")
    told = [(e.state, e.version) for e in events if e.server == "bad"]
    assert told == [
        ("updating", None),
        ("healthy", 1),
        ("updating", 1),
        ("fenced", 1),
        ("catching_up", None),
        ("updating", None),
        ("healthy", 2),
    ]
    assert [e.reason for e in events if e.state == "fenced"] == ["bad is not reachable (it was told to die)"]


def test_a_listener_that_raises_or_dawdles_harms_no_update(caplog):
    gate = threading.Event()

    def listener(event):
        gate.wait(5)
        raise RuntimeError("the router is down")

    server = LoopbackServer("a", layout=FP8_LAYOUT)
    with connect([server], tiny_model(), on_state=listener) as bridge:
        assert bridge.update_weights(version=1).seconds < 5
        gate.set()
    assert "on_state raised for a, healthy" in caplog.text


def test_an_update_has_a_time_limit_of_its_own():
    import time

    from fp8bridge.errors import TransportError

    class Slow(LoopbackServer):
        def take(self, packed):
            time.sleep(0.1)
            super().take(packed)

    server = Slow("a", layout=FP8_LAYOUT)
    with connect([server], tiny_model(), update_timeout_s=0.25) as bridge:
        with pytest.raises(TransportError, match=r"not done after 0\.\d s \(update_timeout_s is 0\.25\)"):
            bridge.update_weights(version=1)
        assert (server.paused, server.weight_version) == (False, "default")
        assert bridge.servers["a"].state == "healthy", "it did nothing wrong by itself"
