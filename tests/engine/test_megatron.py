"""The config on Megatron-Core's real config classes, and what Transformer Engine and the optimizer make of it."""

import warnings

import pytest
import torch
import torch.multiprocessing as mp

from fp8bridge.engine import Environment, FP8EngineConfig, apply_to_megatron, bytes_per_parameter
from fp8bridge.engine.megatron import megatron_fields
from fp8bridge.errors import ConfigError
from tests.ports import free_port

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see README, Install")

from ..adapters import te_stub
from . import worlds

pytestmark = pytest.mark.filterwarnings("ignore")
needs_te = pytest.mark.skipif(not te_stub.TE_DIR.is_dir(), reason="no Transformer Engine folder; `make test` makes it")
HERE = Environment(te_version="2.20.2")


def apply(config, made):
    return apply_to_megatron(config, *made, environment=HERE)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "found.pt"
    mp.spawn(worlds.configs, (str(path),))
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "found.pt"
    port = free_port()
    mp.spawn(worlds.memory, (port, str(path)))
    return torch.load(path, weights_only=False)


ODD = FP8EngineConfig(
    mode="hybrid",
    recipe="delayed",
    fp8_params=True,
    margin=3,
    amax_history_len=7,
    amax_compute_algo="max",
    wgrad=False,
    dot_product_attention=True,
    multi_head_attention=True,
    tp_only_amax_reduction=True,
    router_dtype="fp64",
    pad_routed_tokens=True,
)


@pytest.mark.parametrize(
    "config",
    [ODD, FP8EngineConfig(bf16_layers_at_start=2, bf16_layers_at_end=1, grad_dtype="bfloat16")],
    ids=["delayed", "blockwise"],
)
def test_every_field_lands_and_a_second_time_changes_nothing(config):
    made = worlds.made(moe_token_dispatcher_type="alltoall")
    before = [dict(vars(c)) for c in made]
    changes = apply(config, made)
    for each, values in zip(made, megatron_fields(config).values(), strict=True):
        for field, value in values.items():
            assert str(getattr(each, field)) == str(value), field
    told = {(c.config, c.field): (c.before, c.after) for c in changes}
    for each, old in zip(made, before, strict=True):
        for field, value in vars(each).items():
            if old[field] is not value and old[field] != value:
                assert told.pop((type(each).__name__, field)) == (old[field], value)
    assert not told, "a change was told that did not happen"
    assert apply(config, made) == []


def test_one_flag_drives_all_three():
    made = worlds.made()
    apply(FP8EngineConfig.blackwell_mxfp8(), made)
    transformer, ddp, optimizer = made
    assert transformer.fp8_param
    assert ddp.fp8_param_gather
    assert ddp.reuse_grad_buf_for_mxfp8_param_ag
    assert optimizer.reuse_grad_buf_for_mxfp8_param_ag
    assert optimizer.fp8_recipe == transformer.fp8_recipe == "mxfp8"
    apply(FP8EngineConfig(), made)
    assert not transformer.fp8_param
    assert not ddp.fp8_param_gather
    assert not optimizer.reuse_grad_buf_for_mxfp8_param_ag


def test_mxfp8_parameters_are_gathered_as_the_trainer_gathers():
    made = worlds.made()
    made[1].overlap_param_gather = True
    apply(FP8EngineConfig.blackwell_mxfp8(), made)
    assert made[2].overlap_param_gather
    made = worlds.made()
    made[1].use_megatron_fsdp = True
    apply(FP8EngineConfig.blackwell_mxfp8(), made)
    assert made[1].fp8_param_gather
    assert not made[1].reuse_grad_buf_for_mxfp8_param_ag
    assert not made[2].reuse_grad_buf_for_mxfp8_param_ag


@pytest.mark.parametrize(
    ("config", "attributes", "says"),
    [
        (FP8EngineConfig(), {"t.fp4": "e2m1"}, "fp4 is set, and excludes FP8"),
        (
            FP8EngineConfig(fp8_params=True),
            {"d.use_distributed_optimizer": False, "o.use_distributed_optimizer": False},
            "fp8_params without the distributed optimizer",
        ),
        (FP8EngineConfig(), {"o.use_distributed_optimizer": False}, "differs between DistributedDataParallelConfig"),
        (FP8EngineConfig(fp8_params=True), {"o.bf16": False}, "set bf16=True"),
        (FP8EngineConfig(fp8_params=True), {"o.optimizer_cpu_offload": True}, "set optimizer_cpu_offload=False"),
        (FP8EngineConfig(exp_avg_dtype="fp8"), {"o.optimizer": "sgd"}, "need OptimizerConfig optimizer='adam'"),
        (
            FP8EngineConfig.blackwell_mxfp8(),
            {"o.overlap_param_gather_with_optimizer_step": True},
            "overlap_param_gather_with_optimizer_step=False",
        ),
        (FP8EngineConfig(bf16_layers_at_start=2, bf16_layers_at_end=2), {}, "is 4, the model has 4 layers"),
        (
            FP8EngineConfig(bf16_layers_at_start=3),
            {"t.pipeline_model_parallel_size": 2, "t.pipeline_dtype": torch.bfloat16},
            "Megatron refuses TransformerConfig.*num_layers_at_start_in_bf16 \\(3\\)",
        ),
        (FP8EngineConfig(), {"t.seq_length": 100}, "100 tokens.*pad to 112"),
        (
            FP8EngineConfig(),
            {"t.seq_length": 128, "t.tensor_model_parallel_size": 2, "t.sequence_parallel": True},
            "128 tokens.*pad to 256",
        ),
        (
            FP8EngineConfig(pad_routed_tokens=True),
            {"t.moe_token_dispatcher_type": "allgather"},
            "Megatron refuses TransformerConfig.*does not support",
        ),
    ],
)
def test_what_excludes_it_is_refused_and_nothing_is_changed(config, attributes, says):
    made = worlds.made()
    for name, value in attributes.items():
        setattr(made["tdo".index(name[0])], name[2:], value)
    before = [dict(vars(c)) for c in made]
    with pytest.raises(ConfigError, match=says):
        apply(config, made)
    assert [vars(c) for c in made] == before


def test_the_environment_is_checked_first():
    made = worlds.made()
    with pytest.raises(ConfigError, match="not installed"):
        apply_to_megatron(FP8EngineConfig(), *made, environment=Environment(te_version=None))


def test_bridge_providers_are_finalized_by_their_own_method():
    """Megatron-Bridge's provider is a subclass that defers Megatron's checks to `finalize`."""
    from megatron.core.transformer import TransformerConfig

    class Provider(TransformerConfig):
        finalized = 0

        def __post_init__(self):
            pass

        def finalize(self):
            type(self).finalized += 1
            super().__post_init__()

    _, ddp, optimizer = worlds.made()
    provider = Provider(**worlds.SMALL, bf16=True, params_dtype=torch.bfloat16)
    provider.seq_length = 4096
    apply(FP8EngineConfig.hopper_blockwise(), (provider, ddp, optimizer))
    assert provider.fp8_param
    assert Provider.finalized == 1
    provider.pipeline_model_parallel_size = 4
    with pytest.raises(ConfigError, match="Megatron refuses"):
        apply(FP8EngineConfig(bf16_layers_at_start=2), (provider, ddp, optimizer))


@needs_te
@pytest.mark.parametrize(
    ("name", "kind", "fp8_format"),
    [
        ("blockwise", "Float8BlockScaling", "HYBRID"),
        ("tensorwise", "Float8CurrentScaling", "E4M3"),
        ("delayed", "DelayedScaling", "HYBRID"),
        ("mxfp8", "MXFP8BlockScaling", "E4M3"),
    ],
)
def test_transformer_engine_gets_the_recipe(configs, name, kind, fp8_format):
    recipe = configs["recipes"][name]
    assert kind in recipe["class"]
    assert recipe["format"] == fp8_format
    if name == "delayed":
        wanted = {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "max", "fp8_dpa": True, "fp8_mha": True}
        assert recipe["fields"] | wanted == recipe["fields"]
    if name == "tensorwise":
        assert recipe["fields"]["fp8_dpa"]
    if name == "blockwise":
        assert recipe["power of two"]


@needs_te
def test_presets_apply_with_the_real_optimizer_checks(configs):
    for name, found in configs["presets"].items():
        assert found["changes"], name
        assert found["again"] == [], name
    optimizer = configs["presets"]["fp8lm_o2"]["vars"][2]
    assert optimizer["main_params_dtype"] == torch.float16
    assert optimizer["exp_avg_dtype"] == torch.uint8
    assert optimizer["exp_avg_sq_dtype"] == torch.float16
    assert configs["rerun"] == [True, False], "Megatron's own check did not run again"


@needs_te
def test_fp32_scales_after_the_import_are_refused(configs):
    assert "imported with power_of_two scales" in configs["too late"]


@needs_te
def test_what_this_transformer_engine_would_ignore_is_refused(configs):
    assert "no override_linear_precision any more" in configs["wgrad"]


@needs_te
@pytest.mark.parametrize("name", ["hopper_blockwise", "fp8lm_o1", "fp8lm_o2", "fp8lm_o3"])
def test_bytes_per_parameter_are_what_megatron_allocates(memory, name):
    """Within what buckets and scale rows are padded by. The FP8 copies that a BF16 weight gets in its forward
    pass need a GPU: benchmarks/engine_memory.py measures those."""
    found, config = memory[name], FP8EngineConfig.preset(name)
    groups = {True: found["counts"]["linear"], False: found["counts"]["other"]}

    def predicted(*names):
        parts = [(p, n) for linear, n in groups.items() for p in bytes_per_parameter(config, linear=linear)]
        return sum(p.nbytes * n for p, n in parts if p.what in names)

    weights = ("weight", "FP8 copies", "scales") if config.fp8_params else ("weight",)
    assert found["weights"] == pytest.approx(predicted(*weights), rel=1e-3)
    assert found["grads"] == pytest.approx(predicted("gradient"), rel=1e-2)
    assert found["states"]["master_param"] == predicted("master")
    assert found["states"]["exp_avg"] == predicted("first moment")
    assert found["states"]["exp_avg_sq"] == predicted("second moment")


@needs_te
def test_masters_that_megatron_cannot_reload_are_an_error(memory):
    told = {name: row["reloaded"] for name, row in memory.items()}
    assert "holds FP16 masters where Megatron cannot reload them" in told.pop("fp8lm_o2")
    assert set(told.values()) == {""}


def test_warnings_are_not_needed_to_see_a_problem():
    """What is refused is an error: a valid config makes Megatron's checks say nothing about FP8."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        apply(FP8EngineConfig.blackwell_mxfp8(), worlds.made())
    assert not [w for w in told if "fp8" in str(w.message).lower()]
