"""docs/known-faults.md, and tests of the kinds of fault in it that no other file has."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import fp8bridge
from fp8bridge import BridgeConfig, LoopbackServer
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, LayoutError, ServerMismatchError, ServerRefusedError, ServerTimeoutError
from fp8bridge.layout import ServerLayout
from fp8bridge.sglang.server import SglangServer
from fp8bridge.transport.nccl import NcclTransport

from .support import FP8_CONFIG, FP8_LAYOUT, SplitSource, run_ranks, tiny_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/known-faults.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d\d \|", line)]
STATUS = ("tested", "does not apply", "open")


def test_the_page_has_every_report_once_and_a_status_for_each():
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS]
    assert all(len(c) == 4 for c in cells), [c for c in cells if len(c) != 4]
    assert len({c[0] for c in cells}) == len(cells) == 116
    assert len({c[1].split()[0] for c in cells}) == 116, "project and number"
    found = Counter(next(s for s in STATUS if c[3].startswith(s)) for c in cells)
    said = re.search(r"(\d+) tested, (\d+) do not apply, (\d+) open", PAGE)
    assert [int(n) for n in said.groups()] == [found[s] for s in STATUS]
    for c in cells:
        assert ("tests/" in c[3]) or not c[3].startswith("tested"), c
        assert len(c[3]) > 20, c


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 60
    defined = {}
    for path, name in named:
        if path not in defined:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            defined[path] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name.startswith("test_")
        assert name in defined[path], f"{path}::{name} is not there"


class Http:
    name = "http://server"

    def close(self):
        pass


@pytest.mark.parametrize("size", ["pp_size", "dp_size"])
def test_a_server_of_several_stages_or_replicas_is_refused(size):
    """Its update would reach a part of it."""
    facts = {"version": "0.5.23", "tp_size": 1, size: 2}
    with pytest.raises(ServerMismatchError, match=f"runs with {size} 2"):
        SglangServer(Http(), facts, timeout_s=1, host="127.0.0.1")


def test_a_trainer_of_several_ranks_must_choose_the_sender_where_only_one_can_send(monkeypatch):
    """One group for each server, from rank 0: a second source would take the first one's place."""
    model = tiny_model(layers=1)
    server = LoopbackServer("a", layout=FP8_LAYOUT)

    def work(rank):
        fp8bridge.connect(SplitSource(model, rank, 2), [server], transport="loopback")

    found = run_ranks(2, work, monkeypatch)
    assert all(isinstance(e, ConfigError) and "set senders='first'" in str(e) for e in found), found


@pytest.mark.parametrize("value", [None, "1"])
def test_an_environment_in_which_a_broadcast_would_hang_is_refused(monkeypatch, value):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if value:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is .* in the trainer"):
        NcclTransport([object()], BridgeConfig(transport="nccl"))


def test_a_server_that_is_none_of_sglangs_is_not_sent_to_over_nccl():
    config = BridgeConfig(transport="nccl", group_backend="gloo")
    with pytest.raises(ConfigError, match="which a is not"):
        NcclTransport([LoopbackServer("a", layout=FP8_LAYOUT)], config)


def test_stacked_experts_are_never_taken_for_the_fp8_ones_of_a_server():
    """Three dimensions in one tensor: sent as it is, so a server that holds FP8 under that name refuses."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model = {name: torch.randn(4, 256, 128).bfloat16(), "model.norm.weight": torch.ones(128).bfloat16()}
    held = {name: torch.zeros(4, 256, 128, dtype=torch.float8_e4m3fn), "model.norm.weight": torch.ones(128).bfloat16()}
    server = LoopbackServer("a", layout=FP8_LAYOUT, tensors=held | {f"{name}_scale_inv": torch.ones(4, 2, 1)})
    with pytest.raises(ServerMismatchError, match=r"experts\.gate_up_proj is float8_e4m3fn"):
        fp8bridge.connect(StateDictSource(model, FP8_CONFIG), [server], transport="loopback")


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "mxfp8"])
def test_a_quantization_with_scales_of_another_name_or_kind_is_refused(method):
    with pytest.raises(LayoutError, match=f"quant_method is '{method}'"):
        ServerLayout.from_hf_config({"quantization_config": {"quant_method": method}})


def test_no_prefix_in_common_is_an_error_that_shows_both():
    model = tiny_model(layers=1)
    held = {f"language_model.{n}": t for n, t in model.items()}
    server = LoopbackServer("a", layout=ServerLayout.from_hf_config({"torch_dtype": "bfloat16"}), tensors=held)
    with pytest.raises(ServerMismatchError, match=r"language_model\.model\..* is on the server and not in the update"):
        fp8bridge.connect(StateDictSource(model, {"torch_dtype": "bfloat16"}), [server], transport="loopback")


@pytest.mark.parametrize("value", [0, -1, "abc", float("nan"), None, [1]])
@pytest.mark.parametrize("field", ["request_timeout_s", "open_timeout_s", "bucket_timeout_s", "collective_timeout_s"])
def test_a_time_limit_is_a_positive_number_of_seconds(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be a positive number of seconds"):
        BridgeConfig(**{field: value})
    assert BridgeConfig(**{field: 0.5})


def test_an_update_is_always_the_whole_model():
    """Frozen or unchanged tensors too, so that a server that lost its weights gets them all."""
    model = tiny_model(layers=1)
    server = LoopbackServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(StateDictSource(model, FP8_CONFIG), [server], transport="loopback") as bridge:
        bridge.update_weights(version=1)
        for tensor in server.tensors.values():
            tensor.view(torch.uint8).zero_()
        bridge.update_weights(version=2)
        assert bridge.verify() == {"a": len(server.tensors)}


class Control:
    """An SGLang server's sessions, over a line on which an answer can be lost."""

    def __init__(self):
        self.open, self.lose, self.calls = False, "", []

    def _call(self, name, opens):
        self.calls.append(name)
        if self.open == opens:
            raise ServerRefusedError("a session is already open" if opens else "no session is open")
        self.open = opens
        if self.lose == name:
            raise ServerTimeoutError(f"no answer to {name}")

    def weight_version(self):
        return "default"

    def begin(self):
        self._call("begin", True)

    def end(self):
        self._call("end", False)


def test_a_session_whose_begin_was_not_heard_is_closed_and_not_taken_for_anothers():
    server = SglangServer(Http(), {"version": "0.5.23", "tp_size": 1}, timeout_s=1, host="127.0.0.1")
    server.client = control = Control()
    control.lose = "begin"
    with pytest.raises(ServerTimeoutError):
        server.begin("token", "hash", lease_s=1)
    assert control.open
    server.abort("token")
    assert not control.open
    with pytest.raises(ServerTimeoutError):
        server.begin("token", "hash", lease_s=1)
    control.lose = ""
    server.begin("token", "hash", lease_s=1)
    assert control.calls[-2:] == ["end", "begin"]
