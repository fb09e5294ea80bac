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

    @property
    def extra_nbytes(self) -> int:
        """Memory held beside the trainer's parameters."""
        return sum(t.numel() for t in self._scratch.values())

    def check_finite(self) -> None:
        """Raise NonFiniteError naming the first tensor with NaN or Inf in this rank's shards.

        Only what would be sent is looked at: padding rows of a vocabulary may hold anything.
        """
        shards = [s for item in self._plan.items for s in item.shards if s.rank == self._ranks.rank]
        flags = []
        for shard in shards:
            low, high = torch.aminmax(self._box(shard).float() if _is_fp8(self._source, shard) else self._box(shard))
            flags.append(torch.isfinite(low) & torch.isfinite(high))
        if not flags:
            return
        for shard, finite in zip(shards, torch.stack(flags).tolist(), strict=True):
            if not finite:
                count = int((~torch.isfinite(self._box(shard).float())).sum())
                raise NonFiniteError(
                    f"{shard.tensor} has {count} NaN or Inf values (parameter {shard.param} on trainer rank "
                    f"{shard.rank}); nothing was sent. Skip this step, or go back to a good checkpoint",
                    tensor=shard.tensor,
                )

    def round(self, index: int) -> tuple[int | None, list[torch.Tensor]]:
        """Move round `index`; collective. This rank's bucket, and the 2-D matrix of each of its items.

        The matrices are views of parameters or of scratch memory, valid until the next round.
        """
        rank = self._ranks.rank
        mine: int | None = None
        outgoing: dict[int, list[Shard]] = defaultdict(list)
        incoming: dict[int, list[tuple[int, Shard]]] = defaultdict(list)
        for bucket_index in self._plan.rounds[index]:
            owner = self._plan.manifest.buckets[bucket_index].owner
            for position, item in enumerate(self._items[bucket_index]):
                for shard in item.shards:
                    if owner == rank and shard.rank != rank:
                        incoming[shard.rank].append((position, shard))
                    elif owner != rank and shard.rank == rank:
                        outgoing[owner].append(shard)
            if owner == rank:
                mine = bucket_index
        items = self._items[mine] if mine is not None else []
        self._exchange(outgoing, incoming, items, matrices := self._matrices(items))
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

    def _exchange(
        self,
        outgoing: dict[int, list[Shard]],
        incoming: dict[int, list[tuple[int, Shard]]],
        items: list[Item],
        matrices: list[torch.Tensor],
    ) -> None:
        sends = []
        sizes = {peer: sum(self._box(s).nbytes for s in shards) for peer, shards in outgoing.items()}
        memory = self._memory("sending", sum(_aligned(n) for n in sizes.values()))
        end = 0
        for peer in sorted(outgoing):
            message = memory[end : end + sizes[peer]]
            _pack_shards(message, [self._box(s) for s in outgoing[peer]])
            sends.append((peer, message))
            end += _aligned(sizes[peer])
        receives, sizes = [], {
            peer: sum(s.rows * s.cols * ITEMSIZE[items[i].meta.dtype] for i, s in parts)
            for peer, parts in incoming.items()
        }
        memory = self._memory("receiving", sum(_aligned(n) for n in sizes.values()))
        end = 0
        for peer in sorted(incoming):
            receives.append((peer, memory[end : end + sizes[peer]]))
            end += _aligned(sizes[peer])
        self._ranks.exchange(sends, receives)
        for peer, message in receives:
            offset = 0
            for i, shard in incoming[peer]:
                nbytes = shard.rows * shard.cols * ITEMSIZE[items[i].meta.dtype]
                raw = message[offset : offset + nbytes].clone() if offset % 4 else message[offset : offset + nbytes]
                _place(matrices[i], shard, raw.view(matrices[i].dtype).view(shard.rows, shard.cols))
                offset += nbytes

    def _is_direct(self, item: Item) -> bool:
        shard = item.shards[0] if len(item.shards) == 1 else None
        return shard is not None and shard.rank == self._ranks.rank and self._box(shard).stride(-1) == 1

    def _box(self, shard: Shard) -> torch.Tensor:
        """The shard's rectangle of the live parameter (a view)."""
        matrix = self._source.read(shard.param)
        box = matrix[shard.src_row : shard.src_row + shard.rows, shard.src_col : shard.src_col + shard.cols]
        if tuple(box.shape) != (shard.rows, shard.cols):
            raise PlanError(
                f"parameter {shard.param} on rank {shard.rank} is now {list(matrix.shape)}, which does not hold the "
                f"shard of {shard.tensor} that the plan knows; the model changed: connect again",
                tensor=shard.tensor,
            )
        return box

    def _memory(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            self._scratch[name] = held = torch.empty(nbytes, dtype=torch.uint8, device=self._device())
        return held

    def _device(self) -> torch.device:
        for item in self._plan.items:
            for shard in item.shards:
                if shard.rank == self._ranks.rank:
                    return self._source.read(shard.param).device
        return torch.device("cpu")


def _place(matrix: torch.Tensor, shard: Shard, box: torch.Tensor) -> None:
    rows, cols = slice(shard.dst_row, shard.dst_row + shard.rows), slice(shard.dst_col, shard.dst_col + shard.cols)
    matrix[rows, cols].copy_(box)


def _pack_shards(message: torch.Tensor, boxes: list[torch.Tensor]) -> None:
    end = 0
    for box in boxes:
        raw = message[end : end + box.nbytes]
        if end % box.element_size() == 0:
            raw.view(box.dtype).view(box.shape).copy_(box)
        else:
            raw.copy_(box.contiguous().view(torch.uint8).view(-1))
        end += box.nbytes


def _is_fp8(source: WeightSource, shard: Shard) -> bool:
    return source.read(shard.param).element_size() == 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
