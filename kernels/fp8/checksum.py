"""checksum: one 64-bit number per tensor of a bucket, equal on every device and in every bucket.

It is a function of the tensor's bytes and their number alone: not of the offset, the bucket or the
device. reference.checksum spells it out. Within a tile of 16 KiB any single changed word, any two
swapped words and any two flipped sign bits are *certain* to change it; other changes escape with a
chance near 2^-32 (multilinear hashing, Carter and Wegman 1979) for damage within one tile and near
2^-64 across tiles. It finds damage, not attackers: the keys are public.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fp8bridge.errors import ConfigError

from . import checks, cpu

if TYPE_CHECKING:
    from . import checksum_triton


class ChecksumTable:
    """The spans of one bucket, uploaded to the device once. Immutable; spans may overlap."""

    def __init__(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> None:
        self.spans = spans
        self.device = device
        self.nbytes = max((offset + nbytes for offset, nbytes in spans), default=0)

    @classmethod
    def build(cls, spans: Sequence[tuple[int, int]], *, device: torch.device | str) -> ChecksumTable:
        """Spans are (offset, nbytes) in the bucket, of any alignment and size.

        Raises:
            ConfigError: a negative offset or size.
        """
        for index, (offset, nbytes) in enumerate(spans):
            if offset < 0 or nbytes < 0:
                raise ConfigError(f"span {index} is ({offset}, {nbytes}); offsets and sizes cannot be negative")
        return cls(tuple((offset, nbytes) for offset, nbytes in spans), checks.concrete_device(device))

    @functools.cached_property
    def device_table(self) -> checksum_triton.DeviceTable:
        from . import checksum_triton

        return checksum_triton.DeviceTable(self)


def checksum(table: ChecksumTable, bucket: torch.Tensor) -> torch.Tensor:
    """int64 [n] on the bucket's device: the bits of each span's unsigned 64-bit checksum.

    `value & 0xFFFFFFFFFFFFFFFF` in Python gives the unsigned number. Asynchronous on CUDA.
    """
    checks.check_bucket(bucket, table.nbytes, table.device)
    if checks.uses_triton(table.device):
        return table.device_table.launch(bucket)
    return cpu.checksums(bucket, table.spans)
