"""Transformer Engine's version, the GPU and the variable that is read once: checked before anything is built."""

import sys
from types import SimpleNamespace

import pytest

from fp8bridge.engine import Environment, FP8EngineConfig, check_environment, set_environment
from fp8bridge.engine.environment import FP32_SCALES
from fp8bridge.errors import ConfigError

HOPPER = {"te_version": "2.20.2", "capability": (9, 0), "cuda": "13.0"}
BLACKWELL = HOPPER | {"capability": (10, 0)}


@pytest.mark.parametrize(
    ("config", "here", "says"),
    [
        ({}, {"te_version": None}, "Transformer Engine 2.3 or newer, which is not installed.*pip install"),
        ({}, {"te_version": "2.2.1"}, "2.3 or newer; found 2.2.1"),
        ({"recipe": "tensorwise"}, {"te_version": "2.1.0"}, "2.2 or newer"),
        ({"recipe": "mxfp8"}, {"te_version": "2.0"}, "2.1 or newer"),
        ({"recipe": "delayed"}, {"te_version": "1.13.0+cu12"}, "2.0 or newer"),
        ({}, HOPPER | {"capability": (8, 9)}, "needs a GPU of compute capability 9.0.*8.9; use recipe 'delayed' or"),
        ({"recipe": "mxfp8"}, HOPPER, "capability 10.0; this one has 9.0; use recipe .*'blockwise'"),
        ({"recipe": "delayed"}, HOPPER | {"capability": (8, 0)}, "use BF16 training"),
        ({"recipe": "mxfp8"}, HOPPER | {"capability": (12, 0)}, "does not run on compute capability 12.0"),
        ({}, HOPPER | {"cuda": "12.8"}, "needs CUDA 12.9; this torch has 12.8"),
        ({"block_scales": "float32"}, BLACKWELL | {"variable": "1"}, "power-of-two scales only"),
        ({"block_scales": "float32"}, HOPPER | {"fp32_scales": False}, "imported with power_of_two scales.*before"),
        ({}, HOPPER | {"fp32_scales": True}, "imported with float32 scales.*set block_scales='float32'"),
        ({"block_scales": "float32"}, HOPPER, "is None; call fp8bridge.engine.set_environment"),
        ({"recipe": "delayed", "wgrad": False}, HOPPER | {"bf16_wgrad": False}, "would ignore it; set wgrad=True"),
        ({}, HOPPER | {"variable": "1"}, "is '1'; call fp8bridge.engine.set_environment"),
    ],
)
def test_what_cannot_run_here_is_refused(config, here, says):
    with pytest.raises(ConfigError, match=says):
        check_environment(FP8EngineConfig(**config), Environment(**here))


@pytest.mark.parametrize(
    ("config", "here"),
    [
        ({}, HOPPER),
        ({}, {"te_version": "2.20.2"}),  # a login node without a GPU
        ({}, BLACKWELL | {"fp32_scales": False}),
        ({"block_scales": "float32"}, HOPPER | {"variable": "1"}),
        ({"block_scales": "float32"}, HOPPER | {"fp32_scales": True}),
        ({"recipe": "mxfp8"}, BLACKWELL | {"fp32_scales": True}),
        ({"recipe": "tensorwise"}, HOPPER | {"capability": (8, 9), "cuda": "12.4"}),
        ({"recipe": "delayed", "wgrad": False}, HOPPER | {"bf16_wgrad": True}),
        ({"recipe": "blockwise"}, HOPPER | {"te_version": "2.3.0.dev0+abc"}),
    ],
)
def test_what_can_run_is_let_through(config, here):
    check_environment(FP8EngineConfig(**config), Environment(**here))


@pytest.mark.parametrize(("scales", "value"), [("float32", "1"), ("power_of_two", "0")])
def test_the_variable_is_set_before_the_import(monkeypatch, scales, value):
    monkeypatch.delitem(sys.modules, "transformer_engine.common.recipe", raising=False)
    monkeypatch.setenv(FP32_SCALES, "something else")
    config = FP8EngineConfig(block_scales=scales)
    set_environment(config)
    check_environment(config, Environment(**HOPPER, variable=value))
    import os

    assert os.environ[FP32_SCALES] == value


def test_after_the_import_it_is_too_late(monkeypatch):
    recipe = SimpleNamespace(fp8_quant_fwd_weight=SimpleNamespace(power_2_scale=True))
    module = SimpleNamespace(Float8BlockScaling=recipe)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", module)
    monkeypatch.setenv(FP32_SCALES, "1")
    with pytest.raises(ConfigError, match="reads NVTE_FP8_BLOCK_SCALING_FP32_SCALES only then"):
        set_environment(FP8EngineConfig(block_scales="float32"))
    set_environment(FP8EngineConfig())
    assert Environment.here().fp32_scales is False
