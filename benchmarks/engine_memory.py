"""Bytes per parameter of each preset on one GPU: what torch's allocator holds, beside what is predicted.

    python3 benchmarks/engine_memory.py [--steps 3] [--out benchmarks/results/NAME] [--json]

Needs real Transformer Engine and a few GB. A Qwen3-like Megatron model with the distributed optimizer is
built and trained for some steps; memory is read when the model is there (weights and gradients), when the
optimizer is (masters), and between two steps (all that persists). Each preset has a process of its own,
in which workspaces that are made once are made by a smaller model first. Presets that the GPU cannot run
are named and left out. Exit code 1 if a total is more than `--tolerance` away from the prediction. Writes
NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fp8bridge.demo.megatron_gpu import SMALL_QWEN3, GpuTrainer, arithmetic_batch, one_gpu
from fp8bridge.engine import PRESETS, FP8EngineConfig, bytes_per_parameter
from fp8bridge.errors import ConfigError

CONFIGS: dict[str, FP8EngineConfig | None] = {
    "bf16": None,
    **{name: make() for name, make in PRESETS.items()},
    "tensorwise, FP8 parameters": FP8EngineConfig(recipe="tensorwise", fp8_params=True),
    "hopper_blockwise, BF16 gradients": FP8EngineConfig.from_dict(
        {"preset": "hopper_blockwise", "grad_dtype": "bfloat16"}
    ),
    "fp8lm_o2, BF16 gradients": FP8EngineConfig.from_dict({"preset": "fp8lm_o2", "grad_dtype": "bfloat16"}),
}
MODEL = SMALL_QWEN3 | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}


def main():
    options = arguments()
    found, left_out = {}, {}
    gpu = "blackwell" if torch.cuda.get_device_capability() >= (10, 0) else "hopper"
    for name, engine in CONFIGS.items():
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
            try:
                row = process.submit(measure_alone, name, options.steps).result()
            except ConfigError as err:
                left_out[name] = str(err)
                continue
        row["predicted"] = prediction(engine, row["counts"], gpu)
        row["difference"] = row["measured"]["trained"] / row["predicted"]["total"] - 1
        found[name] = row
    wrong = {name: row for name, row in found.items() if abs(row["difference"]) > options.tolerance}
    report({"facts": facts(), "presets": found, "left_out": left_out, "wrong": sorted(wrong)}, options)
    sys.exit(1 if wrong else 0)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.03, help="of the total; buckets and scales are padded")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure_alone(name, steps):
    with one_gpu():
        for engine in (None, FP8EngineConfig.hopper_blockwise()):
            measure(SMALL_QWEN3, engine, 2)
        return measure(MODEL, CONFIGS[name], steps)


def measure(hf_config, engine, steps):
    """Bytes per parameter at each point, and the loss, to see that it trains."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer = GpuTrainer(hf_config, engine)
    counts = parameter_counts(trainer.model)
    total = sum(counts.values())
    marks = {"model": trainer.nbytes_before_optimizer - before, "optimizer": torch.cuda.memory_allocated() - before}
    generator = torch.Generator().manual_seed(0)
    losses = [trainer.step(arithmetic_batch(generator, rows=4, length=128, vocab=256)) for _ in range(max(1, steps))]
    gc.collect()
    torch.cuda.synchronize()
    marks["trained"] = torch.cuda.memory_allocated() - before
    measured = {name: nbytes / total for name, nbytes in marks.items()}
    return {"counts": counts, "measured": measured, "losses": losses, "states": states(trainer.optimizer, total)}


def parameter_counts(model):
    linear = sum(p.numel() for n, p in model.named_parameters() if ".linear_" in n and p.dim() == 2)
    return {"linear": linear, "other": sum(p.numel() for p in model.parameters()) - linear}


def states(optimizer, total):
    """Bytes per parameter of each optimizer state, buffer by buffer."""
    found = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in each.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    found[name] = found.get(name, 0) + buffers(value)
    return {name: nbytes / total for name, nbytes in found.items()}


def buffers(tensor):
    inner = [getattr(tensor, name, None) for name in ("_data", "_transpose")]
    held = [t for t in inner if t is not None]
    return sum(t.nbytes for t in held) if held else tensor.nbytes


def prediction(engine, counts, gpu):
    """Bytes per parameter by part, over all parameters of the model, and their total."""
    parts: dict[str, float] = {}
    for kind, count in counts.items():
        for part in bytes_per_parameter(engine, linear=kind == "linear", gpu=gpu):
            parts[part.what] = parts.get(part.what, 0.0) + part.nbytes * count / sum(counts.values())
    return parts | {"total": sum(parts.values())}


def facts():
    import importlib.metadata

    import transformer_engine

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": transformer_engine.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
        "model": MODEL,
    }


def report(result, options):
    text: Any = markdown(result)
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(json.dumps(result) if options.json else text)


def markdown(result):
    facts_ = result["facts"]
    rows = [f"# Memory of FP8 engine presets on {facts_['gpu']}", ""]
    rows.append(f"torch {facts_['torch']}, Transformer Engine {facts_['transformer_engine']}, "
                f"megatron-core {facts_['megatron_core']}. Bytes per parameter, one rank.")  # fmt: skip
    rows += ["", "| preset | model | + masters | + trained | predicted | difference |", "|---|---|---|---|---|---|"]
    for name, row in result["presets"].items():
        m, p = row["measured"], row["predicted"]
        cells = [f"{x:.3f}" for x in (m["model"], m["optimizer"], m["trained"], p["total"])]
        rows.append(f"| {name} | {' | '.join(cells)} | {row['difference']:+.2%} |")
    rows += ["", *(f"Left out: {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
