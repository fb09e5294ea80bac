"""Folders to FP8 and back, without a trainer: the reference quantization, tensor by tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8bridge.config import RULES
from fp8bridge.engine.checkpoint import convert_checkpoint
from fp8bridge.engine.weight_files import WeightFiles
from fp8bridge.errors import ConfigError, NonFiniteError
from fp8bridge.kernels import reference

from ..support import assert_same_bits, expected_wire, tiny_model

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


def write(folder, tensors, config=CONFIG, files=2):
    folder.mkdir()
    names = sorted(tensors)
    parts = {f"part-{i}.safetensors": names[i::files] for i in range(files)}
    for file, held in parts.items():
        save_file({n: tensors[n].contiguous() for n in held}, folder / file)
    weight_map = {n: file for file, held in parts.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read(folder):
    files = WeightFiles(folder)
    return {n: files.read(n).reshape(s.shape) for n, s in files.tensors.items()}


@pytest.fixture
def model():
    return tiny_model() | {"lm_head.weight": torch.randn(101, 192).bfloat16()}


@pytest.mark.parametrize("rule", RULES)
def test_fp8_is_the_reference_quantization_of_what_servers_hold_in_fp8(tmp_path, model, rule):
    source = write(tmp_path / "bf16", model)
    done = convert_checkpoint(source, tmp_path / "fp8", "fp8", rule=rule)
    assert_same_bits(read(tmp_path / "fp8"), expected_wire(model, rule=rule))
    quant = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert quant["weight_block_size"] == [128, 128]
    assert quant.get("scale_fmt") == ("ue8m0" if rule == "ue8m0" else None)
    assert (tmp_path / "fp8" / "tokenizer.json").exists()
    assert len(done.changed) == 8
    assert set(done.changed) | set(done.copied) == set(model)
    assert done.nbytes_after == sum(t.nbytes for t in read(tmp_path / "fp8").values())


def test_a_weight_and_its_scale_are_in_the_weights_file_aligned(tmp_path, model):
    convert_checkpoint(write(tmp_path / "bf16", model), tmp_path / "fp8", "fp8")
    files = WeightFiles(tmp_path / "fp8")
    for name, stored in files.tensors.items():
        if name.endswith("_scale_inv"):
            assert stored.file == files.tensors[name.removesuffix("_scale_inv")].file
    for file in {s.file for s in files.tensors.values()}:
        load_file(tmp_path / "fp8" / file)


def test_back_to_bf16_is_one_rounding_of_code_times_scale(tmp_path, model):
    wire = expected_wire(model, rule="sglang")
    quantized = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    done = convert_checkpoint(write(tmp_path / "fp8", wire, quantized), tmp_path / "bf16", "bf16")
    expected = {
        n: reference.dequantize(t, wire[f"{n}_scale_inv"], dtype=torch.bfloat16)
        if t.dtype == torch.float8_e4m3fn
        else t
        for n, t in wire.items()
        if not n.endswith("_scale_inv")
    }
    assert_same_bits(read(tmp_path / "bf16"), expected)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == CONFIG
    assert done.rule is None


def test_power_of_two_scales_survive_there_and_back(tmp_path, model):
    convert_checkpoint(write(tmp_path / "bf16", model), tmp_path / "fp8", "fp8", rule="te_pow2")
    convert_checkpoint(tmp_path / "fp8", tmp_path / "again", "bf16")
    convert_checkpoint(tmp_path / "again", tmp_path / "twice", "fp8", rule="te_pow2")
    first, second = read(tmp_path / "fp8"), read(tmp_path / "twice")
    for name, codes in first.items():
        if codes.dtype == torch.float8_e4m3fn:
            values = [reference.dequantize(f[name], f[f"{name}_scale_inv"]) for f in (first, second)]
            assert torch.equal(*values), name


def test_layers_that_the_config_leaves_out_stay_as_they_are(tmp_path, model):
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["layers.0.mlp"]}
    wire = expected_wire(model)
    mixed = {n: t for n, t in wire.items() if ".0.mlp" not in n} | {n: t for n, t in model.items() if ".0.mlp" in n}
    source = write(tmp_path / "fp8", mixed, CONFIG | {"quantization_config": quant})
    done = convert_checkpoint(source, tmp_path / "bf16", "bf16")
    assert {"model.layers.0.mlp.gate_proj.weight", "model.norm.weight"} <= set(done.copied)


@pytest.mark.parametrize(
    ("config", "to", "says"),
    [
        (CONFIG, "bf16", "is unquantized bfloat16 already; nothing to convert to bf16"),
        (
            CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "fp8",
            "is FP8 e4m3, 128x128 blocks, float32 scales, rest bfloat16 already",
        ),
    ],
)
def test_what_is_converted_already_is_refused(tmp_path, model, config, to, says):
    source = write(tmp_path / "source", model, config)
    with pytest.raises(ConfigError, match=says):
        convert_checkpoint(source, tmp_path / "out", to)


def test_nan_is_refused_by_name_and_leaves_nothing(tmp_path, model):
    model["model.layers.1.mlp.up_proj.weight"][5, 7] = torch.nan
    source = write(tmp_path / "source", model)
    with pytest.raises(NonFiniteError, match="model.layers.1.mlp.up_proj.weight .* has NaN or Inf"):
        convert_checkpoint(source, tmp_path / "out", "fp8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_codes_without_scales_are_refused(tmp_path, model):
    wire = {n: t for n, t in expected_wire(model).items() if not n.endswith("_scale_inv")}
    quantized = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ConfigError, match="is FP8 without .*_scale_inv"):
        convert_checkpoint(write(tmp_path / "a", wire, quantized), tmp_path / "out", "bf16")
    with pytest.raises(ConfigError, match="is FP8 already, although config.json"):
        convert_checkpoint(write(tmp_path / "b", wire, CONFIG), tmp_path / "out", "fp8")
