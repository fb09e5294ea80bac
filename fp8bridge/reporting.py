"""A `SyncReport` from what ranks and servers measured, and the states of servers as ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .errors import VerifyError
from .plan import Plan
from .report import PlanFacts, ServerReport, Spread, Stopwatch, SyncReport
from .session import Member, ServerSet


def facts_of(plan: Plan, plan_s: float) -> PlanFacts:
    """Counted once for a plan: some of it looks at every tensor."""
    return PlanFacts(
        nbytes=plan.nbytes,
        nbytes_gathered=plan.gathered_nbytes(),
        buckets=len(plan.manifest.buckets),
        rule=plan.rule,
        plan_hash=plan.hash,
        plan_s=plan_s,
        fallbacks=tuple(plan.fallbacks()),
    )


def measured(watch: Stopwatch, *, paused_s: float, extra_nbytes: int, traced: bool) -> dict[str, Any]:
    """One rank's figures of an update, as plain data for the others."""
    return {
        "seconds": watch.total,
        "stages": watch.seconds,
        "paused_s": paused_s,
        "extra_nbytes": extra_nbytes,
        "trace": watch.trace() if traced else None,
        "met_at": watch.common_at,
    }


def sync_report(
    version: int, facts: PlanFacts, servers: dict[str, ServerReport], ranks: Sequence[dict[str, Any]]
) -> SyncReport:
    """`ranks[r]` is what rank r `measured`; rank 0 alone knows how long the servers were paused."""
    return SyncReport(
        **asdict(facts),
        version=version,
        seconds=max(r["seconds"] for r in ranks),
        stages={name: Spread.of([r["stages"][name] for r in ranks]) for name in ranks[0]["stages"]},
        paused_s=ranks[0]["paused_s"],
        servers=servers,
        extra_nbytes=Spread.of([r["extra_nbytes"] for r in ranks]),
        met_at=ranks[0]["met_at"],
        traces=tuple(r["trace"] for r in ranks if r["trace"] is not None),
    )


def states(servers: ServerSet | None) -> dict[str, ServerReport]:
    members = servers.members.values() if servers else ()
    return {m.name: ServerReport(m.state, m.version, m.reason, dict(m.seconds), _load_way(m)) for m in members}


def _load_way(member: Member) -> str:
    way = getattr(member.server, "load_way", "")
    return way if member.version is not None and isinstance(way, str) else ""


def encoded(reports: dict[str, ServerReport]) -> dict[str, Any]:
    return {name: asdict(report) for name, report in reports.items()}


def decoded(data: dict[str, Any]) -> dict[str, ServerReport]:
    return {name: ServerReport(**fields) for name, fields in data.items()}


def compare(sent: dict[str, int], found: dict[str, dict[str, int]]) -> dict[str, int]:
    """Server -> tensors compared; VerifyError where a server's checksums are not those of what was sent."""
    for name, theirs in found.items():
        wrong = [t for t in sorted(sent.keys() | theirs.keys()) if sent.get(t) != theirs.get(t)]
        if wrong:
            raise VerifyError(
                f"{name} holds other bytes than were sent in {len(wrong)} of {len(sent)} tensors: "
                f"{', '.join(wrong[:5])}; do not use its samples, send the weights again",
                server=name,
                tensor=wrong[0],
            )
    return {name: len(sent) for name in found}
