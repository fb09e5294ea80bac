"""Which frameworks have an adapter, and the versions it was tested with. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """name: as its users say it. package: its distribution. adapter: our module. page: under docs/frameworks/.
    tested: (from this version, below that one); None: with its published interface only, not with the package.
    module: one of its own, for a name that another project has on the registry."""

    name: str
    package: str
    adapter: str
    page: str
    tested: tuple[str, str] | None
    module: str | None = None


FRAMEWORKS = (
    Framework(name="verl", package="verl", adapter="fp8bridge.adapters.verl", page="verl", tested=("0.9", "0.10")),
    Framework(name="TRL", package="trl", adapter="fp8bridge.adapters.trl", page="trl", tested=("1.16", "1.17")),
    Framework(name="Ray", package="ray", adapter="fp8bridge.adapters.ray", page="ray", tested=("2.60", "2.61")),
    Framework(name="AReaL", package="areal", adapter="fp8bridge.adapters.areal", page="areal", tested=("1.0", "1.1")),
    Framework(name="SkyRL", package="skyrl", adapter="fp8bridge.adapters.skyrl", page="skyrl", tested=("0.3", "0.4")),
    Framework(
        name="OpenRLHF",
        package="openrlhf",
        adapter="fp8bridge.adapters.openrlhf",
        page="openrlhf",
        tested=("0.11", "0.12"),
    ),
    Framework(
        name="mbridge",
        package="mbridge",
        adapter="fp8bridge.adapters.state_dict",
        page="exporters",
        tested=("0.15", "0.16"),
    ),
    Framework(
        name="Megatron-Bridge",
        package="megatron-bridge",
        adapter="fp8bridge.adapters.state_dict",
        page="exporters",
        tested=None,
    ),
    Framework(name="NeMo-RL", package="nemo-rl", adapter="fp8bridge.adapters.nemo_rl", page="nemo-rl", tested=None),
    Framework(
        name="slime",
        package="slime",
        adapter="fp8bridge.adapters.slime",
        page="slime",
        tested=None,
        module="slime.backends",
    ),
    Framework(name="miles", package="miles", adapter="fp8bridge.adapters.slime", page="slime", tested=None),
)


class UntestedVersionWarning(UserWarning):
    """The installed framework is outside the range that its adapter was tested with."""


def framework(name: str) -> Framework:
    """The entry of `name`."""
    return next(entry for entry in FRAMEWORKS if entry.name == name)


def installed(entry: Framework) -> str | None:
    """Its installed version; None if it is not installed."""
    try:
        version = importlib.metadata.version(entry.package)
        found = entry.module is None or importlib.util.find_spec(entry.module) is not None
    except ImportError:  # PackageNotFoundError is one
        return None
    return version if found else None


def untested(entry: Framework, version: str) -> str:
    """Why `version` is not one that the adapter was tested with; empty if it is."""
    if entry.tested is None:
        return f"tested with the published interface of {entry.name} only, not with the package"
    low, high = entry.tested
    if _numbers(low) <= _numbers(version) < _numbers(high):
        return ""
    return f"tested with {entry.package} >= {low}, < {high} only"


def warn_if_untested(name: str) -> None:
    """Called by an adapter when it is first used."""
    entry = framework(name)
    version = installed(entry)
    why = untested(entry, version) if version is not None else ""
    if why:
        warnings.warn(
            f"{entry.adapter} is {why}; {version} is installed. Where its interface differs, the call fails",
            UntestedVersionWarning,
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 1.16.0rc1 is (1, 16, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
