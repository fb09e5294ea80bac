"""Real Megatron configs, models and optimizers with real Transformer Engine classes, in a process of their own.

`configs` plays what needs one process. Imported by the process itself: no pytest here.
"""

import dataclasses
import warnings

import torch
import torch.distributed as dist

from fp8bridge.engine import Environment, FP8EngineConfig, apply_to_megatron
from fp8bridge.engine.writing import reload_masters
from fp8bridge.errors import ConfigError
from tests.adapters import te_stub

SMALL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "add_bias_linear": False}
RECIPES = {
    "blockwise": {"recipe": "blockwise", "mode": "hybrid"},
    "tensorwise": {"recipe": "tensorwise", "dot_product_attention": True},
    "delayed": {
        "recipe": "delayed",
        "mode": "hybrid",
        "margin": 2,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "dot_product_attention": True,
        "multi_head_attention": True,
    },
    "mxfp8": {"recipe": "mxfp8"},
}


def made(**transformer):
    """Megatron's three configs as a BF16 trainer has them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return (
        TransformerConfig(**SMALL | {"bf16": True, "params_dtype": torch.bfloat16} | transformer),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        OptimizerConfig(use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16),
    )


def apply(config, *made):
    """With this process's real Transformer Engine, but not the GPU that the stub pretends."""
    return apply_to_megatron(config, *made, environment=dataclasses.replace(Environment.here(), capability=None))


def configs(_, path):
    warnings.simplefilter("ignore")
    te_stub.install()
    found = {
        "recipes": {name: recipe(given) for name, given in RECIPES.items()},
        "presets": {name: preset(name) for name in ("hopper_blockwise", "blackwell_mxfp8", "fp8lm_o2", "fp8lm_o3")},
        "too late": refusal(FP8EngineConfig(block_scales="float32")),
        "wgrad": refusal(FP8EngineConfig(recipe="delayed", wgrad=False)),
        "rerun": [derived(True), derived(False)],
    }
    torch.save(found, path)


def recipe(given):
    """What Megatron makes of the applied config: Transformer Engine's own recipe object."""
    from megatron.core.fp8_utils import get_fp8_recipe

    transformer, ddp, optimizer = made(use_cpu_initialization=True)
    apply(FP8EngineConfig(**given), transformer, ddp, optimizer)
    made_recipe = get_fp8_recipe(transformer)
    names = [f.name for f in dataclasses.fields(made_recipe)]
    return {
        "class": [c.__name__ for c in type(made_recipe).__mro__],
        "format": made_recipe.fp8_format.name,
        "fields": {n: v for n in names if isinstance(v := getattr(made_recipe, n), bool | int | str)},
        "power of two": getattr(getattr(made_recipe, "fp8_quant_fwd_weight", None), "power_2_scale", None),
    }


def preset(name):
    configs_made = made()
    config = FP8EngineConfig.preset(name)
    changes = apply(config, *configs_made)
    again = apply(config, *configs_made)
    return {"changes": [str(c) for c in changes], "again": again, "vars": [plain(vars(c)) for c in configs_made]}


def plain(values):
    return {k: v for k, v in values.items() if v is None or isinstance(v, bool | int | str | torch.dtype)}


def refusal(config):
    try:
        apply(config, *made())
    except ConfigError as err:
        return str(err)
    return "not refused"


def derived(fp16_masters):
    """A field that only Megatron's own check computes."""
    configs_made = made()
    dtype = "float16" if fp16_masters else "float32"
    apply(FP8EngineConfig(master_dtype=dtype, exp_avg_dtype="fp8"), *configs_made)
    return configs_made[2].use_precision_aware_optimizer_no_fp8_or_ds_fp8


def memory(_, port, path):
    """Bytes that model, gradients and optimizer really hold, for a tiny model of each preset."""
    warnings.simplefilter("ignore")
    te_stub.install()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    from fp8bridge.demo.megatron_cpu import use_cpu

    use_cpu()
    quantize_states()
    names = ("hopper_blockwise", "fp8lm_o1", "fp8lm_o2", "fp8lm_o3")
    torch.save({name: allocated(FP8EngineConfig.preset(name)) for name in names}, path)
    dist.destroy_process_group()


def quantize_states():
    """FP8 states are made by CUDA code: here with the buffers that it makes on Hopper, a transposed one among
    them (csrc/quantizer.cpp), and zeros, which a new state is whatever the kernel."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    def create_empty(quantizer, shape, dtype, device, pin_memory):
        return Float8Tensor(
            shape=shape,
            dtype=dtype,
            data=torch.empty(shape, dtype=torch.uint8),
            fp8_scale_inv=torch.empty(1),
            fp8_dtype=quantizer.dtype,
            data_transpose=torch.empty(shape[::-1], dtype=torch.uint8) if quantizer.columnwise_usage else None,
            quantizer=quantizer,
            device="cpu",
        )

    tex.create_empty_quantized_tensor = create_empty

    blocks = tex.quantize

    def quantize(tensor, quantizer, out=None, noop=None):
        if type(quantizer).__name__ != "Float8Quantizer":
            return blocks(tensor, quantizer, out, noop)
        assert not tensor.any()
        out._data.zero_()
        return out

    tex.quantize = quantize


def allocated(config):
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from tests.adapters.te_world import ALIGNED, build

    ps.initialize_model_parallel(1, 1)
    transformer, ddp_config, optimizer_config = made()
    optimizer_config.lr = 1e-3
    apply(config, transformer, ddp_config, optimizer_config)
    fp8 = {name: getattr(transformer, name) for name in ("fp8", "fp8_recipe", "fp8_param")}
    model = build(ALIGNED, 1, 1, fp8)
    assert isinstance(model.config, TransformerConfig)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
    adam = inner.optimizer
    for param in (p for group in adam.param_groups for p in group["params"]):  # as its first step would
        adam.initialize_state(param, adam.store_param_remainders and param.dtype == torch.bfloat16)
    try:
        reload_masters(optimizer)
        reloaded = ""
    except ConfigError as err:
        reloaded = str(err)
    linear = [p for n, p in model.named_parameters() if ".linear_" in n and p.dim() == 2]
    counts = {"linear": sum(p.numel() for p in linear), "other": 0}
    counts["other"] = sum(p.numel() for p in model.parameters()) - counts["linear"]
    grads = sum(b.grad_data.nbytes for b in [*ddp.buffers, *ddp.expert_parallel_buffers])
    masters = [p for group in inner.shard_fp32_from_float16_groups for p in group if p is not None]
    states = {"master_param": sum(nbytes(m) for m in masters)}
    for state in adam.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                states[name] = states.get(name, 0) + nbytes(value)
    ps.destroy_model_parallel()
    return {
        "counts": counts,
        "weights": sum(map(nbytes, model.parameters())),
        "grads": grads,
        "states": states,
        "reloaded": reloaded,
    }


def nbytes(tensor):
    """What stands in memory for it: of Transformer Engine's classes, every buffer."""
    names = ("_data", "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv", "_transpose")
    inner = [getattr(tensor, name, None) for name in names]
    held = [t for t in inner if t is not None]
    return sum(t.nbytes for t in held) if held else tensor.nbytes
