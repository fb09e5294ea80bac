"""Scan finds every NaN and Inf of the naive twin, wherever it stands, and writes nothing."""

import pytest
import torch

from fp8bridge import kernels
from fp8bridge.errors import ConfigError

from .cases import random_matrix, strided

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SHAPES = ((1, 1), (3, 5), (128, 256), (40, 264))


def matrices(device):
    found = []
    for seed, dtype in enumerate(DTYPES):
        for rows, cols in SHAPES:
            matrix = random_matrix(rows, cols, torch.float32, seed).clamp(-100, 100).to(dtype)
            found += [matrix.to(device), strided(matrix.float()).to(dtype).to(device)]
    return found


def poison(matrix, row, col, bits):
    """Write the raw bits of one element."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[matrix.element_size()]
    matrix.view(integer)[row, col] = bits


NONFINITE = {
    torch.bfloat16: (0x7F80, -0x80, 0x7F81),  # Inf, -Inf, NaN
    torch.float16: (0x7C00, -0x400, 0x7C01),
    torch.float32: (0x7F800000, -0x800000, 0x7F800001),
    torch.float8_e4m3fn: (0x7F, 0xFF),
}


def test_finite_matrices_have_no_flags(device):
    sources = matrices(device)
    assert not kernels.Scan(sources).flags().any()


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("place", [(0.0, 0.0), (0.5, 0.3), (1.0, 1.0)])
def test_one_nonfinite_element_is_found_in_its_own_matrix_and_only_there(device, place, parity):
    sources = matrices(device)
    chosen = range(parity, len(sources), 2)
    for index in chosen:
        source = sources[index]
        row, col = (int(at * (size - 1)) for at, size in zip(place, source.shape, strict=True))
        bits = NONFINITE[source.dtype]
        poison(source, row, col, bits[index // 2 % len(bits)])
    kept = [source.contiguous().view(torch.uint8).clone() for source in sources]
    flags = kernels.Scan(sources).flags().tolist()
    assert [i for i, flag in enumerate(flags) if flag] == list(chosen)
    for source, old in zip(sources, kept, strict=True):
        assert torch.equal(source.contiguous().view(torch.uint8), old), "a scan writes nothing"


def test_integers_empty_matrices_and_neighbours_outside_a_view(device):
    wide = torch.full((64, 96), float("nan"), dtype=torch.bfloat16, device=device)
    inside = wide[8:24, 16:48]
    inside.zero_()
    sources = [inside, torch.full((4, 4), 255, dtype=torch.uint8, device=device), wide[:0]]
    assert kernels.Scan(sources).flags().tolist() == [0, 0, 0]


def test_nothing_to_scan_is_an_error():
    with pytest.raises(ConfigError, match="at least one matrix"):
        kernels.Scan([])
