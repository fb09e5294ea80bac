"""One plan on every trainer rank, from what all of their sources describe."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from .config import BridgeConfig
from .errors import ConfigError
from .layout import ServerLayout
from .plan import Plan
from .planner import make_plan
from .ranks import Ranks, agree
from .types import Shard, TensorMeta, WeightSource


def agree_on_plan(ranks: Ranks, source: WeightSource, layout: ServerLayout, config: BridgeConfig) -> Plan:
    """Collective. Raises, on every rank, what a source or `make_plan` raises, and ConfigError where plans differ."""

    def describe() -> list[Any]:
        metas, shards = source.describe()
        trained = [getattr(source, "rule", None), getattr(source, "requantized", {})]
        return [[astuple(m) for m in metas], [astuple(s) for s in shards], *trained]

    answers = agree(ranks, describe)
    described = [
        ([TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in metas], [Shard(*s) for s in shards])
        for metas, shards, _, _ in answers
    ]
    requantized = {name: why for _, _, _, reasons in answers for name, why in reasons.items()}
    rules = {rule for _, _, rule, _ in answers if rule}
    plan = make_plan(described, layout, config, trained_rules=rules, requantized=requantized)
    hashes = agree(ranks, lambda: plan.hash)
    if len(set(hashes)) > 1:
        raise ConfigError(f"the ranks made different plans ({hashes}); give every rank the same BridgeConfig")
    return plan
