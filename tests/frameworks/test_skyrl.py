"""SkyRL's own chunks and sender interface over a bridge."""

import asyncio
import importlib.util
import typing

import pytest
import typing_extensions

if importlib.util.find_spec("skyrl") is None:
    pytest.skip("SkyRL is not installed: make test-frameworks does", allow_module_level=True)

from fp8bridge import LoopbackServer
from fp8bridge.adapters.skyrl import BridgeSender
from fp8bridge.errors import ServerError

from ..support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, tiny_model
from .support import run_snippet, save_model

pytestmark = pytest.mark.frameworks

# SkyRL's other modules are for Python 3.12, where pydantic takes the standard library's TypedDict.
ON_PYTHON_3_11 = "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict"


@pytest.fixture(scope="module")
def weight_sync():
    kept, typing.TypedDict = typing.TypedDict, typing_extensions.TypedDict
    try:
        yield importlib.import_module("skyrl.backends.skyrl_train.weight_sync")
    finally:
        typing.TypedDict = kept


def test_the_snippet_sends_chunks_to_a_server(server, weight_sync, tmp_path):
    save_model(tmp_path / "model")
    old = server.checksums()
    printed = run_snippet("skyrl.md", tmp_path, tmp_path / "model", server.server.url, before=ON_PYTHON_3_11)
    assert printed.splitlines() == ["1 {}", "2 {}"]
    assert server.version() == "2"
    assert server.checksums() != old


def test_it_is_skyrls_sender(weight_sync):
    assert weight_sync.WeightTransferSender.__abstractmethods__ == {"send_chunks", "teardown"}
    assert all(callable(getattr(BridgeSender, name)) for name in weight_sync.WeightTransferSender.__abstractmethods__)


def test_chunks_of_several_tensors_arrive_bit_for_bit_and_errors_are_raised(weight_sync):
    model, servers = tiny_model(), [LoopbackServer(name, layout=FP8_LAYOUT) for name in "ab"]
    sender = BridgeSender(servers, FP8_CONFIG, transport="loopback", bucket_nbytes=30_000)
    chunk = weight_sync.WeightChunk(
        list(model), [str(t.dtype) for t in model.values()], [list(t.shape) for t in model.values()], [*model.values()]
    )
    asyncio.run(sender.send_chunks([chunk]))
    for server in servers:
        assert_same_bits(server.tensors, expected_wire(model))
    servers[1].fail_at_bucket = 1
    with pytest.raises(ServerError, match="b is not reachable"):
        asyncio.run(sender.send_chunks([chunk]))
    assert (servers[0].weight_version, sender.report.version) == ("1", 1)
    sender.teardown()
