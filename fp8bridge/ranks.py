"""Talk between trainer ranks. With `gather.py`'s use of it, the only collective code here.

Control messages (small, bytes) go over a gloo group of our own with a time limit; weights go point
to point over the trainer's default group, on whatever device they are.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .errors import BridgeError, RankError, error_from_dict

T = TypeVar("T")
Messages = Sequence[tuple[int, torch.Tensor]]
"""(other rank, contiguous uint8 tensor)"""


class Ranks(Protocol):
    """All calls but `exchange` are collective: every rank makes them, in the same order."""

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]:
        """data of every rank, by rank."""
        ...

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Contiguous uint8 tensors to and from other ranks; complete when it returns. At most one
        tensor per pair of ranks and direction."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """A trainer of one process without torch.distributed."""

    rank, size = 0, 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def exchange(self, sends: Messages, receives: Messages) -> None:
        if sends or receives:
            raise RankError("a single-rank trainer has no other rank to exchange shards with")

    def close(self) -> None:
        """Nothing is held."""


class TorchRanks:
    """Every rank of torch.distributed's default group. Made and closed on all of them."""

    def __init__(self, *, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def all_gather(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        try:
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
            longest = max(1, max(int(s) for s in sizes))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._control)
        except RuntimeError as err:
            raise RankError(f"rank {self.rank} lost another trainer rank: {err}") from err
        return [bytes(p[: int(n)].numpy()) for p, n in zip(parts, sizes, strict=True)]

    def exchange(self, sends: Messages, receives: Messages) -> None:
        ops = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives]
        if not ops:
            return
        try:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        except RuntimeError as err:
            peers = sorted({peer for peer, _ in (*sends, *receives)})
            raise RankError(f"rank {self.rank} lost one of ranks {peers} while gathering: {err}") from err

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._control)


def connect_ranks(*, timeout_s: float) -> Ranks:
    """All ranks of the default process group, or this process alone where there is none."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchRanks(timeout_s=timeout_s)
    return SingleRank()


def agree(ranks: Ranks, work: Callable[[], T]) -> list[Any]:
    """Run `work` on every rank and return what each rank's returned (JSON values), by rank.

    If it raises anywhere, every rank raises: its own error, or the first other rank's. So no rank
    goes on, into a collective, alone.
    """
    own: Exception | None = None
    try:
        answer: dict[str, Any] = {"value": work()}
    except Exception as err:  # noqa: BLE001 - raised again below, once the other ranks know
        own = err
        foreign = RankError(f"trainer rank {ranks.rank} failed: {type(err).__name__}: {err}")
        answer = {"error": (err if isinstance(err, BridgeError) else foreign).to_dict()}
    try:
        answers = [json.loads(a) for a in ranks.all_gather(json.dumps(answer).encode())]
    finally:
        if own is not None:
            raise own
    for rank, other in enumerate(answers):
        if "error" in other:
            error = error_from_dict(other["error"])
            error.add_note(f"raised on trainer rank {rank}")
            raise error
    return [a["value"] for a in answers]
