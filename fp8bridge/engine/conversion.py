"""BF16 <-> FP8 of a checkpoint folder, without a trainer: tensor by tensor, one in memory at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fp8bridge.adapters.hf_config import load_hf_config
from fp8bridge.errors import ConfigError, NonFiniteError
from fp8bridge.kernels import dequantize, quantize
from fp8bridge.layout import SCALE_SUFFIX, ServerLayout
from fp8bridge.types import TensorMeta

from .progress import bar
from .quantization import quantized_config
from .weight_files import (
    FileWriter,
    WeightFiles,
    copy_other_files,
    discard_folder,
    finish_folder,
    start_folder,
    write_config,
    write_index,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written. changed: tensors that were quantized or dequantized; copied: those that were not."""

    folder: Path
    rule: str | None
    changed: tuple[str, ...]
    copied: tuple[str, ...]
    nbytes_before: int
    nbytes_after: int


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of an output file and where it comes from. part: of a quantized weight, which half."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    part: Literal["copy", "codes", "scales", "dequantized"] = "copy"


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: Literal["fp8", "bf16"],
    *,
    rule: Literal["sglang", "te", "te_pow2", "ue8m0"] = "sglang",
    overwrite: bool = False,
    progress: bool = False,
) -> Converted:
    """Write `target`, a folder like `source`, whose linear weights are 128x128-block FP8, or BF16 again.

    rule: rounding rule for `fp8`; `te_pow2` is what a Transformer Engine trainer quantizes with. Which
    weights are quantized is SGLang's rule (`ServerLayout.decide`); a tensor's file stays the same. The
    folder appears when all of it is on disk.

    Raises ConfigError for a source that is in that form already or cannot be read, NonFiniteError for
    NaN or Inf, naming the tensor.
    """
    files, config = WeightFiles(source), load_hf_config(source)
    layout = ServerLayout.from_hf_config(config)
    if (layout.block is not None) == (to == "fp8"):
        raise ConfigError(f"{source} is {layout.describe()} already; nothing to convert to {to}")
    written = _config(config, to, rule)
    outputs = _outputs(files, ServerLayout.from_hf_config(written) if to == "fp8" else layout, to)
    tensors = [t for held in outputs.values() for t in held]
    done = Path(target).absolute()
    temporary = start_folder(done, overwrite=overwrite)
    try:
        _write_files(files, outputs, temporary, layout, rule, bar_shown=progress)
        copy_other_files(files.folder, temporary)
        write_index(temporary, {file: [t.name for t in held] for file, held in outputs.items()}, _nbytes(tensors))
        write_config(temporary, written)
        finish_folder(temporary, done)
    except BaseException:
        discard_folder(temporary)
        raise
    return Converted(
        folder=done,
        rule=rule if to == "fp8" else None,
        changed=tuple(sorted({t.source for t in tensors if t.part != "copy"})),
        copied=tuple(sorted(t.source for t in tensors if t.part == "copy")),
        nbytes_before=sum(s.nbytes for s in files.tensors.values()),
        nbytes_after=_nbytes(tensors),
    )


def _config(hf_config: dict[str, Any], to: Literal["fp8", "bf16"], rule: str) -> dict[str, Any]:
    """The new config.json. Only `ue8m0` says so in it: other power-of-two scales are fp32 to who reads them."""
    config = quantized_config(hf_config, to)
    if to == "fp8" and rule == "ue8m0":
        config["quantization_config"] |= {"scale_fmt": "ue8m0"}
    return config


def _write_files(
    files: WeightFiles,
    outputs: dict[str, list[_Output]],
    folder: Path,
    layout: ServerLayout,
    rule: str,
    *,
    bar_shown: bool,
) -> None:
    with bar("converting", sum(s.nbytes for s in files.tensors.values()), shown=bar_shown) as advance:
        for file, tensors in outputs.items():
            with FileWriter(folder / file, [(t.name, t.dtype, t.shape) for t in tensors]) as writer:
                for name, group in _by_source(tensors).items():
                    _write(files, name, group, writer, layout, rule)
                    advance(files.tensors[name].nbytes)


def _outputs(files: WeightFiles, layout: ServerLayout, to: str) -> dict[str, list[_Output]]:
    """File -> what it will hold, larger item sizes first, so that every tensor is aligned."""
    found: dict[str, list[_Output]] = {}
    for name, stored in files.tensors.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        if to == "bf16" and weight != name and weight in files.tensors:
            continue
        made = [_Output(name, stored.dtype, stored.shape, name)]
        if to == "bf16" and stored.dtype == "float8_e4m3fn":
            if files.scale_of(name) is None:
                raise ConfigError(f"{name} is FP8 without {name}{SCALE_SUFFIX}; {files.folder} is not block FP8")
            made = [_Output(name, "bfloat16", stored.shape, name, "dequantized")]
        elif to == "fp8" and _is_quantized(name, stored.dtype, stored.shape, layout):
            scale = layout.scale_shape(stored.matrix)
            made = [
                _Output(name, "float8_e4m3fn", stored.shape, name, "codes"),
                _Output(name + SCALE_SUFFIX, "float32", scale, name, "scales"),
            ]
        found.setdefault(stored.file, []).extend(made)
    return {
        file: sorted(tensors, key=lambda t: (-getattr(torch, t.dtype).itemsize, t.name))
        for file, tensors in found.items()
    }


def _is_quantized(name: str, dtype: str, shape: tuple[int, ...], layout: ServerLayout) -> bool:
    if dtype.startswith("float8"):
        raise ConfigError(f"{name} is FP8 already, although config.json has no quantization_config; repair that first")
    return (
        dtype in ("bfloat16", "float16", "float32")
        and layout.decide(TensorMeta(name, shape, dtype)).action == "quantize"
    )


def _by_source(tensors: list[_Output]) -> dict[str, list[_Output]]:
    found: dict[str, list[_Output]] = {}
    for t in tensors:
        found.setdefault(t.source, []).append(t)
    return found


def _write(
    files: WeightFiles, name: str, outputs: list[_Output], writer: FileWriter, layout: ServerLayout, rule: str
) -> None:
    matrix = files.read(name)
    parts: dict[str, Any] = {"copy": matrix}
    if outputs[0].part == "dequantized":
        scales = files.read(name + SCALE_SUFFIX)
        assert layout.block is not None, "checked before"
        parts["dequantized"] = dequantize(matrix, scales, layout.block, torch.bfloat16)
    elif outputs[0].part != "copy":
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError(f"{name} in {files.folder} has NaN or Inf values; nothing was written", tensor=name)
        parts["codes"], parts["scales"] = quantize(matrix, rule)
    for t in outputs:
        writer.write(t.name, parts[t.part])


def _nbytes(tensors: list[_Output]) -> int:
    return sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in tensors)
