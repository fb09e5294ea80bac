"""Makes a `Plan` from what the ranks hold and what the servers want. Deterministic; no torch.

Order of decisions, each a pure function: merge what the ranks describe -> decide each tensor's
action -> choose its sending rank (fewest bytes so far among the ranks that hold it) -> choose one
replica of each shard -> fill buckets.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .config import BLOCKS, POWER_OF_TWO_RULES, BridgeConfig
from .errors import ConfigError, CoverageError, EmptyModelError, LayoutError, PlanError
from .layout import SCALE_SUFFIX, Decision, ServerLayout
from .plan import Bucket, Entry, Item, Manifest, Plan
from .types import ITEMSIZE, Shard, TensorMeta

_SIBLINGS = ((re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".q_kv_a_proj."),)
"""SGLang joins these in one load call and drops what comes alone: they share a bucket."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A tensor on its way to an Item: decided, but without owner and bucket."""

    meta: TensorMeta
    decision: Decision
    holders: dict[tuple[int, int, int, int], tuple[Shard, ...]]
    wire: tuple[tuple[str, str, tuple[int, ...], int], ...]
    """(name, dtype, shape, bytes) of what it becomes on the wire."""
    nbytes_wire: int
    unit: str
    """Tensors of one unit stay in one bucket."""


def make_plan(
    described: Sequence[tuple[Iterable[TensorMeta], Iterable[Shard]]],
    layout: ServerLayout,
    config: BridgeConfig,
    *,
    trained_rules: Collection[str] = (),
    requantized: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """The plan for `described[r]` = what rank r's source describes.

    trained_rules: the rules the ranks quantize with themselves. requantized: tensor -> why its own FP8
    bytes cannot be sent.

    Raises EmptyModelError, CoverageError (shards leave a hole or overlap), LayoutError, PlanError
    (ranks disagree; a cast that is not allowed) and ConfigError (a rule the layout can't take).
    """
    metas, shards = _merge(described)
    if not metas:
        raise EmptyModelError("the source describes no tensors on any rank; was the model built?")
    layout.check_siblings(metas)
    if layout.block not in (None, *BLOCKS):
        raise LayoutError(f"the servers want scale blocks of {layout.block}; the kernels make {BLOCKS}")
    rule = resolve_rule(layout, config, trained_rules)
    decisions = {name: _decide(name, metas, layout) for name in metas}
    drafts = [_draft(metas[name], shards[name], decisions[name], layout) for name in sorted(metas, key=_natural)]
    _check_casts(drafts, config)
    owners = _choose_owners(drafts, config)
    buckets, placed = _fill(drafts, owners, config.bucket_nbytes)
    items = _items(drafts, owners, placed, layout)
    return Plan(
        manifest=Manifest(layout=layout, buckets=tuple(buckets)),
        rule=rule,
        bucket_nbytes=config.bucket_nbytes,
        items=tuple(items),
        rounds=_rounds(buckets),
        notes=(
            *_notes(buckets, layout, metas, config.bucket_nbytes),
            *(f"requantized: {name}: {why}" for name, why in sorted(requantized.items())),
        ),
    )


def resolve_rule(layout: ServerLayout, config: BridgeConfig, trained: Collection[str] = ()) -> str | None:
    """The rounding rule: the configured one, else the trainer's own, else the layout's.

    Raises ConfigError if the servers cannot take it, or the trainer's ranks differ.
    """
    if len(trained) > 1:
        raise ConfigError(f"the trainer's ranks quantize by different rules ({', '.join(sorted(trained))}); use one")
    wanted: str | None = config.rule
    if wanted is None and trained:
        (wanted,) = trained
    if layout.block is None:
        if config.rule is not None:
            raise ConfigError(f"rule {config.rule!r} was asked for, but the servers are not quantized; drop it")
        return None
    if layout.scale_format == "ue8m0":
        if wanted is not None and wanted not in POWER_OF_TWO_RULES:
            raise ConfigError(
                f"rule {wanted!r} makes fp32 scales, but the servers want powers of two (scale_fmt ue8m0); "
                f"use one of {', '.join(POWER_OF_TWO_RULES)}"
            )
        return wanted or "ue8m0"
    return wanted or "sglang"


def _merge(
    described: Sequence[tuple[Iterable[TensorMeta], Iterable[Shard]]],
) -> tuple[dict[str, TensorMeta], dict[str, list[Shard]]]:
    metas: dict[str, tuple[TensorMeta, int]] = {}
    shards: dict[str, list[Shard]] = defaultdict(list)
    for rank, (rank_metas, rank_shards) in enumerate(described):
        for meta in rank_metas:
            first, first_rank = metas.setdefault(meta.name, (meta, rank))
            if first != meta:
                raise PlanError(
                    f"ranks {first_rank} and {rank} disagree about {meta.name}: {first.dtype} {list(first.shape)} "
                    f"and {meta.dtype} {list(meta.shape)}; both must hold the same model",
                    tensor=meta.name,
                )
        for shard in rank_shards:
            if shard.rank != rank:
                raise PlanError(f"rank {rank} describes a shard of {shard.tensor} on rank {shard.rank}")
            shards[shard.tensor].append(shard)
    strangers = sorted(set(shards) - set(metas))
    if strangers:
        raise PlanError(f"shards without metadata: {', '.join(strangers[:5])}")
    return {name: meta for name, (meta, _) in metas.items()}, shards


def _decide(name: str, metas: dict[str, TensorMeta], layout: ServerLayout) -> Decision:
    """A scale follows its weight; a weight with a scale is passed through; all others by the layout."""
    weight = metas.get(name.removesuffix(SCALE_SUFFIX))
    if name.endswith(SCALE_SUFFIX) and weight is not None:
        return layout.decide(weight, metas[name])
    return layout.decide(metas[name], metas.get(name + SCALE_SUFFIX))


def _draft(meta: TensorMeta, shards: list[Shard], decision: Decision, layout: ServerLayout) -> _Draft:
    holders: dict[tuple[int, int, int, int], list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.rows and shard.cols:
            holders[shard.box].append(shard)
    _check_coverage(meta, list(holders))
    wire = _wire_tensors(meta, decision, layout)
    return _Draft(
        meta=meta,
        decision=decision,
        holders={box: tuple(sorted(held, key=lambda s: s.rank)) for box, held in sorted(holders.items())},
        wire=wire,
        nbytes_wire=sum(nbytes for *_, nbytes in wire),
        unit=_unit(meta.name),
    )


def _check_coverage(meta: TensorMeta, boxes: list[tuple[int, int, int, int]]) -> None:
    """The distinct boxes must tile the matrix: inside it, no overlap, no hole."""
    rows, cols = meta.matrix
    area = 0
    for r, c, h, w in boxes:
        if r < 0 or c < 0 or r + h > rows or c + w > cols:
            raise CoverageError(
                f"a shard of {meta.name} covers rows {r}:{r + h}, columns {c}:{c + w}, outside {list(meta.shape)}",
                tensor=meta.name,
            )
        area += h * w
    overlap = _first_overlap(boxes)
    if overlap:
        raise CoverageError(
            f"shards of {meta.name} overlap: {overlap[0]} and {overlap[1]} (row, column, rows, columns); "
            "replicas must describe the same boxes",
            tensor=meta.name,
        )
    if area != rows * cols:
        raise CoverageError(
            f"the shards of {meta.name} {list(meta.shape)} cover {area} of {rows * cols} elements; a rank's "
            "parameters are missing from its source",
            tensor=meta.name,
        )


def _first_overlap(boxes: list[tuple[int, int, int, int]]) -> tuple[object, object] | None:
    active: list[tuple[int, int, int, int]] = []
    for box in sorted(boxes):
        r, c, _, w = box
        active = [a for a in active if a[0] + a[2] > r]
        for a in active:
            if a[1] < c + w and c < a[1] + a[3]:
                return (a, box)
        active.append(box)
    return None


def _check_casts(drafts: list[_Draft], config: BridgeConfig) -> None:
    casts = [d for d in drafts if d.decision.action == "cast"]
    if casts and not config.allow_cast:
        shown = ", ".join(d.meta.name for d in casts[:5])
        raise PlanError(
            f"{len(casts)} unquantized tensors would change dtype on the way ({shown}: {casts[0].decision.reason}); "
            "train in the servers' dtype, or permit it with BridgeConfig(allow_cast=True)",
            tensor=casts[0].meta.name,
        )


def _unit(name: str) -> str:
    for pattern, joined in _SIBLINGS:
        name = pattern.sub(joined, name)
    return name.removesuffix(SCALE_SUFFIX)


def _units(drafts: list[_Draft]) -> list[list[int]]:
    """Indexes of drafts that must share a bucket, in plan order of their first member."""
    units: dict[str, list[int]] = defaultdict(list)
    for i, draft in enumerate(drafts):
        units[draft.unit].append(i)
    return list(units.values())


def _choose_owners(drafts: list[_Draft], config: BridgeConfig) -> list[int]:
    """Sending rank of each draft: of the ranks that hold some of the unit, the least loaded."""
    owners = [0] * len(drafts)
    if config.senders == "first":
        return owners
    load: dict[int, int] = defaultdict(int)
    for unit in _units(drafts):
        candidates = sorted({s.rank for i in unit for held in drafts[i].holders.values() for s in held} or {0})
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        for i in unit:
            owners[i] = owner
            load[owner] += drafts[i].nbytes_wire
    return owners


def _fill(drafts: list[_Draft], owners: list[int], limit: int) -> tuple[list[Bucket], list[int]]:
    """Buckets in round order, and the bucket index of each draft."""
    filling: dict[int, list[list[int]]] = defaultdict(list)
    room: dict[int, int] = {}
    for unit in _units(drafts):
        owner, nbytes = owners[unit[0]], sum(drafts[i].nbytes_wire for i in unit)
        if owner not in room or nbytes > room[owner]:
            filling[owner].append([])
            room[owner] = limit
        filling[owner][-1] += unit
        room[owner] -= nbytes
    buckets: list[Bucket] = []
    placed = [0] * len(drafts)
    for round_index in range(max(len(b) for b in filling.values())):
        for owner in sorted(filling):
            if round_index < len(filling[owner]):
                members = filling[owner][round_index]
                for i in members:
                    placed[i] = len(buckets)
                buckets.append(_lay_out(len(buckets), owner, [drafts[i] for i in members]))
    return buckets, placed


def _lay_out(index: int, owner: int, drafts: list[_Draft]) -> Bucket:
    """Offsets in SGLang's byte layout: no padding, so larger item sizes go first."""
    tensors = sorted((t for d in drafts for t in d.wire), key=lambda t: -ITEMSIZE[t[1]])
    ends = itertools.accumulate((nbytes for *_, nbytes in tensors), initial=0)
    entries = [Entry(name, dtype, shape, at, n) for (name, dtype, shape, n), at in zip(tensors, ends, strict=False)]
    return Bucket(index, owner, sum(d.nbytes_wire for d in drafts), tuple(entries))


def _wire_tensors(
    meta: TensorMeta, decision: Decision, layout: ServerLayout
) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
    """(name, dtype, shape, bytes) of what a trainer tensor becomes on the wire."""
    if decision.action == "quantize":
        scales = layout.scale_shape(meta.matrix)
        return (
            (meta.name, "float8_e4m3fn", meta.shape, meta.numel),
            (meta.name + SCALE_SUFFIX, "float32", scales, 4 * scales[0] * scales[1]),
        )
    dtype = layout.dtype if decision.action == "cast" else meta.dtype
    return ((meta.name, dtype, meta.shape, ITEMSIZE[dtype] * meta.numel),)


def _items(drafts: list[_Draft], owners: list[int], placed: list[int], layout: ServerLayout) -> list[Item]:
    """Choose the replica of each shard: the owner's own, else the rank that lends least so far."""
    lent: dict[int, int] = defaultdict(int)
    items = []
    for draft, owner, bucket in zip(drafts, owners, placed, strict=True):
        chosen = []
        for held in draft.holders.values():
            shard = next((s for s in held if s.rank == owner), None)
            if shard is None:
                shard = min(held, key=lambda s: (lent[s.rank], s.rank))
                lent[shard.rank] += shard.rows * shard.cols * ITEMSIZE[draft.meta.dtype]
            chosen.append(shard)
        decision = draft.decision
        at_source = decision.action == "quantize" and _cut_on_blocks(draft.meta, chosen, owner, layout)
        items.append(Item(draft.meta, decision.action, decision.reason, owner, bucket, tuple(chosen), at_source))
    return sorted(items, key=lambda i: i.bucket)


def _cut_on_blocks(meta: TensorMeta, shards: list[Shard], owner: int, layout: ServerLayout) -> bool:
    """Some shard travels, and every edge between shards is an edge between scale blocks: quantizing the
    shards one by one gives the bits of quantizing the whole."""
    if layout.block is None or all(s.rank == owner for s in shards):
        return False
    (rows, cols), (block_rows, block_cols) = meta.matrix, layout.block
    return all(
        s.dst_row % block_rows == 0
        and s.dst_col % block_cols == 0
        and (s.rows % block_rows == 0 or s.dst_row + s.rows == rows)
        and (s.cols % block_cols == 0 or s.dst_col + s.cols == cols)
        for s in shards
    )


def _rounds(buckets: list[Bucket]) -> tuple[tuple[int, ...], ...]:
    rounds: list[list[int]] = []
    seen: dict[int, int] = defaultdict(int)
    for bucket in buckets:
        r = seen[bucket.owner]
        seen[bucket.owner] += 1
        if r == len(rounds):
            rounds.append([])
        rounds[r].append(bucket.index)
    return tuple(tuple(r) for r in rounds)


def _notes(buckets: list[Bucket], layout: ServerLayout, metas: dict[str, TensorMeta], limit: int) -> list[str]:
    notes = [
        f"oversized: bucket {b.index} is {b.nbytes} bytes (limit {limit}), a tensor or pair that cannot be split: "
        + max(b.entries, key=lambda e: e.nbytes).name
        for b in buckets
        if b.nbytes > limit
    ]
    unused = layout.unused_ignores(metas)
    notes += [f"the server's config ignores {entry!r}, which matches no tensor" for entry in unused]
    return notes


def _natural(name: str) -> list[tuple[int, int | str]]:
    """layers.2 before layers.10."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name)]
