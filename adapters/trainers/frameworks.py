"""Which frameworks have an adapter, and the versions it was tested with. Standard library only."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """name: as its users say it. package: its distribution, or "" where none is on the registry.
    adapter: our module. page: under docs/frameworks/. tested: (from this version, below that one)."""

    name: str
    package: str
    adapter: str
    page: str
    tested: tuple[str, str]


FRAMEWORKS = (
    Framework(name="verl", package="verl", adapter="fp8bridge.adapters.verl", page="verl", tested=("0.9", "0.10")),
    Framework(name="TRL", package="trl", adapter="fp8bridge.adapters.trl", page="trl", tested=("1.16", "1.17")),
    Framework(name="AReaL", package="areal", adapter="fp8bridge.adapters.areal", page="areal", tested=("1.0", "1.1")),
    Framework(name="Ray", package="ray", adapter="fp8bridge.adapters.ray", page="ray", tested=("2.60", "2.61")),
)


class UntestedVersionWarning(UserWarning):
    """The installed framework is outside the range that its adapter was tested with."""


def framework(name: str) -> Framework:
    """The entry of `name`."""
    return next(entry for entry in FRAMEWORKS if entry.name == name)


def installed(entry: Framework) -> str | None:
    """Its installed version; None if it is not installed."""
    if not entry.package:
        return None
    try:
        return importlib.metadata.version(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_tested(entry: Framework, version: str) -> bool:
    low, high = (_numbers(edge) for edge in entry.tested)
    return low <= _numbers(version) < high


def warn_if_untested(name: str) -> None:
    """Called by an adapter when it is first used."""
    entry = framework(name)
    version = installed(entry)
    if version is not None and not is_tested(entry, version):
        warnings.warn(
            f"{entry.adapter} was tested with {entry.package} >= {entry.tested[0]}, < {entry.tested[1]}; "
            f"{version} is installed. If its interface has changed, the adapter fails where it is called",
            UntestedVersionWarning,
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 1.16.0rc1 is (1, 16, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
