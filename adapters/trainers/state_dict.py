"""Models under Hugging Face names, plain or sharded by FSDP2: the smallest adapter, and an example."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8bridge.errors import UnsupportedModelError
from fp8bridge.types import Shard, TensorMeta

from .hf_config import load_hf_config

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class StateDictSource:
    """A module or a dict of tensors; every rank holds all of it, or its slice as DTensors. A `WeightSource`.

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
        self._given: tuple[list[str], list[torch.Tensor]] = ([], [])
        self._tensors: dict[str, torch.Tensor] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self.before_read()

    def before_read(self) -> None:
        """Take the tensors anew, once per update: a trainer may have replaced them."""
        tensors = self._model.state_dict() if isinstance(self._model, nn.Module) else self._model
        given = (list(tensors), list(tensors.values()))
        if given[0] == self._given[0] and all(map(operator.is_, given[1], self._given[1])):
            return
        self._given = given
        # torch.compile wraps modules as `_orig_mod`; tied models send the embedding only.
        named = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
        if self.hf_config.get("tie_word_embeddings"):
            named.pop("lm_head.weight", None)
        for name, tensor in named.items():
            if type(tensor) not in (torch.Tensor, nn.Parameter) and not _is_dtensor(tensor):
                raise UnsupportedModelError(
                    f"{name} is a {type(tensor).__name__}; give plain tensors or DTensors", tensor=name
                )
        self._tensors = named
        self._plain = {name: tensor for name, tensor in named.items() if not _is_dtensor(tensor)}

    def live(self, params: Sequence[str]) -> list[torch.Tensor | None]:
        return list(map(self._plain.get, params))

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        metas, shards = [], []
        for name, tensor in self._tensors.items():
            meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            metas.append(meta)
            rows, cols, row, col = _rectangle(name, tensor)
            shards.append(Shard(name, self._rank, name, rows, cols, dst_row=row, dst_col=col))
        return metas, shards

    def read(self, param: str) -> torch.Tensor:
        tensor: Any = self._tensors[param]
        local: torch.Tensor = (tensor.to_local() if _is_dtensor(tensor) else tensor).detach()
        return local.reshape(TensorMeta(param, tuple(local.shape), "uint8").matrix)


class ExportSource(StateDictSource):
    """What an exporter yields, such as Megatron-Bridge's or mbridge's: for families without a table.

    export: called on every rank once per update; an iterable of (Hugging Face name, whole tensor), the
        same names on every rank. Its tensors are kept until the next update, so each rank needs memory
        for the whole model: the price of an exporter that gathers everything everywhere.
    """

    def __init__(
        self,
        export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        hf_config: Mapping[str, Any] | str | Path,
        *,
        rank: int | None = None,
    ) -> None:
        self._export = export
        super().__init__({}, hf_config, rank=rank)

    def before_read(self) -> None:
        """Run the exporter anew. Collective if the exporter is."""
        self._model = dict(self._export())
        super().before_read()


def _rectangle(name: str, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, columns, first row, first column) of this rank's part, in the matrix view of the whole."""
    whole = TensorMeta(name, tuple(tensor.shape), "uint8").matrix
    if not _is_dtensor(tensor):
        return (*whole, 0, 0)
    shape, offset = _local_box(name, tensor)
    if len(shape) == 2:
        return (shape[0], shape[1], offset[0], offset[1])
    if shape[1:] != tuple(tensor.shape[1:]):
        raise UnsupportedModelError(
            f"{name} of shape {list(tensor.shape)} is sharded in a dimension after the first; only matrices may be. "
            "Give it whole (full_tensor())",
            tensor=name,
        )
    return (shape[0] if shape else 1, whole[1], offset[0] if offset else 0, 0)


def _local_box(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of the local part. A sum that is still pending is refused."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held: DTensor = tensor
    if any(isinstance(p, Partial) for p in held.placements):
        raise UnsupportedModelError(f"{name} is a DTensor whose sum is pending; redistribute it first", tensor=name)
    shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    return tuple(shape), tuple(offset)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def _world_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
