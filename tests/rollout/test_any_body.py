"""Whatever is posted to a control endpoint: an answer below 500, a server that lives, and the weights it had."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_fuzz import BODIES, JSON

POSTS = [
    *("/begin_weight_update", "/end_weight_update", "/abort_weight_update", "/update_weights_from_zmq"),
    *("/fp8bridge/preflight", "/update_weight_version", "/weights_checker", "/get_weights_by_name"),
    *("/pause_generation", "/continue_generation", "/flush_cache", "/abort_request", "/generate"),
]
ODD = [
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"new_version": "\\ud800"}',
    b'{"session": "\\udfff", "lease_s": 5}',
    b'{"session": "s", "lease_s": 1' + b"0" * 400 + b"}",
    b'{"mode": "abort", "lease_s": 1e999}',
    b'{"lease_s": NaN}',
    b'{"names": ["\\u0000"], "name": "\\u0000"}',
    b'{"input_ids": [' + b"9" * 5000 + b"]}",
    b"\xff\xfe\x00",
    b"",
    b"null",
    b'"text"',
]


def settle(server):
    server.post("/abort_weight_update", {"whosever": True})
    server.ok("/continue_generation")
    server.ok("/update_weight_version", {"new_version": "default"})


def post(server, path, body):
    response = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code < 500, (path, body[:200], response.text[:300])
    return response


@pytest.mark.parametrize("path", POSTS)
def test_odd_bodies(server, path):
    before = server.checksums(), server.generate(4)["output_ids"]
    for body in ODD:
        post(server, path, body)
        assert server.info()["fp8bridge"] is not None
        assert server.version()
    settle(server)
    assert (server.checksums(), server.generate(4)["output_ids"]) == before
    server.update(1, "default")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(POSTS), body=BODIES | JSON)
def test_any_body(server, path, body):
    post(server, path, json.dumps(body).encode())


def test_and_then_it_still_takes_an_update(server):
    settle(server)
    server.update(2, "default")
    server.update(1, "default")
    server.generate(4)
