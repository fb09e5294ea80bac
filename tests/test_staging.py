"""A server's tensors: whole old version or whole new version, never a mix."""

import pytest
import torch

from fp8bridge import BridgeConfig, ServerLayout
from fp8bridge.errors import ChecksumError, CommitError, ServerMismatchError, WireError
from fp8bridge.kernels import reference
from fp8bridge.planner import make_plan
from fp8bridge.staging import StagedWeights, bucket_checksums, tensor_checksum

from .support import FP8_LAYOUT, SplitSource, assert_same_bits, expected_wire, tiny_model


@pytest.fixture
def manifest():
    described = [SplitSource(tiny_model(), 0, 1).describe()]
    return make_plan(described, FP8_LAYOUT, BridgeConfig(bucket_nbytes=60_000)).manifest


def memory_of(bucket, wire):
    parts = [wire[e.name].contiguous().reshape(-1).view(torch.uint8) for e in bucket.entries]
    return torch.cat(parts)


def stage(weights, bucket, wire, **change):
    memory = change.get("memory", memory_of(bucket, wire))
    weights.stage(bucket.index, memory, change.get("sums", bucket_checksums(bucket, memory_of(bucket, wire))))


@pytest.fixture
def weights():
    return StagedWeights(expected_wire(tiny_model(seed=1)), FP8_LAYOUT)


NEW = expected_wire(tiny_model(seed=2))


def test_nothing_shows_before_commit_and_everything_after(weights, manifest):
    old = dict(weights.tensors)
    weights.begin(manifest)
    for bucket in reversed(manifest.buckets):
        stage(weights, bucket, NEW)
        assert_same_bits(weights.tensors, old)
    weights.commit()
    assert_same_bits(weights.tensors, NEW)


def test_abort_keeps_the_old_version_and_a_new_update_works(weights, manifest):
    old = dict(weights.tensors)
    weights.begin(manifest)
    stage(weights, manifest.buckets[0], NEW)
    weights.abort()
    assert_same_bits(weights.tensors, old)
    weights.begin(manifest)
    for bucket in manifest.buckets:
        stage(weights, bucket, NEW)
    weights.commit()
    assert_same_bits(weights.tensors, NEW)


def test_commit_with_a_missing_bucket_changes_nothing(weights, manifest):
    old = dict(weights.tensors)
    weights.begin(manifest)
    for bucket in manifest.buckets[:-1]:
        stage(weights, bucket, NEW)
    with pytest.raises(CommitError, match=f"{manifest.buckets[-1].index}"):
        weights.commit()
    assert_same_bits(weights.tensors, old)


def test_commit_without_update(weights):
    with pytest.raises(CommitError, match="nothing to commit"):
        weights.commit()


def test_a_changed_byte_is_named_by_tensor(weights, manifest):
    weights.begin(manifest)
    bucket = manifest.buckets[0]
    memory = memory_of(bucket, NEW)
    entry = bucket.entries[-1]
    memory[entry.offset + entry.nbytes // 2] ^= 0x80
    with pytest.raises(ChecksumError, match="changed on the way") as caught:
        stage(weights, bucket, NEW, memory=memory)
    assert caught.value.tensor == entry.name
    assert bucket.index in weights.missing


def test_duplicate_size_and_range(weights, manifest):
    weights.begin(manifest)
    bucket = manifest.buckets[0]
    with pytest.raises(WireError, match="the plan says"):
        stage(weights, bucket, NEW, memory=memory_of(bucket, NEW)[:-1])
    with pytest.raises(WireError, match="checksums"):
        stage(weights, bucket, NEW, sums=[1])
    stage(weights, bucket, NEW)
    with pytest.raises(WireError, match="came twice"):
        stage(weights, bucket, NEW)
    with pytest.raises(WireError, match="bucket 999"):
        weights.bucket(999)


def test_outside_of_an_update(weights):
    with pytest.raises(WireError, match="outside"):
        weights.stage(0, torch.zeros(1, dtype=torch.uint8), bytes(8))


def test_every_kind_of_difference_is_listed(manifest):
    tensors = expected_wire(tiny_model())
    tensors["model.norm.weight"] = torch.zeros(7, dtype=torch.bfloat16)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(320, 192, dtype=torch.bfloat16)
    tensors["model.layers.9.extra.weight"] = torch.zeros(1, dtype=torch.bfloat16)
    del tensors["model.embed_tokens.weight"]
    weights = StagedWeights(tensors, ServerLayout(block=(64, 128)))
    text = "\n".join(weights.differences(manifest))
    for piece in (
        "layout block",
        "model.norm.weight is bfloat16 [7]",
        "up_proj.weight is bfloat16",
        "layers.9.extra.weight bfloat16 [1] is on the server and not in the update",
        "model.embed_tokens.weight bfloat16 [101, 192] is not on the server",
    ):
        assert piece in text
    with pytest.raises(ServerMismatchError, match="5 differences"):
        weights.begin(manifest)


def test_checksums_are_the_kernels_of_the_raw_bytes(weights):
    name = "model.layers.0.mlp.up_proj.weight"
    raw = weights.tensors[name].view(torch.uint8).reshape(-1)
    assert weights.checksums()[name] == reference.checksum(bytes(raw.tolist()))
    assert tensor_checksum(weights.tensors[name]) == weights.checksums()[name]
