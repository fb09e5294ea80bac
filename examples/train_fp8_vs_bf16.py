"""The same small Qwen3-like Megatron model trained in BF16 and in FP8, on one GPU with real Transformer Engine.

    python3 examples/train_fp8_vs_bf16.py --steps 400 --plot curves.png --out result.json

All runs start from one Hugging Face folder, written by the BF16 trainer and loaded by the others, and see
the same batches: arithmetic progressions modulo the vocabulary, whose lowest loss is known. Compared are
the learning curves; and, on the same weights and one batch, logits and gradients of FP8 and BF16, at the
start and with the weights that BF16 training ended with. Exit code 1 if, at the start, the cosine of the
logits is below 0.99 or the mean cosine of the gradients is not above 0.94.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fp8bridge.demo.megatron_gpu import SMALL_QWEN3, GpuTrainer, arithmetic_batch, arithmetic_floor, one_gpu
from fp8bridge.engine import PRESETS, FP8EngineConfig
from fp8bridge.engine.checkpoint import save_checkpoint

VOCAB = SMALL_QWEN3["vocab_size"]
LOGITS_AT_LEAST, GRADIENTS_ABOVE = 0.99, 0.94


def main() -> None:
    options = _options()
    presets = {name: FP8EngineConfig.preset(name) for name in options.presets}
    with one_gpu(), tempfile.TemporaryDirectory() as folder:
        start, end = Path(folder) / "start", Path(folder) / "end"
        trainer = GpuTrainer(SMALL_QWEN3, None, lr=options.lr)
        save_checkpoint(trainer.ddp, start, SMALL_QWEN3)
        result: dict[str, Any] = {"facts": _facts(options), "runs": {"bf16": _train(trainer, options)}}
        save_checkpoint(trainer.ddp, end, SMALL_QWEN3)
        del trainer
        for name, preset in presets.items():
            result["runs"][name] = _train(GpuTrainer(SMALL_QWEN3, preset, lr=options.lr, weights=start), options)
        result["same_weights"] = {
            name: {"start": _compare(preset, start, options), "end": _compare(preset, end, options)}
            for name, preset in presets.items()
        }
    failed = _judge(result["same_weights"])
    _report(result, failed, options)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=["hopper_blockwise"])
    parser.add_argument("--rows", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--plot", type=Path, help="write the learning curves there (PNG)")
    parser.add_argument("--out", type=Path, help="write the numbers there (JSON)")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of a summary")
    return parser.parse_args()


def _train(trainer: GpuTrainer, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of every step, and seconds for a step once it runs smoothly."""
    generator = torch.Generator().manual_seed(options.seed)
    losses, began = [], time.perf_counter()
    for step in range(options.steps):
        if step == options.steps // 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        losses.append(trainer.step(_batch(generator, options)))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (options.steps - options.steps // 2)
    tail = losses[-max(1, options.steps // 10) :]
    return {"losses": losses, "last_tenth": sum(tail) / len(tail), "seconds_per_step": seconds}


def _batch(generator: torch.Generator, options: argparse.Namespace) -> torch.Tensor:
    return arithmetic_batch(generator, rows=options.rows, length=options.length, vocab=VOCAB)


def _compare(preset: FP8EngineConfig, weights: Path, options: argparse.Namespace) -> dict[str, float]:
    """FP8 against BF16 with the same weights and batch."""
    tokens = _batch(torch.Generator().manual_seed(options.seed + 1), options)
    found = []
    for engine in (None, preset):
        trainer = GpuTrainer(SMALL_QWEN3, engine, lr=options.lr, weights=weights)
        logits = trainer.logits(tokens[:, :-1])
        loss = trainer.backward(tokens)
        found.append((logits, trainer.gradients(), loss))
    (logits, gradients, loss), (logits_fp8, gradients_fp8, loss_fp8) = found
    cosines = [_cosine(gradients[name].flatten(), gradients_fp8[name].flatten()) for name in gradients]
    of_tokens = torch.nn.functional.cosine_similarity(logits, logits_fp8, dim=-1)
    return {
        "logits_cosine_mean": float(of_tokens.mean()),
        "logits_cosine_min": float(of_tokens.min()),
        "gradients_cosine_mean": sum(cosines) / len(cosines),
        "gradients_cosine_min": min(cosines),
        "gradients": len(cosines),
        "loss_bf16": loss,
        "loss_fp8": loss_fp8,
    }


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def _judge(same_weights: dict[str, Any]) -> list[str]:
    failed = []
    for name, at in same_weights.items():
        logits, gradients = at["start"]["logits_cosine_mean"], at["start"]["gradients_cosine_mean"]
        if not logits >= LOGITS_AT_LEAST:
            failed.append(f"{name}: cosine of logits {logits:.4f}, below {LOGITS_AT_LEAST}")
        if not gradients > GRADIENTS_ABOVE:
            failed.append(f"{name}: mean cosine of gradients {gradients:.4f}, not above {GRADIENTS_ABOVE}")
    return failed


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    import importlib.metadata

    import transformer_engine

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": transformer_engine.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
        "python": platform.python_version(),
        "model": SMALL_QWEN3,
        "floor": arithmetic_floor(length=options.length, vocab=VOCAB),
        "steps": options.steps,
        "tokens_per_step": options.rows * options.length,
        "lr": options.lr,
    }


def _report(result: dict[str, Any], failed: list[str], options: argparse.Namespace) -> None:
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        _plot(result, options.plot)
    if options.json:
        print(json.dumps(result | {"failed": failed}))
        return
    facts = result["facts"]
    print(f"{facts['gpu']}, torch {facts['torch']}, Transformer Engine {facts['transformer_engine']}")
    print(f"{facts['steps']} steps of {facts['tokens_per_step']} tokens; lowest possible loss {facts['floor']:.4f}")
    for name, run in result["runs"].items():
        print(
            f"  {name:<18} loss {run['losses'][0]:.3f} -> {run['last_tenth']:.4f} (mean of the last tenth), "
            f"{1e3 * run['seconds_per_step']:.1f} ms a step"
        )
    for name, at in result["same_weights"].items():
        for when, found in at.items():
            print(
                f"  {name:<18} at the {when}: cosine of logits {found['logits_cosine_mean']:.5f} (least "
                f"{found['logits_cosine_min']:.5f}), of {found['gradients']} gradients "
                f"{found['gradients_cosine_mean']:.5f} (least {found['gradients_cosine_min']:.5f})"
            )
    print("\n".join(f"FAILED {line}" for line in failed) or "cosines as required")


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    for name, run in result["runs"].items():
        axis.plot(run["losses"], label=name, linewidth=1.2, alpha=0.85)
    axis.axhline(result["facts"]["floor"], color="grey", linestyle=":", label="lowest possible")
    axis.set(xlabel="step", ylabel="loss (log scale)", yscale="log")
    axis.set_title(f"arithmetic progressions, {result['facts']['gpu']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
