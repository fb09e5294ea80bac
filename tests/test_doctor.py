"""`fp8bridge doctor`: machines are made up by their versions and GPUs, servers by a small HTTP server."""

import importlib.metadata
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fp8bridge.cli import doctor
from fp8bridge.cli.app import main

ALL = dict.fromkeys(doctor.PACKAGES, "1.0") | {"transformer-engine": None}
CPU = {"error": None, "cuda": None, "nccl": None, "gpus": []}
HOPPER = {"name": "NVIDIA H200", "capability": [9, 0], "nbytes": 1 << 37}
GPU = CPU | {"cuda": "13.0", "nccl": "2.28.9", "gpus": [HOPPER]}
FP8 = {
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def fixes(found, gpu):
    return {feature.name.split(" (")[0]: feature.fix for feature in doctor.features(found, gpu)}


def test_everything_works_on_a_full_gpu_machine():
    assert not any(fixes(ALL, GPU).values())
    assert all(feature.works for feature in doctor.features(ALL, GPU))


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        (CPU, "built for the CPU"),
        (GPU | {"gpus": []}, "sees no GPU"),
        (GPU | {"gpus": [HOPPER | {"name": "A100", "capability": [8, 0]}]}, "A100: no FP8 before"),
    ],
)
def test_why_the_gpu_is_not_used(gpu, says):
    found = fixes(ALL, gpu)
    assert says in found.pop("quantize on the GPU")
    assert not any(found.values())


def test_each_missing_package_has_its_install_line():
    found = fixes(ALL | {"megatron-core": None, "uvicorn": None, "transformers": None}, GPU)
    assert "--ignore-requires-python megatron-core" in found["read a Megatron-Core trainer"]
    assert found["run a rollout server"] == "uvicorn, transformers not installed: pip install 'fp8bridge[serve]'"
    assert "megatron-core not installed" in found["see all of it work"]
    assert "uvicorn" in found["see all of it work"]
    assert found["plan an update"] == found["send over zmq"] == ""
    without = fixes(ALL | {"safetensors": None}, GPU)["convert checkpoints"]
    assert without == "safetensors not installed: pip install 'fp8bridge[engine]'"


def test_an_empty_transformer_engine_breaks_megatron(monkeypatch):
    """Installed alone, its import raises RuntimeError; with its parts nothing is wrong."""
    found = ALL | {"transformer-engine": "2.20.2"}
    assert "pip uninstall transformer-engine" in fixes(found, GPU)["read a Megatron-Core trainer"]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.20.2")
    assert fixes(found, GPU)["read a Megatron-Core trainer"] == ""


def test_a_broken_torch_is_told_where_it_matters():
    found = fixes(ALL, CPU | {"error": "torch cannot be imported: libcudart.so.13"})
    assert found.pop("plan an update") == ""
    assert all("libcudart" in fix for fix in found.values())


def test_versions_and_device_of_this_machine(monkeypatch):
    import torch

    found = doctor.versions()
    assert found["torch"] == torch.__version__
    assert doctor.device()["cuda"] == torch.version.cuda
    assert doctor.device()["error"] is None


@contextmanager
def http_server(answers):
    """Answers {path: (status, JSON or text)}; anything else is a 404. Gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, (404, "no such path"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


EMBEDDED = {
    "/server_info": (200, {"version": "0.1.0", "fp8bridge": {"hf_config": FP8, "atomic": True}}),
    "/model_info": (200, {"weight_version": "7"}),
    "/ready": (200, ""),
}


def check(answers):
    with http_server(answers) as url:
        return doctor.check_server(url, timeout_s=5)


def test_a_usable_server():
    found = check(EMBEDDED)
    assert found.usable
    assert found.error == ""
    assert found.engine == "0.1.0"
    assert found.layout == "FP8 e4m3, 128x128 blocks, float32 scales, rest bfloat16"
    assert found.weight_version == "7"
    assert found.paused is False


def test_a_paused_server_and_one_that_does_not_tell():
    assert check(EMBEDDED | {"/ready": (503, "")}).paused is True
    assert check(EMBEDDED | {"/ready": (404, "")}).paused is None


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/server_info": (200, {"version": "0.5.23"})}, "no SGLang or vLLM server, nor one of"),
        ({"/server_info": (401, {"error": "Unauthorized"})}, "Unauthorized"),
        ({"/server_info": (500, "boom")}, "boom"),
        (
            {"/server_info": (200, {"fp8bridge": {"hf_config": {"quantization_config": {"quant_method": "awq"}}}})},
            "awq",
        ),
    ],
)
def test_servers_that_cannot_be_used(answers, says):
    found = check(EMBEDDED | answers)
    assert not found.usable
    assert says in found.error


def test_the_exit_code_is_that_of_the_servers(capsys, free_port, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    dead = f"http://127.0.0.1:{free_port()}"
    with http_server(EMBEDDED) as url:
        with pytest.raises(SystemExit) as stop:
            main(["doctor", "--server", url])
        assert stop.value.code == 0
        assert f"{url}: usable: engine 0.1.0" in capsys.readouterr().out
        with pytest.raises(SystemExit) as stop:
            main(["doctor", "--json", "--server", url, "--server", dead, "--server", "no-url"])
    assert stop.value.code == 1
    facts = json.loads(capsys.readouterr().out)
    assert [s["usable"] for s in facts["servers"]] == [True, False, False]
    assert "not reachable" in facts["servers"][1]["error"]
    assert "http://host:port" in facts["servers"][2]["error"]
    assert {f["name"] for f in facts["features"]} >= {"send over zmq"}
    assert set(facts["packages"]) == set(doctor.PACKAGES)


def test_no_server_asked_is_exit_code_0_whatever_is_missing(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "quantize on the CPU" in out


def test_installed_frameworks_have_their_adapter_and_a_note_where_untested(monkeypatch, capsys):
    installed = {"ray": "2.60.0", "trl": "0.9.1"}

    def version(name):
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f.name: f for f in doctor.installed_frameworks()}
    assert set(found) == {"TRL", "Ray"}
    assert (found["Ray"].adapter, found["Ray"].note) == ("fp8bridge.adapters.ray", "")
    assert found["TRL"].note == "tested with trl >= 1.16, < 1.17 only"
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "fp8bridge.adapters.trl" in capsys.readouterr().out
