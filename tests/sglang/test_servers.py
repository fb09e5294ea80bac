"""Updates of real SGLang servers, of both generations of its API, over a broadcast and over ZMQ."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from fp8bridge.adapters.feed import connect_framework
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.cli.app import main
from fp8bridge.cli.identity import identity_update
from fp8bridge.errors import ServerMismatchError, ServerRefusedError
from fp8bridge.http import AsyncHttp, Http
from fp8bridge.sglang.client import AsyncSglangClient, SglangClient
from tests.support import assert_same_bits

from . import rig
from .rig import BF16, FP8, VERSIONS, SglangProcess, connect, fused, model_folder, weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not all((rig.ENVIRONMENTS / v / ".installed").exists() for v in VERSIONS),
        reason="no SGLang environments; `make test-sglang` installs them",
    ),
]
TRANSPORTS = ("nccl", "zmq")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """An FP8 server of each version, and a BF16 one that generates; started at once, they share two cores."""
    base = tmp_path_factory.mktemp("sglang")
    fp8, bf16 = model_folder(base / "fp8", FP8), model_folder(base / "bf16", BF16)
    started = {v: SglangProcess(v, fp8, "--load-format", "dummy") for v in VERSIONS}
    started["bf16"] = SglangProcess("0.5.23", bf16, "--load-format", "dummy")
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.close()


@pytest.fixture(autouse=True)
def left_in_order(request):
    yield
    started = request.node.funcargs.get("servers", {})
    for server in started.values():
        if server.process.poll() is not None:
            started[next(k for k, v in started.items() if v is server)] = server.restarted().wait_ready()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_fp8_server_holds_the_bits(servers, version, transport, tmp_path):
    server, model = servers[version], weights(1)
    number = server.next_version()
    with connect([server], model, transport=transport) as bridge:
        for step in (0, 1):
            for tensor in model.values():
                tensor.mul_(1.25)
            report = bridge.update_weights(version=number + step)
            assert not report.fenced
            assert server.weight_version() == str(number + step)
            assert bridge.verify() == {server.url: len(bridge.plan.manifest.entries())}
    held = server.parameters(tmp_path)
    expected = fused(model, FP8)
    assert_same_bits({n: held[n] for n in expected}, expected)
    assert sorted(held) == sorted(expected)
    assert not server.paused()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bf16_server_generates_what_a_fresh_one_does(servers, transport, tmp_path_factory, tmp_path):
    server, model = servers["bf16"], weights(2 if transport == "nccl" else 3)
    before = server.generate()
    number = server.next_version()
    with connect([server], model, BF16, transport=transport) as bridge:
        bridge.update_weights(version=number)
        bridge.verify()
    tokens, logprobs, version = server.generate()
    assert version == str(number)
    assert tokens != before[0]
    assert_same_bits(server.parameters(tmp_path), fused(model, BF16))
    folder = model_folder(tmp_path_factory.mktemp("fresh"), BF16, model)
    same = identity_update(server.url, folder, transport=transport, group_backend="gloo", pause_mode="abort")
    assert (same.gap, server.weight_version()) == (0, version)
    fresh = SglangProcess("0.5.23", folder)
    try:
        assert fresh.wait_ready().generate()[:2] == (tokens, logprobs)
    finally:
        fresh.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_ways_of_loading_give_the_same_bits(servers, transport, tmp_path):
    """`replay` copies by what the rehearsal saw; the other way is the model's own `load_weights`."""
    if transport == "nccl":
        pytest.skip("over nccl SGLang loads by itself")
    server, model = servers["0.5.23"], weights(4)
    for replay in (True, False):
        with connect([server], model, transport=transport) as bridge:
            target = bridge._set.members[server.url].server
            target.replay = replay
            for tensor in model.values():
                tensor.mul_(1.5)
            report = bridge.update_weights(version=server.next_version())
            assert report.servers[server.url].load_way == ("replay" if replay else "load_weights")
        expected = fused(model, FP8)
        assert_same_bits({n: t for n, t in server.parameters(tmp_path).items() if n in expected}, expected)


def test_two_servers_of_both_versions_at_once_and_each_group_is_kept(servers):
    both, model = [servers[v] for v in VERSIONS], weights(5)
    number = max(s.next_version() for s in both)
    with connect(both, model) as bridge:
        bridge.update_weights(version=number)
        groups = [line._group for line in bridge._transport._lines.values()]
        bridge.update_weights(version=number + 1)
        assert [line._group for line in bridge._transport._lines.values()] == groups
        assert bridge.verify().keys() == {s.url for s in both}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_a_framework_holds_stays_paused(servers, transport):
    """Through the rehearsal, the update and the reading of checksums: the framework alone resumes it."""
    server, model = servers["0.5.23"], weights(6)
    settings = {"transport": transport, "group_backend": "gloo", "bucket_nbytes": 200_000, "open_timeout_s": 15}
    server.post("/pause_generation", {"mode": "abort"})
    try:
        with connect_framework(StateDictSource(model, FP8), [server.url], settings, held=True) as bridge:
            assert server.paused()
            bridge.update_weights(version=server.next_version())
            assert bridge.verify()
            assert server.paused()
    finally:
        server.post("/continue_generation", {"torch_empty_cache": False})


# --- what SGLang would answer 200 to


def _without(name):
    return lambda model: model.pop(name)


def _cut(name, rows):
    return lambda model: model.update({name: model[name][:rows].clone()})


def _renamed(name, to):
    return lambda model: model.update({to: model.pop(name)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _without("model.layers.1.mlp.up_proj.weight"),
            r"layers\.1\.mlp\.gate_up_proj\.weight .* gets 98304 of 1966",
        ),
        (_cut("model.layers.0.mlp.gate_proj.weight", 256), r"gate_proj\.weight is ignored by the server, or changed"),
        (_renamed("model.norm.weight", "model.final_norm.weight"), r"model\.final_norm\.weight"),
        (_cut("model.embed_tokens.weight", 400), r"embed_tokens"),
    ],
    ids=["missing", "short", "unknown name", "short vocabulary"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_sent(servers, transport, change, says, tmp_path):
    server, model = servers["0.5.23"], weights(6)
    before, version = server.parameters(tmp_path), server.weight_version()
    change(model)
    with pytest.raises(ServerMismatchError, match=says) as caught:
        connect([server], model, transport=transport)
    assert server.url in str(caught.value)
    after = server.parameters(tmp_path)
    assert_same_bits(after, before)
    assert (server.weight_version(), server.paused()) == (version, False)


def test_bf16_weights_for_an_fp8_server_and_the_reverse_are_refused(servers):
    with pytest.raises(ServerMismatchError, match="block"):
        connect([servers["bf16"]], weights(1), FP8)


def test_a_server_without_our_loader_is_told_how_to_get_it(servers):
    from fp8bridge.rollout_server import open_server

    server = open_server(servers["0.5.23"].url, timeout_s=10)
    server.facts["custom_weight_loader"] = []
    server.has_loader = False
    with pytest.raises(ServerMismatchError, match="--custom-weight-loader"):
        server.checksums()
    server.close()


def test_a_pause_mode_that_kills_an_old_server_is_refused(servers):
    server = servers["0.5.17"]
    with (
        connect([server], weights(1), pause_mode="retract") as bridge,
        pytest.raises(ServerMismatchError, match=r"0\.5\.17.*pause_mode='abort'"),
    ):
        bridge.update_weights(version=server.next_version())
    assert not server.paused()


# --- when something breaks in the middle


def test_a_server_that_refuses_in_the_middle_is_named_and_the_trainer_is_not_left_in_a_collective(servers):
    good, bad = servers["0.5.17"], servers["0.5.23"]
    model, number = weights(7), max(good.next_version(), bad.next_version())
    with connect([good, bad], model, keep_last=1) as bridge:
        bridge.update_weights(version=number)
        group = bridge._transport._lines[bad.url]._group_name
        bad.post("/destroy_weights_update_group", {"group_name": group})
        for tensor in model.values():
            tensor.mul_(0.5)
        start = time.monotonic()
        report = bridge.update_weights(version=number + 1)
        assert time.monotonic() - start < 8, "it did not wait for the bucket's time limit"
        assert list(report.fenced) == [bad.url]
        assert f"Group {group} not in" in report.fenced[bad.url]
        assert good.weight_version() == str(number + 1)
        bridge.admit(bad.url)
        assert bad.weight_version() == str(number + 1)
        assert bridge.verify().keys() == {good.url, bad.url}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_gives_up_in_the_middle(servers, transport, tmp_path):
    """Over ZMQ the old version is whole; over a broadcast it is gone, and no version claims otherwise."""
    server, model = servers["0.5.23"], weights(8)
    number = server.next_version()
    with connect([server], model, transport=transport, keep_last=1) as bridge:
        bridge.update_weights(version=number)
        before = {n: t.clone() for n, t in fused(model, FP8).items()}
        for tensor in model.values():
            tensor.mul_(0.5)

        def give_up(done, total):
            if done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            bridge.update_weights(version=number + 1, on_progress=give_up)
        assert not server.paused()
        if transport == "zmq":
            assert bridge.servers[server.url].state == "healthy"
            assert server.weight_version() == str(number)
            assert_same_bits(server.parameters(tmp_path), before)
        else:
            assert bridge.servers[server.url].state == "fenced"
            assert "a mix of two versions" in bridge.servers[server.url].reason
            assert server.weight_version().startswith("incomplete-")
            bridge.admit(server.url)
            assert server.weight_version() == str(number)
            assert_same_bits(server.parameters(tmp_path), before)
        bridge.update_weights(version=number + 2)
        assert bridge.verify()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_killed_in_the_middle_is_named_and_the_other_commits(servers, transport):
    good, bad = servers["0.5.23"], servers["0.5.17"]
    model, number = weights(9), max(s.next_version() for s in (good, bad))
    with connect([good, bad], model, transport=transport, keep_last=1) as bridge:

        def kill(done, total):
            if done == 2:
                bad.kill()

        report = bridge.update_weights(version=number, on_progress=kill)
        assert list(report.fenced) == [bad.url]
        assert good.weight_version() == str(number)
        assert bridge.verify().keys() == {good.url}
        servers["0.5.17"] = bad.restarted().wait_ready()
        bridge.admit(bad.url)
        assert servers["0.5.17"].weight_version() == str(number)
        assert bridge.verify().keys() == {good.url, bad.url}


def test_doctor_closes_a_session_that_a_dead_trainer_left_open(servers, capsys):
    server = servers["0.5.23"]
    server.post("/pause_generation", {"mode": "abort"})
    server.post("/begin_weight_update")
    with pytest.raises(SystemExit) as done:
        main(["doctor", "--server", server.url, "--repair", "--json"])
    assert not done.value.code
    assert "closed an open update session" in capsys.readouterr().out
    assert not server.paused()
    with connect([server], weights(1)) as bridge:
        bridge.update_weights(version=1)


def test_an_unknown_sender_s_call_does_not_end_the_server(servers):
    """What SGLang hands to our loader may be anything."""
    from fp8bridge.sglang import payload

    server = servers["0.5.23"]
    server.post("/begin_weight_update")
    body = {"load_format": rig.LOADER, "flush_cache": False}
    for message in (b"", b"\xff" * 50, b"\x94\xa5other\x00\xa1x\x80"):
        server.post(
            "/update_weights_from_tensor", body | {"serialized_named_tensors": [payload.pack(message or b" ")]}
        )
    server.post("/end_weight_update")
    assert server.weight_version()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_trainers_update_is_left_alone(servers, transport):
    """Its session stays open and the server stays paused: it generates with nothing half loaded."""
    server = servers["0.5.23"]

    def theirs():
        server.post("/pause_generation", {"mode": "abort"})
        server.post("/begin_weight_update")

    def check_theirs():
        assert server.paused()
        server.post("/end_weight_update")
        server.post("/continue_generation", {"torch_empty_cache": False})

    theirs()
    with pytest.raises(ServerRefusedError, match=r"updated by another trainer .* doctor --server .* --repair"):
        connect([server], weights(1), transport=transport)
    check_theirs()
    with connect([server], weights(1), transport=transport) as bridge:
        theirs()
        with pytest.raises(ServerRefusedError, match="updated by another trainer"):
            bridge.update_weights(version=server.next_version())
        check_theirs()


def test_a_server_keeps_no_group_of_a_bridge_that_was_closed(servers):
    server = servers["0.5.23"]
    before = groups_of(server)
    with connect([server], weights(1)) as bridge:
        bridge.update_weights(version=server.next_version())
    assert groups_of(server) == before


def groups_of(server):
    """The server names its groups when it is asked for one that it has not."""
    server.post("/begin_weight_update")
    body = {"names": ["x"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "none"}
    answer = httpx.post(f"{server.url}/update_weights_from_distributed", json=body, timeout=60).text
    server.post("/end_weight_update")
    assert "Group none not in [" in answer
    return answer


KILLED_TRAINER = """
import os, signal, sys
from types import SimpleNamespace
from tests.sglang.rig import connect, weights

def die(done, total):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

with connect([SimpleNamespace(url=sys.argv[1])], weights(12), transport=sys.argv[2]) as bridge:
    bridge.update_weights(version=int(sys.argv[3]), on_progress=die)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_claims_no_version_that_a_killed_trainer_has_broken(servers, transport, tmp_path):
    server, model = servers["0.5.23"], weights(11)
    number = server.next_version()
    with connect([server], model, transport=transport) as bridge:
        bridge.update_weights(version=number)
    command = [sys.executable, "-c", KILLED_TRAINER, server.url, transport, str(number + 1)]
    assert subprocess.run(command, cwd=rig.ROOT, timeout=120).returncode == -signal.SIGKILL
    with pytest.raises(SystemExit) as done:
        # Over ZMQ the server first waits until the trainer has been silent for a bucket's time limit.
        main(["doctor", "--server", server.url, "--repair", "--timeout-s", "60"])
    assert not done.value.code
    assert not server.paused()
    assert not server.weight_version().isdigit()
    with connect([server], model, transport=transport) as bridge:
        bridge.update_weights(version=number + 2)
        assert bridge.verify()


def test_a_broadcast_that_a_killed_trainer_began_takes_the_version_away_at_once(servers):
    """Not only when someone repairs it: the router may look first."""
    server = servers["0.5.17"]
    number = server.next_version()
    command = [sys.executable, "-c", KILLED_TRAINER, server.url, "nccl", str(number)]
    assert subprocess.run(command, cwd=rig.ROOT, timeout=120).returncode == -signal.SIGKILL
    assert server.weight_version().startswith("incomplete-")
    server.post("/continue_generation", {"torch_empty_cache": False})
    with connect([server], weights(1)) as bridge:
        bridge.update_weights(version=number)
        assert bridge.verify()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_stalls_is_named_in_time_and_lives_when_it_wakes(servers, transport):
    good, slow = servers["0.5.17"], servers["0.5.23"]
    model, number = weights(13), max(s.next_version() for s in (good, slow))
    ranks = [p for p in rig.descendants(slow.process.pid) if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def stall(done, total):
        if done == 2:
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)

    assert ranks
    with connect([good, slow], model, transport=transport, bucket_timeout_s=7, keep_last=1) as bridge:
        try:
            report = bridge.update_weights(version=number, on_progress=stall)
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
        assert list(report.fenced) == [slow.url]
        assert good.weight_version() == str(number)
        deadline = time.monotonic() + 60
        while slow.paused() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert slow.process.poll() is None
        bridge.admit(slow.url)
        assert slow.weight_version() == str(number)
        assert bridge.verify().keys() == {good.url, slow.url}


def test_asyncio_speaks_to_servers_of_both_versions_at_once(servers):
    async def run():
        clients = [AsyncSglangClient(AsyncHttp(servers[v].url, timeout_s=20)) for v in VERSIONS]
        try:
            facts = await asyncio.gather(*(c.server_info() for c in clients))
            await asyncio.gather(*(c.pause("abort") for c in clients))
            begun = await asyncio.gather(*(c.begin() for c in clients), return_exceptions=True)
            await clients[0].end()
            await asyncio.gather(*(c.resume(timeout_s=20) for c in clients))
            return [f["version"] for f in facts], begun
        finally:
            await asyncio.gather(*(c.close() for c in clients))

    found, (with_sessions, without) = asyncio.run(run())
    assert found == list(VERSIONS)
    assert with_sessions is None
    assert (type(without), without.status) == (ServerRefusedError, 404)
    assert not any(servers[v].paused() for v in VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_without_checkpoint_engine_says_so_in_the_words_that_we_look_for(servers, version):
    client = SglangClient(Http(servers[version].url, timeout_s=20))
    with pytest.raises(ServerRefusedError, match="checkpoint-engine is not installed"):
        client.update_from_ipc({"GPU-0": "ipc:///nowhere"}, timeout_s=20)
    client.close()
