"""`fp8bridge plan`: what an update of a model would do, from its config alone. No torch, no GPU, no trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .quantization import HELP, METAVAR, with_quantization

if TYPE_CHECKING:
    from ..plan import Plan
    from ..types import Shard, TensorMeta

LARGEST = 8
"""Rows of the table of buckets."""


def plan(
    config: Annotated[Path, typer.Option(help="Hugging Face config.json, or its folder.", exists=True)],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size of the trainer.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.", min=1)] = 1,
    vpp: Annotated[int, typer.Option(help="Virtual pipeline stages on each rank.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Ranks that share dense weights (data x context parallel).", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size; ep x etp divides tp x dp.", min=1)] = 1,
    etp: Annotated[int | None, typer.Option(help="Expert tensor-parallel size. Default: tp.", min=1)] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers of each pipeline chunk, as 12,16,16,12. Default: evenly many.")
    ] = None,
    mtp: Annotated[bool, typer.Option(help="The trainer has the multi-token prediction layers.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the trainer's weights.")] = "bfloat16",
    quantization: Annotated[str | None, typer.Option(metavar=METAVAR, help=HELP)] = None,
    rule: Annotated[
        Literal["sglang", "te", "te_pow2", "ue8m0"] | None, typer.Option(help="Rounding rule. Default: the layout's.")
    ] = None,
    bucket_mb: Annotated[float, typer.Option(help="Largest bucket, in MiB.", min=0.001)] = 256,
    senders: Annotated[Literal["all", "first"], typer.Option(help="Trainer ranks that send.")] = "all",
    allow_cast: Annotated[bool, typer.Option(help="Permit unquantized tensors to change dtype.")] = False,
    servers: Annotated[int, typer.Option(help="Number of rollout servers.", min=1)] = 1,
    wire_gbytes_per_s: Annotated[float, typer.Option(help="Speed of one sender's wire.", min=0.001)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print bytes, buckets, actions and predicted seconds of an update, without moving a byte."""
    from ..adapters.hf_config import load_hf_config
    from ..adapters.megatron_layout import megatron_shards
    from ..config import MIB, BridgeConfig
    from ..layout import ServerLayout
    from ..planner import make_plan

    hf_config = load_hf_config(config)
    layout = ServerLayout.from_hf_config(with_quantization(hf_config, quantization))
    split = _numbers(layers) if layers else None
    metas, shards = megatron_shards(
        hf_config, tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, layers=split, dtype=dtype, mtp=mtp
    )
    made = make_plan(
        _by_rank(metas, shards, ranks=tp * pp * dp),
        layout,
        BridgeConfig(rule=rule, bucket_nbytes=int(bucket_mb * MIB), senders=senders, allow_cast=allow_cast),
    )
    if as_json:
        seconds = made.predicted_seconds(wire_gbytes_per_s=wire_gbytes_per_s, servers=servers)
        print(json.dumps(made.summary() | {"servers": servers, "predicted_seconds": seconds}, indent=1))
        return
    print(made.preview(wire_gbytes_per_s=wire_gbytes_per_s, servers=servers))
    if layout.block is None and quantization is None:
        print("  note: the config has no quantization_config; --quantization fp8 plans for block-FP8 servers")
    _print_largest(made)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 12,16,16,12") from None


def _by_rank(
    metas: list[TensorMeta], shards: list[Shard], *, ranks: int
) -> list[tuple[list[TensorMeta], list[Shard]]]:
    """As the ranks would describe it, but that rank 0 names all tensors."""
    described: list[tuple[list[TensorMeta], list[Shard]]] = [(metas if r == 0 else [], []) for r in range(ranks)]
    for shard in shards:
        described[shard.rank][1].append(shard)
    return described


def _print_largest(made: Plan) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    buckets = sorted(made.manifest.buckets, key=lambda b: -b.nbytes)
    shown = f"the {LARGEST} largest of {len(buckets)} buckets" if len(buckets) > LARGEST else "buckets"
    table = Table(title=shown, title_justify="left", box=SIMPLE_HEAD)
    for name in ("bucket", "sender", "MB", "tensors"):
        table.add_column(name, justify="right")
    table.add_column("largest tensor", overflow="fold")
    for bucket in buckets[:LARGEST]:
        largest = max(bucket.entries, key=lambda e: e.nbytes)
        table.add_row(
            str(bucket.index),
            f"rank {bucket.owner}",
            f"{bucket.nbytes / 1e6:,.2f}",
            str(len(bucket.entries)),
            largest.name,
        )
    Console(highlight=False).print(table)
