"""Real FP8 SGLang on this GPU, dense and with 128 experts: broadcast, ZMQ and CUDA IPC, against a restarted server.

Needs SGLang, and for two NCCL ranks on one GPU an NCCL of 2.30 or newer; `scripts/test_gpu_sglang.sh`
sets the environment. Figures go to $OUT/sglang.json.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.kernels import quantize
from fp8bridge.layout import ServerLayout
from fp8bridge.types import TensorMeta
from tests.ports import free_port
from tests.support import SplitSource, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"),
]

QUANT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "quantization_config": QUANT,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIGS = {"dense": DENSE, "moe": MOE}
LOADER = "fp8bridge.sglang.loader.load"
FIGURES = {}


def weights(config, seed):
    g = torch.Generator("cuda").manual_seed(seed)

    def rand(*shape):
        return (torch.randn(*shape, generator=g, device="cuda") * 0.03).bfloat16()

    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    model = {
        "model.embed_tokens.weight": rand(config["vocab_size"], hidden),
        "lm_head.weight": rand(config["vocab_size"], hidden),
        "model.norm.weight": rand(hidden) + 1,
    }
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        model |= {
            p + "self_attn.q_proj.weight": rand(q, hidden),
            p + "self_attn.k_proj.weight": rand(kv, hidden),
            p + "self_attn.v_proj.weight": rand(kv, hidden),
            p + "self_attn.o_proj.weight": rand(hidden, q),
            p + "self_attn.q_norm.weight": rand(dim) + 1,
            p + "self_attn.k_norm.weight": rand(dim) + 1,
            p + "input_layernorm.weight": rand(hidden) + 1,
            p + "post_attention_layernorm.weight": rand(hidden) + 1,
        }
        if "num_experts" not in config:
            model |= mlp(rand, p + "mlp.", hidden, config["intermediate_size"])
            continue
        model[p + "mlp.gate.weight"] = rand(config["num_experts"], hidden)
        for e in range(config["num_experts"]):
            model |= mlp(rand, f"{p}mlp.experts.{e}.", hidden, config["moe_intermediate_size"])
    return model


def mlp(rand, prefix, hidden, ffn):
    return {
        prefix + "gate_proj.weight": rand(ffn, hidden),
        prefix + "up_proj.weight": rand(ffn, hidden),
        prefix + "down_proj.weight": rand(hidden, ffn),
    }


def checkpoint(folder, config, model):
    """The FP8 checkpoint that a server of these weights is restarted from."""
    from safetensors.torch import save_file

    layout, wire = ServerLayout.from_hf_config(config), {}
    for name, tensor in model.items():
        if layout.decide(TensorMeta(name, tuple(tensor.shape), "bfloat16")).action == "quantize":
            codes, scale_inv = quantize(tensor, "sglang", layout.block)
            wire |= {name: codes.cpu(), f"{name}_scale_inv": scale_inv.cpu()}
        else:
            wire[name] = tensor.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(wire, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Server:
    def __init__(self, folder, *more, loader=True):
        self.port = free_port()
        self.url, self.folder = f"http://127.0.0.1:{self.port}", Path(folder)
        self.log = open(self.folder / f"sglang-{self.port}.log", "w")  # noqa: SIM115 - closed with the server
        words = ["--model-path", str(folder), "--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init"]
        words += ["--nccl-port", str(free_port())]
        words += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
        words += ["--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static", "0.5"]
        words += ["--max-total-tokens", "8192", "--max-running-requests", "8"]
        words += ["--custom-weight-loader", LOADER] if loader else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *words, *more],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "HF_HUB_OFFLINE": "1"},
            cwd=self.folder,
            start_new_session=True,
        )

    def wait_ready(self, timeout_s=240):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/model_info", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.3)
        raise AssertionError(Path(self.log.name).read_text()[-3000:])

    def post(self, path, body=None):
        answer = httpx.post(f"{self.url}{path}", json=body or {}, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, count=16):
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7, 8, 9, 10, 11], "sampling_params": sampling, "return_logprob": True}
        answer = self.post("/generate", body | {"logprob_start_len": 0})
        meta = answer["meta_info"]
        pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        return answer["output_ids"], [p[0] for p in pairs]

    def checker(self):
        return self.post("/weights_checker", {"action": "checksum"})

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two dense servers and one with experts, of other weights; and one of each started from the trainer's."""
    base, started = tmp_path_factory.mktemp("sglang"), {}
    for kind, config in CONFIGS.items():
        folder = checkpoint(base / kind, config, weights(config, 1))
        started |= {f"{kind} fresh": Server(folder), f"{kind} a": Server(folder, "--load-format", "dummy")}
    started["dense b"] = Server(base / "dense", "--load-format", "dummy")
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.close()
        if out := os.environ.get("OUT"):
            Path(out, "sglang.json").write_text(json.dumps(FIGURES, indent=1))


VERSION = iter(range(1, 10_000))


def connect(servers, model, config, transport, **options):
    settings = {"transport": transport, "pause_mode": "abort", "bucket_nbytes": 64 << 20, "open_timeout_s": 60}
    return fp8bridge.connect(StateDictSource(model, config), [s.url for s in servers], **settings | options)


def test_two_servers_of_one_update_agree_and_compute_what_a_restarted_one_does(servers):
    model, fresh = weights(DENSE, 1), servers["dense fresh"].generate()
    pair = [servers["dense a"], servers["dense b"]]
    assert pair[0].generate()[0] != fresh[0]
    with connect(pair, model, DENSE, "nccl") as bridge:
        bridge.update_weights(version=next(VERSION))
        bridge.verify()
    sums = [s.checker() for s in (*pair, servers["dense fresh"])]
    assert sums[0] == sums[1] == sums[2]
    assert pair[0].generate() == pair[1].generate() == fresh


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "load_weights"])
@pytest.mark.parametrize("transport", ["nccl", "zmq", "ipc"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_and_logprobs_are_those_of_a_restarted_server(servers, kind, transport, replay):
    if transport == "nccl" and replay:
        pytest.skip("over nccl SGLang loads by itself")
    config, server = CONFIGS[kind], servers[f"{kind} a"]
    fresh, other, model = servers[f"{kind} fresh"].generate(), weights(config, 2), weights(config, 1)
    current = {n: t.clone() for n, t in other.items()}
    with connect([server], current, config, transport) as bridge:
        target = bridge._set.members[server.url].server
        target.replay = replay
        bridge.update_weights(version=next(VERSION))
        assert server.generate()[0] != fresh[0]
        seconds = []
        for _ in range(4):
            for name, tensor in current.items():
                tensor.copy_(model[name])
            report = bridge.update_weights(version=next(VERSION))
            seconds.append(report.seconds)
        bridge.verify()
        if transport != "nccl":
            assert target.load_way == ("replay" if replay else "load_weights")
        tensors, nbytes = len(bridge.plan.manifest.entries()), report.nbytes
        stages = {k: v.max for k, v in report.stages.items()}
    assert server.generate() == fresh
    FIGURES[f"{kind} {transport} {'replay' if replay else 'load_weights'}"] = {
        "seconds": seconds,
        "best_s": min(seconds),
        "nbytes": nbytes,
        "tensors": tensors,
        "gbytes_per_s": nbytes / min(seconds) / 1e9,
        "stages": stages,
        "paused_s": report.paused_s,
    }


@pytest.mark.parametrize("transport", ["nccl", "zmq", "ipc"])
def test_a_version_kept_in_host_memory_goes_back_over_every_transport(servers, transport):
    server, fresh = servers["dense a"], servers["dense fresh"].generate()
    current = {n: t.clone() for n, t in weights(DENSE, 1).items()}
    with connect([server], current, DENSE, transport, keep_last=2) as bridge:
        first = next(VERSION)
        bridge.update_weights(version=first)
        for name, tensor in weights(DENSE, 2).items():
            current[name].copy_(tensor)
        bridge.update_weights(version=next(VERSION))
        assert server.generate()[0] != fresh[0]
        assert bridge.rollback(first).version == first
        bridge.verify()
    assert server.generate() == fresh


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    """One server without our loader, which can give its memory back."""
    folder = checkpoint(tmp_path_factory.mktemp("lean"), DENSE, weights(DENSE, 1))
    server = Server(folder, "--load-format", "dummy", "--enable-memory-saver", loader=False)
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.mark.skipif(importlib.util.find_spec("checkpoint_engine") is None, reason="no checkpoint-engine here")
def test_checkpoint_engines_endpoint_takes_the_same_bytes(servers, lean):
    fresh, model = servers["dense fresh"].generate(), weights(DENSE, 1)
    current = {n: t.clone() for n, t in weights(DENSE, 2).items()}
    with connect([lean], current, DENSE, "ipc") as bridge:
        bridge.update_weights(version=next(VERSION))
        assert lean.generate()[0] != fresh[0]
        seconds = []
        for _ in range(4):
            for name, tensor in current.items():
                tensor.copy_(model[name])
            seconds.append(bridge.update_weights(version=next(VERSION)).seconds)
    assert lean.generate() == fresh
    assert lean.checker()["ranks"] == servers["dense fresh"].checker()["ranks"]
    FIGURES["dense ipc checkpoint-engine"] = {"seconds": seconds, "best_s": min(seconds)}


@pytest.mark.parametrize("loader", [True, False], ids=["loader", "checkpoint-engine"])
def test_a_server_that_gave_its_memory_back_is_filled_again(servers, lean, tmp_path, loader):
    """The colocated loop: generate, release, train, resume the weights, update, resume the cache, generate."""
    from fp8bridge.http import Http
    from fp8bridge.sglang.client import SglangClient

    if not loader and importlib.util.find_spec("checkpoint_engine") is None:
        pytest.skip("no checkpoint-engine here")
    folder, fresh = lean.folder, servers["dense fresh"].generate()
    server = Server(folder, "--load-format", "dummy", "--enable-memory-saver").wait_ready() if loader else lean
    client = SglangClient(Http(server.url, timeout_s=60))
    try:
        with connect([server], weights(DENSE, 1), DENSE, "ipc") as bridge:
            for _ in range(3):
                before = torch.cuda.mem_get_info()[0]
                client.release_memory(["kv_cache", "weights"])
                given_back = torch.cuda.mem_get_info()[0] - before
                client.resume_memory(["weights"])
                bridge.update_weights(version=next(VERSION))
                client.resume_memory(["kv_cache"])
                assert given_back > 80e6, "at least its weights"
                assert server.generate() == fresh
    finally:
        client.close()
        if loader:
            server.close()


@pytest.mark.parametrize("senders", ["all", "first"])
def test_two_trainer_ranks_send_over_nccl(servers, senders, monkeypatch):
    """Each has random rectangles of the model, and where all send a group of its own with the server."""
    server, fresh, number = servers["dense b"], servers["dense fresh"].generate(), next(VERSION)
    model = {name: tensor.cpu() for name, tensor in weights(DENSE, 1).items()}

    def work(rank):
        source = SplitSource(model, rank, 2)
        source.hf_config = DENSE
        source._params = {name: tensor.cuda() for name, tensor in source._params.items()}
        settings = {"transport": "nccl", "pause_mode": "abort", "bucket_nbytes": 16 << 20, "senders": senders}
        with fp8bridge.connect(source, [server.url], **settings) as bridge:
            return bridge.update_weights(version=number).seconds, len(bridge.plan.owners)

    answers = run_ranks(2, work, monkeypatch)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    assert {owners for _, owners in answers} == {2 if senders == "all" else 1}
    assert server.generate() == fresh
    FIGURES[f"dense nccl, two trainer ranks, {senders} send"] = {"seconds": [seconds for seconds, _ in answers]}
