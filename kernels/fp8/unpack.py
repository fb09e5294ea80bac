"""unpack_scatter: the receiver's side, from one bucket into many destination tensors in one launch.

table = UnpackTable.build(items, device="cuda")     # once per bucket of a plan
bound = table.bind(destinations)                    # once while the destinations stay in place
bound.launch(bucket)                                # every step
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fp8bridge.errors import ConfigError

from . import checks

if TYPE_CHECKING:
    from . import unpack_triton


@dataclass(frozen=True, slots=True)
class UnpackItem:
    """A row-major [rows, cols] matrix of torch dtype `dtype` at byte `offset` of a bucket (any alignment)."""

    rows: int
    cols: int
    dtype: str
    offset: int


class UnpackTable:
    """The tensors of one bucket, checked once and uploaded to the device once. Immutable."""

    def __init__(self, items: tuple[UnpackItem, ...], device: torch.device) -> None:
        self.items = items
        self.device = device
        self.dtypes = tuple(checks.torch_dtype(item.dtype, index) for index, item in enumerate(items))
        for index, item in enumerate(items):
            if min(item.rows, item.cols, item.offset) < 0:
                raise ConfigError(f"item {index} has a negative size or offset: {item}; check the bucket's layout")
        self.nbytes = max((self.span(index)[1] for index in range(len(items))), default=0)

    @classmethod
    def build(cls, items: Sequence[UnpackItem], *, device: torch.device | str) -> UnpackTable:
        """Raises ConfigError for an unknown dtype or a negative size or offset."""
        return cls(tuple(items), checks.concrete_device(device))

    def span(self, index: int) -> tuple[int, int]:
        """[first, end) of an item's bytes in the bucket."""
        item = self.items[index]
        return item.offset, item.offset + item.rows * item.cols * self.dtypes[index].itemsize

    def bind(self, destinations: Sequence[torch.Tensor]) -> BoundUnpack:
        """Tie the table to its destinations: views [rows, cols] with column stride 1 and any row stride.

        The result keeps the tensors alive and remembers their addresses; bind again after they move.
        Destinations must not overlap each other or the bucket.

        Raises:
            ConfigError: a destination does not match its item; names the index.
        """
        checks.check_count(destinations, len(self.items))
        for index, (item, dtype, out) in enumerate(zip(self.items, self.dtypes, destinations, strict=True)):
            checks.check_matrix(out, index, item.rows, item.cols, dtype)
            checks.check_device(out, self.device, f"tensor {index}")
        return BoundUnpack(self, tuple(destinations))

    @functools.cached_property
    def device_table(self) -> unpack_triton.DeviceTable:
        from . import unpack_triton

        return unpack_triton.DeviceTable(self)


class BoundUnpack:
    """A table with its destinations; made by `UnpackTable.bind`. Launching it costs one kernel launch."""

    def __init__(self, table: UnpackTable, destinations: tuple[torch.Tensor, ...]) -> None:
        self.table = table
        self.destinations = destinations
        self._device_destinations = None
        if checks.uses_triton(table.device):
            addresses = [out.data_ptr() for out in destinations]
            strides = [checks.row_stride(out) * out.element_size() for out in destinations]
            self._device_destinations = table.device_table.upload_destinations(addresses, strides)

    def launch(self, bucket: torch.Tensor) -> None:
        """Copy every item of `bucket` (flat uint8, any base alignment) to its destination.

        Runs on the current stream and does not synchronize.
        """
        checks.check_bucket(bucket, self.table.nbytes, self.table.device)
        if self._device_destinations is not None:
            self.table.device_table.launch(self._device_destinations, bucket)
            return
        for index, out in enumerate(self.destinations):
            if out.numel():
                first, end = self.table.span(index)
                _write_rows(out.detach(), bucket[first:end])


def unpack_scatter(table: UnpackTable, bucket: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
    """`table.bind(destinations).launch(bucket)`; keep the bound object where this runs every step."""
    table.bind(destinations).launch(bucket)


def _write_rows(out: torch.Tensor, data: torch.Tensor) -> None:
    if out.is_contiguous():
        out.view(-1).view(torch.uint8).copy_(data)
    else:  # a fresh copy of the bytes is aligned for the dtype's view
        out.copy_(data.clone().view(out.dtype).view(out.shape))
