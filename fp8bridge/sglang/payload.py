"""The one place where a peer's pickle is spoken, because its API demands it: SGLang's and checkpoint-engine's.

`/update_weights_from_tensor` takes base64 of a pickled list of (name, tensor) for each TP rank, which the
server reads with an unpickler that allows a fixed list of names and dies of any other. Ours holds one
uint8 tensor with a msgpack message, made by the one name `torch.ByteTensor`: torch's own way of pickling a
tensor names whatever function has replaced `torch.storage._load_from_bytes`, and Megatron-Core replaces it.
checkpoint-engine's worker unpickles what it is sent over its socket: what shares a tensor of the trainer's
GPU memory, then for each bucket where its tensors lie in it.

Nothing that we receive is ever unpickled by us.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

from ..plan import Bucket

NAME = "fp8bridge"


def pack(message: bytes) -> str:
    """For one TP rank."""
    return base64.b64encode(pickle.dumps([(NAME, _Bytes(message))])).decode()


def unpack(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """In the server, after SGLang's unpickler; ValueError for what is not ours."""
    if len(named_tensors) != 1 or named_tensors[0][0] != NAME or named_tensors[0][1].dtype != torch.uint8:
        raise ValueError("not a message of fp8bridge")
    return named_tensors[0][1].cpu().numpy().tobytes()


def pack_memory(memory: torch.Tensor) -> bytes:
    """A flat uint8 CUDA tensor, for a process on the same GPU. It must outlive that process's use of it."""
    from torch.multiprocessing import reductions

    torch_reductions: Any = reductions
    reduce = getattr(torch_reductions, "_reduce_tensor_original", torch_reductions.reduce_tensor)
    return pickle.dumps(reduce(memory))


def pack_places(bucket: Bucket, offset: int) -> bytes:
    """Where the tensors of a bucket are that begins at `offset` of the shared memory."""
    return pickle.dumps(
        [
            {"name": e.name, "shape": tuple(e.shape), "dtype": getattr(torch, e.dtype), "offset": offset + e.offset}
            for e in bucket.entries
            if e.nbytes
        ]
    )


def pack_done() -> bytes:
    return pickle.dumps(None)


def pack_failure(reason: str) -> bytes:
    """Makes the worker give up."""
    return pickle.dumps(RuntimeError(reason))


class _Bytes:
    """Unpickled as a uint8 tensor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, (list(self._data),)
