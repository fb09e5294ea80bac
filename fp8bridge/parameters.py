"""This rank's live parameters, as a plan sees them: read in the form it was made for, and watched for moves.

Most trainers keep a parameter where it is and change its values. What the stages made for such parameters
(tables of addresses on the GPU) is then good for the next update, and nothing is done by the tensor again:
`refresh` compares where all of them lie, and `epoch` grows when one has moved. Addresses are all that is
remembered, never a tensor: a trainer may free or offload its weights between updates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
        self._missing: list[int] = []
        self._places: list[list[Any]] | None = None
        self._lasting: set[str] = set()
        self._scan: Scan | None = None
        self._scanned: list[tuple[Item, Shard]] = []
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
        present = [t for t in tensors if t is not None]
        missing = [i for i, t in enumerate(tensors) if t is None]
        if self._places is not None and self._missing == missing and _same(self._places, present):
            return
        self.epoch += 1
        self._scan, self._missing = None, missing
        self._places = [list(map(see, present)) for see in _FORM]
        self._lasting = set(self._keys)
        held = dict(zip(self._keys, tensors, strict=True))
        for _, shard in self._mine:
            if not _same_memory(self.box(shard), held[shard.param]):
                self._lasting.discard(shard.param)
        self._scanned = [pair for pair in self._mine if pair[1].param in self._lasting]
        self._read_anew = [pair for pair in self._mine if pair[1].param not in self._lasting]
        if self._scanned:
            self.device = self.box(self._scanned[0][1]).device

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
        """The first bad one of all shards. Those that last are looked at in one launch."""
        if self._read_anew:
            boxes = [self.box(shard) for _, shard in self._read_anew]
            self.device = boxes[0].device
            if index := _first(Scan(boxes).flags()):
                return self._read_anew[index - 1][1]
        if not self._scanned:
            return None
        scan = self._scan or Scan([self.box(shard) for _, shard in self._scanned])
        self._scan = None if scan.keeps_alive else scan
        index = _first(scan.flags())
        return self._scanned[index - 1][1] if index else None

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
