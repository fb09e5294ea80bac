"""What an operator has at 3 a.m.: the router that drains a lost server, verify, doctor --repair. Real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tests.ports import free_port

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

import fp8bridge
from fp8bridge import rollout
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ServerError
from fp8bridge.routing import SglangRouter, WebHook

from .rollout.rig import FP8_QWEN3, Client
from .test_cli import run  # noqa: F401 - the fixture
from .test_end_to_end import connect, launched_pair, plain_weights


@pytest.fixture(scope="module")
def pair():
    """Two servers for all tests here: each leaves them running, with whatever version came last."""
    with launched_pair() as clients:
        yield clients


def next_version(pair):
    return max((int(c.version()) for c in pair if c.version().isdigit()), default=0) + 1


@pytest.fixture
def router(pair):
    """A real SGLang router in front of both servers."""
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")
    port, metrics_port = free_port(), free_port()
    urls = [c.server.url for c in pair]
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sglang_router.launch_router",
            *words,
            "--policy",
            "round_robin",
            "--worker-urls",
            *urls,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: workers(url, healthy=True) == set(urls), 40)
        yield url
    finally:
        process.kill()
        process.wait()


def workers(url, *, healthy=False):
    """Those that it has; with `healthy`, those that it also believes to be well."""
    try:
        listed = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return {w["url"] for w in listed if w["is_healthy"] or not healthy}


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def test_a_router_drains_a_lost_server_and_gets_it_back_with_the_current_version(pair, router):
    model = plain_weights(1)
    good, bad = pair

    def versions_served():
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        answers = [httpx.post(f"{router}/generate", json=body, timeout=20).json() for _ in range(6)]
        return {a["meta_info"]["weight_version"] for a in answers}

    version = next_version(pair)
    with connect(pair, model, keep_last=1, on_state=SglangRouter(router)) as bridge:
        bridge.update_weights(version=version)
        os.kill(bad.server.process.pid, signal.SIGSTOP)
        assert list(bridge.update_weights(version=version + 1).fenced) == [bad.server.url]
        wait_for(lambda: workers(router) == {good.server.url})
        assert versions_served() == {str(version + 1)}
        os.kill(bad.server.process.pid, signal.SIGCONT)
        bad.wait_for(lambda: bad.info()["fp8bridge"]["session"] is None)
        bridge.admit(bad.server.url)
        wait_for(lambda: workers(router, healthy=True) == {good.server.url, bad.server.url})
        assert versions_served() == {str(version + 1)}
        assert bad.version() == str(version + 1)


def test_a_webhook_is_told(pair):
    told = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            told.append((self.headers["authorization"], json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hook.server_port}/state"
        version = next_version(pair)
        with connect(pair[:1], plain_weights(1), on_state=WebHook(url, api_key="k")) as bridge:
            bridge.update_weights(version=version)
        hook.shutdown()
    server = pair[0].server.url
    assert told == [
        ("Bearer k", {"server": server, "state": "updating", "version": None, "reason": ""}),
        ("Bearer k", {"server": server, "state": "healthy", "version": version, "reason": ""}),
    ]


def test_verify_proves_that_servers_hold_the_same_and_finds_the_one_that_does_not(pair, run):  # noqa: F811
    both = [word for c in pair for word in ("--server", c.server.url)]
    version = next_version(pair)
    with connect(pair[:1], plain_weights(7)) as bridge:
        bridge.update_weights(version=version)
    code, out, _ = run("verify", *both, "--json")
    first, second = json.loads(out)
    assert (code, first["problems"]) == (1, [])
    assert "tensors are not those of" in second["problems"][0]
    assert "logprobs differ" in second["problems"][1]
    with connect(pair, plain_weights(1)) as bridge:
        bridge.update_weights(version=version + 1)
    code, out, _ = run("verify", *both, "--version", str(version + 1), "--json")
    assert code == 0, out
    assert {(h["version"], tuple(h["problems"]), tuple(h["logprobs"])) for h in json.loads(out)} == {
        (str(version + 1), (), tuple(json.loads(out)[0]["logprobs"]))
    }
    code, out, _ = run("verify", *both, "--version", "0")
    assert code == 1
    assert f"it claims version {version + 1}, not 0" in " ".join(out.split())


def test_verify_against_a_checkpoint_and_a_server_restarted_from_it(pair, run, tmp_path):  # noqa: F811
    """Bytes from the file, and what checksums cannot see: the live server computes what a fresh one does."""
    from safetensors.torch import save_file

    model = plain_weights(3)
    with connect(pair[:1], model) as bridge:
        bridge.update_weights(version=next_version(pair))
    live = pair[0]
    save_file(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FP8_QWEN3))
    with rollout.launch(FP8_QWEN3, weights=str(tmp_path)) as server:
        fresh = Client(server, seed=0)
        code, out, _ = run(
            *("verify", "--server", live.server.url, "--server", server.url, "--model-path", str(tmp_path), "--json"),
            *("--logprob-tolerance", "0"),
        )
        assert code == 0, out
        fresh.http.close()
    model["model.norm.weight"][0] += 1
    save_file(model, tmp_path / "model.safetensors")
    code, out, _ = run("verify", "--server", live.server.url, "--model-path", str(tmp_path), "--json")
    assert code == 1
    assert "model.norm.weight" in json.loads(out)[0]["problems"][0]


def test_an_identity_update_leaves_the_output_as_it_was_and_keeps_the_version(pair, run, tmp_path):  # noqa: F811
    from safetensors.torch import save_file

    server, model = pair[0], plain_weights(4)
    with connect(pair[:1], model) as bridge:
        bridge.update_weights(version=next_version(pair))
    save_file(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FP8_QWEN3))
    before, version = server.generate(), server.version()
    words = ("doctor", "--server", server.server.url, "--identity", str(tmp_path), "--json")
    code, out, err = run(*words)
    assert code == 0, out + err
    [found] = json.loads(out)["identity"]
    assert found["gap"] == 0
    assert found["checked"] == len(server.checksums())
    assert (server.generate()["output_ids"], server.version()) == (before["output_ids"], version)
    model["model.norm.weight"].mul_(2)
    save_file(model, tmp_path / "model.safetensors")
    code, out, _ = run(*words)
    assert code == 1, "other weights than it holds"
    assert json.loads(out)["identity"][0]["gap"] > 1e-3


def test_doctor_repairs_what_a_dead_trainer_left(pair, run):  # noqa: F811
    """A client without a lease: nothing would ever close its session or resume its server."""
    left, fine = pair
    left.ok("/pause_generation", {"mode": "retract"})
    left.ok("/begin_weight_update", {"session": "gone", "selector": "all"})
    servers = ["--servers", left.server.url, "--servers", fine.server.url]
    code, out, _ = run("doctor", *servers, "--json")
    checks = json.loads(out)["servers"]
    assert [(c["session"], c["paused"], c["repaired"]) for c in checks] == [("open", True, []), (None, False, [])]
    code, out, _ = run("doctor", *servers, "--repair", "--json")
    assert code == 0
    checks = json.loads(out)["servers"]
    assert checks[0]["repaired"] == ["dropped an open update session", "resumed generation"]
    assert checks[1]["repaired"] == []
    assert [(c["session"], c["paused"]) for c in checks] == [(None, False)] * 2
    left.generate()
    with connect(pair, plain_weights(1)) as bridge:
        bridge.update_weights(version=next_version(pair))


def test_an_admin_key_is_sent_with_what_changes_a_server_and_the_other_with_the_rest(run):  # noqa: F811
    with rollout.launch(FP8_QWEN3, api_key="user", admin_api_key="admin") as server:
        model = plain_weights(1)
        for keys in ({"api_key": "user"}, {"admin_api_key": "admin"}):
            with pytest.raises(ServerError, match="401|Unauthorized"):
                fp8bridge.connect(StateDictSource(model, FP8_QWEN3), [server.url], **keys)
        both = {"api_key": "user", "admin_api_key": "admin"}
        with fp8bridge.connect(StateDictSource(model, FP8_QWEN3), [server.url], **both) as bridge:
            bridge.update_weights(version=1)
            assert bridge.verify().keys() == {server.url}
        words = [f"--{name.replace('_', '-')}={key}" for name, key in both.items()]
        code, out, _ = run("doctor", "--server", server.url, *words, "--repair", "--json")
        assert (code, json.loads(out)["servers"][0]["weight_version"]) == (0, "1")


TRAINER = """
import signal, sys, time
from tests.test_end_to_end import connect, plain_weights
way, version, urls = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if way == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
else:  # a parent in the background of a shell leaves it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

def pause(done, total):
    if done == 2:
        print("in the middle", flush=True)
        for _ in range(3000):
            time.sleep(0.01)

with connect(urls, plain_weights(1)) as bridge:
    bridge.update_weights(version=version, on_progress=pause)
"""


@pytest.mark.parametrize(("way", "number"), [("handler", signal.SIGTERM), ("plain", signal.SIGINT)])
def test_a_signal_in_the_middle_of_an_update_ends_cleanly(pair, way, number):
    before = [(c.checksums(), c.version()) for c in pair]
    urls = [c.server.url for c in pair]
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, way, str(next_version(pair)), *urls],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        try:
            said = trainer.stdout.readline()
            trainer.send_signal(number)
            start = time.monotonic()
            _, err = trainer.communicate(timeout=30)
            took_s = time.monotonic() - start
        finally:
            trainer.kill()
    assert said == "in the middle\n", err
    assert trainer.returncode == (3 if way == "handler" else -signal.SIGINT), err
    assert took_s < 15, f"no lease had to run out: {err}"
    for client, old in zip(pair, before, strict=True):
        assert client.info()["fp8bridge"]["session"] is None
        assert client.load()["paused"] is False
        assert (client.checksums(), client.version()) == old
        client.generate()


def test_closing_waits_for_the_update_of_another_thread(pair):
    model = plain_weights(1)
    bridge = connect(pair, model)
    started, reports = threading.Event(), []

    def slow(done, total):
        started.set()
        time.sleep(0.05)

    version = next_version(pair)
    thread = threading.Thread(target=lambda: reports.append(bridge.update_weights(version=version, on_progress=slow)))
    thread.start()
    started.wait(10)
    bridge.close()
    thread.join(1)
    assert [r.version for r in reports] == [version]
    assert {c.version() for c in pair} == {str(version)}
