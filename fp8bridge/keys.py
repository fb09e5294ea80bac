"""CURVE keys for the `zmq` transport: who encrypts the payload, and whom a server believes.

The trainer has one key pair for all its ranks (files as pyzmq's `zmq.auth` writes them). Its public half
goes to a server with the addresses of an update, or beforehand as a file: then that server takes weights
from this trainer alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.utils import z85

from .errors import ConfigError

_MARK = "#curve="
NAME = "trainer"


class KeyPair(NamedTuple):
    """Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write `trainer.key` (public) and `trainer.key_secret` (mode 600); ConfigError if one is there."""
    public, secret = folder / f"{NAME}.key", folder / f"{NAME}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} exists; servers may already know that key. Remove it, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, NAME)
        secret.chmod(0o600)
    except OSError as err:
        raise ConfigError(f"cannot write keys to {folder}: {err}") from err
    return public, secret


def load_key_pair(path: str | Path) -> KeyPair:
    """The trainer's pair, from its `.key_secret` file."""
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} has no secret key; give the file that ends in .key_secret")
    return KeyPair(public, secret)


def load_public_key(path: str | Path) -> bytes:
    """The public half, from either file."""
    return _load(path)[0]


def with_key(address: str, public: bytes) -> str:
    """The address that servers are told, with the key that answers there."""
    return f"{address}{_MARK}{z85.decode(public).hex()}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """(address for zmq, public key in Z85 or None); ConfigError if the key is none."""
    plain, mark, text = address.partition(_MARK)
    if not mark:
        return address, None
    try:
        raw = bytes.fromhex(text)
        if len(raw) != 32:
            raise ValueError(f"{len(raw)} bytes")
    except ValueError as err:
        raise ConfigError(f"{plain} comes with a CURVE key that is none ({err})") from err
    return plain, z85.encode(raw)


def _load(path: str | Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read a CURVE key from {path}: {err}; `fp8bridge keys FOLDER` makes a pair") from err
    if public is None:
        raise ConfigError(f"{path} has no public key")
    return public, secret
