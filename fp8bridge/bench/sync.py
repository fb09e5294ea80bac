"""One configuration of `bench sync`: connect, update, verify, and only then figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..bridge import Bridge, connect
from ..config import MIB
from ..errors import ConfigError
from ..layout import ServerLayout
from ..plan import Plan
from ..predict import Links, predict
from ..report import SyncReport
from .baseline import open_sink, run_baseline
from .ceilings import broadcast_gbytes_per_s, copy_gbytes_per_s, socket_gbytes_per_s
from .servers import start_servers
from .source import SyntheticSource

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS = ("fp8", "bf16")
IN_PROCESS_BUCKET_S = 0.00025
"""What a bucket costs without a wire: launches and synchronizations (H200, sweep over bucket sizes)."""

Progress = Callable[[str, int, int], None]
"""Called with (what is done, buckets done, buckets in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration. `servers`: URLs, or how many of the benchmark's own. `only`: tensors whose name has this."""

    label: str
    hf_config: dict[str, Any]
    format: str = "fp8"
    transport: str = "zmq"
    servers: tuple[str, ...] | int = 1
    bucket_nbytes: int = 256 * MIB
    only: str = ""
    repeat: int = 3
    device: str = "cpu"
    server_device: str = ""
    """Of the benchmark's own `nccl` servers; "" is `device`."""
    baseline: bool = True
    settings: tuple[tuple[str, Any], ...] = ()
    """Further fields of BridgeConfig."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {self.format!r}")
        if self.repeat < 1:
            raise ConfigError(f"repeat must be at least 1, got {self.repeat}")

    @property
    def count(self) -> int:
        return self.servers if isinstance(self.servers, int) else len(self.servers)

    @property
    def far(self) -> torch.device:
        where = torch.device(self.server_device or self.device)
        return torch.device("cuda", 0) if where == torch.device("cuda") else where

    @property
    def config(self) -> dict[str, Any]:
        bare = {key: value for key, value in self.hf_config.items() if key != "quantization_config"}
        return bare | ({"quantization_config": BLOCK_FP8} if self.format == "fp8" else {})


def run_case(case: Case, source: SyntheticSource, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure one configuration: plain data for the table, JSON and plot.

    The servers are verified after the first update and after the last one; VerifyError, and no figure, if a
    byte is wrong.
    """
    device = torch.device(case.device)
    source.hf_config = case.config
    layout = ServerLayout.from_hf_config(case.config)
    reports: list[SyncReport] = []
    with (
        start_servers(case.transport, _given(case), layout, device=case.far) as servers,
        _connected(case, source, servers) as bridge,
    ):
        base_nbytes, peak = _allocated(device), 0
        for version in range(1, case.repeat + 2):
            reports.append(
                bridge.update_weights(version=_next(bridge, version), on_progress=_of(progress, case, version))
            )
            peak = max(peak, _peak(device) - base_nbytes)
            if version in (1, case.repeat + 1):
                bridge.verify()
            source.step()
            _allocated(device)
        sent = bridge._sender.sent_checksums()
        summary = bridge.plan.summary()
        largest = max(e.nbytes for b in bridge.plan.manifest.buckets for e in b.entries)
        plan = bridge.plan
    result = _figures(case, reports) | {
        "tensors": summary["tensors"],
        "nbytes_in": summary["nbytes_in"],
        "largest_tensor_nbytes": largest,
        "peak_device_nbytes": peak if device.type == "cuda" else None,
        "ceiling": _ceiling(case, device, reports[-1]),
    }
    result["predicted_s"] = _predicted(result, plan)
    if case.baseline:
        source.step()  # back to the values of the last update: it flips signs
        result["baseline"] = _baseline(case, source, layout, sent, reports[-1].rule)
    return result


def _given(case: Case) -> list[str] | int:
    return case.servers if isinstance(case.servers, int) else list(case.servers)


def _connected(case: Case, source: SyntheticSource, servers: Sequence[Any]) -> Bridge:
    settings: dict[str, Any] = {"transport": case.transport, "bucket_nbytes": case.bucket_nbytes}
    settings |= {"group_backend": _backend(case)} | dict(case.settings)
    return connect(source, servers, **settings)


def _backend(case: Case) -> str:
    return "gloo" if case.device == "cpu" else "nccl"


def _next(bridge: Bridge, version: int) -> int:
    """Above what running servers claim already."""
    claimed = [int(text) for text in bridge._reported.values() if text and text.isdigit()]
    return version + max(claimed, default=0)


def _of(progress: Progress, case: Case, version: int) -> Callable[[int, int], None]:
    return lambda done, total: progress(f"{case.label} {case.format}, update {version}", done, total)


def _figures(case: Case, reports: list[SyncReport]) -> dict[str, Any]:
    """Medians over the updates after the first."""
    warm = reports[1:]

    def median(pick: Callable[[SyncReport], float]) -> float:
        return statistics.median(pick(r) for r in warm)

    loads = [r.server_stages["load"].max for r in warm if "load" in r.server_stages]
    stages = {name: median(lambda r, name=name: r.stages[name].max) for name in warm[0].stages}  # type: ignore[misc]
    return {
        "label": case.label,
        "format": case.format,
        "transport": case.transport,
        "servers": case.count,
        "only": case.only,
        "bucket_nbytes": case.bucket_nbytes,
        "buckets": warm[-1].buckets,
        "nbytes": warm[-1].nbytes,
        "first_s": reports[0].seconds,
        "seconds": median(lambda r: r.seconds),
        "stages": stages,
        "paused_s": median(lambda r: r.paused_s),
        "server_load_s": statistics.median(loads) if loads else None,
        "gbytes_per_s": median(lambda r: r.gbytes_per_s),
        "send_gbytes_per_s": median(lambda r: r.stage_gbytes_per_s["send"]),
        "extra_nbytes": warm[-1].extra_nbytes.max,
        "fallbacks": list(warm[-1].fallbacks),
        "reports": [r.as_dict() for r in reports],
    }


def _ceiling(case: Case, device: torch.device, report: SyncReport) -> dict[str, Any]:
    """The measured best of what this transport rests on, with messages of the same size."""
    message = min(case.bucket_nbytes, report.nbytes)
    if case.transport == "loopback":
        return {"kind": "device copy", "gbytes_per_s": copy_gbytes_per_s(device, max(message, MIB))}
    total = max(message, min(report.nbytes, 4 << 30))
    if case.transport == "nccl":
        near = torch.device("cuda", 0) if device.type == "cuda" else device
        speed = broadcast_gbytes_per_s(message, backend=_backend(case), devices=(near, case.far), total_nbytes=total)
        return {"kind": "raw broadcast", "gbytes_per_s": speed}
    return {"kind": "raw socket", "gbytes_per_s": socket_gbytes_per_s(message, total_nbytes=total)}


def _predicted(result: dict[str, Any], plan: Plan) -> float:
    """What `predict` says with speeds measured here: the packer's, the check's, the servers' own, the ceiling's, and
    the time of begin, open and commit. So the error is that of the model: what overlaps, and what it leaves out."""
    ceiling, load_s = result["ceiling"], result["server_load_s"]
    links = Links(
        wire=1e6 if ceiling["kind"] == "device copy" else ceiling["gbytes_per_s"],
        copy=(result["nbytes_in"] + result["nbytes"]) / result["stages"]["pack"] / 1e9,
        check=result["nbytes_in"] / result["stages"]["check"] / 1e9,
        load=result["nbytes"] / load_s / 1e9 if load_s else None,
        bucket_s=IN_PROCESS_BUCKET_S if ceiling["kind"] == "device copy" else Links().bucket_s,
        fixed_s=sum(result["stages"][name] for name in ("begin", "open", "commit")),
    )
    return predict(plan, links, servers=result["servers"]).seconds


def share_of_ceiling(result: dict[str, Any]) -> float:
    """Least seconds by the ceiling over measured seconds.

    loopback: the bytes that pack and scatter read and write, over the copy's bandwidth; measured: pack, and
    the servers' load. Sockets: bytes to all servers; measured: gather, pack and wire, which overlap.
    """
    stages, best = result["stages"], result["ceiling"]["gbytes_per_s"] * 1e9
    if result["ceiling"]["kind"] == "device copy":
        moved = result["nbytes_in"] + result["nbytes"] + 2 * result["nbytes"] * result["servers"]
        return float(moved / best / (stages["pack"] + stages["gather"] + result["server_load_s"]))
    spent = stages["gather"] + stages["pack"] + stages["wire"]
    return float(result["nbytes"] * result["servers"] / best / spent)


def _baseline(
    case: Case, source: SyntheticSource, layout: ServerLayout, sent: dict[str, int], rule: str | None
) -> dict[str, Any]:
    with open_sink(case.transport, backend=_backend(case), device=str(case.far)) as sink:
        options: dict[str, Any] = {
            "rule": rule or "sglang",
            "bucket_nbytes": case.bucket_nbytes,
            "servers": case.count,
        }
        run_baseline(source, layout, sink, **options, expected=sent)
        runs = [run_baseline(source, layout, sink, **options) for _ in range(min(case.repeat, 2))]
    return min(runs, key=lambda run: run["seconds"])


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def both_formats(case: Case) -> list[Case]:
    return [replace(case, format=name) for name in FORMATS]
