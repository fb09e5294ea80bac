"""The one place where SGLang's own serialization is spoken, because its API demands it.

`/update_weights_from_tensor` takes base64 of a pickled list of (name, tensor) for each TP rank, which the
server reads with an unpickler that allows a fixed list of names. Ours holds one uint8 tensor with a
msgpack message; nothing that we receive is ever unpickled.
"""

from __future__ import annotations

import base64
import pickle

import torch

NAME = "fp8bridge"


def pack(message: bytes) -> str:
    """For one TP rank."""
    tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(NAME, tensor)])).decode()


def unpack(named_tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """In the server, after SGLang's unpickler; ValueError for what is not ours."""
    if len(named_tensors) != 1 or named_tensors[0][0] != NAME or named_tensors[0][1].dtype != torch.uint8:
        raise ValueError("not a message of fp8bridge")
    return named_tensors[0][1].cpu().numpy().tobytes()
