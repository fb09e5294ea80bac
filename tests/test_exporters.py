"""Reports in files and over HTTP: what a reader of each format finds there."""

import json
import urllib.request

import pytest

import fp8bridge
from fp8bridge import LoopbackServer
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, NonFiniteError
from fp8bridge.exporters import Prometheus
from fp8bridge.report import STAGES, Spread, Stopwatch

from .support import FP8_CONFIG, FP8_LAYOUT, SplitSource, ZmqThreadServer, run_ranks, tiny_model


def connect(model=None, **options):
    source = StateDictSource(tiny_model() if model is None else model, FP8_CONFIG)
    server = LoopbackServer("a", layout=FP8_LAYOUT)
    return fp8bridge.connect(source, [server], **{"transport": "loopback", "bucket_nbytes": 60_000} | options)


def test_json_lines_has_each_update_and_each_failure(tmp_path):
    path, model = tmp_path / "sync.jsonl", tiny_model()
    path.write_text('{"outcome": "of an earlier run"}\n')
    with connect(model, report_path=str(path)) as bridge:
        report = bridge.update_weights(version=1)
        model["model.norm.weight"][0] = float("nan")
        with pytest.raises(NonFiniteError):
            bridge.update_weights(version=2)
    earlier, good, bad = map(json.loads, path.read_text().splitlines())
    assert earlier == {"outcome": "of an earlier run"}
    assert good.pop("outcome") == "committed"
    assert good.pop("time") > 1e9
    assert good == json.loads(json.dumps(report.as_dict()))
    assert (bad["outcome"], bad["version"]) == ("failed", 2)
    assert (bad["error"]["kind"], bad["error"]["tensor"]) == ("NonFiniteError", "model.norm.weight")


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_trace_is_valid_after_every_update_and_has_every_rank_and_stage(tmp_path, monkeypatch, ranks):
    path = tmp_path / "trace.json"
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)

    def work(rank):
        source = SplitSource(tiny_model(), rank, ranks)
        with fp8bridge.connect(source, [server], bucket_nbytes=60_000, trace_path=str(path)) as bridge:
            reports = []
            for version in (1, 2):
                reports.append(bridge.update_weights(version=version))
                if rank == 0:
                    json.loads(path.read_text())
            return reports

    results = run_ranks(ranks, work, monkeypatch)
    assert not [r for r in results if isinstance(r, Exception)], results
    events = json.loads(path.read_text())
    assert {e["ph"] for e in events} == {"X", "M"}
    spans = [e for e in events if e["ph"] == "X"]
    for rank in range(ranks):
        named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
        assert named == dict(enumerate(STAGES))
        for version, report in enumerate(results[0], start=1):
            mine = [e for e in spans if e["pid"] == rank and e["args"]["version"] == version]
            assert {e["name"] for e in mine} == set(STAGES)
            assert all(e["dur"] >= 0 and e["tid"] == STAGES.index(e["name"]) for e in mine)
            for stage in STAGES:
                seconds = sum(e["dur"] for e in mine if e["name"] == stage) / 1e6
                assert seconds <= report.stages[stage].max + 1e-6
    for rank in range(ranks):
        mine = [e for e in spans if e["pid"] == rank]
        end = max(e["ts"] + e["dur"] for e in mine if e["args"]["version"] == 1)
        begin = min(e["ts"] for e in mine if e["args"]["version"] == 2)
        # Other ranks' clocks are joined to rank 0's as nearly as they leave a collective together.
        assert end <= begin + (1e5 if rank else 0), "the second update is after the first"


def test_ranks_whose_clocks_differ_meet_in_the_trace():
    early, late = Stopwatch(), Stopwatch()
    late.common += 1000
    late.spans = [("pack", late.common + 0.5, late.common + 0.7)]
    early.spans = [("pack", early.common + 0.5, early.common + 0.7)]
    ((_, at, seconds),), ((_, other_at, _),) = early.trace(), late.trace()
    assert at == pytest.approx(other_at)
    assert seconds == pytest.approx(0.2)


def test_a_profilers_ranges_are_entered_and_left_by_stage():
    seen = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(("in", self.name))

        def __exit__(self, *error):
            seen.append(("out", self.name))

    watch = Stopwatch(Range)
    with pytest.raises(ZeroDivisionError), watch.stage("pack"):
        _ = 1 / 0
    assert seen == [("in", "pack"), ("out", "pack")]
    assert watch.seconds["pack"] > 0


def test_prometheus_serves_the_last_update(tmp_path):
    pytest.importorskip("prometheus_client")
    model = tiny_model()
    with connect(model, metrics_port=0) as bridge:
        (prometheus,) = [m for m in bridge._exporters._members if isinstance(m, Prometheus)]
        report = bridge.update_weights(version=7)
        model["model.norm.weight"][0] = float("inf")
        with pytest.raises(NonFiniteError):
            bridge.update_weights(version=8)
        url = f"http://127.0.0.1:{prometheus.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{prometheus.port}"):
            connect(metrics_port=prometheus.port)
    assert float(lines["fp8bridge_version"]) == 7
    assert float(lines['fp8bridge_updates_total{outcome="committed"}']) == 1
    assert float(lines['fp8bridge_updates_total{outcome="failed"}']) == 1
    assert float(lines["fp8bridge_sent_bytes_total"]) == report.nbytes
    assert float(lines['fp8bridge_stage_seconds{stage="pack",stat="max"}']) == report.stages["pack"].max
    assert float(lines['fp8bridge_server_healthy{server="a"}']) == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=2)


@pytest.mark.parametrize("field", ["report_path", "trace_path"])
def test_a_file_that_cannot_be_written_is_refused_at_connect(tmp_path, field):
    with pytest.raises(ConfigError, match=f"{field}: cannot write .*missing"):
        connect(**{field: str(tmp_path / "missing" / "file")})


@pytest.mark.parametrize("port", [-1, 65536, "9400", True, 1.5])
def test_a_wrong_port_is_refused(port):
    with pytest.raises(ConfigError, match="metrics_port must be a port number"):
        fp8bridge.BridgeConfig(metrics_port=port)


def test_a_disk_that_fills_up_costs_a_log_line_and_no_update(tmp_path, caplog):
    path = tmp_path / "sync.jsonl"
    with connect(report_path=str(path)) as bridge:
        path.unlink()
        path.mkdir()
        report = bridge.update_weights(version=1)
    assert report.servers["a"].version == 1
    assert "JsonLines could not take the report of version 1" in caplog.text


def test_a_spread_is_min_median_max():
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(1.0, 2.0, 5.0)
