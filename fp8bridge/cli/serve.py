"""`fp8bridge serve`: the embedded rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .quantization import HELP, METAVAR, with_quantization


def serve(
    config: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json, or its folder: random weights.", exists=True)
    ] = None,
    model_path: Annotated[
        Path | None, typer.Option(help="Hugging Face folder: config, safetensors, tokenizer.", exists=True)
    ] = None,
    quantization: Annotated[str | None, typer.Option(metavar=METAVAR, help=HELP)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 30000,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    api_key: Annotated[str | None, typer.Option(envvar="FP8BRIDGE_API_KEY", help="Asked of every request.")] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(envvar="FP8BRIDGE_ADMIN_API_KEY", help="Asked of what changes the server.")
    ] = None,
    trainer_key: Annotated[
        Path | None, typer.Option(help="Public CURVE key of the one trainer to take weights from.", exists=True)
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option()] = "info",
) -> None:
    """Run a rollout server with SGLang's update and generate endpoints on this CPU, until Ctrl-C."""
    folder = model_path or config
    if folder is None or (model_path and config):
        raise typer.BadParameter("give --config (random weights) or --model-path (a checkpoint)")
    from ..adapters.hf_config import load_hf_config
    from ..keys import load_public_key
    from ..rollout import ServeConfig
    from ..rollout import serve as run_server

    has_tokenizer = model_path is not None and any(model_path.glob("tokenizer*"))
    settings = ServeConfig(
        hf_config=with_quantization(load_hf_config(folder), quantization),
        weights=str(model_path) if model_path else None,
        tokenizer=str(model_path) if has_tokenizer else None,
        seed=seed,
        threads=threads,
        api_key=api_key,
        admin_api_key=admin_api_key,
        trainer_key=None if trainer_key is None else load_public_key(trainer_key).decode(),
        log_level=log_level,
    )
    run_server(settings, host, port)
