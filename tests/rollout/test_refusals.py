"""What SGLang 0.5.23 refuses, this server refuses, in the same words, with the same error body.

The words are those recorded from a running 0.5.23 and read in its wheel.
"""

from __future__ import annotations

import pytest

from fp8bridge.layout import ServerLayout

from .rig import FP8_QWEN3, PROMPT, Sender, make_manifest, reference

DISTRIBUTED = {"names": [], "dtypes": [], "shapes": []}
OPEN = "a weight-update session is already open; call end_weight_update() first"
NOT_OPEN = "no weight-update session is open; call begin_weight_update() first"
BETWEEN = "must run between begin_weight_update() and end_weight_update()"
NO_TOKENIZER = (
    "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide input_ids or "
    "re-initialize the engine with skip_tokenizer_init=False."
)
TOO_MANY = (
    "Requested token count exceeds the model's maximum context length of 512 tokens. You requested a total of 604 "
    "tokens: 4 tokens from the input messages and 600 tokens for the completion. Please reduce the number of tokens "
    "in the input messages or the completion to fit within the limit."
)

SGLANG_WORDS = [
    # path, body, session open, message; the error body is {"success": false, "message": ...}
    ("/begin_weight_update", {}, True, OPEN),
    ("/end_weight_update", {}, False, NOT_OPEN),
    ("/update_weights_from_distributed", DISTRIBUTED, False, f"update_weights_from_distributed {BETWEEN}"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, False, f"update_weights_from_tensor {BETWEEN}"),
    ("/weights_checker", {"action": "explode"}, False, "Unsupported action='explode'"),
]


@pytest.mark.parametrize(("path", "body", "is_open", "words"), SGLANG_WORDS)
def test_words_about_weights(server, path, body, is_open, words):
    if is_open:
        server.ok("/begin_weight_update")
    response = server.post(path, body)
    if is_open:
        server.ok("/end_weight_update")
    assert response.status_code == 400
    assert response.json() == {"success": False, "message": words}


GENERATE_WORDS = [
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({}, "Either text, input_ids or input_embeds should be provided."),
    ({"text": "hello"}, NO_TOKENIZER),
    ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
    ({"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1, got 0."),
    ({"input_ids": PROMPT, "sampling_params": {"min_p": 2}}, "min_p must be in [0, 1], got 2."),
    (
        {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
        "temperature must be a non-negative finite number, got -1.",
    ),
    (
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
        "max_new_tokens must be at least 0, got -1.",
    ),
    ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 600}}, TOO_MANY),
    ({"input_ids": [1] * 512}, "The input (512 tokens) is longer than the model's context length (512 tokens)."),
    (
        {"input_ids": [[1], [2]], "rid": ["a", "a"]},
        "Duplicate request IDs detected within the request: ['a']",
    ),
]


@pytest.mark.parametrize(("body", "words"), GENERATE_WORDS)
def test_words_about_requests(server, body, words):
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert response.json() == {"error": {"message": words}}


OUR_WORDS = [
    ({"input_ids": PROMPT, "stream": True}, "stream=True is not carried by this server"),
    ({"input_ids": PROMPT, "top_logprobs_num": 3}, "top_logprobs_num=3 is not carried"),
    ({"input_ids": PROMPT, "sampling_params": {"n": 2}}, "n=2 is not carried"),
    ({"input_ids": PROMPT, "sampling_params": {"stop": ["x"]}}, "stop=['x'] is not carried"),
    ({"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty=0.5 is not carried"),
    ({"input_ids": PROMPT, "sampling_params": {"tempreature": 0}}, "unknown sampling parameters: tempreature"),
    ({"input_ids": PROMPT, "sampling_params": {"temperature": "hot"}}, "temperature must be int or float"),
    ({"input_ids": PROMPT, "sampling_params": {"stop_token_ids": ["x"]}}, "stop_token_ids must be token ids"),
    ({"input_ids": PROMPT, "sampling_params": 7}, "sampling_params must be an object"),
    ({"input_ids": [101]}, "token id 101; valid range is [0, 101)"),
    ({"input_ids": [True]}, "must be a list of token ids"),
    ({"input_ids": "abc"}, "input_ids cannot be empty"),
    ({"input_ids": [[1], []]}, "input_ids cannot be empty"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompts"),
    ({"input_ids": [1], "rid": ["a"]}, "rid should be a string for a single request"),
    ({"input_ids": [1], "return_logprob": 1}, "return_logprob must be a boolean"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "higher than the number of input tokens"),
    ([], "the body must be a JSON object"),
]


@pytest.mark.parametrize(("body", "words"), OUR_WORDS)
def test_what_is_not_carried_is_refused_and_not_ignored(server, body, words):
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


INVALID = [
    ("/pause_generation", {"mode": "gently"}, "body.mode: Input should be 'abort' or 'retract' or 'in_place'"),
    ("/begin_weight_update", {"selector": "some"}, "body.selector: Input should be"),
    ("/begin_weight_update", {"lease_s": "long"}, "body.lease_s: Input should be a number or null"),
    ("/update_weight_version", {}, "body.new_version: Field required"),
    ("/update_weight_version", {"new_version": 7}, "body.new_version: Input should be a string"),
    ("/update_weights_from_zmq", {"endpoints": "tcp://x"}, "body.endpoints: Input should be a list of a string"),
    ("/get_weights_by_name", {}, "body.name: Field required"),
    ("/abort_request", {"abort_all": "yes"}, "body.abort_all: Input should be a boolean"),
    ("/end_weight_update", [1], "body: Input should be a JSON object, not list"),
]


@pytest.mark.parametrize(("path", "body", "words"), INVALID)
def test_bodies_that_do_not_validate(server, path, body, words):
    response = server.http.post(path, json=body)
    answer = response.json()
    assert response.status_code == 400
    assert answer["object"] == "error"
    assert (answer["type"], answer["code"], answer["param"]) == ("Bad Request", 400, None)
    assert answer["message"].split(" validation error")[0].isdigit()
    assert words in answer["message"]


def test_bodies_that_are_no_json(server):
    json_type = {"content-type": "application/json"}
    assert "JSON decode error" in server.http.post("/pause_generation", content=b"{", headers=json_type).text
    assert "Field required" in server.http.post("/pause_generation").text
    # A web page can post text to loopback without asking; it cannot post JSON.
    text = server.http.post("/pause_generation", content=b"{}", headers={"content-type": "text/plain"})
    assert text.status_code == 400
    assert "Only 'application/json' is allowed" in text.json()["message"]
    assert server.load()["paused"] is False


def test_unknown_fields_and_endpoints(server):
    server.ok("/pause_generation", {"mode": "retract", "flavour": "vanilla"})
    server.ok("/continue_generation", {"torch_empty_cache": False})
    missing = server.post("/v1/completions")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert server.http.get("/generate").status_code == 405
    response = server.post("/get_weights_by_name", {"name": "model.nothing"})
    assert (response.status_code, response.json()) == (400, {"error": {"message": "Get parameter by name failed"}})


@pytest.mark.parametrize("timeout", ["soon", "-1", "nan"])
def test_flush_timeouts_that_are_no_seconds(server, timeout):
    response = server.http.post("/flush_cache", params={"timeout": timeout})
    assert response.status_code == 400
    assert "query.timeout" in response.json()["message"]


@pytest.mark.parametrize(
    "name",
    [
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_disk",
        "update_weights_from_ipc",
        "init_weights_update_group",
        "destroy_weights_update_group",
    ],
)
def test_other_transports_are_pointed_to_zmq(server, name):
    server.ok("/begin_weight_update")
    words = server.refused(f"/{name}", DISTRIBUTED)
    server.ok("/end_weight_update")
    assert words.startswith(
        f"{name} is not carried by this server; send the weights with POST /update_weights_from_zmq"
    )


@pytest.fixture(scope="module")
def manifest():
    return make_manifest(reference(2).weights.tensors, ServerLayout.from_hf_config(FP8_QWEN3))


def test_updates_outside_of_a_session_or_in_anothers(server, manifest):
    with Sender(reference(2).weights.tensors, manifest) as mine:
        body = server.pull_body(mine, manifest)
        assert server.refused("/update_weights_from_zmq", body) == f"update_weights_from_zmq {BETWEEN}"
        server.begin(mine, manifest)
        theirs = {"session": "theirs"}
        for path, more in (
            ("/update_weights_from_zmq", body),
            ("/end_weight_update", {}),
            ("/abort_weight_update", {}),
        ):
            assert "another client's weight-update session" in server.refused(path, more | theirs)
        assert "another client's" in server.refused("/end_weight_update", {})
        assert server.refused("/begin_weight_update", theirs) == OPEN
        server.ok("/abort_weight_update", {"session": mine.session})
    assert server.ok("/abort_weight_update", {"session": mine.session})["message"] == (
        "no weight-update session is open"
    )


def test_a_second_pull_at_the_same_time(server, manifest):
    with Sender(reference(2).weights.tensors, manifest, change=lambda i, p: None) as sender:
        server.begin(sender, manifest)
        body = server.pull_body(sender, manifest)
        join = server.in_background(lambda: server.post("/update_weights_from_zmq", body))
        server.wait_for(lambda: server.info()["fp8bridge"]["session"] == "receiving")
        assert "session is receiving" in server.refused("/update_weights_from_zmq", body)
        assert "session is receiving" in server.refused("/end_weight_update", {"session": sender.session})
        server.ok("/abort_weight_update", {"session": sender.session})
        assert join().status_code == 400


def test_sessions_with_senseless_values(server, manifest):
    assert "lease_s must be a positive" in server.refused("/begin_weight_update", {"lease_s": 0})
    assert "no draft model" in server.refused("/begin_weight_update", {"selector": "draft"})
    assert "not known here; send it to POST /fp8bridge/preflight" in server.refused(
        "/begin_weight_update", {"manifest_hash": "0" * 32}
    )
    server.ok("/begin_weight_update", {"session": "s"})
    body = {"endpoints": [], "session": "s", "manifest_hash": manifest.hash}
    assert "at least one sender" in server.refused("/update_weights_from_zmq", body)
    body = {"endpoints": ["tcp://127.0.0.1:1"], "session": "s", "manifest_hash": "f" * 32}
    assert "not known here" in server.refused("/update_weights_from_zmq", body)
    server.ok("/abort_weight_update", {"session": "s"})


def test_preflight_names_every_difference(server):
    tensors = dict(reference(2).weights.tensors)
    good = make_manifest(tensors, server.layout)
    assert server.ok("/fp8bridge/preflight", good.as_dict()) == {
        "success": True,
        "message": "Success",
        "hash": good.hash,
    }
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["stranger"] = tensors.pop("lm_head.weight")
    answer = server.post("/fp8bridge/preflight", make_manifest(tensors, server.layout).as_dict())
    assert answer.status_code == 400
    differences = answer.json()["differences"]
    assert len(differences) == 3
    assert any("model.norm.weight is bfloat16 [144] on the server, float32" in d for d in differences)
    assert any("lm_head.weight" in d and "not in the update" in d for d in differences)
    assert any("stranger" in d and "is not on the server" in d for d in differences)
    assert answer.json()["message"].startswith("3 differences between the update and the server")


def test_preflight_of_another_layout_or_of_nonsense(server):
    tensors = reference(2).weights.tensors
    other = make_manifest(tensors, ServerLayout(block=(64, 128)))
    assert "block: [64, 128] != [128, 128]" in server.refused("/fp8bridge/preflight", other.as_dict())
    for nonsense in ({}, {"layout": 1, "buckets": []}, good_but_overlapping(tensors, server.layout)):
        answer = server.post("/fp8bridge/preflight", nonsense)
        assert (answer.status_code, answer.json()["differences"]) == (400, [])


def good_but_overlapping(tensors, layout):
    data = make_manifest(tensors, layout).as_dict()
    data["buckets"][0]["entries"][1][3] = 0
    return data


def test_only_the_last_two_manifests_are_kept(server):
    tensors = reference(2).weights.tensors
    hashes = []
    for bucket_nbytes in (10_000, 20_000, 40_000):
        manifest = make_manifest(tensors, server.layout, bucket_nbytes)
        hashes.append(server.ok("/fp8bridge/preflight", manifest.as_dict())["hash"])
    assert len(set(hashes)) == 3
    assert "not known here" in server.refused("/begin_weight_update", {"manifest_hash": hashes[0]})
    for known in hashes[1:]:
        server.ok("/begin_weight_update", {"manifest_hash": known})
        server.ok("/abort_weight_update")
