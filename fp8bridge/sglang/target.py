"""A stock SGLang server as a trainer rank other than 0 knows it: where its buckets go, and nothing else."""

from __future__ import annotations

from ..config import BridgeConfig
from ..http import Http
from ..plan import Bucket
from ..protocols import Target
from .client import SglangClient, incomplete


class BucketTarget:
    """`token`: secret of the running update, set when it is opened."""

    def __init__(self, target: Target, config: BridgeConfig) -> None:
        keys = {"api_key": config.api_key, "admin_api_key": config.admin_api_key}
        self.name = target.name
        self.tp_size = target.tp_size
        self.client = SglangClient(Http(target.name, timeout_s=config.request_timeout_s, **keys))
        self.token = ""
        self._disclaimed = ""

    def load_bucket(self, bucket: Bucket, group: str, *, timeout_s: float) -> None:
        """As `SglangServer.load_bucket`: no rank writes a byte before the server has given up its version."""
        if self._disclaimed != self.token:
            self.client.set_version(incomplete(self.token))
            self._disclaimed = self.token
        self.client.update_from_distributed(bucket, group, timeout_s=timeout_s)
