"""A live Megatron model, of any TP, PP and EP, as a Hugging Face folder: FP8 or BF16.

What a sync sends to servers, this writes to disk: the same plan, gather and packing. A bucket is a file,
byte for byte, so each rank writes the files of its own buckets, and a weight is always beside its scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fp8bridge.adapters import transformer_engine as te
from fp8bridge.adapters.hf_config import load_hf_config
from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.config import BridgeConfig
from fp8bridge.errors import RankError
from fp8bridge.gather import Gather
from fp8bridge.layout import SCALE_SUFFIX, ServerLayout
from fp8bridge.pack import Packer
from fp8bridge.plan import Bucket, Plan
from fp8bridge.planning import agree_on_plan
from fp8bridge.ranks import Ranks, agree, connect_ranks
from fp8bridge.types import Shard, TensorMeta

from .loading import TIMEOUT_S
from .progress import bar
from .quantization import quantized_config
from .weight_files import (
    FileWriter,
    copy_other_files,
    discard_folder,
    file_name,
    finish_folder,
    start_folder,
    write_config,
    write_index,
)

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A folder that was written."""

    folder: Path
    files: int
    nbytes: int
    rule: str | None
    """Rounding rule of what was quantized; None for BF16."""
    notes: tuple[str, ...]
    """What is not the trainer's own bytes, and why, as a plan's fallbacks say it."""


def save_checkpoint(
    model_chunks: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    hf_config: Mapping[str, Any] | str | Path,
    *,
    to: Literal["fp8", "bf16"] | None = None,
    rule: Literal["sglang", "te", "te_pow2", "ue8m0"] | None = None,
    like: str | Path | None = None,
    file_nbytes: int = GIB,
    allow_cast: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> Saved:
    """Write the model. Collective: every trainer rank calls it, with its own chunks, on one file system.

    hf_config: of the model; it becomes config.json. to: `fp8` (128x128 blocks) or `bf16`; None: as
    hf_config's quantization_config says. rule: of what must be quantized; None: the trainer's own, else
    the layout's. like: a model folder whose tokenizer and other small files are copied. file_nbytes:
    largest file; extra memory is one of them on each rank, and what is gathered for it. allow_cast: permit
    tensors that are not quantized to change dtype (an fp32 norm into a bf16 checkpoint).

    The folder appears when everything is on disk; with `overwrite` an old one is whole until then. Raises,
    on every rank, what a plan raises, NonFiniteError, and ConfigError for a folder that exists.
    """
    target = Path(folder).absolute()
    config = load_hf_config(hf_config)
    written = quantized_config(config, to)
    layout = ServerLayout.from_hf_config(written)
    settings = BridgeConfig(transport="loopback", rule=rule, bucket_nbytes=file_nbytes, allow_cast=allow_cast)
    with contextlib.closing(connect_ranks(timeout_s=TIMEOUT_S)) as ranks:
        made: list[Any] = []

        def prepare() -> None:
            source = MegatronSource(model_chunks, config)
            made.append(source if layout.block else _Dequantized(source))

        agree(ranks, prepare)
        plan = agree_on_plan(ranks, made[0], layout, settings)
        started = agree(ranks, lambda: str(start_folder(target, overwrite=overwrite)) if ranks.rank == 0 else "")
        temporary = Path(started[0])
        try:
            _write_files(plan, ranks, made[0], temporary, progress=progress)
            agree(ranks, lambda: _finish(ranks, plan, temporary, target, written, like))
        except BaseException:
            if ranks.rank == 0:
                discard_folder(temporary)
            raise
    files = len(plan.manifest.buckets)
    return Saved(folder=target, files=files, nbytes=plan.nbytes, rule=plan.rule, notes=tuple(plan.fallbacks()))


def _write_files(plan: Plan, ranks: Ranks, source: Any, folder: Path, *, progress: bool) -> None:
    """Collective."""
    saving = _Saving(plan, ranks, source, folder)
    agree(ranks, saving.check)
    agree(ranks, lambda: saving.run(progress=progress and ranks.rank == 0))


class _Saving:
    """This rank's part: rounds of gather and pack, and its own files."""

    def __init__(self, plan: Plan, ranks: Ranks, source: Any, folder: Path) -> None:
        self._plan, self._rank, self._source, self._folder = plan, ranks.rank, source, folder
        self._gather = Gather(plan, ranks, source)
        self._packer = Packer(plan, ranks.rank)

    def check(self) -> None:
        """Parameters complete and finite."""
        self._gather.check()

    def run(self, *, progress: bool) -> None:
        """Every round. After an error the rounds go on, for the sake of ranks that wait for this one's shards."""
        error: Exception | None = None
        mine = sum(b.nbytes for b in self._plan.manifest.buckets if b.owner == self._rank)
        with bar("saving", mine, shown=progress) as advance:
            for index in range(len(self._plan.rounds)):
                bucket = self._gather.bucket(index)
                memory = None
                if bucket is not None:
                    slot, _ = self._packer.reserve(bucket)
                    memory = self._packer.memory(bucket, slot, self._gather.device)
                try:
                    matrices = self._gather.round(index, memory)
                    if bucket is not None and memory is not None and error is None:
                        self._packer.pack(bucket, memory, matrices)
                        self._write(bucket, memory)
                        advance(bucket.nbytes)
                except RankError:
                    raise
                except Exception as err:  # noqa: BLE001 - raised below, when no rank waits for this one any more
                    error = error or err
        if error is not None:
            raise error

    def _write(self, bucket: Bucket, memory: torch.Tensor) -> None:
        path = self._folder / file_name(bucket.index, len(self._plan.manifest.buckets))
        with FileWriter(path, [(e.name, e.dtype, e.shape) for e in bucket.entries]) as file:
            file.write_all(memory)


class _Dequantized:
    """A source whose FP8 parameters are given in BF16."""

    def __init__(self, source: MegatronSource) -> None:
        self._source = source
        self.hf_config = source.hf_config
        self.before_read, self.read = source.before_read, source.read

    def describe(self) -> tuple[list[TensorMeta], list[Shard]]:
        metas, shards = self._source.describe()
        fp8 = {m.name for m in metas if m.dtype == "float8_e4m3fn"}
        scales = {name + SCALE_SUFFIX for name in fp8}
        plain = [
            TensorMeta(m.name, m.shape, "bfloat16") if m.name in fp8 else m for m in metas if m.name not in scales
        ]
        return plain, [_dequantized(s) if s.tensor in fp8 else s for s in shards if s.tensor not in scales]


def _dequantized(shard: Shard) -> Shard:
    name, rank, param, *box = astuple(shard)
    return Shard(name, rank, param.removesuffix(te.CODES) + te.DEQUANTIZED, *box)


def _finish(
    ranks: Ranks, plan: Plan, temporary: Path, target: Path, hf_config: dict[str, Any], like: str | Path | None
) -> None:
    """Rank 0, when every file is on disk: index and config, then the rename."""
    if ranks.rank != 0:
        return
    buckets = plan.manifest.buckets
    files = {file_name(b.index, len(buckets)): [e.name for e in b.entries] for b in buckets}
    if like is not None:
        copy_other_files(Path(like), temporary)
    write_index(temporary, files, plan.nbytes)
    write_config(temporary, hf_config)
    finish_folder(temporary, target)
