"""Marks for NVIDIA's profilers, where CUDA is in use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def ranges() -> Callable[[str], AbstractContextManager[Any]] | None:
    """A context manager that shows `fp8bridge:NAME` in Nsight Systems; None in a process without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    return lambda name: torch.cuda.nvtx.range(f"fp8bridge:{name}")
