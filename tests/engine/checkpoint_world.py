"""Megatron models filled from Hugging Face folders and saved again, in four gloo processes. No pytest here.

`run` is one rank; it plays every scenario in one go, and rank 0 saves what the tests look at. The folders
that scenarios read were made by the tests; those they write are beside them.
"""

import datetime
import importlib.util
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from fp8bridge.demo.megatron_cpu import build_model, use_cpu
from fp8bridge.demo.training import DemoTrainer
from fp8bridge.engine.checkpoint import load_checkpoint, save_checkpoint
from fp8bridge.errors import BridgeError
from tests.adapters import te_stub, te_world
from tests.adapters.worlds import QWEN2, global_names

WORLD = 4
ROUND_TRIPS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2_pp2": (2, 2)}
HAS_EXPERTS = importlib.util.find_spec("tests.adapters.moe_models") is not None
TIED = QWEN2
HALF = te_world.ALIGNED | {"intermediate_size": 320}


def run(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    te_stub.install()
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=100))
    use_cpu()
    folder = Path(folder)
    found = {name: round_trip(folder, name, *sizes) for name, sizes in ROUND_TRIPS.items()}
    if HAS_EXPERTS:
        found["ep2"] = expert_round_trip(folder)
    found["heads of 64"] = heads_of_64(folder)
    found["half a block"] = half_a_block(folder)
    found["powers of two"] = powers_of_two(folder)
    found["bf16 files"] = bf16_files(folder)
    found["bf16 parameters"] = bf16_parameters(folder)
    found["tied"] = tied(folder)
    found["optimizer"] = optimizer_first(folder)
    found["errors"] = errors(folder, rank)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def everywhere(value):
    parts = [None] * WORLD
    dist.all_gather_object(parts, value)
    return parts


class layout:
    """Megatron's groups, for the time of a scenario."""

    def __init__(self, tp, pp, **more):
        self._sizes = (tp, pp, more)

    def __enter__(self):
        from megatron.core import parallel_state as ps

        tp, pp, more = self._sizes
        ps.initialize_model_parallel(tp, pp, **more)

    def __exit__(self, *_):
        from megatron.core import parallel_state as ps

        ps.destroy_model_parallel()


def fp8_parameters(model):
    return [p for p in model.parameters() if hasattr(p, "_rowwise_data")]


def round_trip(folder, name, tp, pp):
    with layout(tp, pp):
        model = te_world.build(te_world.ALIGNED, tp, pp, {})
        loaded = load_checkpoint(model, folder / "aligned_fp8")
        hooks = [hasattr(p, "get_high_precision_init_val") for p in fp8_parameters(model)]
        same = all(both_directions_agree(p) for p in fp8_parameters(model))
        saved = save_checkpoint(
            model, folder / name, folder / "aligned_fp8", like=folder / "aligned_fp8", file_nbytes=300_000
        )
        bf16 = save_checkpoint(model, folder / f"{name}_bf16", te_world.ALIGNED, to="bf16")
    return {
        "loaded": asdict(loaded), "saved": asdict(saved), "bf16": asdict(bf16), "hooks": hooks,
        "directions": everywhere(same), "read": everywhere(loaded.nbytes),
    }  # fmt: skip


def both_directions_agree(p):
    """Transformer Engine's columnwise copy is the transposed rowwise one."""
    rows, cols = (-(-n // 128) for n in p.shape)
    across = p._columnwise_scale_inv[:cols, :rows].t()
    return torch.equal(p._columnwise_data.t(), p._rowwise_data) and torch.equal(
        across, p._rowwise_scale_inv[:rows, :cols]
    )


def expert_round_trip(folder):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.adapters.moe_models import transformer_config

    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True, "moe_grouped_gemm": True}
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with layout(2, 1, expert_model_parallel_size=2, expert_tensor_parallel_size=1):
        config = transformer_config(te_world.MOE, mtp=False, dtype=torch.bfloat16, **sizes, **fp8)
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=True),
            vocab_size=512,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        loaded = load_checkpoint(model, folder / "moe_fp8")
        saved = save_checkpoint(model, folder / "ep2", folder / "moe_fp8", file_nbytes=300_000)
        return {"loaded": asdict(loaded), "saved": asdict(saved), "read": everywhere(loaded.nbytes)}


def heads_of_64(folder):
    """k and v share a block: their bytes cannot be kept, q's can."""
    with layout(2, 1):
        model = te_world.build(te_world.HEADS_OF_64, 2, 1, {})
        loaded = load_checkpoint(model, folder / "heads_fp8")
        saved = save_checkpoint(model, folder / "heads_again", folder / "heads_fp8")
        parts = everywhere(te_world.raw_parts(model))
    return {"loaded": asdict(loaded), "saved": asdict(saved), "ranks": parts}


def half_a_block(folder):
    """gate ends, and up begins, in the middle of a block of their parameter."""
    with layout(1, 1):
        model = te_world.build(HALF, 1, 1, {})
        loaded = load_checkpoint(model, folder / "half_fp8")
        return {"loaded": asdict(loaded), "ranks": everywhere(te_world.raw_parts(model))}


def powers_of_two(folder):
    """A GPU that multiplies by powers of two only, as Blackwell does."""
    from fp8bridge.engine import loading

    ask, loading._multiplies_by_powers_of_two = loading._multiplies_by_powers_of_two, lambda device: True
    try:
        with layout(1, 2):
            model = te_world.build(te_world.ALIGNED, 1, 2, {})
            loaded = load_checkpoint(model, folder / "aligned_fp8")
            again = load_checkpoint(model, folder / "aligned_pow2")
            return {"loaded": asdict(loaded), "again": asdict(again), "ranks": everywhere(te_world.raw_parts(model))}
    finally:
        loading._multiplies_by_powers_of_two = ask


def bf16_files(folder):
    """BF16 files into FP8 parameters; the optimizer will start from the files' values."""
    with layout(2, 1):
        model = te_world.build(te_world.ALIGNED, 2, 1, {})
        loaded = load_checkpoint(model, folder / "aligned_bf16")
        weight = model.decoder.layers[1].mlp.linear_fc2.weight
        initial = everywhere(weight.get_high_precision_init_val().clone())
        return {"loaded": asdict(loaded), "ranks": everywhere(te_world.raw_parts(model)), "initial": initial}


def bf16_parameters(folder):
    """FP8 files, made by another rule and with padding in the vocabulary, into BF16 parameters."""
    with layout(2, 1):
        model = te_world.build(te_world.ALIGNED, 2, 1, {"fp8": None, "fp8_param": False})
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        loaded = load_checkpoint(model, folder / "aligned_fp8")
        return {"loaded": asdict(loaded), "ranks": everywhere(te_world.raw_parts(model))}


def tied(folder):
    with layout(2, 2, virtual_pipeline_model_parallel_size=2):
        chunks = build_model(TIED, dtype=torch.bfloat16)
        loaded = load_checkpoint(chunks, folder / "tied_bf16")
        save_checkpoint(chunks, folder / "tied_again", TIED)
        shared = [p.detach().clone() for _, p in global_names(chunks) if getattr(p, "shared_embedding", False)]
        return {"loaded": asdict(loaded), "shared": everywhere(shared)}


def optimizer_first(folder):
    """Weights loaded into a trainer whose optimizer is there already."""
    trainer = DemoTrainer(TIED | {"tie_word_embeddings": False}, tp=2, pp=1)
    before = refusal(lambda: load_checkpoint(trainer.chunks, folder / "untied_bf16"))
    optimizer = trainer._optimizer
    load_checkpoint(trainer.chunks, folder / "untied_bf16", optimizer=optimizer)
    differ = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(each.model_float16_groups, each.shard_fp32_from_float16_groups, strict=True)
        for model_params, masters in groups:
            for param, master in zip(model_params, masters, strict=True):
                span = each._get_model_param_range_map(param)["param"]
                differ.append((param.detach().view(-1)[span.start : span.end].float() != master).any().item())
    trainer.close()
    return {"refused": before, "differ": everywhere(differ)}


def errors(folder, rank):
    words = {}
    with layout(2, 1):
        model = te_world.build(te_world.ALIGNED, 2, 1, {})
        words["missing"] = everywhere(
            refusal(lambda: load_checkpoint(model, folder / "tied_bf16", hf_config=te_world.ALIGNED))
        )
        words["per tensor"] = everywhere(
            refusal(lambda: load_checkpoint(model, folder / "no_block", hf_config=te_world.ALIGNED))
        )
        load_checkpoint(model, folder / "aligned_fp8")
        target = folder / "kept"
        save_checkpoint(model, target, folder / "aligned_fp8")
        words["exists"] = everywhere(refusal(lambda: save_checkpoint(model, target, folder / "aligned_fp8")))
        if rank in (1, 3):  # the second slice and its replica
            model.output_layer.weight.data[0, 3] = torch.nan
        words["nan"] = everywhere(
            refusal(lambda: save_checkpoint(model, target, folder / "aligned_fp8", overwrite=True))
        )
        words["full disk"] = everywhere(refusal(lambda: disk_full(model, target, rank)))
    words["left"] = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    return words


def disk_full(model, target, rank):
    """One rank cannot write its second file; all of them hear of it, after the rounds."""
    from fp8bridge.engine import saving

    model.output_layer.weight.data.nan_to_num_()
    write, count = saving._Saving._write, []

    def fails(self, bucket, memory):
        count.append(bucket)
        if rank == 1 and len(count) == 2:
            raise OSError(28, "No space left on device")
        write(self, bucket, memory)

    saving._Saving._write = fails
    try:
        save_checkpoint(model, target, te_world.ALIGNED, to="fp8", overwrite=True, file_nbytes=100_000)
    finally:
        saving._Saving._write = write


def refusal(work):
    try:
        work()
    except (BridgeError, OSError) as err:
        return f"{type(err).__name__}: {err}"
    return "not refused"
