"""Shards of all trainer ranks to the rank that sends them, one round of buckets at a time.

The owner of a bucket gets one message from each rank that holds a part of it. Where shard edges fall
on scale blocks (`Item.at_source`), a rank quantizes its own shards into the message and the owner only
puts codes and scales in their places: half the bytes, and the work is shared. Everything a rank sends
in a round is one launch, everything it places another. A tensor that lies whole on its owner is not
touched here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from .errors import LayoutError, NonFiniteError, PlanError
from .kernels import PackItem, PackTable, UnpackItem, UnpackTable, quantize_pack, unpack_scatter
from .layout import SCALE_SUFFIX
from .plan import Bucket, Item, Plan
from .ranks import Ranks
from .types import ITEMSIZE, Shard, WeightSource

_ALIGN = 256
"""Messages and matrices start on multiples of this, their parts on multiples of 16: wide loads."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard and where its bytes stand in memory: codes (or plain bytes) and, if quantized, scales."""

    item: Item
    shard: Shard
    offset: int
    scale_offset: int | None


@dataclass(slots=True)
class _Round:
    """What this rank does in one round; made once.

    bucket: the one this rank fills, if any. outgoing, incoming: peer -> its parts. own: shards that this
    rank quantizes for itself. sent, received: peer -> byte range of its message in the memory.
    staged: item position -> offset of its matrix in staging memory.
    """

    bucket: Bucket | None
    outgoing: dict[int, list[_Part]] = field(default_factory=dict)
    own: list[_Part] = field(default_factory=list)
    incoming: dict[int, list[_Part]] = field(default_factory=dict)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: dict[int, tuple[int, int]] = field(default_factory=dict)
    sending_nbytes: int = 0
    receiving_nbytes: int = 0
    staged: dict[int, int] = field(default_factory=dict)
    staging_nbytes: int = 0


class Gather:
    """This rank's part of every round. Buffers are made on first use and kept between updates."""

    def __init__(self, plan: Plan, ranks: Ranks, source: WeightSource) -> None:
        self._plan = plan
        self._ranks = ranks
        self._source = source
        self._items = plan.items_by_bucket()
        self._scratch: dict[str, torch.Tensor] = {}
        self._rounds: dict[int, _Round] = {}
        self._packs: dict[int, PackTable] = {}
        self._unpacks: dict[tuple[int, str], UnpackTable] = {}
        self.device = torch.device("cpu")
        self._mine = [(i, s) for i in plan.items for s in i.shards if s.rank == ranks.rank]
        self._planned = {s.param: _form(source.read(s.param)) for _, s in self._mine}

    @property
    def extra_nbytes(self) -> int:
        """Memory held beside the trainer's parameters and the buckets."""
        return sum(t.numel() for t in self._scratch.values())

    def bucket(self, index: int) -> Bucket | None:
        """The bucket that this rank fills in round `index`."""
        return self._round(index).bucket

    def check_finite(self) -> None:
        """Raise NonFiniteError naming the first tensor with NaN or Inf in this rank's shards, PlanError for a
        parameter that is not of the shape and dtype that the plan was made for.

        Only what would be sent is looked at: padding rows of a vocabulary may hold anything. Comes
        before the rounds of every update, and learns on which device the parameters are.
        """
        flags = []
        for item, shard in self._mine:
            box = self._box(shard)
            self.device = box.device
            flags.append(_is_finite(box))
            if item.action == "pass_through" and self._plan.layout.scale_format == "ue8m0":
                _check_power_of_two(item, box)
        if not flags:
            return
        for (_, shard), finite in zip(self._mine, torch.stack(flags).tolist(), strict=True):
            if not finite:
                count = int((~torch.isfinite(self._box(shard).float())).sum())
                raise NonFiniteError(
                    f"{shard.tensor} has {count} NaN or Inf values (parameter {shard.param} on trainer rank "
                    f"{shard.rank}); nothing was sent. Skip this step, or go back to a good checkpoint",
                    tensor=shard.tensor,
                )

    def round(self, index: int, memory: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Move round `index`; collective. Fills what other ranks quantized into `memory`, this rank's bucket.

        Returns, for each item of that bucket, its 2-D matrix, or None where codes and scales are in place
        already. Matrices are views of parameters or of scratch memory, valid until the next round. An
        error in reading this rank's own parameters is raised after the messages were exchanged (zeros,
        in an update that is lost anyway), so that no other rank is left waiting.
        """
        plan = self._round(index)
        sending = self._memory("sending", plan.sending_nbytes)
        receiving = self._memory("receiving", plan.receiving_nbytes)
        error: Exception | None = None
        try:
            self._fill_messages(index, plan, sending)
        except Exception as err:  # noqa: BLE001 - raised again once the other ranks have their messages
            error = err
            sending.zero_()  # nobody else may trip over left-over bytes and take the blame
        self._ranks.exchange(
            [(peer, sending[a:b]) for peer, (a, b) in sorted(plan.sent.items())],
            [(peer, receiving[a:b]) for peer, (a, b) in sorted(plan.received.items())],
        )
        if error is not None:
            raise error
        if plan.bucket is None or memory is None:
            return []
        matrices = self._matrices(plan, self._items[plan.bucket.index])
        places = _Places(plan.bucket, memory, dict(zip(self._names(plan), matrices, strict=True)), self._plan)
        incoming = [part for peer in sorted(plan.incoming) for part in plan.incoming[peer]]
        self._place(index, "receiving", incoming, receiving, places)
        self._place(index, "own", plan.own, sending, places)
        return matrices

    def _names(self, plan: _Round) -> list[str]:
        assert plan.bucket is not None, "asked for the items of a bucket this rank fills"
        return [item.meta.name for item in self._items[plan.bucket.index]]

    def _fill_messages(self, index: int, plan: _Round, sending: torch.Tensor) -> None:
        """Quantize or copy every outgoing shard, and this rank's own at_source shards, in one launch."""
        parts = [p for peer in sorted(plan.outgoing) for p in plan.outgoing[peer]] + plan.own
        if not parts:
            return
        if index not in self._packs:
            items = [PackItem(p.shard.rows, p.shard.cols, p.item.meta.dtype, p.offset, p.scale_offset) for p in parts]
            rule, block = self._plan.rule or "sglang", self._plan.layout.block or (128, 128)
            self._packs[index] = PackTable.build(items, rule=rule, block=block, device=self.device)
        quantize_pack(self._packs[index], [self._box(p.shard) for p in parts], sending)

    def _matrices(self, plan: _Round, items: list[Item]) -> list[torch.Tensor | None]:
        """Where each item will stand: the live parameter, staging memory with local shards in it, or None."""
        staging = self._memory("staging", plan.staging_nbytes)
        matrices: list[torch.Tensor | None] = []
        for position, item in enumerate(items):
            if item.at_source:
                matrices.append(None)
            elif position not in plan.staged and item.shards:
                matrices.append(_unit_columns(self._box(item.shards[0])))
            else:
                start = plan.staged.get(position, 0)
                raw = staging[start : start + item.meta.nbytes]
                matrix = raw.view(getattr(torch, item.meta.dtype)).view(item.meta.matrix)
                for shard in item.shards:
                    if shard.rank == self._ranks.rank:
                        _at(matrix, shard).copy_(self._box(shard))
                matrices.append(matrix)
        return matrices

    def _place(self, index: int, kind: str, parts: list[_Part], memory: torch.Tensor, places: _Places) -> None:
        """Every part to its place in one launch: codes and scales in the bucket, the rest in staging."""
        if not parts:
            return
        if (index, kind) not in self._unpacks:
            items = [i for p in parts for i in _unpack_items(p, self._plan.layout.block)]
            self._unpacks[index, kind] = UnpackTable.build(items, device=self.device)
        destinations = [d for p in parts for d in places.of(p)]
        unpack_scatter(self._unpacks[index, kind], memory, destinations)

    def _round(self, index: int) -> _Round:
        if index not in self._rounds:
            self._rounds[index] = _plan_round(self._plan, index, self._ranks.rank, self._items)
        return self._rounds[index]

    def _box(self, shard: Shard) -> torch.Tensor:
        """The shard's rectangle of the live parameter (a view)."""
        matrix = self._source.read(shard.param)
        if _form(matrix) != self._planned[shard.param]:
            raise PlanError(
                f"parameter {shard.param} on rank {shard.rank} is now {_form(matrix)}, the plan of {shard.tensor} was "
                f"made for {self._planned[shard.param]}; the model changed: connect again",
                tensor=shard.tensor,
            )
        return _unit_columns(
            matrix[shard.src_row : shard.src_row + shard.rows, shard.src_col : shard.src_col + shard.cols]
        )

    def _memory(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            self._scratch[name] = held = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held


class _Places:
    """Where the parts of a bucket go: views into the bucket, or into the matrices of staged items."""

    def __init__(
        self, bucket: Bucket, memory: torch.Tensor, matrices: dict[str, torch.Tensor | None], plan: Plan
    ) -> None:
        self._entries = {e.name: e for e in bucket.entries}
        self._memory = memory
        self._matrices = matrices
        self._block = plan.layout.block or (1, 1)

    def of(self, part: _Part) -> list[torch.Tensor]:
        """One destination for a plain part; codes and scales for a quantized one."""
        shard = part.shard
        if part.scale_offset is None:
            matrix = self._matrices[shard.tensor]
            assert matrix is not None, "a plain part belongs to a staged item"
            return [_at(matrix, shard)]
        codes = self._view(shard.tensor, part.item.meta.matrix)
        scales = self._view(shard.tensor + SCALE_SUFFIX, None)
        (top, left), (rows, cols) = self._grid(shard)
        return [_at(codes, shard), scales[top : top + rows, left : left + cols]]

    def _grid(self, shard: Shard) -> tuple[tuple[int, int], tuple[int, int]]:
        block_rows, block_cols = self._block
        first = (shard.dst_row // block_rows, shard.dst_col // block_cols)
        return first, (-(-shard.rows // block_rows), -(-shard.cols // block_cols))

    def _view(self, name: str, shape: tuple[int, int] | None) -> torch.Tensor:
        e = self._entries[name]
        raw = self._memory[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype))
        return raw.view(shape or e.shape)


def _plan_round(plan: Plan, index: int, rank: int, items_of: dict[int, list[Item]]) -> _Round:
    """Offsets of every message and staged matrix of a round, the same arithmetic on both ends."""
    mine = next((b for i in plan.rounds[index] if (b := plan.manifest.buckets[i]).owner == rank), None)
    made = _Round(mine)
    outgoing: dict[int, list[tuple[Item, Shard]]] = defaultdict(list)
    incoming: dict[int, list[tuple[Item, Shard]]] = defaultdict(list)
    own: list[tuple[Item, Shard]] = []
    for bucket_index in plan.rounds[index]:
        for item in items_of[bucket_index]:
            for shard in item.shards:
                if item.owner == rank and shard.rank != rank:
                    incoming[shard.rank].append((item, shard))
                elif item.owner != rank and shard.rank == rank:
                    outgoing[item.owner].append((item, shard))
                elif item.owner == rank and item.at_source:
                    own.append((item, shard))
    block = plan.layout.block
    for peer in sorted(outgoing):
        made.outgoing[peer], end = _lay_out(outgoing[peer], made.sending_nbytes, block)
        made.sent[peer] = (made.sending_nbytes, end)
        made.sending_nbytes = _aligned(end, _ALIGN)
    made.own, made.sending_nbytes = _lay_out(own, made.sending_nbytes, block)
    for peer in sorted(incoming):
        made.incoming[peer], end = _lay_out(incoming[peer], made.receiving_nbytes, block)
        made.received[peer] = (made.receiving_nbytes, end)
        made.receiving_nbytes = _aligned(end, _ALIGN)
    for position, item in enumerate(items_of[mine.index] if mine else []):
        whole_and_here = len(item.shards) == 1 and item.shards[0].rank == rank
        if not item.at_source and not whole_and_here:
            made.staged[position] = made.staging_nbytes
            made.staging_nbytes += _aligned(item.meta.nbytes, _ALIGN)
    return made


def _lay_out(pairs: list[tuple[Item, Shard]], start: int, block: tuple[int, int] | None) -> tuple[list[_Part], int]:
    """Parts one after the other from byte `start`, scales before codes; the end of the last one."""
    parts, end = [], start
    for item, shard in pairs:
        scale_offset = None
        if item.at_source and block:
            scale_offset = end
            end = _aligned(end + 4 * -(-shard.rows // block[0]) * -(-shard.cols // block[1]), 16)
        parts.append(_Part(item, shard, end, scale_offset))
        itemsize = 1 if item.at_source else ITEMSIZE[item.meta.dtype]
        end = _aligned(end + shard.rows * shard.cols * itemsize, 16)
    return parts, end


def _unpack_items(part: _Part, block: tuple[int, int] | None) -> list[UnpackItem]:
    rows, cols = part.shard.rows, part.shard.cols
    if part.scale_offset is None or block is None:
        return [UnpackItem(rows, cols, part.item.meta.dtype, part.offset)]
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    return [
        UnpackItem(rows, cols, "float8_e4m3fn", part.offset),
        UnpackItem(*grid, "float32", part.scale_offset),
    ]


def _is_finite(box: torch.Tensor) -> torch.Tensor:
    """A bool scalar on the box's device."""
    if box.dtype == torch.float8_e4m3fn:
        return ((box.view(torch.uint8) & 0x7F) != 0x7F).all()
    low, high = torch.aminmax(box)
    return torch.isfinite(low) & torch.isfinite(high)


def _check_power_of_two(item: Item, box: torch.Tensor) -> None:
    if item.meta.name.endswith(SCALE_SUFFIX) and bool((box.contiguous().view(torch.int32) & 0x7FFFFF).any()):
        raise LayoutError(
            f"{item.meta.name} has scales that are no powers of two, and the servers want those (scale_fmt ue8m0); "
            "train with power-of-two scales, or serve a checkpoint with fp32 scales",
            tensor=item.meta.name,
        )


def _unit_columns(box: torch.Tensor) -> torch.Tensor:
    """Kernels want column stride 1; a transposed parameter is copied."""
    return box if box.stride(-1) == 1 or box.shape[-1] <= 1 else box.contiguous()


def _form(matrix: torch.Tensor) -> str:
    return f"{str(matrix.dtype).removeprefix('torch.')} {list(matrix.shape)}"


def _at(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The shard's rectangle of the whole tensor (a view)."""
    rows = slice(shard.dst_row, shard.dst_row + shard.rows)
    return matrix[rows, shard.dst_col : shard.dst_col + shard.cols]


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
