"""The words every stage shares: a tensor's metadata, and a shard of it. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import PlanError

if TYPE_CHECKING:
    import torch

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype that can be on the wire, by torch's name without `torch.`."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A whole tensor under its Hugging Face name, as the trainer has it (before quantization)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            known = ", ".join(ITEMSIZE)
            raise PlanError(
                f"{self.name} has dtype {self.dtype}, which cannot be sent (known: {known}); "
                "cast it in the trainer or leave it out of the source",
                tensor=self.name,
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def matrix(self) -> tuple[int, int]:
        """The tensor as rows x columns: [n] is n x 1, [d0, d1, ...] is d0 x (d1 * ...)."""
        if not self.shape:
            return (1, 1)
        return (self.shape[0], math.prod(self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a tensor and where it lives.

    Rows and columns are those of the matrix view (`TensorMeta.matrix`), on both sides. The
    rectangle [src_row : src_row + rows, src_col : src_col + cols] of parameter `param` on trainer
    rank `rank` is the rectangle that starts at [dst_row, dst_col] of tensor `tensor`.
    TP slices, fused QKV, gate/up halves, padded vocabularies and experts are all lists of these.
    """

    tensor: str
    rank: int
    param: str
    rows: int
    cols: int
    src_row: int = 0
    src_col: int = 0
    dst_row: int = 0
    dst_col: int = 0

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(first row, first column, rows, columns) in the whole tensor."""
        return (self.dst_row, self.dst_col, self.rows, self.cols)


@runtime_checkable
class WeightSource(Protocol):
    """What a trainer offers. Three members; no base class to import.

    Optional members, looked for after `describe`: `before_read()` is called on every rank before the
    reads of an update (to finish a pending all-gather of parameters, say). `rule`: the rounding rule the
    trainer quantizes with itself, or None; it becomes the plan's unless the configuration names one.
    `requantized`: tensor name -> why the trainer's own FP8 bytes cannot be sent; the plan lists them.
    `live(params)`: for each of these parameters the tensor whose memory `read` shows, None where `read` makes
    a copy; cheap, called once per update, and what does not move between updates costs no more time then.
    `alone`: True if this rank holds every tensor and no other rank makes the bridge; then no call of it
    is collective, whatever torch.distributed has.

    hf_config: the Hugging Face config of the model as a dict; a `quantization_config` in it is
        the layout the trainer expects of the servers, and is compared with theirs.
    describe(): metadata and shards of what THIS rank holds (`Shard.rank` is this rank). Moves no
        data. Called on every rank when a bridge connects; replicas may describe the same box.
    read(param): the live parameter as a 2-D matrix view on its device (rows and columns as in
        `Shard`), detached. Called on every update. The view is only read, and only until
        `update_weights` returns.
    """

    hf_config: dict[str, Any]

    def describe(self) -> tuple[Iterable[TensorMeta], Iterable[Shard]]: ...

    def read(self, param: str) -> torch.Tensor: ...
