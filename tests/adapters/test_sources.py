"""Sources on stand-in modules: what they accept, and what they refuse and how they say it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8bridge.adapters.hf_config import load_hf_config
from fp8bridge.adapters.megatron import MegatronSource
from fp8bridge.adapters.megatron_families import family_of
from fp8bridge.adapters.megatron_layout import Place, megatron_shards, slots_of
from fp8bridge.adapters.megatron_names import dims_of
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, UnsupportedModelError
from fp8bridge.types import WeightSource

from .test_megatron_layout import SMALL

ALONE = {"place": Place()}


class Chunk(nn.Module):
    """A GPTModel's outside: dotted parameters, layers with global numbers, first and last."""

    def __init__(self, config=SMALL, layers=(0, 1, 2, 3), *, first=True, last=True, spec="te", tp=1):
        super().__init__()
        self.config, family = config, family_of(config)
        self.decoder, self.pre_process, self.post_process = nn.Module(), first, last
        self.decoder.layers = nn.ModuleList(nn.Module() for _ in layers)
        for layer, number in zip(self.decoder.layers, layers, strict=True):
            layer.layer_number = number + 1
        for slot in slots_of(family, dims_of(config, family), enumerate(layers), first=first, last=last):
            self.add(slot.te_name if spec == "te" else slot.local_name, *slot.local_shapes(tp)[-1])

    def add(self, name, *shape):
        *path, leaf = name.split(".")
        module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.randn(*shape)))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("spec", ["te", "local"])
def test_both_specs_describe_what_the_plan_computes(spec):
    source = MegatronSource(Chunk(spec=spec), SMALL, rank=0, **ALONE)
    metas, shards = source.describe()
    expected = megatron_shards(SMALL, tp=1, dtype="float32", spec=spec)
    assert (set(metas), set(shards)) == (set(expected[0]), set(expected[1]))
    assert isinstance(source, WeightSource)


def test_layer_ids_come_from_the_layers_not_from_the_stage():
    second = Chunk(layers=[3], first=False)
    _, shards = MegatronSource(second, SMALL, rank=7, **ALONE).describe()
    assert {s.tensor.split(".")[2] for s in shards if ".layers." in s.tensor} == {"3"}
    assert {s.rank for s in shards} == {7}


def test_wrappers_are_looked_through_and_reads_are_live_views():
    chunk = Chunk()
    source = MegatronSource([Wrapper(Wrapper(chunk))], SMALL, **ALONE)
    norm = source.read("0:decoder.final_layernorm.weight")
    chunk.decoder.final_layernorm.weight.data.fill_(3.0)
    assert norm.shape == (24, 1)
    assert not norm.requires_grad
    assert (norm == 3.0).all()


def test_unknown_parameters_are_listed_all_at_once():
    chunk = Chunk()
    chunk.add("decoder.layers.0.self_attention.A_log", 4)
    chunk.add("vision_model.blocks.0.attn.qkv.weight", 4, 4)
    with pytest.raises(UnsupportedModelError) as error:
        MegatronSource(chunk, SMALL, rank=5, **ALONE).describe()
    for word in ("rank 5", "0:decoder.layers.0.self_attention.A_log", "0:vision_model.blocks.0.attn.qkv.weight"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"intermediate_size": 40},
            r"rank 2: 0:decoder.layers.0.mlp.linear_fc1.weight has shape \(40, 24\).*\(80, 24\)",
        ),
        ({"vocab_size": 300}, r"word_embeddings.weight has shape \(128, 24\).*another model"),
        ({"num_hidden_layers": 5}, r"holds layers \[0, 1, 2, 3\] and the last stage.*num_hidden_layers 5"),
        ({"num_hidden_layers": 3}, r"holds layers \[0, 1, 2, 3\], but.*num_hidden_layers 3"),
        ({"attention_bias": True}, r"does not have: .*layers.0.self_attention.linear_qkv.bias.*layers.3"),
    ],
)
def test_another_models_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        MegatronSource(Chunk(), SMALL | config, rank=2, **ALONE).describe()


def test_a_model_of_another_family_or_with_its_own_head_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"qwen2 table.*q_layernorm.weight"):
        MegatronSource(Chunk(), SMALL | {"model_type": "qwen2"}, **ALONE).describe()
    # The config says tied, the model has an output layer that is no copy of the embedding.
    with pytest.raises(UnsupportedModelError, match=r"0:output_layer.weight"):
        MegatronSource(Chunk(), SMALL | {"tie_word_embeddings": True}, **ALONE).describe()


def test_fp8_parameters_of_other_recipes_are_refused_by_class():
    class Float8Tensor(torch.Tensor):
        pass

    chunk = Chunk()
    fc2 = chunk.decoder.layers[1].mlp.linear_fc2
    fc2.weight = nn.Parameter(fc2.weight.data.as_subclass(Float8Tensor))
    with pytest.raises(
        UnsupportedModelError, match=r"layers.1.mlp.linear_fc2.weight cannot be read: a Float8Tensor, with one scale"
    ):
        MegatronSource(chunk, SMALL, **ALONE).describe()


def test_something_else_than_gpt_model_chunks_is_refused():
    with pytest.raises(ConfigError, match="a model chunk is a Linear without decoder"):
        MegatronSource(nn.Linear(2, 2), SMALL, **ALONE)


@pytest.mark.parametrize("overlap", [True, False])
def test_pending_gathers_are_forced_only_where_the_optimizer_left_some(overlap):
    calls = []
    ddp = Wrapper(Chunk())
    ddp.ddp_config = SimpleNamespace(overlap_param_gather=overlap)
    ddp.start_param_sync = lambda force_sync: calls.append(force_sync)
    MegatronSource(ddp, SMALL, **ALONE).before_read()
    assert calls == ([True] if overlap else [])


def test_hf_config_from_a_folder_a_file_and_a_dict(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    assert load_hf_config(tmp_path) == load_hf_config(str(path)) == load_hf_config(SMALL) == SMALL
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        load_hf_config(tmp_path / "missing")
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="JSON"):
            load_hf_config(tmp_path)


def test_state_dict_source_strips_compile_prefixes_and_ties():
    tensors = {
        "_orig_mod.model.embed_tokens.weight": torch.randn(5, 3),
        "_orig_mod.lm_head.weight": torch.randn(5, 3),
        "model.norm.weight": torch.randn(3),
    }
    source = StateDictSource(tensors, {"tie_word_embeddings": True}, rank=2)
    metas, shards = source.describe()
    assert [meta.name for meta in metas] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert [(s.rank, s.rows, s.cols) for s in shards] == [(2, 5, 3), (2, 3, 1)]
    assert torch.equal(source.read("model.norm.weight")[:, 0], tensors["model.norm.weight"])
    assert isinstance(source, WeightSource)


def test_state_dict_source_sees_replaced_parameters():
    module = nn.Linear(3, 2)
    source = StateDictSource(module, {})
    module.weight = nn.Parameter(torch.ones(2, 3))
    source.before_read()
    assert torch.equal(source.read("weight"), torch.ones(2, 3))


def test_adapters_import_without_megatron():
    script = (
        "import sys; sys.modules['megatron'] = None\n"
        "import fp8bridge.adapters, fp8bridge.adapters.megatron, fp8bridge.adapters.state_dict\n"
        "import fp8bridge.demo.training, fp8bridge.adapters.megatron_layout\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    pure = "import sys, fp8bridge.adapters.megatron_layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", pure], check=True, timeout=60)
