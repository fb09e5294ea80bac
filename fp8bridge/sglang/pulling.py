"""A stock SGLang server whose `loader` pulls the buckets over ZMQ: nothing is loaded before commit."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .server import SglangServer


class PullingSglangServer(SglangServer):
    """Atomic up to the load itself: an update that is aborted has not touched the model."""

    atomic = True

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None:
        super().begin(token, manifest_hash, lease_s=lease_s)
        self._folder = ""
        self._hash = manifest_hash

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        body = {
            "endpoints": list(addresses),
            "session": token,
            "manifest_hash": manifest_hash,
            "timeout_s": timeout_s,
            "name": self.name,
        }
        # No limit of ours on the whole transfer: each bucket has one, in the loader.
        reports = self.loader.call("pull", body, timeout_s=None)
        self._folder = str(reports[0].data["folder"])

    def commit(self, token: str, version: str) -> float | None:
        self.disclaim()
        body = {"manifest_hash": self._hash, "folder": self._folder, "replay": self.replay}
        start = time.perf_counter()
        reports = self.loader.call("load", body, timeout_s=self._timeout_s)
        load_s = time.perf_counter() - start
        self.load_way = str(reports[0].data["way"])
        self.loader.call("drop", {}, timeout_s=self._timeout_s)
        super().commit(token, version)
        return load_s

    def abort(self, token: str) -> None:
        try:
            if self._session_open or not self.has_sessions:
                self.loader.call("drop", {}, timeout_s=self._timeout_s)
        finally:
            super().abort(token)
