import pytest
import torch

from fp8bridge import kernels
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import reference

TILE = 4 * reference.TILE_WORDS


def random_bytes(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def checksums(bucket, spans, device):
    table = kernels.ChecksumTable.build(spans, device=device)
    values = kernels.checksum(table, bucket.to(device))
    assert values.dtype == torch.int64
    return [value % 2**64 for value in values.tolist()]


def checksum_of(data, device):
    return checksums(data, [(0, data.numel())], device)[0]


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 16, 1000, TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE + 7])
def test_equals_the_reference(nbytes, device):
    data = random_bytes(nbytes)
    assert checksum_of(data, device) == reference.checksum(reference.to_bytes(data))


def test_a_long_span_of_several_programs(device):
    data = random_bytes(35 * TILE + 12)
    assert checksum_of(data, device) == reference.checksum(reference.to_bytes(data))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_spans_of_all_sizes_at_once(device, threads):
    sizes = [0, 1, 5, TILE, 70 * TILE + 3, 0, 2 * TILE, 150 * TILE, 17]
    data = random_bytes(sum(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = [(end - nbytes, nbytes) for end, nbytes in zip(ends, sizes, strict=True)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = checksums(data, spans, device)
    finally:
        torch.set_num_threads(before)
    assert found == [checksum_of(data[a : a + n], device) for a, n in spans]
    assert found[4] == reference.checksum(reference.to_bytes(data[spans[4][0] : spans[5][0]]))


def test_does_not_depend_on_the_place_in_the_bucket(device):
    data = random_bytes(2 * TILE + 100)
    expected = checksum_of(data, device)
    for offset in (0, 1, 2, 4, 15, 16, 4000):
        bucket = torch.cat([random_bytes(offset, seed=1), data, random_bytes(33, seed=2)])
        spans = [(offset, data.numel()), (0, offset)]
        assert checksums(bucket, spans, device)[0] == expected


def test_any_flipped_bit_shows(device):
    data = random_bytes(TILE + 50)
    seen = {checksum_of(data, device)}
    places = [0, 1, 3, 500, TILE - 1, TILE, TILE + 49]
    for place in places:
        for bit in (0, 3, 7):
            damaged = data.clone()
            damaged[place] ^= 1 << bit
            seen.add(checksum_of(damaged, device))
    assert len(seen) == 1 + 3 * len(places)


def test_two_flipped_sign_bits_show(device):
    """The damage a plain sum of words, or of floats, does not see."""
    data = random_bytes(2 * TILE)
    for first, second in ((3, 7), (3, 1027), (3, TILE + 3), (TILE - 1, TILE + 7)):
        damaged = data.clone()
        damaged[first] ^= 0x80
        damaged[second] ^= 0x80
        assert checksum_of(damaged, device) != checksum_of(data, device)


@pytest.mark.parametrize("size", [1, 2, 4, 64, 1024, TILE])
def test_swapped_pieces_show(size, device):
    data = random_bytes(3 * TILE)
    damaged = data.clone()
    damaged[:size], damaged[TILE : TILE + size] = data[TILE : TILE + size], data[:size]
    assert checksum_of(damaged, device) != checksum_of(data, device)
    damaged = data.clone()
    if size < TILE:
        damaged[:size], damaged[size : 2 * size] = data[size : 2 * size], data[:size]
        assert checksum_of(damaged, device) != checksum_of(data, device)


def test_truncated_or_grown_zeros_show(device):
    sizes = [0, 1, 2, 3, 4, 8, TILE - 1, TILE, TILE + 1, 2 * TILE]
    values = {checksum_of(torch.zeros(n, dtype=torch.uint8), device) for n in sizes}
    assert len(values) == len(sizes)


def test_random_damage_to_one_word_never_passes(device):
    data = random_bytes(TILE)
    original = checksum_of(data, device)
    generator = torch.Generator().manual_seed(9)
    for _ in range(10):
        damaged = data.clone()
        word = int(torch.randint(0, TILE // 4, (), generator=generator)) * 4
        damaged[word : word + 4] += 1 + torch.randint(0, 255, (4,), dtype=torch.uint8, generator=generator)
        assert (checksum_of(damaged, device) == original) == torch.equal(damaged, data)


def test_no_spans(device):
    assert checksums(random_bytes(8), [], device) == []


def test_bad_arguments():
    with pytest.raises(ConfigError, match="span 1"):
        kernels.ChecksumTable.build([(0, 4), (-1, 4)], device="cpu")
    table = kernels.ChecksumTable.build([(0, 4)], device="cpu")
    with pytest.raises(ConfigError, match="needs 4"):
        kernels.checksum(table, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="flat contiguous uint8"):
        kernels.checksum(table, torch.zeros(8))
