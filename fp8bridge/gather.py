"""Shards of all trainer ranks to the rank that sends them, one round of buckets at a time.

The owner of a bucket gets one message from each rank that holds a part of it. Where shard edges fall
on scale blocks (`Item.at_source`), a rank quantizes its own shards into the message and the owner only
puts codes and scales in their places: half the bytes, and the work is shared. Everything a rank sends
in a round is one launch, everything it places another. A tensor that lies whole on its owner is not
touched here. What was made for parameters that last (`Parameters.lasts`) serves later updates as it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from .kernels import BoundUnpack, PackItem, PackTable, UnpackItem, UnpackTable, quantize_pack
from .layout import SCALE_SUFFIX
from .parameters import Parameters
from .plan import Bucket, Item, Plan
from .protocols import Matrices
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

    bucket: the one this rank fills, if any. outgoing, incoming: peer -> its parts. own: shards of its bucket
    that this rank quantizes or stages for itself. sent, received: peer -> byte range of its message in the memory.
    staged: item position -> offset of its matrix in staging memory. direct: shards that are packed
    from where they are.
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
    direct: list[Shard] = field(default_factory=list)


class Gather:
    """This rank's part of every round. Buffers are made on first use and kept between updates."""

    def __init__(self, plan: Plan, ranks: Ranks, source: WeightSource) -> None:
        self._plan = plan
        self._ranks = ranks
        self._items = plan.items_by_bucket()
        self._parameters = Parameters(source, [(i, s) for i in plan.items for s in i.shards if s.rank == ranks.rank])
        self._scratch: dict[str, torch.Tensor] = {}
        self._rounds = [_plan_round(plan, r, ranks.rank, self._items) for r in range(len(plan.rounds))]
        self._sizes = {
            "sending": max((r.sending_nbytes for r in self._rounds), default=0),
            "receiving": max((r.receiving_nbytes for r in self._rounds), default=0),
            "staging": max((r.staging_nbytes for r in self._rounds), default=0),
        }
        self._packs: dict[int, PackTable] = {}
        self._packed: dict[int, int | None] = {}
        """Round -> the epoch whose addresses its pack table has."""
        self._unpacks: dict[tuple[int, str], tuple[tuple[int, ...], BoundUnpack]] = {}
        """Round and kind -> the addresses it was bound to, and the binding."""
        self._ue8m0 = plan.layout.scale_format == "ue8m0"

    @property
    def device(self) -> torch.device:
        return self._parameters.device

    @property
    def extra_nbytes(self) -> int:
        """Memory held beside the trainer's parameters and the buckets."""
        return sum(t.numel() for t in self._scratch.values())

    def bucket(self, index: int) -> Bucket | None:
        """The bucket that this rank fills in round `index`."""
        return self._rounds[index].bucket

    def check(self) -> None:
        """Comes before the rounds of every update; nothing has been sent. Raises NonFiniteError, LayoutError
        and PlanError as `Parameters` does, naming the tensor."""
        self._parameters.refresh()
        self._parameters.check_values(power_of_two_scales=self._ue8m0)

    def round(self, index: int, memory: torch.Tensor | None) -> Matrices:
        """Move round `index`; collective. Fills what other ranks quantized into `memory`, this rank's bucket.

        Returns what is left to pack into it. An error in reading this rank's own parameters is raised after
        the messages were exchanged (zeros, in an update that is lost anyway), so that no other rank is left
        waiting.
        """
        plan = self._rounds[index]
        sending, receiving, staging = self._memory("sending"), self._memory("receiving"), self._memory("staging")
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
            return Matrices(None, lambda: [])
        incoming = [part for peer in sorted(plan.incoming) for part in plan.incoming[peer]]
        self._place(index, "receiving", incoming, receiving, (memory, staging))
        self._place(index, "own", plan.own, sending, (memory, staging))
        stamp = (self._parameters.epoch, staging.data_ptr()) if self._parameters.lasts(plan.direct) else None
        return Matrices(stamp, lambda: self._matrices(plan, staging))

    def _fill_messages(self, index: int, plan: _Round, sending: torch.Tensor) -> None:
        """Quantize or copy every outgoing shard, and this rank's own parts, in one launch."""
        parts = [p for peer in sorted(plan.outgoing) for p in plan.outgoing[peer]] + plan.own
        if not parts:
            return
        if index not in self._packs:
            items = [PackItem(p.shard.rows, p.shard.cols, p.item.meta.dtype, p.offset, p.scale_offset) for p in parts]
            rule, block = self._plan.rule or "sglang", self._plan.layout.block or (128, 128)
            self._packs[index] = PackTable.build(items, rule=rule, block=block, device=self.device)
        table, epoch = self._packs[index], self._parameters.epoch
        if table.remembers and self._packed.get(index) == epoch:
            table.launch_again(sending)
            return
        quantize_pack(table, [self._parameters.box(p.shard) for p in parts], sending)
        self._packed[index] = epoch if self._parameters.lasts(p.shard for p in parts) else None

    def _matrices(self, plan: _Round, staging: torch.Tensor) -> list[torch.Tensor]:
        """What `Matrices.make` gives: live parameters, and staged items."""
        assert plan.bucket is not None, "asked for the items of a bucket this rank fills"
        matrices: list[torch.Tensor] = []
        for position, item in enumerate(self._items[plan.bucket.index]):
            if position in plan.staged:
                matrices.append(_staged(item, staging, plan.staged[position]))
            elif not item.at_source:
                matrices += [self._parameters.box(shard) for shard in item.shards]
        return matrices

    def _place(
        self, index: int, kind: str, parts: list[_Part], memory: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Every part of `memory` to its place in one launch: codes and scales in the bucket, the rest in staging."""
        if not parts:
            return
        where = tuple(t.data_ptr() for t in into)
        known = self._unpacks.get((index, kind))
        if known is None or known[0] != where:
            plan = self._rounds[index]
            assert plan.bucket is not None, "parts are placed in a bucket this rank fills"
            table = UnpackTable.build(
                [i for p in parts for i in _unpack_items(p, self._plan.layout.block)], device=self.device
            )
            staged = {
                item.meta.name: _staged(item, into[1], plan.staged[position])
                for position, item in enumerate(self._items[plan.bucket.index])
                if position in plan.staged
            }
            places = _Places(plan.bucket, into[0], staged, self._plan)
            known = (where, table.bind([d for p in parts for d in places.of(p)]))
            self._unpacks[index, kind] = known
        known[1].launch(memory)

    def _memory(self, name: str) -> torch.Tensor:
        """Scratch of this name, as large as any round needs it."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self._sizes[name], dtype=torch.uint8, device=self.device)
        return self._scratch[name]


def _staged(item: Item, staging: torch.Tensor, start: int) -> torch.Tensor:
    raw = staging[start : start + item.meta.nbytes]
    return raw.view(getattr(torch, item.meta.dtype)).view(item.meta.matrix)


class _Places:
    """Where the parts of a bucket go: views into the bucket, or into the matrices of staged items."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor, matrices: dict[str, torch.Tensor], plan: Plan) -> None:
        self._entries = {e.name: e for e in bucket.entries}
        self._memory = memory
        self._matrices = matrices
        self._block = plan.layout.block or (1, 1)

    def of(self, part: _Part) -> list[torch.Tensor]:
        """One destination for a plain part; codes and scales for a quantized one."""
        shard = part.shard
        if part.scale_offset is None:
            return [_at(self._matrices[shard.tensor], shard)]
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
    block = plan.layout.block
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
                elif item.owner == rank and (item.at_source or not item.in_bands(block)):
                    own.append((item, shard))
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
        if item.at_source:
            continue
        if item.in_bands(block):
            made.direct += item.shards
        else:
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


def _at(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The shard's rectangle of the whole tensor (a view)."""
    rows = slice(shard.dst_row, shard.dst_row + shard.rows)
    return matrix[rows, shard.dst_col : shard.dst_col + shard.cols]


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
