"""This rank's live parameters, as a plan sees them: read in the form it was made for, and watched for moves.

Most trainers keep a parameter where it is and change its values. What the stages made for such parameters
(tables of addresses on the GPU) is then good for the next update, and nothing is done by the tensor again:
`refresh` compares where all of them lie, and `epoch` grows when one has moved. It goes part by part, so that a GPU
looks for NaN in one part while the next is compared. Addresses are all that is
remembered, never a tensor: a trainer may free or offload its weights between updates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .errors import LayoutError, NonFiniteError, PlanError
from .kernels import Scan
from .layout import SCALE_SUFFIX
from .plan import Item
from .types import Shard, WeightSource

_FORM: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.data_ptr,
    operator.attrgetter("shape"),
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
)
"""Equal before and after: the same place in memory, seen in the same way."""
_PART = 2048
"""Parameters that are compared, and then looked into, at a time."""


@dataclass(slots=True)
class _Part:
    """Some of the parameters. places: `_FORM` of each that is there; missing: the others, by position.

    scanned: shards that lie where they did as long as the places are the same. scan: made for them, where it can be
    used again; flags: what it saw in this update, or None.
    """

    places: list[list[Any]]
    missing: list[int]
    scanned: list[Shard]
    scan: Scan | None = None
    flags: torch.Tensor | None = None

    def is_still(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        present, missing = _sorted_out(tensors)
        return self.missing == missing and _same(self.places, present)


class Parameters:
    """What `mine` (this rank's shards, each with its item) needs of the source.

    device: where the parameters are; known after the first `refresh` and `check_values`.
    """

    def __init__(self, source: WeightSource, mine: Sequence[tuple[Item, Shard]]) -> None:
        self.device = torch.device("cpu")
        self.epoch = 0
        self._source = source
        self._mine = mine
        self._planned = {s.param: _form(source.read(s.param)) for _, s in mine}
        self._keys = list(self._planned)
        self._parts: list[_Part] | None = None
        self._lasting: set[str] = set()
        self._read_anew: list[tuple[Item, Shard]] = []

    def refresh(self) -> None:
        """Start an update: let the source get ready, and see whether any parameter has moved.

        Raises PlanError for one that is not of the shape and dtype that the plan was made for.
        """
        before_read = getattr(self._source, "before_read", None)
        if before_read is not None:
            before_read()
        live = getattr(self._source, "live", None)
        tensors = live(self._keys) if live is not None else [None] * len(self._keys)
        if self._parts is None or not all(map(self._is_still, self._parts, _in_parts(tensors))):
            self._start_anew(tensors)

    @staticmethod
    def _is_still(part: _Part, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Also sets a GPU to work on it: its memory was there a moment ago."""
        still = part.is_still(tensors)
        part.flags = part.scan.flags() if still and part.scan is not None else None
        return still

    def _start_anew(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.epoch += 1
        self._parts, self._lasting = None, set(self._keys)
        held = dict(zip(self._keys, tensors, strict=True))
        for _, shard in self._mine:
            if not _same_memory(self.box(shard), held[shard.param]):
                self._lasting.discard(shard.param)
        shards: dict[str, list[Shard]] = {}
        for _, shard in self._mine:
            shards.setdefault(shard.param, []).append(shard)
        self._read_anew = [pair for pair in self._mine if pair[1].param not in self._lasting]
        parts = []
        for keys, mine in zip(_in_parts(self._keys), _in_parts(tensors), strict=True):
            present, missing = _sorted_out(mine)
            lasting = [shard for key in keys if key in self._lasting for shard in shards[key]]
            parts.append(_Part([list(map(see, present)) for see in _FORM], missing, lasting))
            if lasting:
                self.device = self.box(lasting[0]).device
        self._parts = parts

    def lasts(self, shards: Iterable[Shard]) -> bool:
        """Whether boxes of all these lie where they did, as long as `epoch` is the same."""
        return not self._read_anew or all(s.param in self._lasting for s in shards)

    def box(self, shard: Shard) -> torch.Tensor:
        """The shard's rectangle of the live parameter: a view with column stride 1, or a copy that has it."""
        matrix = self._source.read(shard.param)
        if _form(matrix) != self._planned[shard.param]:
            raise PlanError(
                f"parameter {shard.param} on rank {shard.rank} is now {_form(matrix)}, the plan of {shard.tensor} was "
                f"made for {self._planned[shard.param]}; the model changed: connect again",
                tensor=shard.tensor,
            )
        return unit_columns(
            matrix[shard.src_row : shard.src_row + shard.rows, shard.src_col : shard.src_col + shard.cols]
        )

    def check_values(self, *, power_of_two_scales: bool) -> None:
        """Raise NonFiniteError naming the first tensor with NaN or Inf in this rank's shards; LayoutError for
        passed-through scales that are no powers of two, where servers want those.

        Only what would be sent is looked at: padding rows of a vocabulary may hold anything.
        """
        bad = self._nonfinite()
        if bad is not None:
            count = int((~torch.isfinite(self.box(bad).float())).sum())
            raise NonFiniteError(
                f"{bad.tensor} has {count} NaN or Inf values (parameter {bad.param} on trainer rank "
                f"{bad.rank}); nothing was sent. Skip this step, or go back to a good checkpoint",
                tensor=bad.tensor,
            )
        if power_of_two_scales:
            scales = [s for i, s in self._mine if i.action == "pass_through" and s.tensor.endswith(SCALE_SUFFIX)]
            self._check_powers_of_two(scales)

    def _nonfinite(self) -> Shard | None:
        """The first bad one of all shards. Those that last are looked at in a launch for each part."""
        if self._read_anew:
            boxes = [self.box(shard) for _, shard in self._read_anew]
            self.device = boxes[0].device
            if index := _first(Scan(boxes).flags()):
                return self._read_anew[index - 1][1]
        used = [part for part in self._parts or () if part.scanned]
        for part in used:
            if part.flags is None:
                scan = Scan([self.box(shard) for shard in part.scanned])
                part.scan, part.flags = None if scan.keeps_alive else scan, scan.flags()
        flags = [part.flags for part in used if part.flags is not None]
        for part in used:
            part.flags = None
        if not flags or not (index := _first(torch.cat(flags))):
            return None
        return [shard for part in used for shard in part.scanned][index - 1]

    def _check_powers_of_two(self, scales: Sequence[Shard]) -> None:
        if not scales:
            return
        mantissas = torch.stack([(self.box(s).contiguous().view(torch.int32) & 0x7FFFFF).any() for s in scales])
        if index := _first(mantissas):
            name = scales[index - 1].tensor
            raise LayoutError(
                f"{name} has scales that are no powers of two, and the servers want those (scale_fmt ue8m0); "
                "train with power-of-two scales, or serve a checkpoint with fp32 scales",
                tensor=name,
            )


def unit_columns(box: torch.Tensor) -> torch.Tensor:
    """Kernels want column stride 1; a transposed parameter is copied."""
    return box if box.stride(-1) == 1 or box.shape[-1] <= 1 else box.contiguous()


T = TypeVar("T")


def _in_parts(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[at : at + _PART] for at in range(0, len(values), _PART)]


def _sorted_out(tensors: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[int]]:
    """Those that are there, and where one is not."""
    return [t for t in tensors if t is not None], [i for i, t in enumerate(tensors) if t is None]


def _same(places: list[list[Any]], tensors: Sequence[torch.Tensor]) -> bool:
    """Compares as it goes: to collect as many shapes first would set off the garbage collector, which takes
    longer than the comparison."""
    return len(places[0]) == len(tensors) and all(
        all(map(operator.eq, known, map(see, tensors))) for see, known in zip(_FORM, places, strict=True)
    )


def _same_memory(box: torch.Tensor, live: torch.Tensor | None) -> bool:
    return live is not None and box.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()


def _first(flags: torch.Tensor) -> int:
    """1 + the index of the first flag that is set; 0 if none is. One synchronization where all is well."""
    return int(flags.nonzero()[0]) + 1 if bool(flags.any()) else 0


def _form(matrix: torch.Tensor) -> str:
    return f"{str(matrix.dtype).removeprefix('torch.')} {list(matrix.shape)}"
