"""CUDA memory of one process opened in another on the same GPU: torch's own IPC handles, without pickle."""

from __future__ import annotations

from typing import Any

import torch


def export(memory: torch.Tensor) -> dict[str, Any]:
    """A flat uint8 CUDA tensor as plain data. The memory must outlive every process that opens it."""
    from torch.multiprocessing import reductions

    torch_reductions: Any = reductions
    # SGLang, if it is in this process, replaces the function; both answer with the same fields.
    reduce = getattr(torch_reductions, "_reduce_tensor_original", torch_reductions.reduce_tensor)
    _, fields = reduce(memory)
    (_, size, stride, offset, _, _, device, handle, nbytes, base, _, counter, counter_at, event, sync) = fields
    return {
        "shape": list(size),
        "stride": list(stride),
        "offset": offset,
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "handle": handle,
        "nbytes": nbytes,
        "base": base,
        "counter": counter,
        "counter_at": counter_at,
        "event": event,
        "sync": sync,
    }


def whole(memory: torch.Tensor) -> torch.Tensor:
    """All of the uint8 memory that a bucket is a part of."""
    found = torch.empty(0, dtype=torch.uint8, device=memory.device)
    return found.set_(memory.untyped_storage())


def open_export(data: dict[str, Any]) -> torch.Tensor:
    """The tensor, as a view of the other process's memory. RuntimeError if its GPU is not visible here."""
    from torch.multiprocessing import reductions

    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if data["uuid"] not in devices:
        raise RuntimeError(f"the trainer's GPU {data['uuid']} is not visible here; ipc is for one GPU that both use")
    torch_reductions: Any = reductions
    rebuild = getattr(torch_reductions, "_rebuild_cuda_tensor_original", torch_reductions.rebuild_cuda_tensor)
    tensor: torch.Tensor = rebuild(
        torch.Tensor,
        torch.Size(data["shape"]),
        tuple(data["stride"]),
        data["offset"],
        torch.UntypedStorage,
        torch.uint8,
        devices[data["uuid"]],
        data["handle"],
        data["nbytes"],
        data["base"],
        False,
        data["counter"],
        data["counter_at"],
        data["event"],
        data["sync"],
    )
    return tensor
