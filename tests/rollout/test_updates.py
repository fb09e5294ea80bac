"""The whole way of an update: real process, real HTTP, real ZMQ."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from fp8bridge.staging import tensor_checksum

from .rig import PROMPT, Sender, greedy, make_manifest, reference


def expected_checksums(seed):
    return {n: f"{tensor_checksum(t):016x}" for n, t in reference(seed).weights.tensors.items()}


def test_an_update_replaces_every_byte_and_the_tokens(server):
    for seed, version in ((2, "v2"), (3, "v3")):
        answer = server.update(seed, version)
        model = reference(seed)
        assert answer["success"] is True
        assert answer["nbytes"] == sum(t.nbytes for t in model.weights.tensors.values())
        assert answer["seconds"] > 0
        assert server.checksums() == expected_checksums(seed)
        assert server.version() == version == server.info()["weight_version"]
        answer = server.generate(12)
        assert answer["output_ids"] == greedy(model, PROMPT, 12)
        assert answer["meta_info"]["weight_version"] == version


def test_nothing_is_visible_before_commit_nor_after_an_abort(server):
    before = server.checksums(), server.generate(10)["output_ids"], server.version()
    tensors = reference(9).weights.tensors
    manifest = make_manifest(tensors, server.layout)
    with Sender(tensors, manifest) as sender:
        server.begin(sender, manifest)
        server.ok("/update_weights_from_zmq", server.pull_body(sender, manifest))
        assert len(sender.acks) == len(manifest.buckets)
        assert (server.checksums(), server.generate(10)["output_ids"], server.version()) == before
        assert server.info()["fp8bridge"]["session"] == "open"
        assert server.ok("/abort_weight_update", {"session": sender.session})["message"] == "Success"
    assert (server.checksums(), server.generate(10)["output_ids"], server.version()) == before
    assert "client asked" in server.info()["fp8bridge"]["last_abort"]["reason"]
    # And the next update is not disturbed by it.
    server.update(4, "v4")
    assert server.checksums() == expected_checksums(4)


def test_a_pull_that_was_interrupted_goes_on_where_it_stopped(server):
    tensors = reference(5).weights.tensors
    manifest = make_manifest(tensors, server.layout)
    last = manifest.buckets[-1].index
    assert last > 1
    with Sender(tensors, manifest, change=lambda i, p: None if i == last else p) as first:
        server.begin(first, manifest)
        assert "heard nothing" in server.refused(
            "/update_weights_from_zmq", server.pull_body(first, manifest, timeout_s=0.5)
        )
        words = server.refused("/end_weight_update", {"session": first.session, "weight_version": "v5"})
        assert f"buckets [{last}] have not arrived" in words
        with Sender(tensors, manifest, order=[last], welcome=_welcome(last)) as second:
            second.session = first.session
            server.ok("/update_weights_from_zmq", server.pull_body(second, manifest))
        server.ok("/end_weight_update", {"session": first.session, "weight_version": "v5"})
    assert server.checksums() == expected_checksums(5)


def _welcome(*indexes):
    from fp8bridge.wire import Welcome

    return Welcome(indexes, 1)


def test_two_senders_share_the_buckets(server):
    tensors = reference(6).weights.tensors
    manifest = make_manifest(tensors, server.layout, bucket_nbytes=20_000)
    indexes = [b.index for b in manifest.buckets]
    even, odd = indexes[::2], indexes[1::2]
    with (
        Sender(tensors, manifest, order=even, welcome=_welcome(*even)) as a,
        Sender(tensors, manifest, order=odd, welcome=_welcome(*odd)) as b,
    ):
        b.session = a.session
        server.begin(a, manifest)
        body = server.pull_body(a, manifest, endpoints=[a.endpoint, b.endpoint])
        server.ok("/update_weights_from_zmq", body)
        server.ok("/end_weight_update", {"session": a.session, "weight_version": "v6"})
    assert server.checksums() == expected_checksums(6)


def test_the_weights_can_be_read_back(server):
    server.update(7, "v7")
    data = server.http.get("/fp8bridge/weights").content
    tensors = load(data)
    for name, want in reference(7).weights.tensors.items():
        assert torch.equal(tensors[name].view(torch.uint8), want.view(torch.uint8)), name
    assert b'"weight_version":"v7"' in data[:65536]
    rows = server.ok("/get_weights_by_name", {"name": "model.embed_tokens.weight", "truncate_size": 2})
    assert torch.equal(torch.tensor(rows), reference(7).weights.tensors["model.embed_tokens.weight"][:2].float())


def test_snapshot_reset_sync_compare(server):
    """SGLang's end-to-end proof: what was scrambled comes back through a sync, and only through that."""
    server.update(8, "v8")
    server.ok("/weights_checker", {"action": "snapshot"})
    server.ok("/weights_checker", {"action": "reset_tensors"})
    assert server.checksums() != expected_checksums(8)
    assert "check tensor equality failed" in server.refused("/weights_checker", {"action": "compare"})
    server.update(8, "v8b")
    server.ok("/weights_checker", {"action": "compare"})
    assert "no snapshot" in server.refused("/weights_checker", {"action": "compare"})


def test_the_checksum_answer_has_sglangs_shape(server):
    answer = server.ok("/weights_checker", {"action": "checksum", "skip_tensor_list": ["norm"]})
    assert answer["success"] is True
    assert answer["message"] == "Success."
    (rank,) = answer["ranks"]
    assert set(rank) == {"checksums", "per_gpu_checksum", "parallelism_info"}
    assert rank["parallelism_info"][0]["role"] == "target"
    assert not any("norm" in name or name.endswith("_scale_inv") for name in rank["checksums"])
    assert len(answer["per_engine_checksum"]) == 64
    assert all(len(value) == 16 for value in answer["tensors"].values())
    assert any(name.endswith("_scale_inv") for name in answer["tensors"])


def test_end_without_an_update_just_closes(server):
    version = server.version()
    assert server.ok("/begin_weight_update")["message"] == "Success"
    assert server.ok("/end_weight_update")["message"] == "Success"
    assert server.version() == version


def test_a_version_is_never_claimed_without_its_weights(server):
    version = server.version()
    server.ok("/begin_weight_update")
    assert "nothing was committed" in server.refused("/end_weight_update", {"weight_version": "v99"})
    server.ok("/abort_weight_update")
    assert server.version() == version


@pytest.mark.parametrize("aborts", [True, False])
def test_a_version_can_be_set_by_hand(server, aborts):
    server.update(2, "v2")
    body = {"new_version": "renamed"} | ({} if aborts else {"abort_all_requests": False})
    join = server.in_background(lambda: server.generate(200))
    server.wait_running()
    answer = server.ok("/update_weight_version", body)
    assert answer == {"success": True, "message": "Weight version updated to renamed", "new_version": "renamed"}
    meta = join()["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if aborts else "length")
    assert [s["version"] for s in meta["weight_versions"]] == (["v2"] if aborts else ["v2", "renamed"])
