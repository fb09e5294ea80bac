"""The plan: complete, deterministic, in SGLang's byte layout."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bridge import BridgeConfig, Shard, TensorMeta
from fp8bridge.errors import ConfigError, CoverageError, EmptyModelError, LayoutError, PlanError, WireError
from fp8bridge.plan import Manifest
from fp8bridge.planner import make_plan
from fp8bridge.types import ITEMSIZE

from .support import FP8_LAYOUT, SplitSource, tiny_model


def describe(model=None, ranks=3, seed=0):
    model = model or tiny_model()
    return [SplitSource(model, r, ranks, seed).describe() for r in range(ranks)]


def plan_of(described=None, **config):
    return make_plan(described or describe(), FP8_LAYOUT, BridgeConfig(**config))


def whole(name, shape=(256, 128), rank=0, dtype="bfloat16"):
    meta = TensorMeta(name, shape, dtype)
    return [meta], [Shard(name, rank, name, *meta.matrix)]


@given(seed=st.integers(0, 10_000), ranks=st.integers(1, 5), bucket_nbytes=st.integers(1, 400_000))
def test_every_plan_is_complete_aligned_and_bounded(seed, ranks, bucket_nbytes):
    model = tiny_model(layers=1)
    plan = plan_of(describe(model, ranks, seed), bucket_nbytes=bucket_nbytes)
    assert {i.meta.name for i in plan.items} == set(model)
    for bucket in plan.manifest.buckets:
        end, itemsize = 0, 8
        for entry in bucket.entries:
            assert entry.offset == end
            assert entry.offset % ITEMSIZE[entry.dtype] == 0
            assert ITEMSIZE[entry.dtype] <= itemsize, "larger item sizes first"
            end, itemsize = end + entry.nbytes, ITEMSIZE[entry.dtype]
        assert end == bucket.nbytes
        names = {e.name for e in bucket.entries}
        assert {n.removesuffix("_scale_inv") for n in names} <= names, "pairs stay together"
        items = plan.items_of(bucket.index)
        assert bucket.nbytes <= bucket_nbytes or len(items) == 1
    for item in plan.items:
        assert sum(s.rows * s.cols for s in item.shards) == item.meta.numel
        assert plan.manifest.buckets[item.bucket].owner == item.owner
        assert any(s.rank == item.owner for s in item.shards), "the sender holds some of it"
    for group in plan.rounds:
        owners = [plan.manifest.buckets[i].owner for i in group]
        assert len(set(owners)) == len(owners)
    assert sorted(i for group in plan.rounds for i in group) == list(range(len(plan.manifest.buckets)))


def test_the_hash_is_the_same_in_another_process_and_for_any_order_of_description():
    described = describe()
    shuffled = [(list(reversed(m)), list(reversed(s))) for m, s in described]
    code = "from tests.test_planner import plan_of; print(plan_of(bucket_nbytes=100_000).hash)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert plan_of(described, bucket_nbytes=100_000).hash == other
    assert plan_of(shuffled, bucket_nbytes=100_000).hash == other


def test_the_hash_changes_with_whatever_matters():
    base = plan_of(bucket_nbytes=100_000)
    others = [
        plan_of(bucket_nbytes=50_000),
        plan_of(bucket_nbytes=100_000, rule="te"),
        plan_of(bucket_nbytes=100_000, senders="first"),
        plan_of(describe(seed=1), bucket_nbytes=100_000),
        plan_of(describe(tiny_model(ffn=321)), bucket_nbytes=100_000),
    ]
    assert len({base.hash, *(p.hash for p in others)}) == 6


def test_bytes_are_spread_over_the_ranks_that_hold_them():
    described = [([], []) for _ in range(4)]
    for i in range(40):
        for rank in (i % 2, 2 + i % 2):
            metas, shards = whole(f"model.layers.{i}.mlp.up_proj.weight", rank=rank)
            described[rank][0].extend(metas)
            described[rank][1].extend(shards)
    by_sender = plan_of(described).summary()["nbytes_by_sender"]
    assert set(by_sender) == {"0", "1", "2", "3"}
    assert len(set(by_sender.values())) == 1
    assert plan_of(described).gathered_nbytes() == 0, "a replica sends its own copy"
    assert list(plan_of(described, senders="first").summary()["nbytes_by_sender"]) == ["0"]


def test_siblings_that_the_server_joins_share_a_bucket():
    described = [([], [])]
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
        metas, shards = whole(f"model.layers.0.self_attn.{name}.weight")
        described[0][0].extend(metas)
        described[0][1].extend(shards)
    plan = plan_of(described, bucket_nbytes=1)
    bucket = {i.meta.name.split(".")[-2]: i.bucket for i in plan.items}
    assert bucket["q_a_proj"] == bucket["kv_a_proj_with_mqa"] != bucket["o_proj"]


def cut(rows, *, shape=(300, 256), name="model.layers.0.mlp.up_proj.weight"):
    """Two ranks, cut at row `rows`; rank 0 has the larger part of everything else, so it sends."""
    meta = TensorMeta(name, shape, "bfloat16")
    height = shape[0] - rows
    first = Shard(name, 0, "p", rows, shape[1])
    return [([meta], [first]), ([meta], [Shard(name, 1, "p", height, shape[1], dst_row=rows)])]


@pytest.mark.parametrize(("rows", "aligned"), [(128, True), (256, True), (1, False), (129, False), (299, False)])
def test_shards_cut_on_blocks_are_quantized_before_they_travel_and_others_are_named(rows, aligned):
    plan = plan_of(cut(rows))
    (item,) = plan.items
    assert item.at_source is aligned
    travels = (300 - rows) * 256
    scales = 4 * -(-(300 - rows) // 128) * 2
    assert plan.gathered_nbytes() == (travels + scales if aligned else 2 * travels)
    assert plan.saved_nbytes() == (travels - scales if aligned else 0)
    assert bool(plan.fallbacks()) is not aligned
    if not aligned:
        assert "gathered in bfloat16: model.layers.0.mlp.up_proj.weight" in plan.fallbacks()[0]
    assert ("quantized first: 1 tensors" in plan.preview()) is aligned


def test_what_is_whole_on_its_sender_is_no_gather_at_all():
    plan = plan_of([whole("model.layers.0.mlp.up_proj.weight"), ([], [])])
    assert not plan.items[0].at_source
    assert plan.gathered_nbytes() == 0
    assert not plan.fallbacks()


def fp8_pair(scale_shape=(2, 1), scale_dtype="float32", name="model.layers.0.mlp.up_proj.weight"):
    metas = [TensorMeta(name, (256, 128), "float8_e4m3fn"), TensorMeta(f"{name}_scale_inv", scale_shape, scale_dtype)]
    return [(metas, [Shard(m.name, 0, m.name, *m.matrix) for m in metas])]


def test_the_trainers_own_fp8_passes_through_with_its_scale_in_the_same_bucket():
    plan = plan_of(fp8_pair(), bucket_nbytes=1)
    assert [i.action for i in plan.items] == ["pass_through", "pass_through"]
    assert len(plan.manifest.buckets) == 1
    plain = plan_of([whole("model.layers.0.mlp.up_proj.weight")])
    assert plan.manifest.entries() == plain.manifest.entries(), "the server sees no difference"


@pytest.mark.parametrize(
    ("described", "says"),
    [
        (fp8_pair(scale_shape=(2, 4)), r"a scale of float32 \[2, 4\]"),
        (fp8_pair(scale_dtype="bfloat16"), r"a scale of bfloat16 \[2, 1\]"),
        ([(fp8_pair()[0][0][:1], fp8_pair()[0][1][:1])], "with no scale"),
        (fp8_pair(name="model.embed_tokens.weight"), "the server keeps it in bfloat16"),
    ],
)
def test_fp8_that_the_server_cannot_take_as_it_is(described, says):
    with pytest.raises(LayoutError, match=says):
        plan_of(described)


def test_blocks_that_no_kernel_makes_are_refused_before_anything_starts():
    from fp8bridge import ServerLayout

    with pytest.raises(LayoutError, match=r"scale blocks of \(64, 64\)"):
        make_plan([whole("a.weight")], ServerLayout(block=(64, 64)), BridgeConfig())


def test_an_oversized_tensor_gets_its_own_bucket_and_a_note():
    plan = plan_of([whole("model.layers.0.mlp.up_proj.weight")], bucket_nbytes=10)
    assert len(plan.manifest.buckets) == 1
    assert any("oversized" in f and "up_proj" in f for f in plan.fallbacks())


def test_empty_model():
    with pytest.raises(EmptyModelError, match="no tensors"):
        plan_of([([], []), ([], [])])


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0, 0, 100, 128)], r"cover 12800 of 32768"),
        ([(0, 0, 256, 128), (10, 0, 5, 128)], "overlap"),
        ([(0, 0, 257, 128)], "outside"),
        ([], "cover 0 of"),
        ([(0, 0, 128, 128), (128, 0, 128, 127)], "cover 32640 of 32768"),
    ],
)
def test_holes_and_overlaps_are_refused_by_name(boxes, message):
    meta = TensorMeta("model.layers.0.mlp.up_proj.weight", (256, 128), "bfloat16")
    shards = [Shard(meta.name, 0, "p", h, w, dst_row=r, dst_col=c) for r, c, h, w in boxes]
    with pytest.raises(CoverageError, match=message) as caught:
        plan_of([([meta], shards)])
    assert caught.value.tensor == meta.name


def test_ranks_that_disagree_are_refused_by_name():
    with pytest.raises(PlanError, match=r"ranks 0 and 1 disagree about w\.weight"):
        plan_of([whole("w.weight"), whole("w.weight", shape=(128, 128), rank=1)])


def test_a_cast_must_be_allowed_by_name_and_is_then_listed():
    described = [whole("model.norm.weight", shape=(64,), dtype="float32")]
    with pytest.raises(PlanError, match="allow_cast=True"):
        plan_of(described)
    plan = plan_of(described, allow_cast=True)
    assert plan.fallbacks() == ["cast: model.norm.weight (not a matrix; float32 -> bfloat16)"]
    assert "float32 -> bfloat16" in plan.preview()


def test_rules_and_layouts_that_cannot_agree():
    from fp8bridge import ServerLayout

    from .support import QUANT

    ue8m0 = ServerLayout.from_hf_config({"quantization_config": QUANT | {"scale_fmt": "ue8m0"}})
    described = [whole("model.layers.0.mlp.up_proj.weight")]
    assert make_plan(described, ue8m0, BridgeConfig()).rule == "ue8m0"
    assert make_plan(described, ue8m0, BridgeConfig(rule="te_pow2")).rule == "te_pow2"
    with pytest.raises(ConfigError, match="powers of two"):
        make_plan(described, ue8m0, BridgeConfig(rule="sglang"))
    plain = ServerLayout.from_hf_config({})
    assert make_plan(described, plain, BridgeConfig()).rule is None
    with pytest.raises(ConfigError, match="not quantized"):
        make_plan(described, plain, BridgeConfig(rule="te"))


def test_preview_shows_bytes_buckets_actions_and_prediction():
    text = plan_of(bucket_nbytes=100_000).preview(wire_gbytes_per_s=1.0, servers=2)
    for piece in ("buckets of at most", "quantize", "copy", "predicted wire time", "rule: sglang", "senders: rank"):
        assert piece in text


def test_predicted_seconds_is_the_busiest_senders_bytes():
    plan = plan_of([whole("model.layers.0.mlp.up_proj.weight")])
    assert plan.predicted_seconds(wire_gbytes_per_s=2.0, servers=3) == pytest.approx(plan.nbytes * 3 / 2e9)


def test_a_manifest_survives_json_with_its_hash():
    manifest = plan_of().manifest
    assert Manifest.from_dict(json.loads(json.dumps(manifest.as_dict()))) == manifest


LEAVES = st.none() | st.integers() | st.text() | st.booleans()
KEYS = st.sampled_from(["layout", "buckets", "block", "dtype", "entries"])


@given(data=st.recursive(LEAVES, lambda c: st.lists(c) | st.dictionaries(KEYS, c)))
def test_a_hostile_manifest_is_a_wire_error(data):
    with pytest.raises(WireError):
        Manifest.from_dict(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["buckets"][0].update(nbytes=d["buckets"][0]["nbytes"] + 1),
        lambda d: d["buckets"][0]["entries"][1].__setitem__(3, 1),
        lambda d: d["buckets"][0]["entries"][0].__setitem__(2, [-1, 4]),
        lambda d: d["buckets"][0]["entries"][0].__setitem__(1, "float64"),
        lambda d: d["buckets"][0].update(index=7),
        lambda d: d["buckets"][0]["entries"].append(d["buckets"][0]["entries"][0]),
        lambda d: d.pop("layout"),
    ],
)
def test_a_damaged_manifest_is_a_wire_error(damage):
    data = json.loads(json.dumps(plan_of().manifest.as_dict()))
    damage(data)
    with pytest.raises(WireError):
        Manifest.from_dict(data)
