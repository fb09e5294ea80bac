"""Many updates in a row while servers are killed and started again: python benchmarks/soak.py --updates 500 --out DIR

A trainer in this process, real servers in theirs, real SIGKILLs: in a bucket, at begin, or between two updates. A
server that is killed must be the only one fenced; it is started again at its address, admitted, and caught up. After
each update every server must generate with the version it claims, and now and then hold the trainer's bytes. What
the trainer and the server that is spared hold (memory, files, sockets, threads) is sampled all along; a straight line
through it must be level. Writes DIR/soak.json and DIR/soak.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

import fp8bridge
from fp8bridge import rollout
from fp8bridge.adapters.state_dict import StateDictSource

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "torch_dtype": "bfloat16",
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LIMITS = {"open_timeout_s": 20, "request_timeout_s": 20, "bucket_timeout_s": 10}
WARM_UP = 0.2
"""Share of the run before memory pools and caches have their size."""
LEVEL = {"rss_mib": 12.0, "files": 3.0, "sockets": 3.0, "threads": 3.0}
"""What a line through the samples may rise over the whole run."""


@dataclass
class Server:
    number: int
    running: rollout.RunningServer
    url: str
    incarnation: int = 0
    ready: bool = True
    killed_at: int | None = None


@dataclass
class Soak:
    asked: argparse.Namespace
    servers: list[Server] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    admitted: int = 0
    verified: int = 0
    generated: int = 0
    seconds: list[float] = field(default_factory=list)


def facts(pid: int | str) -> dict[str, float]:
    """What a process holds now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    links = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            continue  # closed since it was listed
    return {
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 2),
        "files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": int(status["Threads"]),
    }


def start(number: int, port: int, *, wait: bool) -> rollout.RunningServer:
    return rollout.launch(CONFIG | {"quantization_config": FP8}, seed=number, port=port, wait=wait)


def first_weights() -> dict[str, torch.Tensor]:
    from fp8bridge.rollout.model import build_model

    return {name: tensor.clone() for name, tensor in build_model(CONFIG, seed=1).weights.tensors.items()}


def plan_kill(soak: Soak, rng: random.Random, version: int) -> tuple[Server | None, str]:
    """The first server is spared: its memory is what tells of a leak."""
    alive = [s for s in soak.servers[1:] if s.ready]
    if not alive or version < 3 or rng.random() >= soak.asked.kill_share:
        return None, ""
    return rng.choice(alive), rng.choice(["in a bucket", "as the update begins", "between updates"])


def kill(soak: Soak, server: Server, version: int, when: str) -> None:
    server.running.kill()
    server.ready, server.killed_at = False, version
    soak.kills.append({"update": version, "server": server.number, "when": when})


def update(soak: Soak, bridge: fp8bridge.Bridge, rng: random.Random, version: int) -> None:
    victim, when = plan_kill(soak, rng, version)
    at = rng.randrange(1, len(bridge.plan.manifest.buckets) + 1) if when == "in a bucket" else 0
    if victim and when == "between updates":
        kill(soak, victim, version, when)

    def progress(done: int, total: int) -> None:
        if victim and victim.ready and done == at:
            kill(soak, victim, version, when)

    timer = None
    if victim and when == "as the update begins":
        timer = threading.Timer(0.002, kill, (soak, victim, version, when))
        timer.start()
    begun = time.monotonic()
    report = bridge.update_weights(version=version, on_progress=progress)
    soak.seconds.append(time.monotonic() - begun)
    if timer:
        timer.join()
    dead = {s.url for s in soak.servers if not s.ready}
    assert set(report.fenced) <= dead, f"fenced without having been killed: {report.fenced}"
    for server in soak.servers:
        if server.ready:
            assert generate(server.url) == str(version), f"{server.url} does not generate with {version}"
            soak.generated += 1


def generate(url: str) -> str:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False).json()
    return answer["meta_info"]["weight_version"]


def bring_back(soak: Soak, bridge: fp8bridge.Bridge, version: int, *, wait: bool) -> None:
    """Start what was killed, and admit what has started."""
    for server in soak.servers:
        if server.ready:
            continue
        if server.running.process.poll() is not None:
            port = int(server.url.rsplit(":", 1)[1])
            server.running.close()
            server.running = start(server.number, port, wait=False)
            server.incarnation += 1
        if wait or is_ready(server.url):
            server.running.wait_ready()
            if bridge.servers[server.url].state != "fenced":
                # Killed after its commit: the bridge has not missed it yet. The next update shows it the plan again.
                server.ready = True
                continue
            bridge.admit(server.url)
            state = bridge.servers[server.url]
            assert (state.state, state.version) == ("healthy", version), state
            server.ready = True
            soak.admitted += 1


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=0.05, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def sample(soak: Soak, version: int, begun: float) -> None:
    row: dict[str, Any] = {"update": version, "seconds": round(time.monotonic() - begun, 2)}
    row["trainer"] = facts("self")
    row["spared server"] = facts(soak.servers[0].running.process.pid)
    row["ready"] = sum(s.ready for s in soak.servers)
    soak.samples.append(row)


def rise(points: list[tuple[float, float]]) -> float:
    """What the least-squares line through them rises from the first to the last."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mx) ** 2 for x, _ in points)
    slope = sum((x - mx) * (y - my) for x, y in points) / spread if spread else 0.0
    return slope * (points[-1][0] - points[0][0])


def rises(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    warm = samples[int(len(samples) * WARM_UP) :]
    return {
        who: {what: round(rise([(r["update"], r[who][what]) for r in warm]), 3) for what in LEVEL}
        for who in ("trainer", "spared server")
    }


def run(asked: argparse.Namespace) -> Soak:
    torch.set_num_threads(1)
    soak, rng, model = Soak(asked), random.Random(asked.seed), first_weights()
    started = [start(i, 0, wait=False) for i in range(asked.servers)]
    try:
        for number, running in enumerate(started):
            soak.servers.append(Server(number, running, running.wait_ready()))
        urls = [s.url for s in soak.servers]
        settings = LIMITS | {"bucket_nbytes": asked.bucket_nbytes, "keep_last": 1}
        begun = time.monotonic()
        with fp8bridge.connect(StateDictSource(model, CONFIG), urls, **settings) as bridge:
            for version in range(1, asked.updates + 1):
                for tensor in model.values():
                    tensor.mul_(1.01 if version % 2 else 1 / 1.01)
                update(soak, bridge, rng, version)
                bring_back(soak, bridge, version, wait=version == asked.updates)
                if version % 20 == 0 or version == asked.updates:
                    soak.verified += verify(soak, bridge)
                sample(soak, version, begun)
    finally:
        for server in soak.servers:
            server.running.close()
    return soak


def verify(soak: Soak, bridge: fp8bridge.Bridge) -> int:
    """Bytes of every server that is up. One that was killed after its commit is not fenced yet: not asked."""
    up = {s.url for s in soak.servers if s.ready}
    healthy = {name for name, s in bridge.servers.items() if s.state == "healthy"}
    if healthy - up or any(s.incarnation and bridge.servers[s.url].version is None for s in soak.servers if s.ready):
        return 0
    stale = {s.url for s in soak.servers if s.ready and generate(s.url) == "default"}
    return 0 if stale else len(bridge.verify())


def figures(soak: Soak) -> dict[str, Any]:
    ordered = sorted(soak.seconds)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPU cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "updates": soak.asked.updates,
        "servers": soak.asked.servers,
        "kills": len(soak.kills),
        "admitted again": soak.admitted,
        "answers generated": soak.generated,
        "servers verified byte for byte": soak.verified,
        "update_seconds": {"median": round(ordered[len(ordered) // 2], 3), "max": round(ordered[-1], 3)},
        "rises": rises(soak.samples),
        "may_rise": LEVEL,
        "kill_list": soak.kills,
        "samples": soak.samples,
    }


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"rss_mib": "resident memory (MiB)", "files": "open files", "sockets": "sockets", "threads": "threads"}
    figure, rows = pyplot.subplots(len(names), 1, figsize=(9, 9), sharex=True)
    for axes, (what, label) in zip(rows, names.items(), strict=True):
        for who in ("trainer", "spared server"):
            axes.plot([r["update"] for r in found["samples"]], [r[who][what] for r in found["samples"]], label=who)
        for each in found["kill_list"]:
            axes.axvline(each["update"], color="0.85", linewidth=0.8, zorder=0)
        axes.set_ylabel(label, fontsize="small")
        axes.set_ylim(0, 1.15 * max(r[who][what] for r in found["samples"] for who in ("trainer", "spared server")))
    rows[0].legend(fontsize="small", loc="lower right")
    rows[0].set_title(f"{found['updates']} updates, {found['kills']} kills (grey)")
    rows[-1].set_xlabel("update")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--kill-share", type=float, default=0.1, help="of the updates")
    parser.add_argument("--bucket-nbytes", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = figures(run(asked))
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "soak.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    plot(found, asked.out / "soak.png")
    shown = {key: value for key, value in found.items() if key not in ("samples", "kill_list")}
    print(json.dumps(shown, indent=1))
    found_steep = steep(found["rises"])
    print("\n".join(found_steep) or "level")
    return 1 if found_steep else 0


def steep(found: dict[str, dict[str, float]]) -> list[str]:
    """What rises by more than it may."""
    return [
        f"{who}: {what} rises by {value}"
        for who, values in found.items()
        for what, value in values.items()
        if value > LEVEL[what]
    ]


if __name__ == "__main__":
    sys.exit(main())
