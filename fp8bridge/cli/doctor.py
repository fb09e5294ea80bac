"""`fp8bridge doctor`: what is installed, what works here, what is missing and what to do; and is a server usable."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

PACKAGES = (
    *("fp8bridge", "torch", "triton", "numpy", "pyzmq", "msgpack", "httpx"),
    *("megatron-core", "transformer-engine", "sglang", "transformers", "starlette", "uvicorn"),
    *("safetensors", "pyyaml"),
)
SERVE = ("starlette", "uvicorn", "transformers")
ENGINE = ("safetensors", "pyyaml")
INSTALL_MEGATRON = (
    "pip install 'fp8bridge[megatron]' && pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
)
IDENTITY_GAP = 1e-3
"""Largest move of a logprob that an update with the same weights may cause."""
FP8_CAPABILITY = (8, 9)
"""CUDA compute capability from which Triton converts to float8_e4m3fn."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a user can do with fp8bridge, and if it can be done here. `fix` is empty if so."""

    name: str
    works: bool
    fix: str


@dataclass(frozen=True, slots=True)
class InstalledFramework:
    """A training framework that is installed here. `note` is empty if the adapter was tested with its version."""

    name: str
    version: str
    adapter: str
    note: str


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """A rollout server's answer. `usable`: an update could be sent to it now."""

    url: str
    usable: bool
    error: str = ""
    engine: str | None = None
    layout: str | None = None
    weight_version: str | None = None
    paused: bool | None = None
    session: str | None = None
    repaired: list[str] = field(default_factory=list)


def doctor(
    server: Annotated[
        list[str] | None, typer.Option("--server", "--servers", help="Also ask this rollout server; can be repeated.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            help="Drop update sessions that were left open and resume paused servers. Only when no trainer runs."
        ),
    ] = False,
    identity: Annotated[
        Path | None,
        typer.Option(help="The servers' checkpoint: send it to them and see that they compute the same.", exists=True),
    ] = None,
    transport: Annotated[
        Literal["zmq", "nccl", "ipc"], typer.Option(help="Of the identity update (stock SGLang: nccl, or our loader).")
    ] = "zmq",
    api_key: Annotated[str | None, typer.Option(envvar="FP8BRIDGE_API_KEY", help="For the servers.")] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(envvar="FP8BRIDGE_ADMIN_API_KEY", help="If changing a server needs another.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for a server's answer.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, what works here and what to do about the rest. Exit code 1 if a --server is not usable."""
    found = versions()
    gpu = device()
    offered = features(found, gpu)
    keys = {"api_key": api_key, "admin_api_key": admin_api_key}
    trainers = installed_frameworks()
    servers = [check_server(url, timeout_s=timeout_s, repair=repair, **keys) for url in server or ()]
    identities = _identities(server or (), identity, transport, keys)
    if as_json:
        facts = {
            "identity": identities,
            "python": platform.python_version(),
            "packages": found,
            "device": gpu,
            "features": [asdict(feature) for feature in offered],
            "frameworks": [asdict(framework) for framework in trainers],
            "servers": [asdict(check) for check in servers],
        }
        print(json.dumps(facts, indent=1))
    else:
        _print(found, gpu, offered, trainers, servers)
        for same in identities:
            read = f"{same['checked']} tensors read back" if same["checked"] else "its bytes cannot be read back"
            print(f"{same['url']}: identity update moves logprobs by {same['gap']:.3g} ({read})")
    if any(same["gap"] > IDENTITY_GAP for same in identities) or not all(check.usable for check in servers):
        raise typer.Exit(1)


def _identities(
    urls: Iterable[str], checkpoint: Path | None, transport: str, keys: dict[str, str | None]
) -> list[dict[str, Any]]:
    if checkpoint is None:
        return []
    from .identity import identity_update

    options = {"transport": transport, "pause_mode": "abort", **keys}
    return [asdict(identity_update(url, checkpoint, **options)) for url in urls]


def versions() -> dict[str, str | None]:
    """Installed versions by distribution name; read from metadata, since an import can take seconds or fail."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device() -> dict[str, Any]:
    """CUDA and NCCL that torch was built with, and the GPUs it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": f"torch cannot be imported: {error}", "cuda": None, "nccl": None, "gpus": []}
    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            gpus.append(
                {
                    "name": properties.name,
                    "capability": [properties.major, properties.minor],
                    "nbytes": properties.total_memory,
                }
            )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
    return {"error": None, "cuda": torch.version.cuda, "nccl": nccl, "gpus": gpus}


def features(found: dict[str, str | None], gpu: dict[str, Any]) -> list[Feature]:
    """What works with these versions on this device."""
    torch_fix = "" if not gpu["error"] else f"{gpu['error']}; reinstall torch"
    megatron_fix = torch_fix or _megatron_fix(found)
    serve_fix = torch_fix or _missing(found, SERVE, "pip install 'fp8bridge[serve]'")
    wire_fix = torch_fix or _missing(found, ("pyzmq", "msgpack", "httpx"), "reinstall fp8bridge")
    fixes = {
        "plan an update (fp8bridge plan)": "",
        "send over zmq": wire_fix,
        "quantize on the CPU": torch_fix,
        "quantize on the GPU": torch_fix or _gpu_fix(found, gpu),
        "read a Megatron-Core trainer": megatron_fix,
        "convert checkpoints (fp8bridge convert)": torch_fix
        or _missing(found, ENGINE, "pip install 'fp8bridge[engine]'"),
        "run a rollout server (fp8bridge serve)": serve_fix,
        "see all of it work (fp8bridge demo)": "; ".join(dict.fromkeys(filter(None, (megatron_fix, serve_fix)))),
    }
    return [Feature(name, not fix, fix) for name, fix in fixes.items()]


def installed_frameworks() -> list[InstalledFramework]:
    """Those of the frameworks with an adapter that are installed here."""
    from ..adapters.frameworks import FRAMEWORKS, installed, untested

    versions = [(entry, installed(entry)) for entry in FRAMEWORKS]
    return [
        InstalledFramework(entry.name, version, entry.adapter, untested(entry, version))
        for entry, version in versions
        if version is not None
    ]


def check_server(url: str, *, timeout_s: float, repair: bool = False, **keys: str | None) -> ServerCheck:
    """Ask one server what it holds and if it would take weights; first repair it, if asked to."""
    from ..config import BridgeConfig
    from ..errors import BridgeError
    from ..rollout_server import open_server

    try:
        server = open_server(url, timeout_s=timeout_s, config=BridgeConfig(transport="nccl"), **keys)
    except BridgeError as error:
        return ServerCheck(url, usable=False, error=str(error))
    repaired: list[str] = []
    try:
        if repair:
            repaired = server.repair()
        info = server.info()
    except BridgeError as error:
        return ServerCheck(url, usable=False, error=str(error), paused=_paused(url, timeout_s))
    finally:
        server.close()
    return ServerCheck(
        url,
        usable=True,
        engine=info.engine,
        layout=info.layout.describe() if info.layout else None,
        weight_version=info.weight_version,
        paused=_paused(url, timeout_s),
        session=info.session,
        repaired=repaired,
    )


def _paused(url: str, timeout_s: float) -> bool | None:
    """/ready is open to everyone and answers 503 while generation is paused; None: it does not tell."""
    import httpx

    try:
        status = httpx.get(f"{url.rstrip('/')}/ready", timeout=timeout_s, trust_env=False).status_code
    except httpx.HTTPError:
        return None
    return {200: False, 503: True}.get(status)


def _missing(found: dict[str, str | None], names: tuple[str, ...], fix: str) -> str:
    missing = [name for name in names if found[name] is None]
    return f"{', '.join(missing)} not installed: {fix}" if missing else ""


def _megatron_fix(found: dict[str, str | None]) -> str:
    missing = _missing(found, ("megatron-core", "triton"), INSTALL_MEGATRON)
    if missing or found["transformer-engine"] is None:
        return missing
    try:
        importlib.metadata.version("transformer-engine-torch")
    except importlib.metadata.PackageNotFoundError:
        # Its import then raises RuntimeError, where Megatron-Core expects ImportError.
        return (
            "transformer-engine is an empty package without its parts, which breaks the import of megatron-core: "
            "pip install 'fp8bridge[te]', or pip uninstall transformer-engine"
        )
    return ""


def _gpu_fix(found: dict[str, str | None], gpu: dict[str, Any]) -> str:
    if gpu["cuda"] is None:
        return "this torch is built for the CPU: install a CUDA build of torch on a machine with a GPU"
    if not gpu["gpus"]:
        return "torch sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    weak = [g["name"] for g in gpu["gpus"] if tuple(g["capability"]) < FP8_CAPABILITY]
    if weak:
        return f"{', '.join(weak)}: no FP8 before compute capability {'.'.join(map(str, FP8_CAPABILITY))}; use the CPU"
    return _missing(found, ("triton",), "pip install triton")


def _print(
    found: dict[str, str | None],
    gpu: dict[str, Any],
    offered: list[Feature],
    trainers: list[InstalledFramework],
    servers: list[ServerCheck],
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    rows: dict[str, str | None] = {"python": platform.python_version(), **found}
    rows["CUDA of torch"], rows["NCCL"] = gpu["cuda"], gpu["nccl"]
    rows["GPU"] = ", ".join(g["name"] for g in gpu["gpus"]) or None
    table = Table("found", "version", box=SIMPLE_HEAD)
    for name, version in rows.items():
        table.add_row(name, version or "[dim]none[/dim]")
    console.print(table)

    table = Table(box=SIMPLE_HEAD)
    table.add_column("feature", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("what to do")
    for feature in offered:
        table.add_row(
            feature.name, "[green]works[/green]" if feature.works else "[yellow]no[/yellow]", escape(feature.fix)
        )
    console.print(table)

    if trainers:
        table = Table("framework", "version", "adapter", "note", box=SIMPLE_HEAD)
        for framework in trainers:
            table.add_row(framework.name, framework.version, framework.adapter, escape(framework.note))
        console.print(table)

    for check in servers:
        mark = "[green]usable[/green]" if check.usable else "[red]not usable[/red]"
        told = {"engine": check.engine, "layout": check.layout, "weight version": check.weight_version}
        state = {True: "paused", False: "generating", None: "does not tell whether it is paused"}[check.paused]
        open_session = [f"an update session is {check.session}"] if check.session else []
        facts = check.error or ", ".join(
            [*(f"{k} {v}" for k, v in told.items()), state, *open_session, *check.repaired]
        )
        console.print(f"{escape(check.url)}: {mark}: {escape(facts)}", soft_wrap=True)
