"""One table of endpoints, two clients: what they send and what they make of an answer is the same."""

import asyncio
import inspect
import json
import re
import time
from pathlib import Path

import pytest

from fp8bridge.errors import ConfigError, ServerRefusedError, ServerTimeoutError, ServerUnreachableError
from fp8bridge.http import AsyncHttp, Http
from fp8bridge.plan import Bucket, Entry
from fp8bridge.sglang import endpoints
from fp8bridge.sglang.client import AsyncSglangClient, SglangClient
from tests.scripted import Scripted

BUCKET = Bucket(0, 0, 6, (Entry("a", "bfloat16", (3,), 0, 6), Entry("none", "bfloat16", (0,), 6, 0)))
GROUP = {"host": "10.0.0.1", "port": 5, "rank_offset": 1, "world_size": 2, "group": "g", "backend": "nccl"}
CALLS = [
    ("server_info", (), {}, "/server_info", None),
    ("weight_version", (), {}, "/model_info", None),
    ("pause", ("retract",), {}, "/pause_generation", {"mode": "retract"}),
    ("resume", (), {"timeout_s": 5}, "/continue_generation", {"torch_empty_cache": False}),
    ("begin", (), {}, "/begin_weight_update", {"selector": "all"}),
    ("end", (), {}, "/end_weight_update", {}),
    (
        "init_group",
        (),
        GROUP | {"timeout_s": 5},
        "/init_weights_update_group",
        {
            "master_address": "10.0.0.1",
            "master_port": 5,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
            "backend": "nccl",
        },
    ),
    ("destroy_group", ("g",), {"timeout_s": 5}, "/destroy_weights_update_group", {"group_name": "g"}),
    (
        "update_from_distributed",
        (BUCKET, "g"),
        {"timeout_s": 5},
        "/update_weights_from_distributed",
        {
            "names": ["a"],
            "dtypes": ["bfloat16"],
            "shapes": [[3]],
            "group_name": "g",
            "load_format": "flattened_bucket",
            "flush_cache": False,
        },
    ),
    (
        "update_from_tensor",
        (["x", "y"], "direct"),
        {"timeout_s": 5},
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["x", "y"], "load_format": "direct", "flush_cache": False},
    ),
    (
        "update_from_ipc",
        ({"GPU-1": "ipc://s"},),
        {"timeout_s": None},
        "/update_weights_from_ipc",
        {"zmq_handles": {"GPU-1": "ipc://s"}, "flush_cache": False},
    ),
    ("set_version", ("7",), {}, "/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
    ("flush_cache", (), {"timeout_s": 2.5}, "/flush_cache?timeout=2.5", None),
    ("checker", ("checksum",), {}, "/weights_checker", {"action": "checksum"}),
    (
        "release_memory",
        (["weights", "kv_cache"],),
        {},
        "/release_memory_occupation",
        {"tags": ["weights", "kv_cache"]},
    ),
    ("resume_memory", (["weights"],), {}, "/resume_memory_occupation", {"tags": ["weights"]}),
]
KEYS = {"timeout_s": 0.5, "api_key": "user", "admin_api_key": "admin"}


@pytest.fixture
def server():
    scripted = Scripted()
    yield scripted
    scripted.close()


def ask(kind, url, name, *args, **kwargs):
    """The same call by either client."""
    if kind == "threads":
        client = SglangClient(Http(url, **KEYS))
        try:
            return getattr(client, name)(*args, **kwargs)
        finally:
            client.close()

    async def run():
        async with AsyncSglangClient(AsyncHttp(url, **KEYS)) as client:
            return await getattr(client, name)(*args, **kwargs)

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["threads", "asyncio"])


@both
@pytest.mark.parametrize(("name", "args", "kwargs", "path", "body"), CALLS, ids=[c[0] for c in CALLS])
def test_the_request_and_what_is_made_of_the_answer(server, kind, name, args, kwargs, path, body):
    answer = {"success": True, "weight_version": 3, "version": "0.5.23"}
    server.answers[path] = (200, answer)
    expected = {"server_info": answer, "checker": answer, "weight_version": "3"}.get(name)
    assert ask(kind, server.url, name, *args, **kwargs) == expected
    [(asked, key, sent)] = server.seen
    assert (asked, json.loads(sent) if sent else None) == (path, body)
    assert key == f"Bearer {'user' if name in ('server_info', 'weight_version') else 'admin'}"


def test_every_endpoint_is_a_method_with_its_words():
    made = {n for n, f in vars(endpoints).items() if inspect.isfunction(f) and not n.startswith("_")} - {"dataclass"}
    assert made == {c[0] for c in CALLS}
    for client in (SglangClient, AsyncSglangClient):
        assert made <= set(dir(client))
        assert client.pause.__doc__ == endpoints.pause.__doc__


@both
def test_a_server_that_does_not_say_its_version(server, kind):
    server.answers["/model_info"] = (200, {})
    assert ask(kind, server.url, "weight_version") is None


@both
def test_a_refusal_keeps_status_and_words(server, kind):
    server.answers["/begin_weight_update"] = (400, {"success": False, "message": "a session is already open"})
    with pytest.raises(ServerRefusedError, match="a session is already open") as caught:
        ask(kind, server.url, "begin")
    assert (caught.value.status, caught.value.server) == (400, server.url)


@both
def test_silence_and_absence_are_told_apart(server, kind):
    server.answers["/pause_generation"] = lambda: time.sleep(1.5) or (200, {})
    with pytest.raises(ServerTimeoutError, match=r"did not answer /pause_generation in 0\.5 s"):
        ask(kind, server.url, "pause", "abort")
    server.answers["/continue_generation"] = lambda: time.sleep(0.6) or (200, {})
    with pytest.raises(ServerTimeoutError, match=r"did not answer /continue_generation in 0\.1 s"):
        ask(kind, server.url, "resume", timeout_s=0.1)
    server.server.server_close()
    server.server.shutdown()
    with pytest.raises(ServerUnreachableError, match="is the server running"):
        ask(kind, server.url, "begin")


def test_an_address_that_is_none():
    for make in (Http, AsyncHttp):
        with pytest.raises(ConfigError, match="'10.0.0.1:30000' is not a server address"):
            make("10.0.0.1:30000", timeout_s=1)


def test_servers_are_asked_at_once_and_a_cancelled_call_ends(server):
    server.answers["/pause_generation"] = lambda: time.sleep(0.3) or (200, {})

    async def run():
        async with AsyncSglangClient(AsyncHttp(server.url, timeout_s=5)) as client:
            start = time.monotonic()
            await asyncio.gather(*(client.pause("abort") for _ in range(4)))
            together = time.monotonic() - start
            call = asyncio.ensure_future(client.pause("abort"))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            server.answers["/model_info"] = (200, {"weight_version": "9"})
            return together, await client.weight_version()

    together, version = asyncio.run(run())
    assert together < 0.9, "four calls of 0.3 s each"
    assert version == "9"


def test_the_documented_way_to_pause_many_servers():
    text = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "async def pause_all" in c]
    found = {}
    exec(code, found)
    servers = [Scripted() for _ in range(3)]
    for server in servers:
        server.answers["/pause_generation"] = (200, {"success": True})
    asyncio.run(found["pause_all"]([s.url for s in servers]))
    for server in servers:
        assert [(path, json.loads(body)) for path, _, body in server.seen] == [
            ("/pause_generation", {"mode": "abort"})
        ]
        server.close()
