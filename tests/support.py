"""Rigs shared by the tests: models, split sources, ranks in threads, servers fed by real ZMQ."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8bridge import LoopbackServer, ServerLayout, Shard, TensorMeta
from fp8bridge.errors import RankError
from fp8bridge.kernels import reference
from fp8bridge.ranks import Messages
from fp8bridge.receiver import Receiver

QUANT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_CONFIG = {"torch_dtype": "bfloat16", "quantization_config": QUANT}
FP8_LAYOUT = ServerLayout.from_hf_config(FP8_CONFIG)


def tiny_model(*, layers: int = 2, hidden: int = 192, ffn: int = 320, seed: int = 0) -> dict[str, torch.Tensor]:
    """A dense decoder's tensors in bf16, with sizes that are no multiples of 128."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * 0.05).bfloat16()

    model = {"model.embed_tokens.weight": rand(101, hidden), "model.norm.weight": rand(hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        model |= {
            p + "self_attn.q_proj.weight": rand(288, hidden),
            p + "self_attn.q_proj.bias": rand(288),
            p + "mlp.gate_proj.weight": rand(ffn, hidden),
            p + "mlp.up_proj.weight": rand(ffn, hidden),
            p + "mlp.down_proj.weight": rand(hidden, ffn),
            p + "input_layernorm.weight": rand(hidden),
        }
    return model


def expected_wire(
    model: dict[str, torch.Tensor], layout: ServerLayout = FP8_LAYOUT, rule: str = "sglang"
) -> dict[str, torch.Tensor]:
    """What a server must hold: the naive reference applied to the whole tensors."""
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if layout.decide(meta).action == "quantize":
            wire[name], wire[f"{name}_scale_inv"] = reference.quantize(tensor, rule, layout.block)
        else:
            wire[name] = tensor
    return wire


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


class SplitSource:
    """One rank's random rectangles of a model, each inside a larger parameter full of NaN.

    Every rank makes the same cuts from the same seed; a tensor may be whole on several ranks.
    """

    def __init__(self, model: dict[str, torch.Tensor], rank: int, size: int, seed: int = 0) -> None:
        self.hf_config: dict[str, Any] = FP8_CONFIG
        self._metas, self._shards, self._params = [], [], {}
        rng = random.Random(seed)
        for name, tensor in model.items():
            meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for box, ranks in _cuts(meta.matrix, size, rng):
                if rank in ranks:
                    self._add(meta, tensor.reshape(meta.matrix), box, rank, rng.randrange(3))
                else:
                    rng.randrange(3)

    def _add(self, meta: TensorMeta, matrix: torch.Tensor, box: tuple[int, ...], rank: int, margin: int) -> None:
        row, col, rows, cols = box
        param = torch.full((rows + 2 * margin, cols + margin), float("nan"), dtype=matrix.dtype)
        param[margin : margin + rows, :cols] = matrix[row : row + rows, col : col + cols]
        key = f"{meta.name}@{row},{col}"
        self._params[key] = param
        if meta not in self._metas:
            self._metas.append(meta)
        self._shards.append(Shard(meta.name, rank, key, rows, cols, margin, 0, row, col))

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        return self._metas, self._shards

    def read(self, param: str) -> torch.Tensor:
        return self._params[param]


def _cuts(matrix: tuple[int, int], size: int, rng: random.Random) -> list[tuple[tuple[int, ...], set[int]]]:
    """Bands of rows or columns with their ranks; sometimes whole and replicated."""
    rows, cols = matrix
    kind = rng.choice(["replicated", "rows", "cols"])
    if kind == "replicated":
        return [((0, 0, rows, cols), set(rng.sample(range(size), rng.randint(1, size))))]
    length = rows if kind == "rows" else cols
    step = rng.choice([1, 128])  # half of the tensors are cut where scale blocks are
    edges = sorted({0, length, *(rng.randrange(length) // step * step for _ in range(size))})
    found = []
    for start, end in itertools.pairwise(edges):
        box = (start, 0, end - start, cols) if kind == "rows" else (0, start, rows, end - start)
        found.append((box, {rng.randrange(size)}))
    return found


class ThreadRanks:
    """`ranks.Ranks` for threads of one process, sharing a `board`."""

    def __init__(self, rank: int, size: int, board: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier

    def _meet(self) -> None:
        try:
            self._barrier.wait(30)
        except threading.BrokenBarrierError as err:
            raise RankError("another rank is gone") from err

    def all_gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._meet()
        found = [self._board[r] for r in range(self.size)]
        self._meet()
        return found

    def exchange(self, sends: Messages, receives: Messages) -> None:
        for peer, tensor in sends:
            self._board[self.rank, peer] = tensor.clone()
        self._meet()
        for peer, tensor in receives:
            tensor.copy_(self._board.pop((peer, self.rank)))
        self._meet()

    def close(self) -> None:
        pass


def run_ranks(size: int, work: Callable[[int], Any], monkeypatch: Any) -> list[Any]:
    """`work(rank)` in one thread per rank, with `connect` using thread ranks; results or exceptions."""
    board: dict[Any, Any] = {}
    barrier = threading.Barrier(size)
    local = threading.local()
    results: list[Any] = [None] * size
    monkeypatch.setattr("fp8bridge.bridge.connect_ranks", lambda *, timeout_s: local.ranks)

    def run(rank: int) -> None:
        local.ranks = ThreadRanks(rank, size, board, barrier)
        try:
            results[rank] = work(rank)
        except Exception as err:  # noqa: BLE001 - the test looks at it
            results[rank] = err

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


class ZmqThreadServer(LoopbackServer):
    """A LoopbackServer whose buckets come through a real Receiver and real sockets."""

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        super().receive(addresses, token, manifest_hash, timeout_s=timeout_s)
        Receiver(self.weights, self.name, should_stop=lambda: self._token != token).pull(
            addresses, token, manifest_hash, timeout_s=timeout_s
        )


class Tap:
    """TCP lines in front of a sender that keep every byte that comes back through them.

    change(offset, data): what is passed on instead of `data`, which began `offset` bytes into its line;
    b"" passes nothing on, None cuts the line.
    """

    def __init__(self, change: Callable[[int, bytes], bytes | None] = lambda offset, data: data) -> None:
        self.bytes = bytearray()
        self._change = change

    def in_front_of(self, address: str) -> str:
        """The address to connect to instead."""
        scheme, mark, key = address.partition("#")
        host, port = scheme.removeprefix("tcp://").rsplit(":", 1)
        listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._run, args=(listening, (host, int(port))), daemon=True).start()
        return f"tcp://127.0.0.1:{listening.getsockname()[1]}{mark}{key}"

    def _run(self, listening: socket.socket, to: tuple[str, int]) -> None:
        while True:
            near, _ = listening.accept()
            threading.Thread(target=self._line, args=(near, to), daemon=True).start()

    def _line(self, near: socket.socket, to: tuple[str, int]) -> None:
        offset = 0
        with near, socket.create_connection(to) as far:
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            try:
                while data := far.recv(65536):
                    passed = self._change(offset, data)
                    offset += len(data)
                    self.bytes += data
                    if passed is None:
                        return
                    near.sendall(passed)
            except OSError:
                return

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while data := near.recv(65536):
                far.sendall(data)
        except OSError:
            return
