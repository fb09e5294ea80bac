"""`python -m fp8bridge.rollout`: a rollout server in this process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading

from ..errors import BridgeError
from . import ServeConfig, serve
from .config import read_hf_config


def main() -> int:
    args = _parse()
    try:
        if args.inherit is not None:
            _serve_for_parent(args.inherit)
        else:
            serve(_config(args), args.host, args.port)
    except BridgeError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fp8bridge.rollout", description=__doc__)
    parser.add_argument("--config", help="Hugging Face config.json, or the folder that holds one")
    parser.add_argument("--weights", help="folder of safetensors; without it weights are random")
    parser.add_argument("--tokenizer", help="folder or hub name; without it requests are token ids")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--api-key")
    parser.add_argument("--admin-api-key")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--inherit", type=int, metavar="FD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.config is None and args.inherit is None:
        parser.error("--config is required")
    return args


def _config(args: argparse.Namespace) -> ServeConfig:
    return ServeConfig(
        hf_config=read_hf_config(args.config),
        weights=args.weights,
        seed=args.seed,
        tokenizer=args.tokenizer,
        threads=args.threads,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        log_level=args.log_level,
    )


def _serve_for_parent(fd: int) -> None:
    """`launch` gave us a listening socket, and the configuration as the first line of stdin."""
    config = ServeConfig(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(config, listening=socket.socket(fileno=fd))


def _end_with_parent() -> None:
    # Unbuffered: a thread that waits inside sys.stdin would hold its lock against interpreter shutdown.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
