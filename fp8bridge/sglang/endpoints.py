"""SGLang's HTTP endpoints for weights, one function each. Tested with 0.5.17 and 0.5.23.

A function makes a `Call`; `client.py` sends it, with threads or with asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..http import CONFIGURED
from ..plan import Bucket

T = TypeVar("T")

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and what its answer comes to. timeout_s: None waits for ever."""

    method: str
    path: str
    body: Answer | None
    read: Callable[[Answer], T]
    timeout_s: float | None = CONFIGURED


def server_info() -> Call[Answer]:
    """Launch arguments (tp_size, pp_size, dp_size, model_path, ...) and `version`."""
    return Call("GET", "/server_info", None, dict)


def weight_version() -> Call[str | None]:
    """What the server says it holds; None where it does not say."""

    def read(answer: Answer) -> str | None:
        version = answer.get("weight_version")
        return None if version is None else str(version)

    return Call("GET", "/model_info", None, read)


def pause(mode: str) -> Call[None]:
    """Stop generating. abort: requests end; retract: they wait and begin anew; in_place: they wait as they are."""
    return _post("/pause_generation", {"mode": mode})


def resume(*, timeout_s: float) -> Call[None]:
    """Go on generating."""
    return _post("/continue_generation", {"torch_empty_cache": False}, timeout_s)


def begin() -> Call[None]:
    """Open a session of updates; from 0.5.21 on, and there every update needs one."""
    return _post("/begin_weight_update", {"selector": "all"})


def end() -> Call[None]:
    """Process the weights after loading, and close the session."""
    return _post("/end_weight_update", {})


def init_group(
    *, host: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, timeout_s: float
) -> Call[None]:
    """Join a process group for updates. Blocks until every rank of the group has come."""
    body = {
        "master_address": host,
        "master_port": port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group,
        "backend": backend,
    }
    return _post("/init_weights_update_group", body, timeout_s)


def destroy_group(group: str, *, timeout_s: float) -> Call[None]:
    """Leave it."""
    return _post("/destroy_weights_update_group", {"group_name": group}, timeout_s)


def update_from_distributed(bucket: Bucket, group: str, *, timeout_s: float) -> Call[None]:
    """Receive one broadcast of the bucket's bytes from rank 0 of the group, and load it.

    The caches are left alone (flushed once, after all buckets) and so is the version.
    """
    entries = [e for e in bucket.entries if e.nbytes]
    body = {
        "names": [e.name for e in entries],
        "dtypes": [e.dtype for e in entries],
        "shapes": [list(e.shape) for e in entries],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    return _post("/update_weights_from_distributed", body, timeout_s)


def update_from_tensor(payloads: Sequence[str], load_format: str, *, timeout_s: float | None) -> Call[None]:
    """`payloads`: one for each TP rank, in SGLang's own serialization (`payload.py`)."""
    body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": False}
    return _post("/update_weights_from_tensor", body, timeout_s)


def update_from_ipc(sockets: Mapping[str, str], *, timeout_s: float | None) -> Call[None]:
    """Receive weights by checkpoint-engine's protocol. `sockets`: ZMQ address by GPU, as in GPU-<uuid>.

    Answers when the other side of the socket has said that it is done.
    """
    return _post("/update_weights_from_ipc", {"zmq_handles": dict(sockets), "flush_cache": False}, timeout_s)


def set_version(version: str) -> Call[None]:
    """What the server says it holds from now on."""
    return _post("/update_weight_version", {"new_version": version, "abort_all_requests": False})


def flush_cache(*, timeout_s: float) -> Call[None]:
    """Waits for the server to be idle, at most that long."""
    return _post(f"/flush_cache?timeout={timeout_s:g}", None)


def checker(action: str) -> Call[Answer]:
    """SGLang's own hashes of its parameters (action "checksum"); needs a GPU on the server."""
    return Call("POST", "/weights_checker", {"action": action}, dict)


def release_memory(tags: Sequence[str]) -> Call[None]:
    """Give GPU memory back: tags of "weights", "kv_cache", "cuda_graph". Needs a server with
    --enable-memory-saver; released weights come back as garbage."""
    return _post("/release_memory_occupation", {"tags": list(tags)})


def resume_memory(tags: Sequence[str]) -> Call[None]:
    """Take it again, at the addresses it was at."""
    return _post("/resume_memory_occupation", {"tags": list(tags)})


def _post(path: str, body: Answer | None, timeout_s: float | None = CONFIGURED) -> Call[None]:
    return Call("POST", path, body, _nothing, timeout_s)


def _nothing(answer: Answer) -> None:
    return None
