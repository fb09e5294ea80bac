"""`fp8bridge keys`: a CURVE key pair, so that weights travel encrypted and servers know their trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write trainer.key and trainer.key_secret.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the trainer's key pair for encrypted transfer over zmq."""
    from ..keys import make_keys

    public, secret = make_keys(folder)
    if as_json:
        print(json.dumps({"public": str(public), "secret": str(secret)}))
        return
    print(f"{secret}: for every trainer rank: BridgeConfig(curve_key_file={str(secret)!r})")
    print(f"{public}: for servers, to take weights from this trainer alone: fp8bridge serve --trainer-key {public}")
