"""The demo: real Megatron-Core trainer ranks, real rollout servers, a checked sync after every step."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError

QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MAX_LOGPROB_GAP = 1e-3
"""Both sides compute in fp32 from the same bytes, in another order; one wrong tensor gives 0.1 and more."""
MAX_LOGPROB_GAP_BF16 = 0.05
"""Stock SGLang computes in BF16, which rounds each layer's outputs."""
SILENCE_S = 300.0
"""The demo fails if nothing happens for this long."""


def run_demo(
    *,
    steps: int = 5,
    servers: int = 2,
    tp: int = 2,
    pp: int = 2,
    seed: int = 1234,
    json_out: bool = False,
    stock: bool = False,
) -> int:
    """Train, sync and check `steps` times; print a table (or JSON). Exit code: 0 if everything matched.

    stock: BF16 SGLang servers instead of embedded FP8 ones.
    """
    for name, value in {"steps": steps, "servers": servers, "tp": tp, "pp": pp}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    console = Console(stderr=json_out)
    if not console.is_terminal:
        console = Console(stderr=json_out, width=120)  # a log file has room for the whole table
    rows: list[dict[str, Any]] = []
    error = ""
    plan = ""
    with _progress(console, steps) as show:
        for kind, data in _events(steps, servers, tp, pp, seed, show, stock=stock):
            if kind == "plan":
                plan = data
            elif kind == "step":
                rows.append(data)
            elif kind == "error":
                error = data
                break
            show(kind, data)
    limit = MAX_LOGPROB_GAP_BF16 if stock else MAX_LOGPROB_GAP
    ok = not error and len(rows) == steps and all(_matches(r, servers, limit) for r in rows)
    if json_out:
        print(json.dumps({"ok": ok, "error": error, "steps": rows}, indent=1))
    else:
        if plan:
            console.print(plan, highlight=False)
        console.print(_table(rows))
        _say_verdict(console, rows, ok, error, stock=stock)
    return 0 if ok else 1


def _matches(row: dict[str, Any], servers: int, limit: float) -> bool:
    versions = row["versions"].values()
    return (
        not row["differences"]
        and row["logprob_gap"] < limit
        and len(versions) == servers
        and all(v == str(row["step"]) for v in versions)
        and not row["report"]["fenced"]
    )


def _events(
    steps: int, servers: int, tp: int, pp: int, seed: int, show: Any, *, stock: bool
) -> Iterator[tuple[str, Any]]:
    """What the trainer ranks report, until they have ended. Everything started here ends with it."""
    import torch.multiprocessing as mp

    from ..rollout import launch
    from .stock import StockServer
    from .training import TINY_QWEN3
    from .worker import DemoJob, run_rank

    quantization = None if stock else QUANTIZATION
    hf_config = TINY_QWEN3 | ({} if stock else {"quantization_config": QUANTIZATION})
    with ExitStack() as stack:
        show("start", f"starting {servers} rollout servers and {tp * pp} trainer ranks")
        running: list[Any] = [
            StockServer(hf_config) if stock else launch(hf_config, seed=seed + i, wait=False) for i in range(servers)
        ]
        for server in running:
            stack.enter_context(server)
        urls = tuple(server.wait_ready() for server in running)
        job = DemoJob(urls, TINY_QWEN3, quantization, tp, pp, steps, seed, _free_port(), 200_000)
        context = mp.get_context("spawn")
        events: Any = context.Queue()
        ranks = [context.Process(target=run_rank, args=(r, job, events), daemon=True) for r in range(tp * pp)]
        for process in ranks:
            process.start()
        stack.callback(_kill, ranks)
        yield from _until_ended(ranks, events)


def _kill(ranks: list[Any]) -> None:
    for process in ranks:
        process.kill()


def _until_ended(ranks: list[Any], events: Any) -> Iterator[tuple[str, Any]]:
    silent_s = 0.0
    while True:
        try:
            yield events.get(timeout=1.0)
            silent_s = 0.0
        except queue.Empty:
            silent_s += 1.0
            if all(not p.is_alive() for p in ranks):
                break
            if silent_s > SILENCE_S:
                yield ("error", f"nothing happened for {SILENCE_S:g} s")
    for rank, process in enumerate(ranks):
        if process.exitcode:
            yield ("error", f"trainer rank {rank} ended with exit code {process.exitcode}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Any]:
    """A bar over the steps; the callable it gives takes the events."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def show(kind: str, data: Any) -> None:
            if kind == "start":
                bar.update(task, description=data)
            elif kind == "plan":
                bar.update(task, description="training")
            elif kind == "train":
                bar.update(task, description=f"step {data['step']}: loss {data['loss']:.3f}, syncing")
            elif kind == "bucket":
                bar.update(task, description=f"bucket {data[0]} of {data[1]}")
            elif kind == "step":
                bar.update(task, advance=1, description=f"step {data['step']}: checked")

        yield show


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="a sync after every training step (seconds: slowest rank)")
    for name in ("step", "loss", "gather", "pack", "wire", "commit", "total", "MB", "GB/s", "versions", "verified"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("logprob gap", justify="right", no_wrap=True)
    for row in rows:
        report = row["report"]
        seconds = [f"{report['stages'][s]['max']:.4f}" for s in ("gather", "pack", "wire", "commit")]
        table.add_row(
            str(row["step"]),
            f"{row['loss']:.3f}",
            *seconds,
            f"{report['seconds']:.4f}",
            f"{report['nbytes'] / 1e6:.2f}",
            f"{report['gbytes_per_s']:.4f}",
            " ".join(row["versions"].values()),
            "[red]no[/red]" if row["differences"] else "yes",
            f"{row['logprob_gap']:.1e}",
        )
    return table


def _say_verdict(console: Console, rows: list[dict[str, Any]], ok: bool, error: str, *, stock: bool) -> None:
    if error:
        console.print(f"[bold red]failed:[/bold red] {error}", highlight=False)
    for difference in [d for row in rows for d in row["differences"]][:10]:
        console.print(f"[red]{difference}[/red]", highlight=False)
    if ok and stock:
        console.print(
            "verified: each byte on each SGLang server is the trainer's; the servers' log-probabilities are those "
            "of a Megatron forward pass with the same weights, as near as BF16 arithmetic comes.",
            highlight=False,
        )
    elif ok:
        noise = max(row["logprob_gap_unquantized"] for row in rows)
        console.print(
            "verified: each byte on each server is the reference quantization of the trainer's weights; the servers' "
            f"log-probabilities are those of a Megatron forward pass with the same weights (FP8 itself moves them by "
            f"up to {noise:.2f}).",
            highlight=False,
        )
