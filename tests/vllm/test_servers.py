"""Updates of real vLLM servers on the CPU: one then generates what a server started from the checkpoint does."""

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, ServerMismatchError, ServerRefusedError
from fp8bridge.rollout_server import open_server
from tests.sglang.rig import BF16, FP8, descendants, free_port, model_folder, weights
from tests.support import expected_wire

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("FP8BRIDGE_VLLM_ENV") or ROOT / ".vllm")
PROMPT = [5, 6, 7, 8, 9]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin/python").exists(), reason="no vLLM environment; `make test-vllm` installs it"
    ),
]


class VllmProcess:
    """One server. `more`: launch arguments."""

    def __init__(self, folder, *more):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = open(folder / f"vllm-{self.port}.log", "w")  # noqa: SIM115 - closed with the server
        words = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "64"]
        words += ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [ENVIRONMENT / "bin/python", "-m", "vllm.entrypoints.openai.api_server", *words, *more],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,
        )

    def wait_ready(self, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no server: {Path(self.log.name).read_text()[-3000:]}")
            time.sleep(0.2)

    def close(self):
        for pid in (*descendants(self.process.pid), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.log.close()

    def get(self, path):
        return httpx.get(f"{self.url}{path}", timeout=10).json()

    def post(self, path, body=None):
        return httpx.post(f"{self.url}{path}", json=body, timeout=60).raise_for_status().json()

    def generate(self):
        """Tokens, their logprobs, and the version that they were sampled from."""
        sampling = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        choice = self.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return choice["token_ids"], logprobs, [part["version"] for part in choice["weight_versions"]]


CONFIGS = {"bf16": BF16, "fp8": FP8}


@pytest.fixture(scope="module", params=list(CONFIGS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def config(kind):
    return CONFIGS[kind]


@pytest.fixture(scope="module")
def server(kind, config, tmp_path_factory):
    """One with random weights and our backend."""
    folder = model_folder(tmp_path_factory.mktemp(kind) / "model", config)
    backend = ("--weight-transfer-config", '{"backend": "fp8bridge"}')
    started = VllmProcess(folder, "--load-format", "dummy", *backend)
    try:
        yield started.wait_ready()
    finally:
        started.close()


def connect(server, model, config, **settings):
    settings = {"pause_mode": "abort", "bucket_nbytes": 200_000} | settings
    return fp8bridge.connect(StateDictSource(model, config), [server.url], **settings)


def next_version(server):
    version = server.get("/weight_info")["weight_version"]
    return int(version) + 1 if version.isdigit() else 1


def test_it_generates_what_a_server_started_from_the_checkpoint_does(server, config, tmp_path):
    model, before, number = weights(1), server.generate(), next_version(server)
    with connect(server, model, config) as bridge:
        bridge.update_weights(version=number)
        for tensor in model.values():
            tensor.mul_(1.25)
        report = bridge.update_weights(version=number + 1)
        assert not report.fenced
        with pytest.raises(ServerMismatchError, match="cannot tell the bytes"):
            bridge.verify()
    assert server.get("/weight_info") == {"weight_version": str(number + 1)}
    assert server.get("/is_paused") == {"is_paused": False}
    tokens, logprobs, versions = server.generate()
    assert versions == [str(number + 1)]
    assert tokens != before[0]
    layout = fp8bridge.ServerLayout.from_hf_config(config)
    fresh = VllmProcess(model_folder(tmp_path / "fresh", config, expected_wire(model, layout)))
    try:
        assert fresh.wait_ready().generate()[:2] == (tokens, logprobs)
    finally:
        fresh.close()


def _renamed(model):
    model["model.layers.0.mlp.up.weight"] = model.pop("model.layers.0.mlp.up_proj.weight")


def _cut(model):
    model["model.layers.1.self_attn.o_proj.weight"] = model["model.layers.1.self_attn.o_proj.weight"][:128].clone()


def _without(model):
    model.pop("model.layers.1.mlp.down_proj.weight")


@pytest.mark.parametrize("change", [_renamed, _cut, _without])
def test_another_model_is_refused_when_it_connects_and_nothing_has_changed(server, config, change):
    model, before = weights(2), server.generate()
    change(model)
    with pytest.raises(ServerMismatchError, match="cannot take this model.*differences between"):
        connect(server, model, config)
    assert server.generate() == before


def test_an_update_that_ends_early_leaves_the_old_version(server, config):
    model = weights(3)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with connect(server, model, config) as bridge:
        number = next_version(server)
        bridge.update_weights(version=number)
        before = server.generate()
        for tensor in model.values():
            tensor.mul_(1.5)
        with pytest.raises(KeyboardInterrupt):
            bridge.update_weights(version=number + 1, on_progress=stop)
        assert server.generate() == before
        assert not bridge.update_weights(version=number + 1).fenced
        assert server.generate() != before


def test_a_session_of_another_trainer_is_named_and_repaired(server, config):
    before = server.generate()
    server.post("/start_weight_update")
    with pytest.raises(ServerRefusedError, match="is being updated by another trainer.*--repair"):
        connect(server, weights(4), config)
    vllm = open_server(server.url, timeout_s=20)
    assert vllm.repair() == ["closed an open update session", "resumed generation"]
    assert vllm.repair() == ["resumed generation"]
    vllm.close()
    assert server.generate() == before


def test_what_vllm_has_not_is_refused_by_name(server, config):
    with pytest.raises(ConfigError, match="transport 'nccl' sends to stock SGLang"):
        connect(server, weights(5), config, transport="nccl", group_backend="gloo")
    with (
        connect(server, weights(5), config, pause_mode="retract") as bridge,
        pytest.raises(ServerMismatchError, match="vLLM, which cannot retract its requests; set pause_mode='abort'"),
    ):
        bridge.update_weights(version=next_version(server))
