"""The model of an update's seconds: each link slows exactly what goes over it, and stages overlap."""

import time
from dataclasses import replace

import pytest

from fp8bridge.config import BridgeConfig
from fp8bridge.errors import ConfigError
from fp8bridge.planner import make_plan
from fp8bridge.predict import Links, predict
from fp8bridge.types import Shard, TensorMeta

from .support import FP8_LAYOUT

GB = 1e9
FREE = Links(wire=1e9, gather=1e9, copy=1e9, bucket_s=0.0, fixed_s=0.0)
"""Everything is next to instant."""


def plan_of(ranks=1, each=4, *, split=False, bucket_nbytes=1):
    """Norm-like copies of a million bytes: `each` on every rank, or cut over all of them."""
    described = [([], []) for _ in range(ranks)]
    for i in range(ranks * each):
        meta = TensorMeta(f"model.layers.{i}.norm.weight", (500_000,), "bfloat16")
        for rank in range(ranks) if split else (i % ranks,):
            rows = 500_000 // ranks if split else 500_000
            at = rank * rows if split else 0
            described[rank][0].append(meta)
            described[rank][1].append(Shard(meta.name, rank, meta.name, rows, 1, dst_row=at))
    return make_plan(described, FP8_LAYOUT, BridgeConfig(bucket_nbytes=bucket_nbytes))


def seconds(plan, servers=1, **links):
    return predict(plan, replace(FREE, **links), servers=servers).seconds


def test_one_link_at_a_time_is_bytes_over_bandwidth():
    plan = plan_of(each=4)
    assert plan.nbytes == 4e6
    assert seconds(plan, wire=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, load=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, ingest=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, fabric=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, copy=1.0) == pytest.approx(4e-3 * 3, rel=1e-3), "read for the check, read and written to pack"
    assert seconds(plan, check=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, fixed_s=0.5) == pytest.approx(0.5, rel=1e-3)
    assert seconds(plan, bucket_s=0.1) == pytest.approx(0.4, rel=1e-3)


def test_servers_share_a_senders_wire_and_the_fabric_but_not_each_others_ingest():
    plan = plan_of(each=4)
    assert seconds(plan, 3, wire=1.0) == pytest.approx(12e-3, rel=1e-3)
    assert seconds(plan, 3, wire=1.0, broadcast=True) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, 3, ingest=1.0) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(plan, 3, fabric=1.0) == pytest.approx(12e-3, rel=1e-3)


def test_senders_work_side_by_side_until_they_meet_in_a_link():
    one, four = plan_of(1, 4), plan_of(4, 1)
    assert one.nbytes == four.nbytes
    assert seconds(four, wire=1.0) == pytest.approx(seconds(one, wire=1.0) / 4, rel=1e-3)
    assert seconds(four, ingest=1.0) == pytest.approx(seconds(one, ingest=1.0), rel=1e-3)


def test_bytes_between_ranks_cost_the_gather_link_alone():
    whole, cut = plan_of(2, 4), plan_of(2, 4, split=True)
    assert seconds(whole, gather=1.0) < 1e-6
    moved = cut.gathered_nbytes() / 2  # each rank sends as much as it receives, at the same time
    assert seconds(cut, gather=1.0) == pytest.approx(moved / GB, rel=1e-3)


def test_stages_overlap_and_the_slowest_decides():
    plan = plan_of(each=10)
    links = replace(FREE, wire=1.0, load=2.0, fixed_s=0.0)
    said = predict(plan, links)
    assert said.bottleneck == "wire"
    assert said.wire_s == pytest.approx(10e-3, rel=1e-3)
    assert said.server_s == pytest.approx(5e-3, rel=1e-3)
    assert said.seconds == pytest.approx(10e-3 + 0.5e-3, rel=1e-3), "only the last bucket's load shows"
    assert predict(plan, replace(links, load=0.5)).bottleneck == "server"


def test_only_two_buckets_are_in_flight():
    """Packing cannot run ahead of a slow server; what it could hide stays hidden."""
    plan = plan_of(each=6)
    slow = predict(plan, replace(FREE, load=1.0, copy=6.0))
    packs = 6 * 2e6 / 6e9
    assert slow.seconds == pytest.approx(6e-3 + packs / 6 + slow.check_s, rel=1e-3)


def test_bytes_over_links_are_counted():
    said = predict(plan_of(2, 3, split=True), FREE, servers=4).link_nbytes
    assert said["each_server_in"] == 6e6
    assert said["all_senders_out"] == 24e6
    assert said["busiest_sender_out"] == 12e6
    assert said["busiest_rank_gather_out"] == said["busiest_rank_gather_in"] == 1.5e6


def test_links_are_read_from_text():
    assert Links.parse("wire=50,ingest=100,broadcast=1") == Links(wire=50.0, ingest=100.0, broadcast=True)
    assert Links.parse("") == Links()
    for text, says in (
        ("wires=5", "wires=5"),
        ("wire", "wire"),
        ("wire=fast", "needs a number"),
        ("load=0", "> 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            Links.parse(text)


def test_a_plan_of_kimi_k2_on_256_ranks_takes_seconds():
    """CPU seconds, so that a busy machine does not count; with a third to spare for a slow one."""
    from fp8bridge.adapters.megatron_layout import megatron_shards
    from fp8bridge.cli.plan import _by_rank
    from fp8bridge.models import config_of
    from fp8bridge.topology import TrainerShape

    shape = TrainerShape.parse("tp8pp8dp4ep32etp1")
    start = time.process_time()
    metas, shards = megatron_shards(config_of("Kimi-K2"), tp=8, pp=8, dp=4, ep=32, etp=1, layers=shape.chunks(61))
    plan = make_plan(_by_rank(metas, shards, ranks=shape.ranks), FP8_LAYOUT, BridgeConfig())
    said = predict(plan, Links(), servers=16)
    assert time.process_time() - start < 15
    assert len(plan.items) == len(metas) > 69_000
    assert 1.02e12 < plan.nbytes < 1.04e12
    assert said.link_nbytes["busiest_sender_out"] < 2 * said.link_nbytes["all_senders_out"] / shape.ranks
