"""Shards of all trainer ranks to the rank that sends them, one round of buckets at a time.

The owner of a bucket gets one message from each rank that holds a part of it; a tensor that lies
whole on its owner is not copied at all.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from .errors import NonFiniteError, PlanError
from .plan import Item, Plan
from .ranks import Ranks
from .types import ITEMSIZE, Shard, WeightSource

_ALIGN = 256
"""Staged matrices start on multiples of this, so that kernels may load 16 bytes at a time."""


class Gather:
    """This rank's part of every round. Buffers are made on first use and kept between updates."""

    def __init__(self, plan: Plan, ranks: Ranks, source: WeightSource) -> None:
        self._plan = plan
        self._ranks = ranks
        self._source = source
        self._items = plan.items_by_bucket()
        self._scratch: dict[str, torch.Tensor] = {}
        self._device = torch.device("cpu")
        self._mine = [s for item in plan.items for s in item.shards if s.rank == ranks.rank]
        self._planned = {s.param: _form(source.read(s.param)) for s in self._mine}

    @property
    def extra_nbytes(self) -> int:
        """Memory held beside the trainer's parameters."""
        return sum(t.numel() for t in self._scratch.values())

    def check_finite(self) -> None:
        """Raise NonFiniteError naming the first tensor with NaN or Inf in this rank's shards, PlanError for a
        parameter that is not of the shape and dtype that the plan was made for.

        Only what would be sent is looked at: padding rows of a vocabulary may hold anything. Comes
        before the rounds of every update, and learns on which device the parameters are.
        """
        flags = []
        for shard in self._mine:
            box = self._box(shard)
            self._device = box.device
            low, high = torch.aminmax(box)
            flags.append(torch.isfinite(low) & torch.isfinite(high))
        if not flags:
            return
        for shard, finite in zip(self._mine, torch.stack(flags).tolist(), strict=True):
            if not finite:
                count = int((~torch.isfinite(self._box(shard).float())).sum())
                raise NonFiniteError(
                    f"{shard.tensor} has {count} NaN or Inf values (parameter {shard.param} on trainer rank "
                    f"{shard.rank}); nothing was sent. Skip this step, or go back to a good checkpoint",
                    tensor=shard.tensor,
                )

    def round(self, index: int) -> tuple[int | None, list[torch.Tensor]]:
        """Move round `index`; collective. This rank's bucket, and the 2-D matrix of each of its items.

        The matrices are views of parameters or of scratch memory, valid until the next round. An
        error in reading this rank's own parameters is raised after the messages were exchanged
        (zeros, in an update that is lost anyway), so that no other rank is left waiting.
        """
        rank = self._ranks.rank
        mine: int | None = None
        outgoing: dict[int, list[tuple[int, Shard]]] = defaultdict(list)
        incoming: dict[int, list[tuple[int, Shard]]] = defaultdict(list)
        for bucket_index in self._plan.rounds[index]:
            owner = self._plan.manifest.buckets[bucket_index].owner
            for position, item in enumerate(self._items[bucket_index]):
                itemsize = ITEMSIZE[item.meta.dtype]
                for shard in item.shards:
                    if owner == rank and shard.rank != rank:
                        incoming[shard.rank].append((position, shard))
                    elif owner != rank and shard.rank == rank:
                        outgoing[owner].append((itemsize, shard))
            if owner == rank:
                mine = bucket_index
        items = self._items[mine] if mine is not None else []
        sends = self._messages("sending", {p: sum(n * s.rows * s.cols for n, s in v) for p, v in outgoing.items()})
        receives = self._messages(
            "receiving",
            {p: sum(ITEMSIZE[items[i].meta.dtype] * s.rows * s.cols for i, s in v) for p, v in incoming.items()},
        )
        error: Exception | None = None
        matrices: list[torch.Tensor] = []
        try:
            matrices = self._matrices(items)
            for peer, message in sends.items():
                _pack_shards(message, [self._box(s) for _, s in outgoing[peer]])
        except Exception as err:  # noqa: BLE001 - raised again once the other ranks have their messages
            error = err
            for message in sends.values():
                message.zero_()  # nobody else may trip over left-over bytes and take the blame
        self._ranks.exchange(sorted(sends.items()), sorted(receives.items()))
        if error is not None:
            raise error
        for peer, message in receives.items():
            _unpack_shards(message, incoming[peer], matrices)
        return mine, matrices

    def _matrices(self, items: list[Item]) -> list[torch.Tensor]:
        """Where each item will stand: the live parameter, or staging memory with local shards in it."""
        direct = {i for i, item in enumerate(items) if self._is_direct(item)}
        sizes = [0 if i in direct else _aligned(item.meta.nbytes) for i, item in enumerate(items)]
        staging = self._memory("staging", sum(sizes))
        matrices, end = [], 0
        for i, item in enumerate(items):
            if i in direct:
                matrices.append(self._box(item.shards[0]))
                continue
            dtype = getattr(torch, item.meta.dtype)
            matrix = staging[end : end + item.meta.nbytes].view(dtype).view(item.meta.matrix)
            for shard in item.shards:
                if shard.rank == self._ranks.rank:
                    _place(matrix, shard, self._box(shard))
            matrices.append(matrix)
            end += sizes[i]
        return matrices

    def _messages(self, name: str, nbytes: dict[int, int]) -> dict[int, torch.Tensor]:
        """One flat uint8 message per peer, side by side in kept memory."""
        memory, end, found = self._memory(name, sum(_aligned(n) for n in nbytes.values())), 0, {}
        for peer, size in nbytes.items():
            found[peer] = memory[end : end + size]
            end += _aligned(size)
        return found

    def _is_direct(self, item: Item) -> bool:
        shard = item.shards[0] if len(item.shards) == 1 else None
        return shard is not None and shard.rank == self._ranks.rank and self._box(shard).stride(-1) == 1

    def _box(self, shard: Shard) -> torch.Tensor:
        """The shard's rectangle of the live parameter (a view)."""
        matrix = self._source.read(shard.param)
        if _form(matrix) != self._planned[shard.param]:
            raise PlanError(
                f"parameter {shard.param} on rank {shard.rank} is now {_form(matrix)}, the plan of {shard.tensor} was "
                f"made for {self._planned[shard.param]}; the model changed: connect again",
                tensor=shard.tensor,
            )
        return matrix[shard.src_row : shard.src_row + shard.rows, shard.src_col : shard.src_col + shard.cols]

    def _memory(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            self._scratch[name] = held = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return held


def _form(matrix: torch.Tensor) -> str:
    return f"{str(matrix.dtype).removeprefix('torch.')} {list(matrix.shape)}"


def _place(matrix: torch.Tensor, shard: Shard, box: torch.Tensor) -> None:
    rows, cols = slice(shard.dst_row, shard.dst_row + shard.rows), slice(shard.dst_col, shard.dst_col + shard.cols)
    matrix[rows, cols].copy_(box)


def _unpack_shards(message: torch.Tensor, parts: list[tuple[int, Shard]], matrices: list[torch.Tensor]) -> None:
    """Shards from one peer, in plan order, to their places in matrices[i]."""
    offset = 0
    for i, shard in parts:
        dtype = matrices[i].dtype
        nbytes = shard.rows * shard.cols * dtype.itemsize
        raw = message[offset : offset + nbytes]
        # A view needs an aligned start; only a mix of item sizes in one message makes another.
        box = (raw.clone() if offset % dtype.itemsize else raw).view(dtype).view(shard.rows, shard.cols)
        _place(matrices[i], shard, box)
        offset += nbytes


def _pack_shards(message: torch.Tensor, boxes: list[torch.Tensor]) -> None:
    end = 0
    for box in boxes:
        raw = message[end : end + box.nbytes]
        if end % box.element_size() == 0:
            raw.view(box.dtype).view(box.shape).copy_(box)
        else:
            raw.copy_(box.contiguous().view(torch.uint8).view(-1))
        end += box.nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
