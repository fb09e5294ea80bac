"""A whole model under Hugging Face names on every rank: the smallest adapter, and an example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8bridge.errors import UnsupportedModelError
from fp8bridge.types import Shard, TensorMeta

from .hf_config import load_hf_config


class StateDictSource:
    """A module or a dict of tensors; every rank holds all of it. A `WeightSource`.

    rank: by default torch.distributed's rank, or 0 without it. The tensors stay the caller's.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        hf_config: Mapping[str, Any] | str | Path,
        *,
        rank: int | None = None,
    ) -> None:
        self.hf_config = load_hf_config(hf_config)
        self._model = model
        self._rank = rank if rank is not None else _world_rank()
        self.before_read()

    def before_read(self) -> None:
        """Take the tensors anew, once per update: a trainer may have replaced them."""
        tensors = self._model.state_dict() if isinstance(self._model, nn.Module) else self._model
        # torch.compile wraps modules as `_orig_mod`; tied models send the embedding only.
        named = {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in tensors.items()}
        if self.hf_config.get("tie_word_embeddings"):
            named.pop("lm_head.weight", None)
        for name, tensor in named.items():
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                raise UnsupportedModelError(
                    f"{name} is a {type(tensor).__name__}; give full plain tensors (for a DTensor, its full_tensor())",
                    tensor=name,
                )
        self._tensors = named

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        metas = [
            TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        ]
        return metas, [Shard(meta.name, self._rank, meta.name, *meta.matrix) for meta in metas]

    def read(self, param: str) -> torch.Tensor:
        tensor = self._tensors[param]
        return tensor.view(TensorMeta(param, tuple(tensor.shape), "uint8").matrix)


def _world_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
