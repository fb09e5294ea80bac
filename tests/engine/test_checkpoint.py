"""Hugging Face folders into Megatron models and back: bytes where bytes can be kept, the stated rule elsewhere."""

import json

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from fp8bridge import ServerLayout
from fp8bridge.adapters.megatron_layout import megatron_shards
from fp8bridge.kernels import reference
from tests.ports import free_port

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see README, Install")

from ..adapters import te_stub, te_world
from ..support import QUANT
from . import checkpoint_world as world

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not te_stub.TE_DIR.is_dir(), reason="no Transformer Engine folder; `make test` makes it"),
]
EXPERTS = pytest.param(
    "ep2", marks=pytest.mark.skipif(not world.HAS_EXPERTS, reason="no adapter table of a mixture-of-experts model yet")
)


def draw(config):
    """HF name -> tensor, by the shapes that the model's table gives."""
    generator = torch.Generator().manual_seed(5)
    metas, _ = megatron_shards(config, tp=1, pp=1, vpp=1, dp=1, dtype="bfloat16")
    return {
        m.name: (torch.randn(m.shape, generator=generator) * 0.05).to(getattr(torch, m.dtype))
        for m in sorted(metas, key=lambda m: m.name)
    }


def in_fp8(tensors, rule):
    """With the naive reference: codes and fp32 scales of what servers hold in FP8."""
    layout = ServerLayout.from_hf_config({"quantization_config": QUANT})
    found = {}
    for name, tensor in tensors.items():
        if layout._why_not_quantized(_meta(name, tensor)) is None:
            found[name], found[f"{name}_scale_inv"] = reference.quantize(tensor, rule)
        else:
            found[name] = tensor
    return found


def _meta(name, tensor):
    from fp8bridge import TensorMeta

    return TensorMeta(name, tuple(tensor.shape), "bfloat16")


def write(folder, tensors, config):
    """Two files and an index, by safetensors' own writer; scales are not always beside their weights."""
    folder.mkdir()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({n: tensors[n].contiguous() for n in held}, folder / file)
    weight_map = {n: file for file, held in halves.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def read(folder):
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints to read. Scales are fp32 (`sglang`'s), which no Transformer Engine would have made: only
    copying keeps them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    quantized = {"quantization_config": QUANT}
    models = {"aligned": te_world.ALIGNED, "heads": te_world.HEADS_OF_64, "half": world.HALF}
    if world.HAS_EXPERTS:
        models["moe"] = te_world.MOE
    for name, config in models.items():
        tensors = draw(config)
        write(folder / f"{name}_bf16", tensors, config)
        write(folder / f"{name}_fp8", in_fp8(tensors, "sglang"), config | quantized)
    pow2 = in_fp8(draw(te_world.ALIGNED), "te_pow2")
    write(folder / "aligned_pow2", pow2, te_world.ALIGNED | quantized)
    write(folder / "tied_bf16", draw(world.TIED), world.TIED)
    untied = world.TIED | {"tie_word_embeddings": False}
    write(folder / "untied_bf16", draw(untied), untied)
    write(folder / "no_block", in_fp8(draw(te_world.ALIGNED), "sglang"), te_world.ALIGNED)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    port = free_port()
    mp.start_processes(world.run, args=(port, str(folder)), nprocs=world.WORLD, start_method="spawn")
    return torch.load(folder / "found.pt", weights_only=False)


def source_of(name):
    return "moe_fp8" if name == "ep2" else "aligned_fp8"


@pytest.mark.parametrize("name", [*world.ROUND_TRIPS, EXPERTS])
def test_fp8_files_through_fp8_parameters_come_back_byte_for_byte(folder, found, name):
    original = read(folder / source_of(name))
    assert_same(read(folder / name), original)
    loaded = found[name]["loaded"]
    fp8 = {n for n, t in original.items() if t.dtype == torch.float8_e4m3fn}
    assert set(loaded["kept"]) == fp8
    assert set(loaded["copied"]) == {n for n in original if n not in fp8 and not n.endswith("_scale_inv")}
    assert not any(loaded[kind] for kind in ("cast", "quantized", "dequantized", "requantized", "unused"))
    assert not [note for note in found[name]["saved"]["notes"] if not note.startswith("oversized")]


@pytest.mark.parametrize("name", world.ROUND_TRIPS)
def test_what_is_written_is_a_model_folder(folder, found, name):
    config = json.loads((folder / name / "config.json").read_text())
    assert config == te_world.ALIGNED | {"quantization_config": QUANT}
    assert (folder / name / "tokenizer.json").read_text() == "{}"
    index = json.loads((folder / name / "model.safetensors.index.json").read_text())
    files = {p.name for p in (folder / name).glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) == found[name]["saved"]["files"] > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(folder / name).values())
    pairs = [(n, n.removesuffix("_scale_inv")) for n in index["weight_map"] if n.endswith("_scale_inv")]
    assert all(index["weight_map"][scale] == index["weight_map"][weight] for scale, weight in pairs)
    assert len(pairs) == 14


@pytest.mark.parametrize("name", world.ROUND_TRIPS)
def test_both_orientations_agree_and_no_stale_initial_value_is_left(found, name):
    assert all(found[name]["directions"])
    assert not any(found[name]["hooks"])
    assert len(found[name]["hooks"]) > 0


@pytest.mark.parametrize("name", world.ROUND_TRIPS)
def test_a_bf16_folder_of_fp8_parameters_is_their_value(folder, name):
    original = read(folder / "aligned_fp8")
    expected = {
        n: reference.dequantize(t, original[f"{n}_scale_inv"], dtype=torch.bfloat16)
        if t.dtype == torch.float8_e4m3fn
        else t
        for n, t in original.items()
        if not n.endswith("_scale_inv")
    }
    assert_same(read(folder / f"{name}_bf16"), expected)
    assert json.loads((folder / f"{name}_bf16" / "config.json").read_text()) == te_world.ALIGNED


@pytest.mark.parametrize(
    ("name", "share"), [("tp1", 1.0), ("tp2_pp2", 0.3), pytest.param("ep2", 0.6, marks=EXPERTS.marks)]
)
def test_a_rank_reads_only_what_it_holds(folder, found, name, share):
    total = sum(t.nbytes for t in read(folder / source_of(name)).values())
    assert max(found[name]["read"]) <= share * total


def test_what_shares_a_block_is_requantized_by_the_trainers_rule_and_the_rest_is_kept(folder, found):
    original, again = read(folder / "heads_fp8"), read(folder / "heads_again")
    loaded = found["heads of 64"]["loaded"]
    shared = {n for n in original if n.endswith(("k_proj.weight", "v_proj.weight"))}
    assert set(loaded["requantized"]) == shared
    assert all("inside a block" in why for why in loaded["requantized"].values())
    kept = {n: t for n, t in original.items() if n.removesuffix("_scale_inv") not in shared}
    assert_same({n: t for n, t in again.items() if n in kept}, kept)
    for rank in found["heads of 64"]["ranks"][:2]:
        rows = slice(64 * rank["tp_rank"], 64 * (rank["tp_rank"] + 1))
        for layer in range(2):
            k, v = (
                reference.dequantize(original[n], original[f"{n}_scale_inv"], dtype=torch.bfloat16)[rows]
                for n in (f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "kv")
            )
            codes, scales = reference.quantize(torch.cat([k, v]), "te_pow2")
            live, live_scales, _ = rank[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
            assert torch.equal(live[128:], codes.view(torch.uint8))
            assert torch.equal(live_scales[1:, :2], scales)
    assert len([n for n in found["heads of 64"]["saved"]["notes"] if n.startswith("requantized")]) == len(shared)


def test_a_block_that_two_weights_share_gets_one_scale_for_both(folder, found):
    original, loaded = read(folder / "half_fp8"), found["half a block"]["loaded"]
    fp8 = {n for n, t in original.items() if t.dtype == torch.float8_e4m3fn}
    assert set(loaded["requantized"]) == {n for n in fp8 if n.endswith(("gate_proj.weight", "up_proj.weight"))}
    assert set(loaded["kept"]) == fp8 - set(loaded["requantized"])
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        both = [reference.dequantize(original[n], original[f"{n}_scale_inv"], dtype=torch.bfloat16) for n in names]
        codes, scales = reference.quantize(torch.cat(both), "te_pow2")
        live, live_scales, _ = found["half a block"]["ranks"][0][f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
        assert torch.equal(live, codes.view(torch.uint8))
        assert torch.equal(live_scales[:, : scales.shape[1]], scales)


def test_a_gpu_that_takes_powers_of_two_only_gets_those(found):
    loaded, again = found["powers of two"]["loaded"], found["powers of two"]["again"]
    assert len(loaded["requantized"]) == 14
    assert {"scales that are no powers of two, which this GPU cannot multiply by"} == set(
        loaded["requantized"].values()
    )
    assert not loaded["kept"]
    assert len(again["kept"]) == 14


def test_bf16_files_are_quantized_as_transformer_engine_would_and_masters_start_from_the_files(folder, found):
    tensors, loaded = read(folder / "aligned_bf16"), found["bf16 files"]["loaded"]
    assert len(loaded["quantized"]) == 14
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    for rank, initial in list(zip(found["bf16 files"]["ranks"], found["bf16 files"]["initial"], strict=True))[:2]:
        mine = down.chunk(2, 1)[rank["tp_rank"]]
        assert torch.equal(initial, mine)
        codes, scales = reference.quantize(mine, "te_pow2")
        live, live_scales, _ = rank["decoder.layers.1.mlp.linear_fc2.weight"]
        assert torch.equal(live, codes.view(torch.uint8))
        assert torch.equal(live_scales[:, : scales.shape[1]], scales)


def test_fp8_files_into_bf16_parameters_and_padding_becomes_zero(folder, found):
    original, loaded = read(folder / "aligned_fp8"), found["bf16 parameters"]["loaded"]
    assert len(loaded["dequantized"]) == 14
    name = "model.layers.0.mlp.{}_proj.weight"
    halves = [
        reference.dequantize(original[n], original[f"{n}_scale_inv"], dtype=torch.bfloat16)
        for n in (name.format("gate"), name.format("up"))
    ]
    for rank in found["bf16 parameters"]["ranks"][:2]:
        at = rank["tp_rank"]
        assert torch.equal(rank["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([h.chunk(2)[at] for h in halves]))
        embedding, whole = rank["embedding.word_embeddings.weight"], original["model.embed_tokens.weight"]
        mine = whole[at * 256 : (at + 1) * 256]
        assert torch.equal(embedding[: len(mine)], mine)
        assert not embedding[len(mine) :].any()
        assert all(torch.isfinite(t).all() for t in rank.values() if isinstance(t, torch.Tensor))


def test_the_last_stage_gets_its_copy_of_tied_embeddings(folder, found):
    whole = read(folder / "tied_bf16")["model.embed_tokens.weight"]
    per_rank = [parts[0] for parts in found["tied"]["shared"]]
    assert all(len(parts) == 1 for parts in found["tied"]["shared"])
    assert len(per_rank) == 4
    first, last = per_rank[:2], per_rank[2:]
    assert torch.equal(torch.cat(first)[: len(whole)], whole)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert_same(read(folder / "tied_again"), read(folder / "tied_bf16"))


def test_an_optimizer_made_before_the_load_is_not_left_with_old_masters(found):
    optimizer = found["optimizer"]
    assert "the optimizer was made before the weights are loaded" in optimizer["refused"]
    assert not any(d for rank in optimizer["differ"] for d in rank)
    assert all(len(rank) > 5 for rank in optimizer["differ"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "ConfigError: .*lacks .* tensors of the model: .*is it another model's checkpoint"),
        ("per tensor", "ConfigError: .*no weight_block_size; only block-FP8 checkpoints can be loaded"),
        ("exists", "ConfigError: .*kept exists already; choose another folder, or pass overwrite"),
        ("nan", "NonFiniteError: .*lm_head.weight has 1 NaN or Inf"),
        ("full disk", "No space left on device"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(found, name, says):
    import re

    assert len(found["errors"][name]) == 4
    for words in found["errors"][name]:
        assert re.search(says, words), words


def test_a_failed_save_leaves_the_old_folder_whole_and_nothing_else(folder, found):
    assert_same(read(folder / "kept"), read(folder / "aligned_fp8"))
    assert found["errors"]["left"] == []
