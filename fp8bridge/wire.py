"""Messages between a sending trainer rank and a receiving server: typed, bounded, no pickle.

A message is one msgpack map (`kind`, `protocol` and the fields of one dataclass below); a Bucket is
followed by frames of raw payload. The receiver connects, so the order is:

    receiver                      sender
    Hello          ──────────►
                   ◄──────────    Welcome (bucket indexes to expect here, connections to make) or Refuse
                   ◄──────────    Bucket + payload     (at most `credits` without an Ack)
    Ack            ──────────►
                   ◄──────────    Ping (the sender is alive and busy), Refuse (it gave up)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from .errors import WireError

PROTOCOL = 2
FRAME_NBYTES = 4 << 20
"""Largest frame of payload. Smaller than a bucket, so that the receiver copies one frame while the next ones are on
their way, into memory that its allocator has at hand: twice the speed of one frame a bucket."""
MAX_HEADER_NBYTES = 64 << 20
"""Of any message: one beyond this is refused unread. Who knows the plan allows less (`max_header_nbytes`)."""
_WORDS_NBYTES = 1 << 16
"""Names, secrets, and a reason for people."""
_FIELDS = 8
"""More than any message has."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A server reports to a sender. `session` is the sender's secret for this update; `stream`: which of its
    connections this is, from 0."""

    session: str
    manifest_hash: str
    server: str
    credits: int
    stream: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The sender accepts and will send these buckets over this connection, in this order. `streams`: connections that
    the server is to make in all; each is greeted for itself."""

    buckets: tuple[int, ...]
    streams: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Either side gives up this update; the message is for people."""

    message: str


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """One bucket; all further frames of the message are its payload. `checksums`: a little-endian uint64 for each
    entry of the manifest's bucket, in order."""

    index: int
    nbytes: int
    checksums: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """The server holds this bucket and its checksums agree, or not (`message` says why)."""

    index: int
    ok: bool
    message: str


@dataclass(frozen=True, slots=True)
class Ping:
    """The sender is alive; the next bucket is not ready yet."""


Message = Hello | Welcome | Refuse | BucketHeader | Ack | Ping
_KINDS: dict[str, type] = {c.__name__: c for c in (Hello, Welcome, Refuse, BucketHeader, Ack, Ping)}


def encode(message: Message) -> bytes:
    data = {"kind": type(message).__name__, "protocol": PROTOCOL} | asdict(message)
    packed: bytes = msgpack.packb(data)
    return packed


def max_header_nbytes(longest: int) -> int:
    """The longest message about lists of at most `longest` (of buckets, or of a bucket's entries)."""
    return min(_WORDS_NBYTES + 9 * longest, MAX_HEADER_NBYTES)


def decode(frame: bytes, max_nbytes: int = MAX_HEADER_NBYTES) -> Message:
    """Parse one header frame; WireError for anything that is not exactly one known message.

    Parsed values may take some seventy times the frame (empty maps do), so `max_nbytes` bounds the memory.
    """
    if len(frame) > max_nbytes:
        raise WireError(f"a header of {len(frame)} bytes; at most {max_nbytes} are read")
    try:
        data = msgpack.unpackb(frame, strict_map_key=True, max_map_len=_FIELDS)
    except (ValueError, TypeError, msgpack.UnpackException) as err:
        raise WireError(f"a frame of {len(frame)} bytes that is not msgpack") from err
    if not isinstance(data, dict) or "kind" not in data:
        raise WireError("a message without a kind; the peer does not speak fp8bridge")
    if data.get("protocol") != PROTOCOL:
        raise WireError(f"protocol {data.get('protocol')!r}, this side speaks {PROTOCOL}; use one fp8bridge version")
    cls = _KINDS.get(data["kind"]) if isinstance(data["kind"], str) else None
    if cls is None:
        raise WireError(f"unknown message kind {data['kind']!r}")
    return _build(cls, data)


def _build(cls: type, data: dict[str, Any]) -> Message:
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in data:
            raise WireError(f"{cls.__name__} without {field.name}")
        values[field.name] = _typed(cls.__name__, field.name, str(field.type), data[field.name])
    if extra := set(data) - set(values) - {"kind", "protocol"}:
        raise WireError(f"{cls.__name__} with unknown fields {sorted(map(str, extra))}")
    message: Message = cls(**values)
    return message


def _typed(kind: str, name: str, type_name: str, value: Any) -> Any:
    if type_name == "tuple[int, ...]":
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
    elif type(value) is {"str": str, "int": int, "bool": bool, "bytes": bytes}[type_name]:
        return value
    raise WireError(f"{kind}.{name} must be {type_name}, got {type(value).__name__}")
