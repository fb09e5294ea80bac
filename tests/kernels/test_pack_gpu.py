"""What only a GPU can show: size, proof by exhaustion, asynchrony, and Transformer Engine itself."""

import math

import pytest
import torch

from fp8bridge import kernels
from fp8bridge.kernels import PackItem, PackTable, UnpackItem, UnpackTable, reference, rules

from .cases import random_matrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def assert_rows_equal_reference(weight, codes, scale_inv, first, last, rule):
    """Compare whole row blocks [first, last) with the reference; `first` is a multiple of 128."""
    expected_codes, expected_scales = reference.quantize(weight[first:last].cpu(), rule)
    assert torch.equal(codes[first:last].cpu().view(torch.uint8), expected_codes.view(torch.uint8))
    rows = slice(first // 128, -(-last // 128))
    assert torch.equal(scale_inv[rows].cpu(), expected_scales)


@pytest.mark.parametrize("row_stride", [4096, 8192])
def test_more_than_2_31_elements(row_stride):
    """vllm-project/vllm#42173: tile offsets in 32 bits; a wide row stride overflows at half the rows."""
    rows, cols = 524_416, 4096
    weight = torch.empty(rows, row_stride, dtype=torch.bfloat16, device="cuda")[:, row_stride - cols :]
    for start in range(0, rows, 65_536):
        weight[start : start + 65_536].normal_(0, 0.02)
    codes, scale_inv = kernels.quantize(weight, "te_pow2")
    for first in (0, 262_144, 524_160):
        assert_rows_equal_reference(weight, codes, scale_inv, first, min(first + 128, rows), "te_pow2")
    values = kernels.dequantize(codes[-128:], scale_inv[-1:], dtype=torch.bfloat16)
    assert (values.float() - weight[-128:].float()).abs().max() < 0.01


def test_a_bucket_beyond_4_gib():
    offset = (1 << 32) + 48
    weight = random_matrix(130, 256, torch.bfloat16).cuda()
    bias = random_matrix(1, 77, torch.float32).cuda()
    items = [
        PackItem(130, 256, "bfloat16", offset, offset - 32),
        PackItem(1, 77, "float32", offset + 33281, None),
    ]
    table = PackTable.build(items, rule="sglang", device="cuda")
    bucket = torch.zeros(table.nbytes, dtype=torch.uint8, device="cuda")
    assert kernels.quantize_pack(table, [weight, bias], bucket).tolist() == [0, 0]
    expected = bytearray(1 << 16)
    near = [PackItem(130, 256, "bfloat16", 48, 16), PackItem(1, 77, "float32", 48 + 33281, None)]
    reference.quantize_pack(near, [weight.cpu(), bias.cpu()], "sglang", (128, 128), expected)
    written = bucket[offset - 48 :].cpu()
    assert bytes(written.tolist()) == bytes(expected[: len(written)])
    spans = [(offset, 130 * 256), (0, 1 << 31)]
    sums = kernels.checksum(kernels.ChecksumTable.build(spans, device="cuda"), bucket)
    assert sums[0].item() % 2**64 == reference.checksum(bytes(expected[48 : 48 + 130 * 256]))
    out = torch.empty(130, 256, dtype=torch.uint8, device="cuda")
    unpack = UnpackTable.build([UnpackItem(130, 256, "uint8", offset)], device="cuda")
    kernels.unpack_scatter(unpack, bucket, [out])
    assert out.cpu().flatten().tolist() == list(expected[48 : 48 + 130 * 256])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_short_division_is_division(dtype):
    """Every mantissa of the dtype over every fp32 mantissa of the scale; powers of two change nothing.

    Runs the kernels' own device function (triton_rules.apply_factor), which the `sglang` rule uses for
    16-bit sources in place of div.rn.
    """
    from .division import count_wrong_quotients

    mantissas = 1 << (7 if dtype == torch.bfloat16 else 10)
    numerators = (1 + torch.arange(mantissas, dtype=torch.float32) / mantissas).to(dtype).cuda()
    assert count_wrong_quotients(numerators) == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_does_not_wait_for_the_gpu():
    weights = [random_matrix(256, 256, torch.bfloat16, seed).cuda() for seed in range(4)]
    items = [PackItem(256, 256, "bfloat16", 16 + 65_552 * i, 65_552 * i) for i in range(4)]
    table = PackTable.build(items, rule="te", device="cuda")
    bound = table.bind(weights)
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device="cuda")
    sums = kernels.ChecksumTable.build([(0, table.nbytes)], device="cuda")
    out = torch.empty(table.nbytes, dtype=torch.uint8, device="cuda")
    unpack = UnpackTable.build([UnpackItem(1, table.nbytes, "uint8", 0)], device="cuda").bind([out])

    def step():
        return bound.launch(bucket), kernels.checksum(sums, bucket), unpack.launch(bucket)

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        flags, _, _ = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert flags.tolist() == [0, 0, 0, 0]
    assert torch.equal(out, bucket)


def test_a_captured_graph_packs_new_values():
    weight = random_matrix(256, 384, torch.bfloat16).cuda()
    table = PackTable.build([PackItem(256, 384, "bfloat16", 32, 0)], rule="te_pow2", device="cuda")
    bound = table.bind([weight])
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device="cuda")
    bound.launch(bucket)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flags = bound.launch(bucket)
    weight.mul_(3)
    weight[7, 7] = math.nan
    graph.replay()
    assert flags.tolist() == [1]
    codes, scale_inv = reference.quantize(weight.cpu(), "te_pow2")
    assert bucket[32:].tolist() == list(reference.to_bytes(codes))
    assert bucket[:24].tolist() == list(reference.to_bytes(scale_inv))


# Transformer Engine's own quantizer.


@pytest.fixture(scope="module")
def te_quantizer():
    pytest.importorskip(
        "transformer_engine", reason="Transformer Engine is not installed: WHEELS=DIR scripts/test_gpu.sh"
    )
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    def quantize(weight, rule):
        quantizer = Float8BlockQuantizer(
            tex.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=rule == "te_pow2",
            amax_epsilon=0.0,
        )
        result = quantizer(weight)
        grid_k = -(-weight.shape[1] // 128)
        return result._rowwise_data, result._rowwise_scale_inv[:, :grid_k]

    return quantize


TE_SHAPES = [(256, 512), (300, 704), (1536, 896), (576, 7168), (128, 16), (2048, 768), (24, 64), (4096, 4096)]


@pytest.mark.parametrize("shape", TE_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", rules.QUANTIZABLE.values())
@pytest.mark.parametrize("rule", ["te", "te_pow2"])
def test_bytes_equal_transformer_engine(rule, dtype, shape, te_quantizer):
    spread = torch.exp(torch.randn(shape, device="cuda") * 3)
    weight = (torch.randn(shape, device="cuda") * spread).clamp(-60000, 60000).to(dtype)
    weight[:64, :64] = 0
    expected_codes, expected_scales = te_quantizer(weight, rule)
    codes, scale_inv = kernels.quantize(weight, rule)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scale_inv, expected_scales)


@pytest.mark.parametrize("rule", ["te", "te_pow2"])
@pytest.mark.parametrize("dtype", rules.QUANTIZABLE.values())
def test_edges_equal_transformer_engine(rule, dtype, te_quantizer):
    """Zero, infinite, NaN, tiny and huge blocks, one tile each."""
    info = torch.finfo(dtype)
    weight = random_matrix(128, 128 * 9, dtype)
    weight[:, :128] = 0
    weight[5, 130] = math.inf
    weight[6, 260] = math.nan
    weight[7, 270] = -math.nan
    weight[:, 384:512] = info.tiny
    weight[:, 512:640] = info.max
    weight[:, 640:768] = math.nan
    weight[:, 768:896] = 0
    weight[3, 800] = info.smallest_normal / 2
    weight[:, 896:1024] *= 0.0078125
    weight[9, 1030] = -0.0
    weight = weight.cuda()
    expected_codes, expected_scales = te_quantizer(weight, rule)
    codes, scale_inv = kernels.quantize(weight, rule)
    assert torch.equal(scale_inv, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
