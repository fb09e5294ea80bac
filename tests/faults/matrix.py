"""The fault matrix: every combination of fault, phase, transport and party, or the reason why it cannot be run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

FAULTS = (
    "kill",
    "stall",
    "corrupt a byte",
    "drop",
    "duplicate",
    "reorder",
    "wrong version",
    "wrong hash",
    "refuse",
    "disk full",
)
BUCKETS = ("first bucket", "middle bucket", "last bucket")
PHASES = ("begin", *BUCKETS, "commit", "release")
TRANSPORTS = ("loopback", "zmq", "nccl")
PARTIES = ("server", "trainer")
"""Who does it, or whose messages it happens to."""


@dataclass(frozen=True, slots=True)
class Cell:
    fault: str
    phase: str
    transport: str
    party: str

    def __str__(self) -> str:
        return f"{self.transport}-{self.party}-{self.fault}-{self.phase}".replace(" ", "_")

    @property
    def in_bucket(self) -> bool:
        return self.phase in BUCKETS

    @property
    def place(self) -> str:
        """first, middle or last."""
        return self.phase.split()[0]


CELLS = [Cell(*c) for c in itertools.product(FAULTS, PHASES, TRANSPORTS, PARTIES)]


def why_not(cell: Cell) -> str:
    """Why this combination cannot exist; empty where it can."""
    if cell.fault in ("reorder", "wrong version", "wrong hash"):
        return _why_no_words(cell)
    if cell.fault == "disk full":
        return _why_no_disk(cell)
    if cell.transport == "loopback":
        return _why_not_in_process(cell)
    return ""


def _why_no_words(cell: Cell) -> str:
    if cell.fault == "reorder":
        if not cell.in_bucket:
            return "control calls are made one at a time, each after the answer to the last"
        if cell.transport == "nccl":
            return "a bucket is asked for after the answer to the last, and a group's broadcasts are in order"
        if (cell.transport, cell.party) == ("loopback", "server"):
            return "the answer to a bucket is the return of a call"
    if cell.fault == "wrong version":
        if cell.in_bucket or cell.phase == "release":
            return "nothing in this phase names a version"
        if (cell.transport, cell.phase) == ("loopback", "commit"):
            return "an argument of a call in the same process; the return names no version"
    if cell.fault == "wrong hash":
        if cell.phase in ("commit", "release"):
            return "nothing in this phase names a hash"
        if cell.transport == "nccl":
            return "stock SGLang knows no plan and no checksums"
        if cell.in_bucket and cell.party == "server":
            return "an acknowledgement names no hash"
    return ""


def _why_no_disk(cell: Cell) -> str:
    if cell.party == "trainer":
        return "" if cell.phase == "release" else "a trainer writes only its report, after the update"
    if cell.transport == "loopback":
        return "it writes nothing"
    if cell.transport == "nccl":
        return "SGLang loads a broadcast in memory; what it writes is its log"
    return ""


def _why_not_in_process(cell: Cell) -> str:
    if cell.fault == "kill" and cell.party == "trainer":
        return "the servers are objects in the trainer's process and end with it"
    if cell.fault == "stall":
        return "calls into the trainer's own process: one stall stops both, and no clock runs"
    if cell.fault == "corrupt a byte" and (not cell.in_bucket or cell.party == "server"):
        return "calls with Python values; only a bucket is bytes"
    if cell.fault == "duplicate" and cell.party == "server":
        return "a call returns once"
    return ""


OUTCOMES = {
    "fenced": "the server is fenced by name, the other commits",
    "committed": "both servers commit",
    "old": "no server has the new version",
    "either": "each server has the old version or the new one, whole, or claims none",
    "by verify": "the update cannot see it; `verify` names the server and its tensors",
}


def expected(cell: Cell) -> tuple[str, ...]:
    """Which of OUTCOMES may be."""
    if cell.party == "trainer" and cell.fault in ("kill", "stall", "refuse"):
        if (cell.transport, cell.fault) == ("nccl", "stall"):
            return ("either",)  # SGLang has no lease: it waits for the trainer, which goes on when it wakes
        return ("either",) if cell.phase in ("commit", "release") else ("old",)
    if cell.fault == "wrong version" and cell.phase == "begin":
        return ("old",)
    if cell.fault == "disk full":
        return ("committed",)
    special = _unusual(cell)
    return special or ("fenced",)


def _unusual(cell: Cell) -> tuple[str, ...]:
    """Faults that do no harm, or another."""
    server = cell.party == "server"
    if cell.transport == "nccl":
        return _unusual_nccl(cell)
    if cell.transport == "loopback" and cell.fault in ("duplicate", "reorder"):
        return ("committed",)  # a bucket has a place of its own in memory, and no line to keep in order
    if cell.transport == "loopback" and cell.fault == "wrong hash" and cell.phase == "begin" and server:
        return ("committed",)  # as after a restart: it is shown the plan again
    if cell.fault == "duplicate" and not cell.in_bucket and server:
        # The second answer may be taken for that to the next request; a commit's own is then missed.
        return ("committed", "fenced")
    if cell.fault == "duplicate" and not cell.in_bucket:
        return ("committed",)  # the second begin or commit is refused, the second continue changes nothing
    if cell.fault == "duplicate" and cell.place == "last":
        # Nobody reads on after the last bucket; whether its second answer is still read is a race.
        return ("committed", "fenced") if server else ("committed",)
    if cell.fault == "reorder" and server:
        return ("committed",)  # acknowledgements name their bucket
    if cell.fault == "corrupt a byte" and server and cell.phase in ("begin", "release"):
        return ("committed",)  # a success whose words nobody needs
    return ()


def _unusual_nccl(cell: Cell) -> tuple[str, ...]:
    server = cell.party == "server"
    if cell.fault == "corrupt a byte" and server:
        return ("committed",)  # a success whose words nobody needs
    if cell.fault == "corrupt a byte" and cell.in_bucket:
        return ("by verify",)
    if (cell.fault, cell.phase) == ("wrong version", "commit") and server:
        return ("committed",)  # it is asked again what it claims
    if cell.phase == "begin" and (cell.fault, cell.party) in (("refuse", "server"), ("corrupt a byte", "trainer")):
        return ("committed",)  # refused once: it is shown the plan again, and begins
    if cell.fault == "duplicate" and (server or not cell.in_bucket):
        return ("committed", "fenced") if server else ("committed",)
    return ()


RUN = [cell for cell in CELLS if not why_not(cell)]


def covering(cells: list[Cell]) -> set[Cell]:
    """A few of them: every fault of each party and every phase of each party comes up."""
    chosen: set[Cell] = set()
    seen: set[tuple[str, str]] = set()
    for cell in sorted(cells, key=_turn):
        facts = {(cell.party, cell.fault), (cell.party, cell.phase)}
        if (cell.party, cell.fault) not in seen:
            chosen.add(cell)
            seen |= facts
    for cell in cells:
        if (cell.party, cell.phase) not in seen:
            chosen.add(cell)
            seen.add((cell.party, cell.phase))
    return chosen


def _turn(cell: Cell) -> int:
    """Another phase first for each fault, so that few cells see them all."""
    return (PHASES.index(cell.phase) - FAULTS.index(cell.fault) - 3 * PARTIES.index(cell.party)) % len(PHASES)
