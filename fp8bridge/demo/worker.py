"""One trainer rank of the demo: train a step, sync, and check the servers three ways."""

from __future__ import annotations

import logging
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import torch.distributed as dist

import fp8bridge
from fp8bridge.bridge import Bridge
from fp8bridge.errors import BridgeError
from fp8bridge.kernels import reference
from fp8bridge.plan import Plan
from fp8bridge.staging import tensor_checksum
from fp8bridge.types import WeightSource

PROMPT = [3, 5, 7, 9, 11, 13]
NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class DemoJob:
    """What every rank is told. `urls`: the rollout servers."""

    urls: tuple[str, ...]
    hf_config: dict[str, Any]
    quantization: dict[str, Any] | None
    tp: int
    pp: int
    steps: int
    seed: int
    port: int
    bucket_nbytes: int


def run_rank(rank: int, job: DemoJob, events: Any) -> None:
    """Body of a trainer process. Rank 0 puts ("plan" | "train" | "bucket" | "step", data) on
    `events`; any rank puts ("error", text) and ends."""
    torch.set_num_threads(1)
    # Megatron-Core calls what newer torch renames: nothing a reader of the demo can act on.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=job.tp * job.pp
        )
        _train_and_sync(rank, job, events)
    except BridgeError as err:
        events.put(("error", f"rank {rank}: {type(err).__name__}: {err}"))
    except Exception:  # noqa: BLE001 - a process of its own: the parent prints it and fails
        events.put(("error", f"rank {rank}: {traceback.format_exc()}"))


def _train_and_sync(rank: int, job: DemoJob, events: Any) -> None:
    from .training import DemoTrainer

    trainer = DemoTrainer(job.hf_config, tp=job.tp, pp=job.pp, seed=job.seed)
    # Stock SGLang of before 0.5.21 dies of its default pause mode; the demo has no running requests anyway.
    mode = "retract" if job.quantization else "abort"
    with fp8bridge.connect(trainer.source, job.urls, bucket_nbytes=job.bucket_nbytes, pause_mode=mode) as bridge:
        if rank == 0:
            events.put(("plan", bridge.plan.preview(servers=len(job.urls))))
        for step in range(1, job.steps + 1):
            loss = trainer.step()
            if rank == 0:
                events.put(("train", {"step": step, "loss": loss}))
            report = bridge.update_weights(
                version=step,
                on_progress=lambda done, total: events.put(("bucket", (done, total))) if rank == 0 else None,
            )
            checks = _check(rank, job, bridge, trainer)
            if rank == 0:
                events.put(("step", {"step": step, "loss": loss, "report": report.as_dict()} | checks))
    trainer.close()


def _check(rank: int, job: DemoJob, bridge: Bridge, trainer: Any) -> dict[str, Any]:
    """Do the servers hold, and generate with, what the trainer's weights quantize to? Collective.

    1. checksums of what was sent against the servers' own; 2. every byte the servers hold against
    the naive reference applied to weights that were gathered without the bridge; 3. log-probabilities
    of what the servers generate against a Megatron forward pass with the dequantized weights.
    """
    bridge.verify()
    whole = gather_whole(bridge.plan, trainer.source)
    shared: list[Any] = [None]
    if rank == 0:
        wire = reference_wire(bridge.plan, whole)
        shared[0] = {
            "differences": [d for url in job.urls for d in _differences(url, wire, bridge)],
            "versions": {url: _get(f"{url}/model_info").json()["weight_version"] for url in job.urls},
            "samples": [_generate(url) for url in job.urls],
            "dequantized": {i.meta.name: _dequantized(i.meta.name, wire, bridge.plan) for i in bridge.plan.items},
        }
    dist.broadcast_object_list(shared, src=0)
    checks: dict[str, Any] = shared[0]
    weights = checks.pop("dequantized")
    gap = noise = 0.0
    for tokens, served in checks.pop("samples"):
        ours = trainer.logprobs(tokens, lambda name: weights[name])[-len(served) :]
        unquantized = trainer.logprobs(tokens)[-len(served) :]
        gap = max(gap, *(abs(a - b) for a, b in zip(ours, served, strict=True)))
        noise = max(noise, *(abs(a - b) for a, b in zip(unquantized, served, strict=True)))
    return checks | {"logprob_gap": gap, "logprob_gap_unquantized": noise}


def gather_whole(plan: Plan, source: WeightSource) -> dict[str, torch.Tensor]:
    """Every whole HF tensor in the trainer's dtype, on every rank; collective. Not the bridge's gather."""
    mine = {}
    for item in plan.items:
        for s in item.shards:
            if s.rank == dist.get_rank():
                box = source.read(s.param)[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols]
                mine[item.meta.name, s.dst_row, s.dst_col] = box.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = {i.meta.name: torch.empty(i.meta.matrix, dtype=getattr(torch, i.meta.dtype)) for i in plan.items}
    for part in parts:
        for (name, row, col), box in part.items():
            whole[name][row : row + box.shape[0], col : col + box.shape[1]] = box
    return {i.meta.name: whole[i.meta.name].reshape(i.meta.shape) for i in plan.items}


def reference_wire(plan: Plan, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a server must hold, by the naive reference."""
    wire: dict[str, torch.Tensor] = {}
    for item in plan.items:
        name = item.meta.name
        if item.action == "quantize" and plan.rule and plan.layout.block:
            wire[name], wire[f"{name}_scale_inv"] = reference.quantize(whole[name], plan.rule, plan.layout.block)
        else:
            wire[name] = whole[name].to(getattr(torch, plan.layout.dtype))
    return wire


def _dequantized(name: str, wire: dict[str, torch.Tensor], plan: Plan) -> torch.Tensor:
    scale = wire.get(f"{name}_scale_inv")
    if scale is None or plan.layout.block is None:
        return wire[name].float()
    return reference.dequantize(wire[name], scale, plan.layout.block)


def _differences(url: str, wire: dict[str, torch.Tensor], bridge: Bridge) -> list[str]:
    """Tensors whose bytes on the server are not the reference's."""
    from safetensors.torch import load

    if bridge.plan.layout.block is None:
        # Stock SGLang: the loader reads every tensor back and tells its checksum.
        sums = bridge.server_checksums()[url]
        return [f"{url}: {n} differs" for n, t in wire.items() if sums.get(n) != tensor_checksum(t)]
    held = load(_get(f"{url}/fp8bridge/weights").content)
    found = [f"{url}: {name} is missing or unexpected" for name in wire.keys() ^ held.keys()]
    for name in wire.keys() & held.keys():
        ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (wire[name], held[name]))
        if not torch.equal(ours, theirs):
            found.append(f"{url}: {name} differs")
    return found


def _generate(url: str) -> tuple[list[int], list[float]]:
    """Prompt and greedy continuation, and the server's log-probability of each new token."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=120, trust_env=False)
    response.raise_for_status()
    rows = response.json()["meta_info"]["output_token_logprobs"]
    return [*PROMPT, *(row[1] for row in rows)], [row[0] for row in rows]


def _get(url: str) -> httpx.Response:
    response = httpx.get(url, timeout=60, trust_env=False)
    response.raise_for_status()
    return response
