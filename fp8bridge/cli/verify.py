"""`fp8bridge verify`: proof that servers hold the same weights, or those of a checkpoint, and compute alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    import torch

    from ..layout import ServerLayout
    from ..servers import HttpServer
    from ..sglang.server import SglangServer
    from ..vllm.server import VllmServer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
"""Token ids that every vocabulary has."""

NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds and computes. problems: empty if it is as it should be."""

    url: str
    version: str | None
    tensors: int
    logprobs: list[float]
    problems: list[str] = field(default_factory=list)


def verify(
    server: Annotated[list[str], typer.Option("--server", "--servers", help="A rollout server; can be repeated.")],
    version: Annotated[str | None, typer.Option(help="The weight version that every server must claim.")] = None,
    model_path: Annotated[
        Path | None, typer.Option(help="Checkpoint (safetensors) whose bytes they must hold.", exists=True)
    ] = None,
    rule: Annotated[
        Literal["sglang", "te", "te_pow2", "ue8m0"] | None,
        typer.Option(help="Rounding rule for a BF16 checkpoint. Default: the layout's."),
    ] = None,
    replicas: Annotated[
        bool,
        typer.Option(help="SGLang without our loader: its own hashes, compared between the servers alone."),
    ] = False,
    logprob_tolerance: Annotated[float, typer.Option(help="Between servers, on a fixed prompt.", min=0.0)] = 1e-3,
    api_key: Annotated[str | None, typer.Option(envvar="FP8BRIDGE_API_KEY", help="For the servers.")] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(envvar="FP8BRIDGE_ADMIN_API_KEY", help="If changing a server needs another.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for a server's answer.", min=0.1)] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the bytes of every tensor, the version and the logprobs of a prompt. Exit code 1 if any differ."""
    from ..config import BridgeConfig
    from ..rollout_server import open_server

    if replicas and (model_path is not None or len(server) < 2):
        raise typer.BadParameter("--replicas compares at least two servers with each other, and with no checkpoint")
    stock = BridgeConfig(transport="nccl")
    keys = {"api_key": api_key, "admin_api_key": admin_api_key}
    servers = [open_server(url, timeout_s=timeout_s, config=stock, **keys) for url in server]
    try:
        sums = {s.name: replica_checksums(s) if replicas else dict[str, int | str](s.checksums()) for s in servers}
        expected, against = sums[servers[0].name], servers[0].name
        if model_path is not None:
            expected = dict(checkpoint_checksums(model_path, _layout(servers[0]), rule))
            against = str(model_path)
        first: list[float] = []
        found = []
        for each in servers:
            held = _held(each, sums[each.name], expected, against, version)
            first = first or held.logprobs
            _compare(held, first, servers[0].name, logprob_tolerance)
            found.append(held)
    finally:
        for each in servers:
            each.close()
    print(json.dumps([asdict(h) for h in found], indent=1)) if as_json else _print(found, against)
    if any(held.problems for held in found):
        raise typer.Exit(1)


def replica_checksums(server: HttpServer | SglangServer | VllmServer) -> Mapping[str, int | str]:
    """What a server says by itself about its parameters."""
    asked = getattr(server, "replica_checksums", server.checksums)
    found: Mapping[str, int | str] = asked()
    return found


def _compare(held: Held, logprobs: list[float], whose: str, tolerance: float) -> None:
    far = max(abs(a - b) for a, b in zip(held.logprobs, logprobs, strict=True))
    if not far <= tolerance:
        held.problems.append(f"logprobs differ from {whose}'s by up to {far:.3g}")


def _held(
    server: HttpServer | SglangServer | VllmServer,
    sums: Mapping[str, int | str],
    expected: Mapping[str, int | str],
    against: str,
    version: str | None,
) -> Held:
    claimed = server.info().weight_version
    held = Held(server.name, claimed, len(sums), server.logprobs(PROMPT, NEW_TOKENS))
    wrong = [n for n in sorted(sums.keys() | expected.keys()) if sums.get(n) != expected.get(n)]
    if wrong:
        more = " ..." if len(wrong) > 3 else ""
        held.problems.append(
            f"{len(wrong)} of {len(expected)} tensors are not those of {against}: {', '.join(wrong[:3])}{more}"
        )
    if version is not None and claimed != version:
        held.problems.append(f"it claims version {claimed}, not {version}")
    return held


def _layout(server: HttpServer | SglangServer | VllmServer) -> ServerLayout:
    from ..errors import ServerMismatchError

    layout = server.info().layout
    if layout is None:
        raise ServerMismatchError(f"{server.name} does not tell its layout", server=server.name)
    return layout


def checkpoint_checksums(folder: Path, layout: ServerLayout, rule: str | None) -> dict[str, int]:
    """uint64 by wire name of what a server of this layout holds after loading the checkpoint, a tensor at a time."""
    from ..kernels import quantize
    from ..layout import SCALE_SUFFIX
    from ..staging import tensor_checksum
    from ..types import TensorMeta

    rule = rule or ("ue8m0" if layout.scale_format == "ue8m0" else "sglang")
    sums: dict[str, int] = {}
    for name, tensor in tensors_of(folder):
        meta = TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if name.endswith(SCALE_SUFFIX) or meta.dtype == "float8_e4m3fn":
            sums[name] = tensor_checksum(tensor)
            continue
        decision = layout.decide(meta)
        if decision.action == "quantize" and layout.block is not None:
            codes, scale_inv = quantize(tensor, rule, layout.block)
            sums |= {name: tensor_checksum(codes), name + SCALE_SUFFIX: tensor_checksum(scale_inv)}
        else:
            cast = decision.action == "cast"
            sums[name] = tensor_checksum(tensor.to(_dtype(layout.dtype)) if cast else tensor)
    return sums


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a checkpoint, one at a time."""
    from ..engine.weight_files import WeightFiles

    files = WeightFiles(folder)
    for name, stored in files.tensors.items():
        yield name, files.read(name).reshape(stored.shape)


def _print(found: list[Held], against: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"compared with {escape(against)}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("server", overflow="fold")
    table.add_column("version")
    table.add_column("tensors", justify="right")
    table.add_column("first logprob", justify="right")
    table.add_column("", overflow="fold")
    for held in found:
        mark = "[red]" + escape("; ".join(held.problems)) + "[/red]" if held.problems else "[green]same[/green]"
        table.add_row(escape(held.url), str(held.version), str(held.tensors), f"{held.logprobs[0]:.6f}", mark)
    Console(highlight=False).print(table)
