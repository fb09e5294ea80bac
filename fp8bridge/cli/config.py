"""`fp8bridge config`: FP8 engine configs, what they set in Megatron and what they cost in memory. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from ..engine import FP8EngineConfig

config = typer.Typer(help="FP8 engine configs: presets, files, bytes per parameter.", no_args_is_help=True)
GPUS = ("hopper", "blackwell")


@config.callback()
def _group() -> None:
    """So that `show` stays a word of its own."""


@config.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="YAML file of FP8 engine fields.", show_default=False)] = None,
    preset: Annotated[str | None, typer.Option(help="A preset by name. Without it and FILE: all of them.")] = None,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks that share the optimizer's states.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a config; show its fields, where they land in Megatron, and the bytes per parameter it leads to."""
    from ..engine import PRESETS, FP8EngineConfig
    from ..errors import ConfigError

    if file is not None and preset is not None:
        raise ConfigError("give a FILE or --preset, not both (a file can start from one: `preset: NAME` in it)")
    if file is not None:
        configs = {file.name: FP8EngineConfig.from_yaml(file)}
    elif preset is not None:
        configs = {preset: FP8EngineConfig.preset(preset)}
    else:
        configs = {name: make() for name, make in PRESETS.items()}
    if as_json:
        print(json.dumps({name: _facts(each, dp) for name, each in configs.items()}, indent=1))
        return
    for name, each in configs.items():
        if len(configs) == 1:
            _print_fields(name, each)
            _print_megatron(each)
    _print_bytes(configs, dp)


def _facts(each: FP8EngineConfig, dp: int) -> dict[str, Any]:
    from ..engine.megatron import megatron_fields

    return {
        "fields": each.as_dict(),
        "megatron": megatron_fields(each),
        "bytes_per_parameter": {
            gpu: {kind: _bytes(each, dp, gpu=gpu, linear=kind == "linear") for kind in ("linear", "other")}
            for gpu in GPUS
        },
    }


def _bytes(each: FP8EngineConfig, dp: int, *, gpu: Any, linear: bool) -> dict[str, float]:
    from ..engine import bytes_per_parameter
    from ..engine.memory import total

    parts = bytes_per_parameter(each, linear=linear, dp=dp, gpu=gpu)
    return {p.what: p.nbytes for p in parts} | {"total": total(parts)}


def _print_fields(name: str, each: FP8EngineConfig) -> None:
    from ..engine import FP8EngineConfig

    defaults = FP8EngineConfig().as_dict()
    rows = [(field, value, "" if value == defaults[field] else "*") for field, value in each.as_dict().items()]
    _print_table(f"{name}  (* not the default)", ("field", "value", ""), rows)


def _print_megatron(each: FP8EngineConfig) -> None:
    from ..engine.megatron import megatron_fields

    rows = [
        (where, field, value) for where, values in megatron_fields(each).items() for field, value in values.items()
    ]
    _print_table("set in Megatron-Core", ("config", "field", "value"), rows)


def _print_bytes(configs: dict[str, FP8EngineConfig], dp: int) -> None:
    """A row for BF16 training and each config: the parts of a linear weight, then totals."""
    from ..engine import bytes_per_parameter
    from ..engine.memory import total

    rows = []
    every = {"bf16": None, **configs}
    used = {p.what for each in every.values() for p in bytes_per_parameter(each)}
    columns = {what: heading for what, heading in _PARTS.items() if what in used}
    for name, each in every.items():
        gpu = _gpu(each)
        parts = {p.what: p for p in bytes_per_parameter(each, dp=dp, gpu=gpu)}
        cells = [f"{p.nbytes:.3g} {_SHORT[p.dtype]}" if (p := parts.get(what)) else "" for what in columns]
        other = total(bytes_per_parameter(each, linear=False, dp=dp, gpu=gpu))
        rows.append((name, *cells, f"{total(list(parts.values())):.4g}", f"{other:.4g}"))
    shared = f"; optimizer states over {dp} ranks" if dp > 1 else ""
    title = f"bytes per parameter of a linear weight (1st, 2nd: Adam's moments); other: of any other{shared}"
    _print_table(title, ("", *columns.values(), "sum", "other"), rows)


def _gpu(each: FP8EngineConfig | None) -> Literal["hopper", "blackwell"]:
    return "blackwell" if each is not None and each.recipe == "mxfp8" else "hopper"


_PARTS = {
    "weight": "weight",
    "FP8 copies": "copies",
    "gradient": "grad",
    "gradient copy": "copy",
    "master": "master",
    "first moment": "1st",
    "second moment": "2nd",
}
"""Part -> heading, short enough for 80 columns."""
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "fp8": "f8", "remainder": "rest"}


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console(highlight=False).print(table)
