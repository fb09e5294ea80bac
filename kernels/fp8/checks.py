"""Argument checks shared by the tables: each failure is one ConfigError naming the item's index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8bridge.errors import ConfigError


def torch_dtype(name: str, index: int) -> torch.dtype:
    """The dtype of an item, by its torch name without `torch.`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"item {index}: {name!r} is no torch dtype; use a name such as 'bfloat16'")
    return dtype


def check_matrix(tensor: torch.Tensor, index: int, rows: int, cols: int, dtype: torch.dtype) -> None:
    """`tensor` is a [rows, cols] matrix with column stride 1 (or a vector of `cols`, when rows is 1)."""
    shape = (1, *tensor.shape) if tensor.dim() == 1 else tuple(tensor.shape)
    if shape != (rows, cols) or tensor.dtype != dtype:
        raise ConfigError(
            f"tensor {index} is {tensor.dtype} {list(tensor.shape)}, but item {index} of the table is "
            f"{dtype} [{rows}, {cols}]; build the table from the tensors it will be used with"
        )
    if cols > 1 and rows > 0 and tensor.stride(-1) != 1:
        raise ConfigError(
            f"tensor {index} has column stride {tensor.stride(-1)}; a row must be contiguous: "
            "pass .contiguous(), or the transposed matrix"
        )


def row_stride(tensor: torch.Tensor) -> int:
    """Elements from one row to the next; the row length when there is no next row."""
    return tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else tensor.shape[-1]


def check_count(tensors: Sequence[torch.Tensor], expected: int) -> None:
    if len(tensors) != expected:
        raise ConfigError(f"{len(tensors)} tensors for a table of {expected} items; pass one tensor per item")


def check_device(tensor: torch.Tensor, device: torch.device, what: str) -> None:
    if tensor.device != device:
        raise ConfigError(f"{what} is on {tensor.device}, but the table was built for {device}; move one of them")


def check_bucket(bucket: torch.Tensor, nbytes: int, device: torch.device) -> None:
    """A flat contiguous uint8 tensor of at least `nbytes`; its base address may have any alignment."""
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ConfigError(f"a bucket is a flat contiguous uint8 tensor, not {bucket.dtype} {list(bucket.shape)}")
    if bucket.numel() < nbytes:
        raise ConfigError(f"the bucket holds {bucket.numel()} bytes, but the table needs {nbytes}; make it larger")
    check_device(bucket, device, "the bucket")


def check_disjoint(spans: Sequence[tuple[int, int, int]]) -> None:
    """Spans are (offset, nbytes, item index); no two may share a byte."""
    end, owner = 0, -1
    for offset, nbytes, index in sorted(span for span in spans if span[1]):
        if offset < end:
            raise ConfigError(
                f"items {owner} and {index} overlap in the bucket at byte {offset}; give each its own range"
            )
        end, owner = offset + nbytes, index


def concrete_device(device: torch.device | str) -> torch.device:
    """`cuda` means the current CUDA device, so that it compares equal with a tensor's device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def uses_triton(device: torch.device) -> bool:
    """Whether work on this device goes to the Triton kernels. Tests answer yes for the CPU as well."""
    return device.type == "cuda"
