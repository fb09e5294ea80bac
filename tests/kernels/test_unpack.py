import pytest
import torch

from fp8bridge import kernels
from fp8bridge.errors import ConfigError
from fp8bridge.kernels import UnpackItem, reference

from .cases import assert_same_bytes
from .test_checksum import random_bytes


def destination(rows, cols, dtype, device, left=0, right=0):
    """[rows, cols] inside a wider matrix of canaries; returns (view, the whole matrix as bytes)."""
    itemsize = dtype.itemsize
    room = torch.full((rows, (left + cols + right) * itemsize), 0x5A, dtype=torch.uint8, device=device)
    return room.view(dtype)[:, left : left + cols], room


def scatter(items, bucket, destinations, device):
    table = kernels.UnpackTable.build(items, device=device)
    kernels.unpack_scatter(table, bucket.to(device), destinations)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "offset", "left", "right"),
    [
        (64, 128, torch.bfloat16, 0, 0, 0),
        (64, 128, torch.float8_e4m3fn, 16, 16, 32),
        (70, 96, torch.float8_e4m3fn, 16, 5, 3),
        (33, 129, torch.bfloat16, 7, 1, 0),
        (3, 3, torch.float32, 1, 0, 0),
        (1, 1, torch.uint8, 15, 4, 4),
        (300, 256, torch.uint8, 32, 0, 0),
        (1, 40000, torch.uint8, 0, 0, 0),
        (2, 20000, torch.bfloat16, 48, 8, 8),
        (0, 5, torch.float16, 3, 0, 0),
    ],
)
def test_writes_the_view_and_nothing_else(rows, cols, dtype, offset, left, right, device):
    nbytes = rows * cols * dtype.itemsize
    bucket = random_bytes(offset + nbytes + 3)
    view, room = destination(rows, cols, dtype, device, left, right)
    name = str(dtype).removeprefix("torch.")
    scatter([UnpackItem(rows, cols, name, offset)], bucket, [view], device)
    like = torch.empty(rows, cols, dtype=dtype)
    expected_room = torch.full_like(room.cpu(), 0x5A)
    expected = reference.unpack(offset, like, reference.to_bytes(bucket))
    expected_room.view(dtype)[:, left : left + cols] = expected
    assert_same_bytes(room, reference.to_bytes(expected_room))


def test_many_items_in_one_launch_and_again_with_other_bytes(device):
    items = [UnpackItem(8, 16 * i, "uint8", 128 * i * i) for i in range(1, 12)]
    views = [torch.zeros(8, 16 * i, dtype=torch.uint8, device=device) for i in range(1, 12)]
    table = kernels.UnpackTable.build(items, device=device)
    bound = table.bind(views)
    for seed in (1, 2):
        bucket = random_bytes(table.nbytes, seed)
        bound.launch(bucket.to(device))
        for item, view in zip(items, views, strict=True):
            assert_same_bytes(view, reference.to_bytes(bucket[item.offset :][: 8 * item.cols]))


@pytest.mark.parametrize("rule", kernels.RULES)
def test_what_was_packed_arrives(rule, device):
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(200, generator=torch.Generator().manual_seed(1))
    items = [
        kernels.PackItem(130, 200, "bfloat16", 16, 0),
        kernels.PackItem(1, 200, "float32", 16 + 130 * 200, None),
    ]
    table = kernels.PackTable.build(items, rule=rule, device=device)
    bucket = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
    kernels.quantize_pack(table, [weight.to(device), bias.to(device)], bucket)
    wanted = [
        UnpackItem(2, 2, "float32", 0),
        UnpackItem(130, 200, "float8_e4m3fn", 16),
        UnpackItem(1, 200, "float32", 16 + 130 * 200),
    ]
    out = [torch.zeros(w.rows, w.cols, device=device).to(getattr(torch, w.dtype)) for w in wanted]
    scatter(wanted, bucket, out, device)
    codes, scale_inv = reference.quantize(weight, rule)
    assert torch.equal(out[0].cpu(), scale_inv)
    assert torch.equal(out[1].cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(out[2].cpu()[0], bias)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="item 0: 'fp8' is no torch dtype"):
        kernels.UnpackTable.build([UnpackItem(1, 1, "fp8", 0)], device="cpu")
    with pytest.raises(ConfigError, match="item 0 has a negative"):
        kernels.UnpackTable.build([UnpackItem(1, -1, "uint8", 0)], device="cpu")
    table = kernels.UnpackTable.build([UnpackItem(2, 4, "uint8", 8)], device="cpu")
    with pytest.raises(ConfigError, match="tensor 0 is torch.float32"):
        table.bind([torch.zeros(2, 4)])
    with pytest.raises(ConfigError, match="0 tensors for a table of 1"):
        table.bind([])
    with pytest.raises(ConfigError, match="column stride 2"):
        table.bind([torch.zeros(4, 2, dtype=torch.uint8).t()])
    with pytest.raises(ConfigError, match="holds 15 bytes, but the table needs 16"):
        table.bind([torch.zeros(2, 4, dtype=torch.uint8)]).launch(torch.zeros(15, dtype=torch.uint8))
