"""Requests that are running while the weights change, in each of SGLang's pause modes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from .rig import PROMPT, Sender, greedy, make_manifest, reference

LONG = 300


def update_while_running(server, mode, *, seed, version, flush):
    """Pause in the middle of a long request, change the weights, continue; its answer and the flush status."""
    join = server.in_background(lambda: server.generate(LONG, return_logprob=True))
    server.wait_running()
    time.sleep(0.2)
    server.ok("/pause_generation", {"mode": mode})
    server.update(seed, version)
    flushed = server.post("/flush_cache").status_code if flush else None
    server.ok("/continue_generation", {"torch_empty_cache": False})
    return join(), flushed


def spans_of(answer, *versions):
    spans = answer["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == list(versions)
    assert spans[0]["start"] == 0
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(spans))
    assert spans[-1]["end"] == len(answer["output_ids"])
    return spans


def test_retract_recomputes_the_kv_with_the_new_weights(server):
    server.update(2, "old")
    answer, flushed = update_while_running(server, "retract", seed=3, version="new", flush=True)
    assert flushed == 200, "no KV of the old weights is left"
    spans = spans_of(answer, "old", "new")
    split = spans[0]["end"]
    assert 0 < split < LONG
    assert answer["meta_info"]["num_retractions"] == 1
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": LONG}
    assert answer["meta_info"]["weight_version"] == "new"
    tokens = answer["output_ids"]
    assert tokens[:split] == greedy(reference(2), PROMPT, split)
    assert tokens[split:] == greedy(reference(3), PROMPT + tokens[:split], LONG - split)


def test_in_place_goes_on_with_the_old_kv(server):
    server.update(2, "old")
    answer, flushed = update_while_running(server, "in_place", seed=3, version="new", flush=True)
    assert flushed == 400, "SGLang refuses to flush while a request holds KV"
    split = spans_of(answer, "old", "new")[0]["end"]
    assert 0 < split < LONG
    assert answer["meta_info"]["num_retractions"] == 0
    tokens = answer["output_ids"]
    model = reference(2)
    cache = model.new_cache()
    assert tokens[:split] == greedy(model, PROMPT, 1, None) + greedy_tail(model, cache, tokens, split)
    model.weights.tensors = reference(3).weights.tensors
    assert tokens[split:] == greedy(model, tokens[:split], LONG - split, cache)
    assert tokens[split:] != greedy(reference(3), PROMPT + tokens[:split], LONG - split), "old KV must show"


def greedy_tail(model, cache, tokens, split):
    """Tokens 1 to split of a greedy run that leaves its KV in `cache`."""
    with torch.inference_mode():
        first = int(model.logits(PROMPT, cache, keep=1)[-1].argmax())
    return greedy(model, [first], split - 1, cache)


def test_abort_ends_what_is_running_and_waiting(server):
    server.update(2, "old")
    joins = [server.in_background(lambda: server.generate(LONG)) for _ in range(2)]
    server.wait_running(2)
    server.ok("/pause_generation")
    server.update(3, "new")
    assert server.post("/flush_cache").status_code == 200
    server.ok("/continue_generation")
    for join in joins:
        answer = join()
        spans_of(answer, "old")
        assert answer["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "Aborted",
            "status_code": None,
            "err_type": None,
        }
        count = len(answer["output_ids"])
        assert count < LONG
        assert answer["output_ids"] == greedy(reference(2), PROMPT, count)


def test_without_a_pause_the_update_waits_for_running_requests(server):
    """As in SGLang: begin waits, requests that come later are of the new version or wait for it."""
    server.update(2, "old")
    join = server.in_background(lambda: server.generate(LONG))
    server.wait_running()
    server.update(3, "new")
    answer = join()
    spans_of(answer, "old")
    assert len(answer["output_ids"]) == LONG
    assert answer["output_ids"] == greedy(reference(2), PROMPT, LONG)
    spans_of(server.generate(5), "new")


def test_requests_that_come_during_a_paused_update_wait_for_the_new_weights(server):
    server.update(2, "old")
    server.ok("/pause_generation", {"mode": "retract"})
    assert server.http.get("/ready").status_code == 503
    join = server.in_background(lambda: server.generate(8))
    server.wait_for(lambda: server.load()["num_waiting_reqs"] == 1)
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health_generate").status_code == 200
    server.update(3, "new")
    assert server.post("/flush_cache").status_code == 200, "waiting requests hold no KV"
    server.ok("/continue_generation")
    answer = join()
    spans_of(answer, "new")
    assert answer["output_ids"] == greedy(reference(3), PROMPT, 8)
    assert server.http.get("/ready").status_code == 200


def test_health_answers_while_buckets_arrive(server):
    tensors = reference(4).weights.tensors
    manifest = make_manifest(tensors, server.layout)
    with Sender(tensors, manifest, change=lambda i, p: p if i == 0 else None) as sender:
        server.begin(sender, manifest)
        join = server.in_background(
            lambda: server.post("/update_weights_from_zmq", server.pull_body(sender, manifest, timeout_s=10))
        )
        server.wait_for(lambda: server.info()["fp8bridge"]["session"] == "receiving" and sender.acks)
        start = time.monotonic()
        assert server.http.get("/health").status_code == 200
        assert len(server.generate(4)["output_ids"]) == 4
        assert time.monotonic() - start < 5
        start = time.monotonic()
        server.ok("/abort_weight_update", {"session": sender.session})
        assert time.monotonic() - start < 2, "an abort stops a running pull promptly"
        assert "aborted" in join().json()["message"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_aborted_update_leaves_a_running_request_as_if_nothing_was(server, mode):
    server.update(2, "old")
    tensors = reference(5).weights.tensors
    manifest = make_manifest(tensors, server.layout)
    join = server.in_background(lambda: server.generate(LONG))
    server.wait_running()
    with Sender(tensors, manifest) as sender:
        server.ok("/pause_generation", {"mode": mode})
        server.begin(sender, manifest)
        server.ok("/update_weights_from_zmq", server.pull_body(sender, manifest))
        server.ok("/abort_weight_update", {"session": sender.session})
        server.ok("/continue_generation")
    answer = join()
    spans_of(answer, "old")
    assert answer["output_ids"] == greedy(reference(2), PROMPT, LONG)


def test_abort_request_by_prefix_and_for_all(server):
    one = server.in_background(lambda: server.generate(LONG, rid="train-1"))
    two = server.in_background(lambda: server.generate(LONG, rid="eval-1"))
    server.wait_running(2)
    response = server.post("/abort_request", {"rid": "train"})
    assert (response.status_code, response.content) == (200, b"")
    assert one()["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_running(1)
    server.post("/abort_request", {"abort_all": True})
    answer = two()
    assert answer["meta_info"]["id"] == "eval-1"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


def test_flush_waits_for_idle_if_asked(server):
    join = server.in_background(lambda: server.generate(500))
    server.wait_running()
    refused = server.http.post("/flush_cache")
    assert (refused.status_code, refused.text) == (400, "Flush cache failed.\n")
    late = server.http.post("/flush_cache", params={"timeout": 0.05})
    assert (late.status_code, late.text) == (400, "Timed out waiting for idle state.")
    waits = server.in_background(lambda: server.http.post("/flush_cache", params={"timeout": 30}))
    time.sleep(0.1)
    assert server.http.post("/flush_cache").text == "Another flush_cache is already in progress."
    server.post("/abort_request", {"abort_all": True})
    done = waits()
    assert done.status_code == 200
    assert done.text.startswith("Cache flushed.\n")
    join()


def test_a_client_that_hangs_up_takes_its_requests_along(server):
    import httpx

    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            "/generate",
            json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}},
            timeout=0.3,
        )
    start = time.monotonic()
    server.wait_for(lambda: server.load()["num_running_reqs"] == 0)
    assert time.monotonic() - start < 3
