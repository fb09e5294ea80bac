"""Live Megatron models with experts in four gloo processes, each layout sent to a server.

`run` is one rank; rank 0 saves what each scenario's server holds, and what the naive oracle says.
"""

import datetime

import torch
import torch.distributed as dist

import fp8bridge
from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.demo.megatron_cpu import use_cpu
from fp8bridge.demo.training import load_hf_tensors, logits
from tests.adapters.moe_models import CONFIGS, VOCAB, build, draw, naive_export, weights
from tests.support import FP8_LAYOUT, ZmqThreadServer

WORLD = 4
TOKENS = torch.arange(24) * 7 % VOCAB
FORWARD = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "moonlight")
"""Not GLM4: megatron-core has no layer that computes it."""
SCENARIOS = {
    # name: (config, tp, pp, vpp, cp, ep, etp, TransformerConfig overrides)
    "qwen3_moe_tp2_ep2_etp1": ("qwen3_moe", 2, 1, 1, 1, 2, 1, {}),
    "qwen3_moe_tp2_ep2_etp2": ("qwen3_moe", 2, 1, 1, 1, 2, 2, {}),
    "qwen3_moe_tp1_etp2_pp2": ("qwen3_moe", 1, 2, 1, 1, 1, 2, {}),
    "qwen3_moe_cp2_ep2_pp2": ("qwen3_moe", 1, 2, 1, 2, 2, 1, {}),
    "qwen3_moe_pp2_vpp2_ep2": ("qwen3_moe", 1, 2, 2, 1, 2, 1, {}),
    "qwen2_moe_tp2_ep4": ("qwen2_moe", 2, 1, 1, 1, 4, 1, {}),
    "mixtral_tp4_ep2_etp2": ("mixtral", 4, 1, 1, 1, 2, 2, {}),
    "mixtral_uneven_pp2": ("mixtral", 1, 2, 1, 1, 2, 1, {"num_layers_in_first_pipeline_stage": 3}),
    "glm4_moe_tp2_pp2": ("glm4_moe", 2, 2, 1, 1, 2, 1, {}),
    "deepseek_v3_tp2_pp2_ep2": ("deepseek_v3", 2, 2, 1, 1, 2, 1, {}),
    "deepseek_v3_tp4": ("deepseek_v3", 4, 1, 1, 1, 1, 4, {}),
    "moonlight_tp2_pp2_vpp2": ("moonlight", 2, 2, 2, 1, 1, 2, {}),
    "wide_tp2_pp2_etp1": ("wide", 2, 2, 1, 1, 2, 1, {}),
    "wide_mla_tp2_etp2": ("wide_mla", 2, 1, 1, 1, 2, 2, {}),
    "glm4_tp2_pp2": ("glm4", 2, 2, 1, 1, 1, 2, {}),
}


def run(rank, port, path):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    use_cpu()
    found = {name: layout_scenario(*args) for name, args in SCENARIOS.items()}
    found["groups"] = explicit_groups_scenario()
    found["overlap"] = {overlap: overlap_scenario(overlap) for overlap in (False, True)}
    initialize(1, 1, 1, 1, 1, 1)
    found["oracle"] = {name: oracle(CONFIGS[name]) for name in CONFIGS}
    found["transformers"] = {name: forward(CONFIGS[name]) for name in FORWARD}
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


def initialize(tp, pp, vpp, cp, ep, etp):
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def layout_scenario(name, tp, pp, vpp, cp, ep, etp, overrides):
    config = CONFIGS[name]
    initialize(tp, pp, vpp, cp, ep, etp)
    chunks = build(config, mtp=has_mtp(config), **overrides)
    draw(chunks, config["vocab_size"])
    source = MegatronSource(chunks, config)
    shards = [None] * WORLD
    dist.all_gather_object(shards, source.describe())
    return {"server": sent(source), "described": shards}


def has_mtp(config):
    return config.get("num_nextn_predict_layers", 0) > 0


def sent(source):
    """What a block-FP8 server holds after an update from these ranks."""
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(source, [server], bucket_nbytes=400_000, collective_timeout_s=60) as bridge:
        bridge.update_weights(version=1)
        bridge.verify()
    return {name: tensor.clone() for name, tensor in server.tensors.items()}


def explicit_groups_scenario():
    """A model built with groups of its own, other than those of `parallel_state`."""
    from megatron.core import parallel_state as ps
    from megatron.core.process_groups_config import ProcessGroupCollection

    # The model's groups are TP2 x EP2; the global state, when the source is made, is another one.
    initialize(2, 1, 1, 1, 2, 1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = CONFIGS["qwen3_moe"]
    chunks = build(config, pg_collection=groups)
    draw(chunks, config["vocab_size"])
    kept = ps.get_tensor_model_parallel_group()
    assert kept is groups.tp
    ps._TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD
    ps._EXPERT_MODEL_PARALLEL_GROUP = dist.group.WORLD
    found = sent(MegatronSource(chunks, config))
    ps._TENSOR_MODEL_PARALLEL_GROUP = kept
    return found


def overlap_scenario(overlap):
    """Experts have gradient and parameter buffers of their own: both kinds' gathers must be forced."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    initialize(1, 1, 1, 1, 2, 1)
    config = CONFIGS["qwen3_moe"]
    [model] = build(config)
    draw([model], config["vocab_size"])
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=overlap, overlap_grad_reduce=overlap
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        [ddp],
    )
    for name, param in parameters(model):
        torch.manual_seed(len(name))
        param.main_grad.copy_(torch.randn(param.main_grad.shape))
    optimizer.step()
    source = MegatronSource(ddp, config)
    before = {name: param.detach().clone() for name, param in parameters(model)}
    server = sent(source)
    changed = [name for name, param in parameters(model) if not torch.equal(param, before[name])]
    return {"server": server, "changed": changed}


def parameters(model):
    from megatron.core import parallel_state as ps

    ep = (ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size())
    return [(name, tensor) for _, name, tensor in weights([model], *ep)]


def oracle(config):
    chunks = build(config, mtp=has_mtp(config))
    draw(chunks, config["vocab_size"])
    return naive_export(config, chunks)


def forward(config):
    """Logits of a one-process model in fp32, and its HF tensors by the source; then of one filled from those."""
    chunks = build(config, dtype=torch.float32)
    draw(chunks, config["vocab_size"])
    for chunk in chunks:
        chunk.eval()
    source = MegatronSource(chunks, config)
    metas, shards = source.describe()
    tensors = {meta.name: torch.full(meta.matrix, torch.nan) for meta in metas}
    for s in shards:
        piece = source.read(s.param)[s.src_row : s.src_row + s.rows, s.src_col : s.src_col + s.cols]
        tensors[s.tensor][s.dst_row : s.dst_row + s.rows, s.dst_col : s.dst_col + s.cols] = piece
    tensors = {meta.name: tensors[meta.name].reshape(meta.shape) for meta in metas}
    before = logits(chunks, TOKENS, VOCAB)
    draw(chunks, VOCAB, salt="other")
    load_hf_tensors(chunks, config, tensors.__getitem__)
    return {"tensors": tensors, "logits": before, "refilled": logits(chunks, TOKENS, VOCAB)}
