"""The Triton kernels on the CPU: these same test files in a process whose Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import INTERPRETED


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: the kernels need it on CUDA only")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "interpreter", "-p", "no:cacheprovider"]
    quiet = ["-W", "ignore::RuntimeWarning"]  # NumPy's remarks on NaN, Inf and wrapping integers
    result = subprocess.run(
        [*command, *quiet, str(here)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
