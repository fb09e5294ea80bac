"""Results of `bench sync` as a table for people, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sync import share_of_ceiling

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "configuration", "format", "transport", "servers", "buckets", "GB", "seconds", "predicted", "pack", "wire", "load",
    "GB/s", "of ceiling", "vs bf16", "baseline", "faster",
)  # fmt: skip


def rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row per result, in `COLUMNS`. `vs bf16`: seconds over those of the same configuration in BF16."""
    return [_row(result, _bf16_twin(result, results)) for result in results]


def _row(result: dict[str, Any], bf16: dict[str, Any] | None) -> list[str]:
    stages, baseline = result["stages"], result.get("baseline")
    load = result["server_load_s"]
    return [
        result["label"],
        result["format"],
        result["transport"],
        str(result["servers"]),
        str(result["buckets"]),
        f"{result['nbytes'] / 1e9:.3f}",
        f"{result['seconds']:.4f}",
        f"{result['predicted_s']:.4f}",
        f"{stages['pack']:.4f}",
        f"{stages['wire']:.4f}",
        "-" if load is None else f"{load:.4f}",
        f"{result['send_gbytes_per_s']:.2f}",
        f"{share_of_ceiling(result):.2f}",
        "-" if bf16 is None else f"{result['seconds'] / bf16['seconds']:.2f}",
        "-" if baseline is None else f"{baseline['seconds']:.4f}",
        "-" if baseline is None else f"{baseline['seconds'] / result['seconds']:.1f} x",
    ]


def _bf16_twin(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    same = ("label", "transport", "servers", "only", "bucket_nbytes")
    twins = [r for r in results if r["format"] == "bf16" and all(r[key] == result[key] for key in same)]
    return twins[0] if twins and result["format"] != "bf16" else None


def rich_table(results: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="sync of verified weights (medians; seconds of the slowest rank)", title_justify="left")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 3 else "right")
    for row in rows(results):
        table.add_row(*row)
    return table


def markdown(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows(results)]) + "\n"


def ceilings(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each ceiling that was measured."""
    found = {
        f"{r['ceiling']['kind']} ({r['transport']}, messages of {min(r['bucket_nbytes'], r['nbytes']) / 1e6:.0f} MB): "
        f"{r['ceiling']['gbytes_per_s']:.2f} GB/s"
        for r in results
    }
    return sorted(found)
