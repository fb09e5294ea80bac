"""Examples and benchmarks that need a GPU: on the CPU, that they start, and that what they read is right."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bridge.engine import FP8EngineConfig

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("script", ["examples/train_fp8_vs_bf16.py", "benchmarks/engine_memory.py"])
def test_scripts_explain_themselves(script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / script, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout
    assert "--json" in done.stdout


def test_the_example_config_is_valid():
    config = FP8EngineConfig.from_yaml(ROOT / "examples/qwen3_fp8.yaml")
    assert config == replace(
        FP8EngineConfig.hopper_blockwise(),
        mode="hybrid",
        bf16_layers_at_start=1,
        bf16_layers_at_end=1,
        exp_avg_dtype="bfloat16",
        exp_avg_sq_dtype="float16",
    )
