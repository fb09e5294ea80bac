"""The served model against transformers' own, and its weights as the only source of truth."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from fp8bridge.errors import ConfigError, LayoutError, UnsupportedModelError
from fp8bridge.kernels import dequantize
from fp8bridge.rollout.config import ServeConfig, read_hf_config
from fp8bridge.rollout.layers import BlockFP8Linear
from fp8bridge.rollout.model import build_model
from fp8bridge.rollout.weights import SCALE_SUFFIX

from .rig import FP8_QWEN3, PROMPT, QUANT, QWEN3, greedy, make_manifest, reference

QWEN2_TIED = QWEN3 | {"model_type": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 3}
LLAMA = QWEN3 | {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
FAMILIES = {"qwen3": (QWEN3, Qwen3Config), "qwen2-tied": (QWEN2_TIED, Qwen2Config), "llama": (LLAMA, LlamaConfig)}
TOKENS = [*PROMPT, 99, 0, 23, 64, 5, 5]


def transformers_twin(config, config_class, model):
    """transformers' fp32 model holding the served weights, dequantized."""
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype")}
    twin = AutoModelForCausalLM.from_config(config_class(**plain), dtype=torch.float32).eval()
    tensors = model.weights.tensors
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        state[name] = tensor.float() if scale is None else dequantize(tensor, scale, (128, 128), torch.float32)
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    twin.tie_weights()
    return twin


@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_equals_transformers_with_the_dequantized_weights(family, quantized):
    config, config_class = FAMILIES[family]
    # The usual width of weights: log-probabilities of a few units, as real models have them.
    config = config | {"initializer_range": 0.02} | ({"quantization_config": QUANT} if quantized else {})
    model = build_model(config, seed=3)
    assert any(isinstance(m, BlockFP8Linear) for m in model._module.modules()) is quantized
    twin = transformers_twin(config, config_class, model)
    want = torch.log_softmax(twin(torch.tensor([TOKENS])).logits[0], dim=-1)
    got = torch.log_softmax(model.logits(TOKENS, model.new_cache(), keep=len(TOKENS)), dim=-1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    # The same through the KV cache, token by token.
    cache = model.new_cache()
    rows = [model.logits([t], cache, keep=1)[0] for t in TOKENS]
    torch.testing.assert_close(torch.log_softmax(torch.stack(rows), dim=-1), want, atol=1e-5, rtol=0)


def test_tied_embeddings_are_one_tensor():
    model = build_model(QWEN2_TIED | {"quantization_config": QUANT}, seed=1)
    assert "lm_head.weight" not in model.weights.tensors
    assert "model.layers.0.self_attn.q_proj.bias" in model.weights.tensors


def test_quantized_layers_hold_codes_and_scales_and_nothing_else():
    model = reference(1)
    assert not list(model._module.parameters())
    buffers = [name for name, _ in model._module.named_buffers()]
    assert all("inv_freq" in name for name in buffers)
    tensors = model.weights.tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 2)
    assert tensors["model.norm.weight"].dtype == torch.bfloat16


def test_after_a_commit_every_layer_computes_from_the_new_tensors():
    old, new = reference(1), reference(2)
    manifest = make_manifest(new.weights.tensors, old.weights.layout)
    old.weights.begin(manifest)
    for bucket in manifest.buckets:
        parts = [new.weights.tensors[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries]
        payload = torch.cat(parts).clone()
        from fp8bridge.staging import bucket_checksums

        old.weights.stage(bucket.index, payload, bucket_checksums(bucket, payload))
    assert greedy(old, PROMPT, 6) == greedy(reference(1), PROMPT, 6), "staging must not show"
    old.weights.commit()
    assert torch.equal(
        old.logits(TOKENS, old.new_cache(), keep=len(TOKENS)), new.logits(TOKENS, new.new_cache(), keep=len(TOKENS))
    )


def test_every_single_tensor_matters():
    """No layer can have kept an old tensor: changing any one in the store changes the logits."""
    model = reference(1)
    before = model.logits(TOKENS, model.new_cache(), keep=len(TOKENS))
    for name, tensor in list(model.weights.tensors.items()):
        changed = tensor.clone()
        changed.view(-1)[:] = (tensor.float().flip(-1) * 0.5 + 0.1).to(tensor.dtype).view(-1)
        model.weights.tensors = model.weights.tensors | {name: changed}
        after = model.logits(TOKENS, model.new_cache(), keep=len(TOKENS))
        assert not torch.equal(before, after), name
        model.weights.tensors = model.weights.tensors | {name: tensor}
    assert torch.equal(before, model.logits(TOKENS, model.new_cache(), keep=len(TOKENS)))


def test_random_weights_depend_on_seed_and_name_alone():
    a, b, other = reference(4), reference(4), reference(5)
    assert all(torch.equal(t.view(torch.uint8), b.weights.tensors[n].view(torch.uint8)) for n, t in _flat(a))
    assert any(not torch.equal(t.view(torch.uint8), other.weights.tensors[n].view(torch.uint8)) for n, t in _flat(a))
    deeper = build_model(FP8_QWEN3 | {"num_hidden_layers": 3}, seed=4).weights.tensors
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(deeper[name].view(torch.uint8), a.weights.tensors[name].view(torch.uint8))


def _flat(model):
    return model.weights.tensors.items()


@pytest.mark.parametrize("files", [1, 2])
def test_a_checkpoint_folder_is_loaded_bit_for_bit(tmp_path, files):
    tensors = {n: t.contiguous() for n, t in reference(6).weights.tensors.items()}
    names = sorted(tensors)
    parts = [names] if files == 1 else [names[::2], names[1::2]]
    for i, part in enumerate(parts):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{i}.safetensors")
    if files == 2:
        index = {"weight_map": {n: f"model-{i}.safetensors" for i, part in enumerate(parts) for n in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"stranger": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    loaded = build_model(FP8_QWEN3, weights=tmp_path).weights.tensors
    assert sorted(loaded) == names
    assert all(torch.equal(loaded[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in names)


def test_high_precision_weights_are_quantized_as_the_config_says():
    wide = build_model(QWEN3, seed=6).weights.tensors
    model = build_model(FP8_QWEN3, tensors={n: t.float() for n, t in wide.items()})
    # Random weights are drawn before they are quantized, so this is the same model.
    want = reference(6).weights.tensors
    assert all(torch.equal(t.view(torch.uint8), want[n].view(torch.uint8)) for n, t in model.weights.tensors.items())


def test_ue8m0_servers_start_with_powers_of_two():
    config = QWEN3 | {"quantization_config": QUANT | {"scale_fmt": "ue8m0"}}
    scales = [t for n, t in build_model(config).weights.tensors.items() if n.endswith(SCALE_SUFFIX)]
    assert scales
    assert all(torch.equal(torch.frexp(s).mantissa, torch.full_like(s, 0.5)) for s in scales)


def test_ignored_layers_stay_in_high_precision():
    quant = QUANT | {"modules_to_not_convert": ["model.layers.0.mlp"]}
    tensors = build_model(QWEN3 | {"quantization_config": quant}).weights.tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def _without(name):
    return lambda t: {n: v for n, v in t.items() if n != name}


BAD_CHECKPOINTS = {
    "missing": (_without("model.norm.weight"), "model.norm.weight is missing"),
    "shape": (lambda t: t | {"model.norm.weight": torch.ones(3)}, r"\[3\], the config says \[144\]"),
    "stranger": (lambda t: t | {"visual.weight": torch.ones(3)}, "visual.weight is not part of this model"),
    "no scale": (
        _without("model.layers.0.mlp.up_proj.weight_scale_inv"),
        "up_proj.weight_scale_inv is missing, expected torch.float32",
    ),
    "bf16 scale": (
        lambda t: t | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2).bfloat16()},
        "torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(case):
    change, words = BAD_CHECKPOINTS[case]
    with pytest.raises(ConfigError, match=words):
        build_model(FP8_QWEN3, tensors=change(dict(reference(1).weights.tensors)))


def test_fp8_weights_into_a_bf16_model_are_refused():
    with pytest.raises(ConfigError, match="FP8 in the checkpoint and not in its quantization_config"):
        build_model(QWEN3, tensors=dict(reference(1).weights.tensors))


def test_what_cannot_be_served_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="llama, qwen2, qwen3"):
        build_model(QWEN3 | {"model_type": "mamba"})
    with pytest.raises(LayoutError, match="weight_block_size"):
        build_model(QWEN3 | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        build_model(QWEN3, weights=tmp_path)
    with pytest.raises(ConfigError, match="not both"):
        build_model(QWEN3, weights=tmp_path, tensors={})


def test_configs_are_read_from_files_folders_and_dicts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_hf_config(tmp_path) == read_hf_config(tmp_path / "config.json") == read_hf_config(QWEN3) == QWEN3
    with pytest.raises(ConfigError, match="no Hugging Face config"):
        read_hf_config(tmp_path / "nowhere")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_hf_config(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        read_hf_config(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("field", "value"), [("hf_config", {}), ("threads", 0), ("max_running_requests", True), ("weight_version", "")]
)
def test_bad_server_configs_name_their_field(field, value):
    with pytest.raises(ConfigError, match=field):
        ServeConfig(**({"hf_config": QWEN3} | {field: value}))


def test_keys_do_not_show_in_the_config_text():
    assert "secret" not in repr(ServeConfig(hf_config=QWEN3, api_key="secret-a", admin_api_key="secret-b"))
