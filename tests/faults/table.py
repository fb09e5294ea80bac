"""The fault matrix as Markdown, from what a run recorded: python -m tests.faults.table RECORD...

A run records where FP8BRIDGE_FAULT_RECORD names a file. Each row is a fault and a phase, each column a transport and
the party it happens to; a cell is how it ended, or the number of the reason why it cannot be.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .matrix import CELLS, FAULTS, OUTCOMES, PARTIES, PHASES, RUN, TRANSPORTS, Cell, why_not


def table(records: list[list[object]]) -> str:
    found = {Cell(*row[:4]): row[4] for row in records}
    reasons = list(dict.fromkeys(why_not(c) for c in CELLS if why_not(c)))

    def word(cell: Cell) -> str:
        reason = why_not(cell)
        return f"({reasons.index(reason) + 1})" if reason else str(found.get(cell, "not run"))

    columns = [(t, p) for t in TRANSPORTS for p in PARTIES]
    lines = [row("fault", "phase", *(f"{t}, {p}" for t, p in columns)), "|---" * (len(columns) + 2) + "|"]
    for fault in FAULTS:
        for phase in PHASES:
            lines.append(row(fault, phase, *(word(Cell(fault, phase, t, p)) for t, p in columns)))
    lines += ["", *(f"- {name}: {words}" for name, words in OUTCOMES.items()), ""]
    lines += [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def summary(records: list[list[object]]) -> str:
    """Cells and seconds of each transport."""
    found = {Cell(*row[:4]): float(str(row[5])) for row in records}
    lines = [row("transport", "cells", "cannot be", "run", "seconds"), "|---|---|---|---|---|"]
    for transport in TRANSPORTS:
        cells = [c for c in CELLS if c.transport == transport]
        ran = [found[c] for c in cells if c in found]
        impossible = sum(c not in RUN for c in cells)
        lines.append(row(transport, len(cells), impossible, len(ran), f"{sum(ran):.0f}"))
    return "\n".join(lines) + "\n"


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    recorded = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    print(summary(recorded))
    print(table(recorded))
