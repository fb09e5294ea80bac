"""The main job, as users see it: real Megatron ranks, real servers, every byte checked."""

import json
import subprocess
import sys

import pytest

from fp8bridge.demo.run import run_demo
from fp8bridge.errors import ConfigError

pytest.importorskip("megatron.core")
pytest.importorskip("starlette")
pytest.importorskip("transformers")


def test_the_demo_verifies_every_step():
    command = [sys.executable, "-m", "fp8bridge", "demo", "--steps", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    losses = [row["loss"] for row in answer["steps"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0], "it really trains"
    for step, row in enumerate(answer["steps"], start=1):
        assert not row["differences"]
        assert list(row["versions"].values()) == [str(step)] * 2
        assert row["logprob_gap"] < 1e-3
        assert row["logprob_gap_unquantized"] > 10 * row["logprob_gap"], "the check can tell FP8 from BF16"
        assert row["report"]["nbytes_gathered"] > 0, "the model is split"


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"servers": 0}, {"tp": -1}])
def test_a_wrong_size_is_refused_before_anything_starts(wrong):
    with pytest.raises(ConfigError, match="must be at least 1"):
        run_demo(**wrong)
