"""Pictures of `bench sync`: where the seconds go, and how they grow. Needs the `bench` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..report import STAGES


def save_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: stages of each configuration, stacked, and its baseline. Right: seconds over bytes."""
    try:
        import matplotlib
    except ModuleNotFoundError as err:
        raise ConfigError('a plot needs matplotlib: pip install "fp8bridge[bench]"') from err
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, growth) = pyplot.subplots(1, 2, figsize=(14, 0.5 * len(results) + 4))
    _stacked(bars, results)
    _growth(growth, results)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _stacked(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    names = [f"{r['label']}, {r['format']}, {r['transport']} x {r['servers']}" for r in results]
    left = [0.0] * len(results)
    for stage in STAGES:
        widths = [r["stages"][stage] for r in results]
        axes.barh(names, widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    known = [(name, r["baseline"]["seconds"]) for name, r in zip(names, results, strict=True) if r.get("baseline")]
    if known:
        axes.plot([s for _, s in known], [n for n, _ in known], "kx", label="baseline")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("where the seconds go")
    axes.legend(fontsize="small")


def _growth(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in results:
        lines.setdefault(f"{r['format']}, {r['transport']}", []).append((r["nbytes_in"] / 1e9, r["seconds"]))
        if r.get("baseline"):
            key = f"baseline, {r['format']}, {r['transport']}"
            lines.setdefault(key, []).append((r["nbytes_in"] / 1e9, r["baseline"]["seconds"]))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xlabel("GB of weights in the trainer (BF16)")
    axes.set_ylabel("seconds")
    axes.set_title("how they grow")
    axes.legend(fontsize="small")
