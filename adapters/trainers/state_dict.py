"""Models under Hugging Face names, plain or sharded by FSDP2: the smallest adapter, and an example."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8bridge.errors import BridgeError, ConfigError, UnsupportedModelError
from fp8bridge.types import Shard, TensorMeta

from .hf_config import load_hf_config

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

RECONNECT = "a model that changed needs a new bridge"


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
        named = {_plain_name(name): tensor for name, tensor in tensors.items()}
        if self.hf_config.get("tie_word_embeddings"):
            named.pop("lm_head.weight", None)  # tied models send the embedding only
        for name, tensor in named.items():
            if not _is_dtensor(tensor):
                _require_whole(name, tensor)
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


class HandedSource:
    """Whole tensors that the trainer hands over before each update (`take`). A `WeightSource`.

    Every rank is handed all of them, in the same order, and keeps a copy of its share: about the
    model's bytes divided by the ranks. So nothing crosses between ranks, all of them send, and the
    trainer may reuse its buffers at once.

    alone: only this rank makes the bridge, whatever torch.distributed has; it keeps everything.
    """

    def __init__(self, hf_config: Mapping[str, Any] | str | Path, *, alone: bool = False) -> None:
        self.hf_config = load_hf_config(hf_config)
        self.alone = alone
        self._rank, self._size = (0, 1) if alone else (_world_rank(), _world_size())
        self._metas: dict[str, TensorMeta] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's share, tensor by tensor. Raises ConfigError if they are other tensors than the first
        time, UnsupportedModelError for one that is not whole.

        `tensors` is read to its end even then: on other ranks it may be collective.
        """
        found: dict[str, TensorMeta] = {}
        held = [0] * self._size
        error: BridgeError | None = None
        for name, tensor in tensors:
            if error is not None:
                continue
            try:
                self._take_one(_plain_name(name), tensor, found, held)
            except BridgeError as err:
                error = err
        missing = sorted(self._metas.keys() - found.keys())
        if missing and error is None:
            error = ConfigError(f"{len(missing)} tensors are missing: {', '.join(missing[:5])}; {RECONNECT}")
        if error is not None:
            raise error
        self._metas = found

    def _take_one(self, name: str, tensor: torch.Tensor, found: dict[str, TensorMeta], held: list[int]) -> None:
        if self.hf_config.get("tie_word_embeddings") and name == "lm_head.weight":
            return
        _require_whole(name, tensor)
        meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if name in found or (self._metas and self._metas.get(name) != meta):
            before = "was given already" if name in found else f"was {_in_words(self._metas.get(name))}"
            raise ConfigError(f"{name} is {_in_words(meta)}, {before}; {RECONNECT}", tensor=name)
        found[name] = meta
        keeper = held.index(min(held))
        held[keeper] += meta.nbytes
        if keeper == self._rank:
            self._keep(name, tensor.detach())

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        metas = [self._metas[name] for name in self._kept]
        return metas, [Shard(m.name, self._rank, m.name, *m.matrix) for m in metas]

    def live(self, params: Sequence[str]) -> list[torch.Tensor | None]:
        return list(map(self._kept.get, params))

    def read(self, param: str) -> torch.Tensor:
        return self._kept[param].reshape(self._metas[param].matrix)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._kept:
            self._kept[name].copy_(tensor)
        else:
            self._kept[name] = tensor.clone(memory_format=torch.contiguous_format)


class ExportSource(HandedSource):
    """What an exporter yields, such as Megatron-Bridge's or mbridge's: for families without a table.

    export: called on every rank once per update; an iterable of (Hugging Face name, whole tensor), the
        same ones in the same order on every rank.
    """

    def __init__(
        self,
        export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        hf_config: Mapping[str, Any] | str | Path,
        *,
        alone: bool = False,
    ) -> None:
        super().__init__(hf_config, alone=alone)
        self._export = export

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        self.before_read()
        return super().describe()

    def before_read(self) -> None:
        """Run the exporter anew. Collective if the exporter is."""
        self.take(self._export())


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


def _plain_name(name: str) -> str:
    """torch.compile wraps modules as `_orig_mod`."""
    return name.replace("_orig_mod.", "")


def _require_whole(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        hint = "give it whole (full_tensor())" if _is_dtensor(tensor) else "give plain tensors or DTensors"
        raise UnsupportedModelError(f"{name} is a {type(tensor).__name__}; {hint}", tensor=name)


def _in_words(meta: TensorMeta | None) -> str:
    return f"{meta.dtype} {list(meta.shape)}" if meta else "not there"


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def _world_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
