"""benchmarks/soak.py, in small: that it runs, kills, brings back, and can tell a leak from noise."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[1] / "benchmarks/soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_a_dozen_updates_with_a_kill(tmp_path):
    command = [sys.executable, str(SCRIPT), "--updates", "12", "--servers", "2", "--kill-share", "0.5"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=170, env=os.environ
    )
    found = json.loads((tmp_path / "soak.json").read_text())
    assert done.returncode == 0 or "rises by" in done.stdout, done.stderr[-2000:]
    assert len(found["samples"]) == 12
    assert found["kills"] >= 1
    assert found["samples"][-1]["ready"] == 2
    assert found["servers verified byte for byte"] >= 1
    assert (tmp_path / "soak.png").stat().st_size > 5000
    assert str(tmp_path) not in (tmp_path / "soak.json").read_text(), "no path of this machine"


def samples(rise_per_update):
    noise = random.Random(4)

    def facts(update):
        value = 100 + noise.random() * 2 + rise_per_update * update
        return {"rss_mib": value, "files": value, "sockets": value, "threads": value}

    return [{"update": i, "trainer": facts(i), "spared server": facts(i)} for i in range(1, 501)]


def test_noise_is_level_and_a_leak_is_not(soak):
    assert soak.steep(soak.rises(samples(0))) == []
    found = soak.steep(soak.rises(samples(0.05)))
    assert len(found) == 8
    assert soak.rise([(0, 1.0), (10, 2.0)]) == pytest.approx(1.0)


def test_a_process_is_seen_as_it_is(soak):
    before = soak.facts("self")
    held = [open(os.devnull) for _ in range(7)]  # noqa: SIM115 - counted, then closed
    assert soak.facts("self")["files"] == before["files"] + 7
    for file in held:
        file.close()
    assert before["rss_mib"] > 10
