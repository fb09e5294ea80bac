"""`fp8bridge bench sync`: how long a sync takes here, what it could take, and what the usual way takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from ..bench.sync import Case, Progress

app = typer.Typer(help="Measure a sync on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `sync` a word of the command line while it is the only one."""


@app.command()
def sync(
    model: Annotated[str, typer.Option(help="A model by name (Qwen3-30B-A3B), or its config.json.")] = "Qwen3-0.6B",
    layers: Annotated[int | None, typer.Option(help="Take this many layers of it.", min=1)] = None,
    only: Annotated[str, typer.Option(help="Take the tensors whose name has this text, such as .experts.")] = "",
    transport: Annotated[str, typer.Option(help="How buckets travel, as in BridgeConfig.")] = "zmq",
    servers: Annotated[str, typer.Option(help="How many of the benchmark's own servers, or URLs: a,b.")] = "1",
    formats: Annotated[Literal["both", "fp8", "bf16"], typer.Option(help="What the servers hold.")] = "both",
    bucket_mb: Annotated[float, typer.Option(help="Largest bucket, in MiB.", min=0.001)] = 256,
    repeat: Annotated[int, typer.Option(help="Updates after the first; medians are shown.", min=1)] = 3,
    baseline: Annotated[bool, typer.Option(help="Also the usual way: a launch and a send per tensor.")] = True,
    device: Annotated[str | None, typer.Option(help="Of the parameters. Default: cuda if there is one.")] = None,
    sweep: Annotated[
        Literal["bucket", "servers", "tensors", "model"] | None, typer.Option(help="Let one thing grow.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Its values, as 1,2,4 (MiB, servers, experts, layers).")] = "",
    out: Annotated[Path | None, typer.Option(help="Write OUT.json, OUT.md and OUT.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sync synthetic weights of a model, verify them on the servers, then print what it took."""
    import torch

    from ..bench.sweeps import sweep as variants
    from ..bench.sync import FORMATS, Case
    from ..config import MIB

    base = Case(
        label=Path(model).name if "/" in model else model,
        hf_config=_config(model, layers),
        transport=transport,
        servers=int(servers) if servers.isdigit() else tuple(servers.split(",")),
        bucket_nbytes=int(bucket_mb * MIB),
        only=only,
        repeat=repeat,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        baseline=baseline,
    )
    cases = variants(sweep, base, _numbers(steps)) if sweep else [base]
    _show(_run(cases, FORMATS if formats == "both" else (formats,)), out, as_json)


def _config(model: str, layers: int | None) -> dict[str, Any]:
    from ..adapters.hf_config import load_hf_config
    from ..models import config_of

    if "/" not in model and not model.endswith(".json"):
        return config_of(model, layers=layers)
    return load_hf_config(model) | ({} if layers is None else {"num_hidden_layers": layers})


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"--steps: {text!r} is no list of numbers such as 1,2,4") from None


def _run(cases: list[Case], formats: tuple[str, ...]) -> list[dict[str, Any]]:
    from dataclasses import replace

    import torch

    from ..bench.source import SyntheticSource
    from ..bench.sync import run_case

    results = []
    with _progress() as progress:
        for case in cases:
            source = SyntheticSource(case.hf_config, device=torch.device(case.device), only=case.only)
            results += [run_case(replace(case, format=name), source, progress) for name in formats]
            del source
    return results


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on the terminal's error channel; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _show(results: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from ..bench.table import ceilings, markdown, rich_table

    if out is not None:
        from ..bench.plot import save_plot

        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(results) + "\n" + "".join(f"- {c}\n" for c in ceilings(results)))
        save_plot(results, out.with_suffix(".png"))
    if as_json:
        print(json.dumps(results, indent=1))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width of its own
    console.print(rich_table(results))
    for line in ceilings(results):
        console.print(line)
