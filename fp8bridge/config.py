"""How a bridge behaves: one small frozen dataclass, validated when made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields
from typing import Literal

from .errors import ConfigError

RULES = ("sglang", "te", "te_pow2", "ue8m0")
"""Rounding rules; the arithmetic of each is in `fp8bridge.kernels.reference`."""

BLOCKS = ((128, 128), (1, 128))
"""Scale blocks (rows, columns) that the kernels make."""

POWER_OF_TWO_RULES = ("te_pow2", "ue8m0")
TRANSPORTS = ("zmq", "nccl", "ipc", "loopback")
PAUSE_MODES = ("retract", "abort", "in_place")

MIB = 1 << 20
MAX_STREAMS = 16
"""Connections of one server to one sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """Every field has a default that is right for a first run on one host."""

    transport: Literal["zmq", "nccl", "ipc", "loopback"] = "zmq"
    """How buckets travel. `nccl`: one broadcast per bucket into stock SGLang. `ipc`: from
    the trainer's GPU memory into SGLang on the same GPU."""

    group_backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of the groups of transport `nccl`; `gloo` is for servers on a CPU."""

    rule: Literal["sglang", "te", "te_pow2", "ue8m0"] | None = None
    """Rounding rule. None: `sglang` for fp32 scales, `ue8m0` where the server wants powers of two;
    the plan and the report name the rule that was used."""

    bucket_nbytes: int = 256 * MIB
    """Upper bound of one bucket. Two are kept on each sending rank. A tensor that is larger gets a
    bucket of its own, and the plan says so."""

    senders: Literal["all", "first"] = "all"
    """`all`: each trainer rank sends a share of the bytes. `first`: rank 0 sends everything."""

    streams: int = 2
    """Connections over which a server is fed, of all sending ranks together, at least (zmq): one does not fill
    a fast network. 1 to 16."""

    allow_cast: bool = False
    """Permit unquantized tensors to change dtype on the way (an fp32 norm into a bf16 server). The
    plan and each report list them. Off: such a tensor is a PlanError."""

    min_healthy: int = 1
    """An update fails, and no server keeps the new version, if fewer servers than this have
    received all of it."""

    keep_last: int = 0
    """Committed versions kept as packed buckets in host memory, for `Bridge.rollback` and for servers that
    come back. Each costs the bytes of one sync, spread over the sending ranks, and one more while an update
    runs."""

    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    """What servers do with running requests (SGLang's words)."""

    host: str = "127.0.0.1"
    """Address of this trainer host that the servers can reach (zmq)."""

    curve_key_file: str | None = None
    """The trainer's `.key_secret` (`fp8bridge keys`), the same on every rank: encrypts the payload (zmq)."""

    allow_plaintext: bool = False
    """Permit unencrypted payload on an address that is not loopback."""

    api_key: str | None = field(default=None, repr=False)
    """Sent to servers as `Authorization: Bearer`."""

    admin_api_key: str | None = field(default=None, repr=False)
    """Sent instead with everything that changes a server, where it asks for an admin key."""

    request_timeout_s: float = 60.0
    """Longest wait for one control request (pause, begin, commit, ...)."""

    open_timeout_s: float = 30.0
    """Longest wait for a server to connect to the senders of an update."""

    bucket_timeout_s: float = 60.0
    """Longest wait for a server's acknowledgement of one bucket."""

    update_timeout_s: float | None = None
    """Longest time for all buckets of an update; None: only the limits of its parts."""

    collective_timeout_s: float = 600.0
    """Longest wait of one trainer rank for another."""

    report_path: str | None = None
    """A file to which rank 0 appends a JSON line for each update."""

    trace_path: str | None = None
    """A file for a Chrome trace of the updates (Perfetto opens it): every stage on every rank. Rank 0 writes it."""

    metrics_port: int | None = None
    """Port of `host` on which rank 0 serves Prometheus metrics (the `metrics` extra). 0 takes any free one."""

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("group_backend", self.group_backend, ("nccl", "gloo"))
        _one_of("senders", self.senders, ("all", "first"))
        _one_of("pause_mode", self.pause_mode, PAUSE_MODES)
        if self.rule is not None:
            _one_of("rule", self.rule, RULES)
        _positive_int("bucket_nbytes", self.bucket_nbytes)
        _positive_int("min_healthy", self.min_healthy)
        _positive_int("streams", self.streams)
        if self.streams > MAX_STREAMS:
            raise ConfigError(f"streams must be 1 to {MAX_STREAMS}, got {self.streams}")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise ConfigError(f"keep_last must be 0 or a positive integer, got {self.keep_last!r}")
        if self.metrics_port is not None and (
            type(self.metrics_port) is not int or not 0 <= self.metrics_port < 65536
        ):
            raise ConfigError(f"metrics_port must be a port number, 0 to 65535, got {self.metrics_port!r}")
        for each in fields(self):
            if each.name.endswith("timeout_s"):
                value = getattr(self, each.name)
                if value is None and each.name == "update_timeout_s":
                    continue
                if not isinstance(value, int | float) or not value > 0:
                    raise ConfigError(f"{each.name} must be a positive number of seconds, got {value!r}")
        encrypted = self.curve_key_file is not None
        if self.transport == "zmq" and not (encrypted or self.allow_plaintext or is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host!r} is not loopback and the payload would travel unencrypted; set curve_key_file "
                "(`fp8bridge keys` makes one), or allow_plaintext=True on a network you trust"
            )
        if encrypted and self.transport != "zmq":
            raise ConfigError(f"curve_key_file is for transport 'zmq'; {self.transport!r} would ignore it")


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and `localhost`; other names are not resolved and count as remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
