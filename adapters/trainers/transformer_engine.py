"""Transformer Engine's FP8 parameters as they are: codes and scales, without a detour over BF16.

Works on the tensors' raw buffers and imports nothing of Transformer Engine: its own views, slices and
concatenations dequantize without a word. Facts about the buffers are from transformer-engine 2.20
(`pytorch/tensor/float8_blockwise_tensor.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8bridge.errors import UnsupportedModelError
from fp8bridge.types import Shard, TensorMeta

BLOCK = 128
CODES, SCALES, DEQUANTIZED = "#codes", "#scales", "#dequantized"
"""What is read of an FP8 parameter: suffixes of its key."""

_E4M3 = 7  # transformer_engine's DType.kFloat8E4M3, an IntEnum since 2.17 and a pybind enum before
_BLOCKWISE = ("Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage")
_OTHERS = {
    "Float8Tensor": "one scale for the whole tensor (recipe 'tensorwise' or 'delayed')",
    "MXFP8Tensor": "scales of 32 elements (recipe 'mxfp8')",
    "NVFP4Tensor": "4-bit codes",
}


def is_fp8(param: torch.Tensor) -> bool:
    """Whether this is a Transformer Engine FP8 parameter that passes through.

    Raises UnsupportedModelError, naming the class, for every other tensor that is not a plain one.
    """
    kind = type(param.data).__name__
    if type(param.data) is torch.Tensor:
        return False
    if kind in _BLOCKWISE:
        return True
    what = _OTHERS.get(kind)
    raise UnsupportedModelError(
        f"a {kind}" + (f", with {what}," if what else "") + " cannot be sent as 128x128 blocks without changing it; "
        "train with fp8_recipe 'blockwise', or keep BF16 parameters (fp8_param_gather off), which are quantized on "
        "the way"
    )


def check(param: Any) -> None:
    """Raise UnsupportedModelError unless the blocks are 128x128 of e4m3, as weights are."""
    if not param._is_2D_scaled:
        raise UnsupportedModelError("it has scales of 1x128, as activations have; weights need 128x128 blocks")
    if int(param._fp8_dtype) != _E4M3:
        raise UnsupportedModelError("its codes are E5M2; weights need E4M3")


def rule_of(param: Any) -> str:
    """The rounding rule the trainer quantizes this parameter with."""
    return "te_pow2" if param._quantizer.force_pow_2_scales else "te"


def read(param: Any, what: str) -> torch.Tensor:
    """CODES: float8_e4m3fn [N, K]. SCALES: fp32 [ceil(N/128), ceil(K/128)] without the padding columns, whose
    memory nobody writes. DEQUANTIZED: bf16 [N, K], a copy. Views where Transformer Engine keeps rowwise
    data; where it dropped those, transposed copies of the columnwise ones, which hold the same blocks."""
    rows, cols = param.shape
    grid = (-(-rows // BLOCK), -(-cols // BLOCK))
    if what == DEQUANTIZED:
        dequantized: torch.Tensor = param.dequantize(dtype=torch.bfloat16)
        return dequantized.detach()
    rowwise = param._rowwise_data is not None
    if what == CODES:
        codes: torch.Tensor = param._rowwise_data if rowwise else param._columnwise_data.t().contiguous()
        return codes.detach().view(torch.float8_e4m3fn)
    if rowwise:
        scales: torch.Tensor = param._rowwise_scale_inv.detach()
        return scales[: grid[0], : grid[1]]
    transposed: torch.Tensor = param._columnwise_scale_inv.detach()
    return transposed[: grid[1], : grid[0]].t().contiguous()


def live(param: Any, what: str) -> torch.Tensor | None:
    """The buffer whose memory `read` shows; None where that makes a copy."""
    if what == DEQUANTIZED or param._rowwise_data is None:
        return None
    buffer: torch.Tensor = param._rowwise_data if what == CODES else param._rowwise_scale_inv
    return buffer


def why_not_as_is(meta: TensorMeta, everywhere: Sequence[Shard]) -> str:
    """Why a tensor cannot be put together from its shards' own codes; empty if it can.

    `everywhere`: the shards of one tensor on all tensor-parallel ranks (every rank must decide alike).
    Each must start on a block in the parameter and in the tensor, and end on one or with the tensor.
    """
    rows, cols = meta.matrix
    for shard in everywhere:
        for name, src, dst, size, whole in (
            ("row", shard.src_row, shard.dst_row, shard.rows, rows),
            ("column", shard.src_col, shard.dst_col, shard.cols, cols),
        ):
            if src % BLOCK or dst % BLOCK:
                return f"a shard starts at {name} {dst} (row or column {src} of its parameter), inside a block"
            if size % BLOCK and dst + size != whole:
                return f"a shard ends at {name} {dst + size}, inside a block"
    return ""


def pass_through(meta: TensorMeta, shards: Sequence[Shard]) -> tuple[list[TensorMeta], list[Shard]]:
    """Codes and scales as tensors of their own, for shards that `why_not_as_is` has nothing against."""
    rows, cols = meta.matrix
    scale = TensorMeta(f"{meta.name}_scale_inv", (_ceil(rows), _ceil(cols)), "float32")
    codes = TensorMeta(meta.name, meta.shape, "float8_e4m3fn")
    found = []
    for s in shards:
        found.append(_renamed(s, s.tensor, s.param + CODES, 1))
        found.append(_renamed(s, scale.name, s.param + SCALES, BLOCK))
    return [codes, scale], found


def dequantized(meta: TensorMeta, shards: Sequence[Shard]) -> tuple[list[TensorMeta], list[Shard]]:
    """The weight in BF16, to be quantized again."""
    return [TensorMeta(meta.name, meta.shape, "bfloat16")], [
        _renamed(s, s.tensor, s.param + DEQUANTIZED, 1) for s in shards
    ]


def _renamed(s: Shard, tensor: str, param: str, unit: int) -> Shard:
    """The same rectangle, counted in blocks of `unit`."""
    return Shard(
        tensor,
        s.rank,
        param,
        -(-s.rows // unit),
        -(-s.cols // unit),
        s.src_row // unit,
        s.src_col // unit,
        s.dst_row // unit,
        s.dst_col // unit,
    )


def _ceil(size: int) -> int:
    return -(-size // BLOCK)
