import pytest
import torch

from fp8bridge import kernels
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import reference

from .cases import assert_same_bits, on_device, random_matrix, strided


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(40, 128), (33, 150), (1, 1), (3, 31), (5, 33), (0, 64), (4, 0)])
def test_equals_the_reference(dtype, shape, device):
    weight = random_matrix(*shape, dtype)
    codes, scales = kernels.quantize_mxfp8(weight.to(device))
    expected_codes, expected_scales = reference.quantize_mxfp8(weight)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)
    assert_same_bits(kernels.dequantize_mxfp8(codes, scales), reference.dequantize_mxfp8(codes.cpu(), scales.cpu()))


def edge_rows():
    """Rows of one block whose scale takes each path: zero, tiny, exact powers, just above them, huge."""
    rows = [0.0, 2.0**-149, 448 * 2.0**-127, 448 * 2.0**-126, 1e-30, 448.0, 448.00003, 896.0, 3e38]
    rows += [float("inf"), float("nan")]
    weight = torch.zeros(len(rows), 32)
    weight[:, 3] = torch.tensor(rows)
    weight[:, 7] = -weight[:, 3] / 2
    return weight


def test_edges(device):
    weight = edge_rows()
    codes, scales = kernels.quantize_mxfp8(weight.to(device))
    expected_codes, expected_scales = reference.quantize_mxfp8(weight)
    assert_same_bits(scales, expected_scales)
    assert_same_bits(codes, expected_codes)
    assert scales[:, 0].tolist()[:3] == [0, 0, 0]
    assert scales[5, 0] == 127
    assert scales[6, 0] == 128
    assert int(codes[-1, 3].view(torch.uint8)) == 0x7F


def test_strided_rows(device):
    weight = strided(random_matrix(9, 70, torch.bfloat16))
    codes, scales = kernels.quantize_mxfp8(on_device(weight, device))
    expected_codes, expected_scales = reference.quantize_mxfp8(weight)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


def test_scale_byte_255_dequantizes_to_nan():
    codes = torch.ones(1, 64).to(torch.float8_e4m3fn)
    values = kernels.dequantize_mxfp8(codes, torch.tensor([[255, 0]], dtype=torch.uint8))
    assert bool(values[0, :32].isnan().all())
    assert values[0, 32].item() == 2.0**-127


def test_bad_arguments():
    with pytest.raises(ConfigError, match="quantize_mxfp8 takes"):
        kernels.quantize_mxfp8(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ConfigError, match="column stride"):
        kernels.quantize_mxfp8(torch.zeros(8, 4).t())
    with pytest.raises(ConfigError, match="slice off padding"):
        kernels.dequantize_mxfp8(torch.zeros(4, 64).to(torch.float8_e4m3fn), torch.zeros(4, 4, dtype=torch.uint8))
