"""What the framework adapters share, and the example of docs/frameworks/your-own.md."""

import dataclasses
import importlib
import sys
import warnings
from typing import NamedTuple

import pytest
import torch

from fp8bridge import BridgeConfig, LoopbackServer, connect
from fp8bridge.adapters import frameworks
from fp8bridge.adapters.feed import HeldServer, WeightFeed
from fp8bridge.adapters.state_dict import ExportSource, HandedSource
from fp8bridge.errors import ConfigError, ServerError, UnsupportedModelError

from ..frameworks.support import PAGES, snippets
from ..support import FP8_CONFIG, FP8_LAYOUT, assert_same_bits, expected_wire, run_ranks, tiny_model


def test_the_pages_own_adapter_works_and_is_as_short_as_it_says():
    code = snippets("your-own.md")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    scope = {}
    exec(code, scope)
    server, model = LoopbackServer(layout=FP8_LAYOUT), tiny_model()
    sync = scope["MyTrainerSync"]([server], FP8_CONFIG, transport="loopback").sync
    for version in (1, 2):
        model["model.norm.weight"].mul_(2)
        assert sync(model.items()).version == version
        assert_same_bits(server.tensors, expected_wire(model))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_keeps_a_share_and_nothing_crosses_between_ranks(size, monkeypatch):
    model = tiny_model()
    total = sum(tensor.nbytes for tensor in model.values())
    server = LoopbackServer(layout=FP8_LAYOUT)
    local = {}
    monkeypatch.setattr("fp8bridge.adapters.state_dict._world_size", lambda: size)
    monkeypatch.setattr("fp8bridge.adapters.state_dict._world_rank", lambda: local["rank"])

    def source(rank):
        local["rank"] = rank
        return ExportSource(model.items, FP8_CONFIG)

    sources = [source(rank) for rank in range(size)]

    def work(rank):
        with connect(sources[rank], [server] if rank == 0 else ["x"], transport="loopback", senders="first") as bridge:
            bridge.update_weights(version=1)
            return sum(tensor.nbytes for tensor in sources[rank]._kept.values())

    kept = run_ranks(size, work, monkeypatch)
    assert sum(kept) == total
    assert max(kept) - min(kept) <= max(tensor.nbytes for tensor in model.values())
    assert_same_bits(server.tensors, expected_wire(model))


def test_named_tuples_are_pairs_and_what_is_kept_lies_still():
    """Megatron-Bridge yields `HFWeightTuple(param_name, weight)`."""

    class HFWeightTuple(NamedTuple):
        param_name: str
        weight: torch.Tensor

    model, server = tiny_model(), LoopbackServer(layout=FP8_LAYOUT)
    source = ExportSource(lambda: (HFWeightTuple(*pair) for pair in model.items()), FP8_CONFIG)
    with connect(source, [server], transport="loopback") as bridge:
        before = [tensor.data_ptr() for tensor in source.live(list(model))]
        for version in (1, 2):
            model = {name: tensor * 2 for name, tensor in model.items()}
            bridge.update_weights(version=version)
            assert_same_bits(server.tensors, expected_wire(model))
        assert [tensor.data_ptr() for tensor in source.live(list(model))] == before, "no tables are made anew"


def test_tensors_are_copied_when_taken_and_read_to_the_end_even_when_wrong():
    source = HandedSource(FP8_CONFIG, alone=True)
    buffer = torch.ones(4, dtype=torch.bfloat16)

    def reused():
        for value, name in enumerate(("a", "b")):
            yield name, buffer.fill_(value)

    source.take(reused())
    assert [source.read(name)[0].item() for name in ("a", "b")] == [0.0, 1.0]
    seen = []

    def wrong():
        for name in ("a", "c", "b"):
            seen.append(name)
            yield name, buffer

    with pytest.raises(ConfigError, match=r"c is bfloat16 \[4\], was not there; a model that changed"):
        source.take(wrong())
    assert seen == ["a", "c", "b"], "other ranks take part in each"
    with pytest.raises(ConfigError, match="1 tensors are missing: b"):
        source.take([("a", buffer)])
    with pytest.raises(ConfigError, match="a is bfloat16.*was given already"):
        source.take([("a", buffer), ("a", buffer)])

    class Sliced(torch.Tensor):
        pass

    with pytest.raises(UnsupportedModelError, match="a is a Sliced; give plain tensors"):
        source.take([("a", buffer.as_subclass(Sliced))])


def test_a_server_that_fails_is_an_error_unless_fewer_are_asked_for():
    model = tiny_model()

    def feed(**settings):
        servers = [LoopbackServer(name, layout=FP8_LAYOUT) for name in "ab"]
        return WeightFeed(FP8_CONFIG, transport="loopback", **settings), servers

    strict, (first, second) = feed()
    second.fail_at_bucket = 0
    with pytest.raises(ServerError, match="b is not reachable"):
        strict.update(model.items(), [first, second])
    assert first.weight_version == "default"
    lenient, (first, second) = feed(min_healthy=1)
    second.fail_at_bucket = 0
    assert list(lenient.update(model.items(), [first, second]).fenced) == ["b"]
    assert first.weight_version == "1"


def test_a_held_server_is_left_paused_and_all_else_goes_to_it():
    inner = LoopbackServer(layout=FP8_LAYOUT)
    held = HeldServer(inner)
    inner.paused = True
    held.pause("retract", lease_s=1)
    held.flush_cache()
    held.resume()
    assert inner.paused
    assert inner.calls == ["flush_cache"], "an old cache is of old weights, whoever paused"
    assert held.take == inner.take


def test_verify_and_close_before_the_first_update():
    feed = WeightFeed(FP8_CONFIG)
    with pytest.raises(ConfigError, match="nothing to verify"):
        feed.verify()
    feed.close()
    with pytest.raises(
        ConfigError, match=f"nonsense: no field of BridgeConfig; there are {dataclasses.fields(BridgeConfig)[0].name}"
    ):
        WeightFeed(FP8_CONFIG, nonsense=1)


@pytest.mark.parametrize("entry", frameworks.FRAMEWORKS, ids=lambda entry: entry.name)
def test_every_framework_has_a_module_that_imports_without_it_and_a_page(entry):
    importlib.import_module(entry.adapter)
    text = (PAGES / f"{entry.page}.md").read_text(encoding="utf-8")
    assert entry.adapter.rpartition(".")[2] in text
    assert snippets(f"{entry.page}.md")
    assert f"[{entry.page}" in text or f"]({entry.page}.md)" in (PAGES / "index.md").read_text(encoding="utf-8")


def test_an_untested_version_is_said_plainly(monkeypatch):
    monkeypatch.setattr(frameworks, "installed", lambda entry: {"trl": "1.17.0", "slime": "0.2"}.get(entry.package))
    with pytest.warns(frameworks.UntestedVersionWarning, match=r"tested with trl >= 1.16, < 1.17 only; 1.17.0 is"):
        frameworks.warn_if_untested("TRL")
    with pytest.warns(frameworks.UntestedVersionWarning, match="published interface of slime only"):
        frameworks.warn_if_untested("slime")
    monkeypatch.setattr(frameworks, "installed", lambda entry: {"trl": "1.16.2rc1"}.get(entry.package))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frameworks.warn_if_untested("TRL")
        frameworks.warn_if_untested("slime")


def test_another_project_of_slimes_name_is_not_slime(monkeypatch, tmp_path):
    folder = tmp_path / "slime"
    info = tmp_path / "slime-1.0.dist-info"
    for made in (folder, info):
        made.mkdir()
    (folder / "__init__.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = frameworks.framework("slime")
    try:
        assert frameworks.installed(entry) is None
        (folder / "backends").mkdir()
        importlib.invalidate_caches()
        assert frameworks.installed(entry) == "1.0"
    finally:
        sys.modules.pop("slime", None)
