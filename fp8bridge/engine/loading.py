"""A Hugging Face checkpoint, FP8 or BF16, into a live Megatron model of any TP, PP and EP.

The rectangles that the adapter describes, walked the other way: each rank reads of the files only what
it holds. Blocks that fall on the parameter's own are copied as bytes; the rest is dequantized, and
quantized again where the parameter is FP8, by the rule that the trainer quantizes with.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8bridge.adapters import transformer_engine as te
from fp8bridge.adapters.hf_config import load_hf_config
from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import dequantize, quantize
from fp8bridge.layout import SCALE_SUFFIX, ServerLayout
from fp8bridge.ranks import agree, connect_ranks
from fp8bridge.types import Shard

from .progress import bar
from .weight_files import WeightFiles
from .writing import live_tensors, plain_matrix, reload_masters, settle_init_value, share_embeddings, write_fp8

TIMEOUT_S = 3600.0
"""Longest wait of one rank for another: files may come from a slow disk."""

BLOCK = (te.BLOCK, te.BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What became of the tensors, over all ranks. Names are the files'."""

    nbytes: int
    """Read by this rank."""
    kept: tuple[str, ...]
    """FP8 codes and scales, byte for byte."""
    copied: tuple[str, ...]
    """High precision in the files and in the model, in one dtype."""
    cast: tuple[str, ...]
    """High precision in both, in two dtypes."""
    quantized: tuple[str, ...]
    """High precision in the files, FP8 in the model."""
    dequantized: tuple[str, ...]
    """FP8 in the files, high precision in the model."""
    requantized: dict[str, str]
    """FP8 in both, but not with the same blocks: why."""
    unused: tuple[str, ...]
    """In the files only."""


def load_checkpoint(
    model_chunks: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    hf_config: Mapping[str, Any] | str | Path | None = None,
    optimizer: Any = None,
    progress: bool = False,
) -> Loaded:
    """Fill the model. Collective: every trainer rank calls it, with its own chunks.

    folder: safetensors and config.json. hf_config: by default the folder's. optimizer: the Megatron
    optimizer, if it was made already; its masters are then set from the loaded weights. progress: draw a
    bar on rank 0. Extra memory: one parameter. Rows of vocabulary padding become zero.

    The high-precision values that Transformer Engine keeps from the model's initialization, and the
    optimizer would start from, are replaced or removed.

    Raises ConfigError, on every rank, for tensors that are missing or of another shape, and for an
    optimizer whose masters would be stale.
    """
    with contextlib.closing(connect_ranks(timeout_s=TIMEOUT_S)) as ranks:
        made: list[_Loading] = []

        def prepare() -> list[str]:
            made.append(_Loading(model_chunks, Path(folder), hf_config, optimizer))
            return sorted(made[0].wanted)

        wanted = {name for names in agree(ranks, prepare) for name in names}
        loading = made[0]
        fates = agree(ranks, lambda: loading.run(progress=progress and ranks.rank == 0))
        share_embeddings(loading.chunks)
        agree(ranks, lambda: reload_masters(optimizer))
        named: dict[str, set[str]] = defaultdict(set)
        requantized: dict[str, str] = {}
        for fate in fates:
            requantized |= fate["requantized"]
            for kind, names in fate["names"].items():
                named[kind] |= set(names)
        named["kept"] -= requantized.keys()  # a rank whose own blocks could be kept does not speak for the whole
        scales = {name + SCALE_SUFFIX for name in wanted}
        unused = set(loading.files.tensors) - wanted - scales
    kinds = ("kept", "copied", "cast", "quantized", "dequantized")
    return Loaded(
        nbytes=loading.nbytes,
        requantized=dict(sorted(requantized.items())),
        unused=tuple(sorted(unused)),
        **{kind: tuple(sorted(named[kind])) for kind in kinds},
    )


@dataclass(slots=True)
class _Fate:
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    requantized: dict[str, str] = field(default_factory=dict)


class _Loading:
    """This rank's part of one load."""

    def __init__(self, model_chunks: Any, folder: Path, hf_config: Any, optimizer: Any) -> None:
        self.files = WeightFiles(folder)
        config = load_hf_config(folder if hf_config is None else hf_config)
        stored = load_hf_config(folder) if (folder / "config.json").is_file() else config
        self._block = ServerLayout.from_hf_config(stored).block
        self.chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self._live = live_tensors(self.chunks)
        self._source = MegatronSource(self.chunks, config)
        metas, shards = self._source.describe()
        names = {m.name for m in metas}
        scales = {name + SCALE_SUFFIX for name in names}
        self.wanted = {m.name: m for m in metas if m.name not in scales}
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            if shard.tensor in self.wanted:
                self._shards[shard.param.partition("#")[0]].append(shard)
        self._fate = _Fate()
        self.nbytes = 0
        self._check_files()
        _check_masters(self._live, optimizer)

    def _check_files(self) -> None:
        """Everything that this rank wants is there, in a form that can be read."""
        tensors = self.files.tensors
        missing = [name for name in self.wanted if name not in tensors]
        if missing:
            raise ConfigError(
                f"{self.files.folder} lacks {len(missing)} tensors of the model: {', '.join(missing[:5])}; is it "
                "another model's checkpoint?"
            )
        for name, meta in self.wanted.items():
            stored = tensors[name]
            if stored.shape != meta.shape:
                raise ConfigError(
                    f"{name} is {list(stored.shape)} in {self.files.folder}, {list(meta.shape)} in the model; is it "
                    "another model's checkpoint?",
                    tensor=name,
                )
            if stored.dtype == "float8_e4m3fn":
                self._check_scales(name)
            elif not getattr(torch, stored.dtype).is_floating_point or stored.dtype.startswith("float8"):
                raise ConfigError(f"{name} is {stored.dtype} in {self.files.folder}; known: e4m3, or 16 and 32 bits")

    def _check_scales(self, name: str) -> None:
        scale = self.files.scale_of(name)
        if scale is None or self._block is None:
            raise ConfigError(
                f"{name} is FP8 in {self.files.folder}, but has no {name}{SCALE_SUFFIX} or config.json no "
                "weight_block_size; only block-FP8 checkpoints can be loaded",
                tensor=name,
            )
        rows, cols = self.files.tensors[name].matrix
        expected = (-(-rows // self._block[0]), -(-cols // self._block[1]))
        if self.files.tensors[scale].shape != expected:
            raise ConfigError(
                f"{scale} is {list(self.files.tensors[scale].shape)}; {[rows, cols]} in blocks of {list(self._block)} "
                f"needs {list(expected)}: config.json is of another checkpoint",
                tensor=name,
            )

    def run(self, *, progress: bool) -> dict[str, Any]:
        """Fill every parameter; no collectives."""
        total = sum(s.rows * s.cols for shards in self._shards.values() for s in shards)
        with bar("loading", total, shown=progress) as advance:
            for key, shards in self._shards.items():
                if any("#" in s.param for s in shards):
                    self._fill_fp8(self._live[key], shards)
                else:
                    self._fill_plain(key, shards)
                advance(sum(s.rows * s.cols for s in shards))
        return {"names": dict(self._fate.names), "requantized": self._fate.requantized}

    def _fill_plain(self, key: str, shards: list[Shard]) -> None:
        view = plain_matrix(self._live[key], self.wanted[shards[0].tensor].dtype)
        self._fill(view, shards)
        for s in shards:
            same = self.files.tensors[s.tensor].dtype == str(view.dtype).removeprefix("torch.")
            kind = "dequantized" if self._is_fp8(s.tensor) else "copied" if same else "cast"
            self._fate.names[kind].append(s.tensor)

    def _fill_fp8(self, param: Any, shards: list[Shard]) -> None:
        """Rectangles on the parameter's blocks keep their bytes; if there are others, the whole is quantized first."""
        rows, cols = param.shape
        why: dict[str, str] = {}
        for s in shards:
            why[s.tensor] = why.get(s.tensor) or self._why_not_kept(param, s)
        kept = [s for s in shards if not why[s.tensor]]
        matrix: torch.Tensor | None = None
        if len(kept) < len(shards):
            matrix = torch.empty(rows, cols, dtype=param.dtype, device=param.device)
            self._fill(matrix, shards)
            codes, scales = quantize(matrix, te.rule_of(param))
        else:
            codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=param.device)
            grid = (-(-rows // te.BLOCK), -(-cols // te.BLOCK))
            scales = torch.empty(grid, dtype=torch.float32, device=param.device)
        for s in kept:
            codes[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols].view(torch.uint8).copy_(
                self._read(s.tensor, s.dst_row, s.dst_col, s.rows, s.cols).view(torch.uint8)
            )
            top, left = s.src_row // te.BLOCK, s.src_col // te.BLOCK
            part = self._scales(s.tensor, s.dst_row, s.dst_col, s.rows, s.cols)
            scales[top : top + part.shape[0], left : left + part.shape[1]] = part
        write_fp8(param, codes, scales)
        settle_init_value(param, None if kept else matrix)
        for s in shards:
            self._note(s.tensor, why[s.tensor])

    def _why_not_kept(self, param: Any, shard: Shard) -> str:
        """Empty if the file's bytes are the parameter's."""
        name = shard.tensor
        if not self._is_fp8(name):
            return f"{self.files.tensors[name].dtype} in the files"
        if not shard.param.endswith(te.CODES):
            return self._source.requantized[name]
        if self._block != BLOCK:
            return f"blocks of {self._block} in the files"
        ends = (shard.src_row + shard.rows, shard.src_col + shard.cols)
        if any(end % te.BLOCK and end != size for end, size in zip(ends, param.shape, strict=True)):
            return "its last block of the parameter holds another weight too"
        if _multiplies_by_powers_of_two(param.device):
            scales = self._scales(name, shard.dst_row, shard.dst_col, shard.rows, shard.cols)
            if bool((scales.contiguous().view(torch.int32) & 0x7FFFFF).any()):
                return "scales that are no powers of two, which this GPU cannot multiply by"
        return ""

    def _note(self, name: str, why: str) -> None:
        if not why:
            self._fate.names["kept"].append(name)
        elif self._is_fp8(name):
            self._fate.requantized[name] = why
        else:
            self._fate.names["quantized"].append(name)

    def _fill(self, matrix: torch.Tensor, shards: list[Shard]) -> None:
        """Every rectangle in `matrix`'s own dtype; what none covers (vocabulary padding) becomes zero."""
        if sum(s.rows * s.cols for s in shards) < matrix.numel():
            matrix.zero_()
        for s in shards:
            target = matrix[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols]
            target.copy_(self._high_precision(s, matrix.dtype, matrix.device))

    def _high_precision(self, s: Shard, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not self._is_fp8(s.tensor):
            return self._read(s.tensor, s.dst_row, s.dst_col, s.rows, s.cols).to(device)
        assert self._block is not None, "checked with the files"
        # From the block edge above and to the left on: the scales are those of whole blocks.
        above, before = s.dst_row % self._block[0], s.dst_col % self._block[1]
        box = (s.dst_row - above, s.dst_col - before, s.rows + above, s.cols + before)
        codes, scales = self._read(s.tensor, *box).to(device), self._scales(s.tensor, *box).to(device)
        return dequantize(codes, scales, self._block, dtype)[above:, before:]

    def _read(self, name: str, row: int, col: int, rows: int, cols: int) -> torch.Tensor:
        part = self.files.read(name, (row, row + rows), (col, col + cols))
        self.nbytes += part.numel() * part.element_size()
        return part

    def _scales(self, name: str, row: int, col: int, rows: int, cols: int) -> torch.Tensor:
        """Of the blocks that the box touches, fp32 on the CPU."""
        assert self._block is not None, "checked with the files"
        (bm, bk), end = self._block, (row + rows, col + cols)
        first, last = (row // bm, col // bk), (-(-end[0] // bm), -(-end[1] // bk))
        size = (last[0] - first[0], last[1] - first[1])
        return self._read(name + SCALE_SUFFIX, *first, *size).to(torch.float32)

    def _is_fp8(self, name: str) -> bool:
        return self.files.tensors[name].dtype == "float8_e4m3fn"


def _check_masters(params: Mapping[str, Any], optimizer: Any) -> None:
    if optimizer is None and any(hasattr(p, "main_param") for p in params.values()):
        raise ConfigError(
            "the optimizer was made before the weights are loaded, and holds masters of the old ones; pass it as "
            "optimizer=, or load first"
        )


def _multiplies_by_powers_of_two(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
