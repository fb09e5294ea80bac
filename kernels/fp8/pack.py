"""quantize_pack: many matrices quantized straight into one flat bucket, in one launch.

    table = PackTable.build(items, rule="te_pow2", device="cuda")   # once per bucket of a plan
    bound = table.bind(sources)                                     # once while the sources stay in place
    flags = bound.launch(bucket)                                    # every step

`quantize_pack(table, sources, bucket)` is the same in one call; it looks at every source's address each
time (host time per tensor: benchmarks/results) and binds again when one has moved. A caller who knows that
none has moved since says `table.launch_again(bucket)`, which costs no time by the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fp8bridge.errors import ConfigError

from . import checks, cpu, rules

if TYPE_CHECKING:
    from . import pack_triton


@dataclass(frozen=True, slots=True)
class PackItem:
    """One matrix to place in a bucket. Offsets count bytes from the bucket's first byte.

    `offset` is where the codes [rows, cols] go, row-major (or the copied bytes). `scale_offset` is where
    the fp32 scales [ceil(rows/bm), ceil(cols/bk)] go, row-major; None makes the item a plain byte copy.
    Offsets may have any alignment; multiples of 16 are fast. `dtype` is the source's torch name.
    """

    rows: int
    cols: int
    dtype: str
    offset: int
    scale_offset: int | None


_Places = list[tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]]
"""Where each source lies and how: while this is equal, a table's uploaded records are right."""


class PackTable:
    """The items of one bucket, checked once and uploaded to the device once. Immutable."""

    def __init__(self, items: tuple[PackItem, ...], rule: str, block: tuple[int, int], device: torch.device) -> None:
        self.items = items
        self.rule = rule
        self.block = block
        self.device = device
        self.dtypes = tuple(checks.torch_dtype(item.dtype, index) for index, item in enumerate(items))
        self.nbytes = _check_items(self)
        """The bucket's least size."""
        self._uploaded: tuple[_Places, torch.Tensor] | None = None

    @classmethod
    def build(
        cls,
        items: Sequence[PackItem],
        *,
        rule: str,
        block: tuple[int, int] = (128, 128),
        device: torch.device | str,
    ) -> PackTable:
        """Check the items and make their table.

        Args:
            items: disjoint in the bucket.
            rule: one of `RULES`; every quantized item uses it.
            block: (128, 128), (1, 128), or `rules.WHOLE` = (0, 0) for one scale per tensor.
            device: where sources and bucket will be.

        Raises:
            ConfigError: an unknown rule, block or dtype; negative or overlapping ranges.
        """
        if rule not in rules.RULES:
            raise ConfigError(f"rule {rule!r} is unknown; choose one of {', '.join(rules.RULES)}")
        if tuple(block) not in rules.BLOCKS:
            raise ConfigError(f"block {block} is not supported; choose one of {rules.BLOCKS}")
        return cls(tuple(items), rule, (block[0], block[1]), checks.concrete_device(device))

    def bind(self, sources: Sequence[torch.Tensor]) -> BoundPack:
        """Tie the table to its sources. `sources[i]` is [rows, cols] of item i, column stride 1.

        The result keeps the tensors alive and remembers their addresses. Changing their *values* in place
        is what it is for; bind again after `tensor.data = ...`, `set_()` or a resize.

        Raises:
            ConfigError: a source does not match its item; names the index.
        """
        checks.check_count(sources, len(self.items))
        for index, (item, dtype, source) in enumerate(zip(self.items, self.dtypes, sources, strict=True)):
            checks.check_matrix(source, index, item.rows, item.cols, dtype)
            checks.check_device(source, self.device, f"tensor {index}")
        return BoundPack(self, tuple(sources))

    @property
    def remembers(self) -> bool:
        """Whether `launch_again` can work: the sources of a `quantize_pack` are known by their addresses."""
        return self._uploaded is not None

    def launch_again(self, bucket: torch.Tensor) -> torch.Tensor:
        """`BoundPack.launch` with the sources of the last `quantize_pack`, which the caller vouches for: each
        is alive and lies where it did, in the same shape."""
        assert self._uploaded is not None, "only where `remembers` is true"
        checks.check_bucket(bucket, self.nbytes, self.device)
        return self.device_table.launch(self._uploaded[1], bucket)

    @functools.cached_property
    def device_table(self) -> pack_triton.DeviceTable:
        """The Triton side's tables, on the device."""
        from . import pack_triton

        return pack_triton.DeviceTable(self)


class BoundPack:
    """A table with its sources; made by `PackTable.bind`. Launching it costs one kernel launch."""

    def __init__(self, table: PackTable, sources: tuple[torch.Tensor, ...]) -> None:
        self.table = table
        self.sources = sources
        self._places = _places(sources)
        self._device_sources: torch.Tensor | None = None
        if checks.uses_triton(table.device):
            addresses = [source.data_ptr() for source in sources]
            strides = [checks.row_stride(source) for source in sources]
            self._device_sources = table.device_table.upload_sources(addresses, strides)

    def matches(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether `sources` lie where this binding's did, with the same shapes, strides and dtypes."""
        return _places(sources) == self._places

    def launch(self, bucket: torch.Tensor) -> torch.Tensor:
        """Quantize and copy every source into `bucket` (flat uint8, any base alignment).

        Runs on the current stream and does not synchronize. Bytes of the bucket outside the items keep
        their values.

        Returns:
            int32 [n_items] on the bucket's device: 1 where the source holds NaN or Inf, else 0. Copied
            items are looked at as well (float dtypes of 16 and 32 bits, and e4m3fn).
        """
        checks.check_bucket(bucket, self.table.nbytes, self.table.device)
        if self._device_sources is not None:
            return self.table.device_table.launch(self._device_sources, bucket)
        flags = [
            _pack_on_cpu(self.table, item, source, bucket)
            for item, source in zip(self.table.items, self.sources, strict=True)
        ]
        return torch.tensor(flags, dtype=torch.int32)


def quantize_pack(table: PackTable, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> torch.Tensor:
    """`table.bind(sources).launch(bucket)`, without a new upload while the sources stay where they are.

    Keeps no source alive: what it remembers is only where the last ones lay.
    """
    if not checks.uses_triton(table.device):
        return table.bind(sources).launch(bucket)
    checks.check_bucket(bucket, table.nbytes, table.device)
    places = _places(sources)
    if table._uploaded is None or table._uploaded[0] != places:
        bound = table.bind(sources)
        assert bound._device_sources is not None
        table._uploaded = (places, bound._device_sources)
    return table.device_table.launch(table._uploaded[1], bucket)


def quantize(
    weight_MK: torch.Tensor, rule: str, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix into fresh tensors: (codes e4m3fn [M, K], scale_inv fp32 [ceil(M/bm), ceil(K/bk)]).

    Does not look at the non-finite flag: see rules.py for the bytes NaN and Inf become.
    """
    if weight_MK.dim() != 2:
        raise ConfigError(f"quantize takes a matrix, not {list(weight_MK.shape)}; reshape it to 2-D first")
    rows, cols = weight_MK.shape
    name = str(weight_MK.dtype).removeprefix("torch.")
    table = _single_table(rows, cols, name, rule, tuple(block), checks.concrete_device(weight_MK.device))
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=weight_MK.device)
    table.bind([weight_MK]).launch(bucket)
    grid = rules.grid_shape(rows, cols, table.block)
    scale_inv = bucket[rows * cols :][: _scale_nbytes(table.items[0], table.block)]
    scale_inv = scale_inv.clone().view(torch.float32).view(grid)
    return bucket[: rows * cols].view(torch.float8_e4m3fn).view(rows, cols), scale_inv


@functools.lru_cache(maxsize=256)
def _single_table(
    rows: int, cols: int, dtype: str, rule: str, block: tuple[int, int], device: torch.device
) -> PackTable:
    item = PackItem(rows, cols, dtype, offset=0, scale_offset=rows * cols)
    return PackTable.build([item], rule=rule, block=block, device=device)


def _scale_nbytes(item: PackItem, block: tuple[int, int]) -> int:
    grid_m, grid_k = rules.grid_shape(item.rows, item.cols, block)
    return 4 * grid_m * grid_k


def _check_items(table: PackTable) -> int:
    """Raises ConfigError for an impossible item; returns the end of the last range."""
    spans = []
    for index, (item, dtype) in enumerate(zip(table.items, table.dtypes, strict=True)):
        if min(item.rows, item.cols, item.offset, item.scale_offset or 0) < 0:
            raise ConfigError(f"item {index} has a negative size or offset: {item}; check the plan's offsets")
        if item.scale_offset is None:
            spans.append((item.offset, item.rows * item.cols * dtype.itemsize, index))
            continue
        if item.dtype not in rules.QUANTIZABLE:
            raise ConfigError(
                f"item {index}: cannot quantize {item.dtype}; use one of {', '.join(rules.QUANTIZABLE)}, "
                "or scale_offset=None to copy its bytes"
            )
        spans.append((item.offset, item.rows * item.cols, index))
        spans.append((item.scale_offset, _scale_nbytes(item, table.block), index))
    checks.check_disjoint(spans)
    return max((offset + nbytes for offset, nbytes, _ in spans), default=0)


def _places(sources: Sequence[torch.Tensor]) -> _Places:
    return [(s.data_ptr(), s.shape, s.stride(), s.dtype, s.device) for s in sources]


def _pack_on_cpu(table: PackTable, item: PackItem, source: torch.Tensor, bucket: torch.Tensor) -> int:
    if item.rows == 0 or item.cols == 0:
        return 0
    source = source.detach().view(item.rows, item.cols)
    if item.scale_offset is None:
        payload = cpu.as_bytes(source)
        bucket[item.offset : item.offset + payload.numel()] = payload
        return int(cpu.has_nonfinite(source))
    codes = bucket[item.offset : item.offset + item.rows * item.cols].view(item.rows, item.cols)
    scale_inv = torch.empty(rules.grid_shape(item.rows, item.cols, table.block), dtype=torch.float32)
    nonfinite = cpu.quantize_into(source, codes, scale_inv, table.rule, table.block)
    scale_bytes = cpu.as_bytes(scale_inv)
    bucket[item.scale_offset : item.scale_offset + scale_bytes.numel()] = scale_bytes
    return int(nonfinite)
