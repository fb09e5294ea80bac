"""`fp8bridge plan`: what an update of a model would do, from its config alone. No torch, no GPU, no trainer."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .quantization import BLOCK_FP8, HELP, METAVAR, with_quantization

if TYPE_CHECKING:
    from ..config import BridgeConfig
    from ..plan import Plan
    from ..predict import Links
    from ..topology import ServerShape, TrainerShape
    from ..types import Shard, TensorMeta

LARGEST = 8
"""Rows of the table of buckets."""


def plan(
    config: Annotated[Path | None, typer.Option(help="Hugging Face config.json, or its folder.", exists=True)] = None,
    model: Annotated[str | None, typer.Option(help="Instead: a model by name, such as Kimi-K2.")] = None,
    trainer: Annotated[str | None, typer.Option(help="All sizes in a word: tp8pp4ep8, with etp, vpp, dp.")] = None,
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
    servers: Annotated[str, typer.Option(help="Rollout servers: 16, or 16xtp8 with their GPUs.")] = "1",
    wire_gbytes_per_s: Annotated[float, typer.Option(help="Speed of one sender's wire.", min=0.001)] = 10.0,
    links: Annotated[
        str, typer.Option(help="Speeds in GB/s for the prediction: wire=50,ingest=100,fabric=800,broadcast=1.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print bytes, buckets, actions and predicted seconds of an update, without moving a byte."""
    from ..config import MIB, BridgeConfig
    from ..topology import ServerShape, TrainerShape

    if trainer is None:
        shape = TrainerShape(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=tp if etp is None else etp)
    else:
        shape = TrainerShape.parse(trainer)
    settings = BridgeConfig(rule=rule, bucket_nbytes=int(bucket_mb * MIB), senders=senders, allow_cast=allow_cast)
    # Millions of small objects and no cycle among them: the collector would take a third of the time.
    gc.disable()
    hf_config = _hf_config(config, model)
    chunks = shape.chunks(int(hf_config.get("num_hidden_layers") or 0)) if trainer else None
    made = _plan(hf_config, shape, settings, quantization, layers, chunks, dtype=dtype, mtp=mtp)
    target = ServerShape.parse(servers)
    bare = made.layout.block is None and quantization is None and model is None
    _show(made, shape, target, _links(links, wire_gbytes_per_s), as_json=as_json, bare=bare)


def _hf_config(config: Path | None, model: str | None) -> dict[str, Any]:
    """The config of `--config`, or that of `--model` with block-FP8 servers, as such models are served."""
    from ..adapters.hf_config import load_hf_config
    from ..models import config_of

    if (config is None) == (model is None):
        raise typer.BadParameter("give either --config or --model")
    if config is not None:
        return load_hf_config(config)
    assert model is not None, "one of the two was given"
    return config_of(model) | {"quantization_config": BLOCK_FP8}


def _plan(
    hf_config: dict[str, Any],
    shape: TrainerShape,
    settings: BridgeConfig,
    quantization: str | None,
    layers: str | None,
    chunks: list[int] | None,
    *,
    dtype: str,
    mtp: bool,
) -> Plan:
    from ..adapters.megatron_layout import megatron_shards
    from ..layout import ServerLayout
    from ..planner import make_plan

    layout = ServerLayout.from_hf_config(with_quantization(hf_config, quantization))
    sizes = {name: getattr(shape, name) for name in ("tp", "pp", "vpp", "dp", "ep", "etp")}
    split = _numbers(layers) if layers else chunks
    metas, shards = megatron_shards(hf_config, **sizes, layers=split, dtype=dtype, mtp=mtp)
    return make_plan(_by_rank(metas, shards, ranks=shape.ranks), layout, settings)


def _links(text: str, wire_gbytes_per_s: float) -> Links:
    from ..predict import Links

    return Links.parse(text if "wire=" in text else f"wire={wire_gbytes_per_s}," + text)


def _show(made: Plan, shape: TrainerShape, target: ServerShape, links: Links, *, as_json: bool, bare: bool) -> None:
    from ..predict import predict

    said = predict(made, links, servers=target.count)
    if as_json:
        more = {
            "trainer_ranks": shape.ranks,
            "servers": target.count,
            "server_gpus": target.gpus,
            "links": asdict(links),
            "prediction": asdict(said),
            "predicted_seconds": said.seconds,
        }
        print(json.dumps(made.summary() | more, indent=1))
        return
    print(made.preview(wire_gbytes_per_s=links.wire, servers=target.count))
    print(f"  {shape.ranks} trainer ranks -> {target.count} servers on {target.gpus} GPUs; bytes over links, in GB:")
    print("    " + ", ".join(f"{name.replace('_', ' ')} {n / 1e9:.2f}" for name, n in said.link_nbytes.items()))
    print(
        f"  predicted update: {said.seconds:.3f} s (check {said.check_s:.3f}; overlapping: trainer "
        f"{said.trainer_s:.3f}, wire {said.wire_s:.3f}, server {said.server_s:.3f}; {said.bottleneck} decides)"
    )
    if bare:
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
