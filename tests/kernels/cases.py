"""Buckets for the kernel tests: where items go, what they hold, and what the reference makes of them."""

import torch

from fp8bridge import kernels
from fp8bridge.kernels import reference
from fp8bridge.kernels.rules import grid_shape

CANARY = 0xA5


def random_matrix(rows, cols, dtype, seed=0):
    """Values over many binades, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(2 * torch.randn(rows, cols, generator=generator))
    x[torch.rand(rows, cols, generator=generator) < 0.02] = 0.0
    x[torch.rand(rows, cols, generator=generator) < 0.02] = -0.0
    return x.to(dtype)


def strided(x, left=3, right=5):
    """The same values as a column slice of a wider matrix."""
    wide = torch.full((x.shape[0], left + x.shape[1] + right), 7.0).to(x.dtype)
    wide[:, left : left + x.shape[1]] = x
    return wide[:, left : left + x.shape[1]]


def lay_out(sources, copied=(), block=(128, 128), gap=0):
    """Items as SGLang lays a bucket out: scales first, then everything else; `gap` bytes between items."""
    offset = 0
    scale_offsets = []
    for index, source in enumerate(sources):
        scale_offsets.append(None if index in copied else offset)
        if index not in copied:
            grid_m, grid_k = grid_shape(*source.shape, block)
            offset += 4 * grid_m * grid_k
    items = []
    for index, (source, scale_offset) in enumerate(zip(sources, scale_offsets, strict=True)):
        name = str(source.dtype).removeprefix("torch.")
        items.append(kernels.PackItem(*source.shape, name, offset, scale_offset))
        offset += source.numel() * (source.element_size() if index in copied else 1) + gap
    return items


def filled_bucket(nbytes, device, shift=0):
    """A bucket whose base address is `shift` bytes past a multiple of 16, with canaries on both sides."""
    room = torch.full((nbytes + 64,), CANARY, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % 16 + 16 + shift
    return room, room[first : first + nbytes]


def assert_packs_like_reference(items, sources, rule, block, device, shift=0):
    """Bytes, flags (returned), untouched gaps and surroundings; sources go to `device` with their strides."""
    table = kernels.PackTable.build(items, rule=rule, block=block, device=device)
    room, bucket = filled_bucket(table.nbytes, device, shift)
    expected = bytearray([CANARY]) * table.nbytes
    expected_flags = reference.quantize_pack(items, sources, rule, block, expected)
    moved = [on_device(source, device) for source in sources]
    flags = kernels.quantize_pack(table, moved, bucket)
    assert flags.dtype == torch.int32
    assert flags.device == bucket.device
    assert_same_bytes(bucket, expected)
    assert flags.tolist() == expected_flags
    inside = torch.zeros_like(room, dtype=torch.bool)
    first = bucket.data_ptr() - room.data_ptr()
    inside[first : first + table.nbytes] = True
    assert bool((room[~inside] == CANARY).all()), "wrote outside the bucket"
    for before, after in zip(sources, moved, strict=True):
        assert reference.to_bytes(before) == reference.to_bytes(after.cpu()), "changed a source"
    return expected_flags


def on_device(x, device):
    """A copy with the same strides."""
    if x.is_contiguous():
        return x.to(device, copy=True)
    base = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return base.copy_(x)


def assert_same_bytes(actual, expected):
    """Name the first byte that differs."""
    actual = actual.cpu().reshape(-1).view(torch.uint8)
    expected = torch.frombuffer(bytearray(expected) or bytearray(1), dtype=torch.uint8)[: len(expected)]
    assert actual.shape == expected.shape
    wrong = (actual != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {len(expected)} bytes differ, the first at {at}: {int(actual[at]):#04x}, "
            f"expected {int(expected[at]):#04x}"
        )


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert_same_bytes(actual.contiguous(), reference.to_bytes(expected))
