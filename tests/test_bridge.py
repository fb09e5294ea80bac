"""The whole path in one process: what the servers hold, and what a failure leaves behind."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp8bridge
from fp8bridge import LoopbackServer, ServerLayout
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.config import RULES
from fp8bridge.errors import (
    ConfigError,
    EmptyModelError,
    LayoutError,
    NonFiniteError,
    PlanError,
    ServerError,
    ServerMismatchError,
    ServerUnreachableError,
    VerifyError,
    VersionError,
)

from .support import (
    FP8_CONFIG,
    FP8_LAYOUT,
    QUANT,
    SplitSource,
    ZmqThreadServer,
    assert_same_bits,
    expected_wire,
    run_ranks,
    tiny_model,
)


def loopback(name="a", **options):
    return LoopbackServer(name, layout=options.pop("layout", FP8_LAYOUT), **options)


def connect(servers, model=None, config=FP8_CONFIG, **options):
    source = StateDictSource(model if model is not None else tiny_model(), config)
    return fp8bridge.connect(source, servers, **{"transport": "loopback", "bucket_nbytes": 60_000} | options)


# --- right bytes


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_reference_bits_on_every_server(rule):
    servers = [loopback("a"), loopback("b")]
    with connect(servers, rule=rule) as bridge:
        report = bridge.update_weights(version=3)
    for server in servers:
        assert_same_bits(server.tensors, expected_wire(tiny_model(), rule=rule))
        assert (server.weight_version, server.paused) == ("3", False)
    assert report.rule == rule


def test_an_unquantized_server_gets_the_trainers_bytes():
    plain = {"torch_dtype": "bfloat16"}
    server = loopback(layout=ServerLayout.from_hf_config(plain))
    with connect([server], config=plain) as bridge:
        bridge.update_weights(version=1)
    assert_same_bits(server.tensors, tiny_model())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 4),
    bucket_nbytes=st.integers(1, 300_000),
    rule=st.sampled_from(RULES),
    shapes=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_any_split_over_any_ranks_and_any_bucket_size_gives_the_reference(
    monkeypatch, seed, ranks, bucket_nbytes, rule, shapes
):
    """Real ZMQ: each rank sends its share, both servers end with the same, expected bits."""
    model = tiny_model(layers=1, hidden=shapes[0], ffn=shapes[1], seed=seed)
    servers = [ZmqThreadServer(n, layout=FP8_LAYOUT) for n in ("a", "b")]

    def work(rank):
        source = SplitSource(model, rank, ranks, seed)
        with fp8bridge.connect(source, servers, bucket_nbytes=bucket_nbytes, rule=rule) as bridge:
            report = bridge.update_weights(version=1)
            bridge.verify()
            return report, bridge.plan.hash

    results = run_ranks(ranks, work, monkeypatch)
    assert not [r for r in results if isinstance(r, Exception)], results
    assert len({plan_hash for _, plan_hash in results}) == 1, "the plan is the same on every rank"
    for server in servers:
        assert_same_bits(server.tensors, expected_wire(model, rule=rule))
        assert server.weight_version == "1"


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_trainers_fp8_arrives_byte_for_byte_from_any_split(monkeypatch, ranks):
    """Codes and scales are tensors like others; nothing is quantized again."""
    model = expected_wire(tiny_model(), rule="te")
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)

    def work(rank):
        with fp8bridge.connect(SplitSource(model, rank, ranks, seed=3), [server], bucket_nbytes=50_000) as bridge:
            bridge.update_weights(version=1)
            return bridge.plan.summary()["actions"]

    (actions, *_) = run_ranks(ranks, work, monkeypatch)
    assert "quantize" not in actions
    assert_same_bits(server.tensors, model)


def test_fp8_with_nan_codes_or_scales_is_refused():
    model = expected_wire(tiny_model())
    server = loopback()
    with connect([server], model) as bridge:
        codes = model["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)
        kept, codes[3, 7] = int(codes[3, 7]), 0xFF
        with pytest.raises(NonFiniteError, match=r"up_proj\.weight has 1 NaN"):
            bridge.update_weights(version=1)
        codes[3, 7] = kept
        bridge.update_weights(version=1)


def test_scales_that_are_no_powers_of_two_do_not_go_to_a_server_that_wants_those():
    config = {"quantization_config": QUANT | {"scale_fmt": "ue8m0"}}
    layout = ServerLayout.from_hf_config(config)
    for rule, fine in (("te_pow2", True), ("sglang", False)):
        server = loopback(layout=layout)
        with connect([server], expected_wire(tiny_model(), rule=rule), config) as bridge:
            if fine:
                bridge.update_weights(version=1)
                continue
            with pytest.raises(LayoutError, match="no powers of two"):
                bridge.update_weights(version=1)
            assert server.weight_version == "default"


def test_an_update_carries_the_weights_of_now_and_parameters_are_not_touched():
    model = tiny_model()
    server = loopback()
    with connect([server], model) as bridge:
        bridge.update_weights(version=1)
        plan = bridge.plan
        model["model.layers.0.mlp.up_proj.weight"].mul_(3)
        kept = {n: t.clone() for n, t in model.items()}
        bridge.update_weights(version=2)
        assert bridge.plan is plan
    assert_same_bits(model, kept)
    assert_same_bits(server.tensors, expected_wire(model))


def test_the_servers_layout_is_adopted_when_the_trainers_config_has_none():
    server = loopback()
    with connect([server], config={"torch_dtype": "bfloat16"}) as bridge:
        bridge.update_weights(version=1)
    assert_same_bits(server.tensors, expected_wire(tiny_model()))


def test_report_has_stages_bytes_and_servers_and_is_json():
    seen = []
    with connect([loopback("a"), loopback("b")]) as bridge:
        report = bridge.update_weights(version=1, on_progress=lambda done, total: seen.append((done, total)))
        assert bridge.verify() == {"a": len(expected_wire(tiny_model())), "b": len(expected_wire(tiny_model()))}
    data = json.loads(json.dumps(report.as_dict()))
    assert data["nbytes"] == bridge.plan.nbytes
    assert set(data["stages"]) == {"check", "begin", "open", "gather", "pack", "wire", "commit"}
    assert all(s["min"] <= s["median"] <= s["max"] for s in data["stages"].values())
    seconds = data["servers"]["a"].pop("seconds")
    assert data["servers"]["a"] == {"state": "healthy", "version": 1, "reason": "", "load_way": ""}
    assert set(seconds) == set(data["server_stages"]) == {"load", "commit", "paused"}
    assert 0 < seconds["load"] < seconds["paused"] <= data["paused_s"] < data["seconds"]
    assert data["nbytes_sent"] == 2 * data["nbytes"]
    assert data["gbytes_per_s"] == pytest.approx(data["nbytes_sent"] / data["seconds"] / 1e9)
    assert set(data["stage_gbytes_per_s"]) == {"gather", "pack", "send"}
    assert data["plan_s"] > 0
    assert data["extra_nbytes"]["max"] > 0
    assert "traces" not in data
    assert report.traces == (), "kept only where a trace is asked for"
    assert seen == [(i + 1, report.buckets) for i in range(report.buckets)]


def test_memory_is_two_buckets_whatever_the_model():
    model = tiny_model(layers=6)
    with connect([loopback()], model, bucket_nbytes=130_000) as bridge:
        report = bridge.update_weights(version=1)
    assert report.buckets > 4
    assert report.extra_nbytes.max <= 2 * 130_000


def test_memory_is_two_buckets_and_the_largest_tensor_where_tensors_are_larger_than_a_bucket():
    model = tiny_model(layers=3) | {"model.embed_tokens.weight": torch.randn(500, 192).bfloat16()}
    model["lm_head.weight"] = torch.randn(510, 192).bfloat16()
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with connect([server], model, transport="zmq", bucket_nbytes=70_000) as bridge:
        for version in (1, 2):
            report = bridge.update_weights(version=version)
            model["model.norm.weight"].mul_(2)
    assert len([n for n in report.fallbacks if n.startswith("oversized")]) == 2
    assert 510 * 192 * 2 < report.extra_nbytes.max <= 2 * 70_000 + 510 * 192 * 2
    model["model.norm.weight"].div_(2)
    assert_same_bits(server.tensors, expected_wire(model))


# --- bad input: refused, and nothing is sent


def assert_untouched(server, old, version="default"):
    assert_same_bits(server.tensors, old)
    assert (server.weight_version, server.paused) == (version, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_nan_and_inf_stop_the_update_by_name_before_anything_is_sent(name, value):
    model = tiny_model()
    old = expected_wire(tiny_model(seed=9))
    server = loopback(tensors=dict(old))
    with connect([server], model) as bridge:
        calls = list(server.calls)
        model[name].view(-1)[-1] = value
        with pytest.raises(NonFiniteError, match=name) as caught:
            bridge.update_weights(version=1)
        assert caught.value.tensor == name
        assert server.calls == calls, "no server heard of it"
        assert_untouched(server, old)
        model[name].view(-1)[-1] = 0
        bridge.update_weights(version=1)
    assert_same_bits(server.tensors, expected_wire(model))


@pytest.mark.parametrize("version", [0, 4, 5])
def test_a_version_must_grow(version):
    server = loopback()
    with connect([server]) as bridge:
        bridge.update_weights(version=5)
        calls = list(server.calls)
        with pytest.raises(VersionError, match="not larger than the last one, 5"):
            bridge.update_weights(version=version)
        assert server.calls == calls


@pytest.mark.parametrize("version", [-1, 1.0, "2", True, None])
def test_a_version_must_be_a_whole_number(version):
    with connect([loopback()]) as bridge, pytest.raises(VersionError, match="integer"):
        bridge.update_weights(version=version)


def test_a_version_below_a_servers_own_is_refused_by_server():
    server = loopback()
    server.weight_version = "17"
    with connect([server]) as bridge:
        with pytest.raises(VersionError, match="a already claims version 17"):
            bridge.update_weights(version=17)
        bridge.update_weights(version=18)


def test_empty_model():
    with pytest.raises(EmptyModelError):
        connect([loopback()], {})


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"torch_dtype": "bfloat16"}, "serves unquantized bfloat16"),
        ({"quantization_config": QUANT | {"weight_block_size": [64, 64]}}, r"block: \[128, 128\] != \[64, 64\]"),
        ({"quantization_config": QUANT | {"scale_fmt": "ue8m0"}}, "scale_format"),
    ],
)
def test_a_server_of_another_layout_is_refused_by_name(layout, says):
    with pytest.raises(ServerMismatchError, match=says) as caught:
        connect([loopback("good"), loopback("odd", layout=ServerLayout.from_hf_config(layout))])
    assert caught.value.server == "odd"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight bfloat16 .* is not on the server"),
        (lambda t: t.update(extra=torch.zeros(2)), "extra float32 .* not in the update"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3).bfloat16()}), r"model.norm.weight is bfloat16 \[3\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(192)}), "model.norm.weight is float32"),
    ],
)
def test_a_difference_in_name_shape_or_dtype_is_refused_at_connect(change, says):
    tensors = expected_wire(tiny_model())
    change(tensors)
    server = loopback(tensors=tensors)
    with pytest.raises(ServerMismatchError, match=says):
        connect([server])
    assert server.calls == ["info", "preflight"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_nbytes": 0}, "bucket_nbytes must be a positive integer, got 0"),
        ({"bucket_nbytes": -5}, "got -5"),
        ({"bucket_nbytes": 1.5}, "got 1.5"),
        ({"transport": "carrier-pigeon"}, "transport must be one of zmq, nccl, ipc, loopback; got 'carrier-pigeon'"),
        ({"rule": "round"}, "rule must be one of sglang, te, te_pow2, ue8m0; got 'round'"),
        ({"bucket_timeout_s": 0}, "bucket_timeout_s must be a positive number"),
        ({"min_healthy": 3}, "min_healthy is 3, but there are 1 servers"),
        ({"min_healthy": 0}, "min_healthy must be a positive integer"),
        ({"buckets": 3}, "unexpected keyword argument 'buckets'"),
        ({"transport": "zmq", "host": "10.0.0.1"}, "not loopback"),
        ({"pause_mode": "stop"}, "pause_mode must be one of"),
    ],
)
def test_a_wrong_option_is_refused_by_field(options, says):
    with pytest.raises(ConfigError, match=says):
        connect([loopback()], **options)


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ([], "at least one URL"),
        ("http://127.0.0.1:1", "at least one URL"),
        (["127.0.0.1:30000"], "give http://host:port"),
        (["http://127.0.0.1:1/", "http://127.0.0.1:1"], "given twice"),
    ],
)
def test_a_wrong_list_of_servers_is_refused(servers, says):
    with pytest.raises(ConfigError, match=says):
        connect(servers, transport="zmq")


def test_a_url_cannot_be_reached_by_loopback():
    with pytest.raises(ConfigError, match="use transport='zmq'"):
        connect(["http://127.0.0.1:1"])


def test_an_unreachable_server_is_named():
    with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:1 is not reachable"):
        connect(["http://127.0.0.1:1"], transport="zmq")


@pytest.mark.parametrize(
    "changed",
    [torch.ones(191).bfloat16(), torch.ones(193).bfloat16(), torch.ones(192), torch.ones(192, 2).bfloat16()],
    ids=["shrunk", "grown", "another dtype", "another rank"],
)
def test_a_model_that_changed_since_connect_is_refused_by_name_before_anything_is_sent(changed):
    model = tiny_model()
    server = loopback()
    with connect([server], model) as bridge:
        bridge.update_weights(version=1)
        calls = list(server.calls)
        model["model.norm.weight"] = changed
        with pytest.raises(PlanError, match=r"model\.norm\.weight on rank 0 is now .*connect again"):
            bridge.update_weights(version=2)
        assert server.calls == calls
        model["model.norm.weight"] = torch.full((192,), 2.0).bfloat16()
        bridge.update_weights(version=2)
    assert_same_bits(server.tensors, expected_wire(model))


def test_odd_tensors_arrive_as_they_are():
    """Empty, scalar, strided, expanded, transposed and shared tensors; one-row and one-column matrices."""
    base = torch.randn(300, 400).bfloat16()
    model = {
        "model.layers.0.mlp.up_proj.weight": base[::2, 10:210],
        "model.layers.0.mlp.down_proj.weight": base.t(),
        "model.layers.0.mlp.gate_proj.weight": base[:1].expand(150, 400),
        "model.layers.1.mlp.up_proj.weight": base[:, 3:4],
        "model.layers.1.mlp.down_proj.weight": base[5:6],
        "model.layers.1.mlp.gate_proj.weight": base,
        "model.layers.2.mlp.up_proj.weight": base,
        "model.layers.2.mlp.down_proj.weight": base[:0],
        "model.layers.2.mlp.down_proj.bias": base[0, :0],
        "model.scalar": base[0, 0],
        "model.conv": base[:, :24].reshape(300, 2, 3, 4),
    }
    server = loopback()
    with connect([server], model) as bridge:
        bridge.update_weights(version=1)
        assert bridge.verify()
    expected = expected_wire(model)
    expected["model.layers.2.mlp.down_proj.weight_scale_inv"] = torch.zeros(0, 4)  # no rows, but ceil(400 / 128)
    assert_same_bits(server.tensors, expected)


# --- a server dies


@pytest.mark.parametrize("bucket", [0, 2, -1])
def test_a_dead_server_is_fenced_the_other_commits_and_it_comes_back_by_admit(bucket):
    good, bad = loopback("good"), loopback("bad")
    with connect([good, bad]) as bridge:
        bridge.update_weights(version=1)
        old = dict(bad.tensors)
        bad.fail_at_bucket = bucket % len(bridge.plan.manifest.buckets)
        report = bridge.update_weights(version=2)
        assert report.fenced == {"bad": "bad is not reachable (it was told to die)"}
        assert (good.weight_version, bad.weight_version) == ("2", "1")
        assert_same_bits(bad.tensors, old)
        assert bridge.update_weights(version=3).servers["bad"].state == "fenced", "out until it is admitted"
        with pytest.raises(ServerUnreachableError):
            bridge.admit("bad")
        bad.revive()
        bridge.admit("bad")
        assert bridge.servers["bad"].version is None
        report = bridge.update_weights(version=4)
        assert not report.fenced
        assert bad.weight_version == "4"
        assert bridge.verify().keys() == {"good", "bad"}


def test_below_min_healthy_no_server_has_the_version_and_the_survivor_serves():
    model = tiny_model()
    good, bad = loopback("good"), loopback("bad", fail_at_bucket=1)
    with connect([good, bad], model, min_healthy=2) as bridge:
        old = dict(good.tensors)
        with pytest.raises(ServerUnreachableError, match="bad"):
            bridge.update_weights(version=1)
        assert_untouched(good, old)
        assert bridge.servers["good"].state == "healthy"
        assert bridge.servers["bad"].state == "fenced"
        with pytest.raises(ServerError, match=r"1 healthy servers, 2 are needed .*admit"):
            bridge.update_weights(version=1)
        bad.revive()
        bridge.admit("bad")
        bridge.update_weights(version=1)
    assert good.weight_version == bad.weight_version == "1"


def test_a_new_server_joins_by_admit():
    first, late = (ZmqThreadServer(n, layout=FP8_LAYOUT) for n in ("first", "late"))
    with connect([first], transport="zmq") as bridge:
        bridge.update_weights(version=1)
        bridge.admit(late)
        assert bridge.servers["late"].version is None
        bridge.update_weights(version=2)
    assert_same_bits(late.tensors, expected_wire(tiny_model()))


def test_a_new_server_of_another_layout_is_not_admitted():
    odd = ZmqThreadServer("odd", layout=ServerLayout.from_hf_config({"torch_dtype": "bfloat16"}))
    with connect([ZmqThreadServer("first", layout=FP8_LAYOUT)], transport="zmq") as bridge:
        with pytest.raises(ServerMismatchError, match="odd serves unquantized"):
            bridge.admit(odd)
        assert "odd" not in bridge.servers
        bridge.update_weights(version=1)


def test_a_closed_bridge_says_so():
    bridge = connect([loopback()])
    bridge.close()
    bridge.close()
    for use in (lambda: bridge.update_weights(version=1), bridge.verify, lambda: bridge.admit("a")):
        with pytest.raises(ConfigError, match="closed; connect again"):
            use()


def test_a_second_update_at_the_same_time_is_refused():
    server = loopback()
    refused = []

    def again(done, total):
        with pytest.raises(ConfigError, match="already running") as caught:
            bridge.update_weights(version=2)
        refused.append(caught.value)

    with connect([server]) as bridge:
        bridge.update_weights(version=1, on_progress=again)
    assert refused
    assert server.weight_version == "1"


def test_keys_do_not_show():
    assert "hush" not in repr(fp8bridge.BridgeConfig(api_key="hush"))


def test_verify_names_the_tensor_that_differs():
    server = loopback()
    with connect([server]) as bridge:
        with pytest.raises(VerifyError, match="no update has been made"):
            bridge.verify()
        bridge.update_weights(version=1)
        server.tensors["model.norm.weight"][0] += 1
        with pytest.raises(VerifyError, match=r"a holds other bytes .* model\.norm\.weight"):
            bridge.verify()
