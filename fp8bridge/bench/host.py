"""Host time of an update of many small tensors: what Python costs when the GPU has next to nothing to do."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from typing import Any

import torch

from ..bridge import connect
from ..layout import ServerLayout
from .servers import start_servers
from .source import ManySmall
from .sync import Case

_SHOWN = 25


def host_time(
    *, tensors: int = 18_000, rows: int = 128, cols: int = 128, device: str = "cuda", bucket_nbytes: int = 256 << 20
) -> dict[str, Any]:
    """Seconds of warm updates by stage, without the server's own load, and the profile of one (text)."""
    where = torch.device(device)
    source = ManySmall(tensors, rows, cols, device=where)
    source.hf_config = Case(label="host", hf_config=source.hf_config).config
    layout = ServerLayout.from_hf_config(source.hf_config)
    with (
        start_servers("loopback", 1, layout, device=where) as servers,
        connect(source, servers, transport="loopback", bucket_nbytes=bucket_nbytes) as bridge,
    ):
        first = bridge.update_weights(version=1)
        bridge.verify()
        warm = [bridge.update_weights(version=version) for version in range(2, 9)]
        profile = cProfile.Profile()
        profile.enable()
        bridge.update_weights(version=9)
        profile.disable()
        bridge.verify()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(_SHOWN)
    loads = [r.servers["loopback-0"].seconds["load"] for r in warm]
    return {
        "tensors": tensors,
        "shape": [rows, cols],
        "buckets": first.buckets,
        "first_s": first.seconds,
        "second_s": warm[0].seconds - loads[0],
        "seconds": statistics.median(r.seconds - load for r, load in zip(warm, loads, strict=True)),
        "stages": {name: statistics.median(r.stages[name].max for r in warm) for name in first.stages},
        "server_load_s": statistics.median(loads),
        "profile": text.getvalue(),
    }
