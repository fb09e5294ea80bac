"""The one place where SGLang's own serialization is spoken, because its API demands it.

`/update_weights_from_tensor` takes base64 of a pickled list of (name, tensor) for each TP rank, which the
server reads with an unpickler that allows a fixed list of names and dies of any other. Ours holds one
uint8 tensor with a msgpack message, made by the one name `torch.ByteTensor`: torch's own way of pickling a
tensor names whatever function has replaced `torch.storage._load_from_bytes`, and Megatron-Core replaces it.
Nothing that we receive is ever unpickled by us.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

NAME = "fp8bridge"


def pack(message: bytes) -> str:
    """For one TP rank."""
    return base64.b64encode(pickle.dumps([(NAME, _Bytes(message))])).decode()


def unpack(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """In the server, after SGLang's unpickler; ValueError for what is not ours."""
    if len(named_tensors) != 1 or named_tensors[0][0] != NAME or named_tensors[0][1].dtype != torch.uint8:
        raise ValueError("not a message of fp8bridge")
    return named_tensors[0][1].cpu().numpy().tobytes()


class _Bytes:
    """Unpickled as a uint8 tensor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, (list(self._data),)
