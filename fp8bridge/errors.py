"""Every error fp8bridge raises, in one tree.

BridgeError
├── ConfigError             an argument or a configuration field is wrong (also a ValueError)
├── PlanError               the model cannot be turned into a plan
│   ├── EmptyModelError     the source has no tensors
│   ├── CoverageError       the shards of a tensor leave a hole or overlap
│   ├── UnsupportedModelError  an architecture or parameter name without a rule
│   └── LayoutError         the server's quantization config cannot be served
├── NonFiniteError          NaN or Inf in a weight; nothing was sent
├── VersionError            the version does not grow
├── ServerError             one server, named in `.server`
│   ├── ServerUnreachableError  no connection, or it was dropped
│   ├── ServerTimeoutError      no answer in time
│   ├── ServerRefusedError      it answered with an error; its words are in `.answer`
│   └── ServerMismatchError     it serves another model, layout, name, shape or dtype
├── TransportError          a bucket did not get through (`.server`, `.bucket`)
│   ├── WireError           a message that is not of the protocol
│   └── ChecksumError       bytes changed on the way
├── CommitError             fewer servers hold the new version than asked for
├── VerifyError             a server's bytes are not the ones that were sent
└── RankError               another trainer rank failed; its words are in the message

Every error names what failed and says what to do next. `.server`, `.bucket`, `.version` and
`.tensor` are set where they apply, else None. Foreign errors (zmq, HTTP, torch.distributed) are
mapped at the edge with `raise ... from`.
"""

from __future__ import annotations

from typing import Any


class BridgeError(Exception):
    """Base of the tree. `str(error)` is complete: what failed, where, and what to do next."""

    def __init__(
        self,
        message: str,
        *,
        server: str | None = None,
        bucket: int | None = None,
        version: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.server = server
        self.bucket = bucket
        self.version = version
        self.tensor = tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain data for another trainer rank; `error_from_dict` makes the same error of it."""
        fields = ("message", "server", "bucket", "version", "tensor")
        return {"kind": type(self).__name__} | {name: getattr(self, name) for name in fields}


class ConfigError(BridgeError, ValueError):
    pass


class PlanError(BridgeError):
    pass


class EmptyModelError(PlanError):
    pass


class CoverageError(PlanError):
    pass


class UnsupportedModelError(PlanError):
    pass


class LayoutError(PlanError):
    pass


class NonFiniteError(BridgeError):
    pass


class VersionError(BridgeError):
    pass


class ServerError(BridgeError):
    pass


class ServerUnreachableError(ServerError):
    pass


class ServerTimeoutError(ServerError):
    pass


class ServerRefusedError(ServerError):
    """`status` is the HTTP status, `answer` the server's own words."""

    def __init__(self, message: str, *, status: int | None = None, answer: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.status = status
        self.answer = answer


class ServerMismatchError(ServerError):
    pass


class TransportError(BridgeError):
    pass


class WireError(TransportError):
    pass


class ChecksumError(TransportError):
    pass


class CommitError(BridgeError):
    pass


class VerifyError(BridgeError):
    pass


class RankError(BridgeError):
    pass


def _tree(cls: type[BridgeError]) -> dict[str, type[BridgeError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


def error_from_dict(data: dict[str, Any]) -> BridgeError:
    """The error another rank described with `to_dict`; an unknown kind becomes a RankError."""
    cls = _tree(BridgeError).get(data.get("kind", ""), RankError)
    where = {name: data.get(name) for name in ("server", "bucket", "version", "tensor")}
    return cls(str(data.get("message", "no message")), **where)
