import gc
import math
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8bridge import kernels
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import PackItem, PackTable, reference, rules

from .cases import (
    assert_packs_like_reference,
    assert_same_bits,
    lay_out,
    on_device,
    random_matrix,
    strided,
)
from .conftest import INTERPRETED

DTYPES = list(rules.QUANTIZABLE.values())
PAIRS = [(rule, block) for rule in rules.RULES for block in rules.BLOCKS]
if INTERPRETED:  # milliseconds for each program: every rule and every block come up, not every pair
    PAIRS = [("sglang", (128, 128)), ("te", rules.WHOLE), ("te_pow2", (1, 128)), ("ue8m0", (128, 128))]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES)
EVERY_RULE_AND_BLOCK = pytest.mark.parametrize(("rule", "block"), PAIRS)


def mixed_sources():
    """Whole tiles, ragged ones, vectors, an empty one, strided rows, copies of four dtypes."""
    bf16, fp16, fp32 = DTYPES
    sources = [
        random_matrix(128, 256, bf16, 1),
        random_matrix(130, 128, fp32, 2),
        random_matrix(64, 200, fp16, 3),
        strided(random_matrix(131, 129, bf16, 4)),
        strided(random_matrix(64, 128, bf16, 5), left=8, right=8),
        random_matrix(1, 300, bf16, 6),
        random_matrix(200, 1, fp32, 7),
        torch.empty(0, 64, dtype=bf16),
        torch.empty(64, 0, dtype=fp32),
        random_matrix(1, 33, bf16, 8),
        strided(random_matrix(5, 40, fp32, 9)),
        random_matrix(3, 64, fp32, 10).to(torch.float8_e4m3fn),
        torch.arange(77, dtype=torch.uint8).view(1, 77),
    ]
    return sources, {9, 10, 11, 12}


@EVERY_RULE_AND_BLOCK
@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (3, 1)], ids=["packed", "misaligned"])
def test_a_mixed_bucket_equals_the_reference(rule, block, gap, shift, device):
    sources, copied = mixed_sources()
    items = lay_out(sources, copied, block, gap)
    assert_packs_like_reference(items, sources, rule, block, device, shift)


@pytest.mark.parametrize("shift", [2, 4, 8, 15])
def test_any_base_address(shift, device):
    sources = [random_matrix(128, 128, torch.bfloat16), random_matrix(1, 64, torch.bfloat16)]
    items = lay_out(sources, {1})
    assert_packs_like_reference(items, sources, "te", (128, 128), device, shift)


@EVERY_DTYPE
@EVERY_RULE_AND_BLOCK
def test_nan_and_inf_set_their_own_flag_and_nothing_stops(rule, block, dtype, device):
    sources = [random_matrix(10, 160, dtype, seed) for seed in range(4)]
    sources[1][9, 159] = math.nan
    sources[1][0, 0] = -math.nan
    sources[2][3, 5] = -math.inf
    copies = [torch.zeros(1, 40, dtype=dtype) for _ in range(3)]
    copies[1][0, 39] = math.nan
    copies[2][0, 0] = math.inf
    items = lay_out(sources + copies, {4, 5, 6}, block)
    flags = assert_packs_like_reference(items, sources + copies, rule, block, device)
    assert flags == [0, 1, 1, 0, 0, 1, 1]


def test_nan_code_in_a_copied_fp8_tensor_sets_the_flag(device):
    codes = torch.zeros(3, 48, dtype=torch.uint8)
    for value, flag in ((0x7E, 0), (0xFE, 0), (0x7F, 1), (0xFF, 1)):
        codes[2, 47] = value
        source = codes.view(torch.float8_e4m3fn)
        table = PackTable.build(lay_out([source], {0}), rule="te", device=device)
        bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
        assert kernels.quantize_pack(table, [source.to(device)], bucket).tolist() == [flag]


# Reported defects of other quantizers, as tests.


@pytest.mark.parametrize("rule", rules.RULES)
def test_zero_tiles_give_zero_codes_and_a_positive_scale(rule, device):
    """THUDM/slime#2256, ROCm/aiter#4289: 0/0 in an all-zero tile."""
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    codes, scale_inv = kernels.quantize(weight.to(device), rule)
    assert not bool((codes.view(torch.uint8) & 0x7F == 0x7F).any())
    assert bool((scale_inv > 0).all() & torch.isfinite(scale_inv).all())
    values = kernels.dequantize(codes, scale_inv).cpu()
    assert bool((values.view(-1)[1:] == 0).all())


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_zero_ragged_tile_does_not_touch_its_neighbours(rule, device):
    """huggingface/kernels-community#681."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    weight[128:, 256:] = 0
    codes, scale_inv = kernels.quantize(weight.to(device), rule)
    expected_codes, expected_scale_inv = reference.quantize(weight, rule)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scale_inv, expected_scale_inv)
    if rule == "sglang":
        assert scale_inv[0, 0].item() == (weight[:128, :128].abs().max().float() / 448).item()


def test_codes_saturate_instead_of_overflowing(device):
    """jax-ml/ml_dtypes#400. te_pow2 maps amax into (224, 448]; a quotient just above 448 must not be NaN."""
    weight = torch.full((128, 128), 448.0)
    weight[0, :4] = torch.tensor([449.0, 464.0, 465.0, 480.0])
    for rule in rules.RULES:
        codes, scale_inv = kernels.quantize(weight.to(device), rule)
        assert_same_bits(codes, reference.quantize(weight, rule)[0])
        assert kernels.dequantize(codes, scale_inv).abs().max().item() <= 480.001


def test_the_scale_is_the_number_that_dequantization_multiplies_with(device):
    """vllm-project/vllm#36297: an inverted scale that its own test inverted too."""
    weight = torch.full((128, 128), 0.896)
    scale_inv = kernels.quantize(weight.to(device), "sglang")[1]
    assert scale_inv.item() == pytest.approx(0.002, rel=1e-6)


def test_scales_are_fp32_under_any_default_dtype(device):
    """HabanaAI/vllm-fork#2141."""
    weight = random_matrix(128, 128, torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        codes, scale_inv = kernels.quantize(weight.to(device), "te")
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale_inv.dtype == torch.float32
    assert_same_bits(scale_inv, reference.quantize(weight, "te")[1])
    assert_same_bits(codes, reference.quantize(weight, "te")[0])


@pytest.mark.parametrize("part", [slice(64, 320), slice(3, 259)])
def test_slices_equal_their_contiguous_copies(part, device):
    """vllm-project/compressed-tensors#807: flat indexing of a strided tensor."""
    wide = random_matrix(256, 512, torch.bfloat16)
    for view in (wide[:, part], wide[::2, part]):
        codes, scale_inv = kernels.quantize(on_device(view, device), "te_pow2")
        expected = reference.quantize(view.contiguous(), "te_pow2")
        assert_same_bits(codes, expected[0])
        assert_same_bits(scale_inv, expected[1])


def test_quantizing_again_may_pick_another_scale(device):
    """NVIDIA/Megatron-LM#6666: why trained FP8 codes are passed through, never quantized again."""
    weight = torch.zeros(128, 128)
    weight[0, 0], weight[0, 1] = 225 * 2.0**-12, 3 * 2.0**-12
    codes, scale_inv = kernels.quantize(weight.to(device), "ue8m0")
    assert codes[0, :2].float().tolist() == [224.0, 3.0]
    assert scale_inv.item() == 2.0**-12
    codes, scale_inv = kernels.quantize(kernels.dequantize(codes, scale_inv), "ue8m0")
    assert codes[0, :2].float().tolist() == [448.0, 6.0]
    assert scale_inv.item() == 2.0**-13


def test_every_e4m3_value_survives_scale_one(device):
    """1bit-MONSTER/1bit-MONSTER#300: subnormals included."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    weight = torch.zeros(128, 256)
    weight[0], weight[1, 0], weight[1, 128] = values, 448.0, 448.0
    codes, scale_inv = kernels.quantize(weight.to(device), "te")
    assert scale_inv.tolist() == [[1.0, 1.0]]
    assert torch.equal(codes[0].float().cpu(), values)


def test_rounding_ties_and_carries(device):
    """Triton's interpreter once made 64 of 125.02: the mantissa's carry must reach the exponent."""
    weight = torch.zeros(128, 128)
    weight[0, 0] = 448.0
    points = torch.tensor([125.02, 119.99, 124.0, 126.0, 2.0**-10, 3 * 2.0**-10, 2.0**-10 * 1.0001, 0.0146])
    weight[0, 1:9] = points
    weight[0, 9:17] = -points
    codes = kernels.quantize(weight.to(device), "te")[0]
    assert_same_bits(codes, reference.quantize(weight, "te")[0])
    assert codes[0, 1].float().item() == 128.0


@EVERY_DTYPE
@EVERY_RULE_AND_BLOCK
def test_extreme_magnitudes(rule, block, dtype, device):
    """Subnormal sources, scales that overflow, amax next to the largest finite value."""
    info = torch.finfo(dtype)
    weight = random_matrix(20, 260, dtype)
    weight[:, :128] = (weight[:, :128].float() * info.tiny).to(dtype)
    weight[:, 128:256] = (weight[:, 128:256].float().clamp(-1, 1) * info.max).to(dtype)
    weight[:, 256:] = torch.tensor([info.tiny / 4, -info.tiny, 0.0, info.max], dtype=dtype)
    items = lay_out([weight], block=block)
    assert_packs_like_reference(items, [weight], rule, block, device)


@settings(
    max_examples=5 if INTERPRETED else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bucket_equals_the_reference(device, data):
    draw = data.draw
    count = draw(st.integers(1, 4))
    sources = []
    for seed in range(count):
        rows, cols = draw(st.integers(0, 150)), draw(st.sampled_from([0, 1, 2, 16, 31, 128, 129, 160]))
        x = random_matrix(rows, cols, draw(st.sampled_from(DTYPES)), seed)
        x = (x.float() * 2.0 ** draw(st.integers(-30, 12))).to(x.dtype)
        sources.append(strided(x, draw(st.integers(0, 16)), 3) if draw(st.booleans()) else x)
    copied = {i for i in range(count) if draw(st.booleans())}
    rule, block = draw(st.sampled_from(rules.RULES)), draw(st.sampled_from(rules.BLOCKS))
    items = lay_out(sources, copied, block, draw(st.sampled_from([0, 1, 2, 8])))
    assert_packs_like_reference(items, sources, rule, block, device, draw(st.integers(0, 15)))


# Tables and bindings.


def test_bytes_do_not_depend_on_the_place_in_the_bucket(device):
    weight = random_matrix(128, 128, torch.bfloat16).to(device)
    seen = []
    for offset in (4, 16, 101):
        table = PackTable.build([PackItem(128, 128, "bfloat16", offset, 0)], rule="te", device=device)
        bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
        kernels.quantize_pack(table, [weight], bucket)
        seen.append((bucket[:4].tolist(), bucket[offset:].tolist()))
    assert seen[0] == seen[1] == seen[2]


def test_a_binding_sees_values_change_in_place(device):
    weight = random_matrix(64, 64, torch.bfloat16).to(device)
    table = PackTable.build(lay_out([weight]), rule="te", device=device)
    bound = table.bind([weight])
    for _ in range(3):
        weight.mul_(1.7)
        bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
        bound.launch(bucket)
        expected = reference.quantize(weight.cpu(), "te")
        assert bucket.tolist() == [*reference.to_bytes(expected[1]), *reference.to_bytes(expected[0])]


def test_quantize_pack_follows_sources_that_move(device):
    first, second = (random_matrix(64, 64, torch.bfloat16, seed).to(device) for seed in (0, 1))
    table = PackTable.build(lay_out([first]), rule="te", device=device)
    parameter = first.clone()
    for values in (first, second, first):
        parameter.data = values.clone()  # same tensor object, other memory
        bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
        kernels.quantize_pack(table, [parameter], bucket)
        assert bucket[4:].tolist() == list(reference.to_bytes(reference.quantize(values.cpu(), "te")[0]))
    bound = table.bind([parameter])
    assert bound.matches([parameter])
    parameter.data = second
    assert not bound.matches([parameter])


def test_quantize_pack_keeps_no_source_alive(device):
    """A table outlives the tensors a step gathered for it; holding them would hold the model."""
    weight = random_matrix(64, 64, torch.bfloat16).to(device)
    table = PackTable.build(lay_out([weight]), rule="te", device=device)
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
    kernels.quantize_pack(table, [weight], bucket)
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


def test_quantize_pack_looks_at_shape_and_dtype_even_at_the_same_address(device):
    memory = random_matrix(64, 64, torch.bfloat16).to(device)
    table = PackTable.build(lay_out([memory]), rule="te", device=device)
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
    kernels.quantize_pack(table, [memory], bucket)
    for other in (memory.view(torch.float16), memory[:32]):
        with pytest.raises(ConfigError, match="tensor 0 is"):
            kernels.quantize_pack(table, [other], bucket)


def test_parameters_that_need_gradients_are_welcome(device):
    weight = torch.nn.Parameter(random_matrix(64, 64, torch.float32).to(device))
    bias = torch.nn.Parameter(torch.ones(64, device=device))
    items = [PackItem(64, 64, "float32", 4, 0), PackItem(1, 64, "float32", 4100, None)]
    table = PackTable.build(items, rule="te", device=device)
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
    kernels.quantize_pack(table, [weight, bias], bucket)
    assert bucket[4100:].tolist() == list(reference.to_bytes(torch.ones(64)))
    codes, _ = kernels.quantize(weight, "te")
    assert bucket[4:4100].tolist() == codes.view(torch.uint8).flatten().tolist()


def test_no_items(device):
    table = PackTable.build([], rule="te", device=device)
    assert table.nbytes == 0
    assert kernels.quantize_pack(table, [], torch.empty(0, dtype=torch.uint8, device=device)).tolist() == []


GOOD = PackItem(128, 256, "bfloat16", 8, 0)


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([GOOD], {"rule": "deepseek"}, "rule 'deepseek' is unknown; choose one of sglang, te, te_pow2, ue8m0"),
        ([GOOD], {"block": (64, 64)}, "not supported"),
        ([GOOD, PackItem(1, 1, "bf16", 40000, None)], {}, "item 1: 'bf16' is no torch dtype"),
        ([PackItem(1, 1, "uint8", 4, 0)], {}, "item 0: cannot quantize uint8"),
        ([GOOD, PackItem(-1, 1, "bfloat16", 40000, None)], {}, "item 1 has a negative"),
        ([GOOD, PackItem(1, 4, "uint8", 6, None)], {}, "items 0 and 1 overlap in the bucket at byte 6"),
        ([GOOD, PackItem(1, 4, "uint8", 32775, None)], {}, "items 0 and 1 overlap in the bucket at byte 32775"),
    ],
)
def test_a_table_that_cannot_be(items, options, message):
    with pytest.raises(ConfigError, match=message):
        PackTable.build(items, **{"rule": "te", "device": "cpu"} | options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(128, 128, dtype=torch.bfloat16), r"tensor 0 is torch.bfloat16 \[128, 128\], but item 0"),
        (torch.zeros(128, 256), "tensor 0 is torch.float32"),
        (torch.zeros(256, 128, dtype=torch.bfloat16).t(), "tensor 0 has column stride 128"),
        (torch.zeros(128, 256, dtype=torch.bfloat16, device="meta"), "tensor 0 is on meta"),
    ],
)
def test_a_source_that_does_not_fit_its_item(source, message):
    with pytest.raises(ConfigError, match=message):
        PackTable.build([GOOD], rule="te", device="cpu").bind([source])


def test_a_bucket_that_does_not_fit():
    table = PackTable.build([GOOD], rule="te", device="cpu")
    bound = table.bind([torch.zeros(128, 256, dtype=torch.bfloat16)])
    with pytest.raises(ConfigError, match=r"holds 32775 bytes, but the table needs 32776"):
        bound.launch(torch.empty(table.nbytes - 1, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="flat contiguous uint8"):
        bound.launch(torch.empty(table.nbytes, 2, dtype=torch.uint8)[:, 0])
    with pytest.raises(ConfigError, match="0 tensors for a table of 1 items"):
        table.bind([])


def test_quantize_takes_matrices_only():
    with pytest.raises(ConfigError, match="reshape it to 2-D"):
        kernels.quantize(torch.zeros(4), "te")
