"""Live Megatron-Core models: what all ranks describe, put together, is the model transformers runs."""

import pytest
import torch

from fp8bridge.adapters.megatron_layout import megatron_shards
from tests.ports import free_port

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see README, Install")

from . import worlds

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Every scenario, played once by four processes; spawn raises what a rank raised."""
    port = free_port()
    path = tmp_path_factory.mktemp("worlds") / "found.pt"
    torch.multiprocessing.spawn(worlds.run, (port, str(path)), nprocs=worlds.WORLD)
    return torch.load(path, weights_only=False)


def transformers_model(config, tensors):
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "torch_dtype"})
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    result = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert (result.missing_keys, result.unexpected_keys) == (tied, [])
    return model


@pytest.mark.parametrize("name", worlds.EXPORTS)
def test_assembled_tensors_are_the_one_process_model(found, name):
    config = worlds.EXPORTS[name][0]
    tensors, oracle = found[name]["tensors"], found["oracle"][config["model_type"]]
    assert sorted(tensors) == sorted(oracle)
    assert [n for n in oracle if not torch.equal(tensors[n], oracle[n])] == []


@pytest.mark.parametrize("name", worlds.EXPORTS)
def test_live_models_describe_what_the_plan_computes(found, name):
    config, tp, pp, vpp = worlds.EXPORTS[name]
    dp = worlds.WORLD // (tp * pp)
    metas, shards = megatron_shards(config, tp=tp, pp=pp, vpp=vpp, dp=dp, dtype="float32", spec="local")
    assert found[name]["metas"] == set(metas)
    live = found[name]["shards"]
    assert len(live) == len(set(live))
    assert set(live) == set(shards)


@pytest.mark.parametrize("name", worlds.EXPORTS)
def test_transformers_computes_the_same_logits(found, name):
    model = transformers_model(worlds.EXPORTS[name][0], found[name]["tensors"])
    with torch.no_grad():
        expected = model(worlds.TOKENS[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(found[name]["logits"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", worlds.EXPORTS)
def test_a_model_filled_from_the_tensors_computes_the_same(found, name):
    assert torch.equal(found[name]["refilled"], found[name]["logits"])


@pytest.mark.parametrize("name", worlds.EXPORTS)
def test_padding_is_never_sent_and_tied_embeddings_once(found, name):
    # Before the export, padding rows and the last stage's tied copy were filled with garbage.
    config, _, pp, _ = worlds.EXPORTS[name]
    tensors, shards = found[name]["tensors"], found[name]["shards"]
    assert ("lm_head.weight" in tensors) != config["tie_word_embeddings"]
    assert [n for n, tensor in tensors.items() if (tensor == worlds.GARBAGE).any()] == []
    first_stage = set(range(worlds.WORLD // pp))
    assert {s.rank for s in shards if s.tensor == "model.embed_tokens.weight"} <= first_stage


def test_the_demo_trainer_learns_and_repeats_itself(found):
    first, second = found["training"]["runs"]
    assert first["losses"][-1] < first["losses"][0] - 0.5
    assert first["losses"] == second["losses"]
    assert all(torch.equal(first["tensors"][n], second["tensors"][n]) for n in first["tensors"])
    assert {meta.dtype for meta in first["metas"]} == {"bfloat16"}
    losses, own = zip(*found["training"]["everywhere"], strict=True)
    assert all(x == losses[0] for x in losses)
    assert all(x == own[0] for x in own)


def test_logprobs_are_those_of_the_given_weights(found):
    run, tokens = found["training"]["runs"][0], found["training"]["tokens"]
    assert run["given"] == run["own"]
    model = transformers_model(worlds.TINY_QWEN3, run["tensors"])
    ids = torch.tensor(tokens)
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(run["own"]), expected, atol=1e-4, rtol=0)


def test_pending_parameter_gathers_are_finished_before_reading(found):
    plain, overlapped = found["overlap"][False], found["overlap"][True]
    assert not plain["stale"]
    assert overlapped["stale"], "the scenario must have gathers pending, else it shows nothing"
    assert all(torch.equal(plain["tensors"][n], overlapped["tensors"][n]) for n in plain["tensors"])
    assert plain["losses"] == overlapped["losses"]
