"""SGLang's HTTP endpoints for weights, one method each. Tested with 0.5.17 and 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..http import Http
from ..plan import Bucket

TESTED = ((0, 5, 10), (0, 5, 23))
"""Oldest and newest version that this client is written for."""

SESSIONS_SINCE = (0, 5, 21)
"""From here on updates run between /begin_weight_update and /end_weight_update; before, there is neither."""


INCOMPLETE = "incomplete"
"""Prefix of the weight version of a server whose update is under way or ended early."""


def incomplete(token: str) -> str:
    return f"{INCOMPLETE}-{token[:8]}"


class SglangClient:
    """See `Http` for what is raised. Thread-safe. Every call is one request."""

    def __init__(self, http: Http) -> None:
        self.name = http.name
        self._http = http

    def server_info(self) -> dict[str, Any]:
        """Launch arguments (tp_size, pp_size, dp_size, model_path, ...) and `version`."""
        return self._http.call("GET", "/server_info")

    def weight_version(self) -> str | None:
        version = self._http.call("GET", "/model_info").get("weight_version")
        return None if version is None else str(version)

    def pause(self, mode: str) -> None:
        self._http.call("POST", "/pause_generation", {"mode": mode})

    def resume(self, *, timeout_s: float) -> None:
        self._http.call("POST", "/continue_generation", {"torch_empty_cache": False}, timeout_s=timeout_s)

    def begin(self) -> None:
        self._http.call("POST", "/begin_weight_update", {"selector": "all"})

    def end(self) -> None:
        """Process the weights after loading, and close the session."""
        self._http.call("POST", "/end_weight_update", {})

    def init_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, timeout_s: float
    ) -> None:
        """Blocks until every rank of the group has come."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        self._http.call("POST", "/init_weights_update_group", body, timeout_s=timeout_s)

    def destroy_group(self, group: str, *, timeout_s: float) -> None:
        self._http.call("POST", "/destroy_weights_update_group", {"group_name": group}, timeout_s=timeout_s)

    def update_from_distributed(self, bucket: Bucket, group: str, *, timeout_s: float) -> None:
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
        self._http.call("POST", "/update_weights_from_distributed", body, timeout_s=timeout_s)

    def update_from_tensor(self, payloads: Sequence[str], load_format: str, *, timeout_s: float | None) -> None:
        """`payloads`: one for each TP rank, in SGLang's own serialization (`payload.py`)."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": False}
        self._http.call("POST", "/update_weights_from_tensor", body, timeout_s=timeout_s)

    def set_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._http.call("POST", "/update_weight_version", body)

    def flush_cache(self, *, timeout_s: float) -> None:
        """Waits for the server to be idle, at most that long."""
        self._http.call("POST", f"/flush_cache?timeout={timeout_s:g}")

    def checker(self, action: str) -> dict[str, Any]:
        return self._http.call("POST", "/weights_checker", {"action": action})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Needs a server with --enable-memory-saver; released weights come back as garbage."""
        self._http.call("POST", "/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        self._http.call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    def close(self) -> None:
        self._http.close()


def version_of(text: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23.post1"; () where it is none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()
