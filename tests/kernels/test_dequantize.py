import pytest
import torch

from fp8bridge import kernels
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import reference, rules

from .cases import assert_same_bits, random_matrix


@pytest.mark.parametrize("block", rules.BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference(block, dtype, device):
    codes, scale_inv = reference.quantize(random_matrix(150, 200, torch.float32), "te", block)
    actual = kernels.dequantize(codes.to(device), scale_inv.to(device), block, dtype)
    assert_same_bits(actual, reference.dequantize(codes, scale_inv, block, dtype))


def test_every_code_but_nan(device):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = codes[:, :127].contiguous().view(torch.float8_e4m3fn)
    scale_inv = torch.tensor([[0.37]])
    actual = kernels.dequantize(codes.to(device), scale_inv.to(device))
    assert_same_bits(actual, reference.dequantize(codes, scale_inv))


def test_transposed_codes_and_scales_in_bf16(device):
    codes, scale_inv = reference.quantize(random_matrix(200, 150, torch.float32), "te_pow2")
    actual = kernels.dequantize(codes.t().to(device), scale_inv.t().bfloat16().to(device))
    assert_same_bits(actual, reference.dequantize(codes, scale_inv).t())


def test_zero_blocks_come_back_as_zero_even_with_scale_zero(device):
    codes = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    actual = kernels.dequantize(codes.to(device), torch.tensor([[0.0, 1e-12]], device=device))
    assert bool((actual == 0).all())


def test_empty(device):
    codes = torch.empty(0, 7, dtype=torch.float8_e4m3fn, device=device)
    assert kernels.dequantize(codes, torch.empty(0, 0, device=device)).shape == (0, 7)


def test_bad_arguments():
    codes = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"need \[1, 2\]: trim padded scales"):
        kernels.dequantize(codes, torch.ones(1, 4))
    with pytest.raises(ConfigError, match="view raw bytes"):
        kernels.dequantize(codes.view(torch.uint8), torch.ones(1, 2))
