"""Live Megatron models with experts, MLA, MTP: whatever the layout, the server holds the one-process model."""

import json

import pytest
import torch

from fp8bridge.adapters.megatron_layout import megatron_shards
from tests.ports import free_port
from tests.support import assert_same_bits, expected_wire

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see README, Install")

from . import moe_worlds
from .moe_models import CONFIGS, GARBAGE

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    port = free_port()
    path = tmp_path_factory.mktemp("moe") / "found.pt"
    torch.multiprocessing.spawn(moe_worlds.run, (port, str(path)), nprocs=moe_worlds.WORLD)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", moe_worlds.SCENARIOS)
def test_every_layout_gives_the_server_the_one_process_model(found, name):
    oracle = found["oracle"][moe_worlds.SCENARIOS[name][0]]
    assert_same_bits(found[name]["server"], expected_wire(oracle))
    assert [n for n, tensor in oracle.items() if (tensor == GARBAGE).any()] == []


@pytest.mark.parametrize("name", moe_worlds.SCENARIOS)
def test_live_models_describe_what_the_plan_computes(found, name):
    config, tp, pp, vpp, _, ep, etp, overrides = moe_worlds.SCENARIOS[name]
    first = overrides.get("num_layers_in_first_pipeline_stage")
    metas, shards = megatron_shards(
        CONFIGS[config],
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=moe_worlds.WORLD // (tp * pp),
        ep=ep,
        etp=etp,
        layers=None if first is None else [first, CONFIGS[config]["num_hidden_layers"] - first],
        spec="local",
        mtp=moe_worlds.has_mtp(CONFIGS[config]),
    )
    described = found[name]["described"]
    assert {meta for metas, _ in described for meta in metas} == set(metas)
    assert {shard for _, shards in described for shard in shards} == set(shards)


def test_experts_lie_where_the_model_s_own_groups_say(found):
    # parallel_state's groups were others by the time the source was made.
    assert_same_bits(found["groups"], expected_wire(found["oracle"]["qwen3_moe"]))


def test_pending_gathers_of_experts_are_finished_before_reading(found):
    plain, overlapped = found["overlap"][False], found["overlap"][True]
    assert plain["changed"] == []
    changed = overlapped["changed"]
    assert any(".experts." in name for name in changed), "no gather of experts was pending: the test shows nothing"
    assert any(".experts." not in name for name in changed)
    assert_same_bits(overlapped["server"], plain["server"])


@pytest.mark.parametrize("name", moe_worlds.FORWARD)
def test_transformers_computes_the_same_and_saves_the_same(found, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    tensors = found["transformers"][name]["tensors"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"torch_dtype": "float32"}))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])
    with torch.no_grad():
        expected = model.eval()(moe_worlds.TOKENS[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(found["transformers"][name]["logits"], expected, atol=2e-4, rtol=0)

    model.save_pretrained(tmp_path / "again")
    assert_same_bits(load_file(tmp_path / "again" / "model.safetensors"), tensors)


@pytest.mark.parametrize("name", moe_worlds.FORWARD)
def test_a_model_filled_from_the_tensors_computes_the_same(found, name):
    forward = found["transformers"][name]
    assert torch.equal(forward["refilled"], forward["logits"])
