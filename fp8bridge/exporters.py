"""Reports to where people look: a file of JSON lines, Prometheus, a Chrome trace. Used by rank 0 alone.

An exporter that cannot start is a ConfigError when the bridge connects. One that fails later costs a log
line and never an update: the weights are on the servers by then.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, Protocol

from .config import BridgeConfig
from .errors import BridgeError, ConfigError
from .report import STAGES, SyncReport

log = logging.getLogger("fp8bridge")


class Exporter(Protocol):
    def success(self, report: SyncReport) -> None: ...

    def failure(self, version: int, error: BaseException) -> None: ...

    def close(self) -> None: ...


class Exporters:
    """Those that the configuration asks for; one call reaches them all."""

    def __init__(self, config: BridgeConfig) -> None:
        self._members: list[Exporter] = []
        if config.report_path is not None:
            self._members.append(JsonLines(config.report_path))
        if config.trace_path is not None:
            self._members.append(ChromeTrace(config.trace_path))
        if config.metrics_port is not None:
            self._members.append(Prometheus(config.host, config.metrics_port))

    def success(self, report: SyncReport) -> None:
        for member in self._members:
            try:
                member.success(report)
            except Exception:
                log.exception("%s could not take the report of version %d", type(member).__name__, report.version)

    def failure(self, version: int, error: BaseException) -> None:
        for member in self._members:
            try:
                member.failure(version, error)
            except Exception:
                log.exception("%s could not take the failure of version %d", type(member).__name__, version)

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._members = []


class JsonLines:
    """A line for each update, appended: `SyncReport.as_dict`, or the version and the error. `time` is the end
    in seconds since 1970."""

    def __init__(self, path: str) -> None:
        self._path = _writable(path, "report_path")

    def success(self, report: SyncReport) -> None:
        self._write({"time": time.time(), "outcome": "committed"} | report.as_dict())

    def failure(self, version: int, error: BaseException) -> None:
        kind = (
            error.to_dict()
            if isinstance(error, BridgeError)
            else {"kind": type(error).__name__, "message": str(error)}
        )
        self._write({"time": time.time(), "outcome": "failed", "version": version, "error": kind})

    def close(self) -> None:
        """Nothing is held open between updates."""

    def _write(self, data: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


class ChromeTrace:
    """A trace that Perfetto and chrome://tracing open: a process for each trainer rank, a thread for each stage.

    The file is valid JSON after every update. It is replaced when a bridge connects.
    """

    _END = "\n]\n"

    def __init__(self, path: str) -> None:
        self._path = _writable(path, "trace_path")
        self._path.write_text("[" + self._END, encoding="utf-8")
        self._named = 0

    def success(self, report: SyncReport) -> None:
        events = [event for rank in range(self._named, len(report.traces)) for event in self._names(rank)]
        self._append(events + trace_events(report), first=self._named == 0)
        self._named = len(report.traces)

    def failure(self, version: int, error: BaseException) -> None:
        if self._named:
            mark = {"name": f"version {version} failed: {error}", "ph": "i", "s": "g", "pid": 0, "tid": 0}
            self._append([mark | {"ts": time.time() * 1e6}], first=False)

    def close(self) -> None:
        """Nothing is held open between updates."""

    def _append(self, events: list[dict[str, Any]], *, first: bool) -> None:
        with self._path.open("r+", encoding="utf-8") as file:
            file.seek(self._path.stat().st_size - len(self._END))
            file.write(("\n" if first else ",\n") + ",\n".join(json.dumps(e) for e in events) + self._END)

    def _names(self, rank: int) -> list[dict[str, Any]]:
        def name(kind: str, tid: int, text: str) -> dict[str, Any]:
            return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": text}}

        stages = [name("thread_name", tid, stage) for tid, stage in enumerate(STAGES)]
        return [name("process_name", 0, f"trainer rank {rank}"), *stages]


def trace_events(report: SyncReport) -> list[dict[str, Any]]:
    """Complete events (`ph` X, microseconds since 1970) of one update."""
    return [
        {
            "name": stage,
            "cat": "fp8bridge",
            "ph": "X",
            "ts": (report.met_at + start) * 1e6,
            "dur": seconds * 1e6,
            "pid": rank,
            "tid": STAGES.index(stage),
            "args": {"version": report.version},
        }
        for rank, trace in enumerate(report.traces)
        for stage, start, seconds in trace
    ]


class Prometheus:
    """Metrics over HTTP at /metrics, on the bridge's `host`. Needs the `metrics` extra."""

    def __init__(self, host: str, port: int) -> None:
        try:
            import prometheus_client as client
        except ModuleNotFoundError as err:
            raise ConfigError('metrics_port needs prometheus-client: pip install "fp8bridge[metrics]"') from err
        registry = client.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return client.Gauge(f"fp8bridge_{name}", text, labels, registry=registry)

        self._updates = client.Counter("fp8bridge_updates", "Updates, by outcome.", ["outcome"], registry=registry)
        self._bytes = client.Counter("fp8bridge_sent_bytes", "Bytes to servers that committed.", registry=registry)
        self._seconds = client.Histogram("fp8bridge_update_seconds", "Seconds of an update.", registry=registry)
        self._version = gauge("version", "The last version committed.")
        self._stages = gauge("stage_seconds", "Seconds of the last update, over ranks.", "stage", "stat")
        self._servers = gauge("server_seconds", "Seconds of the last update on a server.", "server", "stage")
        self._healthy = gauge("server_healthy", "1 if the server holds the version, 0 if it is fenced.", "server")
        self._paused = gauge("paused_seconds", "How long the servers did not generate.")
        self._speed = gauge("gbytes_per_second", "Bytes to all servers over the whole update's seconds, in GB/s.")
        self._extra = gauge("extra_bytes", "Memory of the bridge on a rank, most of all ranks.")
        for outcome in ("committed", "failed"):
            self._updates.labels(outcome)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as err:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port} ({err}); choose a free port") from err

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def success(self, report: SyncReport) -> None:
        self._updates.labels("committed").inc()
        self._bytes.inc(report.nbytes_sent)
        self._seconds.observe(report.seconds)
        self._version.set(report.version)
        self._paused.set(report.paused_s)
        self._speed.set(report.gbytes_per_s)
        self._extra.set(report.extra_nbytes.max)
        for stage, spread in report.stages.items():
            for stat in ("min", "median", "max"):
                self._stages.labels(stage, stat).set(getattr(spread, stat))
        for name, server in report.servers.items():
            self._healthy.labels(name).set(server.version == report.version)
            for stage, seconds in server.seconds.items():
                self._servers.labels(name, stage).set(seconds)

    def failure(self, version: int, error: BaseException) -> None:
        self._updates.labels("failed").inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _writable(path: str, field: str) -> Path:
    """The path, after opening it once for writing."""
    try:
        with Path(path).open("a", encoding="utf-8"):
            return Path(path)
    except OSError as err:
        raise ConfigError(
            f"{field}: cannot write {path} ({err.strerror}); give a file in a folder that exists"
        ) from err
