"""Scan: which of many matrices hold NaN or Inf, in one launch that reads each byte once and writes none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8bridge.errors import ConfigError

from . import checks, cpu
from .pack import PackItem, PackTable

_ALIGN = 16


class Scan:
    """Made for matrices that stay in place; holds them by their addresses on a GPU, alive on the CPU.

    sources: [rows, cols] each, column stride 1, all on one device. Integers have no NaN and are not read.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        if not sources:
            raise ConfigError("a Scan needs at least one matrix")
        self._device = sources[0].device
        self._table: PackTable | None = None
        if not checks.uses_triton(self._device):
            self._sources = tuple(sources)
            return
        items, end = [], 0
        for source in sources:
            rows, cols = source.shape
            items.append(PackItem(rows, cols, str(source.dtype).removeprefix("torch."), end, None))
            end += -(-source.numel() * source.element_size() // _ALIGN) * _ALIGN
        self._table = PackTable.build(items, rule="sglang", device=self._device)
        bound = self._table.bind(sources)
        assert bound._device_sources is not None
        self._records = bound._device_sources

    @property
    def keeps_alive(self) -> bool:
        """False where it may be used again later without keeping anything: by addresses."""
        return self._table is None

    def flags(self) -> torch.Tensor:
        """int32 [n] on the sources' device: 1 where a source holds NaN or Inf now. Does not synchronize."""
        if self._table is not None:
            return self._table.device_table.look(self._records)
        return torch.tensor([cpu.has_nonfinite(source) for source in self._sources], dtype=torch.int32)
