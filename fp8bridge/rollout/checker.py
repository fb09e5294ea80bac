"""`/weights_checker`: what the server holds, hashed, remembered, scrambled and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels import dequantize
from ..staging import StagedWeights, tensor_checksum
from .answers import Refused
from .weights import SCALE_SUFFIX


class WeightsChecker:
    """Reads `weights.tensors` once per call, so an update in between does not mix versions."""

    def __init__(self, weights: StagedWeights) -> None:
        self._weights = weights
        self._snapshot: dict[str, torch.Tensor] | None = None

    def checksums(self, skip: Sequence[str]) -> dict[str, Any]:
        """SGLang's `ranks` (hash of each dequantized weight) and our `tensors` (of the raw bytes)."""
        tensors = self._weights.tensors
        hashes = {
            name: _sha(self._dequantized(tensors, name))
            for name in tensors
            if not name.endswith(SCALE_SUFFIX) and not _matches(name, skip)
        }
        digest = hashlib.sha256()
        for name in sorted(hashes):
            digest.update(name.encode())
            digest.update(hashes[name].encode())
        rank = {
            "checksums": hashes,
            "per_gpu_checksum": digest.hexdigest(),
            "parallelism_info": [_PARALLELISM],
        }
        return {
            "ranks": [rank],
            "per_engine_checksum": hashlib.sha256(digest.hexdigest().encode()).hexdigest(),
            "tensors": {name: f"{tensor_checksum(tensor):016x}" for name, tensor in tensors.items()},
        }

    def snapshot(self) -> None:
        # No copy: nothing here writes into a tensor, updates replace them.
        self._snapshot = dict(self._weights.tensors)

    def reset(self, skip: Sequence[str]) -> None:
        """Random values everywhere (for the engine's thread). Proves that a sync brings everything back."""
        self._weights.tensors = {
            name: tensor if _matches(name, skip) else torch.rand(tensor.shape).to(tensor.dtype)
            for name, tensor in self._weights.tensors.items()
        }

    def compare(self, skip: Sequence[str]) -> None:
        """Raises Refused unless every tensor equals the snapshot, which is then dropped."""
        if self._snapshot is None:
            raise Refused("there is no snapshot to compare with; call action 'snapshot' first")
        wrong = [
            _difference(name, expected, self._weights.tensors[name])
            for name, expected in self._snapshot.items()
            if not _matches(name, skip) and not _same_bytes(expected, self._weights.tensors[name])
        ]
        if wrong:
            raise Refused("check tensor equality failed:\n" + "\n".join(wrong))
        self._snapshot = None

    def _dequantized(self, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        scale_inv = tensors.get(name + SCALE_SUFFIX)
        if scale_inv is None or self._weights.layout.block is None:
            return tensors[name]
        dtype = getattr(torch, self._weights.layout.dtype)
        return dequantize(tensors[name], scale_inv, self._weights.layout.block, dtype)


_PARALLELISM = {
    "role": "target",
    "tp_rank": 0,
    "tp_size": 1,
    "dp_rank": 0,
    "dp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "rank": 0,
    "size": 1,
}


def _matches(name: str, skip: Sequence[str]) -> bool:
    return any(pattern in name for pattern in skip)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_raw(a), _raw(b))


def _sha(tensor: torch.Tensor) -> str:
    """SGLang's hash of a CPU tensor: the first 8 bytes of the sha256 of its bytes."""
    return hashlib.sha256(_raw(tensor).numpy().data).hexdigest()[:16]


def _difference(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str:
    gap = (expected.float() - actual.float()).abs()
    return f"name={name} max_abs_err={float(gap.max())} mean_abs_err={float(gap.mean())}"
