"""The architecture as a test: who may import whom, what may be imported at all, and how long a file may be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"fp8bridge": "fp8bridge", "fp8bridge.kernels": "kernels/fp8", "fp8bridge.adapters": "adapters/trainers"}

# Lowest first. A module may import from the rows above its own, never from its own row or below;
# `x.*` is a package whose modules may import each other. Right: third-party packages it may import.
LAYERS: tuple[tuple[str, str], ...] = (
    # words
    ("errors", ""),
    ("types", ""),
    # decisions: pure data, nothing that needs torch
    ("config layout report models topology", ""),
    ("wire", "msgpack"),
    ("plan", ""),
    ("planner protocols predict", ""),
    ("exporters", "prometheus_client"),
    ("preflight", ""),
    # arithmetic
    ("kernels.*", "torch numpy triton"),
    # stages; siblings never know each other
    ("keys http", "zmq httpx"),
    ("ranks", "torch torch.distributed"),
    ("planning", ""),
    ("nvtx", "torch"),
    ("staging parameters", "torch"),
    (
        "gather pack receiver servers snapshots transport.zmq transport.loopback",
        "torch torch.distributed numpy zmq",
    ),
    ("sglang.*", "torch numpy zmq msgpack"),
    ("vllm.*", "torch vllm"),
    ("transport.checkpoint_engine", "torch zmq"),
    ("transport.ipc", "torch"),
    ("transport.nccl", "torch torch.distributed"),
    ("transport rollout_server", ""),
    ("session", ""),
    ("reporting", ""),
    ("routing", "httpx"),
    ("sending", "torch"),
    # the whole
    ("bridge", ""),
    ("fp8bridge", ""),
    # what stands on it
    ("adapters.*", "torch torch.distributed megatron transformer_engine ray verl deepspeed"),
    ("engine.*", "torch torch.distributed megatron safetensors rich yaml"),
    ("rollout.*", "torch numpy zmq starlette uvicorn transformers safetensors"),
    ("bench.*", "torch torch.distributed triton numpy zmq rich matplotlib"),
    ("demo.*", "torch torch.distributed megatron httpx rich safetensors"),
    ("cli.*", "torch typer rich httpx safetensors"),
    ("__main__", ""),
)
KERNELS_MAY_IMPORT = {"errors"}
ONLY_IN_FUNCTIONS = {
    "prometheus_client",
    "matplotlib",
    "megatron",
    "transformer_engine",
    "sglang",
    "transformers",
    "ray",
    "verl",
    "deepspeed",
    "vllm",
}
OPTIONAL = (
    *("megatron", "transformer_engine", "sglang", "triton", "starlette", "uvicorn", "transformers"),
    *("safetensors", "yaml", "prometheus_client", "matplotlib"),
)

FILE_LINES, FUNCTION_LINES = 400, 50


@dataclass(frozen=True)
class Import:
    """One imported name: `fp8bridge.x.y` or a third-party `package.module`."""

    name: str
    line: int
    at_module_level: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def short(self) -> str:
        return self.name.removeprefix("fp8bridge.")

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def _modules() -> list[Module]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


MODULES = _modules()
NAMES = {m.name for m in MODULES}


def _imports(module: Module) -> list[Import]:
    """What `module` imports, anywhere in it, but for annotations (`if TYPE_CHECKING`)."""
    found: list[Import] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(Import(name, node.lineno, top) for name in _targets(module, node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(Import("torch.distributed", node.lineno, top))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, top and not inside)

    visit(module.tree, True)
    return found


def _targets(module: Module, node: ast.ImportFrom) -> Iterator[str]:
    """`from . import a` names the modules a; `from .a import f` names the module a."""
    base = node.module or ""
    if node.level:
        parts = module.package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in NAMES or whole == "torch.distributed" else base


def _layer(short: str) -> int:
    for i, (members, _) in enumerate(LAYERS):
        for member in members.split():
            if short == member or (member.endswith(".*") and (short + ".").startswith(member[:-1])):
                return i
    raise AssertionError(f"{short} is in no layer; give it a place in LAYERS")


def _same_package(a: str, b: str) -> bool:
    members = {m[:-1] for row, _ in LAYERS for m in row.split() if m.endswith(".*")}
    return any((a + ".").startswith(m) and (b + ".").startswith(m) for m in members)


def _short(name: str) -> str | None:
    """Our module's name without `fp8bridge.`; None for a foreign one."""
    return name.removeprefix("fp8bridge.") if name.split(".")[0] == "fp8bridge" else None


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.short)
def test_an_arrow_points_down(module):
    mine = _layer(module.short)
    for item in _imports(module):
        other = _short(item.name)
        if other is None or _same_package(module.short, other):
            continue
        where = f"{module.path.relative_to(ROOT)}:{item.line}"
        assert _layer(other) < mine, f"{where}: {module.short} must not import {other}, which is not below it"
        if module.short.startswith("kernels"):
            assert other in KERNELS_MAY_IMPORT, f"{where}: kernels know offsets and shapes, not {other}"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.short)
def test_only_the_packages_of_its_layer(module):
    allowed = {*LAYERS[_layer(module.short)][1].split(), *sys.stdlib_module_names, "fp8bridge"}
    for item in _imports(module):
        where = f"{module.path.relative_to(ROOT)}:{item.line}"
        top = item.name.split(".")[0]
        used = "torch.distributed" if item.name.startswith("torch.distributed") else top
        assert used in allowed, f"{where}: {module.short} must not use {used} (see LAYERS)"
        if top in ONLY_IN_FUNCTIONS:
            assert not item.at_module_level, f"{where}: {top} is optional; import it in the function that needs it"


def test_no_cycles():
    edges = {
        m.name: {i.name for i in _imports(m) if i.name in NAMES and i.at_module_level} - {m.name} for m in MODULES
    }
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*path, name))
            done.add(name)

    for name in sorted(edges):
        walk(name, ())


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "fp8bridge",
        "fp8bridge.planner",
        "fp8bridge.session",
        "fp8bridge.wire",
        "fp8bridge.adapters.megatron_layout",
        "fp8bridge.adapters.frameworks",
        "fp8bridge.adapters.areal_config",
        "fp8bridge.engine",
    ],
)
def test_deciding_needs_no_torch(module):
    heavy = json.loads(_run(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert not {"torch", "numpy", "triton", "zmq"} & set(heavy)


@pytest.mark.parametrize(
    "module",
    [
        "fp8bridge",
        "fp8bridge.bridge",
        "fp8bridge.kernels",
        "fp8bridge.adapters.megatron",
        "fp8bridge.engine.checkpoint",
    ],
)
def test_imports_without_the_optional_packages(module):
    code = f"""
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
importlib.import_module({module!r})
import fp8bridge
print(fp8bridge.connect.__name__, fp8bridge.LoopbackServer.__name__)
"""
    assert _run(code).split() == ["connect", "LoopbackServer"]


def test_files_are_short():
    lengths = {m.path: m.path.read_text(encoding="utf-8").count("\n") for m in MODULES}
    long = [f"{path.relative_to(ROOT)} ({n})" for path, n in lengths.items() if n > FILE_LINES]
    assert not long, f"files over {FILE_LINES} lines: {', '.join(long)}"


def test_functions_are_short():
    long = []
    for module in MODULES:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # A Triton kernel cannot be cut up without cost.
            if any("jit" in ast.unparse(d) for d in node.decorator_list):
                continue
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                long.append(f"{module.path.relative_to(ROOT)}:{node.lineno} {node.name} ({lines})")
    assert not long, f"functions over {FUNCTION_LINES} lines: {', '.join(long)}"
