"""Whatever a server answers becomes an error that names it and keeps its words."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fp8bridge.cli.app import main
from fp8bridge.errors import (
    ConfigError,
    ServerError,
    ServerMismatchError,
    ServerRefusedError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from fp8bridge.servers import HttpServer

from .scripted import Scripted
from .test_planner import plan_of


@pytest.fixture
def scripted():
    server = Scripted()
    yield server
    server.close()


def test_verify_compares_what_stock_sglang_servers_say_of_themselves(capsys):
    servers = [Scripted(), Scripted()]
    for server, value in zip(servers, ("0a", "0b"), strict=True):
        meta = {"input_token_logprobs": [[None, 3], [-1.0, 1]], "output_token_logprobs": [[-0.5, 4]]}
        ranks = [{"checksums": {"model.norm.weight": "01", "lm_head.weight": value}}]
        server.answers = {
            "/server_info": (200, {"version": "0.5.23", "tp_size": 1, "model_path": "nowhere"}),
            "/model_info": (200, {"weight_version": "3"}),
            "/weights_checker": (200, {"success": True, "ranks": ranks}),
            "/generate": (200, {"meta_info": meta}),
        }
    words = ["--servers", servers[0].url, "--servers", servers[1].url, "--replicas", "--json"]
    with pytest.raises(SystemExit) as done:
        main(["verify", *words])
    assert done.value.code == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["problems"], first["tensors"]) == ([], 2)
    assert second["problems"] == [f"1 of 2 tensors are not those of {servers[0].url}: lm_head.weight, rank 0"]
    servers[1].answers["/weights_checker"] = servers[0].answers["/weights_checker"]
    with pytest.raises(SystemExit) as done:
        main(["verify", *words])
    assert not done.value.code
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(["verify", "--servers", servers[0].url, "--replicas"])
    assert done.value.code == 2
    for server in servers:
        server.close()


@pytest.fixture
def client(scripted):
    server = HttpServer(scripted.url, timeout_s=0.5, api_key="secret")
    yield server
    server.close()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"success": False, "message": "A weight update session is already open."}, "already open"),
        (400, {"error": {"message": "bad mode"}}, "bad mode"),
        (400, {"object": "error", "message": "1 validation errors: mode"}, "1 validation errors"),
        (401, {"error": "Unauthorized"}, "Unauthorized"),
        (500, "Internal Server Error", "Internal Server Error"),
        (200, {"success": False, "message": "no, but politely"}, "no, but politely"),
        (502, "<html>gateway</html>", "<html>gateway</html>"),
        (503, "", "Service Unavailable"),
    ],
)
def test_a_refusal_keeps_status_and_words(scripted, client, status, body, words):
    scripted.answers["/pause_generation"] = (status, body)
    with pytest.raises(ServerRefusedError) as caught:
        client.pause("abort", lease_s=3.0)
    error = caught.value
    assert (error.status, error.server) == (status, scripted.url)
    assert words in error.answer
    assert scripted.url in str(error)
    assert words in str(error)
    assert "/pause_generation" in str(error)


def test_a_silent_server_is_named_after_the_timeout(scripted, client):
    scripted.answers["/pause_generation"] = lambda: time.sleep(2) or (200, {})
    start = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=r"did not answer /pause_generation in 0\.5 s"):
        client.pause("abort", lease_s=3.0)
    assert time.monotonic() - start < 1.5


def test_a_stopped_server_is_unreachable(scripted, client):
    scripted.close()
    with pytest.raises(ServerUnreachableError, match="is the server running"):
        client.resume()
    scripted.server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=scripted.server.serve_forever, daemon=True).start()


def test_the_calls_speak_sglangs_fields(scripted, client):
    for path in ("/pause_generation", "/begin_weight_update", "/end_weight_update", "/continue_generation"):
        scripted.answers[path] = (200, {"success": True, "weight_version": "7"})
    client.pause("retract", lease_s=3.0)
    client.begin("token", "hash", lease_s=3.0)
    client.commit("token", "7")
    client.resume()
    bodies = [json.loads(body) for _, _, body in scripted.seen]
    assert bodies == [
        {"mode": "retract", "lease_s": 3.0},
        {"selector": "all", "session": "token", "manifest_hash": "hash", "lease_s": 3.0},
        {"session": "token", "weight_version": "7"},
        {"torch_empty_cache": False},
    ]
    assert {auth for _, auth, _ in scripted.seen} == {"Bearer secret"}


@pytest.mark.parametrize("said", [{"weight_version": "8"}, {}, "not JSON"])
@pytest.mark.parametrize("status", [200, 404])
def test_a_commit_under_another_name_is_an_error_and_the_name_is_taken_back(scripted, client, said, status):
    """Also where the server does not even answer that."""
    scripted.answers["/end_weight_update"] = (200, said)
    scripted.answers["/update_weight_version"] = (status, {"success": status == 200})
    with pytest.raises(ServerError, match=r"was told to commit version 7 and says (None|'8')"):
        client.commit("token", "7")
    assert json.loads(scripted.seen[-1][2]) == {"new_version": "unknown", "abort_all_requests": False}


def test_a_server_without_our_receiver_is_refused_with_what_to_do(scripted, client):
    scripted.answers["/server_info"] = (200, {"version": "0.5.23"})
    with pytest.raises(ServerMismatchError, match=r"takes no weights over ZMQ [\s\S]*fp8bridge serve"):
        client.info()


def test_a_server_of_a_quantization_we_cannot_serve(scripted, client):
    config = {"quantization_config": {"quant_method": "awq"}}
    scripted.answers["/server_info"] = (200, {"fp8bridge": {"hf_config": config}})
    scripted.answers["/model_info"] = (200, {"weight_version": "default"})
    with pytest.raises(ServerMismatchError, match="quant_method is 'awq'") as caught:
        client.info()
    assert caught.value.server == scripted.url


def test_preflight_compares_the_hash_that_the_server_computes(scripted, client):
    manifest = plan_of().manifest
    scripted.answers["/fp8bridge/preflight"] = (200, {"success": True, "hash": "other"})
    with pytest.raises(ServerMismatchError, match="reads plan other"):
        client.preflight(manifest)
    scripted.answers["/fp8bridge/preflight"] = (400, {"success": False, "message": "2 differences: x, y"})
    with pytest.raises(ServerMismatchError, match="cannot take this model: 2 differences: x, y"):
        client.preflight(manifest)
    scripted.answers["/fp8bridge/preflight"] = (200, {"success": True, "hash": manifest.hash})
    client.preflight(manifest)


@pytest.mark.parametrize("url", ["rollout-0:30000", "ftp://host", "http://", ""])
def test_an_address_that_is_none(url):
    with pytest.raises(ConfigError, match="give http://host:port"):
        HttpServer(url, timeout_s=1)
