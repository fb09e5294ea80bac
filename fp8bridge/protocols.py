"""The seams: what a transport and a rollout server must offer. No base classes to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import BridgeError
from .layout import ServerLayout
from .plan import Bucket, Manifest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A filled bucket. `memory` is flat uint8 of `bucket.nbytes` bytes, owned by the packer and
    lent to the transport from `send` until `wait(index)` returns. `checksums`: a little-endian uint64 for
    each entry, in order."""

    bucket: Bucket
    memory: torch.Tensor
    checksums: bytes


@dataclass(frozen=True, slots=True)
class Matrices:
    """What is still to be packed into a bucket, as the gather hands it to the packer.

    stamp: equal in two updates whose matrices lie in the same places, so that addresses of the first are good
    for the second; None where nobody can tell. make(): the 2-D matrices, in the order of the bucket's items: each
    shard of an item that is `in_bands`, else the whole item; nothing for those that come quantized (`at_source`).
    Views of parameters or scratch memory, valid until the next round.
    """

    stamp: tuple[int, ...] | None
    make: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Target:
    """What ranks other than 0 know of a server. tp_size: ranks of it that take part in a group."""

    name: str
    tp_size: int

    @classmethod
    def of(cls, server: RolloutServer) -> Target:
        return cls(server.name, int(getattr(server, "tp_size", 1)))

    def encoded(self) -> list[Any]:
        """As `agree` carries it: Target(*encoded)."""
        return [self.name, self.tp_size]


class Transport(Protocol):
    """Moves packed buckets from one sending rank to all servers of an update.

    Called on every trainer rank, in this order, from one thread: open, connect, (send, wait)*,
    close. A server that fails is recorded in `failures` and left out from then on; the others go
    on. Nothing here raises for a server's sake.
    """

    multi_sender: bool
    """False: only rank 0 may own buckets."""

    all_connect: bool
    """True: every rank calls `connect`; False: rank 0 alone."""

    from_device: bool
    """True: what is sent lies in memory of the device that the parameters are on."""

    failures: dict[str, BridgeError]
    """Server name -> what went wrong, since `open`."""

    def join(self, server: RolloutServer) -> None:
        """Between updates, on rank 0: this server is new in the set, or back after it was lost."""
        ...

    def meet(self, target: Target) -> None:
        """The same on every other rank."""
        ...

    def open(self, tokens: Mapping[str, str], manifest: Manifest, buckets: Sequence[int]) -> str:
        """Get ready for one update; the address that servers are told. `tokens`: secret of this
        update for each server name. `buckets`: indexes this rank will send, in order."""
        ...

    def connect(self, *, timeout_s: float, gone: Callable[[str], BridgeError | None]) -> None:
        """Wait until every server has reached this rank. `gone(name)` tells of a server known lost."""
        ...

    def drop(self, names: Sequence[str], reason: str) -> None:
        """Leave these servers out from now on (another rank lost them)."""
        ...

    def send(self, packed: PackedBucket) -> None:
        """Start sending to every live server; returns at once."""
        ...

    def wait(self, index: int) -> None:
        """Until every live server has acknowledged bucket `index`, or failed."""
        ...

    def close(self, reason: str = "") -> None:
        """End the update. With a reason, servers still waiting are told to give up. Idempotent."""
        ...

    def release(self) -> None:
        """For good: give back what is kept from update to update, here and on the servers."""
        ...


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself."""

    engine: str
    layout: ServerLayout | None
    """None: the server does not tell, and the trainer's config decides."""
    weight_version: str | None
    model: dict[str, Any] | None
    """Its Hugging Face config, where it tells."""
    atomic: bool
    """True: nothing is visible before commit, and an aborted update leaves the old version whole."""
    session: str | None = None
    """State of the weight-update session that is open there, if one is."""


class RolloutServer(Protocol):
    """Control of one server, blocking calls; rank 0 only, one call at a time per server.

    Every method raises a ServerError with this server's name, and nothing else.
    """

    name: str

    def info(self) -> ServerInfo: ...

    def preflight(self, manifest: Manifest) -> None:
        """Raise ServerMismatchError unless `manifest` is a full update of this server's weights."""
        ...

    def pause(self, mode: str, *, lease_s: float) -> None:
        """Stop generating; where the server can, only until nothing was heard from us for `lease_s`."""
        ...

    def begin(self, token: str, manifest_hash: str, *, lease_s: float) -> None: ...

    def receive(self, addresses: Sequence[str], token: str, manifest_hash: str, *, timeout_s: float) -> None:
        """Until the server holds every bucket. addresses[0] is the coordinating rank's."""
        ...

    def commit(self, token: str, version: str) -> float | None:
        """Switch to the version. Returns the seconds the server spent on checking and loading what arrived,
        where it tells."""
        ...

    def abort(self, token: str) -> None:
        """Drop what arrived; the old version stays. Harmless when no update is open."""
        ...

    def flush_cache(self) -> None: ...

    def resume(self) -> None: ...

    def checksums(self) -> dict[str, int]:
        """uint64 of the bytes of every tensor the server now generates with, by wire name."""
        ...

    def close(self) -> None:
        """Release local resources; the server itself is left alone."""
        ...
