"""`fp8bridge demo`: the main job on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def demo(
    steps: Annotated[int, typer.Option(help="Training steps, each followed by a sync.", min=1)] = 5,
    servers: Annotated[int, typer.Option(help="Rollout servers to start.", min=1)] = 2,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size of the trainer.", min=1)] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 1234,
    server: Annotated[
        Literal["embedded", "sglang"], typer.Option(help="Kind of the servers: ours, or stock SGLang.")
    ] = "embedded",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a small Megatron-Core model on this CPU, sync it to running servers and check every byte."""
    from ..demo.run import run_demo

    stock = server == "sglang"
    raise typer.Exit(run_demo(steps=steps, servers=servers, tp=tp, pp=pp, seed=seed, json_out=as_json, stock=stock))
