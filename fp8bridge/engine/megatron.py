"""One FP8EngineConfig onto Megatron-Core's three configs, so that they agree.

One flag often drives fields of all three: `fp8_params` is TransformerConfig.fp8_param,
DistributedDataParallelConfig.fp8_param_gather and, with the recipe, how the distributed optimizer casts
its masters. Megatron checks them when they are made; here they are changed afterwards, so its checks run
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8bridge.errors import ConfigError

from .config import FP8EngineConfig
from .environment import Environment, check_environment
from .tokens import check_tokens

TRANSFORMER, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"
_TORCH_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp8": "uint8"}
"""Transformer Engine's optimizer calls FP8 states uint8."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field of one of Megatron's configs that was changed."""

    config: str
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.config}.{self.field}: {self.before!r} -> {self.after!r}"


def megatron_fields(config: FP8EngineConfig) -> dict[str, dict[str, Any]]:
    """Config class -> field -> value; dtypes by torch's name, as `torch.bfloat16`. No torch."""
    bf16_layers = config.bf16_layers_at_start > 0 or config.bf16_layers_at_end > 0
    transformer: dict[str, Any] = {
        "fp8": config.mode,
        "fp8_recipe": config.recipe,
        "fp8_param": config.fp8_params,
        "fp8_margin": config.margin,
        "fp8_amax_history_len": config.amax_history_len,
        "fp8_amax_compute_algo": config.amax_compute_algo,
        "fp8_wgrad": config.wgrad,
        "fp8_dot_product_attention": config.dot_product_attention,
        "fp8_multi_head_attention": config.multi_head_attention,
        "tp_only_amax_red": config.tp_only_amax_reduction,
        "first_last_layers_bf16": bf16_layers,
        "moe_router_dtype": config.router_dtype,
        "moe_router_padding_for_quantization": config.pad_routed_tokens,
    }
    if bf16_layers:
        transformer["num_layers_at_start_in_bf16"] = config.bf16_layers_at_start
        transformer["num_layers_at_end_in_bf16"] = config.bf16_layers_at_end
    # MXFP8 parameters are gathered in BF16, in memory that the gradients need not use at that time.
    reuse = config.recipe == "mxfp8" and config.fp8_params
    ddp = {
        "fp8_param_gather": config.fp8_params,
        "reuse_grad_buf_for_mxfp8_param_ag": reuse,
        "grad_reduce_in_fp32": config.grad_dtype == "float32",
    }
    optimizer = {
        "fp8_recipe": config.recipe,
        "reuse_grad_buf_for_mxfp8_param_ag": reuse,
        "use_precision_aware_optimizer": config.precision_aware,
        # Remainders complete a BF16 parameter; an FP8 one lacks more bits than they hold.
        "store_param_remainders": not config.fp8_params,
        "main_grads_dtype": f"torch.{config.grad_dtype if config.precision_aware else 'float32'}",
        "main_params_dtype": f"torch.{_TORCH_DTYPES[config.master_dtype]}",
        "exp_avg_dtype": f"torch.{_TORCH_DTYPES[config.exp_avg_dtype]}",
        "exp_avg_sq_dtype": f"torch.{_TORCH_DTYPES[config.exp_avg_sq_dtype]}",
    }
    return {TRANSFORMER: transformer, DDP: ddp, OPTIMIZER: optimizer}


def apply_to_megatron(
    config: FP8EngineConfig,
    transformer_config: Any,
    ddp_config: Any,
    optimizer_config: Any,
    *,
    environment: Environment | None = None,
) -> list[Change]:
    """Set all three configs in place, rerun Megatron's own checks, and say what changed. Idempotent.

    Call it in every trainer process, after the configs are made and before model and optimizer are.
    transformer_config may be a Megatron-Bridge provider (a subclass; `finalize` is called where there is
    one). environment: by default, this process's.

    Raises ConfigError, and leaves all three as they were, if the config cannot run here, the configs hold
    something that excludes it, or Megatron refuses.
    """
    check_environment(config, environment or Environment.here())
    made = {TRANSFORMER: transformer_config, DDP: ddp_config, OPTIMIZER: optimizer_config}
    _check_conflicts(config, transformer_config, ddp_config, optimizer_config)
    wanted = {name: _torch_values(values) for name, values in megatron_fields(config).items()}
    _fit_gather(wanted, ddp_config)
    missing = [
        f"{name}.{field}" for name, values in wanted.items() for field in values if not hasattr(made[name], field)
    ]
    if missing:
        raise ConfigError(f"this Megatron-Core has no {', '.join(missing)}; use 0.16 or newer")
    before = {name: dict(vars(each)) for name, each in made.items()}
    try:
        for name, each in made.items():
            for field, value in wanted[name].items():
                setattr(each, field, value)
            _validate(name, each)
    except ConfigError:
        for name, each in made.items():
            vars(each).clear()
            vars(each).update(before[name])
        raise
    return [
        Change(name, field, before[name].get(field), value)
        for name, each in made.items()
        for field, value in vars(each).items()
        if field not in before[name] or not _same(before[name][field], value)
    ]


def _fit_gather(wanted: dict[str, dict[str, Any]], ddp: Any) -> None:
    """How MXFP8 parameters are gathered depends on the trainer's own choice: Megatron-FSDP has other memory for
    it, and the optimizer must know whether the gather waits for the next forward."""
    reuse = "reuse_grad_buf_for_mxfp8_param_ag"
    if ddp.use_megatron_fsdp:
        wanted[DDP][reuse] = wanted[OPTIMIZER][reuse] = False
    if wanted[OPTIMIZER][reuse]:
        wanted[OPTIMIZER]["overlap_param_gather"] = ddp.overlap_param_gather


def _validate(name: str, each: Any) -> None:
    """Megatron's own checks; a Megatron-Bridge config defers them to `finalize`."""
    try:
        (each.finalize if hasattr(each, "finalize") else each.__post_init__)()
    except (ValueError, AssertionError, RuntimeError, NotImplementedError) as err:
        raise ConfigError(f"Megatron refuses {name} with these FP8 settings: {err}") from err


def _check_conflicts(config: FP8EngineConfig, transformer: Any, ddp: Any, optimizer: Any) -> None:
    """What the trainer's own settings exclude, and Megatron says late, vaguely or not at all."""

    def refuse(wrong: bool, message: str) -> None:
        if wrong:
            raise ConfigError(message)

    refuse(bool(getattr(transformer, "fp4", None)), "TransformerConfig.fp4 is set, and excludes FP8; set fp4=None")
    sharded = ddp.use_distributed_optimizer or ddp.use_megatron_fsdp
    refuse(
        config.fp8_params and not sharded,
        "fp8_params without the distributed optimizer: nobody would cast the masters to FP8; set "
        "use_distributed_optimizer=True in DistributedDataParallelConfig and OptimizerConfig",
    )
    refuse(
        ddp.use_distributed_optimizer != optimizer.use_distributed_optimizer,
        "use_distributed_optimizer differs between DistributedDataParallelConfig and OptimizerConfig; set both alike",
    )
    refuse(
        config.fp8_params and not optimizer.bf16,
        "fp8_params needs fp32 masters beside them: set bf16=True (and params_dtype) in OptimizerConfig",
    )
    refuse(
        config.fp8_params and config.recipe != "delayed" and optimizer.optimizer_cpu_offload,
        f"fp8_params with recipe {config.recipe!r} and OptimizerConfig.optimizer_cpu_offload: Megatron casts such "
        "parameters on the GPU only; set optimizer_cpu_offload=False, or fp8_params=False",
    )
    refuse(
        config.precision_aware and (optimizer.optimizer != "adam" or not optimizer.use_distributed_optimizer),
        "master_dtype, exp_avg_dtype and exp_avg_sq_dtype other than float32 need OptimizerConfig optimizer='adam' "
        f"with use_distributed_optimizer=True; found {optimizer.optimizer!r}, {optimizer.use_distributed_optimizer}",
    )
    refuse(
        config.recipe == "mxfp8" and config.fp8_params and bool(optimizer.overlap_param_gather_with_optimizer_step),
        "recipe 'mxfp8' with fp8_params gathers parameters in the gradients' memory; set "
        "OptimizerConfig.overlap_param_gather_with_optimizer_step=False",
    )
    _check_layers(config, transformer)
    length = getattr(transformer, "seq_length", None)  # Megatron-Bridge providers have it
    if isinstance(length, int):
        check_tokens(
            length,
            config,
            tp=transformer.tensor_model_parallel_size,
            cp=transformer.context_parallel_size,
            sequence_parallel=bool(transformer.sequence_parallel),
        )


def _check_layers(config: FP8EngineConfig, transformer: Any) -> None:
    """Megatron compares each count with a pipeline stage; together they may still leave nothing to FP8."""
    kept = config.bf16_layers_at_start + config.bf16_layers_at_end
    if kept and kept >= transformer.num_layers:
        raise ConfigError(
            f"bf16_layers_at_start + bf16_layers_at_end is {kept}, the model has {transformer.num_layers} layers: "
            "none would be FP8; keep fewer in BF16"
        )


def _torch_values(values: dict[str, Any]) -> dict[str, Any]:
    import torch

    def value(name: Any) -> Any:
        known = isinstance(name, str) and name.startswith("torch.")
        return getattr(torch, name.removeprefix("torch.")) if known else name

    return {field: value(name) for field, name in values.items()}


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b)) or (isinstance(a, str) and a == b)
