"""`fp8bridge convert`: a checkpoint folder to FP8 or back, without a trainer or a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="Model folder: config.json and safetensors.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    to: Annotated[Literal["fp8", "bf16"], typer.Option(help="128x128-block FP8, or BF16.", show_default=False)],
    rule: Annotated[
        Literal["sglang", "te", "te_pow2", "ue8m0"] | None,
        typer.Option(help="Rounding rule for fp8. Default: sglang."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET, once all is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write SOURCE's linear weights in FP8 with block scales, or in BF16 again; all else stays as it is."""
    from ..engine.checkpoint import convert_checkpoint
    from ..errors import ConfigError

    if to == "bf16" and rule is not None:
        raise ConfigError("--rule says how to quantize; it has no meaning with --to bf16: leave it out")
    shown = not as_json and sys.stderr.isatty()
    done = convert_checkpoint(source, target, to, rule=rule or "sglang", overwrite=overwrite, progress=shown)
    if as_json:
        counts = {"changed": len(done.changed), "copied": len(done.copied)}
        sizes = {"nbytes_before": done.nbytes_before, "nbytes_after": done.nbytes_after}
        print(json.dumps({"folder": str(done.folder), "to": to, "rule": done.rule, **counts, **sizes}, indent=1))
        return
    by = f" by rule {done.rule}" if done.rule else ""
    print(f"{done.folder}: {len(done.changed)} weights to {to}{by}, {len(done.copied)} tensors as they were")
    print(f"  {done.nbytes_before / 1e9:,.3f} GB -> {done.nbytes_after / 1e9:,.3f} GB")
