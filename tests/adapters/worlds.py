"""Live Megatron models in four gloo processes. Imported by the processes themselves: no pytest here.

`run` is one rank. It plays every scenario in one go (the import of Megatron takes seconds) and rank 0
saves what the tests then look at.
"""

import contextlib
import datetime
import functools
import os
import zlib

import torch
import torch.distributed as dist

from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.demo.megatron_cpu import build_model, use_cpu
from fp8bridge.demo.training import TINY_QWEN3, DemoTrainer, load_hf_tensors, logits, share_embeddings

WORLD = 4
TOKENS = torch.arange(20) * 7 % 500
GARBAGE = 7.0

QWEN2 = TINY_QWEN3 | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
LLAMA = TINY_QWEN3 | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
EXPORTS = {
    # name: (hf_config, tp, pp, vpp); ranks left over are data parallel
    "qwen3_tp2_pp2": (TINY_QWEN3, 2, 2, 1),
    "qwen3_pp2_vpp2": (TINY_QWEN3, 1, 2, 2),
    "qwen2_tied_tp2_pp2_vpp2": (QWEN2, 2, 2, 2),
    "qwen2_tied_tp2": (QWEN2, 2, 1, 1),
    "llama_tp4_two_groups": (LLAMA, 4, 1, 1),
}


def run(rank, port, path):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60))
    use_cpu()
    found = {}
    for name, (config, tp, pp, vpp) in EXPORTS.items():
        with layout(tp, pp, vpp):
            found[name] = export_scenario(config)
    with layout(1, 1, 1):
        found["oracle"] = {c["model_type"]: naive_export(c) for c in (TINY_QWEN3, QWEN2, LLAMA)}
    found["training"] = training_scenario()
    found["overlap"] = {overlap: overlap_scenario(overlap) for overlap in (False, True)}
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def layout(tp, pp, vpp):
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
    yield
    ps.destroy_model_parallel()


def export_scenario(config):
    chunks = build_model(config, dtype=torch.float32)
    draw(chunks, config["vocab_size"])
    source = MegatronSource(chunks, config)
    tensors, metas, shards = assemble(source)
    before = logits(share(chunks), TOKENS, config["vocab_size"])
    # The way back: a model of other weights, filled from the assembled tensors.
    draw(chunks, config["vocab_size"], salt="other")
    load_hf_tensors(chunks, config, tensors.__getitem__)
    after = logits(chunks, TOKENS, config["vocab_size"])
    return {"tensors": tensors, "metas": metas, "shards": shards, "logits": before, "refilled": after}


def share(chunks):
    """The last stage's tied copy holds garbage for the export's sake; the forward needs it right."""
    share_embeddings(chunks)
    return chunks


def global_names(chunks):
    """(name with the layer's number in the model, parameter), whatever the pipeline split."""
    for chunk in chunks:
        numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
        for name, param in chunk.named_parameters():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = numbers[parts[2]]
            yield ".".join(parts), param


def draw(chunks, vocab, salt=""):
    """The same global model in every layout, cut by Megatron's own initializer. Norms and biases are
    drawn too; vocabulary padding and the tied copy on the last stage are filled with garbage."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

    tp, tp_rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    for name, param in global_names(chunks):
        torch.manual_seed(zlib.crc32((name + salt).encode()))
        matrix = param.data if param.dim() == 2 else param.data[:, None]
        shape, parallel, dim = list(matrix.shape), getattr(param, "tensor_model_parallel", False), 0
        init = functools.partial(torch.nn.init.normal_, std=0.1)
        if parallel:
            dim = param.partition_dim
            mine = shape[dim]
            shape[dim] *= tp
            _initialize_affine_weight_cpu(
                matrix, *shape, mine, dim, init, stride=param.partition_stride,
                skip_set_tensor_parallel_attributes=True,
            )  # fmt: skip
        else:
            init(matrix)
        if "word_embeddings" in name or "output_layer" in name:
            matrix[max(0, vocab - tp_rank * len(matrix)) :] = GARBAGE
        if "output_layer" in name and getattr(param, "shared_embedding", False):
            matrix.fill_(GARBAGE)


def assemble(source):
    """All ranks' shards put together, as a receiver would: NaN where nothing came, replicas equal."""
    metas, shards = source.describe()
    pieces = [
        (s, source.read(s.param)[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols].clone())
        for s in shards
    ]
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, (metas, pieces))
    metas = {meta.name: meta for one, _ in everywhere for meta in one}
    tensors = {name: torch.full(meta.matrix, torch.nan) for name, meta in metas.items()}
    seen, conflicts = {}, set()
    for shard, piece in (pair for _, many in everywhere for pair in many):
        if not torch.equal(seen.setdefault((shard.tensor, shard.box), piece), piece):
            conflicts.add(shard.tensor)
        row, col, rows, cols = shard.box
        tensors[shard.tensor][row : row + rows, col : col + cols] = piece
    whole = {name: tensor.reshape(metas[name].shape) for name, tensor in tensors.items()}
    if conflicts:
        raise ReplicasDifferError(sorted(conflicts))
    return whole, set(metas.values()), [shard for _, many in everywhere for shard, _ in many]


class ReplicasDifferError(Exception):
    pass


def naive_export(config):
    """The oracle: a one-process model of the same weights, taken apart by hand, without the tables."""
    chunks = build_model(config, dtype=torch.float32)
    draw(chunks, config["vocab_size"])
    p = {name: param.detach() for name, param in global_names(chunks)}
    groups, heads, size = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    vocab = config["vocab_size"]
    hf = {
        "model.embed_tokens.weight": p.pop("embedding.word_embeddings.weight")[:vocab],
        "model.norm.weight": p.pop("decoder.final_layernorm.weight"),
    }
    if not config["tie_word_embeddings"]:
        hf["lm_head.weight"] = p.pop("output_layer.weight")[:vocab]
    for layer in range(config["num_hidden_layers"]):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        hf[there + "input_layernorm.weight"] = p.pop(here + "input_layernorm.weight")
        hf[there + "post_attention_layernorm.weight"] = p.pop(here + "pre_mlp_layernorm.weight")
        for kind in ("weight", "bias"):
            if (fused := p.pop(f"{here}self_attention.linear_qkv.{kind}", None)) is None:
                continue
            rest = fused.shape[1:]
            per_group = fused.view(groups, heads // groups + 2, size, *rest)
            hf[f"{there}self_attn.q_proj.{kind}"] = per_group[:, :-2].reshape(-1, *rest)
            hf[f"{there}self_attn.k_proj.{kind}"] = per_group[:, -2].reshape(-1, *rest)
            hf[f"{there}self_attn.v_proj.{kind}"] = per_group[:, -1].reshape(-1, *rest)
        for x in "qk":
            if f"{here}self_attention.{x}_layernorm.weight" in p:
                hf[f"{there}self_attn.{x}_norm.weight"] = p.pop(f"{here}self_attention.{x}_layernorm.weight")
        hf[there + "self_attn.o_proj.weight"] = p.pop(here + "self_attention.linear_proj.weight")
        gate, up = p.pop(here + "mlp.linear_fc1.weight").chunk(2)
        hf |= {there + "mlp.gate_proj.weight": gate, there + "mlp.up_proj.weight": up}
        hf[there + "mlp.down_proj.weight"] = p.pop(here + "mlp.linear_fc2.weight")
    assert not p, sorted(p)
    return {name: tensor.clone() for name, tensor in hf.items()}


def training_scenario():
    tokens = [3, 5, 7, 9, 11, 13, 15]
    runs = []
    for _ in range(2):
        trainer = DemoTrainer(tp=2, pp=2)
        losses = [trainer.step() for _ in range(4)]
        tensors, metas, _ = assemble(trainer.source)
        own = trainer.logprobs(tokens)
        given = trainer.logprobs(tokens, lambda name, have=tensors: have[name].float())
        trainer.close()
        runs.append({"losses": losses, "tensors": tensors, "metas": metas, "own": own, "given": given})
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, (runs[0]["losses"], runs[0]["own"]))
    return {"runs": runs, "tokens": tokens, "everywhere": everywhere}


def overlap_scenario(overlap):
    """Two data-parallel replicas whose optimizer leaves the parameter gathers to the next forward."""
    trainer = DemoTrainer(tp=2, pp=1, overlap_param_gather=overlap)
    losses = [trainer.step(), trainer.step()]
    try:
        assemble(trainer.source)
        stale = False
    except ReplicasDifferError:
        stale = True
    trainer.source.before_read()
    tensors, _, _ = assemble(trainer.source)
    losses.append(trainer.step())
    trainer.close()
    return {"losses": losses, "stale": stale, "tensors": tensors}
