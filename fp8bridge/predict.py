"""Seconds of an update before any byte is moved: bandwidths in, a pipeline of stages, contention on links.

The model. A round's buckets go through three stages; each waits for the stage before it and for itself, and a
bucket is packed only when the bucket two before it was acknowledged (two buckets are in flight):

    trainer   bytes between ranks / gather, then bytes read and written by the packer / copy
    wire      the slowest of: a sender's bytes to all servers / wire; a round's bytes into one server / ingest;
              a round's bytes to all servers / fabric
    server    a round's bytes / load, and `bucket_s` for each bucket (headers, acknowledgement)

Before them every rank reads its weights once (check), and `fixed_s` stands for pause, sessions, commit and resume.
With `broadcast` a sender's bytes leave it once; without, once for every server. Everything else counts as free:
docs/performance.md compares the model with measured syncs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields

from .errors import ConfigError
from .plan import Plan
from .types import ITEMSIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bandwidths in GB/s (1e9 bytes), and what does not shrink with them in seconds."""

    wire: float = 10.0
    """Out of one sending rank."""
    ingest: float | None = None
    """Into one server. None: as fast as all senders together."""
    fabric: float | None = None
    """Of whatever all transfers share. None: nothing is shared."""
    gather: float = 100.0
    """Into or out of a trainer rank, from other ranks."""
    copy: float = 3000.0
    """Of a rank's memory as the packer uses it, bytes read plus bytes written."""
    check: float | None = None
    """Of the search for NaN and Inf, bytes read. None: as `copy`."""
    load: float | None = None
    """Of a server that checks and loads what arrives. None: it costs nothing."""
    bucket_s: float = 0.001
    fixed_s: float = 0.02
    broadcast: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0.0 if each.name.endswith("_s") else None
            if each.name == "broadcast" or value is None:
                continue
            if not isinstance(value, int | float) or (value <= 0 if least is None else value < 0):
                raise ConfigError(f"links: {each.name} is {value!r}; it must be a number > 0")

    @classmethod
    def parse(cls, text: str) -> Links:
        """`wire=50,ingest=100,broadcast=1`; ConfigError names what is wrong."""
        known = {each.name for each in fields(cls)}
        given: dict[str, float | bool] = {}
        for part in filter(None, text.split(",")):
            name, mark, value = part.partition("=")
            if name not in known or not mark:
                raise ConfigError(f"links: {part!r} is not one of {', '.join(sorted(known))} with =NUMBER")
            try:
                given[name] = float(value)
            except ValueError as err:
                raise ConfigError(f"links: {part!r} needs a number after the =") from err
        if "broadcast" in given:
            given["broadcast"] = bool(given["broadcast"])
        return cls(**given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`seconds` is of the whole update; the stages overlap, so they add up to more."""

    seconds: float
    check_s: float
    trainer_s: float
    wire_s: float
    server_s: float
    bottleneck: str
    """The stage that takes most of the time."""
    link_nbytes: dict[str, int]
    """Bytes over each kind of link in one update: of the busiest rank, into one server, and over all."""


def predict(plan: Plan, links: Links, *, servers: int = 1) -> Prediction:
    """What the model says for one update of `plan`."""
    traffic = _Traffic(plan)
    check_s = traffic.largest_read / ((links.check or links.copy) * 1e9)
    trainer = [traffic.trainer_s(r, links) for r in range(len(plan.rounds))]
    wire = [_wire_s(sizes, links, servers) for sizes in traffic.rounds]
    server = [
        (sum(sizes) / (links.load * 1e9) if links.load else 0.0) + links.bucket_s * len(sizes)
        for sizes in traffic.rounds
    ]
    whole = {"trainer": sum(trainer), "wire": sum(wire), "server": sum(server)}
    return Prediction(
        seconds=check_s + links.fixed_s + _pipeline(trainer, wire, server),
        check_s=check_s,
        trainer_s=whole["trainer"],
        wire_s=whole["wire"],
        server_s=whole["server"],
        bottleneck=max(whole, key=lambda name: whole[name]),
        link_nbytes=traffic.over_links(plan, copies=1 if links.broadcast else servers),
    )


class _Traffic:
    """Bytes of a plan by round and rank."""

    def __init__(self, plan: Plan) -> None:
        buckets = plan.manifest.buckets
        self.rounds = [[buckets[i].nbytes for i in indexes] for indexes in plan.rounds]
        round_of = {i: r for r, indexes in enumerate(plan.rounds) for i in indexes}
        self._packed: list[dict[int, int]] = [defaultdict(int) for _ in plan.rounds]
        self._received: list[dict[int, int]] = [defaultdict(int) for _ in plan.rounds]
        self._sent: list[dict[int, int]] = [defaultdict(int) for _ in plan.rounds]
        read: dict[int, int] = defaultdict(int)
        for bucket in buckets:
            self._packed[round_of[bucket.index]][bucket.owner] += bucket.nbytes
        for item in plan.items:
            r, itemsize = round_of[item.bucket], ITEMSIZE[item.meta.dtype]
            self._packed[r][item.owner] += item.meta.nbytes
            for shard in item.shards:
                read[shard.rank] += shard.rows * shard.cols * itemsize
                if shard.rank != item.owner:
                    nbytes = item.shard_nbytes(shard, plan.layout.block)
                    self._received[r][item.owner] += nbytes
                    self._sent[r][shard.rank] += nbytes
        self.largest_read = max(read.values(), default=0)

    def trainer_s(self, r: int, links: Links) -> float:
        moved = max([*self._received[r].values(), *self._sent[r].values()], default=0)
        return moved / (links.gather * 1e9) + max(self._packed[r].values(), default=0) / (links.copy * 1e9)

    def over_links(self, plan: Plan, *, copies: int) -> dict[str, int]:
        sent = _summed([{b.owner: b.nbytes} for b in plan.manifest.buckets])
        return {
            "busiest_sender_out": max(sent.values(), default=0) * copies,
            "each_server_in": plan.nbytes,
            "all_senders_out": plan.nbytes * copies,
            "busiest_rank_gather_out": max(_summed(self._sent).values(), default=0),
            "busiest_rank_gather_in": max(_summed(self._received).values(), default=0),
        }


def _summed(rounds: list[dict[int, int]]) -> dict[int, int]:
    total: dict[int, int] = defaultdict(int)
    for each in rounds:
        for rank, nbytes in each.items():
            total[rank] += nbytes
    return dict(total)


def _wire_s(sizes: list[int], links: Links, servers: int) -> float:
    """One round: each sender sends one bucket, all at once."""
    copies = 1 if links.broadcast else servers
    slowest = max(sizes) * copies / (links.wire * 1e9)
    if links.ingest:
        slowest = max(slowest, sum(sizes) / (links.ingest * 1e9))
    if links.fabric:
        slowest = max(slowest, sum(sizes) * copies / (links.fabric * 1e9))
    return slowest


def _pipeline(trainer: list[float], wire: list[float], server: list[float]) -> float:
    """End of the last round, with two rounds in flight."""
    packed = sent = 0.0
    loaded = [0.0, 0.0]
    for a, b, c in zip(trainer, wire, server, strict=True):
        packed = max(packed, loaded[-2]) + a
        sent = max(packed, sent) + b
        loaded.append(max(sent, loaded[-1]) + c)
    return loaded[-1]
