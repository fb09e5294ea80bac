"""Transformer Engine's FP8 parameters reach a server as the trainer has them, bit for bit."""

import re

import pytest
import torch
import torch.multiprocessing as mp

from fp8bridge import Shard, TensorMeta
from fp8bridge.adapters.transformer_engine import pass_through, why_not_as_is
from fp8bridge.kernels import reference
from tests.ports import free_port

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see README, Install")

from . import te_stub, te_world

needs_te = pytest.mark.skipif(not te_stub.TE_DIR.is_dir(), reason="no Transformer Engine folder; `make test` makes it")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    path = tmp_path_factory.mktemp("te") / "found.pt"
    port = free_port()
    mp.start_processes(te_world.run, args=(port, str(path)), nprocs=te_world.WORLD, start_method="spawn")
    return torch.load(path, weights_only=False)


LAYER = "model.layers.{}."


def by_hand(found, hf_config, tp):
    """The HF tensors put together from the ranks' own bytes, by plain indexing: codes, scales, dequantized."""
    ranks = {}
    for part in found["ranks"]:
        for key, value in part.items():
            if isinstance(value, tuple):
                ranks.setdefault(key, {})[part["tp_rank"]] = value
    heads, groups, dim = (hf_config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    wire = {}
    for key, held in ranks.items():
        layer = int(key.split(".")[2])
        parts = [held[r] for r in range(tp)]
        names = HF_NAMES[key.split(".", 3)[3]]
        for index, unit in enumerate((1, 128, 1)):
            matrices = [trim(p, index) for p in parts]
            pieces = (
                SPLITS[len(names)](matrices, unit, heads // groups, groups, dim)
                if tp_is_rows(names)
                else [torch.cat(matrices, 1)]
            )
            for name, piece in zip(names, pieces, strict=True):
                wire.setdefault(LAYER.format(layer) + name, []).append(piece)
    return wire


HF_NAMES = {
    "self_attention.linear_qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
}


def tp_is_rows(names):
    return len(names) > 1


def trim(part, index):
    rows, cols = part[0].shape
    return part[1][: -(-rows // 128), : -(-cols // 128)] if index == 1 else part[index]


def qkv(matrices, unit, per_group, groups, dim):
    whole = torch.cat(matrices)
    step = dim // unit if dim % unit == 0 else None
    if step is None:
        # Scales of 64-wide heads, two a group: the group's two q heads fill a block, k and v share the next.
        return [whole[0::2], torch.empty(0), torch.empty(0)]
    found = ([], [], [])
    for group in range(groups):
        start = group * (per_group + 2) * step
        found[0].append(whole[start : start + per_group * step])
        found[1].append(whole[start + per_group * step :][:step])
        found[2].append(whole[start + (per_group + 1) * step :][:step])
    return [torch.cat(f) for f in found]


def gate_up(matrices, unit, *_):
    halves = [m.chunk(2) for m in matrices]
    return [torch.cat([h[i] for h in halves]) for i in (0, 1)]


SPLITS = {3: qkv, 2: gate_up}


def same(a, b):
    a, b = a.contiguous(), b.contiguous()
    return a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@needs_te
@pytest.mark.parametrize("name", ["aligned_tp2_pp2", "columnwise only"])
def test_every_linear_weight_is_the_trainers_own_bytes(worlds, name):
    found = worlds[name]
    expected = by_hand(found, te_world.ALIGNED, 2)
    assert len(expected) == 14
    for tensor, (codes, scales, _) in expected.items():
        assert same(found["server"][tensor].view(torch.uint8), codes), tensor
        assert same(found["server"][f"{tensor}_scale_inv"], scales), tensor
    actions = found["summary"]["actions"]
    assert actions["pass_through"]["tensors"] == 2 * 14
    assert "quantize" not in actions
    assert found["summary"]["rule"] == "te_pow2"
    assert not found["summary"]["fallbacks"]


@needs_te
def test_grouped_experts_and_mla_are_the_trainers_own_bytes(worlds):
    found = worlds["experts"]
    actions, server = found["summary"]["actions"], found["server"]
    assert "quantize" not in actions
    assert not found["summary"]["fallbacks"]
    seen = set()
    for rank in found["ranks"]:
        for key, value in rank.items():
            if not isinstance(value, tuple):
                continue
            for name, codes, scales, row, col in pieces_by_hand(key, value, rank["tp_rank"], rank["ep_rank"]):
                rows, cols = codes.shape
                held = server[name][row : row + rows, col : col + cols]
                assert same(held.view(torch.uint8), codes), (key, name)
                held = server[f"{name}_scale_inv"][row // 128 :, col // 128 :]
                assert same(held[: scales.shape[0], : scales.shape[1]], scales), (key, name)
                seen.add(name)
    assert seen == {name for name, tensor in server.items() if tensor.dtype == torch.float8_e4m3fn}
    # 5 of MLA a layer, one dense and one shared MLP, four experts
    assert len(seen) == 2 * 5 + 2 * 3 + 4 * 3
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert server[bias].dtype == torch.float32


def pieces_by_hand(key, value, tp_rank, ep_rank):
    """(HF name, codes, scales, first row, first column) of what one rank holds of a parameter, without the tables."""
    codes, scales = trim(value, 0), trim(value, 1)
    layer, rest = re.match(r"decoder\.layers\.(\d+)\.(.*)", key).groups()
    there, (rows, cols) = LAYER.format(layer), codes.shape
    if expert := re.match(r"mlp\.experts\.linear_fc(\d)\.weight(\d)", rest):
        there += f"mlp.experts.{int(expert[2]) + 2 * ep_rank}."
        if expert[1] == "2":
            return [(there + "down_proj.weight", codes, scales, 0, 0)]
        return halves(there, codes, scales, 0)
    for mine, theirs in (("mlp.shared_experts.", "mlp.shared_experts."), ("mlp.", "mlp.")):
        if rest == mine + "linear_fc1.weight":
            return halves(there + theirs, codes, scales, tp_rank)
        if rest == mine + "linear_fc2.weight":
            return [(f"{there}{theirs}down_proj.weight", codes, scales, 0, tp_rank * cols)]
    name, axis = MLA[rest.removeprefix("self_attention.").removesuffix(".weight")]
    begin = (tp_rank * rows, 0) if axis == 0 else (0, tp_rank * cols) if axis == 1 else (0, 0)
    return [(f"{there}self_attn.{name}.weight", codes, scales, *begin)]


MLA = {
    "linear_q_down_proj": ("q_a_proj", None),
    "linear_q_up_proj": ("q_b_proj", 0),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa", None),
    "linear_kv_up_proj": ("kv_b_proj", 0),
    "linear_proj": ("o_proj", 1),
}


def halves(there, codes, scales, slice_index):
    """[gate; up] of one rank."""
    step = len(codes) // 2
    pairs = zip(("gate_proj", "up_proj"), codes.chunk(2), scales.chunk(2), strict=True)
    return [(f"{there}{name}.weight", c, s, slice_index * step, 0) for name, c, s in pairs]


@needs_te
@pytest.mark.parametrize(
    ("name", "tp", "cut"),
    [
        ("heads_of_64_tp2", 2, {"k_proj", "v_proj"}),
        ("ragged_tp2", 2, {"gate_proj", "up_proj", "down_proj"}),
        ("ragged_tp1_pp2", 1, set()),
    ],
)
def test_what_is_cut_inside_a_block_is_requantized_by_the_trainers_rule_and_named(worlds, name, tp, cut):
    found, config = worlds[name], te_world.SCENARIOS[name][0]
    expected = by_hand(found, config, tp)
    named = {f.split(".")[-2] for f in found["summary"]["fallbacks"] if f.startswith("requantized: ")}
    assert named == cut
    for tensor, (codes, scales, dequantized) in expected.items():
        if tensor.split(".")[-2] in cut:
            if not dequantized.numel():
                continue
            codes, scales = reference.quantize(dequantized, "te_pow2")
        assert same(found["server"][tensor].view(torch.uint8), codes.view(torch.uint8)), tensor
        assert same(found["server"][f"{tensor}_scale_inv"], scales), tensor


@needs_te
def test_layers_kept_in_bf16_are_quantized_and_the_others_pass_through(worlds):
    found = worlds["first_last_bf16_pp2"]
    actions = found["summary"]["actions"]
    assert actions["pass_through"]["tensors"] == 2 * 14
    assert actions["quantize"]["tensors"] == 14
    plain = {k: v for part in found["ranks"] for k, v in part.items() if isinstance(v, torch.Tensor)}
    weight = plain["decoder.layers.0.mlp.linear_fc2.weight"]
    codes, scales = reference.quantize(weight, "te_pow2")
    assert same(found["server"]["model.layers.0.mlp.down_proj.weight"], codes)
    assert same(found["server"]["model.layers.0.mlp.down_proj.weight_scale_inv"], scales)


@needs_te
def test_padding_columns_of_scales_never_reach_a_server(worlds):
    """The stub fills them with NaN, as memory that nobody writes may be."""
    for name in te_world.SCENARIOS:
        for tensor, value in worlds[name]["server"].items():
            assert torch.isfinite(value.float()).all(), (name, tensor)


@needs_te
def test_other_fp8_parameters_are_refused_by_name_and_reason(worlds):
    words = worlds["refused"]
    where = "decoder.layers.1.mlp.linear_fc2.weight cannot be read"
    assert where in words["1-D"]
    assert "scales of 1x128" in words["1-D"]
    assert where in words["E5M2"]
    assert "E5M2; weights need E4M3" in words["E5M2"]
    assert "use one recipe" in words["mixed recipes"]


META = TensorMeta("w", (384, 200), "bfloat16")


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([Shard("w", 0, "p", 384, 200)], ""),
        ([Shard("w", 0, "p", 128, 200), Shard("w", 1, "p", 256, 200, dst_row=128)], ""),
        ([Shard("w", 0, "p", 384, 128), Shard("w", 1, "p", 384, 72, dst_col=128)], ""),
        ([Shard("w", 0, "p", 192, 200), Shard("w", 1, "p", 192, 200, dst_row=192)], "ends at row 192"),
        ([Shard("w", 0, "p", 384, 100), Shard("w", 1, "p", 384, 100, dst_col=100)], "ends at column 100"),
        ([Shard("w", 0, "p", 384, 200, src_row=64)], "starts at row 0 (row or column 64"),
    ],
)
def test_which_shards_can_keep_their_codes(shards, says):
    why = why_not_as_is(META, shards)
    assert says in why
    assert bool(why) is bool(says)


def test_codes_and_scales_become_tensors_of_their_own():
    metas, shards = pass_through(META, [Shard("w", 3, "p", 256, 200, src_row=128, dst_row=128)])
    assert metas == [TensorMeta("w", (384, 200), "float8_e4m3fn"), TensorMeta("w_scale_inv", (3, 2), "float32")]
    assert shards == [
        Shard("w", 3, "p#codes", 256, 200, 128, 0, 128, 0),
        Shard("w_scale_inv", 3, "p#scales", 2, 2, 1, 0, 1, 0),
    ]
