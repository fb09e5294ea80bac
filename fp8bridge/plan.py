"""The plan of an update: pure data, the same on every rank and from run to run.

A `Manifest` is what travels (buckets, names, dtypes, shapes, byte offsets); sender and server
compare its hash before a byte is sent. A `Plan` adds the trainer's side: which shards make up each
tensor, what is done to it, and which rank sends it. `planner.make_plan` builds one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from .errors import WireError
from .layout import Action, ServerLayout
from .types import ITEMSIZE, Shard, TensorMeta


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a bucket: `nbytes` bytes of `dtype`, row-major, from byte `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One unit on the wire. SGLang's flattened-bucket byte layout: entries follow each other
    without padding, larger item sizes first, so that every offset is aligned to its item size."""

    index: int
    owner: int
    """Trainer rank that fills and sends it."""
    nbytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What both sides agree on before anything is sent."""

    layout: ServerLayout
    buckets: tuple[Bucket, ...]
    hash: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", _digest(self.as_dict()))

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets)

    def entries(self) -> dict[str, Entry]:
        return {e.name: e for b in self.buckets for e in b.entries}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `Manifest.from_dict` reads it back. The hash is over this."""
        return {
            "layout": self.layout.as_dict(),
            "buckets": [
                {
                    "index": b.index,
                    "owner": b.owner,
                    "nbytes": b.nbytes,
                    "entries": [[e.name, e.dtype, list(e.shape), e.offset] for e in b.entries],
                }
                for b in self.buckets
            ],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Manifest:
        """Read hostile input: WireError unless every bucket is exactly tiled by its entries."""
        try:
            raw = data["layout"]
            layout = ServerLayout(
                block=tuple(raw["block"]) if raw["block"] else None,
                dtype=raw["dtype"],
                ignored=tuple(raw["ignored"]),
                scale_format=raw["scale_format"],
            )
            buckets = tuple(_bucket(b) for b in data["buckets"])
        except (KeyError, TypeError, ValueError) as err:
            raise WireError(f"not a manifest: {type(err).__name__} {err}") from err
        _check_buckets(buckets)
        return cls(layout=layout, buckets=buckets)


@dataclass(frozen=True, slots=True)
class Item:
    """One trainer tensor and what becomes of it. `shards` tile it exactly; one replica each."""

    meta: TensorMeta
    action: Action
    reason: str
    owner: int
    bucket: int
    shards: tuple[Shard, ...]
    at_source: bool = False
    """Each rank quantizes its own shards and sends FP8; else shards are gathered as they are."""

    def shard_nbytes(self, shard: Shard, block: tuple[int, int] | None) -> int:
        """Bytes of one shard between ranks."""
        if self.at_source and block:
            scales = -(-shard.rows // block[0]) * -(-shard.cols // block[1])
            return shard.rows * shard.cols + 4 * scales
        return shard.rows * shard.cols * ITEMSIZE[self.meta.dtype]

    def in_bands(self, block: tuple[int, int] | None) -> bool:
        """Every shard lies on the owner and is a run of whole rows that begins and ends with scale blocks: they are
        packed one by one from where they are, to the bits of the whole."""
        rows, cols = self.meta.matrix
        step = block[0] if block and self.action == "quantize" else 1
        return bool(self.shards) and all(
            (s.rank, s.dst_col, s.cols, s.dst_row % step) == (self.owner, 0, cols, 0)
            and (s.rows % step == 0 or s.dst_row + s.rows == rows)
            for s in self.shards
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an update needs to know; made once, run every step.

    rounds[r] are the bucket indexes that are gathered, packed and sent at the same time, at most
    one a rank. items are in bucket order; bucket_items[i] are the items of bucket i.
    """

    manifest: Manifest
    rule: str | None
    bucket_nbytes: int
    items: tuple[Item, ...]
    rounds: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    hash: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", _digest(self._hashed()))

    @property
    def layout(self) -> ServerLayout:
        return self.manifest.layout

    @property
    def nbytes(self) -> int:
        """Bytes on the wire to one server."""
        return self.manifest.nbytes

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(sorted({b.owner for b in self.manifest.buckets}))

    def items_of(self, bucket: int) -> tuple[Item, ...]:
        return tuple(i for i in self.items if i.bucket == bucket)

    def items_by_bucket(self) -> dict[int, list[Item]]:
        found: dict[int, list[Item]] = {b.index: [] for b in self.manifest.buckets}
        for item in self.items:
            found[item.bucket].append(item)
        return found

    def gathered_nbytes(self) -> int:
        """Bytes that move between trainer ranks in one update."""
        block = self.layout.block
        return sum(i.shard_nbytes(s, block) for i in self.items for s in i.shards if s.rank != i.owner)

    def saved_nbytes(self) -> int:
        """Bytes between ranks that quantizing before the gather saves in one update."""
        travelling = [(i, s) for i in self.items for s in i.shards if s.rank != i.owner]
        return sum(s.rows * s.cols * ITEMSIZE[i.meta.dtype] for i, s in travelling) - self.gathered_nbytes()

    def fallbacks(self) -> list[str]:
        """What is not done the best way, by tensor: casts, oversized buckets, weights that cross between
        trainer ranks before they are quantized. Empty is good."""
        casts = [f"cast: {i.meta.name} ({i.reason})" for i in self.items if i.action == "cast"]
        unquantized = [
            f"gathered in {i.meta.dtype}: {i.meta.name} (a shard edge is inside a scale block)"
            for i in self.items
            if i.action == "quantize" and not i.at_source and any(s.rank != i.owner for s in i.shards)
        ]
        return casts + [n for n in self.notes if n.startswith(("oversized", "requantized"))] + unquantized

    def predicted_seconds(self, *, wire_gbytes_per_s: float, servers: int = 1) -> float:
        """Seconds on the wire if nothing else costs: the busiest sender's bytes, once per server."""
        per_owner = {o: sum(b.nbytes for b in self.manifest.buckets if b.owner == o) for o in self.owners}
        return max(per_owner.values()) * servers / (wire_gbytes_per_s * 1e9)

    def summary(self) -> dict[str, Any]:
        """Figures for `--json`."""
        actions: dict[str, dict[str, int]] = {}
        for item in self.items:
            row = actions.setdefault(item.action, {"tensors": 0, "nbytes_in": 0})
            row["tensors"] += 1
            row["nbytes_in"] += item.meta.nbytes
        return {
            "hash": self.hash,
            "manifest_hash": self.manifest.hash,
            "layout": self.layout.as_dict(),
            "rule": self.rule,
            "tensors": len(self.items),
            "nbytes_in": sum(i.meta.nbytes for i in self.items),
            "nbytes_wire": self.nbytes,
            "nbytes_gathered": self.gathered_nbytes(),
            "nbytes_saved_by_quantizing_first": self.saved_nbytes(),
            "quantized_before_gather": sum(i.at_source for i in self.items),
            "buckets": len(self.manifest.buckets),
            "rounds": len(self.rounds),
            "nbytes_by_sender": {
                str(o): sum(b.nbytes for b in self.manifest.buckets if b.owner == o) for o in self.owners
            },
            "actions": actions,
            "fallbacks": self.fallbacks(),
            "notes": list(self.notes),
        }

    def preview(self, *, wire_gbytes_per_s: float = 10.0, servers: int = 1) -> str:
        """A page of text: bytes, buckets, actions, fallbacks, predicted seconds. Moves nothing."""
        s = self.summary()
        saved = s["nbytes_saved_by_quantizing_first"]
        seconds = self.predicted_seconds(wire_gbytes_per_s=wire_gbytes_per_s, servers=servers)
        lines = [
            f"plan {self.hash[:16]}  {self.layout.describe()}  rule: {self.rule or 'none'}",
            f"  {s['tensors']} tensors, {_mb(s['nbytes_in'])} in the trainer -> {_mb(s['nbytes_wire'])} on the "
            f"wire per server, {_mb(s['nbytes_gathered'])} between trainer ranks"
            + (f" (quantized first: {s['quantized_before_gather']} tensors, {_mb(saved)} saved)" if saved else ""),
            f"  {s['buckets']} buckets of at most {_mb(self.bucket_nbytes)} in {s['rounds']} rounds, "
            + _senders(s["nbytes_by_sender"]),
        ]
        for action, row in s["actions"].items():
            reasons = sorted({i.reason for i in self.items if i.action == action})
            shown = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
            lines.append(f"  {action:<9}{row['tensors']:>6} tensors {_mb(row['nbytes_in']):>12}  ({shown})")
        lines.append(f"  predicted wire time: {seconds:.4f} s at {wire_gbytes_per_s:g} GB/s to {servers} server(s)")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _hashed(self) -> dict[str, Any]:
        return {
            "manifest": self.manifest.hash,
            "rule": self.rule,
            "items": [
                [i.meta.name, i.meta.dtype, list(i.meta.shape), i.action, i.owner, i.bucket, i.at_source]
                + [[s.rank, s.param, s.rows, s.cols, s.src_row, s.src_col, s.dst_row, s.dst_col] for s in i.shards]
                for i in self.items
            ],
        }


def _senders(nbytes: dict[str, int]) -> str:
    if len(nbytes) <= 8:
        return "senders: " + ", ".join(f"rank {o} {_mb(n)}" for o, n in nbytes.items())
    busiest = max(nbytes, key=lambda o: nbytes[o])
    return f"{len(nbytes)} senders of {_mb(min(nbytes.values()))} to {_mb(nbytes[busiest])} (rank {busiest})"


def _bucket(raw: dict[str, Any]) -> Bucket:
    entries = []
    for name, dtype, shape, offset in raw["entries"]:
        if not isinstance(name, str) or dtype not in ITEMSIZE:
            raise ValueError(f"entry {name!r} of dtype {dtype!r}")
        dims = tuple(shape)
        if not all(isinstance(d, int) and d >= 0 for d in (*dims, offset)):
            raise ValueError(f"entry {name!r} has shape {shape!r} at {offset!r}")
        nbytes = ITEMSIZE[dtype]
        for d in dims:
            nbytes *= d
        entries.append(Entry(name, dtype, dims, offset, nbytes))
    return Bucket(int(raw["index"]), int(raw["owner"]), int(raw["nbytes"]), tuple(entries))


def _check_buckets(buckets: tuple[Bucket, ...]) -> None:
    names: set[str] = set()
    for position, bucket in enumerate(buckets):
        if bucket.index != position:
            raise WireError(f"bucket {bucket.index} stands at position {position}", bucket=bucket.index)
        end = 0
        for e in bucket.entries:
            if e.offset != end or e.offset % ITEMSIZE[e.dtype]:
                raise WireError(f"{e.name} is at byte {e.offset}, expected {end}", bucket=position, tensor=e.name)
            if e.name in names:
                raise WireError(f"{e.name} is in the manifest twice", bucket=position, tensor=e.name)
            names.add(e.name)
            end += e.nbytes
        if end != bucket.nbytes:
            raise WireError(f"bucket {position} says {bucket.nbytes} bytes, its entries are {end}", bucket=position)


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mb(nbytes: int) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e4 else f"{nbytes} B"
