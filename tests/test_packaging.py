"""Installed or from a checkout, from the repo root or from elsewhere: every import finds what its name says."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHERE = """
import fp8bridge, fp8bridge.adapters, fp8bridge.kernels
print(*(p.__path__[0] for p in (fp8bridge, fp8bridge.kernels, fp8bridge.adapters)), sep="\\n")
"""


def _run(*command, cwd=None):
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _python(code, *, cwd):
    return _run("-W", "ignore", "-c", code, cwd=cwd)


def _pip(*command):
    _run("-m", "pip", *command, "-q", "--disable-pip-version-check", "--no-deps", "--no-index")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no `build/` of an earlier day gets in and nothing is left behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fp8bridge", "kernels", "adapters", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "-w", str(out), str(source))
    return next(out.glob("fp8bridge-*.whl"))


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_the_checkout_maps_its_folders(place, tmp_path):
    found = _python(WHERE, cwd=ROOT if place == "root" else tmp_path)
    assert found == [str(ROOT / "fp8bridge"), str(ROOT / "kernels/fp8"), str(ROOT / "adapters/trainers")]


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    ours = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for package, folder in {
            "fp8bridge": "fp8bridge",
            "fp8bridge.kernels": "kernels/fp8",
            "fp8bridge.adapters": "adapters/trainers",
        }.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert code == {*ours, "fp8bridge/py.typed"}, "is a new folder missing from [tool.setuptools] packages?"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_when_installed(wheel, tmp_path):
    target = tmp_path / "site"
    _pip("install", "--target", str(target), str(wheel))
    # Without the finder of the editable install, which would fill in what the wheel lacks.
    code = f"""
import sys
sys.path.insert(0, {str(target)!r})
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
{WHERE}"""
    found = _python(code, cwd=tmp_path)
    package = target / "fp8bridge"
    assert found == [str(package), str(package / "kernels"), str(package / "adapters")]


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_hugging_face_kernels_is_not_shadowed(place, tmp_path):
    code = "import kernels, transformers; print(kernels.__file__); print(kernels.get_kernel.__name__)"
    where, name = _python(code, cwd=ROOT if place == "root" else tmp_path)
    assert "site-packages" in where
    assert name == "get_kernel"


def test_versions_agree():
    import fp8bridge

    assert PROJECT["project"]["version"] == fp8bridge.__version__ == importlib.metadata.version("fp8bridge")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{fp8bridge.__version__}]" in changelog


def _names(requirements):
    return {re.match(r"[A-Za-z0-9-]+", line).group().lower() for line in requirements}


def test_direct_dependencies_are_pinned_for_make():
    """Every package that `make` installs by name has a known-good version, but for triton (see there)."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = _names(line for line in lines if line and not line.startswith("#"))
    wanted = PROJECT["project"]["dependencies"]
    for extra in ("dev", "docs", "fuzz", "engine", "megatron", "serve", "bench", "metrics"):
        wanted = wanted + PROJECT["project"]["optional-dependencies"][extra]
    assert pinned == _names(wanted) - {"triton"} | {"megatron-core", "transformer-engine"}


def test_no_machine_is_named_in_the_build_files():
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "mkdocs.yml",
        ".ci/run",
        "scripts/typecheck",
        "scripts/frameworks_env.sh",
        "scripts/test_frameworks.sh",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|index-url|find-links|/(work|tmp|root|home)/", text), name
