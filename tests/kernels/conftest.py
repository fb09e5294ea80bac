"""Every kernel test runs on each backend that is there, against the same naive reference.

- `cpu`: the vectorised torch path;
- `interpreter`: the Triton kernels on CPU tensors. Triton decides when it is first imported whether it
  interprets, so this needs its own process: test_interpreter.py starts one with TRITON_INTERPRET=1;
- `cuda`: the Triton kernels compiled, marked `gpu`.
"""

import os

import pytest
import torch

from fp8bridge.kernels import checks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        here = "interpreter" if INTERPRETED else "cpu"
        gpu = [
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ]
        backends = [here] if INTERPRETED else [here, pytest.param("cuda", marks=gpu)]
        metafunc.parametrize("device", backends, indirect=True)


@pytest.fixture
def device(request, monkeypatch):
    """The torch device of the backend under test."""
    if request.param == "interpreter":
        monkeypatch.setattr(checks, "uses_triton", lambda device: True)
    return torch.device("cuda" if request.param == "cuda" else "cpu")
