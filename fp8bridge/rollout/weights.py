"""First weights of a server, in wire form: random ones, or a checkpoint's."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError
from ..kernels import quantize
from ..layout import ServerLayout
from ..types import TensorMeta

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the model needs, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


def random_weights(wanted: list[Wanted], layout: ServerLayout, *, seed: int, std: float) -> dict[str, torch.Tensor]:
    """Norms are 1, the rest normal. A tensor depends on `seed` and its name alone, not on the others."""
    stored: dict[str, torch.Tensor] = {}
    for want in wanted:
        if want.name.endswith("norm.weight"):
            tensor = torch.ones(want.shape)
        else:
            # torch's CPU generator keeps 32 bits of a seed, so both have to be in those.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{want.name}".encode()))
            tensor = torch.randn(want.shape, generator=generator) * std
        stored |= _stored(want, tensor, layout)
    return stored


def from_checkpoint(
    tensors: dict[str, torch.Tensor], wanted: list[Wanted], layout: ServerLayout
) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in wire form; FP8 codes and scales are taken bit for bit."""
    stored: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    problems: list[str] = []
    for want in wanted:
        tensor, scale_name = tensors.get(want.name), want.name + SCALE_SUFFIX
        if tensor is None or tuple(tensor.shape) != want.shape:
            found = "missing" if tensor is None else f"{list(tensor.shape)}, the config says {list(want.shape)}"
            problems.append(f"{want.name} is {found}")
            continue
        used.add(want.name)
        if tensor.dtype == torch.float8_e4m3fn:
            used.add(scale_name)
            problems += _codes_problems(want, tensors.get(scale_name), layout)
            stored |= {want.name: tensor, scale_name: tensors.get(scale_name, tensor)}
        else:
            stored |= _stored(want, tensor, layout)
    problems += [f"{name} is not part of this model" for name in tensors if name not in used]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(f"the weights do not fit the config: {'; '.join(problems[:5])}{more}")
    return stored


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder: those of the index if there is one, else of all files."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else sorted(p.name for p in folder.glob("*.safetensors"))
    )
    if not names:
        raise ConfigError(f"{folder} holds no .safetensors file; give a Hugging Face checkpoint folder")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= load_file(folder / name)
    return tensors


def _stored(want: Wanted, tensor: torch.Tensor, layout: ServerLayout) -> dict[str, torch.Tensor]:
    """One high-precision tensor as the server keeps it."""
    in_dtype = tensor.to(getattr(torch, layout.dtype))
    if layout.decide(TensorMeta(want.name, want.shape, layout.dtype)).action != "quantize":
        return {want.name: in_dtype}
    assert layout.block is not None, "decide() quantizes only with a block"
    rule = "ue8m0" if layout.scale_format == "ue8m0" else "sglang"
    codes, scale_inv = quantize(in_dtype, rule, layout.block)
    return {want.name: codes, want.name + SCALE_SUFFIX: scale_inv}


def _codes_problems(want: Wanted, scale: torch.Tensor | None, layout: ServerLayout) -> list[str]:
    if layout.decide(TensorMeta(want.name, want.shape, layout.dtype)).action != "quantize":
        return [f"{want.name} is FP8 in the checkpoint and not in its quantization_config"]
    assert layout.block is not None, "decide() quantizes only with a block"
    shape = layout.scale_shape((want.shape[0], want.shape[1]))
    if scale is None or tuple(scale.shape) != shape or scale.dtype != torch.float32:
        found = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        return [f"{want.name}{SCALE_SUFFIX} is {found}, expected torch.float32 {list(shape)}"]
    return []
