"""A trainer's parameters without a trainer: a model's Megatron parameters, filled with random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..adapters.megatron_layout import megatron_shards
from ..types import Shard, TensorMeta

STD = 0.02
"""Of the normal numbers; weights of trained models have about this."""


class SyntheticSource:
    """The parameters of one rank (tp 1) as Megatron names and fuses them. A `WeightSource`.

    only: take the tensors whose Hugging Face name holds this text ("" takes all).
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        *,
        device: torch.device,
        only: str = "",
        dtype: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        self.hf_config = hf_config
        metas, shards = megatron_shards(hf_config, tp=1, dtype=dtype)
        self._metas = [meta for meta in metas if only in meta.name]
        self._shards = [shard for shard in shards if only in shard.tensor]
        generator = torch.Generator(device=device).manual_seed(seed)
        dtypes = {meta.name: getattr(torch, meta.dtype) for meta in self._metas}
        self._params: dict[str, torch.Tensor] = {}
        for param, (rows, cols, name) in _extents(self._shards).items():
            tensor = torch.empty(rows, cols, dtype=dtypes[name], device=device)
            self._params[param] = tensor.normal_(0, STD, generator=generator)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._params.values())

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        return self._metas, self._shards

    def read(self, param: str) -> torch.Tensor:
        return self._params[param]

    def live(self, params: Sequence[str]) -> list[torch.Tensor | None]:
        return list(map(self._params.get, params))

    def step(self) -> None:
        """Change a little, as an optimizer would; the next update has other bytes."""
        for tensor in self._params.values():
            tensor[:1].mul_(-1)

    def whole(self) -> list[tuple[str, torch.Tensor]]:
        """Every Hugging Face tensor in BF16, cut out of the fused parameters, as an exporter yields them."""
        pieces: dict[str, list[Shard]] = {meta.name: [] for meta in self._metas}
        for shard in self._shards:
            pieces[shard.tensor].append(shard)
        found = []
        for meta in self._metas:
            parts = [
                self._params[s.param][s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols]
                for s in sorted(pieces[meta.name], key=lambda s: s.dst_row)
            ]
            found.append((meta.name, (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(meta.shape)))
        return found


class ManySmall(SyntheticSource):
    """`count` equal matrices, for the cost of a tensor; names as of experts, 128 a layer."""

    def __init__(self, count: int, rows: int, cols: int, *, device: torch.device) -> None:
        names = [f"model.layers.{i // 128}.mlp.experts.{i % 128}.up_proj.weight" for i in range(count)]
        self.hf_config = {"torch_dtype": "bfloat16"}
        self._metas = [TensorMeta(name, (rows, cols), "bfloat16") for name in names]
        self._shards = [Shard(name, 0, name, rows, cols) for name in names]
        memory = torch.empty(count, rows, cols, dtype=torch.bfloat16, device=device).normal_(0, STD)
        self._params = dict(zip(names, memory.unbind(0), strict=True))


def _extents(shards: list[Shard]) -> dict[str, tuple[int, int, str]]:
    """Parameter -> (rows, columns, a tensor in it)."""
    found: dict[str, tuple[int, int, str]] = {}
    for s in shards:
        rows, cols, _ = found.get(s.param, (0, 0, ""))
        found[s.param] = (max(rows, s.src_row + s.rows), max(cols, s.src_col + s.cols), s.tensor)
    return found
