"""Real SGLang servers on this CPU, in processes of their own, and what they must hold."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import torch

import fp8bridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.sglang import payload
from tests.ports import free_port
from tests.support import expected_wire

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("FP8BRIDGE_SGLANG_ENVS") or ROOT / ".sglang")
VERSIONS = ("0.5.23", "0.5.17")
LOADER, DUMP = "fp8bridge.sglang.loader.load", "tests.sglang.dump.dump"

BF16 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FP8 = BF16 | {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
}
PROMPT = [5, 6, 7, 8, 9]


def weights(seed, config=BF16):
    """A trainer's BF16 tensors, by Hugging Face name."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return (torch.randn(*shape, generator=g) * 0.05).bfloat16()

    hidden, ffn, dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
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
            p + "mlp.gate_proj.weight": rand(ffn, hidden),
            p + "mlp.up_proj.weight": rand(ffn, hidden),
            p + "mlp.down_proj.weight": rand(hidden, ffn),
            p + "input_layernorm.weight": rand(hidden) + 1,
            p + "post_attention_layernorm.weight": rand(hidden) + 1,
        }
    return model


def fused(model, config):
    """What SGLang's parameters must be."""
    return fuse(expected_wire(model, fp8bridge.ServerLayout.from_hf_config(config)), config)


def fuse(wire, config):
    """By hand: q, k, v and gate, up stacked, codes and scales alike."""
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            block = whole.split(".")[0]
            for kind in ("weight", "weight_scale_inv"):
                names = [f"{p}{block}.{x}_proj.{kind}" for x in parts]
                if names[0] in wire:
                    pieces = [wire.pop(n) for n in names]
                    joined = torch.cat([x.view(torch.uint8) if kind == "weight" else x for x in pieces])
                    wire[f"{p}{whole}.{kind}"] = joined.view(pieces[0].dtype)
    return wire


class SglangProcess:
    """One server. `more`: launch arguments; `env`: more of its environment."""

    def __init__(self, version, folder, *more, port=None, env=None):
        self.version, self.folder, self.more = version, Path(folder), more
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = open(self.folder / f"sglang-{self.port}.log", "w")  # noqa: SIM115 - closed with the server
        python = ENVIRONMENTS / version / "bin" / "python"
        words = ["--model-path", str(folder), "--host", "127.0.0.1", "--port", str(self.port)]
        # Its own choice may be taken by a connection before it listens there.
        words += ["--nccl-port", str(free_port())]
        self.process = subprocess.Popen(
            [python, ROOT / "scripts/sglang_cpu/launch.py", *words, "--custom-weight-loader", LOADER, DUMP, *more],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {}),
            start_new_session=True,
        )

    def wait_ready(self, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if httpx.get(f"{self.url}/model_info", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no server: {Path(self.log.name).read_text()[-3000:]}")
            time.sleep(0.2)

    def kill(self):
        """All of it at once, as a machine that goes down would: SGLang's ranks would outlive their parent."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.kill()
        self.log.close()

    def restarted(self):
        """The same server again, at the same address."""
        self.close()
        return SglangProcess(self.version, self.folder, *self.more, port=self.port)

    @property
    def has_sessions(self):
        return self.version != "0.5.17"

    def post(self, path, body=None):
        answer = httpx.post(f"{self.url}{path}", json=body or {}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    def weight_version(self):
        return httpx.get(f"{self.url}/model_info", timeout=10).json()["weight_version"]

    def paused(self):
        return httpx.get(f"{self.url}/ready", timeout=10).status_code == 503

    def next_version(self):
        version = self.weight_version()
        return int(version) + 1 if version.isdigit() else 1

    def parameters(self, tmp_path):
        """Every parameter as the model has it now."""
        path = tmp_path / f"dump-{self.port}.pt"
        self.post("/pause_generation", {"mode": "abort"})
        if self.has_sessions:
            self.post("/begin_weight_update")
        body = {"serialized_named_tensors": [payload.pack(str(path).encode())], "load_format": DUMP}
        self.post("/update_weights_from_tensor", body | {"flush_cache": False})
        if self.has_sessions:
            self.post("/end_weight_update")
        self.post("/continue_generation", {"torch_empty_cache": False})
        return torch.load(path)

    def generate(self, count=12, prompt=PROMPT):
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        }
        answer = self.post("/generate", body | {"return_logprob": True, "logprob_start_len": 0})
        meta = answer["meta_info"]
        pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        return answer["output_ids"], [p[0] for p in pairs], meta["weight_version"]


def descendants(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found += [child, *descendants(child)]
    return found


def model_folder(folder, config, tensors=None):
    """A checkpoint, or a config alone."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def connect(servers, model, config=FP8, **options):
    settings = {
        "transport": "nccl",
        "group_backend": "gloo",
        "bucket_nbytes": 200_000,
        "pause_mode": "abort",
        "open_timeout_s": 15,
        "bucket_timeout_s": 10,
        "request_timeout_s": 20,
    }
    urls = [s.url for s in servers]
    return fp8bridge.connect(StateDictSource(model, config), urls, **settings | options)
