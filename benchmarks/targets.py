"""The figures fp8bridge promises, measured in one run: python benchmarks/targets.py --out DIR

On a GPU: Qwen3-30B-A3B shapes. `--small` runs the same on a CPU in seconds, for nothing but to see that it runs.
Every sync is verified before its time is taken. Writes DIR/targets.json, DIR/targets.md, DIR/targets.png and
DIR/host_profile.txt. Needs no command-line packages, so that it runs on a bare machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch

from fp8bridge.bench.ceilings import copy_gbytes_per_s, socket_gbytes_per_s
from fp8bridge.bench.host import host_time
from fp8bridge.bench.plot import save_plot
from fp8bridge.bench.source import SyntheticSource
from fp8bridge.bench.sweeps import sweep
from fp8bridge.bench.sync import Case, run_case
from fp8bridge.bench.table import ceilings, markdown
from fp8bridge.errors import ConfigError
from fp8bridge.models import config_of

SMALL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
EXPERTS = ".experts."


def cases(small):
    """(name, case, formats) of the syncs."""
    device = "cpu" if small else "cuda"

    def model(layers):
        return SMALL if small else config_of("Qwen3-30B-A3B", layers=layers)

    def case(label, layers, **more):
        size = {"bucket_nbytes": 1 << 18} if small else {}
        return Case(label=label, hf_config=model(layers), device=device, **{"repeat": 2, **size, **more})

    yield "device", case("all tensors", 24, transport="loopback", repeat=5), ("fp8", "bf16")
    yield "experts", case("experts", 24, transport="loopback", repeat=5, only=EXPERTS), ("fp8",)
    if small or torch.cuda.device_count() > 1 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        far = "cuda:1" if torch.cuda.device_count() > 1 else ""
        group = {"transport": "nccl", "server_device": far}
        if not small:
            group |= {"bucket_nbytes": 1 << 30, "repeat": 4}
        yield "nccl", case("all tensors", 24, **group), ("fp8", "bf16")
    yield "zmq", case("all tensors", 16, transport="zmq"), ("fp8", "bf16")
    if small:
        return
    many = case("24 layers", 24, transport="loopback", repeat=3, baseline=False)
    for each in sweep("bucket", many, [64, 256, 1024]):
        yield "bucket sweep", each, ("fp8",)
    for each in (*sweep("model", many, [3, 6, 12]), *sweep("tensors", many, [32, 64, 256])):
        yield "growth", each, ("fp8", "bf16")
    few = case("2 layers", 2, transport="zmq", baseline=False)
    for each in sweep("servers", few, [1, 2, 4]):
        yield "servers", each, ("fp8",)


def run_all(small, log, wanted):
    """Yields a result as soon as it is there."""
    kept = (None, None)
    for group, case, formats in cases(small):
        if wanted and group not in wanted:
            continue
        key = (json.dumps(case.hf_config), case.only)
        if kept[0] != key:
            kept = (None, None)
            kept = (key, SyntheticSource(case.hf_config, device=torch.device(case.device), only=case.only))
        for name in formats:
            options = {"format": name, "baseline": case.baseline and name == "fp8"}
            start = time.perf_counter()
            result = run_case(replace(case, **options), kept[1])
            log(
                f"{group}: {case.label} {name}: {result['seconds']:.4f} s ({time.perf_counter() - start:.0f} s in all)"
            )
            yield {"group": group, **result}


def raw(small, nbytes):
    """Ceilings with messages of the default bucket."""
    streams = {s: socket_gbytes_per_s(nbytes, streams=s, total_nbytes=nbytes * (4 if small else 16)) for s in (1, 2)}
    copy = copy_gbytes_per_s(torch.device("cpu" if small else "cuda"), nbytes if small else 4 << 30)
    return {"device_copy_gbytes_per_s": copy, "raw_socket_gbytes_per_s": streams}


def pack_over_floor(result, copy_gbytes_per_s):
    """(pack, pack + scatter) seconds over the time a copy needs for the bytes they read and write."""
    best = copy_gbytes_per_s * 1e9
    packed = result["nbytes_in"] + result["nbytes"]
    spent = result["stages"]["pack"] + result["stages"]["gather"]
    scattered = packed + 2 * result["nbytes"]
    return spent / (packed / best), (spent + result["server_load_s"]) / (scattered / best)


def verdicts(results, roofs, host):
    """(what, measured, wanted, reached) of every promise that was measured."""
    measured = {(r["group"], r["format"]): r for r in results}
    found = []

    def add(what, value, wanted, reached):
        found.append({"what": what, "measured": value, "wanted": wanted, "reached": bool(reached)})

    for group in ("device", "nccl", "zmq"):
        fp8, bf16 = measured.get((group, "fp8")), measured.get((group, "bf16"))
        if fp8 and bf16:
            ratio = fp8["seconds"] / bf16["seconds"]
            add(f"FP8 sync over BF16 sync, {group}", round(ratio, 3), "<= 0.55", ratio <= 0.55)
    if experts := measured.get(("experts", "fp8")):
        times = experts["baseline"]["seconds"] / experts["seconds"]
        add("baseline over FP8 sync, experts", round(times, 2), ">= 10", times >= 10)
    if device := measured.get(("device", "fp8")):
        pack, both = pack_over_floor(device, roofs["device_copy_gbytes_per_s"])
        add("pack over its floor", round(pack, 2), "<= 3", pack <= 3)
        add("pack + scatter over their floor", round(both, 2), "<= 3", both <= 3)
    if nccl := measured.get(("nccl", "fp8")):
        share = nccl["send_gbytes_per_s"] / nccl["ceiling"]["gbytes_per_s"]
        add("NCCL over a raw broadcast", round(share, 3), ">= 0.9", share >= 0.9)
    if zmq := measured.get(("zmq", "fp8")):
        for streams, speed in roofs["raw_socket_gbytes_per_s"].items():
            share = zmq["send_gbytes_per_s"] / speed
            add(f"ZMQ over a raw socket, {streams} streams", round(share, 3), ">= 0.8", share >= 0.8)
    host_ms = 1e3 * host["second_s"]
    add(f"host ms of the second update, {host['tensors']} tensors", round(host_ms, 2), "<= 20", host_ms <= 20)
    for group in ("device", "nccl", "zmq"):
        if r := measured.get((group, "fp8")):
            allowed = 2 * r["bucket_nbytes"] + r["largest_tensor_nbytes"]
            add(f"extra memory of the bridge, MB, {group}", round(r["extra_nbytes"] / 1e6, 1),
                f"<= {allowed / 1e6:.1f}", r["extra_nbytes"] <= allowed)  # fmt: skip
            if r["peak_device_nbytes"] is not None:
                add(f"peak of the allocator, MB, {group}", round(r["peak_device_nbytes"] / 1e6, 1), "reported", True)
    return found


def environment():
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def report(data):
    env, host = data["environment"], data["host"]
    lines = [
        f"# Sync targets on {env['gpu'] or 'a CPU'}",
        "",
        f"{env['date']}, torch {env['torch']}, NCCL {env['nccl']}, python {env['python']}.",
        "",
    ]
    lines += ["| promise | measured | wanted | reached |", "|---|---|---|---|"]
    for v in data["verdicts"]:
        lines.append(f"| {v['what']} | {v['measured']} | {v['wanted']} | {'yes' if v['reached'] else 'no'} |")
    lines += ["", markdown(data["results"])]
    lines += [f"- {line}" for line in ceilings(data["results"])]
    lines += [f"- {name}: {value}" for name, value in data["roofs"].items()]
    stages = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in host["stages"].items())
    lines += [
        "",
        f"{host['tensors']} tensors of {host['shape']}: second update {1e3 * host['second_s']:.2f} ms without the "
        f"server's load, median {1e3 * host['seconds']:.2f} ms; stages in ms: {stages}.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a CPU, a tiny model, seconds")
    parser.add_argument("--group", action="append", help="measure these alone: device, experts, nccl, zmq, ...")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    def log(line):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    device, many = ("cpu", 600) if args.small else ("cuda", 18_000)
    host = host_time(tensors=many, device=device)
    log(f"host: {1e3 * host['second_s']:.2f} ms for {many} tensors")
    (args.out / "host_profile.txt").write_text(host.pop("profile"))
    roofs = raw(args.small, (1 << 18) if args.small else (256 << 20))
    log(f"roofs: {roofs}")
    results = []
    for result in run_all(args.small, log, args.group):
        results.append(result)
        save(args.out, roofs, host, results)  # each time: a run that is cut short leaves what it has
    print((args.out / "targets.md").read_text())
    try:
        save_plot(results, args.out / "targets.png")
    except ConfigError as err:
        print(f"no plot: {err}")


def save(out, roofs, host, results):
    data = {"environment": environment(), "roofs": roofs, "host": host, "results": results}
    data["verdicts"] = verdicts(results, roofs, host)
    (out / "targets.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "targets.md").write_text(report(data))


if __name__ == "__main__":
    main()
