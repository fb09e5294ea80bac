"""A tiny model, a server to talk to, and a trainer's end of the wire in fifty lines."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import torch
import zmq

from fp8bridge.layout import ServerLayout
from fp8bridge.plan import Bucket, Entry, Manifest
from fp8bridge.rollout.model import ServedModel, build_model
from fp8bridge.rollout.process import RunningServer
from fp8bridge.staging import bucket_checksums
from fp8bridge.wire import Ack, BucketHeader, Hello, Message, Refuse, Welcome, decode, encode

QUANT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 144,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    # Wide, so that the most likely token leads clearly and rounding decides nothing.
    "initializer_range": 0.2,
    "torch_dtype": "bfloat16",
}
FP8_QWEN3 = QWEN3 | {"quantization_config": QUANT}
PROMPT = [5, 17, 42, 3]


def reference(seed: int, config: dict[str, Any] = FP8_QWEN3) -> ServedModel:
    """The model a server has that was launched with `seed`, in this process."""
    return build_model(config, seed=seed)


@torch.inference_mode()
def greedy(model: ServedModel, tokens: list[int], count: int, cache: Any = None) -> list[int]:
    """The next `count` tokens, one forward each; `cache` holds all of `tokens` but the last, or is new."""
    step = tokens[-1:] if cache is not None else tokens
    cache = model.new_cache() if cache is None else cache
    found = []
    for _ in range(count):
        found.append(int(model.logits(step, cache, keep=1)[-1].argmax()))
        step = found[-1:]
    return found


def make_manifest(tensors: dict[str, torch.Tensor], layout: ServerLayout, bucket_nbytes: int = 60_000) -> Manifest:
    """Buckets in decreasing item size, as the planner makes them."""
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for i, (name, tensor) in enumerate(ordered):
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, tensor.nbytes))
        end += tensor.nbytes
        if end >= bucket_nbytes or i == len(ordered) - 1:
            buckets.append(Bucket(len(buckets), 0, end, tuple(entries)))
            entries, end = [], 0
    return Manifest(layout, tuple(buckets))


class Sender:
    """A trainer's ROUTER socket in a thread, which can be told to misbehave.

    change(index, payload): what is sent instead of a bucket's payload, or None to stay silent from there on.
    order: the buckets it sends (all, in order).
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        manifest: Manifest,
        *,
        order: list[int] | None = None,
        change: Callable[[int, bytes], bytes | None] = lambda _, payload: payload,
        welcome: Message | None = None,
    ) -> None:
        self.session = secrets.token_hex(8)
        self.acks: list[Ack] = []
        self.refused = ""
        self._tensors, self._manifest = tensors, manifest
        self._order = [b.index for b in manifest.buckets] if order is None else order
        self._change = change
        self._welcome = welcome or Welcome(tuple(b.index for b in manifest.buckets), 1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def payload(self, bucket: Bucket) -> bytes:
        parts = [self._tensors[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries]
        return torch.cat(parts).numpy().tobytes()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, frame = self._socket.recv_multipart()
                self._answer(identity, decode(frame))

    def _answer(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Ack):
            self.acks.append(message)
        elif isinstance(message, Refuse):
            self.refused = message.message
        elif isinstance(message, Hello):
            assert message.session == self.session
            self._socket.send_multipart([identity, encode(self._welcome)])
            if isinstance(self._welcome, Welcome):
                self._send_all(identity)

    def _send_all(self, identity: bytes) -> None:
        for index in self._order:
            bucket = self._manifest.buckets[index]
            good = self.payload(bucket)
            checksums = bucket_checksums(bucket, torch.frombuffer(bytearray(good), dtype=torch.uint8))
            payload = self._change(index, good)
            if payload is None:
                return
            header = BucketHeader(index, bucket.nbytes, checksums)
            self._socket.send_multipart([identity, encode(header), payload])


class CutLine:
    """A TCP line to `port` that is cut for good once `nbytes` have come back through it."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._port, self._left = port, nbytes
        self.cut = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listening:
            near, _ = self._listening.accept()
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            while self._left > 0 and (data := far.recv(min(self._left, 65536))):
                near.sendall(data)
                self._left -= len(data)
        self.cut.set()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return


class Client:
    """A server's endpoints. `seed`: whose weights it serves, as far as the test knows."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server, self.seed = server, seed
        self.http = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
        self.layout = ServerLayout.from_hf_config(FP8_QWEN3)

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body)

    def ok(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, (path, response.text)
        return response.json()

    def refused(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The words of a 400 about weights."""
        response = self.post(path, body)
        assert response.status_code == 400, (path, response.status_code, response.text)
        assert response.json()["success"] is False
        return response.json()["message"]

    def generate(self, count: int = 12, *, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
        params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        return self.ok("/generate", {"input_ids": prompt, "sampling_params": params} | more)

    def in_background(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Start `call` in a thread; the function that waits for it and gives its result."""
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
        thread.start()

        def join() -> Any:
            thread.join(60)
            assert result, "the call in the background failed or hangs"
            return result[0]

        return join

    def info(self) -> dict[str, Any]:
        return self.http.get("/server_info").json()

    def version(self) -> str:
        return self.http.get("/model_info").json()["weight_version"]

    def checksums(self) -> dict[str, str]:
        return self.ok("/weights_checker")["tensors"]

    def load(self) -> dict[str, Any]:
        return self.info()["internal_states"][0]

    def wait_running(self, count: int = 1) -> None:
        self.wait_for(lambda: self.load()["num_running_reqs"] == count)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def begin(self, sender: Sender, manifest: Manifest, *, lease_s: float = 30.0) -> None:
        assert self.ok("/fp8bridge/preflight", manifest.as_dict())["hash"] == manifest.hash
        self.ok(
            "/begin_weight_update",
            {"session": sender.session, "lease_s": lease_s, "manifest_hash": manifest.hash},
        )

    def pull_body(self, sender: Sender, manifest: Manifest, **more: Any) -> dict[str, Any]:
        return {
            "endpoints": [sender.endpoint],
            "session": sender.session,
            "manifest_hash": manifest.hash,
            "timeout_s": 20.0,
        } | more

    def update(self, seed: int, version: str) -> dict[str, Any]:
        """A whole good update to the weights of `seed`."""
        tensors = reference(seed).weights.tensors
        manifest = make_manifest(tensors, self.layout)
        with Sender(tensors, manifest) as sender:
            self.begin(sender, manifest)
            answer = self.ok("/update_weights_from_zmq", self.pull_body(sender, manifest))
            self.ok("/end_weight_update", {"session": sender.session, "weight_version": version})
        self.seed = seed
        return answer
