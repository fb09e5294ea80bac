"""The package loads without Triton, and stays inside its layer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fp8bridge.kernels

FOLDER = Path(fp8bridge.kernels.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_works_where_triton_is_not_installed():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fp8bridge.kernels as k\n"
        "codes, scale_inv = k.quantize(torch.ones(3, 5), 'te')\n"
        "assert k.dequantize(codes, scale_inv).tolist() == [[1.0] * 5] * 3\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_only_torch_triton_and_the_errors(path):
    names = set(imported_modules(path))
    allowed = {"numpy", "torch", "torch.nn.functional", "fp8bridge.errors"}
    if "triton" in path.stem:
        allowed |= {"triton", "triton.language"}
    foreign = {name for name in names - allowed if name.split(".")[0] not in sys.stdlib_module_names}
    assert not foreign


def test_every_exported_name_is_there():
    assert sorted(fp8bridge.kernels.__all__) == sorted(set(fp8bridge.kernels.__all__))
    for name in fp8bridge.kernels.__all__:
        assert hasattr(fp8bridge.kernels, name)
