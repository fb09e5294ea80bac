"""The FP8 engine on a real GPU with real Transformer Engine: config, training, and checkpoints byte for byte."""

import pytest
import torch
from safetensors.torch import load_file

from fp8bridge.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # Megatron's and Transformer Engine's own, at import and in use
]


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("transformer_engine.pytorch", reason="no Transformer Engine; give its wheels in WHEELS")
    pytest.importorskip("megatron.core", reason="no megatron-core; give its wheel in WHEELS")
    from fp8bridge.demo import megatron_gpu

    with megatron_gpu.one_gpu():
        yield megatron_gpu


def read(folder):
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def same(a, b):
    assert sorted(a) == sorted(b)
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def batch(gpu, seed):
    return gpu.arithmetic_batch(torch.Generator().manual_seed(seed), rows=8, length=128, vocab=256)


@pytest.mark.parametrize("preset", ["hopper_blockwise", "fp8lm_o1", "fp8lm_o2", "fp8lm_o3"])
def test_presets_train(gpu, preset):
    from fp8bridge.engine import FP8EngineConfig

    trainer = gpu.GpuTrainer(gpu.SMALL_QWEN3, FP8EngineConfig.preset(preset))
    losses = [trainer.step(batch(gpu, seed)) for seed in range(40)]
    assert losses[-1] < losses[0] - 0.2
    assert trainer.changes


def test_trained_fp8_parameters_survive_files_byte_for_byte(gpu, tmp_path):
    from fp8bridge.engine import FP8EngineConfig
    from fp8bridge.engine.checkpoint import load_checkpoint, save_checkpoint

    engine = FP8EngineConfig.hopper_blockwise()
    trainer = gpu.GpuTrainer(gpu.SMALL_QWEN3, engine)
    for seed in range(3):
        trainer.step(batch(gpu, seed))
    tokens = batch(gpu, 9)[:, :-1]
    saved = save_checkpoint(trainer.ddp, tmp_path / "a", gpu.SMALL_QWEN3, to="fp8")
    assert saved.rule == "te_pow2"
    assert not saved.notes
    again = gpu.GpuTrainer(gpu.SMALL_QWEN3, engine, seed=7, weights=tmp_path / "a")
    assert len(again.loaded.kept) == 7 * gpu.SMALL_QWEN3["num_hidden_layers"]
    assert torch.equal(again.logits(tokens), trainer.logits(tokens))
    save_checkpoint(again.ddp, tmp_path / "b", gpu.SMALL_QWEN3, to="fp8")
    assert same(read(tmp_path / "a"), read(tmp_path / "b"))
    # Masters started from what was loaded: with a learning rate of nothing, a step changes no weight's value.
    still = gpu.GpuTrainer(gpu.SMALL_QWEN3, engine, lr=0.0, seed=8, weights=tmp_path / "a")
    still.step(batch(gpu, 3))
    save_checkpoint(still.ddp, tmp_path / "c", gpu.SMALL_QWEN3, to="bf16")
    save_checkpoint(trainer.ddp, tmp_path / "d", gpu.SMALL_QWEN3, to="bf16")
    after, before = read(tmp_path / "c"), read(tmp_path / "d")
    assert {n: float((t - before[n]).abs().max()) for n, t in after.items() if not torch.equal(t, before[n])} == {}
    with pytest.raises(ConfigError, match="optimizer was made before"):
        load_checkpoint(trainer.ddp, tmp_path / "a", hf_config=gpu.SMALL_QWEN3)


def test_bf16_files_become_what_transformer_engine_makes_of_them(gpu, tmp_path):
    from fp8bridge.engine import FP8EngineConfig
    from fp8bridge.engine.checkpoint import convert_checkpoint, save_checkpoint

    bf16 = gpu.GpuTrainer(gpu.SMALL_QWEN3, None)
    save_checkpoint(bf16.ddp, tmp_path / "bf16", gpu.SMALL_QWEN3)
    trainer = gpu.GpuTrainer(gpu.SMALL_QWEN3, FP8EngineConfig.hopper_blockwise(), seed=3, weights=tmp_path / "bf16")
    save_checkpoint(trainer.ddp, tmp_path / "fp8", gpu.SMALL_QWEN3, to="fp8")
    convert_checkpoint(tmp_path / "bf16", tmp_path / "converted", "fp8", rule="te_pow2")
    assert same(read(tmp_path / "fp8"), read(tmp_path / "converted"))
    weight = bf16.model.decoder.layers[0].mlp.linear_fc2.weight
    live = trainer.model.decoder.layers[0].mlp.linear_fc2.weight
    made = live._quantizer(weight.detach())
    assert torch.equal(made._rowwise_data, live._rowwise_data)
