"""The specification itself, against arithmetic that does not use it."""

import math

import torch

from fp8bridge.kernels import reference


def all_codes():
    return torch.arange(256, dtype=torch.uint8).view(reference.FP8)


def test_e4m3_encoding_is_nearest_even_and_saturates():
    """Against a search over every code: nearest value, ties to the even code."""
    values = all_codes().float()
    positive = values[:0x7F]
    between = (positive[1:] + positive[:-1]) / 2
    points = torch.cat([positive, between, between * (1 - 2e-7), between * (1 + 2e-7)])
    points = torch.cat([points, torch.rand(2000) * 448, torch.rand(500) * 0.02])
    for x in torch.cat([points, -points]).tolist():
        distance = (positive.double() - abs(x)).abs()
        nearest = (distance == distance.min()).nonzero().flatten().tolist()
        code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
        sign = 0x80 if math.copysign(1, x) < 0 else 0
        assert int(reference.encode_e4m3(torch.tensor(x)).view(torch.uint8)) == code | sign, x
    too_large = torch.tensor([448.0, 464, 465, 480, 1000, 3e38, math.inf, -449, -math.inf])
    assert reference.encode_e4m3(too_large).float().tolist() == [448.0] * 7 + [-448.0] * 2


def test_nan_encodes_as_0x7f_whatever_its_sign():
    nans = torch.tensor([math.nan, -math.nan]).copysign(torch.tensor([1.0, -1.0]))
    assert reference.encode_e4m3(nans).view(torch.uint8).tolist() == [0x7F, 0x7F]


def test_subnormal_codes_decode_and_encode():
    codes = torch.tensor([[*range(1, 8), *range(0x81, 0x88)]], dtype=torch.uint8).view(reference.FP8)
    decoded = reference.dequantize(codes, torch.ones(1, 1))
    assert decoded[0].tolist() == [m * 2.0**-9 for m in range(1, 8)] + [-m * 2.0**-9 for m in range(1, 8)]
    assert torch.equal(reference.encode_e4m3(decoded).view(torch.uint8), codes.view(torch.uint8))


def test_mix64_is_the_finalizer_of_splitmix64():
    """The generator's first outputs for seed 0, as published with it."""
    outputs = [reference.mix64((i * reference.GOLDEN) & reference.MASK64) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_checksum_keys_make_small_damage_certain_to_show():
    """What the certainty claims of checksum.py rest on: odd, and +-key distinct modulo 2^33."""
    keys = [reference.checksum_key(lane) for lane in range(reference.TILE_WORDS)]
    assert all(key % 2 for key in keys)
    residues = {key % 2**33 for key in keys} | {-key % 2**33 for key in keys}
    assert len(residues) == 2 * len(keys)
