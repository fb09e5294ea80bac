"""The rules as numbers, independent of any implementation."""

import math

import pytest
import torch

from fp8bridge.kernels import reference, rules

TINY = torch.finfo(torch.float32).tiny


def scale_of(amax, rule, dtype=torch.float32):
    return rules.block_scales(torch.tensor([amax]), rule, dtype)[1].item()


def test_sglang_scale_is_what_dequantization_multiplies_with():
    assert scale_of(0.896, "sglang") == pytest.approx(0.002, rel=1e-6)


@pytest.mark.parametrize("rule", rules.RULES)
def test_scale_times_448_covers_the_amax(rule):
    for amax in (1e-3, 0.3, 1.0, 447.0, 448.0, 449.0, 1e6):
        scale = scale_of(amax, rule)
        assert 0.999 * amax <= 448 * scale <= 2.001 * amax


@pytest.mark.parametrize("rule", ["te_pow2", "ue8m0"])
def test_power_of_two_rules_give_powers_of_two(rule):
    amax = torch.exp(torch.linspace(-9, 80, 5000))
    mantissa = torch.frexp(rules.block_scales(amax, rule, torch.float32)[1]).mantissa
    assert bool((mantissa == 0.5).all())


def test_power_of_two_scales_are_the_least_that_cover_the_amax():
    assert scale_of(448.0, "ue8m0") == 1.0
    assert scale_of(math.nextafter(448.0, 500.0) + 3e-5, "ue8m0") == 2.0
    assert scale_of(448.0, "te_pow2") == 1.0
    assert scale_of(448.0 + 3.1e-5, "te_pow2") == 2.0


@pytest.mark.parametrize("rule", ["te", "te_pow2"])
def test_te_zero_block_has_scale_one(rule):
    assert scale_of(0.0, rule) == 1.0


def test_floors_of_the_rules_that_have_one():
    assert scale_of(0.0, "sglang") == pytest.approx(1e-10 / 448)
    assert scale_of(0.0, "ue8m0") == 2.0**-22


@pytest.mark.parametrize(
    ("dtype", "finite_max"), [(torch.bfloat16, 3.3895313892515355e38), (torch.float32, 3.4028234663852886e38)]
)
def test_te_overflowing_scale_is_the_largest_value_of_the_source_dtype(dtype, finite_max):
    factor, scale_inv = rules.block_scales(torch.tensor([TINY]), "te", dtype)
    assert factor.item() == finite_max
    assert scale_inv.item() == (1.0 / torch.tensor(finite_max)).item() > 0
    assert rules.block_scales(torch.tensor([TINY]), "te_pow2", dtype)[0].item() == 2.0**127


@pytest.mark.parametrize("rule", rules.RULES)
def test_infinite_amax_has_scale_one(rule):
    assert scale_of(math.inf, rule) == 1.0


def test_te_multiplies_by_the_rounded_quotient_not_by_the_reciprocal_of_a_scale():
    """`te` and `sglang` scales differ in the last bit for about two blocks in five."""
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(1)) + 0.01
    te, sglang = (rules.block_scales(amax, rule, torch.float32)[1] for rule in ("te", "sglang"))
    assert 0.2 < (te != sglang).float().mean() < 0.6
    assert int((te.view(torch.int32) - sglang.view(torch.int32)).abs().max()) == 1


@pytest.mark.parametrize("rule", rules.RULES)
@pytest.mark.parametrize("dtype", rules.QUANTIZABLE.values())
def test_vectorised_scales_equal_the_naive_ones(rule, dtype):
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(1, 255, (600,), generator=generator)
    bits = (exponents << 23) | torch.randint(0, 1 << 23, (600,), generator=generator)
    amax = bits.to(torch.int32).view(torch.float32).to(dtype).float()
    amax = torch.cat([amax, torch.tensor([0.0, math.inf, 1e-10, 1e-4, 448.0, 2.0**-130])]).to(dtype)
    _, scale_inv = rules.block_scales(amax.float(), rule, dtype)
    naive = [reference.quantize_block(value.view(1, 1), rule)[1] for value in amax]
    assert torch.equal(scale_inv, torch.stack(naive))


def test_grid_shape():
    assert rules.grid_shape(129, 128, (128, 128)) == (2, 1)
    assert rules.grid_shape(3, 129, (1, 128)) == (3, 2)
    assert rules.grid_shape(3, 129, rules.WHOLE) == (1, 1)
    assert rules.grid_shape(0, 5, (128, 128)) == (0, 0)
